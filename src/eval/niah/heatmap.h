// Needle results by length and depth as a picture.
#ifndef PHSA_EVAL_NIAH_HEATMAP_H_
#define PHSA_EVAL_NIAH_HEATMAP_H_

#include <filesystem>
#include <span>
#include <string>

#include "eval/niah/report.h"

namespace phsa {

// One SVG image that needs nothing else: a panel for each method and K, with a column for each length and a line for
// each depth (ten ranges where the depths were drawn). What has no sample is an empty cell, also a depth that was asked
// for (`depths`) and that no sample has. At least one row.
std::string NiahHeatMap(std::span<const NiahRow> rows, const std::string& model, std::span<const double> depths);

// The file as its ending says: .svg, or .html for a page whose panels wrap; other endings are refused. WriteNiahHeatMap
// replaces a file that is there.
void CheckNiahHeatMapPath(const std::filesystem::path& path);
void WriteNiahHeatMap(std::span<const NiahRow> rows, const std::string& model, std::span<const double> depths,
                      const std::filesystem::path& path);

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_HEATMAP_H_
