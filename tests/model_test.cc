#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/dtype.h"
#include "fake_model.h"
#include "model/cpu/experts.h"
#include "model/cuda/weight_layout.h"
#include "model/decoder.h"
#include "model/kv_cache.h"
#include "model/rope.h"
#include "model/weights.h"
#include "refusal.h"
#include "test_backend.h"

namespace phsa {
namespace {

LayerSettings Dense() {
  LayerSettings settings;
  settings.base.policy = Policy::kDense;
  return settings;
}

// Everything a test needs to run a model, in the order in which it must be made.
struct Runner {
  explicit Runner(const FakeModel& model, WeightsMode mode = WeightsMode::kF32, int32_t kv_type = PHSA_F32,
                  int32_t num_threads = 1, int32_t pages = 8, const LayerSettings& settings = Dense())
      : threads(num_threads),
        backend(TestBackend(model, mode, kv_type, 256, threads)),
        cache(TestCache(*backend, PageLayout(model.config(), settings, kv_type), pages)),
        decoder(model.config(), *backend, settings, threads),
        vocab(static_cast<size_t>(model.config().vocab_size)) {}

  // Logits of all tokens, read in chunks.
  std::vector<float> Read(Sequence& sequence, std::span<const int32_t> tokens, size_t chunk = 256) {
    std::vector<float> out;
    for (size_t first = 0; first < tokens.size(); first += chunk) {
      const BatchItem item{&sequence, tokens.subspan(first, std::min(chunk, tokens.size() - first)),
                           BatchItem::Logits::kAll};
      decoder.Step({&item, 1}, [&](int32_t, int32_t, const LogitsRow& logits) {
        out.insert(out.end(), logits.All().begin(), logits.All().end());
      });
    }
    return out;
  }

