#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include "base/dtype.h"
#include "base/mapped_file.h"
#include "io/architecture.h"
#include "io/gguf.h"
#include "io/model_source.h"
#include "io/safetensors.h"
#include "io/tensor.h"
#include "model_files.h"
#include "refusal.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

constexpr TensorType kAllTypes[] = {TensorType::kF32,  TensorType::kF16,   TensorType::kBf16,  TensorType::kQ4_0,
                                    TensorType::kQ4_1, TensorType::kQ5_0,  TensorType::kQ5_1,  TensorType::kQ8_0,
                                    TensorType::kQ4_K, TensorType::kQ5_K,  TensorType::kQ6_K,  TensorType::kQ2_K,
                                    TensorType::kQ3_K, TensorType::kIq4Nl, TensorType::kIq4Xs, TensorType::kMxfp4};

std::string FromHex(std::string_view text) {
  std::string out;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    out += static_cast<char>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16));
  }
  return out;
}

const uint8_t* Data(const std::string& bytes) { return reinterpret_cast<const uint8_t*>(bytes.data()); }

int64_t Elements(const Tensor& tensor) {
  int64_t out = 1;
  for (const int64_t size : tensor.shape) out *= size;
  return out;
}

// Reads all that a source offers, so that a sanitizer sees every byte it could hand out.
void ReadEverything(const ModelSource& source) {
  for (const Tensor* tensor : source.Tensors()) {
    std::vector<float> out(static_cast<size_t>(Elements(*tensor)));
    Dequantize(tensor->type, tensor->data, Elements(*tensor), out.data());
    source.Release(*tensor);
  }
  EXPECT_FALSE(source.Metadata().empty());
}

// ------------------------------------------------------------------------------------------------------------ files

TEST(MappedFile, WhatCannotBeReadIsRefusedByName) {
  const TempFolder folder;
  const std::string missing = (folder.path() / "missing").string();
  EXPECT_EQ(Refusal([&] { MappedFile{missing}; }), missing + ": cannot be opened: No such file or directory");
  EXPECT_EQ(Refusal([&] { MappedFile{folder.path()}; }), folder.path().string() + ": is a folder, not a file");
  EXPECT_EQ(Refusal([&] { MappedFile{"/dev/null"}; }), "/dev/null: is a device or a pipe, not a file");
}

// Reads the last byte of a file that was cut after it had been mapped.
void ReadWhatWasCut(const std::filesystem::path& path, AfterCutFile then) {
  ReportCutFiles(then);
  const MappedFile file(path);
  std::filesystem::resize_file(path, 100);
  std::exit(*static_cast<const volatile uint8_t*>(file.data() + file.size() - 1));
}

TEST(MappedFileDeathTest, AFileThatIsCutWhileInUseEndsTheProcessWithItsName) {
  const TempFolder folder;
  const std::filesystem::path path = folder.Write("model.gguf", std::string(1 << 20, 'x'));
  EXPECT_EXIT(ReadWhatWasCut(path, AfterCutFile::kExit), testing::ExitedWithCode(1),
              "^phsa: .*model.gguf: was cut while in use, or its disk fails; copy or fetch it again\n$");
}

TEST(MappedFileDeathTest, WhereTheProcessIsNotOursTheSignalGoesOnToWhoHadItBefore) {
  const TempFolder folder;
  const std::filesystem::path path = folder.Write("model.gguf", std::string(1 << 20, 'x'));
  const auto with_handler = [&] {
    std::signal(SIGBUS, [](int) { _exit(7); });
    ReadWhatWasCut(path, AfterCutFile::kHandOn);
  };
  EXPECT_EXIT(with_handler(), testing::ExitedWithCode(7), "model.gguf: was cut while in use");
}

TEST(ReadTextFile, APipeIsReadToItsEnd) {
  const TempFolder folder;
  const std::string path = folder.path() / "pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const std::string content(300'000, 'x');
  std::thread writer([&] { std::ofstream(path) << content; });
  EXPECT_EQ(ReadTextFile(path, content.size()), content);
  writer.join();
  // Short enough for one write: a writer that goes on after the reader has left gets SIGPIPE.
  std::thread again([&] { std::ofstream(path) << content.substr(0, 3000); });
  EXPECT_EQ(Refusal([&] { ReadTextFile(path, 1000); }), path + ": has more than 1000 bytes; allowed: at most 1000");
  again.join();
}

TEST(MappedFile, AnEmptyFileHasNoBytes) {
  const TempFolder folder;
  const MappedFile file(folder.Write("empty", ""));
  EXPECT_EQ(file.size(), 0u);
}

TEST(MappedFile, ReleasedBytesCanBeReadAgain) {
  const TempFolder folder;
  std::string content(100'000, '\0');
  for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * 7);
  MappedFile first(folder.Write("file", content));
  const MappedFile file = std::move(first);
  file.Release(file.data() + 10, 90'000);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(file.data()), file.size()), content);
}

TEST(ReadTextFile, AFileAboveTheLimitIsRefusedWithBothNumbers) {
  const TempFolder folder;
  const fs::path path = folder.Write("text", "12345");
  EXPECT_EQ(ReadTextFile(path, 5), "12345");
  EXPECT_EQ(Refusal([&] { ReadTextFile(path, 4); }), path.string() + ": has 5 bytes; allowed: at most 4");
}

// ---------------------------------------------------------------------------------------------------------- tensors

struct Golden {
  const char* type;
  const char* blocks;
  const char* floats;
};
constexpr Golden kGolden[] = {
#include "golden_quants.inc"
};

TEST(Dequantize, EveryTypeGivesTheBitsThatThePackageGgufGives) {
  ASSERT_EQ(std::size(kGolden), std::size(kAllTypes));
  for (size_t i = 0; i < std::size(kGolden); ++i) {
    const TensorType type = kAllTypes[i];
    ASSERT_STREQ(TensorTypeName(type), kGolden[i].type);
    const std::string wanted = FromHex(kGolden[i].floats);
    const std::string blocks = FromHex(kGolden[i].blocks);
    const size_t elements = wanted.size() / sizeof(float);
    ASSERT_EQ(blocks.size() / TensorTypeBlockBytes(type) * static_cast<size_t>(TensorTypeBlockElements(type)),
              elements);
    // A file aligns nothing: one byte off must not matter.
    const std::string shifted = "x" + blocks;
    std::string got(wanted.size(), '\0');
    std::vector<float> out(elements);
    Dequantize(type, Data(shifted) + 1, static_cast<int64_t>(elements), out.data());
    std::memcpy(got.data(), out.data(), got.size());
    EXPECT_EQ(got, wanted) << kGolden[i].type;
  }
}

TEST(Dequantize, EveryF16IsWhatTheScalarConversionSays) {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> out(halves.size());
  Dequantize(TensorType::kF16, reinterpret_cast<const uint8_t*>(halves.data()), 65536, out.data());
  for (size_t i = 0; i < halves.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(F32FromF16(halves[i]))) << i;
  }
}

// Random blocks with finite scales.
std::string RandomBlocks(TensorType type, size_t blocks, std::mt19937* random) {
  std::string out(blocks * TensorTypeBlockBytes(type), '\0');
  for (char& c : out) c = static_cast<char>((*random)());
  if (TensorTypeBlockElements(type) == 1) return out;
  for (size_t i = 0; i < blocks; ++i) {
    for (const size_t byte : {size_t{1}, size_t{3}}) out[i * TensorTypeBlockBytes(type) + byte] &= ~0x40;
  }
  return out;
}

