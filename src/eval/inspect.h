// Which blocks the attention chose for some queries of a text, and how much of dense attention's mass it read.
#ifndef PHSA_EVAL_INSPECT_H_
#define PHSA_EVAL_INSPECT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/session.h"
#include "eval/query_blocks.h"

namespace phsa {

// What the query heads that choose together (those of a KV head, or a single one) chose.
struct HeadChoice {
  std::vector<int32_t> blocks;  // ascending; empty where nothing is chosen
  std::vector<float> scores;    // of these blocks
  std::vector<float> recall;    // of each query head
};

struct LayerChoice {
  QueryBlocks blocks;
  std::vector<HeadChoice> heads;
};

struct QueryChoice {
  int32_t position = 0;
  std::vector<LayerChoice> layers;
};

struct Inspection {
  std::string model;
  LayerSettings attention;
  int32_t num_layers = 0, num_q_heads = 0, num_kv_heads = 0;
  std::vector<int32_t> tokens;  // the prompt, then the answer
  int32_t prompt_tokens = 0;
  std::vector<std::string> text;     // of each token, valid UTF-8; see TokenTexts
  std::vector<uint8_t> flags;        // which tokens are punctuation
  std::vector<uint8_t> special;      // which are control tokens
  std::vector<QueryChoice> queries;  // ascending positions; each one's next token is what its choice led to
  GenerateResult result;

  // The unit in which blocks of all layers can be counted: the smallest block size among them.
  int32_t BlockSize() const;
  double Recall() const;  // the mean over the queries, layers and query heads
  TokensRead Read() const;
};

double Recall(const QueryChoice& query);
double Recall(const HeadChoice& head);

// Reads the prompt and writes the answer (options.max_tokens may be 0: none), and keeps what was chosen for the
// prompt's last `last` tokens and for each token of the answer in the cache. 1 <= last <= prompt.size(). `attention`:
// none for the engine's own. `text`, where there is one: what is in the cache with that attention already, of which
// nothing is prefilled again but the queries that are watched; afterwards all of it.
Inspection Inspect(Engine& engine, std::span<const int32_t> prompt, int32_t last, const GenerateOptions& options,
                   const GenerateCallbacks& callbacks, const std::shared_ptr<const TextAttention>& attention = nullptr,
                   Sequence* text = nullptr);

// The text of each token. A character that several tokens share stands whole at the last of them and the others are
// empty; bytes that are no character are U+FFFD. Control tokens are shown by their names.
std::vector<std::string> TokenTexts(const Tokenizer& tokenizer, std::span<const int32_t> tokens);

// A block of the unit above, with how often it was chosen, over all queries, layers and choosing heads.
struct ChosenBlock {
  int32_t block = 0;
  int64_t count = 0;
  double score = 0;  // summed
};
// The most often chosen ones first, ties by score, then by position; at most `most` of them.
std::vector<ChosenBlock> MostChosen(const Inspection& inspection, size_t most);
int64_t Choosers(const Inspection& inspection);  // queries × layers × choosing heads that had a choice

}  // namespace phsa

#endif  // PHSA_EVAL_INSPECT_H_