  ThreadPool threads;
  std::unique_ptr<ModelBackend> backend;
  KvCache cache;
  Decoder decoder;
  size_t vocab;
};

void ExpectChunksGiveTheBitsOfOnePass(Runner& runner, const std::vector<int32_t>& tokens) {
  Sequence whole(runner.cache);
  const std::vector<float> expected = runner.Read(whole, tokens);
  for (const size_t chunk : {1, 7, 64}) {
    Sequence sequence(runner.cache);
    EXPECT_TRUE(SameBits(runner.Read(sequence, tokens, chunk), expected)) << chunk;
  }
}

TEST(Decoder, ChunksChangeNoBit) {
  const FakeModel model;
  const std::vector<int32_t> tokens = Tokens(200);
  for (const auto& [mode, kv_type] : {std::pair{WeightsMode::kF32, PHSA_F32},
                                      {WeightsMode::kBf16, PHSA_BF16},
                                      {WeightsMode::kInt8, PHSA_F16},
                                      {WeightsMode::kF32, PHSA_INT8}}) {
    Runner runner(model, mode, kv_type);
    ExpectChunksGiveTheBitsOfOnePass(runner, tokens);
  }
}

TEST(Decoder, ThreadsChangeNoBit) {
  const FakeModel model;
  const std::vector<int32_t> tokens = Tokens(150);
  Runner one(model, WeightsMode::kAuto, PHSA_F32, 1), three(model, WeightsMode::kAuto, PHSA_F32, 3);
  Sequence a(one.cache), b(three.cache);
  EXPECT_TRUE(SameBits(one.Read(a, tokens), three.Read(b, tokens)));
}

TEST(Decoder, ABatchGivesWhatEachSequenceGivesAlone) {
  const FakeModel model;
  Runner runner(model);
  const std::vector<int32_t> first = Tokens(140, 2), second = Tokens(9, 3);
  Sequence a(runner.cache), b(runner.cache);
  const std::vector<float> alone_a = runner.Read(a, first), alone_b = runner.Read(b, second);
  a.Truncate(100);
  b.Truncate(8);
  std::vector<float> batch_a, batch_b;
  const BatchItem items[] = {{&a, std::span(first).subspan(100), BatchItem::Logits::kAll},
                             {&b, std::span(second).subspan(8), BatchItem::Logits::kLast}};
  runner.decoder.Step(items, [&](int32_t item, int32_t row, const LogitsRow& logits) {
    auto& out = item == 0 ? batch_a : batch_b;
    EXPECT_EQ(static_cast<size_t>(row) * runner.vocab, item == 0 ? out.size() : 0u);
    out.insert(out.end(), logits.All().begin(), logits.All().end());
  });
  EXPECT_TRUE(SameBits(batch_a, {alone_a.begin() + static_cast<int64_t>(100 * runner.vocab), alone_a.end()}));
  EXPECT_TRUE(SameBits(batch_b, {alone_b.begin() + static_cast<int64_t>(8 * runner.vocab), alone_b.end()}));
}

TEST(Decoder, WhatWasTruncatedLeavesNoTrace) {
  const FakeModel model;
  LayerSettings sparse;
  sparse.base.init_tokens = 16;
  sparse.base.local_tokens = 32;
  sparse.base.top_k = 1;
  for (const auto& [settings, kv_type] : {std::pair{Dense(), PHSA_F32}, {sparse, PHSA_F32}, {sparse, PHSA_INT8}}) {
    Runner runner(model, WeightsMode::kF32, kv_type, 1, 8, settings);
    const std::vector<int32_t> tokens = Tokens(200, 4);
    Sequence fresh(runner.cache), reused(runner.cache);
    const std::vector<float> expected = runner.Read(fresh, tokens);
    runner.Read(reused, tokens);
    reused.Truncate(77);
    runner.Read(reused, Tokens(90, 5));
    reused.Truncate(77);
    const std::vector<float> again = runner.Read(reused, std::span(tokens).subspan(77));
    EXPECT_TRUE(SameBits(again, {expected.begin() + static_cast<int64_t>(77 * runner.vocab), expected.end()}));
  }
}

TEST(Decoder, ChoosingEverythingIsDense) {
  const FakeModel model;
  LayerSettings all;
  all.base.top_k = 64;
  Runner dense(model), sparse(model, WeightsMode::kF32, PHSA_F32, 1, 8, all);
  const std::vector<int32_t> tokens = Tokens(900, 6);
  Sequence a(dense.cache), b(sparse.cache);
  const std::vector<float> expected = dense.Read(a, tokens), got = sparse.Read(b, tokens);
  ASSERT_EQ(expected.size(), got.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(expected[i], got[i], 1e-4) << i;
}

// A window in the first layer, none in the second.
LayerTraits Window(int32_t tokens) {
  LayerTraits traits;
  traits.window = tokens;
  return traits;
}

TEST(Decoder, ALayerWithAWindowKeepsItAndTheOthersChoose) {
  FakeModel model;
  model.config_for_test().layers = {Window(40), {}};
  const FakeModel plain;
  LayerSettings sparse;
  sparse.base.init_tokens = 16;
  sparse.base.local_tokens = 32;
  sparse.base.top_k = 2;
  LayerSettings all = sparse;
  all.base.top_k = 64;
  Runner dense(model), choosing(model, WeightsMode::kF32, PHSA_F32, 1, 8, sparse),
      everything(model, WeightsMode::kF32, PHSA_F32, 1, 8, all), without(plain);
  const std::vector<int32_t> tokens = Tokens(600, 6);
  Sequence a(dense.cache), b(choosing.cache), c(everything.cache), d(without.cache);
  const std::vector<float> expected = dense.Read(a, tokens), got = everything.Read(c, tokens);
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(expected[i], got[i], 1e-4) << i;
  EXPECT_FALSE(SameBits(without.Read(d, tokens), expected)) << "the window must matter";
  EXPECT_EQ(choosing.cache.layout().layers[0].rep_rows, 0) << "a window needs no representatives";
  EXPECT_GT(choosing.cache.layout().layers[1].rep_rows, 0);

  std::vector<std::pair<Policy, int32_t>> seen;  // of each layer: policy, slots of its lists
  choosing.decoder.Observe(
      [&](const LayerAttention& layer) { seen.emplace_back(layer.settings.policy, layer.plan.SelectionSlots()); });
  EXPECT_FALSE(SameBits(choosing.Read(b, tokens), expected));
  EXPECT_EQ(seen[0], std::pair(Policy::kDense, 0));
  EXPECT_EQ(seen[1], std::pair(Policy::kPhsa, 2));
  // Of the first layer: 40 tokens at each of the positions from 39 on.
  const int64_t heads = model.config().num_q_heads, dense_reads = 600 * 601 / 2;
  EXPECT_EQ(dense.decoder.tokens_read().read, heads * (40 * 41 / 2 + 560 * 40 + dense_reads));
  EXPECT_EQ(dense.decoder.tokens_read().dense, heads * 2 * dense_reads);
}

TEST(Decoder, AWindowInChunksGivesTheBitsOfOnePass) {
  FakeModel model;
  model.config_for_test().layers = {Window(40), {}};
  const std::vector<int32_t> tokens = Tokens(200);
  Runner runner(model, WeightsMode::kBf16, PHSA_BF16);
  ExpectChunksGiveTheBitsOfOnePass(runner, tokens);
}

TEST(Experts, ATokenTakesTheLikeliestAndTheirWeightsAddUp) {
  ModelConfig config;
  config.num_experts = 4;
  config.experts_per_token = 2;
  const float logits[] = {0, 3, 1, 1, 5, 4, 0, 0};  // two tokens; ties go to the lower expert
  for (const bool normalized : {true, false}) {
    config.normalized_experts = normalized;
    const std::vector<ExpertRows> routes = RouteToExperts(config, logits, 2);
    EXPECT_EQ(routes[0].rows, std::vector<int32_t>({1}));
    EXPECT_EQ(routes[1].rows, std::vector<int32_t>({0, 1}));
    EXPECT_EQ(routes[2].rows, std::vector<int32_t>({0}));
    EXPECT_TRUE(routes[3].rows.empty());
    const double rest = normalized ? 0 : std::exp(0.0) + std::exp(1.0);
    EXPECT_NEAR(routes[1].weights[0], std::exp(3.0) / (std::exp(3.0) + std::exp(1.0) + rest), 1e-6);
    EXPECT_NEAR(routes[2].weights[0], std::exp(1.0) / (std::exp(3.0) + std::exp(1.0) + rest), 1e-6);
  }
}

TEST(Decoder, ATextBeyondTheCacheIsRefusedAndChangesNothing) {
  const FakeModel model;
  Runner runner(model, WeightsMode::kF32, PHSA_F32, 1, 2);
  Sequence sequence(runner.cache);
  runner.Read(sequence, Tokens(200));
  EXPECT_NE(Refusal([&] { runner.Read(sequence, Tokens(100)); }).find("KV cache"), std::string::npos);
  EXPECT_EQ(sequence.length(), 200);
  EXPECT_EQ(runner.Read(sequence, Tokens(56)).size(), 56 * runner.vocab);
}

TEST(KvCache, PagesComeBack) {
  const FakeModel model;
  PageLayout layout(model.config(), Dense(), PHSA_BF16);
  KvCache cache(layout, 3, MakeHostPages(layout.page_bytes, 3));
  {
    Sequence sequence(cache);
    sequence.Append(Tokens(kPageTokens + 1));
    EXPECT_EQ(cache.free_pages(), 1);
    sequence.Truncate(kPageTokens);
    EXPECT_EQ(cache.free_pages(), 2);
  }
  EXPECT_EQ(cache.free_pages(), 3);
}

// Codes are off by half a 127th of a row's largest element: logits move, and not far.
TEST(Decoder, EightBitKeysAndValuesGiveNearlyTheLogitsOfBf16) {
  const FakeModel model;
  const std::vector<int32_t> tokens = Tokens(300, 8);
  LayerSettings all;
  all.base.top_k = 64;
  Runner bf16(model, WeightsMode::kF32, PHSA_BF16), codes(model, WeightsMode::kF32, PHSA_INT8, 3);
  Runner chosen(model, WeightsMode::kF32, PHSA_INT8, 1, 8, all);
  Sequence a(bf16.cache), b(codes.cache), c(chosen.cache);
  const std::vector<float> expected = bf16.Read(a, tokens), got = codes.Read(b, tokens, 77);
  double off = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    off += std::pow(got[i] - expected[i], 2);
    size += std::pow(expected[i], 2);
  }
  EXPECT_GT(off, 0);
  EXPECT_LT(std::sqrt(off / size), 0.02);
  const std::vector<float> by_choice = chosen.Read(c, tokens);
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(by_choice[i], got[i], 0.02 * std::sqrt(size / got.size())) << i;
}

TEST(KvCache, EightBitKeysAndValuesTakeHalfOfThePagesAndTheirScales) {
  const FakeModel model;
  const PageLayout codes(model.config(), Dense(), PHSA_INT8), bf16(model.config(), Dense(), PHSA_BF16);
  EXPECT_EQ(codes.key_value_bytes, bf16.key_value_bytes / 2 + bf16.key_value_bytes / 64);
  LayerSettings settings;
  EXPECT_EQ(PageLayout(model.config(), settings, PHSA_INT8).representative_bytes,
            PageLayout(model.config(), settings, PHSA_BF16).representative_bytes)
      << "representatives stay bf16";
}

TEST(KvCache, RepresentativesTakeASixteenthOfTheKeys) {
  const FakeModel model;
  LayerSettings settings;
  const PageLayout phsa(model.config(), settings, PHSA_BF16), dense(model.config(), Dense(), PHSA_BF16);
  EXPECT_EQ(dense.representative_bytes, 0u);
  EXPECT_EQ(phsa.representative_bytes, phsa.key_value_bytes / 2 / 16);
  EXPECT_EQ(phsa.key_value_bytes, size_t{2} * 2 * 2 * 64 * kPageTokens * 2);  // layers, K and V, heads, dim, bytes
}

TEST(Weights, WhatIsMissingOrMisshapenIsNamed) {
  FakeModel missing;
  missing.Remove("model.layers.1.self_attn.k_norm.weight");
  EXPECT_NE(Refusal([&] { SizeOfWeights(missing, WeightsMode::kAuto); }).find("model.layers.1.self_attn.k_norm.weight"),
            std::string::npos);
  FakeModel misshapen;
  misshapen.Add("model.layers.0.mlp.up_proj.weight", {96, 32});
  const std::string message = Refusal([&] { SizeOfWeights(misshapen, WeightsMode::kAuto); });
  EXPECT_NE(message.find("[96, 32]"), std::string::npos) << message;
  EXPECT_NE(message.find("[96, 64]"), std::string::npos) << message;
  FakeModel bias("qwen2");
  EXPECT_NE(Refusal([&] { SizeOfWeights(bias, WeightsMode::kAuto); }).find("q_proj.bias"), std::string::npos);
}

TEST(Weights, ThePlanSaysWhatLoadingTakes) {
  const FakeModel model;
  ThreadPool threads(1);
  for (const WeightsMode mode : {WeightsMode::kF32, WeightsMode::kBf16, WeightsMode::kInt8}) {
    const Weights weights = LoadWeights(model, mode, threads, [](double) { return true; });
    uint64_t bytes = weights.embedding.bytes() + weights.final_norm.size() * sizeof(float);
    for (const LayerWeights& layer : weights.layers) {
      for (const Matrix* matrix : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
        bytes += matrix->bytes();
      }
      for (const Vector* vector : {&layer.attention_norm, &layer.mlp_norm, &layer.q_norm, &layer.k_norm}) {
        bytes += vector->size() * sizeof(float);
      }
    }
    EXPECT_EQ(SizeOfWeights(model, mode).bytes, bytes);
  }
}

// A model's weights as they would lie on a GPU, in host memory.
struct DeviceImage {
  DeviceImage(const ModelSource& source, WeightsMode mode)
      : memory(cuda::WeightLayout(source, mode, nullptr).bytes), layout(source, mode, memory.data()) {
    for (const ModelTensor& tensor : ModelTensors(source)) {
      const cuda::PackedRows& place = layout.places.at(tensor.name);
      for (int64_t row = 0; row < tensor.rows; ++row) PackRow(tensor, source.config(), {}, row, place, row);
    }
  }
  // Row `row` of a matrix, as what it stands for.
  static std::vector<float> Row(const cuda::MatrixView& matrix, size_t row, size_t cols) {
    std::vector<float> values(cols);
    for (size_t i = 0; i < cols; ++i) {
      const size_t at = row * cols + i;
      if (matrix.is_int8()) {
        const float code = static_cast<float>(static_cast<const uint8_t*>(matrix.data)[at]) - 128;
        values[i] = F32FromF16(matrix.scales[at / kWeightGroup]) * code * matrix.factors[row];
      } else {
        values[i] = F32FromBf16(static_cast<const uint16_t*>(matrix.data)[at]);
      }
    }
    return values;
  }
  std::vector<uint8_t> memory;
  cuda::WeightLayout layout;
};

TEST(DeviceWeights, MatricesOnAGpuHaveTheNumbersOfTheCpus) {
  const FakeModel model;
  ThreadPool threads(1);
  for (const WeightsMode mode : {WeightsMode::kBf16, WeightsMode::kInt8}) {
    const Weights cpu = LoadWeights(model, mode, threads, [](double) { return true; });
    const DeviceImage gpu(model, mode);
    const auto expect_same = [](const cuda::MatrixView& view, const std::vector<const Matrix*>& side_by_side) {
      size_t at = 0;
      for (const Matrix* matrix : side_by_side) {
        std::vector<float> row(static_cast<size_t>(matrix->cols()));
        for (int32_t i = 0; i < matrix->rows(); ++i, ++at) {
          matrix->GetRow(i, row.data());
          ASSERT_EQ(DeviceImage::Row(view, at, row.size()), row) << "row " << at;
        }
      }
    };
    ASSERT_EQ(gpu.layout.layers.size(), cpu.layers.size());
    for (size_t i = 0; i < cpu.layers.size(); ++i) {
      const LayerWeights& layer = cpu.layers[i];
      const cuda::DeviceLayer& views = gpu.layout.layers[i];
      for (const cuda::MatrixView* view : {&views.qkv, &views.o, &views.gate_up, &views.down}) {
        EXPECT_EQ(view->is_int8(), mode == WeightsMode::kInt8);
      }
      expect_same(views.qkv, {&layer.q, &layer.k, &layer.v});
      expect_same(views.o, {&layer.o});
      expect_same(views.gate_up, {&layer.gate, &layer.up});
      expect_same(views.down, {&layer.down});
    }
    EXPECT_EQ(gpu.layout.places.at("model.embed_tokens.weight").type, WeightType::kBf16);
  }
}

TEST(DeviceWeights, PlacesLieApartAndTakeWhatTheSizesSay) {
  const FakeModel model;
  constexpr size_t kLayer = 512 * 64 + 64 * 256 + 2 * 96 * 64 + 64 * 96;  // elements of its matrices
  constexpr size_t kRows = 512 + 64 + 2 * 96 + 64;
  size_t taken[2] = {};
  for (const WeightsMode mode : {WeightsMode::kBf16, WeightsMode::kInt8}) {
    const bool int8 = mode == WeightsMode::kInt8;
    DeviceImage image(model, mode);
    std::vector<int> owners(image.memory.size());
    const auto own = [&](const void* data, size_t bytes, size_t alignment) {
      const auto begin = static_cast<size_t>(static_cast<const uint8_t*>(data) - image.memory.data());
      ASSERT_LE(begin + bytes, owners.size());
      ASSERT_EQ(begin % alignment, 0u);
      for (size_t i = begin; i < begin + bytes; ++i) ASSERT_EQ(owners[i]++, 0) << "two tensors at " << i;
    };
    for (const ModelTensor& tensor : ModelTensors(model)) {
      const cuda::PackedRows& place = image.layout.places.at(tensor.name);
      const auto rows = static_cast<size_t>(std::max<int64_t>(tensor.rows, 1)), cols = static_cast<size_t>(tensor.cols);
      if (place.type == WeightType::kInt8) {
        own(place.data, rows * cols, 16);
        own(place.scales, rows * cols / 32 * 2, 2);
        own(place.factors, rows * 4, 4);
        EXPECT_EQ(cuda::PackedRowBytes(place.type, tensor.cols), cols + cols / 32 * 2 + 4);
      } else {
        own(place.data, rows * cuda::PackedRowBytes(place.type, tensor.cols), 16);
      }
    }
    EXPECT_EQ(image.layout.largest_int8, int8 ? size_t{512} * 64 : 0u);
    for (const int owner : owners) taken[int8] += static_cast<size_t>(owner);
  }
  // A byte and a sixteenth in place of two bytes, and a factor to a row.
  EXPECT_EQ(taken[0] - taken[1], 2 * (2 * kLayer - (kLayer + kLayer / 16 + 4 * kRows)));
}

TEST(DeviceWeights, CodesOfAFileStayAsTheyAreUnlessAnAdapterAddsToThem) {
  constexpr int64_t kCols = 64;
  std::vector<uint8_t> blocks;
  for (int block = 0; block < 2; ++block) {
    const uint16_t scale = F16FromF32(block == 0 ? 0.01f : 3e-6f);
    blocks.push_back(static_cast<uint8_t>(scale));
    blocks.push_back(static_cast<uint8_t>(scale >> 8));
    for (int i = 0; i < 32; ++i) blocks.push_back(static_cast<uint8_t>(i * 8));  // -128 is one of them
  }
  Tensor file;
  file.type = TensorType::kQ8_0;
  file.shape = {1, kCols};
  file.data = blocks.data();
  file.bytes = blocks.size();
  const ModelTensor tensor{"w", &file, 1, kCols};
  std::vector<float> values(kCols);
  Dequantize(file.type, file.data, kCols, values.data());
  std::vector<uint8_t> codes(kCols);
  std::vector<uint16_t> scales(2);
  float factor = 0;
  const cuda::PackedRows to{WeightType::kInt8, codes.data(), scales.data(), &factor};
  const cuda::MatrixView view{codes.data(), scales.data(), &factor};
  const ModelConfig config = FakeModel().config();
  PackRow(tensor, config, {}, 0, to, 0);
  EXPECT_EQ(DeviceImage::Row(view, 0, kCols), values);
  EXPECT_EQ(codes[16], 0);  // -128
  const cuda::AdapterDelta delta{std::vector<float>(kCols, 0.5f), {2.0f}, 1, 0.25f};
  PackRow(tensor, config, delta, 0, to, 0);
  const std::vector<float> row = DeviceImage::Row(view, 0, kCols);
  for (size_t i = 0; i < kCols; ++i) EXPECT_NEAR(row[i], values[i] + 0.25f, 1.6f / 127 * 0.57f);
}

TEST(Weights, InterleavedRowsAreTheSameModel) {
  const FakeModel plain("llama");
  FakeModel interleaved("llama");  // the same numbers: both start from one seed
  interleaved.config_for_test().interleaved_rope_rows = true;
  const int64_t half = 32, dim = 64, hidden = 64;
  for (int layer = 0; layer < 2; ++layer) {
    for (const auto& [name, heads] : {std::pair{"q_proj", 4}, {"k_proj", 2}}) {
      const std::string key = "model.layers." + std::to_string(layer) + ".self_attn." + name + ".weight";
      const auto* const from = reinterpret_cast<const float*>(plain.Find(key)->data);
      auto* const to = const_cast<float*>(reinterpret_cast<const float*>(interleaved.Find(key)->data));
      for (int64_t head = 0; head < heads; ++head) {
        for (int64_t i = 0; i < half; ++i) {
          for (int64_t j = 0; j < 2; ++j) {
            std::memcpy(to + (head * dim + 2 * i + j) * hidden, from + (head * dim + i + j * half) * hidden,
                        hidden * sizeof(float));
          }
        }
      }
    }
  }
  Runner a(plain), b(interleaved);
  Sequence sequence_a(a.cache), sequence_b(b.cache);
  EXPECT_TRUE(SameBits(a.Read(sequence_a, Tokens(40)), b.Read(sequence_b, Tokens(40))));
}

TEST(Rope, PlainFrequenciesAreThePowersOfTheBase) {
  ModelConfig config;
  config.head_dim = 64;
  config.rope_base = 10000;
  const RopeFrequencies rope = MakeRope(config);
  ASSERT_EQ(rope.frequencies.size(), 32u);
  EXPECT_DOUBLE_EQ(rope.frequencies[0], 1);
  EXPECT_NEAR(rope.frequencies[16], 0.01, 1e-12);
  EXPECT_EQ(rope.factor, 1);
}

TEST(Rope, ScalingsLeaveFastPairsAndStretchSlowOnes) {
  ModelConfig config;
  config.head_dim = 64;
  config.rope_base = 10000;
  const RopeFrequencies plain = MakeRope(config);
  config.rope_scaling.factor = 8;
  config.rope_scaling.original_context = 1024;
  for (const auto kind : {RopeScaling::Kind::kLlama3, RopeScaling::Kind::kYarn}) {
    config.rope_scaling.kind = kind;
    const RopeFrequencies scaled = MakeRope(config);
    EXPECT_DOUBLE_EQ(scaled.frequencies.front(), plain.frequencies.front());
    EXPECT_NEAR(scaled.frequencies.back(), plain.frequencies.back() / 8, 1e-12);
    for (size_t i = 1; i < 32; ++i) EXPECT_LT(scaled.frequencies[i], scaled.frequencies[i - 1]);
  }
  EXPECT_NEAR(MakeRope(config).factor, 0.1 * std::log(8) + 1, 1e-6);  // YaRN's
  config.rope_scaling.kind = RopeScaling::Kind::kLinear;
  EXPECT_DOUBLE_EQ(MakeRope(config).frequencies[5], plain.frequencies[5] / 8);
}

}  // namespace
}  // namespace phsa
