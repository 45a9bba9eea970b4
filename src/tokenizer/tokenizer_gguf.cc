// A tokenizer from what a GGUF file says: the vocabulary itself, and the name of the way text is cut into words.
#include <algorithm>
#include <array>
#include <cmath>
#include <unordered_map>
#include <utility>

#include "base/errors.h"
#include "base/utf8.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/pre_tokenization.h"
#include "tokenizer/tokenizer_parts.h"
#include "tokenizer/unicode_sets.h"

namespace phsa {
namespace {

constexpr int32_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kByte = 6;

void CheckTypes(const BpeVocabulary& vocabulary, const std::string& file) {
  const size_t size = vocabulary.tokens.size();
  if (size == 0) ThrowInvalid("{}: tokenizer.ggml.tokens is empty", file);
  if (!vocabulary.token_types.empty() && vocabulary.token_types.size() != size) {
    ThrowInvalid("{}: tokenizer.ggml.token_type has {} entries; allowed: {}, one per token", file,
                 vocabulary.token_types.size(), size);
  }
}

void TakeBegin(const BpeVocabulary& vocabulary, TokenizerParts* parts) {
  const auto in_range = [&](int32_t id) {
    return id >= 0 && static_cast<size_t>(id) < vocabulary.tokens.size() ? id : -1;
  };
  parts->bos = in_range(vocabulary.bos);
  parts->eos = in_range(vocabulary.eos);
  parts->add_bos = vocabulary.add_bos && parts->bos >= 0;
}

void AddMarks(const BpeVocabulary& vocabulary, TokenizerParts* parts) {
  parts->sentencepiece = true;
  if (vocabulary.add_space_prefix) {
    parts->normalization.AddPrepend(kSpaceMark);
    parts->dropped = TokenizerParts::Dropped::kFirstSpace;
  }
  parts->normalization.AddReplace(" ", kSpaceMark);
}

// SentencePiece's models: "llama", which is BPE with scores in place of merges, and "t5", a unigram model.
TokenizerParts SentencePieceParts(const BpeVocabulary& vocabulary, const std::string& file) {
  const bool unigram = vocabulary.model == "t5";
  CheckTypes(vocabulary, file);
  const size_t size = vocabulary.tokens.size();
  if (vocabulary.scores.size() != size) {
    ThrowInvalid("{}: tokenizer.ggml.scores has {} entries; allowed: {}, one per token", file, vocabulary.scores.size(),
                 size);
  }
  for (size_t i = 0; i < size; ++i) {
    if (!std::isfinite(vocabulary.scores[i])) {
      ThrowInvalid("{}: tokenizer.ggml.scores[{}] is {}; allowed: finite numbers", file, i, vocabulary.scores[i]);
    }
  }
  TokenizerParts parts;
  parts.token_bytes.resize(size);
  std::unordered_map<std::string, int32_t> ids;  // what merging may meet, or a text may be cut into
  std::array<int32_t, 256> byte_ids;
  byte_ids.fill(-1);
  double lowest = 0;
  bool any = false;
  for (size_t i = 0; i < size; ++i) {
    const std::string& token = vocabulary.tokens[i];
    const auto id = static_cast<int32_t>(i);
    const int byte = ByteOfToken(token);
    const int32_t type = vocabulary.token_types.empty() ? byte >= 0 ? kByte : kNormal : vocabulary.token_types[i];
    parts.token_bytes[i] = byte >= 0 && type == kByte ? std::string(1, static_cast<char>(byte)) : UnmarkSpaces(token);
    if (type == kControl || type == kUserDefined || type == kUnknown) {
      AddedToken& added = parts.added.emplace_back();
      added.id = id;
      added.text = type == kUserDefined ? UnmarkSpaces(token) : token;
      added.special = type != kUserDefined;
    } else if (unigram && type == kByte) {
      if (byte >= 0) byte_ids[static_cast<size_t>(byte)] = id;
    } else if (unigram && type == kNormal) {
      if (token.size() > Unigram::kLongestToken) {
        ThrowInvalid("{}: tokenizer.ggml.tokens[{}] has {} bytes; allowed: {}", file, i, token.size(),
                     Unigram::kLongestToken);
      }
      const double score = vocabulary.scores[i];
      lowest = any ? std::min(lowest, score) : score;
      any = true;
      if (!token.empty() && IsUtf8(token)) ids.insert_or_assign(token, id);
    } else if (type == kNormal || type == kByte) {
      ids.try_emplace(token, id);
    }
  }
  TakeBegin(vocabulary, &parts);
  if (unigram) {
    UnigramModel& model = parts.unigram.emplace();
    model.ids = std::move(ids);
    model.scores.assign(vocabulary.scores.begin(), vocabulary.scores.end());
    model.lowest_score = lowest;
    model.byte_ids = byte_ids;
    model.unknown = vocabulary.unknown >= 0 && static_cast<size_t>(vocabulary.unknown) < size ? vocabulary.unknown : -1;
    Normalization& steps = parts.normalization;
    if (!vocabulary.charsmap.empty()) {
      steps.AddCharsmap(Charsmap(vocabulary.charsmap, file + ": tokenizer.ggml.precompiled_charsmap"));
    }
    if (vocabulary.one_space) {
      steps.AddReplace(Pattern(" {2,}", file), " ");
      steps.AddStrip(true, true);
    }
    AddMarks(vocabulary, &parts);
    return parts;
  }
  parts.model.merges = MergesFromScores(ids, vocabulary.scores);
  if (!FillCharacters(ids, vocabulary.tokens, &parts.model)) {
    ThrowInvalid("{}: tokenizer.ggml.tokens lacks tokens for single bytes, <0x00> to <0xFF>, which is not supported",
                 file);
  }
  AddMarks(vocabulary, &parts);
  return parts;
}

}  // namespace

TokenizerParts PartsFromVocabulary(const BpeVocabulary& vocabulary, const std::string& file) {
  if (vocabulary.model == "llama" || vocabulary.model == "t5") return SentencePieceParts(vocabulary, file);
  if (vocabulary.model != "gpt2") {
    ThrowInvalid(
        "{}: tokenizer.ggml.model is {}; allowed: gpt2, which is byte-level BPE, and SentencePiece's: llama, "
        "which is BPE, and t5, a unigram model",
        file, Quoted(vocabulary.model));
  }
  const PreTokenization& pre = FindPreTokenization(vocabulary.pre, file);
  CheckTypes(vocabulary, file);
  const size_t size = vocabulary.tokens.size();

  TokenizerParts parts;
  parts.token_bytes.resize(size);
  parts.model.byte_ids.fill(-1);
  std::unordered_map<std::string_view, int32_t> ids;  // what merges may name
  for (size_t i = 0; i < size; ++i) {
    const std::string& token = vocabulary.tokens[i];
    const auto id = static_cast<int32_t>(i);
    const int32_t type = vocabulary.token_types.empty() ? kNormal : vocabulary.token_types[i];
    if (type == kControl || type == kUserDefined) {
      parts.token_bytes[i] = token;
      AddedToken& added = parts.added.emplace_back();
      added.id = id;
      added.text = token;
      added.special = type == kControl;
      continue;
    }
    std::optional<std::string> bytes = BytesOfAlphabet(token);
    parts.token_bytes[i] = bytes ? *bytes : token;
    if (type != kNormal || !bytes || bytes->empty()) continue;
    ids[token] = id;
    if (bytes->size() == 1) parts.model.byte_ids[static_cast<uint8_t>(bytes->front())] = id;
    if (pre.whole_words) parts.model.whole_words[*bytes] = id;
  }

  parts.model.merges.reserve(vocabulary.merges.size());
  for (const std::string& merge : vocabulary.merges) {
    const size_t number = parts.model.merges.size();
    const size_t space = merge.find(' ');
    if (space == std::string::npos) {
      ThrowInvalid("{}: tokenizer.ggml.merges[{}] is {}; allowed: two tokens with a space between", file, number,
                   Quoted(merge));
    }
    const auto id = [&](const std::string& token) {
      const auto found = ids.find(token);
      if (found == ids.end()) {
        ThrowInvalid("{}: tokenizer.ggml.merges[{}] needs the token {}, which is not in the vocabulary", file, number,
                     Quoted(token));
      }
      return found->second;
    };
    const std::string left = merge.substr(0, space), right = merge.substr(space + 1);
    parts.model.merges.push_back({id(left), id(right), id(left + right)});
  }

  if (pre.nfc) parts.normalization.AddForm(NormalForm::kNfc);
  if (pre.single_digits) {
    parts.pre_tokenizer.AddSplit(Pattern::OneOf(RustNumeric()), SplitBehavior::kIsolated, false);
  }
  for (const std::string_view pattern : pre.patterns) {
    if (!pattern.empty()) parts.pre_tokenizer.AddSplit(Pattern(pattern, file), SplitBehavior::kIsolated, false);
  }
  TakeBegin(vocabulary, &parts);
  return parts;
}

}  // namespace phsa
