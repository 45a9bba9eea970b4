// Texts to folders of tokens, on all cores.
#ifndef PHSA_DATA_PREPARE_H_
#define PHSA_DATA_PREPARE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/document_reader.h"
#include "data/token_folder.h"
#include "tokenizer/tokenizer.h"

namespace phsa {

struct PrepareOptions {
  std::string field = "text";        // of a JSON line
  int32_t threads = 1;               // that tokenize; one more reads
  std::vector<std::string> without;  // files; documents that hold text of theirs are left out
  double held_out_share = 0;         // of the documents, by a digest of their text: equal texts go to the same side
};

struct PrepareProgress {
  uint64_t bytes, total_bytes;  // of the files; total 0: not known
  uint64_t tokens;
};

struct PrepareResult {
  uint64_t documents = 0, text_bytes = 0;  // text after decompression and JSON
  uint64_t empty = 0;                      // documents without text, which were left out
  uint64_t overlapping = 0;                // documents that hold text of `without`, which were left out
};

// Adds the documents of `reader` to `train`, and those held out to `held_out` (may be null: none are). Documents keep
// the order of the files, so that the result does not depend on the threads. `progress` is called by the calling thread
// often; what it throws ends the work. Nothing is completed or published.
PrepareResult PrepareTokens(const Tokenizer& tokenizer, DocumentReader& reader, const PrepareOptions& options,
                            TokenFolder& train, TokenFolder* held_out,
                            const std::function<void(const PrepareProgress&)>& progress);

// Tells tokenizers apart: the bytes of the tokens and the merges, whichever file they came from.
std::string TokenizerSha256(const Tokenizer& tokenizer);

// The token that ends a text: a special token with one of the usual names, else the tokenizer's end token. -1: none.
int32_t EndOfText(const Tokenizer& tokenizer);

}  // namespace phsa

#endif  // PHSA_DATA_PREPARE_H_
