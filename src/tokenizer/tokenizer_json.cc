// Reads a tokenizer.json of the Python package tokenizers. What it asks for and we do not do is refused by its name.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "tokenizer/base64.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/tokenizer_parts.h"
#include "tokenizer/unicode_sets.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

using Json = nlohmann::json;

// A value for a message. Lists and objects are named only: they may be of any size and depth.
std::string Shown(const Json& value) { return value.is_structured() ? value.type_name() : Quoted(value.dump()); }

// Ids may leave gaps, but a few bytes of file must not ask for gigabytes of table.
constexpr size_t kMostGaps = 65536;
constexpr int kDeepestSequence = 8;
// Of what a normalizer writes at a place, in bytes, and of its steps.
constexpr size_t kLongestWritten = 64, kMostSteps = 64;

class Reader {
 public:
  explicit Reader(const std::string& file) : file_(file) {}

  TokenizerParts Read(std::string_view json, std::string_view config) {
    const Json root = Parse(json, file_);
    const Json& model = Member(root, "", "model");
    ReadModel(model);
    ReadAddedTokens(root);
    FinishModel(model);
    if (const Json* normalizer = Find(root, "normalizer")) ReadNormalizer(*normalizer, "normalizer", 0);
    if (const Json* pre_tokenizer = Find(root, "pre_tokenizer")) ReadPreTokenizer(*pre_tokenizer, "pre_tokenizer", 0);
    if (byte_level_ == sentencepiece_) {
      Refuse("pre_tokenizer",
             "{}; only byte-level BPE and SentencePiece's (BPE with byte_fallback, Unigram) are supported",
             byte_level_ ? "has ByteLevel and a vocabulary of SentencePiece" : "has no ByteLevel");
    }
    parts_.sentencepiece = sentencepiece_;
    if (sentencepiece_ && !marks_) {
      Refuse("normalizer", "does not write \u2581 for spaces, as SentencePiece does");
    }
    if (const Json* decoder = Find(root, "decoder")) CheckDecoder(*decoder, "decoder", 0);
    if (const Json* processor = Find(root, "post_processor")) ReadPostProcessor(*processor, "post_processor", 0);
    if (!config.empty()) ReadConfig(config);
    return std::move(parts_);
  }

 private:
  template <class... Args>
  [[noreturn]] void Refuse(std::string_view where, fmt::format_string<Args...> format, Args&&... args) const {
    ThrowInvalid("{}: {} {}", file_, where, fmt::format(format, std::forward<Args>(args)...));
  }

  static Json Parse(std::string_view text, const std::string& file) {
    try {
      return Json::parse(text);
    } catch (const Json::parse_error& error) {
      ThrowInvalid("{}: not JSON: wrong at byte {}", file, error.byte);
    } catch (const Json::out_of_range&) {
      ThrowInvalid("{}: not JSON that can be read: it has a number out of range", file);
    }
  }

  // A member that is there and not null.
  static const Json* Find(const Json& object, const char* name) {
    const auto found = object.find(name);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }

  const Json& Member(const Json& object, std::string_view where, const char* name) const {
    if (!object.is_object()) Refuse(where.empty() ? "the file" : where, "is not an object");
    const Json* member = Find(object, name);
    if (member == nullptr) Refuse(where.empty() ? "the file" : where, "has no \"{}\"", name);
    return *member;
  }

  bool Flag(const Json& object, std::string_view where, const char* name, bool otherwise) const {
    const Json* flag = Find(object, name);
    if (flag == nullptr) return otherwise;
    if (!flag->is_boolean()) Refuse(where, "has \"{}\" that is neither true nor false", name);
    return flag->get<bool>();
  }

  const std::string& Text(const Json& object, std::string_view where, const char* name) const {
    const Json& text = Member(object, where, name);
    if (!text.is_string()) Refuse(where, "has \"{}\" that is not a string", name);
    return text.get_ref<const std::string&>();
  }