TEST(UnpackCodes, CodesScalesAndMinimaGiveExactlyWhatDequantizeGives) {
  std::mt19937 random(1);
  for (const TensorType type : kAllTypes) {
    const int64_t count = 64 * TensorTypeBlockElements(type);
    const std::string blocks = RandomBlocks(type, 64, &random);
    std::vector<uint8_t> codes(static_cast<size_t>(count), 0xee);
    std::vector<float> scales(codes.size() / 32 + 1), mins(scales.size()), wanted(codes.size());
    const bool fours = type == TensorType::kQ4_0 || type == TensorType::kQ4_1;
    const bool fives = type == TensorType::kQ5_0 || type == TensorType::kQ5_1;
    ASSERT_EQ(UnpackCodes(type, Data(blocks), count, codes.data(), scales.data(), mins.data()), fours || fives);
    if (!fours && !fives) {
      EXPECT_EQ(codes, std::vector<uint8_t>(codes.size(), 0xee));
      continue;
    }
    Dequantize(type, Data(blocks), count, wanted.data());
    for (size_t i = 0; i < codes.size(); ++i) {
      ASSERT_LT(codes[i], fives ? 32 : 16);
      ASSERT_EQ(scales[i / 32] * static_cast<float>(codes[i]) + mins[i / 32], wanted[i]) << TensorTypeName(type);
    }
  }
}

TEST(UnpackSuper, CodesScalesAndFactorsGiveExactlyWhatDequantizeGives) {
  std::mt19937 random(4);
  for (const TensorType type : kAllTypes) {
    const int64_t count = 64 * TensorTypeBlockElements(type);
    const std::string blocks = RandomBlocks(type, 64, &random);
    std::vector<uint8_t> codes(static_cast<size_t>(count), 0xee), scales(codes.size() / 32 + 1), mins(scales.size());
    std::vector<uint16_t> factors(codes.size() / 256 + 1), min_factors(factors.size());
    std::vector<float> wanted(codes.size());
    const bool fives = type == TensorType::kQ5_K;
    ASSERT_EQ(UnpackSuper(type, Data(blocks), count, codes.data(), factors.data(), min_factors.data(), scales.data(),
                          mins.data()),
              fives || type == TensorType::kQ4_K);
    if (!fives && type != TensorType::kQ4_K) {
      EXPECT_EQ(codes, std::vector<uint8_t>(codes.size(), 0xee));
      continue;
    }
    Dequantize(type, Data(blocks), count, wanted.data());
    for (size_t i = 0; i < codes.size(); ++i) {
      ASSERT_LT(codes[i], fives ? 32 : 16);
      ASSERT_LT(scales[i / 32], 64);
      ASSERT_LT(mins[i / 32], 64);
      const float scale = F32FromF16(factors[i / 256]) * scales[i / 32];
      const float min = F32FromF16(min_factors[i / 256]) * mins[i / 32];
      ASSERT_EQ(scale * static_cast<float>(codes[i]) + min, wanted[i]) << TensorTypeName(type);
    }
  }
}

TEST(UnpackInt6, CodesScalesAndFactorsGiveExactlyWhatDequantizeGives) {
  std::mt19937 random(3);
  for (const TensorType type : kAllTypes) {
    const int64_t count = 64 * TensorTypeBlockElements(type);
    std::string blocks = RandomBlocks(type, 64, &random);
    if (type == TensorType::kQ6_K) {
      for (size_t i = 209; i < blocks.size(); i += 210) blocks[i] &= ~0x40;  // its scale comes last
    }
    std::vector<uint8_t> codes(static_cast<size_t>(count), 0xee);
    std::vector<int8_t> scales(codes.size() / 16 + 1);
    std::vector<uint16_t> factors(codes.size() / 256 + 1);
    std::vector<float> wanted(codes.size());
    ASSERT_EQ(UnpackInt6(type, Data(blocks), count, codes.data(), factors.data(), scales.data()),
              type == TensorType::kQ6_K);
    if (type != TensorType::kQ6_K) continue;
    Dequantize(type, Data(blocks), count, wanted.data());
    for (size_t i = 0; i < codes.size(); ++i) {
      ASSERT_LT(codes[i], 64);
      const float scale = F32FromF16(factors[i / 256]) * scales[i / 16];
      ASSERT_EQ(scale * static_cast<float>(codes[i] - 32), wanted[i]);
    }
  }
}

