// What `phsa tune` tried, as people and scripts read it.
#ifndef PHSA_EVAL_TUNE_REPORT_H_
#define PHSA_EVAL_TUNE_REPORT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "eval/niah/records.h"
#include "eval/niah/statistics.h"
#include "eval/tune.h"

namespace phsa {

struct TuneAbout {
  std::string model, command, prose;  // prose: the text's name; empty: none was read
  double budget = 0;
  int32_t length = 0, samples = 0, num_layers = 0;
  uint64_t seed = 0;
  std::vector<NiahTask> tasks;
  double seconds = 0;
};

// A trial with what its samples say.
struct TuneRow {
  TuneTrial trial;              // of dense attention: no stage
  double share = 1;             // ShareAtEnd
  std::vector<double> scores;   // share of the answers that were right, by task
  double score = 0;             // their mean
  Interval ci95;                // as if all samples were of one task
  double nll = 0;               // mean over the tasks
  std::optional<double> prose;  // perplexity against dense attention's, minus one
  bool best = false;
};

// Dense attention, with as many samples as any trial, then the trials in their order.
std::vector<TuneRow> TuneRows(const TuneAbout& about, const TuneResult& result, const NiahRecords& records);

std::string TuneTable(const TuneAbout& about, std::span<const TuneRow> rows);  // Markdown
// What was found in one sentence.
std::string TuneInWords(const TuneAbout& about, std::span<const TuneRow> rows);
nlohmann::ordered_json TuneJson(const TuneAbout& about, std::span<const TuneRow> rows);
std::string TuneHtml(const TuneAbout& about, std::span<const TuneRow> rows);

}  // namespace phsa

#endif  // PHSA_EVAL_TUNE_REPORT_H_
