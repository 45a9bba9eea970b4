#include "eval/niah/heatmap.h"

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

constexpr int kCellWidth = 58, kCellHeight = 22, kLabelWidth = 70, kTitleHeight = 46, kFootHeight = 44, kGap = 20;
constexpr int kPanelTitle = 24, kPanelFoot = 20, kLegendWidth = 200;
constexpr double kBoldWidth = 7;  // of a character at the panels' size, rather more than less

// Pictures have their light colours as attributes, for viewers that know no style sheets; this is for the dark.
constexpr std::string_view kStyle = R"css(@media (prefers-color-scheme: dark) {
  .page { fill: #131416; } .ink { fill: #ebe8e2; } .soft { fill: #a19c93; } .none { fill: #24272b; }
  .cell { fill: var(--dark); } .on { fill: #fff; }
  .stop { stop-color: var(--dark); }
}
)css";
constexpr std::string_view kInk = "class=\"ink\" fill=\"#1f1d1a\"", kSoft = "class=\"soft\" fill=\"#67625a\"";

struct Range {
  double low, high;  // a depth is in it where low <= depth < high; a single depth where both are the same
  std::string label;
  bool Has(double depth) const { return low == high ? depth == low : depth >= low && depth < high; }
};

std::vector<Range> DepthRanges(std::span<const NiahRow> rows, std::span<const double> asked) {
  std::set<double> depths(asked.begin(), asked.end());
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

// Red for lost needles, blue for found ones, the page's own colour between: also for those who do not see red and green
// apart. On a dark page numbers are white on all of them.
struct Scale {
  std::array<double, 3> lost, middle, found;
};
constexpr Scale kLight = {{178, 24, 43}, {247, 247, 247}, {33, 102, 172}};
constexpr Scale kDark = {{190, 58, 68}, {48, 51, 56}, {52, 120, 200}};

std::array<double, 3> Colour(const Scale& scale, double score) {
  const auto& end = score < 0.5 ? scale.lost : scale.found;
  const double share = std::abs(score - 0.5) * 2;
  std::array<double, 3> colour{};
  for (size_t i = 0; i < 3; ++i) colour[i] = scale.middle[i] + (end[i] - scale.middle[i]) * share;
  return colour;
}

std::string Css(const std::array<double, 3>& colour) {
  return fmt::format("rgb({:.0f},{:.0f},{:.0f})", colour[0], colour[1], colour[2]);
}

std::string Text(double x, double y, std::string_view attributes, std::string_view content) {
  return fmt::format("<text x=\"{:g}\" y=\"{:g}\" {}>{}</text>\n", x, y, attributes, EscapedMarkup(content));
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

class HeatMap {
 public:
  HeatMap(std::span<const NiahRow> rows, const std::string& model, std::span<const double> depths)
      : ranges_(DepthRanges(rows, depths)), lines_(Panels(rows)) {
    PHSA_CHECK(!rows.empty());
    std::set<int32_t> lengths;
    for (const NiahRow& row : rows) {
      lengths.insert(row.length);
      tasks_.insert(row.task);
    }
    lengths_.assign(lengths.begin(), lengths.end());
    title_ = fmt::format("Needles found, in percent: {}{}", model,
                         tasks_.size() == 1 ? fmt::format(", {}", Name(*tasks_.begin())) : "");
  }

  // One picture, a line of panels for each method.
  std::string Svg() const {
    size_t longest_title = 0, widest = 1;
    for (const std::vector<Panel>& line : lines_) {
      widest = std::max(widest, line.size());
      for (const Panel& panel : line) longest_title = std::max(longest_title, CountCharacters(panel.Title()));
    }
    const double pitch = std::max(panel_width(), kBoldWidth * static_cast<double>(longest_title)) + kGap;
    std::string body;
    double y = kTitleHeight;
    std::optional<NiahTask> task;
    for (const std::vector<Panel>& line : lines_) {
      if (tasks_.size() > 1 && task != line.front().task) {
        body +=
            Text(kGap, y + 14, fmt::format("{} font-size=\"14\" font-weight=\"bold\"", kInk), Name(line.front().task));
        y += 26;
      }
      task = line.front().task;
      for (size_t i = 0; i < line.size(); ++i) {
        const double x = kGap + static_cast<double>(i) * pitch;
        body += Text(x, y + 14, fmt::format("{} font-weight=\"bold\"", kInk), line[i].Title());
        body += DrawPanel(line[i], x, y + kPanelTitle);
      }
      y += kPanelTitle + panel_height() + kGap;
    }
    body += DrawLegend(kGap, y);
    const double title_width = kBoldWidth * 16 / 12 * static_cast<double>(CountCharacters(title_));  // it is larger
    const double width = std::max({kGap + static_cast<double>(widest) * pitch, title_width + 2 * kGap,
                                   static_cast<double>(kLegendWidth + 2 * kGap)});
    return Picture(
        width, y + kFootHeight,
        fmt::format("<style>{}</style>\n<rect class=\"page\" width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
                    kStyle) +
            Text(kGap, 20, fmt::format("{} font-size=\"16\" font-weight=\"bold\"", kInk), title_) +
            Text(kGap, 36, kSoft, kAxes) + body);
  }

  // A page whose panels stand beside each other where there is room.
  std::string Html() const {
    std::string body = fmt::format("<h1>{}</h1>\n<p>{}</p>\n", EscapedMarkup(title_), kAxes);
    std::optional<NiahTask> task;
    for (const std::vector<Panel>& line : lines_) {
      if (tasks_.size() > 1 && task != line.front().task) body += fmt::format("<h2>{}</h2>\n", Name(line.front().task));
      task = line.front().task;
      body += "<div class=\"line\">\n";
      for (const Panel& panel : line) {
        body += fmt::format("<figure><figcaption>{}</figcaption>\n{}</figure>\n", EscapedMarkup(panel.Title()),
                            Picture(panel_width(), panel_height(), DrawPanel(panel, 0, 0)));
      }
      body += "</div>\n";
    }
    body += Picture(kLegendWidth, kFootHeight, DrawLegend(0, 4));
    return fmt::format(
        R"html(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<title>{}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0; padding: 16px; background: #fff; color: #1f1d1a;
  font: 14px/1.4 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 18px; line-height: 1.25; margin: 0 0 2px; overflow-wrap: anywhere; }}
h2 {{ font-size: 15px; margin: 14px 0 4px; }}
p {{ margin: 0 0 12px; color: #67625a; }}
.line {{ display: flex; flex-wrap: wrap; gap: 4px 20px; }}
figure {{ margin: 0 0 14px; min-width: 0; max-width: 100%; width: {:g}px; }}
figcaption {{ font-weight: 600; margin: 0 0 4px; overflow-wrap: anywhere; }}
svg {{ display: block; max-width: 100%; height: auto; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #131416; color: #ebe8e2; }} p {{ color: #a19c93; }} }}
{}</style>
</head>
<body>
{}</body>
</html>
)html",
        EscapedMarkup(title_), panel_width(), kStyle, body);
  }

 private:
  static constexpr std::string_view kAxes = "down: depth of the needle in the text; across: tokens";

  double panel_width() const { return kLabelWidth + static_cast<double>(lengths_.size()) * kCellWidth; }
  double panel_height() const { return static_cast<double>(ranges_.size()) * kCellHeight + kPanelFoot; }

  static std::string Picture(double width, double height, const std::string& body) {
    return fmt::format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:g}\" height=\"{1:g}\" viewBox=\"0 0 {0:g} {1:g}\" "
               "font-family=\"sans-serif\" font-size=\"12\">\n",
               width, height) +
           body + "</svg>\n";
  }

  static std::string DrawCell(const NiahRow* row, const Range& range, double x, double y) {
    int64_t found = 0, all = 0;
    for (size_t r = 0; row != nullptr && r < row->records.size(); ++r) {
      const NiahRecord& record = *row->records[r];
      for (size_t i = 0; i < record.depths.size(); ++i) {
        if (!range.Has(record.depths[i])) continue;
        ++all;
        if (record.found[i]) ++found;
      }
    }
    const std::string box =
        fmt::format("x=\"{:g}\" y=\"{:g}\" width=\"{}\" height=\"{}\"", x, y, kCellWidth - 1, kCellHeight - 1);
    const double middle = x + (kCellWidth - 1) / 2.0;
    if (all == 0) {
      return fmt::format("<rect class=\"none\" {} fill=\"#eceae5\"><title>no sample</title></rect>\n", box) +
             Text(middle, y + 15, fmt::format("{} text-anchor=\"middle\"", kSoft), "–");
    }
    const double score = static_cast<double>(found) / static_cast<double>(all);
    const std::array<double, 3> colour = Colour(kLight, score);
    const double brightness = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2];
    return fmt::format("<rect class=\"cell\" style=\"--dark:{}\" {} fill=\"{}\"><title>{} of {} found</title></rect>\n",
                       Css(Colour(kDark, score)), box, Css(colour), found, all) +
           Text(middle, y + 15,
                fmt::format("class=\"on\" text-anchor=\"middle\" fill=\"{}\"", brightness < 140 ? "#fff" : "#1f1d1a"),
                fmt::format("{:.0f}", 100 * score));
  }

  std::string DrawPanel(const Panel& panel, double x, double y) const {
    std::string svg;
    const double left = x + kLabelWidth;
    for (size_t line = 0; line < ranges_.size(); ++line) {
      const double at = y + static_cast<double>(line) * kCellHeight;
      svg += Text(left - 6, at + 15, fmt::format("{} text-anchor=\"end\"", kInk), ranges_[line].label);
      for (size_t column = 0; column < lengths_.size(); ++column) {
        const auto row = std::find_if(panel.rows.begin(), panel.rows.end(),
                                      [&](const NiahRow* one) { return one->length == lengths_[column]; });
        svg += DrawCell(row == panel.rows.end() ? nullptr : *row, ranges_[line],
                        left + static_cast<double>(column) * kCellWidth, at);
      }
    }
    const double bottom = y + static_cast<double>(ranges_.size()) * kCellHeight;
    for (size_t column = 0; column < lengths_.size(); ++column) {
      svg += Text(left + (static_cast<double>(column) + 0.5) * kCellWidth, bottom + 14,
                  fmt::format("{} text-anchor=\"middle\"", kInk), TokensLabel(lengths_[column]));
    }
    return svg;
  }

  static std::string DrawLegend(double x, double y) {
    std::string svg = "<defs><linearGradient id=\"scale\">\n";
    for (const double score : {0.0, 0.5, 1.0}) {
      svg += fmt::format("<stop class=\"stop\" style=\"--dark:{}\" offset=\"{:g}\" stop-color=\"{}\"/>\n",
                         Css(Colour(kDark, score)), score, Css(Colour(kLight, score)));
    }
    svg += fmt::format(
        "</linearGradient></defs>\n<rect x=\"{:g}\" y=\"{:g}\" width=\"{}\" height=\"10\" fill=\"url(#scale)\"/>\n", x,
        y, kLegendWidth);
    svg += Text(x, y + 24, kInk, "0 % found");
    return svg + Text(x + kLegendWidth, y + 24, fmt::format("{} text-anchor=\"end\"", kInk), "100 %");
  }

  std::vector<Range> ranges_;
  std::vector<std::vector<Panel>> lines_;
  std::vector<int32_t> lengths_;
  std::set<NiahTask> tasks_;
  std::string title_;
};

}  // namespace

std::string NiahHeatMap(std::span<const NiahRow> rows, const std::string& model, std::span<const double> depths) {
  return HeatMap(rows, model, depths).Svg();
}

void CheckNiahHeatMapPath(const std::filesystem::path& path) {
  if (path.extension() != ".svg" && path.extension() != ".html") {
    ThrowInvalid("niah: {} ends neither in .svg nor in .html", Option{"heatmap", Quoted(path.string(), kQuotedPath)});
  }
  try {
    NewFile{path};  // leaves nothing behind
  } catch (const Error& error) {
    ThrowInvalid("niah: {}", Option{"heatmap", error.message()});
  }
}

void WriteNiahHeatMap(std::span<const NiahRow> rows, const std::string& model, std::span<const double> depths,
                      const std::filesystem::path& path) {
  const HeatMap map(rows, model, depths);
  NewFile file(path);
  file.Write(path.extension() == ".html" ? map.Html() : map.Svg());
  file.Keep();
}

}  // namespace phsa
