// Byte-level BPE, that of SentencePiece, and its unigram model: text to ids and back, as the Python package tokenizers
// does it.
#ifndef PHSA_TOKENIZER_TOKENIZER_H_
#define PHSA_TOKENIZER_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/text_range.h"

namespace phsa {

struct BpeMerge;

// What a GGUF file says of its tokenizer.
struct BpeVocabulary {
  std::string model, pre;
  std::vector<std::string> tokens;   // in GPT-2's printable byte alphabet
  std::vector<int32_t> token_types;  // GGUF's: 1 normal, 3 control, 4 user-defined; may be empty
  std::vector<std::string> merges;   // "left right"
  std::vector<float> scores;         // of the models llama, which has them in place of merges, and t5
  bool add_space_prefix = true;      // likewise
  bool one_space = false;            // of the model t5: spaces in a row are one, and none at the ends
  std::string charsmap;              // of the model t5; empty: none
  int32_t bos = -1, eos = -1, unknown = -1;
  bool add_bos = false, add_eos = false;
};

enum class SpecialTokens : uint8_t {
  kRecognise,  // "<|im_end|>" in the text becomes that token, as in tokenizers
  kAsText,     // text from a user: it stays text and cannot become a control token
};

class Tokenizer {
 public:
  // `file` names the source in messages. tokenizer_config_json may be empty. Throw phsa::Error.
  static Tokenizer FromJson(std::string_view json, std::string_view tokenizer_config_json, const std::string& file);
  static Tokenizer FromVocabulary(const BpeVocabulary& vocabulary, const std::string& file);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // No begin or end token is added. Text that is not UTF-8 is refused, naming the offset of the first bad byte.
  std::vector<int32_t> Encode(std::string_view text, SpecialTokens special) const;
  // Control tokens are recognised where they lie inside of one of these ranges, which are in order and do not touch.
  std::vector<int32_t> Encode(std::string_view text, std::span<const TextRange> special) const;
  // Invalid UTF-8 (a sequence cut at the end, or arbitrary ids) becomes U+FFFD as in tokenizers. Unknown ids are
  // refused.
  std::string Decode(std::span<const int32_t> ids, bool skip_special) const;

  int32_t vocab_size() const;                           // ids are in [0, vocab_size)
  std::string_view TokenBytes(int32_t id) const;        // the bytes a token stands for; its text for an added token
  bool IsSpecial(int32_t id) const;                     // control tokens: <|im_end|>, <|endoftext|>
  int32_t TokenId(std::string_view added_token) const;  // an added or special token by its text; -1: none
  int32_t bos() const;                                  // -1: none
  int32_t eos() const;
  bool add_bos() const;                         // whether the model expects the begin token before a text
  const std::vector<BpeMerge>& merges() const;  // first merged first
  std::span<const double> scores() const;       // by id, of a unigram model; else empty

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

// Turns ids into text as they come and never gives half a character: bytes wait until their character is complete.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}
  std::string Next(int32_t id);  // what became complete with this token; control tokens give nothing
  std::string Finish();          // what is left, as U+FFFD
 private:
  const Tokenizer* tokenizer_;
  std::string pending_;
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_TOKENIZER_H_