TEST(UnpackInt8, CodesAndScalesGiveExactlyWhatDequantizeGives) {
  std::mt19937 random(2);
  for (const TensorType type : kAllTypes) {
    const int64_t count = 64 * TensorTypeBlockElements(type);
    const std::string blocks = RandomBlocks(type, 64, &random);
    std::vector<int8_t> codes(static_cast<size_t>(count), 0x5e);
    std::vector<float> scales(codes.size() / 32 + 1), wanted(codes.size());
    const bool is_int8 = type == TensorType::kQ8_0 || type == TensorType::kIq4Nl || type == TensorType::kIq4Xs ||
                         type == TensorType::kMxfp4;
    ASSERT_EQ(UnpackInt8(type, Data(blocks), count, codes.data(), scales.data()), is_int8);
    if (!is_int8) {
      EXPECT_EQ(codes, std::vector<int8_t>(codes.size(), 0x5e));
      continue;
    }
    Dequantize(type, Data(blocks), count, wanted.data());
    for (size_t i = 0; i < codes.size(); ++i) {
      ASSERT_EQ(scales[i / 32] * static_cast<float>(codes[i]), wanted[i]) << TensorTypeName(type);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- GGUF

// The refusal of a GGUF file, without the path that each message begins with.
std::string GgufRefusal(std::string_view content) {
  const TempFolder folder;
  const fs::path path = folder.Write("model.gguf", content);
  const std::string message = Refusal([&] { ModelSource::Open(path); });
  EXPECT_TRUE(message.starts_with(path.string() + ": ")) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
  return message.substr(std::min(message.size(), path.string().size() + 2));
}
std::string GgufRefusal(const GgufWriter& gguf) { return GgufRefusal(gguf.Finish()); }

// The refusal after a change of the small model.
std::string ChangedGgufRefusal(const std::function<void(GgufWriter*)>& change) {
  GgufWriter gguf = SmallGguf();
  change(&gguf);
  return GgufRefusal(gguf);
}

// With the offsets written as N: they move with every byte of the header.
std::string WithoutOffsets(std::string text) {
  constexpr std::string_view kWord = "offset ";
  for (size_t at = 0; (at = text.find(kWord, at)) != std::string::npos;) {
    at += kWord.size();
    const size_t end = std::min(text.size(), text.find_first_not_of("0123456789", at));
    text.replace(at, end - at, "N");
  }
  return text;
}

std::unique_ptr<ModelSource> OpenGgufOf(const TempFolder& folder, const GgufWriter& gguf) {
  return ModelSource::Open(folder.Write("model.gguf", gguf.Finish()));
}

TEST(Gguf, AModelIsReadWithItsConfigurationTensorsAndTokenizer) {
  const TempFolder folder;
  const std::unique_ptr<ModelSource> source = OpenGgufOf(folder, SmallGguf());
  const ModelConfig& config = source->config();
  EXPECT_EQ(source->format(), "GGUF v3");
  EXPECT_EQ(source->file_bytes(), fs::file_size(folder.path() / "model.gguf"));
  EXPECT_EQ(config.architecture, "llama");
  EXPECT_EQ(config.name, "Small");
  EXPECT_EQ(config.num_layers, 1);
  EXPECT_EQ(config.hidden, 32);
  EXPECT_EQ(config.intermediate, 64);
  EXPECT_EQ(config.vocab_size, 8);
  EXPECT_EQ(config.context, 128);
  EXPECT_EQ(config.num_q_heads, 2);
  EXPECT_EQ(config.num_kv_heads, 1);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.rms_eps, 1e-5f);
  EXPECT_EQ(config.rope_base, 50000);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_TRUE(config.interleaved_rope_rows);
  EXPECT_TRUE(config.phsa_settings.empty());
  // <|im_end|> by its key, <|endoftext|> by its name.
  EXPECT_EQ(config.eos_ids, (std::vector<int32_t>{2, 0}));

  const Tensor* query = source->Find("model.layers.0.self_attn.q_proj.weight");
  ASSERT_NE(query, nullptr);
  EXPECT_EQ(query->name, "blk.0.attn_q.weight");
  EXPECT_EQ(query->type, TensorType::kQ4_0);
  EXPECT_EQ(query->shape, (std::vector<int64_t>{32, 32}));
  EXPECT_EQ(query->bytes, 32u * 18);
  EXPECT_EQ(query->data[0], 3);
  EXPECT_EQ(query->data[query->bytes - 1], 3);
  EXPECT_EQ(source->Find("model.embed_tokens.weight")->shape, (std::vector<int64_t>{8, 32}));
  EXPECT_NE(source->Find("model.layers.0.input_layernorm.weight"), nullptr);
  EXPECT_NE(source->Find("model.norm.weight"), nullptr);
  EXPECT_EQ(source->Find("lm_head.weight"), nullptr);
  EXPECT_EQ(source->Tensors().size(), 4u);

  ASSERT_TRUE(source->gguf_tokenizer());
  const GgufTokenizer& tokenizer = *source->gguf_tokenizer();
  EXPECT_EQ(tokenizer.model, "gpt2");
  EXPECT_EQ(tokenizer.pre, "smollm");
  EXPECT_EQ(tokenizer.tokens.size(), 8u);
  EXPECT_EQ(tokenizer.tokens[7], "abc");
  EXPECT_EQ(tokenizer.token_types, (std::vector<int32_t>{3, 3, 3, 1, 1, 1, 1, 1}));
  EXPECT_EQ(tokenizer.merges, (std::vector<std::string>{"a b", "ab c"}));
  EXPECT_EQ(tokenizer.bos, 1);
  EXPECT_EQ(tokenizer.eos, 2);
  EXPECT_EQ(tokenizer.unknown, -1);
  EXPECT_FALSE(tokenizer.add_bos);
  EXPECT_EQ(source->chat_template(), "{{ messages }}");
  EXPECT_FALSE(source->tokenizer_json());
  ReadEverything(*source);
}

TEST(Gguf, TheOtherKeysOfTheConfigurationAreRead) {
  const TempFolder folder;
  GgufWriter gguf = SmallGguf("qwen2");
  gguf.version = 2;
  gguf.AddInt("general.alignment", 64);
  gguf.alignment = 64;
  gguf.AddInt("qwen2.attention.key_length", 24);
  gguf.AddText("qwen2.rope.scaling.type", "yarn");
  gguf.AddFloat("qwen2.rope.scaling.factor", 4);
  gguf.AddInt("qwen2.rope.scaling.original_context_length", 32);
  gguf.AddFloat("qwen2.rope.scaling.attn_factor", 0.5f);
  gguf.AddText("phsa.settings", "{\"top_k\": 4}");
  gguf.AddFloat("general.sampling.temp", 0.7f);
  gguf.AddInt("general.sampling.top_k", 20);
  gguf.AddInt("tokenizer.ggml.eot_token_id", 1);
  gguf.AddInt("tokenizer.ggml.padding_token_id", UINT32_MAX);
  gguf.AddTensor("output.weight", {32, 8}, kGgufBf16, std::string(32 * 8 * 2, 'x'));
  gguf.AddTensor("rope_freqs.weight", {12}, kGgufF32, std::string(12 * 4, '\x3f'));
  const std::unique_ptr<ModelSource> source = OpenGgufOf(folder, gguf);
  const ModelConfig& config = source->config();
  EXPECT_EQ(source->format(), "GGUF v2");
  EXPECT_FALSE(config.interleaved_rope_rows);
  EXPECT_FALSE(config.tied_embeddings);
  EXPECT_EQ(config.head_dim, 24);
  EXPECT_EQ(config.rope_scaling.kind, RopeScaling::Kind::kYarn);
  EXPECT_EQ(config.rope_scaling.factor, 4);
  EXPECT_EQ(config.rope_scaling.original_context, 32);
  EXPECT_FLOAT_EQ(config.rope_scaling.attention_factor.value(), 0.5f * (0.1f * std::log(4.0f) + 1));
  EXPECT_EQ(config.rope_scaling.frequency_factors, std::vector<float>(12, std::bit_cast<float>(uint32_t{0x3f3f3f3f})));
  EXPECT_EQ(config.phsa_settings, "{\"top_k\": 4}");
  EXPECT_EQ(config.temperature, 0.7f);
  EXPECT_EQ(config.top_k, 20);
  EXPECT_FALSE(config.top_p);
  EXPECT_EQ(config.eos_ids, (std::vector<int32_t>{2, 1, 0}));
  EXPECT_EQ(source->gguf_tokenizer()->padding, -1);
  EXPECT_EQ(source->Find("lm_head.weight")->file_offset % 64, 0u);
}

// One number of KV heads per layer instead of one for all.
void ReplaceKvHeads(GgufWriter* gguf, const std::vector<int32_t>& heads) {
  GgufWriter list;
  list.AddInts("head_count_kv", heads);
  const size_t at = gguf->metadata.find("head_count_kv");
  gguf->metadata.replace(at, 13 + 4 + 4, list.metadata.substr(8));
}

TEST(Gguf, ANumberOfKvHeadsPerLayerMayBeThereIfAllAreEqual) {
  const TempFolder folder;
  GgufWriter gguf = SmallGguf();
  ReplaceKvHeads(&gguf, {2, 2, 2});
  EXPECT_EQ(OpenGgufOf(folder, gguf)->config().num_kv_heads, 2);
}

TEST(Gguf, Llama3WantsItsBeginTokenWhereTheFileDoesNotSay) {
  const TempFolder folder;
  GgufWriter gguf = SmallGguf();
  gguf.metadata.replace(gguf.metadata.find("smollm"), 6, "llama3");
  EXPECT_FALSE(OpenGgufOf(folder, gguf)->gguf_tokenizer()->add_bos);  // it says no
  gguf.metadata.replace(gguf.metadata.find("add_bos_token"), 13, "another_entry");
  EXPECT_TRUE(OpenGgufOf(folder, gguf)->gguf_tokenizer()->add_bos);
}

TEST(Gguf, AModelWithoutATokenizerOpens) {
  const TempFolder folder;
  GgufWriter gguf = SmallGguf();
  GgufWriter bare;
  bare.tensors = gguf.tensors;
  bare.metadata = gguf.metadata.substr(0, gguf.metadata.find("tokenizer.ggml.model") - 8);
  bare.metadata_count = 10;
  const std::unique_ptr<ModelSource> source = OpenGgufOf(folder, bare);
  EXPECT_FALSE(source->gguf_tokenizer());
  EXPECT_TRUE(source->config().eos_ids.empty());
}

TEST(Gguf, ACutAtAnyByteIsRefused) {
  const TempFolder folder;
  const std::string whole = SmallGguf().Finish();
  const fs::path path = folder.Write("model.gguf", whole);
  for (size_t size = whole.size(); size-- > 0;) {
    fs::resize_file(path, size);
    try {
      ModelSource::Open(path);
      FAIL() << "cut at " << size;
    } catch (const Error& error) {
      ASSERT_EQ(error.status(), PHSA_INVALID_ARGUMENT) << size;
    }
  }
}

TEST(Gguf, AnyFlippedBitIsEitherRefusedOrHarmless) {
  const TempFolder folder;
  const std::string whole = SmallGguf().Finish();
  const size_t data_bytes = 8 * 34 + 32 * 4 + 32 * 18 + 32 * 2;
  const fs::path path = folder.Write("model.gguf", whole);
  const int file = open(path.c_str(), O_WRONLY);
  ASSERT_GE(file, 0);
  size_t refused = 0;
  for (size_t at = 0; at < whole.size() - data_bytes; ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      const char changed = static_cast<char>(whole[at] ^ (1 << bit));
      ASSERT_EQ(pwrite(file, &changed, 1, static_cast<off_t>(at)), 1);
      try {
        ReadEverything(*ModelSource::Open(path));
      } catch (const Error&) {
        ++refused;
      }
    }
    ASSERT_EQ(pwrite(file, &whole[at], 1, static_cast<off_t>(at)), 1);
  }
  close(file);
  EXPECT_GT(refused, whole.size());
}

TEST(Gguf, WhatIsNoGgufFileIsRefusedWithWhatItLooksLike) {
  EXPECT_EQ(GgufRefusal(""), "is empty (0 bytes): fetch it again");
  EXPECT_EQ(GgufRefusal("GGML\1\0\0\0"),
            "begins with \"GGML\", a GGUF file with \"GGUF\": give a .gguf file or a Hugging "
            "Face folder");
  EXPECT_EQ(GgufRefusal("\x7f\x45L"),
            "begins with \"\\x7fEL\", a GGUF file with \"GGUF\": give a .gguf file or a Hugging "
            "Face folder");
  EXPECT_EQ(GgufRefusal("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 10\n"),
            "is a Git LFS pointer, not the model itself: run `git lfs pull` in its repository");
  EXPECT_EQ(GgufRefusal("<!DOCTYPE html><html>"),
            "is a web page, not a model: the download was answered with HTML; fetch the file again");
  EXPECT_EQ(GgufRefusal("GGUF\3"),
            "the header at offset 4 needs 4 bytes, the file ends at 5: the file is cut or "
            "damaged; fetch it again");
}

TEST(Gguf, OtherVersionsAndByteOrdersAreRefusedByName) {
  const auto with_version = [](uint32_t version) {
    return ChangedGgufRefusal([=](GgufWriter* gguf) { gguf->version = version; });
  };
  EXPECT_EQ(with_version(1), "is GGUF version 1; allowed: 2 and 3: convert it with a newer tool");
  EXPECT_EQ(with_version(4), "is GGUF version 4; allowed: 2 and 3");
  EXPECT_EQ(with_version(0), "is GGUF version 0; allowed: 2 and 3");
  EXPECT_EQ(with_version(0x03000000), "is a big-endian GGUF file; allowed: little-endian ones");
}

TEST(Gguf, CountsAndLengthsAboveTheFileAreRefusedBeforeAnythingIsAllocated) {
  std::string tensors = SmallGguf().Finish();
  tensors.replace(8, 8, Bytes(uint64_t{1} << 60));
  EXPECT_EQ(GgufRefusal(tensors), "the number of tensors at offset 8 is 1152921504606846976, too many for the " +
                                      std::to_string(tensors.size() - 16) +
                                      " bytes left: the file is cut or damaged; fetch it again");
  std::string entries = SmallGguf().Finish();
  entries.replace(16, 8, Bytes(~uint64_t{0}));
  EXPECT_TRUE(GgufRefusal(entries).starts_with("the number of metadata entries at offset 16 is 18446744073709551615"));
  std::string key = SmallGguf().Finish();
  key.replace(24, 8, Bytes(~uint64_t{0}));
  EXPECT_EQ(GgufRefusal(key), "metadata key 1 of 19 at offset 32 needs 18446744073709551615 bytes, the file ends at " +
                                  std::to_string(key.size()) + ": the file is cut or damaged; fetch it again");
  for (const uint32_t element : {GgufWriter::kUint8, GgufWriter::kString}) {
    EXPECT_TRUE(ChangedGgufRefusal([=](GgufWriter* gguf) {
                  gguf->Add("x", GgufWriter::kArray, Bytes(element) + Bytes(uint64_t{1} << 61));
                }).starts_with("the value of \"x\" at offset"));
  }
}

TEST(Gguf, DamagedMetadataAreRefusedByKey) {
  EXPECT_EQ(WithoutOffsets(ChangedGgufRefusal([](GgufWriter* gguf) { gguf->AddInt("general.name", 1); })),
            "the metadata key \"general.name\" at offset N is there twice");
  EXPECT_EQ(WithoutOffsets(ChangedGgufRefusal([](GgufWriter* gguf) { gguf->Add("x", 13, "1234"); })),
            "the value of \"x\" at offset N has the type 13; allowed: 0 to 12: the file is damaged; fetch it again");
  EXPECT_EQ(WithoutOffsets(ChangedGgufRefusal([](GgufWriter* gguf) {
              gguf->Add("x", GgufWriter::kArray, Bytes(uint32_t{GgufWriter::kArray}) + Bytes(uint64_t{1}));
            })),
            "the value of \"x\" at offset N is an array of arrays, which no known key has");
  EXPECT_EQ(WithoutOffsets(ChangedGgufRefusal([](GgufWriter* gguf) { gguf->AddInt("general.alignment", 24); })),
            "general.alignment at offset N is 24; allowed: powers of 2 from 8 to 1048576");
  EXPECT_EQ(WithoutOffsets(ChangedGgufRefusal([](GgufWriter* gguf) { gguf->AddText("general.alignment", "x"); })),
            "general.alignment at offset N has the type string; allowed: an integer");
}

TEST(Gguf, DamagedTensorsAreRefusedByNameAndOffset) {
  const auto refusal = [](std::vector<uint64_t> sizes, uint32_t type) {
    return WithoutOffsets(ChangedGgufRefusal(
        [&](GgufWriter* gguf) { gguf->AddTensor("x", std::move(sizes), type, std::string(128, 'x')); }));
  };
  EXPECT_EQ(refusal({}, kGgufF32), "the tensor \"x\" at offset N has 0 dimensions; allowed: 1 to 4");
  EXPECT_EQ(refusal({1, 1, 1, 1, 1}, kGgufF32), "the tensor \"x\" at offset N has 5 dimensions; allowed: 1 to 4");
  EXPECT_EQ(refusal({32, 0}, kGgufF32),
            "the tensor \"x\" at offset N has a dimension of 0: the file is damaged; fetch it again");
  EXPECT_EQ(refusal({1u << 31, 1u << 31, 4}, kGgufF32),
            "the tensor \"x\" at offset N has a dimension of 4: the file is damaged; fetch it again");
  EXPECT_EQ(refusal({33}, kGgufQ4_0),
            "the tensor \"x\" at offset N has rows of 33 elements; allowed for q4_0: multiples of 32");
  EXPECT_EQ(refusal({128}, kGgufQ4_K),
            "the tensor \"x\" at offset N has rows of 128 elements; allowed for q4_k: multiples of 256");
  EXPECT_EQ(
      refusal({256}, 16),
      "the tensor \"x\" at offset N has the type iq2_xxs; allowed: f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, "
      "q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4");
  EXPECT_EQ(
      refusal({256}, 999),
      "the tensor \"x\" at offset N has the type 999; allowed: f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, "
      "q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4");
  EXPECT_TRUE(refusal({uint64_t{1} << 40}, kGgufF32)
                  .starts_with("the tensor \"x\" at offset N has 1099511627776 elements, more than the file's "));
  EXPECT_EQ(WithoutOffsets(ChangedGgufRefusal(
                [](GgufWriter* gguf) { gguf->AddTensor("output_norm.weight", {1}, kGgufF32, "1234"); })),
            "the tensor \"output_norm.weight\" at offset N is there twice");
}

TEST(Gguf, TensorsThatDoNotLieAloneInTheFileAreRefused) {
  const auto with_offset = [](uint64_t offset) {
    return ChangedGgufRefusal([=](GgufWriter* gguf) { gguf->tensors[2].offset = offset; });
  };
  const std::string whole = SmallGguf().Finish();
  const size_t start = whole.find(std::string(8 * 34, '\1'));
  EXPECT_EQ(with_offset(33),
            "the tensor \"blk.0.attn_q.weight\" lies at 33 of the data; allowed: multiples of 32: the file is damaged; "
            "fetch it again");
  EXPECT_EQ(with_offset(4096), "the tensor \"blk.0.attn_q.weight\" at offset " + std::to_string(start + 4096) +
                                   " needs 576 bytes, the file ends at " + std::to_string(whole.size()) +
                                   ": the file is cut or damaged; fetch it again");
  EXPECT_TRUE(with_offset(~uint64_t{31}).starts_with("the tensor \"blk.0.attn_q.weight\" at offset "));
  EXPECT_EQ(with_offset(64), "the tensors \"token_embd.weight\" and \"blk.0.attn_q.weight\" overlap at offset " +
                                 std::to_string(start + 64) + ": the file is damaged; fetch it again");
}

TEST(Gguf, AModelWeCannotRunIsRefusedWithWhatIsAllowed) {
  const TempFolder folder;
  EXPECT_EQ(WithoutOffsets(GgufRefusal(SmallGguf("mamba"))),
            "general.architecture at offset N is \"mamba\"; allowed: " + ArchitectureNames(&Architecture::gguf));
  EXPECT_TRUE(ArchitectureNames(&Architecture::gguf).starts_with("llama, qwen2, qwen3, "));
  EXPECT_EQ(GgufRefusal(GgufWriter()), "has no general.architecture: the file is not a whole model");
  const auto with = [](const std::function<void(GgufWriter*)>& change) {
    return WithoutOffsets(ChangedGgufRefusal(change));
  };
  EXPECT_EQ(with([](GgufWriter* g) { g->AddInt("split.count", 3); }),
            "is one of 3 parts of a split model; their names must end in -00001-of-00003.gguf and so on");
  EXPECT_EQ(with([](GgufWriter* g) { g->AddInt("llama.rope.dimension_count", 8); }),
            "llama.rope.dimension_count at offset N is 8; allowed: 16, the whole head");
  EXPECT_EQ(
      with([](GgufWriter* g) { g->AddText("llama.rope.scaling.type", "longrope"); }),
      "llama.rope.scaling.type at offset N is \"longrope\"; allowed: none, linear, yarn, and longrope with its factors "
      "as tensors");
  EXPECT_EQ(with([](GgufWriter* g) { g->AddText("llama.rope.scaling.type", "yarn"); }),
            "has llama.rope.scaling.type yarn and no llama.rope.scaling.factor");
  EXPECT_EQ(with([](GgufWriter* g) { g->AddFloat("llama.rope.scale_linear", NAN); }),
            "llama.rope.scale_linear at offset N is nan; allowed: 0.001 to 1000000");
  EXPECT_EQ(with([](GgufWriter* g) { g->AddInt("llama.vocab_size", 9); }),
            "the tensor \"token_embd.weight\" at offset N has the shape [8, 32], the configuration says [9, 32]");
  EXPECT_EQ(with([](GgufWriter* g) {
              g->tensors[0].sizes = {32, 7};
            }),
            "tokenizer.ggml.tokens at offset N has 8 elements; allowed: at most 7");
  EXPECT_EQ(with([](GgufWriter* g) {
              const size_t count = g->metadata.find("token_type") + 10 + 4 + 4;
              g->metadata.replace(count, 8 + 4, Bytes(uint64_t{7}));  // and one element less
            }),
            "tokenizer.ggml.token_type at offset N has 7 elements for 8 tokens");
  EXPECT_EQ(with([](GgufWriter* g) {
              ReplaceKvHeads(g, {1, 2});
            }),
            "llama.attention.head_count_kv at offset N differs from layer to layer; allowed: one number for all");
  EXPECT_EQ(with([](GgufWriter* g) { g->AddInt("tokenizer.ggml.eot_token_id", 8); }),
            "tokenizer.ggml.eot_token_id at offset N is 8; allowed: 0 to 7");
  EXPECT_EQ(with([](GgufWriter* g) { g->tensors.erase(g->tensors.begin()); }),
            "has no tensor token_embd.weight: this is not a whole language model");
  EXPECT_EQ(with([](GgufWriter* g) { g->AddTensor("rope_freqs.weight", {4}, kGgufF32, std::string(16, '?')); }),
            "rope_freqs.weight has 4 elements; allowed for heads of 16: 8");
  EXPECT_EQ(with([](GgufWriter* g) { g->AddTensor("rope_freqs.weight", {8}, kGgufF32, std::string(32, '\0')); }),
            "rope_freqs.weight holds a number that is not above 0: the file is damaged; fetch it again");
}

// ------------------------------------------------------------------------------------------------------ safetensors

std::string SafetensorsRefusal(std::string_view content) {
  const TempFolder folder;
  const fs::path path = folder.Write("model.safetensors", content);
  const MappedFile file(path);
  const std::string message = Refusal([&] { ReadSafetensors(file); });
  EXPECT_TRUE(message.starts_with(path.string() + ": ")) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
  return message.substr(std::min(message.size(), path.string().size() + 2));
}

// A header with one tensor "x" of these fields, and eight bytes of data.
std::string OneTensor(const std::string& fields) { return Safetensors("{\"x\": {" + fields + "}}", "12345678"); }

TEST(Safetensors, TensorsAreReadInTheOrderOfTheirData) {
  const TempFolder folder;
  const MappedFile file(folder.Write(
      "x",
      Safetensors(
          "{\"__metadata__\": {\"format\": \"pt\"}, \"late\": {\"dtype\": \"BF16\", \"shape\": [2, 1], "
          "\"data_offsets\": [8, 12]}, \"early\": {\"shape\": [], \"data_offsets\": [0, 4], \"dtype\": \"F32\"}}  ",
          "abcd----efgh")));
  const std::vector<Tensor> tensors = ReadSafetensors(file);
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].name, "early");
  EXPECT_EQ(tensors[0].type, TensorType::kF32);
  EXPECT_TRUE(tensors[0].shape.empty());
  EXPECT_EQ(std::memcmp(tensors[0].data, "abcd", 4), 0);
  EXPECT_EQ(tensors[1].name, "late");
  EXPECT_EQ(tensors[1].type, TensorType::kBf16);
  EXPECT_EQ(tensors[1].shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(tensors[1].bytes, 4u);
  EXPECT_EQ(std::memcmp(tensors[1].data, "efgh", 4), 0);
  EXPECT_EQ(tensors[1].file_offset, file.size() - 4);
}

