// What a query reads whatever it chooses, for those who report on a run: the arithmetic is attention/blocks.h.
#ifndef PHSA_EVAL_QUERY_BLOCKS_H_
#define PHSA_EVAL_QUERY_BLOCKS_H_

#include <cstdint>

#include "attention/policies.h"

namespace phsa {

// The blocks of one query in one layer. Init are [0, init_end), local [local_begin, own], candidates what lies between;
// of a dense query everything is local.
struct QueryBlocks {
  QueryBlocks() = default;
  QueryBlocks(const Settings& settings, int32_t query)
      : rules(RulesOf(settings)), position(query), block_size(settings.block_size), own(query / block_size) {}

  BlockRules rules;
  int32_t position = 0;
  int32_t block_size = kLeastBlock;
  int32_t own = 0;  // the query's block

  int32_t init_end() const { return rules.InitEnd(own); }
  int32_t local_begin() const { return rules.LocalBegin(own); }  // own + 1 where init holds the query's own block
  bool dense() const { return rules.Dense(own); }                // nothing is chosen
  bool reads_all() const { return rules.ReadsAll(own); }
  int64_t TokensRead(int64_t chosen) const { return rules.TokensRead(position, chosen, block_size); }
};

// The paper's sparsity: one minus the share of `tokens` that the budget (init, local and top_k blocks) is. The mean
// over the layers; 0 where a budget covers everything.
double BudgetSparsity(const LayerSettings& settings, int32_t num_layers, int32_t tokens);

}  // namespace phsa

#endif  // PHSA_EVAL_QUERY_BLOCKS_H_
