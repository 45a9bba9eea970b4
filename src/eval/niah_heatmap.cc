#include "eval/niah_heatmap.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "base/errors.h"
#include "base/new_file.h"
#include "eval/plot.h"

namespace phsa {
namespace {

constexpr int kCellWidth = 58, kCellHeight = 22, kLabelWidth = 64, kTitleHeight = 46, kFootHeight = 40, kGap = 20;
constexpr int kLegendWidth = 200;
constexpr double kBoldWidth = 7;  // of a character at the panels' size, rather more than less

struct Range {
  double low, high;  // a depth is in it where low <= depth < high; a single depth where both are the same
  std::string label;
  bool Has(double depth) const { return low == high ? depth == low : depth >= low && depth < high; }
};

std::vector<Range> DepthRanges(std::span<const NiahRow> rows) {
  std::set<double> depths;
  for (const NiahRow& row : rows) {
    for (const NiahRecord* record : row.records) depths.insert(record->depths.begin(), record->depths.end());
  }
  std::vector<Range> ranges;
  constexpr size_t kMostLines = 11;
  if (depths.size() <= kMostLines) {
    for (const double depth : depths) ranges.push_back({depth, depth, fmt::format("{:g} %", depth)});
    return ranges;
  }
  for (int low = 0; low < 100; low += 10) {
    ranges.push_back({double(low), low == 90 ? 101.0 : low + 10.0, fmt::format("{}–{} %", low, low + 10)});
  }
  return ranges;
}

// Red for lost needles, blue for found ones, almost white between: also for those who do not see red and green apart.
std::array<double, 3> Colour(double score) {
  constexpr std::array<double, 3> kLost = {178, 24, 43}, kMiddle = {247, 247, 247}, kFound = {33, 102, 172};
  const auto& end = score < 0.5 ? kLost : kFound;
  const double share = std::abs(score - 0.5) * 2;
  std::array<double, 3> colour{};
  for (size_t i = 0; i < 3; ++i) colour[i] = kMiddle[i] + (end[i] - kMiddle[i]) * share;
  return colour;
}

std::string Css(const std::array<double, 3>& colour) {
  return fmt::format("rgb({:.0f},{:.0f},{:.0f})", colour[0], colour[1], colour[2]);
}

std::string Text(double x, double y, std::string_view attributes, std::string_view content) {
  return fmt::format("<text x=\"{:g}\" y=\"{:g}\"{}{}>{}</text>\n", x, y, attributes.empty() ? "" : " ", attributes,
                     EscapedMarkup(content));
}

// The rows of one panel, by length.
struct Panel {
  NiahTask task;
  std::string method;
  std::optional<int32_t> top_k;
  std::vector<const NiahRow*> rows;
  std::string Title() const { return top_k ? fmt::format("{}, K={}", method, *top_k) : method; }
};

// Lines of panels: one for each task and method.
std::vector<std::vector<Panel>> Panels(std::span<const NiahRow> rows) {
  std::vector<std::vector<Panel>> lines;
  for (const NiahRow& row : rows) {
    auto line = std::find_if(lines.begin(), lines.end(), [&](const auto& panels) {
      return panels.front().task == row.task && panels.front().method == row.method;
    });
    if (line == lines.end()) line = lines.insert(lines.end(), std::vector<Panel>{});
    auto panel = std::find_if(line->begin(), line->end(), [&](const Panel& one) { return one.top_k == row.top_k; });
    if (panel == line->end()) panel = line->insert(line->end(), Panel{row.task, row.method, row.top_k, {}});
    panel->rows.push_back(&row);
  }
  return lines;
}

std::string Cell(const NiahRow& row, const Range& range, double x, double y) {
  int64_t found = 0, all = 0;
  for (const NiahRecord* record : row.records) {
    for (size_t i = 0; i < record->depths.size(); ++i) {
      if (!range.Has(record->depths[i])) continue;
      ++all;
      if (record->found[i]) ++found;
    }
  }
  const std::string box =
      fmt::format("x=\"{:g}\" y=\"{:g}\" width=\"{}\" height=\"{}\"", x, y, kCellWidth - 1, kCellHeight - 1);
  if (all == 0) return fmt::format("<rect {} fill=\"#eee\"><title>no needle here</title></rect>\n", box);
  const double score = static_cast<double>(found) / static_cast<double>(all);
  const std::array<double, 3> colour = Colour(score);
  const double brightness = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2];
  return fmt::format("<rect {} fill=\"{}\"><title>{} of {} found</title></rect>\n", box, Css(colour), found, all) +
         Text(x + (kCellWidth - 1) / 2.0, y + 15,
              brightness < 140 ? "text-anchor=\"middle\" fill=\"#fff\"" : "text-anchor=\"middle\"",
              fmt::format("{:.0f}", 100 * score));
}

std::string DrawPanel(const Panel& panel, std::span<const Range> ranges, std::span<const int32_t> lengths, double x,
                      double y) {
  std::string svg = Text(x, y + 14, "font-weight=\"bold\"", panel.Title());
  const double left = x + kLabelWidth, top = y + 24;
  for (size_t line = 0; line < ranges.size(); ++line) {
    const double at = top + static_cast<double>(line) * kCellHeight;
    svg += Text(left - 6, at + 15, "text-anchor=\"end\"", ranges[line].label);
    for (size_t column = 0; column < lengths.size(); ++column) {
      for (const NiahRow* row : panel.rows) {
        if (row->length == lengths[column]) {
          svg += Cell(*row, ranges[line], left + static_cast<double>(column) * kCellWidth, at);
        }
      }
    }
  }
  const double bottom = top + static_cast<double>(ranges.size()) * kCellHeight;
  for (size_t column = 0; column < lengths.size(); ++column) {
    svg += Text(left + (static_cast<double>(column) + 0.5) * kCellWidth, bottom + 14, "text-anchor=\"middle\"",
                TokensLabel(lengths[column]));
  }
  return svg;
}

std::string Legend(double x, double y) {
  std::string svg = "<defs><linearGradient id=\"scale\">\n";
  for (const double score : {0.0, 0.5, 1.0}) {
    svg += fmt::format("<stop offset=\"{:g}\" stop-color=\"{}\"/>\n", score, Css(Colour(score)));
  }
  svg += fmt::format(
      "</linearGradient></defs>\n<rect x=\"{:g}\" y=\"{:g}\" width=\"{}\" height=\"10\" fill=\"url(#scale)\"/>\n", x, y,
      kLegendWidth);
  svg += Text(x, y + 24, "", "0 % found");
  return svg + Text(x + kLegendWidth, y + 24, "text-anchor=\"end\"", "100 %");
}

}  // namespace

