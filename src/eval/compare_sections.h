// A comparison as a reader sees it, before it is HTML or markdown: sentences, tables and charts.
#ifndef PHSA_EVAL_COMPARE_SECTIONS_H_
#define PHSA_EVAL_COMPARE_SECTIONS_H_

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "eval/compare.h"
#include "eval/niah/report.h"

namespace phsa {

// Plain text everywhere; a chart is SVG.
struct CompareTable {
  std::string caption;
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;  // as long as `columns`
  std::vector<size_t> prose;                   // columns that hold sentences, besides the first, which holds names
};

struct CompareSection {
  std::string title;
  std::vector<std::string> findings;  // what was found, a sentence or two each
  std::vector<std::string> charts;
  std::vector<CompareTable> tables;
  std::vector<std::string> notes;  // how it was measured, and what it does not say
};

struct CompareStory {
  std::string title;
  std::vector<std::pair<std::string, std::string>> facts;  // model, machine, command
  std::vector<std::string> warnings;                       // what must be known before anything else
  CompareTable summary;
  std::vector<CompareSection> sections;
};
CompareStory TellComparison(const CompareResult& result);

// Where the needles of one policy stand in NiahRows; null: it has none.
const NiahRow* FindNiahRow(std::span<const NiahRow> rows, const LayerSettings& attention, NiahTask task,
                           int32_t length);
// By task, length and so on, as `phsa niah` has them.
std::vector<NiahRow> NiahRowsOf(const CompareResult& result);

}  // namespace phsa

#endif  // PHSA_EVAL_COMPARE_SECTIONS_H_