TEST(Safetensors, DamageIsRefusedWithItsPlace) {
  EXPECT_EQ(SafetensorsRefusal(""), "is empty (0 bytes): fetch it again");
  EXPECT_EQ(SafetensorsRefusal("1234"), "has 4 bytes, a safetensors file at least 8: the file is cut; fetch it again");
  EXPECT_EQ(SafetensorsRefusal("version https://git-lfs.github.com/spec/v1\n"),
            "is a Git LFS pointer, not the weights: run `git lfs pull` in its repository");
  EXPECT_EQ(
      SafetensorsRefusal(Bytes(uint64_t{100}) + "{}"),
      "the header at offset 8 needs 100 bytes, the file ends at 10: not a safetensors file, or cut; fetch it again");
  EXPECT_EQ(SafetensorsRefusal(Bytes(~uint64_t{0}) + "{}"),
            "the header at offset 8 needs 18446744073709551615 bytes, the file ends at 10: not a safetensors file, or "
            "cut; fetch it again");
  EXPECT_EQ(SafetensorsRefusal(Safetensors("PK\3\4", "")),
            "the header at offset 8 begins with \"PK\\x03\\x04\" and not with \"{\": not a safetensors file");
  EXPECT_EQ(SafetensorsRefusal(Safetensors("{\"x\": ]", "")),
            "the header is not valid JSON at offset 15: the file is damaged; fetch it again");
  EXPECT_EQ(SafetensorsRefusal(OneTensor("\"dtype\": \"I64\", \"shape\": [1], \"data_offsets\": [0, 8]")),
            "the tensor \"x\" has the dtype \"I64\"; allowed: F32, F16, BF16");
  EXPECT_EQ(SafetensorsRefusal(OneTensor("\"dtype\": \"F32\", \"shape\": [1]")),
            "the tensor \"x\" needs dtype, shape and two data_offsets");
  EXPECT_EQ(SafetensorsRefusal(OneTensor("\"dtype\": \"F32\", \"shape\": [3], \"data_offsets\": [0, 8]")),
            "the tensor \"x\" has the data_offsets 0 to 8, its shape needs 12 bytes");
  EXPECT_EQ(SafetensorsRefusal(OneTensor("\"dtype\": \"F32\", \"shape\": [2], \"data_offsets\": [8, 0]")),
            "the tensor \"x\" has the data_offsets 8 to 0, its shape needs 8 bytes");
  EXPECT_EQ(
      SafetensorsRefusal(OneTensor("\"dtype\": \"F32\", \"shape\": [3], \"data_offsets\": [0, 12]")),
      "the tensor \"x\" at 0 of the data needs 12 bytes, the file ends at 8: the file is cut or damaged; fetch it "
      "again");
  EXPECT_EQ(SafetensorsRefusal(OneTensor("\"dtype\": \"F32\", \"shape\": [4611686018427387904, 4], "
                                         "\"data_offsets\": [0, 0]")),
            "the tensor \"x\" has a dimension of 4611686018427387904: the file is damaged; fetch it again");
  EXPECT_EQ(SafetensorsRefusal(OneTensor("\"dtype\": \"F32\", \"shape\": [0], \"data_offsets\": [0, 0]")),
            "the tensor \"x\" has a dimension of 0: the file is damaged; fetch it again");
  EXPECT_EQ(SafetensorsRefusal(OneTensor("\"dtype\": \"F32\", \"shape\": [-1], \"data_offsets\": [0, 4]")),
            "the header has a negative number at \"shape\" of the tensor \"x\": the file is damaged; fetch it again");
  EXPECT_EQ(SafetensorsRefusal(OneTensor("\"shape\": [[1]]")),
            "the header has a list at \"shape\" of the tensor \"x\": the file is damaged; fetch it again");
  EXPECT_EQ(SafetensorsRefusal(OneTensor("\"shape\": {}")),
            "the header has an object at \"shape\" of the tensor \"x\": the file is damaged; fetch it again");
  EXPECT_EQ(SafetensorsRefusal(OneTensor("\"shape\": [1, 1, 1, 1, 1, 1, 1, 1, 1]")),
            "the tensor \"x\" has a list \"shape\" of more than 8 numbers");
  EXPECT_EQ(SafetensorsRefusal(Safetensors("{\"x\": 1}", "")),
            "the header has a number at \"\" of the tensor \"x\": the file is damaged; fetch it again");
  const std::string tensor = "{\"dtype\": \"F32\", \"shape\": [1], \"data_offsets\": [0, 4]}";
  EXPECT_EQ(SafetensorsRefusal(Safetensors("{\"x\": " + tensor + ", \"x\": " + tensor + "}", "1234")),
            "the tensor \"x\" is there twice");
  const std::string both =
      "{\"x\": " + tensor + ", \"y\": {\"dtype\": \"F16\", \"shape\": [1], \"data_offsets\": [2, 4]}}";
  EXPECT_EQ(SafetensorsRefusal(Safetensors(both, "1234")), "the tensors \"x\" and \"y\" overlap at offset " +
                                                               std::to_string(8 + both.size() + 2) +
                                                               ": the file is damaged; fetch it again");
}

