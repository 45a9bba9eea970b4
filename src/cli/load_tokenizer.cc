#include "cli/load_tokenizer.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/mapped_file.h"
#include "cli/options.h"

namespace phsa::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxTokenizerBytes = size_t{512} << 20;
constexpr size_t kMaxConfigBytes = size_t{16} << 20;

std::string ReadIfThere(const fs::path& path) {
  return fs::is_regular_file(path) ? ReadTextFile(path, kMaxConfigBytes) : "";
}

// A tokenizer.json alone, or a folder that has one: its neighbours tell of the chat template, and no weights are
// needed.
LoadedTokenizer LoadJson(const fs::path& json) {
  const std::string config = ReadIfThere(json.parent_path() / "tokenizer_config.json");
  std::string chat = ReadIfThere(json.parent_path() / "chat_template.jinja");
  if (chat.empty() && !config.empty()) {
    const nlohmann::json parsed = nlohmann::json::parse(config, nullptr, /*allow_exceptions=*/false);
    if (parsed.is_discarded()) ThrowInvalid("tokenizer_config.json: this is not JSON");
    if (parsed.is_object() && parsed.contains("chat_template") && parsed["chat_template"].is_string()) {
      chat = parsed["chat_template"].get<std::string>();
    }
  }
  return {Tokenizer::FromJson(ReadTextFile(json, kMaxTokenizerBytes), config, json.string()), chat};
}

}  // namespace

LoadedTokenizer LoadTokenizerAt(const std::string& path) {
  if (fs::is_regular_file(path) && fs::path(path).extension() == ".json") return LoadJson(path);
  if (fs::is_regular_file(fs::path(path) / "tokenizer.json")) return LoadJson(fs::path(path) / "tokenizer.json");
  const std::unique_ptr<ModelSource> source = OpenModel(path);
  return {LoadTokenizer(*source), source->chat_template()};
}

}  // namespace phsa::cli
