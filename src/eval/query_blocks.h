// What a query reads whatever it chooses: the block arithmetic of docs/phsa.md, for those who report on a run.
#ifndef PHSA_EVAL_QUERY_BLOCKS_H_
#define PHSA_EVAL_QUERY_BLOCKS_H_

#include <cstdint>

#include "engine/attention_choice.h"
#include "phsa/settings.h"

namespace phsa {

// The blocks of one query in one layer. Init are [0, init_end), local [local_begin, own], candidates what lies between.
struct QueryBlocks {
  int32_t position = 0;
  int32_t block_size = 0;
  int32_t own = 0;          // the query's block
  int32_t init_end = 0;     // at most own + 1
  int32_t local_begin = 0;  // at least init_end; own + 1 where init holds the query's own block
  bool dense = false;       // nothing is chosen: the policy is dense, or the position below dense_below
  bool reads_all = false;   // nothing is left out: dense, or no more candidates than top_k

  // Tokens that are read if `chosen` candidates are.
  int64_t TokensRead(int64_t chosen) const;
};
QueryBlocks BlocksOf(const Settings& settings, int32_t position);

// The paper's sparsity: one minus the share of `tokens` that the budget (init, local and top_k blocks) is. The mean
// over the layers; 0 where a budget covers everything.
double BudgetSparsity(const LayerSettings& settings, int32_t num_layers, int32_t tokens);

}  // namespace phsa

#endif  // PHSA_EVAL_QUERY_BLOCKS_H_