TEST(Safetensors, ACutAtAnyByteIsRefusedAndAnyFlippedBitIsRefusedOrHarmless) {
  const TempFolder folder;
  const std::string whole = Safetensors(
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F16\",\"shape\":[2],"
      "\"data_offsets\":[8,12]}}",
      "123456789abc");
  for (size_t size = 0; size < whole.size(); ++size) {
    const MappedFile file(folder.Write("x", whole.substr(0, size)));
    EXPECT_THROW(ReadSafetensors(file), Error) << size;
  }
  for (size_t bit = 0; bit < 8 * (whole.size() - 12); ++bit) {
    std::string changed = whole;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    const MappedFile file(folder.Write("x", changed));
    try {
      for (const Tensor& tensor : ReadSafetensors(file)) {
        std::vector<float> out(static_cast<size_t>(Elements(tensor)));
        Dequantize(tensor.type, tensor.data, Elements(tensor), out.data());
      }
    } catch (const Error&) {
    }
  }
}

// ---------------------------------------------------------------------------------------------- Hugging Face folders

// One small model, as text to be changed.
const std::string kConfig = R"({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 4,
  "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 3,
  "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": true, "eos_token_id": 1})";

std::string EmbeddingFile(const std::string& name = "model.embed_tokens.weight") {
  return Safetensors("{\"" + name + "\": {\"dtype\": \"F16\", \"shape\": [3, 4], \"data_offsets\": [0, 24]}}",
                     std::string(24, 'x'));
}

