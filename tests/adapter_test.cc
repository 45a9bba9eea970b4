// LoRA adapters: what is read of one, and what is refused. That the numbers are PEFT's is tests/e2e/test_adapter.py's.
#include "io/adapter.h"

#include <gtest/gtest.h>

#include <cmath>

#include "io/model_source.h"
#include "io/model_writer.h"
#include "model_files.h"
#include "refusal.h"

namespace phsa {
namespace {

constexpr const char* kPrefix = "base_model.model.model.layers.";

// A model of two layers, 8 wide, with 4 KV columns.
Adapter::Base SmallBase() {
  Adapter::Base base{"model", 2, {}};
  base.shape = [](const std::string& name) -> std::vector<int64_t> {
    if (!name.starts_with("model.layers.0.") && !name.starts_with("model.layers.1.")) return {};
    return name.find("k_proj") != std::string::npos ? std::vector<int64_t>{4, 8} : std::vector<int64_t>{8, 8};
  };
  return base;
}

using Tensors = std::vector<OutputTensor>;

// A and B of q_proj and k_proj in both layers, of rank 2.
Tensors SmallTensors() {
  Tensors tensors;
  for (const char* layer : {"0", "1"}) {
    for (const auto& [module, rows] : {std::pair<std::string, int64_t>{"q_proj", 8}, {"k_proj", 4}}) {
      const std::string at = kPrefix + std::string(layer) + ".self_attn." + module;
      tensors.push_back({at + ".lora_A.weight", TensorType::kF32, {2, 8}});
      tensors.push_back({at + ".lora_B.weight", TensorType::kF32, {rows, 2}});
    }
  }
  return tensors;
}

const std::string kConfig = R"({"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"],
  "bias": "none", "task_type": "CAUSAL_LM", "use_dora": false, "modules_to_save": null, "base_model_name_or_path": "x/y"})";

