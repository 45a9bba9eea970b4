// The names that GGUF files have for the ways of cutting text into words.
#ifndef PHSA_TOKENIZER_PRE_TOKENIZATION_H_
#define PHSA_TOKENIZER_PRE_TOKENIZATION_H_

#include <array>
#include <span>
#include <string>
#include <string_view>

namespace phsa {

// How the original tokenizer.json of the models that bear this name cuts text.
struct PreTokenization {
  std::string_view name;
  std::array<std::string_view, 3> patterns;
  bool nfc = false;
  bool single_digits = false;  // a step of its own, before the patterns
  bool whole_words = false;    // ignore_merges
};

std::span<const PreTokenization> KnownPreTokenizations();
std::string PreTokenizationNames();  // of all, for messages

// tokenizer.ggml.pre; throws where the name is not known.
const PreTokenization& FindPreTokenization(const std::string& name, const std::string& file);

}  // namespace phsa

#endif  // PHSA_TOKENIZER_PRE_TOKENIZATION_H_
