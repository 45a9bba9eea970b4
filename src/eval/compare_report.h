// A comparison as files and for the terminal.
#ifndef PHSA_EVAL_COMPARE_REPORT_H_
#define PHSA_EVAL_COMPARE_REPORT_H_

#include <string>

#include "eval/compare.h"
#include "eval/compare_sections.h"

namespace phsa {

std::string CompareHtml(const CompareStory& story);  // one page that needs nothing else, without scripts
std::string CompareMarkdown(const CompareStory& story);
// The answers and the first table, for a terminal.
std::string CompareSummary(const CompareResult& result, const CompareStory& story);
std::string CompareJson(const CompareResult& result);  // every number

}  // namespace phsa

#endif  // PHSA_EVAL_COMPARE_REPORT_H_
