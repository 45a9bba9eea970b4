// Small charts as inline SVG, and the escaping that SVG and HTML share. Colours are those of a light page, with a class
// beside each, so that a page can say what they are in the dark: the style sheet of a page overrides them.
#ifndef PHSA_EVAL_PLOT_H_
#define PHSA_EVAL_PLOT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eval/niah/statistics.h"

namespace phsa {

// Text inside an element or an attribute in double quotes. What XML cannot hold is replaced: control characters by
// spaces, bytes that are not UTF-8 by U+FFFD.
std::string EscapedMarkup(std::string_view text);
size_t CountCharacters(std::string_view text);  // of UTF-8
// "512", "4k", "1M": counts of tokens as flags take them.
std::string TokensLabel(int64_t tokens);
// "12,345"
std::string Thousands(double value);

// What tells a series from the others, in all charts of a page: a colour with a marker of its own, for those who do not
// see it; and among those of one colour, dashes, or a marker that is not filled. Any numbers; they repeat after a few.
struct PlotStyle {
  int32_t colour = 0, dash = 0;
  bool hollow = false;
};
inline constexpr int32_t kPlotColours = 6;  // the classes stroke0 … and fill0 …

struct PlotPoint {
  double x = 0, y = 0;
  std::optional<Interval> range;  // drawn as a whisker
};
struct PlotLine {
  std::string label;
  PlotStyle style;
  std::vector<PlotPoint> points;  // by x
};
struct LineChart {
  std::string title, x_title;
  std::vector<PlotLine> lines;
  bool log_x = false, log_y = false;  // log: all numbers are above 0
  std::optional<double> y_high;       // where the linear axis ends, if not where the data ask for it
  std::function<std::string(double)> x_text, y_text;
};
// Lines with markers; one tick for each x that there is room for. Linear axes begin at 0. Numbers that are not finite
// are left out.
std::string LineChartSvg(const LineChart& chart);

struct PlotBar {
  std::string label, text;  // text: the value in words, at the end of the bar
  PlotStyle style;
  double value = 0;
  std::optional<Interval> range;
};
struct BarChart {
  std::string title;
  std::vector<PlotBar> bars;
  double high = 1;  // the axis is from 0 to this
  std::function<std::string(double)> text;
};
std::string BarChartSvg(const BarChart& chart);

}  // namespace phsa

#endif  // PHSA_EVAL_PLOT_H_
