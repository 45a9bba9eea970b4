// A tokenizer from what a GGUF file says: the vocabulary itself, and the name of the way text is cut into words.
#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/errors.h"
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

// The model "llama": SentencePiece's BPE, with scores and byte tokens.
TokenizerParts SentencePieceParts(const BpeVocabulary& vocabulary, const std::string& file) {
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
  std::unordered_map<std::string, int32_t> ids;  // what merging may meet
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
    } else if (type == kNormal || type == kByte) {
      ids.try_emplace(token, id);
    }
  }
  parts.model.merges = MergesFromScores(ids, vocabulary.scores);
  if (!FillCharacters(ids, vocabulary.tokens, &parts.model)) {
    ThrowInvalid("{}: tokenizer.ggml.tokens lacks tokens for single bytes, <0x00> to <0xFF>, which is not supported",
                 file);
  }
  parts.space_marks.on = true;
  if (vocabulary.add_space_prefix) {
    parts.space_marks.prefix = SpaceMarks::Prefix::kEach;
    parts.space_marks.strip_first = true;
  }
  TakeBegin(vocabulary, &parts);
  return parts;
}

}  // namespace

TokenizerParts PartsFromVocabulary(const BpeVocabulary& vocabulary, const std::string& file) {
  if (vocabulary.model == "llama") return SentencePieceParts(vocabulary, file);
  if (vocabulary.model != "gpt2") {
    ThrowInvalid("{}: tokenizer.ggml.model is {}; allowed: gpt2, which is byte-level BPE, and llama, SentencePiece's",
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

  parts.nfc = pre.nfc;
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
