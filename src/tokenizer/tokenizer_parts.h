// What a tokenizer is made of, however its file says it.
#ifndef PHSA_TOKENIZER_TOKENIZER_PARTS_H_
#define PHSA_TOKENIZER_TOKENIZER_PARTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"
#include "tokenizer/normalization.h"
#include "tokenizer/pretokenizer.h"
#include "tokenizer/sentencepiece.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/unigram.h"

namespace phsa {

struct TokenizerParts {
  std::vector<std::string> token_bytes;  // by id; empty for an id that no token has
  std::vector<AddedToken> added;
  BpeModel model;
  std::optional<UnigramModel> unigram;  // in its place
  bool sentencepiece = false;           // spaces are marks, and bytes may be tokens of their own
  Normalization normalization;
  PreTokenizer pre_tokenizer;
  // Of a text that is decoded: the space that it begins with, or all spaces that its first token stands for.
  enum class Dropped : uint8_t { kNothing, kFirstSpace, kSpacesOfFirst } dropped = Dropped::kNothing;
  int32_t bos = -1, eos = -1;
  bool add_bos = false;
};

TokenizerParts PartsFromJson(std::string_view json, std::string_view tokenizer_config_json, const std::string& file);
TokenizerParts PartsFromVocabulary(const BpeVocabulary& vocabulary, const std::string& file);

// The words of GPT-2: what the pre-tokenizer ByteLevel cuts with.
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace phsa

#endif  // PHSA_TOKENIZER_TOKENIZER_PARTS_H_
