// A model on a device whose memory is not the host's, and the choice of a device.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <random>
#include <utility>

#include "engine/device_choice.h"
#include "engine/sampler.h"
#include "engine/session.h"
#include "eval/recall.h"
#include "fake_engine.h"
#include "fake_model.h"
#include "io/model_writer.h"
#include "model/cuda/cuda_backend.h"
#include "model/kv_file.h"
#include "model_files.h"
#include "other_device.h"
#include "refusal.h"
#include "test_backend.h"

namespace phsa {
namespace {

constexpr int32_t kPages = 24, kMaxRows = 300;

LayerSettings Sparse() {
  LayerSettings settings;
  settings.base = SmallSettings(Policy::kPhsa, 3);
  return settings;
}

LayerSettings Dense() {
  LayerSettings settings;
  settings.base.policy = Policy::kDense;
  return settings;
}

// A decoder with its cache, on the CPU or on the other device.
struct Runner {
  explicit Runner(bool other_device)
      : backend(MakeBackend(other_device)),
        cache(TestCache(*backend, PageLayout(model.config(), Sparse(), PHSA_F32), kPages)),
        decoder(model.config(), *backend, Sparse(), threads) {
    std::vector<uint8_t> flags(static_cast<size_t>(model.config().vocab_size));
    for (size_t i = 0; i < 20; ++i) flags[i] = 1;
    decoder.SetPunctuation(flags);
  }
  std::unique_ptr<ModelBackend> MakeBackend(bool other_device) {
    std::unique_ptr<ModelBackend> cpu = TestBackend(model, WeightsMode::kF32, PHSA_F32, kMaxRows, threads);
    if (!other_device) return cpu;
    return std::make_unique<OtherDevice>(model.config(), std::move(cpu));
  }
  std::vector<float> Read(std::span<const BatchItem> items) {
    std::vector<float> out;
    decoder.Step(items, [&](int32_t, int32_t, const LogitsRow& logits) {
      out.insert(out.end(), logits.All().begin(), logits.All().end());
    });
    return out;
  }
  std::vector<float> Read(Sequence& sequence, std::span<const int32_t> tokens) {
    const BatchItem item{&sequence, tokens, BatchItem::Logits::kAll};
    return Read({&item, 1});
  }

  FakeModel model;
  ThreadPool threads{2};
  std::unique_ptr<ModelBackend> backend;
  KvCache cache;
  Decoder decoder;
};

// The same model twice.
class Device : public testing::Test {
 protected:
  Runner cpu{false}, other{true};
  const OtherDevice& device = static_cast<const OtherDevice&>(*other.backend);

