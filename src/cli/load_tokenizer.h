// A tokenizer without its model's weights, for the commands that need no more.
#ifndef PHSA_CLI_LOAD_TOKENIZER_H_
#define PHSA_CLI_LOAD_TOKENIZER_H_

#include <string>

#include "tokenizer/tokenizer.h"

namespace phsa::cli {

struct LoadedTokenizer {
  Tokenizer tokenizer;
  std::string chat_template;
};

// `path`: a tokenizer.json, a folder that has one, or a model as `-m` takes it.
LoadedTokenizer LoadTokenizerAt(const std::string& path);

}  // namespace phsa::cli

#endif  // PHSA_CLI_LOAD_TOKENIZER_H_