std::string NiahHeatMap(std::span<const NiahRow> rows, const std::string& model) {
  PHSA_CHECK(!rows.empty());
  const std::vector<Range> ranges = DepthRanges(rows);
  std::set<int32_t> all_lengths;
  std::set<NiahTask> tasks;
  for (const NiahRow& row : rows) {
    all_lengths.insert(row.length);
    tasks.insert(row.task);
  }
  const std::vector<int32_t> lengths(all_lengths.begin(), all_lengths.end());
  const std::vector<std::vector<Panel>> lines = Panels(rows);
  size_t longest_title = 0;
  for (const std::vector<Panel>& line : lines) {
    for (const Panel& panel : line) longest_title = std::max(longest_title, panel.Title().size());
  }
  const double panel_width = std::max(kLabelWidth + static_cast<double>(lengths.size()) * kCellWidth,
                                      kBoldWidth * static_cast<double>(longest_title)) +
                             kGap;
  const double panel_height = 24 + static_cast<double>(ranges.size()) * kCellHeight + 20 + kGap;

  std::string body;
  double y = kTitleHeight;
  size_t widest = 1;
  std::optional<NiahTask> task;
  for (const std::vector<Panel>& line : lines) {
    widest = std::max(widest, line.size());
    if (tasks.size() > 1 && task != line.front().task) {
      body += Text(kGap, y + 14, "font-size=\"14\" font-weight=\"bold\"", Name(line.front().task));
      y += 26;
    }
    task = line.front().task;
    for (size_t i = 0; i < line.size(); ++i) {
      body += DrawPanel(line[i], ranges, lengths, kGap + static_cast<double>(i) * panel_width, y);
    }
    y += panel_height;
  }
  body += Legend(kGap, y);
  const std::string title = fmt::format("Needles found, in percent: {}{}", model,
                                        tasks.size() == 1 ? fmt::format(", {}", Name(*tasks.begin())) : "");
  const double title_width = kBoldWidth * 16 / 12 * static_cast<double>(title.size());  // it is larger
  const double width = std::max({kGap + static_cast<double>(widest) * panel_width, title_width + 2 * kGap,
                                 static_cast<double>(kLegendWidth + 2 * kGap)});
  const double height = y + kFootHeight;
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:g}\" height=\"{1:g}\" viewBox=\"0 0 {0:g} {1:g}\" "
             "font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n<rect width=\"100%\" height=\"100%\" "
             "fill=\"#fff\"/>\n",
             width, height) +
         Text(kGap, 20, "font-size=\"16\" font-weight=\"bold\"", title) +
         Text(kGap, 36, "fill=\"#666\"", "down: depth of the needle in the text; across: tokens") + body + "</svg>\n";
}

void CheckNiahHeatMapPath(const std::filesystem::path& path) {
  if (path.extension() != ".svg" && path.extension() != ".html") {
    ThrowInvalid("niah: --heatmap {} ends neither in .svg nor in .html", Quoted(path.string(), kQuotedPath));
  }
  try {
    NewFile{path};  // leaves nothing behind
  } catch (const Error& error) {
    ThrowInvalid("niah: --heatmap {}", error.what());
  }
}

void WriteNiahHeatMap(std::span<const NiahRow> rows, const std::string& model, const std::filesystem::path& path) {
  const std::string svg = NiahHeatMap(rows, model);
  NewFile file(path);
  if (path.extension() == ".html") {
    file.Write(
        fmt::format("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{}</title></head>\n"
                    "<body style=\"margin:0\">\n{}</body></html>\n",
                    EscapedMarkup("Needles: " + model), svg));
  } else {
    file.Write(svg);
  }
  file.Keep();
}

}  // namespace phsa