  // What `work` gives with either.
  template <class Work>
  void ExpectSame(const Work& work) {
    EXPECT_TRUE(SameBits(work(cpu), work(other)));
  }
};

TEST_F(Device, NothingButTheDeviceTouchesItsPages) {
  ExpectSame([](Runner& runner) {
    Sequence one(runner.cache), two(runner.cache);
    std::vector<float> all = runner.Read(one, Tokens(300));
    // Two texts, one of them read in another way, in steps of several tokens and of one.
    const auto dense = std::make_shared<const TextAttention>(
        TextAttention{Dense(), {}, PageLayout(runner.model.config(), Sparse(), PHSA_F32)});
    Sequence three(runner.cache, dense);
    for (const size_t count : {40, 1, 1, 7}) {
      const std::vector<int32_t> first = Tokens(count, 2), second = Tokens(count, 3), third = Tokens(count, 4);
      const BatchItem items[] = {{&one, first, BatchItem::Logits::kLast},
                                 {&two, second, BatchItem::Logits::kAll},
                                 {&three, third, BatchItem::Logits::kNone}};
      const std::vector<float> logits = runner.Read(items);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  });
  EXPECT_EQ(device.whole_steps, 2);
  EXPECT_EQ(other.decoder.tokens_read().read, cpu.decoder.tokens_read().read);
  EXPECT_EQ(other.decoder.tokens_read().dense, cpu.decoder.tokens_read().dense);
  EXPECT_LT(cpu.decoder.tokens_read().share(), 1) << "something is left out";
}

// A LoRA adapter for FakeModel: q_proj of both layers, every number `value`.
void WriteAdapter(const TempFolder& folder, float value) {
  std::vector<OutputTensor> tensors;
  for (const char* layer : {"0", "1"}) {
    const std::string at = std::string("base_model.model.model.layers.") + layer + ".self_attn.q_proj.lora_";
    tensors.push_back({at + "A.weight", TensorType::kF32, {1, 64}});
    tensors.push_back({at + "B.weight", TensorType::kF32, {256, 1}});
  }
  const std::vector<float> numbers(2 * (64 + 256), value);
  folder.Write("adapter_config.json",
               R"({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]})");
  folder.Write("adapter_model.safetensors",
               SafetensorsHeader(tensors) +
                   std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float)));
}

TEST(SetAdapter, ItIsExchangedBesideTheWeightsOrReadWithThem) {
  const TempFolder one, two;
  WriteAdapter(one, 0.1f);
  WriteAdapter(two, 0.2f);
  const auto set = [](Engine& engine, const std::filesystem::path& folder) {
    engine.SetAdapter(folder, [&](const ModelConfig&) { return engine.options().attention; });
  };
  const auto read = [](Engine& engine) {
    std::vector<float> all;
    const auto keep = [&](int32_t, int32_t, const LogitsRow& logits) {
      all.insert(all.end(), logits.All().begin(), logits.All().end());
    };
    Session(engine).Prefill(Tokens(40), {}, keep, BatchItem::Logits::kAll);
    return all;
  };
  const auto cpu = LoadedEngine(FakeOptions(128));
  const std::vector<float> without = read(*cpu);
  const uint64_t weights = cpu->memory().weights;
  set(*cpu, one.path());
  const std::vector<float> with_one = read(*cpu);
  EXPECT_GT(cpu->memory().weights, weights);
  set(*cpu, two.path());
  EXPECT_FALSE(SameBits(with_one, without));
  EXPECT_FALSE(SameBits(read(*cpu), with_one));
  set(*cpu, one.path());
  EXPECT_TRUE(SameBits(read(*cpu), with_one));
  EXPECT_NE(Refusal([&] { set(*cpu, "absent"); }).find("absent"), std::string::npos);
  EXPECT_TRUE(SameBits(read(*cpu), with_one)) << "what is refused changes nothing";
  set(*cpu, {});
  EXPECT_TRUE(SameBits(read(*cpu), without));
  EXPECT_EQ(cpu->memory().weights, weights);

  // A device that says no is made anew, with the adapter: here it is the CPU again.
  FakeModel model;
  ThreadPool threads{2};
  const auto other = LoadedEngine(FakeOptions(128));
  other->Use(std::make_unique<OtherDevice>(model.config(),
                                           TestBackend(model, WeightsMode::kF32, PHSA_F32, kMaxRows, threads)));
  EXPECT_EQ(other->device_name(), "other");
  EXPECT_TRUE(SameBits(read(*other), without));
  set(*other, one.path());
  EXPECT_EQ(other->device_name(), "cpu");
  EXPECT_TRUE(SameBits(read(*other), with_one));
}

TEST_F(Device, ForksTruncatedTextsAndFilesGoOnThere) {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("phsa_device_test_" + std::to_string(getpid()));
  const KvIdentity identity = {{"model", "a"}};
  ExpectSame([&](Runner& runner) {
    const std::vector<int32_t> text = Tokens(290);
    Sequence one(runner.cache);
    runner.Read(one, text);
    Sequence two = one.Fork();
    two.Truncate(150);  // within a page that both have
    std::vector<float> all = runner.Read(two, Tokens(9, 5));
    SaveSequence(one, identity, file);
    one.Truncate(0);
    Sequence restored(runner.cache);
    RestoreSequence(restored, identity, text, file);
    for (Sequence* sequence : {&two, &restored}) {
      const std::vector<float> more = runner.Read(*sequence, Tokens(20, 6));
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  });
  std::filesystem::remove(file);
}

TEST_F(Device, AfterAFailedStepTextsAreAsTheyWere) {
  auto& failing = static_cast<OtherDevice&>(*other.backend);
  const int32_t last_layer = other.model.config().num_layers - 1;
  ExpectSame([&](Runner& runner) {
    Sequence one(runner.cache);
    runner.Read(one, Tokens(150));
    Sequence two = one.Fork();
    const std::vector<int32_t> more = Tokens(40, 2);
    const BatchItem items[] = {{&one, more, BatchItem::Logits::kAll}, {&two, more, BatchItem::Logits::kLast}};
    if (&runner == &other) {
      failing.failing_layer = last_layer;
      EXPECT_THROW(runner.Read(items), Error);
      failing.failing_layer = -1;
      EXPECT_EQ(one.length(), 150);
      EXPECT_EQ(two.length(), 150);
    }
    // And a reader that does not like what it is given.
    EXPECT_THROW(runner.decoder.Step(items, [](int32_t, int32_t, const LogitsRow&) { throw std::runtime_error("no"); }),
                 std::runtime_error);
    EXPECT_EQ(one.length(), 150);
    return runner.Read(items);
  });
}

TEST_F(Device, WhatItReadCanBeLookedAtOnTheHost) {
  const auto look = [&](Runner& runner) {
    RecallMeter meter(runner.model.config(), PHSA_F32);
    std::vector<float> seen;
    Sequence before(runner.cache), sequence(runner.cache);
    runner.Read(before, Tokens(130, 9));  // so that its pages are not the first ones
    const Observing observing(runner.decoder, [&](const LayerAttention& attention) {
      meter.Add(attention);
      const auto slots = static_cast<size_t>(attention.plan.SelectionHeads() * attention.plan.SelectionSlots());
      const size_t count = slots * static_cast<size_t>(attention.q_lens[0]);
      for (size_t i = 0; i < count; ++i) {
        seen.push_back(static_cast<float>(attention.params.selection[i]));
        seen.push_back(attention.params.selection_scores[i]);
      }
      const KeyValues& kv = attention.params.kv;
      for (int32_t token = 0; token < attention.kv_lens[0]; ++token) {
        seen.push_back(kv.flags[kv.page_table[token / kPageTokens] * kv.flags_page_stride + token % kPageTokens]);
      }
    });
    const std::vector<int32_t> text = Tokens(400);
    runner.Read(sequence, std::span(text).first(290));
    runner.Read(sequence, std::span(text).subspan(290, 109));
    runner.Read(sequence, std::span(text).last(1));  // one token: not in one piece while somebody looks
    seen.push_back(static_cast<float>(*meter.total().all.value()));
    return seen;
  };
  ExpectSame(look);
  EXPECT_EQ(device.whole_steps, 0);
}

TEST_F(Device, GreedyAnswersFetchNoLogits) {
  Sequence sequence(other.cache);
  Sampler sampler({.temperature = 0});
  const std::vector<int32_t> text = Tokens(50);
  const BatchItem item{&sequence, text, BatchItem::Logits::kAll};
  std::vector<int32_t> chosen;
  other.decoder.Step({&item, 1}, [&](int32_t, int32_t, const LogitsRow& logits) {
    chosen.push_back(sampler.Next(logits, 101, {}));
    EXPECT_EQ(logits.Likeliest(), chosen.back());
    EXPECT_TRUE(logits.IsFinite());
  });
  EXPECT_EQ(chosen.size(), 50u);
  EXPECT_EQ(device.fetched, 0);
}

std::vector<float> RandomLogits(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(count);
  for (float& logit : logits) logit = std::round(4 * normal(random)) / 4;  // with ties
  return logits;
}

TEST(LogitsRow, TheTopIsThatOfASortWhereverItComesFrom) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::vector<float> logits = RandomLogits(500, seed);
    if (seed % 2 == 1) logits[7] = std::numeric_limits<float>::quiet_NaN();
    if (seed % 3 == 1) logits[9] = -std::numeric_limits<float>::infinity();
    for (const int32_t known : {1, 300, 500, 1000}) {
      std::vector<int32_t> expected(static_cast<size_t>(std::min(known, 500)));
      std::iota(expected.begin(), expected.end(), 0);
      std::stable_sort(expected.begin(), expected.end(), [&](int32_t a, int32_t b) {
        const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
        return std::isnan(y) ? !std::isnan(x) : x > y;
      });
      const HostLogitsRow host(logits);
      for (const size_t leaders : {1, 64, 500}) {
        int64_t fetched = 0;
        const FetchedLogits device(host, leaders, fetched);
        for (const size_t count : {0, 1, 5, 64, 600}) {
          for (const LogitsRow* row : {static_cast<const LogitsRow*>(&host), static_cast<const LogitsRow*>(&device)}) {
            const std::vector<TokenLogit> top = row->Top(count, known);
            ASSERT_EQ(top.size(), std::min(count, expected.size()));
            for (size_t i = 0; i < top.size(); ++i) {
              ASSERT_EQ(top[i].token, expected[i]) << seed << ' ' << known << ' ' << leaders << ' ' << count;
              ASSERT_TRUE(SameBits({top[i].logit}, {logits[static_cast<size_t>(expected[i])]}));
            }
          }
        }
        EXPECT_EQ(device.Likeliest(known), expected.front());
      }
    }
  }
}

