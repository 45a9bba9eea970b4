// Needle results as people and scripts read them.
#ifndef PHSA_EVAL_NIAH_REPORT_H_
#define PHSA_EVAL_NIAH_REPORT_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "eval/niah/records.h"
#include "eval/niah/statistics.h"

namespace phsa {

// What all samples of one task, length and policy say.
struct NiahRow {
  NiahTask task;
  int32_t length;
  LayerSettings attention;
  std::string method;                      // "dense", "phsa λ=0.9"; with K one of its own for all settings
  std::optional<int32_t> top_k;            // none: the policy has no K
  std::vector<const NiahRecord*> records;  // by sample; they belong to the NiahRecords
  double score = 0;
  Interval ci95;
  double read_share = 1;
  double sparsity = 0;  // BudgetSparsity at this length
};

// By task, length, method and K. Rows point into `records`.
std::vector<NiahRow> NiahRows(std::span<const NiahRecord* const> records, int32_t num_layers);

// Which rows `row` is compared with: dense and InfLLM v2 with the same K, of the same task and length.
std::vector<const NiahRow*> NiahPeers(const NiahRow& row, std::span<const NiahRow> rows);
// On the samples that both have; none: there is no such sample.
std::optional<PairedDifference> Compare(const NiahRow& first, const NiahRow& second);

// Mean negative log-likelihood of the answers' tokens; none where some were written.
std::optional<double> MeanNll(const NiahRow& row);

// Depths that were asked for and have no sample, in words: "75 %, 100 %". Empty where there are none.
std::string NiahEmptyDepths(std::span<const NiahRow> rows, std::span<const double> asked);

// One JSON object a line for each row.
std::string NiahJsonLines(std::span<const NiahRow> rows);
// Markdown tables as in the paper: a line for each method, a column for each K.
std::string NiahTables(std::span<const NiahRow> rows, NiahScoring scoring);

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_REPORT_H_
