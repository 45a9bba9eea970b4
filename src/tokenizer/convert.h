// A tokenizer from one kind of file to the other: a GGUF file's vocabulary as a tokenizer.json, and back.
#ifndef PHSA_TOKENIZER_CONVERT_H_
#define PHSA_TOKENIZER_CONVERT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "tokenizer/tokenizer.h"

namespace phsa {

// The text of a tokenizer.json with which the package tokenizers gives the same ids. Throws phsa::Error where the
// vocabulary is not one that Tokenizer::FromVocabulary reads.
std::string TokenizerJson(const BpeVocabulary& vocabulary, const std::string& file);

// A vocabulary of exactly vocab_size tokens, as llama.cpp asks for: ids that no token has are filled up. Throws
// phsa::Error where the text is not one that Tokenizer::FromJson reads, and where GGUF has no name for its way of
// cutting text into words.
BpeVocabulary VocabularyFromJson(std::string_view json, std::string_view tokenizer_config_json, int32_t vocab_size,
                                 const std::string& file);

}  // namespace phsa

#endif  // PHSA_TOKENIZER_CONVERT_H_