TEST(LogitsRow, NoNumberAndInfinityAreNotFinite) {
  std::vector<float> logits = RandomLogits(100, 1);
  EXPECT_TRUE(HostLogitsRow(logits).IsFinite());
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    logits[63] = bad;
    EXPECT_FALSE(HostLogitsRow(logits).IsFinite());
  }
}

TEST(Sampler, DrawsFromTheLikeliestFewAsFromAllLogits) {
  const std::vector<float> logits = RandomLogits(1000, 5);
  const HostLogitsRow host(logits);
  int64_t fetched = 0;
  const FetchedLogits device(host, 64, fetched);
  const auto draw = [&](const SamplerSettings& settings, const LogitsRow& row, int32_t known) {
    Sampler sampler(settings);
    const std::vector<int32_t> seen = {1, 2, 3};
    std::vector<int32_t> drawn;
    for (int i = 0; i < 200; ++i) drawn.push_back(sampler.Next(row, known, seen));
    return drawn;
  };
  SamplerSettings settings;
  settings.seed = 11;
  for (const int32_t top_k : {1, 40, 60}) {
    settings.top_k = top_k;
    EXPECT_EQ(draw(settings, host, 990), draw(settings, device, 990));
  }
  EXPECT_EQ(fetched, 0);
  // All of them are needed: more than the device tells, a changed order, tokens that cannot be chosen in front.
  settings.top_k = 0;
  EXPECT_EQ(draw(settings, host, 990), draw(settings, device, 990));
  EXPECT_EQ(fetched, 200);
  settings.top_k = 40;
  EXPECT_EQ(draw(settings, host, 300), draw(settings, device, 300));
  EXPECT_EQ(fetched, 400);
  settings.repetition_penalty = 1.5f;
  EXPECT_EQ(draw(settings, host, 990), draw(settings, device, 990));
  EXPECT_EQ(fetched, 600);
}