  int32_t Id(const Json& value, std::string_view token, size_t most) const {
    if (!value.is_number_unsigned() || value.get<uint64_t>() >= most) {
      Refuse("the vocabulary", "gives {} the id {}; allowed: 0 to {}", Quoted(token), Shown(value), most - 1);
    }
    return static_cast<int32_t>(value.get<uint64_t>());
  }

  // The places of a sequence's steps, one after the other.
  template <class Visit>
  void ForEachStep(const Json& sequence, const std::string& where, const char* name, int depth, Visit&& visit) const {
    const Json& steps = Member(sequence, where, name);
    if (!steps.is_array()) Refuse(where, "has \"{}\" that is not a list", name);
    if (depth > kDeepestSequence) Refuse(where, "has sequences nested too deep");
    for (size_t i = 0; i < steps.size(); ++i) visit(steps[i], fmt::format("{}[{}]", where, i));
  }

  void ReadModel(const Json& model) {
    const Json& vocabulary = Member(model, "model", "vocab");
    const Json* const type = Find(model, "type");
    if (type != nullptr && *type == "Unigram") return ReadUnigram(model, vocabulary);
    if (type != nullptr && *type != "BPE") Refuse("model", "is of type {}; allowed: BPE, Unigram", Shown(*type));
    if (!vocabulary.is_object() || vocabulary.empty()) Refuse("model", "has a \"vocab\" without tokens");
    most_ids_ = vocabulary.size() + kMostGaps;
    for (const auto& [token, value] : vocabulary.items()) {
      const int32_t id = Id(value, token, most_ids_);
      if (!ids_.try_emplace(token, id).second) continue;
      Name(id, token);
    }
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json* affix = Find(model, name);
      if (affix != nullptr && *affix != Json("")) Refuse("model", "has a {}, which is not supported", name);
    }
    const Json* dropout = Find(model, "dropout");
    if (dropout != nullptr && *dropout != 0) Refuse("model", "has a dropout: its ids would be random");
  }

  // A list of tokens and their scores.
  void ReadUnigram(const Json& model, const Json& vocabulary) {
    if (!vocabulary.is_array() || vocabulary.empty()) Refuse("model", "has a \"vocab\" without tokens");
    most_ids_ = vocabulary.size() + kMostGaps;
    sentencepiece_ = true;
    UnigramModel& unigram = parts_.unigram.emplace();
    unigram.byte_ids.fill(-1);
    for (const Json& entry : vocabulary) {
      const size_t number = unigram.scores.size();
      if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number()) {
        Refuse("model", "has a \"vocab\" whose entry {} is not a token and its score", number);
      }
      const std::string& token = entry[0].get_ref<const std::string&>();
      if (token.size() > Unigram::kLongestToken) {
        Refuse("model", "has a token of {} bytes, number {}; allowed: {}", token.size(), number,
               Unigram::kLongestToken);
      }
      const auto id = static_cast<int32_t>(number);
      unigram.scores.push_back(entry[1].get<double>());
      unigram.lowest_score = number == 0 ? unigram.scores[0] : std::min(unigram.lowest_score, unigram.scores[number]);
      Name(id, token);
      ids_[token] = id;  // of equal ones the last, as in tokenizers
    }
    if (const Json* unknown = Find(model, "unk_id")) {
      unigram.unknown = Id(*unknown, "unk_id", vocabulary.size());
    }
  }

  void FinishUnigram(const Json& model) {
    const bool byte_fallback = Flag(model, "model", "byte_fallback", false);
    NameSentencePiece(byte_fallback);
    for (const auto& [token, id] : ids_) {
      if (const int byte = ByteOfToken(token); byte_fallback && byte >= 0) {
        parts_.unigram->byte_ids[static_cast<size_t>(byte)] = id;
      }
      if (!token.empty()) parts_.unigram->ids.emplace(token, id);
    }
  }

  // The token of an id; `names_` keeps the texts as the file has them.
  void Name(int32_t id, const std::string& token) {
    const auto index = static_cast<size_t>(id);
    if (names_.size() <= index) names_.resize(index + 1);
    if (names_[index] && *names_[index] != token) {
      Refuse("the vocabulary", "gives the id {} to {} and to {}", id, Quoted(*names_[index]), Quoted(token));
    }
    names_[index] = token;
  }

  void ReadAddedTokens(const Json& root) {
    const Json* tokens = Find(root, "added_tokens");
    if (tokens == nullptr) return;
    if (!tokens->is_array()) Refuse("added_tokens", "is not a list");
    most_ids_ += tokens->size();
    for (const Json& token : *tokens) {
      const std::string where = fmt::format("added_tokens[{}]", parts_.added.size());
      AddedToken added;
      added.text = Text(token, where, "content");
      added.id = Id(Member(token, where, "id"), added.text, most_ids_);
      added.special = Flag(token, where, "special", false);
      added.normalized = Flag(token, where, "normalized", !added.special);
      added.single_word = Flag(token, where, "single_word", false);
      added.left_strip = Flag(token, where, "lstrip", false);
      added.right_strip = Flag(token, where, "rstrip", false);
      Name(added.id, added.text);
      parts_.added.push_back(std::move(added));
    }
  }

  // What needs all tokens: their bytes, the merges, the unknown token.
  void FinishModel(const Json& model) {
    if (parts_.unigram) return FinishUnigram(model);
    sentencepiece_ = Flag(model, "model", "byte_fallback", false) && ids_.contains("<0x00>");
    if (sentencepiece_) return FinishSentencePiece(model);
    parts_.token_bytes.resize(names_.size());
    for (size_t id = 0; id < names_.size(); ++id) {
      if (names_[id]) parts_.token_bytes[id] = BytesOfAlphabet(*names_[id]).value_or(*names_[id]);
    }
    for (const AddedToken& token : parts_.added) parts_.token_bytes[static_cast<size_t>(token.id)] = token.text;

    parts_.model.byte_ids.fill(-1);
    const bool whole_words = Flag(model, "model", "ignore_merges", false);
    for (const auto& [token, id] : ids_) {
      std::optional<std::string> bytes = BytesOfAlphabet(token);
      if (!bytes || bytes->empty()) continue;
      if (bytes->size() == 1) parts_.model.byte_ids[static_cast<uint8_t>(bytes->front())] = id;
      if (whole_words) parts_.model.whole_words.emplace(std::move(*bytes), id);
    }
    if (const Json* unknown = Find(model, "unk_token")) {
      const auto found = unknown->is_string() ? ids_.find(unknown->get_ref<const std::string&>()) : ids_.end();
      if (found == ids_.end()) Refuse("model", "has an unk_token that is not in its vocabulary");
      parts_.model.unknown = found->second;
    }
    parts_.model.fuse_unknown = Flag(model, "model", "fuse_unk", false);
    const auto& byte_ids = parts_.model.byte_ids;
    if (Flag(model, "model", "byte_fallback", false) &&
        std::find(byte_ids.begin(), byte_ids.end(), -1) != byte_ids.end()) {
      Refuse("model", "has byte_fallback and lacks tokens for single bytes, which is not supported");
    }
    ReadMerges(Member(model, "model", "merges"));
  }

  void FinishSentencePiece(const Json& model) {
    if (Flag(model, "model", "ignore_merges", false)) Refuse("model", "has byte_fallback and ignore_merges");
    NameSentencePiece(true);
    std::vector<std::string> tokens(names_.size());
    for (size_t id = 0; id < names_.size(); ++id) tokens[id] = names_[id].value_or("");
    ReadMerges(Member(model, "model", "merges"));
    if (!FillCharacters(ids_, tokens, &parts_.model)) {
      Refuse("model", "has byte_fallback and lacks tokens for single bytes, which is not supported");
    }
  }

  // What tokens stand for.
  void NameSentencePiece(bool byte_fallback) {
    parts_.token_bytes.resize(names_.size());
    for (size_t id = 0; id < names_.size(); ++id) {
      if (!names_[id]) continue;
      const int byte = byte_fallback ? ByteOfToken(*names_[id]) : -1;
      parts_.token_bytes[id] = byte >= 0 ? std::string(1, static_cast<char>(byte)) : UnmarkSpaces(*names_[id]);
    }
    for (const AddedToken& token : parts_.added) {
      parts_.token_bytes[static_cast<size_t>(token.id)] = UnmarkSpaces(token.text);
    }
  }

  void ReadMerges(const Json& merges) {
    if (!merges.is_array()) Refuse("model", "has \"merges\" that is not a list");
    parts_.model.merges.reserve(merges.size());
    for (const Json& merge : merges) {
      const size_t number = parts_.model.merges.size();
      std::string_view left, right;
      if (merge.is_string()) {
        const std::string_view line = merge.get_ref<const std::string&>();
        if (line.starts_with("#version")) continue;
        const size_t space = line.find(' ');
        if (space != std::string_view::npos) {
          left = line.substr(0, space);
          right = line.substr(space + 1);
        }
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        left = merge[0].get_ref<const std::string&>();
        right = merge[1].get_ref<const std::string&>();
      }
      if (left.empty() || right.empty()) Refuse("model", "has a merge, number {}, that is not two tokens", number);
      const auto id = [&](const std::string& token) {
        const auto found = ids_.find(token);
        if (found == ids_.end()) Refuse("model", "has no token {} for merge {}", Quoted(token), number);
        return found->second;
      };
      const std::string left_token(left), right_token(right);
      parts_.model.merges.push_back({id(left_token), id(right_token), id(left_token + right_token)});
    }
  }

  void ReadNormalizer(const Json& normalizer, const std::string& where, int depth) {
    const std::string& type = Text(normalizer, where, "type");
    Normalization& out = parts_.normalization;
    if (++steps_ > kMostSteps) Refuse(where, "is a step too many; allowed: {}", kMostSteps);
    constexpr std::pair<std::string_view, NormalForm> kForms[] = {
        {"NFC", NormalForm::kNfc}, {"NFD", NormalForm::kNfd}, {"NFKC", NormalForm::kNfkc}, {"NFKD", NormalForm::kNfkd}};
    for (const auto& [name, form] : kForms) {
      if (type == name) return out.AddForm(form);
    }
    if (type == "Sequence") {
      ForEachStep(normalizer, where, "normalizers", depth,
                  [&](const Json& step, const std::string& place) { ReadNormalizer(step, place, depth + 1); });
    } else if (type == "Prepend") {
      out.AddPrepend(Written(normalizer, where, "prepend"));
    } else if (type == "Replace") {
      ReadReplace(normalizer, where);
    } else if (type == "Strip") {
      out.AddStrip(Flag(normalizer, where, "strip_left", true), Flag(normalizer, where, "strip_right", true));
    } else if (type == "Nmt") {
      out.AddNmt();
    } else if (type == "Precompiled") {
      const std::optional<std::string> blob = DecodeBase64(Text(normalizer, where, "precompiled_charsmap"));
      if (!blob) Refuse(where, "has a precompiled_charsmap that is not base64");
      out.AddCharsmap(Charsmap(*blob, file_ + ": " + where));
    } else {
      Refuse(where,
             "is {}; allowed: NFC, NFD, NFKC, NFKD, Nmt, Precompiled, Prepend, Replace, Strip, or a Sequence of them",
             Quoted(type));
    }
  }

  // What a step writes into a text.
  const std::string& Written(const Json& step, const std::string& where, const char* name) const {
    const std::string& text = Text(step, where, name);
    if (text.size() > kLongestWritten) {
      Refuse(where, "has \"{}\" of {} bytes; allowed: {}", name, text.size(), kLongestWritten);
    }
    return text;
  }

  void ReadReplace(const Json& step, const std::string& where) {
    const Json& pattern = Member(step, where, "pattern");
    const std::string& by = Written(step, where, "content");
    if (pattern.is_object() && pattern.size() == 1 && pattern.contains("String")) {
      const std::string& text = Text(pattern, where, "String");
      if (text.empty()) Refuse(where, "has an empty pattern");
      if (text == " " && by == kSpaceMark) marks_ = true;
      parts_.normalization.AddReplace(text, by);
    } else {
      parts_.normalization.AddReplace(SplitPattern(pattern, where), by);
    }
  }

  // Marks spaces as SentencePiece does, and may cut before each mark.
  void ReadMetaspace(const Json& step, const std::string& where) {
    if (Text(step, where, "replacement") != kSpaceMark) Refuse(where, "has another replacement than \u2581");
    using First = PreTokenizer::MarkFirst;
    const std::string scheme = PrependScheme(step);
    parts_.pre_tokenizer.AddSpaceMarks(scheme == "always"  ? First::kOfEach
                                       : scheme == "first" ? First::kOfText
                                                           : First::kNone);
    marks_ = true;
    if (Flag(step, where, "split", true)) {
      parts_.pre_tokenizer.AddSplit(Pattern(kSpaceMark, file_), SplitBehavior::kMergedWithNext, false);
    }
  }

  // Of a Metaspace: "always", "first" or "never". Old files have a flag in its place.
  static std::string PrependScheme(const Json& step) {
    const Json* const given = Find(step, "prepend_scheme");
    if (given != nullptr && given->is_string()) return given->get<std::string>();
    const Json* const old = Find(step, "add_prefix_space");
    return old != nullptr && *old == false ? "never" : "always";
  }

  void ReadPreTokenizer(const Json& step, const std::string& where, int depth) {
    const std::string& type = Text(step, where, "type");
    if (byte_level_) Refuse(where, "comes after ByteLevel, which is not supported");
    PreTokenizer& out = parts_.pre_tokenizer;
    if (type == "Sequence") {
      ForEachStep(step, where, "pretokenizers", depth,
                  [&](const Json& inner, const std::string& place) { ReadPreTokenizer(inner, place, depth + 1); });
    } else if (type == "ByteLevel") {
      if (Flag(step, where, "add_prefix_space", true)) out.AddPrefixSpace();
      if (Flag(step, where, "use_regex", true)) {
        out.AddSplit(Pattern(kGpt2Pattern, where), SplitBehavior::kIsolated, false);
      }
      byte_level_ = true;
    } else if (type == "Metaspace" && sentencepiece_) {
      ReadMetaspace(step, where);
    } else if (type == "Digits") {
      const bool each = Flag(step, where, "individual_digits", false);
      out.AddSplit(Pattern::OneOf(RustNumeric()), each ? SplitBehavior::kIsolated : SplitBehavior::kContiguous, false);
    } else if (type == "WhitespaceSplit") {
      out.AddSplit(Pattern::OneOf(std::string(kWhiteSpace)), SplitBehavior::kRemoved, false);
    } else if (type == "Split") {
      const SplitBehavior behavior = Behavior(Text(step, where, "behavior"), where);
      out.AddSplit(SplitPattern(Member(step, where, "pattern"), where), behavior, Flag(step, where, "invert", false));
    } else {
      Refuse(where,
             "is {}; allowed: ByteLevel, Split, Digits, WhitespaceSplit, SentencePiece's Metaspace, or a Sequence "
             "of them",
             Quoted(type));
    }
  }

  Pattern SplitPattern(const Json& pattern, const std::string& where) const {
    if (pattern.is_object() && pattern.size() == 1) {
      const std::string place = file_ + ": " + where;
      if (pattern.contains("Regex")) return Pattern(Text(pattern, where, "Regex"), place);
      if (pattern.contains("String")) {
        std::string escaped;
        for (const char c : Text(pattern, where, "String")) {
          if (std::string_view("\\|.*?+(){}[]^$-#").find(c) != std::string_view::npos) escaped += '\\';
          escaped += c;
        }
        return Pattern(escaped, place);
      }
    }
    Refuse(where, "has a pattern that is neither a Regex nor a String");
  }

  SplitBehavior Behavior(const std::string& name, const std::string& where) const {
    constexpr std::pair<std::string_view, SplitBehavior> kNames[] = {
        {"Isolated", SplitBehavior::kIsolated},
        {"Removed", SplitBehavior::kRemoved},
        {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
        {"MergedWithNext", SplitBehavior::kMergedWithNext},
        {"Contiguous", SplitBehavior::kContiguous},
    };
    for (const auto& [known, behavior] : kNames) {
      if (name == known) return behavior;
    }
    Refuse(where, "has the behavior {}; allowed: Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous",
           Quoted(name));
  }

  void CheckDecoder(const Json& decoder, const std::string& where, int depth) {
    const std::string& type = Text(decoder, where, "type");
    if (type == "Sequence") {
      ForEachStep(decoder, where, "decoders", depth,
                  [&](const Json& step, const std::string& place) { CheckDecoder(step, place, depth + 1); });
    } else if (sentencepiece_ && (type == "Strip" || type == "Metaspace")) {
      using Dropped = TokenizerParts::Dropped;
      const bool drops = type == "Strip" ? Find(decoder, "start") != nullptr && *Find(decoder, "start") == 1
                                         : PrependScheme(decoder) != "never";
      if (drops) parts_.dropped = type == "Strip" ? Dropped::kFirstSpace : Dropped::kSpacesOfFirst;
    } else if (type != "ByteLevel" && type != "Fuse" &&
               !(sentencepiece_ && (type == "Replace" || type == "ByteFallback"))) {
      Refuse(where, "is {}; allowed: ByteLevel and, of SentencePiece, Metaspace, Replace, ByteFallback, Strip",
             Quoted(type));
    }
  }

  // A template whose text begins with a special token adds it before every text.
  void ReadPostProcessor(const Json& processor, const std::string& where, int depth) {
    const std::string& type = Text(processor, where, "type");
    if (type == "Sequence") {
      ForEachStep(processor, where, "processors", depth,
                  [&](const Json& step, const std::string& place) { ReadPostProcessor(step, place, depth + 1); });
      return;
    }
    if (type != "TemplateProcessing") return;
    const Json& single = Member(processor, where, "single");
    if (!single.is_array() || single.empty() || !single[0].is_object()) return;
    const Json* token = Find(single[0], "SpecialToken");
    if (token == nullptr) return;
    parts_.bos = AddedId(Text(*token, where, "id"));
    parts_.add_bos = parts_.bos >= 0;
  }

  int32_t AddedId(std::string_view text) const {
    const auto found = std::find_if(parts_.added.begin(), parts_.added.end(),
                                    [&](const AddedToken& token) { return token.text == text; });
    return found == parts_.added.end() ? -1 : found->id;
  }

  void ReadConfig(std::string_view text) {
    const Json config = Parse(text, "tokenizer_config.json");
    if (!config.is_object()) ThrowInvalid("tokenizer_config.json: not an object");
    // A token is its text, or an object with its text in "content".
    const auto token = [&](const char* name, int32_t otherwise) {
      const Json* value = Find(config, name);
      if (value != nullptr && value->is_object()) value = Find(*value, "content");
      if (value == nullptr || !value->is_string()) return otherwise;
      const std::string& content = value->get_ref<const std::string&>();
      const int32_t added = AddedId(content);
      if (added >= 0) return added;
      const auto found = ids_.find(content);
      return found == ids_.end() ? otherwise : found->second;
    };
    parts_.bos = token("bos_token", parts_.bos);
    parts_.eos = token("eos_token", parts_.eos);
    parts_.add_bos = Flag(config, "tokenizer_config.json", "add_bos_token", parts_.add_bos) && parts_.bos >= 0;
  }

  const std::string& file_;
  TokenizerParts parts_;
  std::unordered_map<std::string, int32_t> ids_;  // the model's tokens
  std::vector<std::optional<std::string>> names_;
  size_t most_ids_ = 0;
  size_t steps_ = 0;  // of the normalizer
  bool byte_level_ = false, sentencepiece_ = false;
  bool marks_ = false;  // some step writes SentencePiece's marks for spaces
};

}  // namespace

TokenizerParts PartsFromJson(std::string_view json, std::string_view tokenizer_config_json, const std::string& file) {
  return Reader(file).Read(json, tokenizer_config_json);
}

}  // namespace phsa