std::string ConfigWith(const std::string& fields) { return "{" + fields + ", " + kConfig.substr(1); }
std::string With(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string File(const Tensors& tensors) {
  uint64_t bytes = 0;
  for (const OutputTensor& tensor : tensors) bytes += tensor.bytes();
  return SafetensorsHeader(tensors) + std::string(bytes, '\0');
}

std::unique_ptr<Adapter> Open(const TempFolder& folder, const std::string& config = kConfig,
                              const Tensors& tensors = SmallTensors()) {
  folder.Write("adapter_config.json", config);
  folder.Write("adapter_model.safetensors", File(tensors));
  return Adapter::Open(folder.path(), SmallBase());
}

std::string RefusalOf(const std::string& config, const Tensors& tensors = SmallTensors()) {
  const TempFolder folder;
  std::string message = Refusal([&] { Open(folder, config, tensors); });
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_NE(message.find("adapter_"), std::string::npos) << message;
  return message;
}

void ExpectRefused(const std::string& config, const std::string& part) {
  const std::string message = RefusalOf(config);
  EXPECT_NE(message.find(part), std::string::npos) << message;
}
void ExpectRefused(const Tensors& tensors, const std::string& part) {
  const std::string message = RefusalOf(kConfig, tensors);
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST(Adapter, ItIsReadWithItsScaleItsBaseAndItsSettings) {
  const TempFolder folder;
  folder.Write("phsa.json", R"({"top_k": 2})");
  const auto adapter = Open(folder);
  EXPECT_EQ(adapter->matrices().size(), 4u);
  EXPECT_EQ(adapter->base_model(), "x/y");
  EXPECT_EQ(adapter->phsa_settings(), R"({"top_k": 2})");
  EXPECT_EQ(adapter->Text(), "LoRA, rank 2, 4 matrices, f32");
  const LowRankTensors* const found = adapter->Find("model.layers.1.self_attn.k_proj.weight");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->scale, 4.0f);
  EXPECT_EQ(found->b.shape, (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(adapter->Find("model.layers.1.self_attn.v_proj.weight"), nullptr);
}

TEST(Adapter, ScalesFollowRsloraAndThePatterns) {
  const TempFolder folder;
  EXPECT_FLOAT_EQ(Open(folder, ConfigWith(R"("use_rslora": true)"))->matrices().begin()->second.scale,
                  8 / std::sqrt(2.0f));
  const auto scale = [&](const std::string& fields, const char* module) {
    return Open(folder, ConfigWith(fields))->Find(std::string("model.layers.") + module + ".weight")->scale;
  };
  const std::string pattern = R"("alpha_pattern": {"k_proj": 2, "layers\\.1\\.self_attn\\.q_.*": 6})";
  EXPECT_EQ(scale(pattern, "0.self_attn.k_proj"), 1.0f);
  EXPECT_EQ(scale(pattern, "0.self_attn.q_proj"), 4.0f);
  EXPECT_EQ(scale(pattern, "1.self_attn.q_proj"), 3.0f);
  Tensors tensors = SmallTensors();
  tensors[0].shape = {3, 8};
  tensors[1].shape = {8, 3};
  const auto adapter = Open(folder, ConfigWith(R"("rank_pattern": {"model.layers.0.self_attn.q_proj": 3})"), tensors);
  EXPECT_FLOAT_EQ(adapter->Find("model.layers.0.self_attn.q_proj.weight")->scale, 8.0f / 3);
  ExpectRefused(ConfigWith(R"("rank_pattern": {"k_proj": 3})"), "has the rank 2; adapter_config.json says 3");
  ExpectRefused(ConfigWith(R"("alpha_pattern": {"k_proj": 3, ".*proj": 4})"), "leave one of them out");
  ExpectRefused(ConfigWith(R"("alpha_pattern": {"(": 3})"), "no regular expression");
  ExpectRefused(ConfigWith(R"("alpha_pattern": {"((\\w+\\.?)+)+[,;]": 3})"), "takes too long");
}

TEST(Adapter, WhatItWouldComputeDifferentlyIsRefusedByName) {
  ExpectRefused(With(kConfig, "LORA", "IA3"), "peft_type is \"IA3\"; allowed: LORA");
  ExpectRefused(With(kConfig, "CAUSAL_LM", "SEQ_CLS"), "task_type is \"SEQ_CLS\"");
  ExpectRefused(With(kConfig, "\"none\"", "\"all\""), "bias is \"all\"; allowed: none");
  ExpectRefused(With(kConfig, "\"use_dora\": false", "\"use_dora\": true"),
                "\"use_dora\" is true, which is not supported");
  ExpectRefused(With(kConfig, "\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]"), "modules_to_save");
  ExpectRefused(ConfigWith(R"("fan_in_fan_out": true)"), "fan_in_fan_out is true");
  ExpectRefused(ConfigWith(R"("init_lora_weights": "pissa")"), "init_lora_weights is \"pissa\"");
  ExpectRefused(ConfigWith(R"("layer_replication": [[0, 1]])"), "layer_replication");
  ExpectRefused(ConfigWith(R"("a_feature_of_tomorrow": {"x": 1})"), "\"a_feature_of_tomorrow\"");
  const TempFolder folder;
  EXPECT_NO_THROW(Open(folder, ConfigWith(R"("a_feature_of_tomorrow": null, "init_lora_weights": "gaussian")")));
}

TEST(Adapter, TensorsThatDoNotFitAreRefusedByName) {
  Tensors tensors = SmallTensors();
  tensors.pop_back();
  ExpectRefused(tensors, "but not its other half, lora_B");
  for (const auto& [name, part] :
       {std::pair{"base_model.model.lm_head.lora_A.weight", "changes \"lm_head\""},
        {"base_model.model.model.layers.0.mlp.router.lora_A.weight", "changes \"model.layers.0.mlp.router\""},
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "belongs to DoRA"},
        {"base_model.model.model.embed_tokens.lora_embedding_A", "LoRA on embeddings"},
        {"base_model.model.lm_head.modules_to_save.weight", "modules_to_save"},
        {"base_model.model.model.layers.0.self_attn.q_proj.bias", "trained biases"},
        {"model.layers.0.self_attn.q_proj.weight", "not one of PEFT's LoRA"}}) {
    Tensors more = SmallTensors();
    more.push_back({name, TensorType::kF32, {2, 8}});
    ExpectRefused(more, part);
  }
  tensors = SmallTensors();
  tensors[0].shape = {2, 16};
  ExpectRefused(tensors, "they do not fit the model's [8, 8]: the adapter is of another model");
  tensors = SmallTensors();
  tensors[1].shape = {8, 3};
  ExpectRefused(tensors, "they do not fit");
  tensors = SmallTensors();
  tensors[0].shape = {16};
  ExpectRefused(tensors, "allowed: two dimensions");
  tensors = SmallTensors();
  for (OutputTensor& tensor : tensors) {
    if (tensor.name.find("layers.1") != std::string::npos) tensor.name[std::string_view(kPrefix).size()] = '7';
  }
  ExpectRefused(tensors, "changes \"model.layers.7.self_attn.k_proj\", which the model model does not have");
  ExpectRefused(Tensors(), "has no tensors");
}

TEST(Adapter, OneOfAModelWithFewerLayersIsRefused) {
  Tensors tensors = SmallTensors();
  tensors.resize(4);
  ExpectRefused(tensors, "covers model.layers.1.self_attn.q_proj, but adapter_model.safetensors has no tensors for it");
  const TempFolder folder;
  EXPECT_NO_THROW(Open(folder, ConfigWith(R"("layers_to_transform": [0])"), tensors));
  EXPECT_NO_THROW(Open(folder, With(kConfig, R"(["q_proj", "k_proj"])", R"(".*layers\\.0.*[qk]_proj")"), tensors));
}

TEST(Adapter, FoldersThatHoldNoneAreRefused) {
  const TempFolder folder;
  const auto refusal = [&] { return Refusal([&] { Adapter::Open(folder.path(), SmallBase()); }); };
  EXPECT_NE(refusal().find("has no adapter_config.json"), std::string::npos);
  folder.Write("adapter_config.json", kConfig);
  EXPECT_NE(refusal().find("has no adapter_model.safetensors: fetch it"), std::string::npos);
  folder.Write("adapter_model.bin", "");
  EXPECT_NE(refusal().find("only adapter_model.bin"), std::string::npos);
  folder.Write("adapter_model.safetensors", File(SmallTensors()));
  folder.Write("phsa.json", "");
  EXPECT_NE(refusal().find("phsa.json: is empty"), std::string::npos);
  EXPECT_NE(Refusal([&] { Adapter::Open(folder.path() / "phsa.json", SmallBase()); }).find("is no folder"),
            std::string::npos);
  EXPECT_NE(Refusal([&] { ModelSource::Open(folder.path()); }).find("give its folder as adapter"), std::string::npos);
}

TEST(ModelWriter, NumbersAreRoundedAsTheyAreReadBack) {
  const std::vector<float> values = [] {
    std::vector<float> out;
    for (int i = 0; i < 64; ++i) out.push_back(std::sin(static_cast<float>(i)) * 3);
    return out;
  }();
  for (const auto& [type, error] : {std::pair{TensorType::kF32, 0.0f},
                                    {TensorType::kF16, 0x1p-11f},
                                    {TensorType::kBf16, 0x1p-8f},
                                    {TensorType::kQ8_0, 0.5f / 127 + 0x1p-11f}}) {
    const OutputTensor tensor{"x", type, {2, 32}};
    std::vector<uint8_t> bytes(tensor.bytes());
    ASSERT_TRUE(Quantize(type, values.data(), 64, bytes.data()));
    std::vector<float> back(64);
    Dequantize(type, bytes.data(), 64, back.data());
    for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], back[i], 3 * error) << TensorTypeName(type);
  }
}

TEST(ModelWriter, WhatATypeCannotHoldIsTold) {
  std::vector<float> values(32, 1e5f);
  std::vector<uint8_t> bytes(128);
  EXPECT_FALSE(Quantize(TensorType::kF16, values.data(), 32, bytes.data()));
  EXPECT_TRUE(Quantize(TensorType::kBf16, values.data(), 32, bytes.data()));
  EXPECT_TRUE(Quantize(TensorType::kQ8_0, values.data(), 32, bytes.data()));
  values[3] = 1e8f;
  EXPECT_FALSE(Quantize(TensorType::kQ8_0, values.data(), 32, bytes.data()));
}

}  // namespace
}  // namespace phsa