// `text` with its first `from` replaced.
std::string With(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}
// The configuration with more fields.
std::string ConfigWith(const std::string& fields) { return With(kConfig, "{", "{" + fields + ", "); }

std::unique_ptr<ModelSource> OpenFolder(const TempFolder& folder, const std::string& config) {
  folder.Write("config.json", config);
  folder.Write("model.safetensors", EmbeddingFile());
  return ModelSource::Open(folder.path());
}

// The refusal of a folder, without its path.
std::string FolderRefusal(const TempFolder& folder) {
  const std::string message = Refusal([&] { ModelSource::Open(folder.path()); });
  EXPECT_TRUE(message.starts_with(folder.path().string())) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
  return message.substr(std::min(message.size(), folder.path().string().size()));
}
std::string ConfigRefusal(const std::string& config) {
  const TempFolder folder;
  folder.Write("config.json", config);
  folder.Write("model.safetensors", EmbeddingFile());
  return FolderRefusal(folder);
}

TEST(HuggingFace, MiniCpm4sSparseSettingsAreThoseOfInfLlm2) {
  const std::string mini = With(With(kConfig, "Qwen2ForCausalLM", "MiniCPMForCausalLM"), "\"qwen2\"", "\"minicpm\"");
  const auto with = [&](const std::string& sparse) {
    return With(mini, "{", "{\"sparse_config\": {" + sparse + "}, ");
  };
  const auto settings_of = [&](const std::string& config) {
    const TempFolder folder;
    return OpenFolder(folder, config)->config().phsa_settings;
  };
  EXPECT_EQ(settings_of(mini), "");
  EXPECT_EQ(settings_of(with("")), R"({"attention":"infllm2-64","block":64,"dense_below":8192,"init":64,"local":2048,)"
                                   R"("top_k":63})");
  EXPECT_EQ(settings_of(with(R"("kernel_size": 32, "kernel_stride": 16, "init_blocks": 2, "block_size": 64,
                              "window_size": 1000, "topk": 32, "use_nope": false, "dense_len": 100)")),
            R"({"attention":"infllm2-64","block":64,"dense_below":128,"init":128,"local":1024,)"
            R"("top_k":30})");
  EXPECT_EQ(ConfigRefusal(with("\"block_size\": 32")), "/config.json: sparse_config: block_size is 32; allowed: 64");
  EXPECT_EQ(ConfigRefusal(with("\"use_nope\": true")), "/config.json: sparse_config: use_nope is true; allowed: false");
  EXPECT_EQ(ConfigRefusal(with("\"topk\": -1")), "/config.json: sparse_config: topk is -1; allowed: 0 to 16384");
  // What phsa itself wrote into the file comes first, and other families have no such object.
  EXPECT_EQ(settings_of(With(with(""), "{", "{\"phsa\": {\"top_k\": 8}, ")), "{\"top_k\":8}");
  EXPECT_EQ(settings_of(ConfigWith("\"sparse_config\": {}")), "");
}

TEST(HuggingFace, AFolderIsReadWithItsConfigurationTensorsAndTokenizer) {
  const TempFolder folder;
  folder.Write("generation_config.json", R"({"eos_token_id": [2, 0], "do_sample": true, "temperature": 0.6, "top_k": 20,
    "top_p": 0.95, "repetition_penalty": 1.1})");
  folder.Write("tokenizer.json", "{}");
  folder.Write("tokenizer_config.json", R"({"chat_template": "from the configuration"})");
  std::unique_ptr<ModelSource> source = OpenFolder(folder, ConfigWith(R"("phsa": {"top_k": 8}, "rope_theta": 5000)"));
  const ModelConfig& config = source->config();
  EXPECT_EQ(source->format(), "Hugging Face, 1 safetensors file");
  EXPECT_EQ(config.architecture, "qwen2");
  EXPECT_EQ(config.name, folder.path().filename());
  EXPECT_EQ(config.num_layers, 1);
  EXPECT_EQ(config.hidden, 4);
  EXPECT_EQ(config.intermediate, 8);
  EXPECT_EQ(config.vocab_size, 3);
  EXPECT_EQ(config.context, 64);
  EXPECT_EQ(config.num_q_heads, 2);
  EXPECT_EQ(config.num_kv_heads, 2);
  EXPECT_EQ(config.head_dim, 2);
  EXPECT_EQ(config.rms_eps, 1e-6f);
  EXPECT_EQ(config.rope_base, 5000);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_FALSE(config.interleaved_rope_rows);
  EXPECT_EQ(config.phsa_settings, R"({"top_k":8})");
  EXPECT_EQ(config.eos_ids, (std::vector<int32_t>{2, 0}));
  EXPECT_EQ(config.temperature, 0.6f);
  EXPECT_EQ(config.top_k, 20);
  EXPECT_EQ(config.top_p, 0.95f);
  EXPECT_FALSE(config.min_p);
  EXPECT_EQ(config.repetition_penalty, 1.1f);
  EXPECT_EQ(source->tokenizer_json(), folder.path() / "tokenizer.json");
  EXPECT_FALSE(source->gguf_tokenizer());
  EXPECT_EQ(source->chat_template(), "from the configuration");
  EXPECT_EQ(source->tokenizer_config(), R"({"chat_template": "from the configuration"})");
  ASSERT_NE(source->Find("model.embed_tokens.weight"), nullptr);
  EXPECT_EQ(source->Find("model.embed_tokens.weight")->shape, (std::vector<int64_t>{3, 4}));
  ReadEverything(*source);
}