DeviceChoice Choose(std::string_view name) {
  static const FakeModel model;
  static const LayerSettings attention = Dense();
  return ChooseDevice(name, model, {WeightsMode::kAuto, std::nullopt, attention});
}

TEST(ChooseDevice, OtherNamesAreRefusedNamingTheRightOnes) {
  for (const char* name : {"", "gpu", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda:99999999999", "cuda 0"}) {
    const std::string message = Refusal([&] { Choose(name); });
    EXPECT_NE(message.find("auto, cpu, cuda"), std::string::npos) << name << message;
    EXPECT_NE(message.find("device"), std::string::npos);
  }
}

TEST(ChooseDevice, WithoutAGpuAutoIsTheCpuAndAskingForOneIsRefused) {
  if (cuda::Unavailable().empty()) GTEST_SKIP() << "there is a GPU";
  for (const char* name : {"auto", "cpu"}) {
    EXPECT_EQ(Choose(name).device, PHSA_DEVICE_CPU);
    EXPECT_EQ(Choose(name).note, "");
  }
  for (const char* name : {"cuda", "cuda:3"}) {
    try {
      Choose(name);
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), PHSA_UNSUPPORTED);
      EXPECT_EQ(error.what(),
                fmt::format("device {}: {}; device auto runs the model on the CPU", name, cuda::Unavailable()));
    }
  }
}

