#include "tokenizer/pre_tokenization.h"

#include "base/errors.h"
#include "tokenizer/tokenizer_parts.h"

namespace phsa {
namespace {

constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|)"
    R"(\s+(?!\S)|\s+)";
constexpr std::string_view kDeepSeek3 =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr std::string_view kTekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr PreTokenization kKnown[] = {
    {.name = "gpt-2", .patterns = {kGpt2Pattern}},
    {.name = "smollm", .patterns = {kGpt2Pattern}, .single_digits = true},
    {.name = "starcoder", .patterns = {kGpt2Pattern}, .single_digits = true},
    {.name = "qwen2", .patterns = {kQwen2}, .nfc = true},
    {.name = "deepseek-r1-qwen", .patterns = {kQwen2}, .nfc = true},
    {.name = "llama-bpe", .patterns = {kLlama3}, .whole_words = true},
    {.name = "llama3", .patterns = {kLlama3}, .whole_words = true},
    {.name = "llama-v3", .patterns = {kLlama3}, .whole_words = true},
    {.name = "dbrx", .patterns = {kLlama3}},  // Phi-4
    {.name = "glm4", .patterns = {kLlama3}},
    {.name = "chatglm-bpe", .patterns = {kLlama3}},
    {.name = "refact", .patterns = {kGpt2Pattern}, .single_digits = true},  // Granite
    {.name = "tekken", .patterns = {kTekken}, .whole_words = true},         // Mistral since Nemo
    {.name = "deepseek-v3", .patterns = {R"(\p{N}{1,3})", "[一-龥぀-ゟ゠-ヿ]+", kDeepSeek3}},
};

}  // namespace

std::span<const PreTokenization> KnownPreTokenizations() { return kKnown; }

std::string PreTokenizationNames() {
  std::string names;
  for (const PreTokenization& known : kKnown) {
    names += names.empty() ? "" : ", ";
    names += known.name;
  }
  return names;
}

const PreTokenization& FindPreTokenization(const std::string& name, const std::string& file) {
  for (const PreTokenization& known : kKnown) {
    if (known.name == name) return known;
  }
  ThrowInvalid("{}: tokenizer.ggml.pre is {}; known: {}", file, Quoted(name), PreTokenizationNames());
}

}  // namespace phsa