TEST(HuggingFace, AChatTemplateInAFileOfItsOwnWins) {
  const TempFolder folder;
  folder.Write("tokenizer_config.json",
               R"({"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]})");
  EXPECT_EQ(OpenFolder(folder, kConfig)->chat_template(), "d");
  folder.Write("chat_template.json", R"({"chat_template": "json"})");
  EXPECT_EQ(OpenFolder(folder, kConfig)->chat_template(), "json");
  folder.Write("chat_template.jinja", "jinja");
  EXPECT_EQ(OpenFolder(folder, kConfig)->chat_template(), "jinja");
}

TEST(HuggingFace, RopeIsReadInTheOldStyleAndTheNew) {
  const TempFolder folder;
  const auto config_of = [&](const std::string& fields) { return OpenFolder(folder, ConfigWith(fields))->config(); };
  const ModelConfig llama3 = config_of(R"("rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
    "low_freq_factor": 2.0, "high_freq_factor": 5.0, "original_max_position_embeddings": 32})");
  EXPECT_EQ(llama3.rope_base, 500000);
  EXPECT_EQ(llama3.rope_scaling.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(llama3.rope_scaling.factor, 8);
  EXPECT_EQ(llama3.rope_scaling.low_freq_factor, 2);
  EXPECT_EQ(llama3.rope_scaling.high_freq_factor, 5);
  EXPECT_EQ(llama3.rope_scaling.original_context, 32);

  const ModelConfig yarn = config_of(R"("rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4,
    "mscale": 0.7, "truncate": false, "beta_fast": 16})");
  EXPECT_EQ(yarn.rope_base, 1e6f);
  EXPECT_EQ(yarn.rope_scaling.kind, RopeScaling::Kind::kYarn);
  EXPECT_EQ(yarn.rope_scaling.original_context, 64);  // max_position_embeddings
  EXPECT_EQ(yarn.rope_scaling.mscale, 0.7f);
  EXPECT_FALSE(yarn.rope_scaling.mscale_all_dim);
  EXPECT_FALSE(yarn.rope_scaling.truncate);
  EXPECT_EQ(yarn.rope_scaling.beta_fast, 16);
  EXPECT_EQ(yarn.rope_scaling.beta_slow, 1);

  EXPECT_EQ(config_of(R"("rope_scaling": {"type": "linear", "factor": 2})").rope_scaling.kind,
            RopeScaling::Kind::kLinear);
  const ModelConfig plain =
      config_of(R"("rope_scaling": null, "rope_parameters": {"rope_type": "default", "rope_theta": 7})");
  EXPECT_EQ(plain.rope_scaling.kind, RopeScaling::Kind::kNone);
  EXPECT_EQ(plain.rope_base, 7);
}