TEST(ChooseDevice, ACacheForAStepHoldsAsManyTextsAsAStepReads) {
  EngineOptions options = FakeOptions(100, 0);
  options.device = "cpu";
  options.cache_texts = 0;
  EXPECT_EQ(LoadedEngine(options)->memory().cache_tokens, 500);  // of the CPU's 512
  options.chunk = 64;
  EXPECT_EQ(LoadedEngine(options)->memory().cache_tokens, 100);
}

TEST(Gpu, TakesInt8WeightsInWholeGroupsAndNoF32) {
  FakeModel model;
  BackendOptions options;
  options.kv_dtype = PHSA_BF16;
  const auto why_not = [&](WeightsMode weights) {
    options.weights = weights;
    return cuda::UnsupportedModel(model.config(), options);
  };
  EXPECT_EQ(why_not(WeightsMode::kBf16), "");
  EXPECT_EQ(why_not(WeightsMode::kInt8), "");
  EXPECT_NE(why_not(WeightsMode::kF32).find("auto, bf16 and int8"), std::string::npos);
  for (int32_t ModelConfig::*width : {&ModelConfig::hidden, &ModelConfig::intermediate}) {
    const int32_t before = std::exchange(model.config_for_test().*width, 200);
    EXPECT_EQ(why_not(WeightsMode::kBf16), "");
    EXPECT_NE(why_not(WeightsMode::kInt8).find("multiples of 32"), std::string::npos);
    model.config_for_test().*width = before;
  }
}

TEST(Gpu, RefusesShapesThatItHasNoKernelsFor) {
  const FakeModel model;
  BackendOptions options;
  options.kv_dtype = PHSA_BF16;
  const auto why_not = [&](const auto& change) {
    ModelConfig config = model.config();
    change(config);
    return std::string(Error(PHSA_UNSUPPORTED, cuda::UnsupportedModel(config, options)).what());  // plainly
  };
  for (const int32_t head_dim : {64, 80, 96, 128, 256}) {
    EXPECT_EQ(why_not([&](ModelConfig& config) { config.head_dim = head_dim; }), "");
  }
  EXPECT_EQ(why_not([](ModelConfig& config) { config.head_dim = 112; }),
            "heads of 112 elements; the GPU takes 64, 80, 96, 128, 256");
  const auto experts = [](int32_t count, int32_t taken, int32_t width) {
    return [=](ModelConfig& config) {
      config.num_experts = count;
      config.experts_per_token = taken;
      config.expert_width = width;
    };
  };
  EXPECT_EQ(why_not(experts(128, 8, 768)), "");
  EXPECT_NE(why_not(experts(128, 8, 100)).find("multiples of 8"), std::string::npos);
  EXPECT_NE(why_not(experts(2048, 8, 768)).find("8 of 2048 experts"), std::string::npos);
  EXPECT_NE(why_not(experts(128, 100, 768)).find("100 of 128 experts"), std::string::npos);
  options.weights = WeightsMode::kInt8;
  EXPECT_NE(why_not(experts(128, 8, 768)).find("weights bf16"), std::string::npos);
  options.weights = WeightsMode::kBf16;
  EXPECT_NE(why_not([](ModelConfig& config) { config.vocab_size = 300000; }).find("vocabulary"), std::string::npos);
  options.kv_dtype = PHSA_F32;
  EXPECT_NE(why_not([](ModelConfig&) {}).find("kv_type f32"), std::string::npos);
  options.kv_dtype = PHSA_INT8;
  EXPECT_NE(why_not([](ModelConfig&) {}).find("kv_type int8; the GPU takes bf16 and f16"), std::string::npos);
}

TEST(MemoryNeeds, OfAGpuSaysSo) {
  MemoryNeeds needs;
  needs.gpu = "Some GPU";
  needs.weights = 10;
  needs.available = 5;
  EXPECT_NE(needs.Text().find("memory of Some GPU: weights"), std::string::npos);
  const std::string message = Refusal([&] { CheckFits(needs); });
  EXPECT_NE(message.find("device cpu"), std::string::npos) << message;
}

}  // namespace
}  // namespace phsa
