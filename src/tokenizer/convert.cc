#include "tokenizer/convert.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "base/errors.h"
#include "tokenizer/pre_tokenization.h"
#include "tokenizer/tokenizer_parts.h"

namespace phsa {
namespace {

using Json = nlohmann::ordered_json;

// GGUF's token types.
constexpr int32_t kNormal = 1, kControl = 3, kUserDefined = 4, kUnused = 5;

Json ByteLevel(bool use_regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

Json PreTokenizerJson(const PreTokenization& pre) {
  Json steps = Json::array();
  if (pre.single_digits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  for (const std::string_view pattern : pre.patterns) {
    if (pattern.empty()) continue;
    steps.push_back(
        {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
  }
  steps.push_back(ByteLevel(false));
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

// What adds the begin token, where the model expects one.
Json PostProcessorJson(const BpeVocabulary& vocabulary) {
  const bool has_bos = vocabulary.bos >= 0 && static_cast<size_t>(vocabulary.bos) < vocabulary.tokens.size();
  if (!vocabulary.add_bos || !has_bos) return ByteLevel(true);
  const std::string& bos = vocabulary.tokens[static_cast<size_t>(vocabulary.bos)];
  const Json begin = {{"SpecialToken", {{"id", bos}, {"type_id", 0}}}};
  const auto text = [](const char* id, int type) { return Json{{"Sequence", {{"id", id}, {"type_id", type}}}}; };
  return {{"type", "TemplateProcessing"},
          {"single", Json::array({begin, text("A", 0)})},
          {"pair", Json::array({begin, text("A", 0), begin, text("B", 1)})},
          {"special_tokens", {{bos, {{"id", bos}, {"ids", {vocabulary.bos}}, {"tokens", {bos}}}}}}};
}

// The steps of a pre_tokenizer in the words of PreTokenization; false where it has others.
struct Steps {
  std::vector<std::string> patterns;
  bool single_digits = false;
};
bool ReadSteps(const Json& step, Steps& out) {
  const auto flag = [&](const char* name, bool otherwise) {
    const auto found = step.find(name);
    return found == step.end() || found->is_null() ? otherwise : found->get<bool>();
  };
  const auto& type = step.at("type").get_ref<const std::string&>();
  if (type == "Sequence") {
    return std::all_of(step.at("pretokenizers").begin(), step.at("pretokenizers").end(),
                       [&](const Json& inner) { return ReadSteps(inner, out); });
  }
  if (type == "Digits") {
    if (!flag("individual_digits", false) || out.single_digits || !out.patterns.empty()) return false;
    out.single_digits = true;
    return true;
  }
  if (type == "Split") {
    const Json& pattern = step.at("pattern");
    if (!pattern.contains("Regex") || step.at("behavior") != "Isolated" || flag("invert", false)) return false;
    out.patterns.push_back(pattern.at("Regex").get<std::string>());
    return true;
  }
  if (type == "ByteLevel") {
    if (flag("use_regex", true)) out.patterns.emplace_back(kGpt2Pattern);
    return !flag("add_prefix_space", true);
  }
  return false;
}

[[noreturn]] void RefuseSentencePiece(const std::string& file) {
  Throw(PHSA_UNSUPPORTED, "{}: has a SentencePiece vocabulary, which export cannot write yet", file);
}

bool Same(const PreTokenization& known, const Steps& steps) {
  std::vector<std::string> patterns;
  for (const std::string_view pattern : known.patterns) {
    if (!pattern.empty()) patterns.emplace_back(pattern);
  }
  return known.single_digits == steps.single_digits && patterns == steps.patterns;
}

}  // namespace

std::string TokenizerJson(const BpeVocabulary& vocabulary, const std::string& file) {
  Tokenizer::FromVocabulary(vocabulary, file);  // judges it
  if (vocabulary.model != "gpt2") RefuseSentencePiece(file);
  const PreTokenization& pre = FindPreTokenization(vocabulary.pre, file);
  const auto type_of = [&](size_t id) { return vocabulary.token_types.empty() ? kNormal : vocabulary.token_types[id]; };
  // Files fill the vocabulary up with tokens that nothing uses. They are left out at the end; in between they stay,
  // because tokenizers numbers added tokens anew where ids before them are missing.
  size_t size = vocabulary.tokens.size();
  while (size > 0 && type_of(size - 1) == kUnused) --size;
  Json vocab = Json::object(), added = Json::array(), merges = Json::array();
  std::set<std::string_view> seen;
  vocab.get_ref<Json::object_t&>().reserve(size);
  for (size_t id = 0; id < size; ++id) {
    const std::string& token = vocabulary.tokens[id];
    const int32_t type = type_of(id);
    if (type == kControl || type == kUserDefined) {
      added.push_back({{"id", id},
                       {"content", token},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", type == kControl}});
    }
    if (!seen.insert(token).second) {
      Throw(PHSA_UNSUPPORTED, "{}: has the token {} twice, which a tokenizer.json cannot say", file, Quoted(token));
    }
    // Not by operator[]: an ordered object is searched from its beginning for every key.
    vocab.get_ref<Json::object_t&>().push_back({token, id});
  }
  for (const std::string& merge : vocabulary.merges) {
    const size_t space = merge.find(' ');
    merges.push_back(Json::array({merge.substr(0, space), merge.substr(space + 1)}));
  }
  const Json json = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added},
                     {"normalizer", pre.nfc ? Json{{"type", "NFC"}} : Json(nullptr)},
                     {"pre_tokenizer", PreTokenizerJson(pre)},
                     {"post_processor", PostProcessorJson(vocabulary)},
                     {"decoder", ByteLevel(true)},
                     {"model",
                      {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false},
                       {"ignore_merges", pre.whole_words},
                       {"vocab", vocab},
                       {"merges", merges}}}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

BpeVocabulary VocabularyFromJson(std::string_view json, std::string_view tokenizer_config_json, int32_t vocab_size,
                                 const std::string& file) {
  // Judges it: below, everything is there and of the right kind.
  const TokenizerParts parts = PartsFromJson(json, tokenizer_config_json, file);
  if (parts.sentencepiece) RefuseSentencePiece(file);
  const auto root = nlohmann::json::parse(json);
  const auto& model = root.at("model");
  const bool whole_words = !parts.model.whole_words.empty();
  Steps steps;
  const PreTokenization* pre = nullptr;
  const bool nfc = parts.normalization.OnlyNfc();
  if ((nfc || parts.normalization.empty()) && ReadSteps(root.at("pre_tokenizer"), steps)) {
    for (const PreTokenization& known : KnownPreTokenizations()) {
      const bool same = Same(known, steps) && known.nfc == nfc && known.whole_words == whole_words;
      if (same && pre == nullptr) pre = &known;
    }
  }
  if (pre == nullptr) {
    Throw(PHSA_UNSUPPORTED, "{}: its pre_tokenizer and normalizer are none of those that GGUF has a name for: {}", file,
          PreTokenizationNames());
  }
  const auto size = static_cast<size_t>(vocab_size);
  if (parts.token_bytes.size() > size) {
    ThrowInvalid("{}: has {} tokens, the model {}; they do not belong together", file, parts.token_bytes.size(), size);
  }
  BpeVocabulary vocabulary;
  vocabulary.model = "gpt2";
  vocabulary.pre = std::string(pre->name);
  vocabulary.token_types.assign(size, kUnused);
  for (size_t id = 0; id < size; ++id) vocabulary.tokens.push_back(fmt::format("[PAD{}]", id));
  for (const auto& [token, id] : model.at("vocab").items()) {
    vocabulary.tokens[id.get<size_t>()] = token;
    vocabulary.token_types[id.get<size_t>()] = kNormal;
  }
  for (const AddedToken& token : parts.added) {
    vocabulary.tokens[static_cast<size_t>(token.id)] = token.text;
    vocabulary.token_types[static_cast<size_t>(token.id)] = token.special ? kControl : kUserDefined;
  }
  for (const auto& merge : model.at("merges")) {
    if (merge.is_array()) {
      vocabulary.merges.push_back(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
    } else if (!merge.get_ref<const std::string&>().starts_with("#version")) {
      vocabulary.merges.push_back(merge.get<std::string>());
    }
  }
  vocabulary.bos = parts.bos;
  vocabulary.eos = parts.eos;
  vocabulary.add_bos = parts.add_bos;
  return vocabulary;
}

}  // namespace phsa