TEST(HuggingFace, AConfigurationWeDoNotComputeIsRefusedWithWhatIsAllowed) {
  EXPECT_EQ(ConfigRefusal(With(kConfig, "Qwen2ForCausalLM", "GemmaForCausalLM")),
            "/config.json: architectures is \"GemmaForCausalLM\"; allowed: " +
                ArchitectureNames(&Architecture::hugging_face_class));
  EXPECT_EQ(ConfigRefusal(With(With(kConfig, "[\"Qwen2ForCausalLM\"]", "null"), "qwen2", "mamba")),
            "/config.json: model_type is \"mamba\"; allowed: " + ArchitectureNames(&Architecture::hugging_face));
  EXPECT_EQ(ConfigRefusal(With(kConfig, "silu", "gelu")), "/config.json: hidden_act is \"gelu\"; allowed: silu");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"layer_types\": [\"sliding_attention\"]")),
            "/config.json: sliding_window is missing; layer_types has sliding_attention");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"layer_types\": [\"linear_attention\"]")),
            "/config.json: layer_types has \"linear_attention\"; allowed: full_attention, sliding_attention");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"layer_types\": [\"full_attention\", \"full_attention\"]")),
            "/config.json: layer_types lists 2 layers; the model has 1");
  EXPECT_EQ(
      ConfigRefusal(ConfigWith("\"quantization_config\": {\"quant_method\": \"gptq\"}")),
      "/config.json: quantization_config: quant_method is \"gptq\"; allowed: weights in F32, F16 or BF16, or a GGUF "
      "file");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"rope_scaling\": {\"rope_type\": \"dynamic\"}")),
            "/config.json: rope_scaling: rope_type is \"dynamic\"; allowed: default, linear, llama3, yarn, longrope");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"rope_scaling\": {\"rope_type\": \"longrope\"}")),
            "/config.json: rope_scaling: short_factor is not a list of 1 numbers");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"rope_scaling\": {\"rope_type\": \"yarn\"}")),
            "/config.json: rope_scaling: factor is missing");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"partial_rotary_factor\": 0.5")),
            "/config.json: partial_rotary_factor is 0.5; allowed: 1, the whole head");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"num_key_value_heads\": 3")),
            "/config.json: 2 query heads cannot share 3 KV heads evenly");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"head_dim\": 3")), "/config.json: the head size is 3; allowed: even numbers");
  EXPECT_EQ(ConfigRefusal(With(kConfig, "\"eos_token_id\": 1", "\"eos_token_id\": 3")),
            "/config.json: the end token is 3; allowed: 0 to 2");
  EXPECT_EQ(ConfigRefusal(With(kConfig, "\"intermediate_size\": 8, ", "")),
            "/config.json: intermediate_size is missing; allowed: 1 to 16777216");
  EXPECT_EQ(ConfigRefusal(With(kConfig, "\"hidden_size\": 4", "\"hidden_size\": 1e400")),
            "/config.json: holds a number that is too large");
  EXPECT_EQ(ConfigRefusal(With(kConfig, "\"hidden_size\": 4", "\"hidden_size\": -4")),
            "/config.json: hidden_size is -4; allowed: 1 to 16777216");
  EXPECT_EQ(ConfigRefusal(With(kConfig, "\"hidden_size\": 4", "\"hidden_size\": 18446744073709551615")),
            "/config.json: hidden_size is 18446744073709551615; allowed: 1 to 16777216");
  EXPECT_EQ(ConfigRefusal(With(kConfig, "\"hidden_size\": 4", "\"hidden_size\": 4.5")),
            "/config.json: hidden_size is 4.5; allowed: 1 to 16777216");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"rms_norm_eps\": \"small\"")),
            "/config.json: rms_norm_eps is \"small\"; allowed: 0 to 1");
  EXPECT_EQ(ConfigRefusal(ConfigWith("\"vocab_size\": 3")), "/config.json: the key \"vocab_size\" is there twice");
  EXPECT_EQ(ConfigRefusal("[1]"), "/config.json: is not a JSON object");
  EXPECT_EQ(ConfigRefusal("{\"a\": "), "/config.json: is not valid JSON at offset 7");
  EXPECT_EQ(ConfigRefusal(std::string(40, '[')), "/config.json: is nested deeper than 32 levels");
}

TEST(HuggingFace, ConfigurationAndWeightsMustBelongTogether) {
  const std::string shape = ConfigRefusal(With(kConfig, "\"vocab_size\": 3", "\"vocab_size\": 5"));
  EXPECT_EQ(WithoutOffsets(shape),
            "/model.safetensors: the tensor \"model.embed_tokens.weight\" at offset N has the shape [3, 4], the "
            "configuration says [5, 4]");
  EXPECT_EQ(ConfigRefusal(With(kConfig, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false")),
            "/config.json: tie_word_embeddings is false, but there is no tensor lm_head.weight");
  const TempFolder folder;
  EXPECT_TRUE(OpenFolder(folder, With(kConfig, "\"tie_word_embeddings\": true, ", ""))->config().tied_embeddings);
}

TEST(HuggingFace, MissingFilesAreNamedWithWhatToDo) {
  const TempFolder folder;
  EXPECT_EQ(FolderRefusal(folder), ": has no config.json: give a Hugging Face folder or a .gguf file");
  const fs::path gguf = folder.Write("m.gguf", "GGUF");
  EXPECT_EQ(FolderRefusal(folder), ": has no config.json, but a GGUF model: give " + gguf.string());
  const fs::path config = folder.Write("config.json", kConfig);
  EXPECT_EQ(FolderRefusal(folder),
            ": has neither model.safetensors nor model.safetensors.index.json: fetch the weights");
  folder.Write("pytorch_model.bin", "");
  EXPECT_EQ(FolderRefusal(folder),
            ": has its weights in pytorch_model.bin only: convert them to safetensors (transformers: from_pretrained, "
            "then save_pretrained)");
  EXPECT_EQ(Refusal([&] { ModelSource::Open(config); }),
            config.string() + ": is one file of a Hugging Face model: give the folder that it is in");
}

TEST(HuggingFace, ShardsAreReadAsTheIndexSays) {
  const TempFolder folder;
  folder.Write("config.json", kConfig);
  folder.Write(
      "model.safetensors.index.json",
      R"({"metadata": {}, "weight_map": {"model.embed_tokens.weight": "a.safetensors", "x": "b.safetensors"}})");
  folder.Write("a.safetensors", EmbeddingFile());
  EXPECT_EQ(
      FolderRefusal(folder),
      "/model.safetensors.index.json: \"b.safetensors\" is missing, 1 of the model's tensors are in it: fetch it");
  // As in the cache of the Hugging Face hub: a link to where the bytes are.
  folder.Write("blobs/0123", EmbeddingFile("x"));
  fs::create_symlink("blobs/0123", folder.path() / "b.safetensors");
  const std::unique_ptr<ModelSource> source = ModelSource::Open(folder.path());
  EXPECT_EQ(source->format(), "Hugging Face, 2 safetensors files");
  EXPECT_EQ(source->Tensors().size(), 2u);
  ASSERT_NE(source->Find("x"), nullptr);
  EXPECT_EQ(source->Find("x")->file, (folder.path() / "b.safetensors").string());
  ReadEverything(*source);

  folder.Write("model.safetensors.index.json", R"({"weight_map": {"model.embed_tokens.weight": "b.safetensors"}})");
  EXPECT_EQ(FolderRefusal(folder),
            "/model.safetensors.index.json: the tensor \"model.embed_tokens.weight\" should be in " +
                (folder.path() / "b.safetensors").string() + " and is not");
  folder.Write("model.safetensors.index.json", R"({"weight_map": {"x": "../b.safetensors"}})");
  EXPECT_EQ(
      FolderRefusal(folder),
      "/model.safetensors.index.json: \"x\" is in \"../b.safetensors\"; allowed: the name of a file beside the index");
  folder.Write("model.safetensors.index.json", R"({"weight_map": {}})");
  EXPECT_EQ(FolderRefusal(folder), "/model.safetensors.index.json: has no weight_map");
}

TEST(HuggingFace, AHeadInTheFileIsNotUsedWhereTheConfigurationTiesIt) {
  const TempFolder folder;
  const std::string tensors =
      R"({"model.embed_tokens.weight": {"dtype": "F16", "shape": [3, 4], "data_offsets": [0, 24]},
    "lm_head.weight": {"dtype": "F16", "shape": [3, 4], "data_offsets": [24, 48]}})";
  folder.Write("config.json", kConfig);
  folder.Write("model.safetensors", Safetensors(tensors, std::string(48, 'x')));
  EXPECT_EQ(ModelSource::Open(folder.path())->Find("lm_head.weight"), nullptr);
  folder.Write("config.json", With(kConfig, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"));
  EXPECT_NE(ModelSource::Open(folder.path())->Find("lm_head.weight"), nullptr);
}

}  // namespace
}  // namespace phsa
