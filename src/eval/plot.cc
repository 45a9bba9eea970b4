#include "eval/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "base/utf8.h"

namespace phsa {
namespace {

// Narrow, so that the letters of a chart that fills a phone's screen can still be read.
constexpr double kWidth = 400, kLeft = 62, kRight = 16, kPlotHeight = 210, kLine = 18;
constexpr double kCharacter = 7.6;  // width of a letter at the size of the text, rather more than less

// Grey, orange, blue: dense, InfLLM v2 and PHSA everywhere in this project. Then others that differ in brightness too.
constexpr std::array<std::string_view, kPlotColours> kColours = {"#6b7280", "#d97706", "#2563eb",
                                                                 "#0d9488", "#9333ea", "#be123c"};
constexpr std::array<std::string_view, 6> kDashes = {"", "8 4", "2 3", "10 3 2 3", "14 4", "5 2 1 2 1 2"};

size_t Colour(const PlotStyle& style) { return static_cast<size_t>(style.colour) % kColours.size(); }

std::string Stroke(const PlotStyle& style) {
  return fmt::format("class=\"stroke{0}\" stroke=\"{1}\"", Colour(style), kColours[Colour(style)]);
}
std::string Fill(const PlotStyle& style) {
  return fmt::format("class=\"fill{0}\" fill=\"{1}\"", Colour(style), kColours[Colour(style)]);
}

std::string Text(double x, double y, std::string_view anchor, std::string_view content, std::string_view more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}{}>{}</text>\n", x, y, anchor,
                     more.empty() ? "" : " ", more, EscapedMarkup(content));
}
constexpr std::string_view kSoft = "class=\"soft\" fill=\"#67625a\"";
constexpr std::string_view kBold = "font-weight=\"600\"";

std::string Rule(double x1, double y1, double x2, double y2) {
  return fmt::format(
      "<line class=\"rule\" stroke=\"#e3dfd7\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", x1, y1, x2,
      y2);
}

std::string Marker(const PlotStyle& style, double x, double y, double size = 4) {
  // Hollow: the page shows through, the colour is around it.
  const std::string paint = style.hollow ? Stroke(style) + " fill-opacity=\"0\" stroke-width=\"1.6\"" : Fill(style);
  const auto path = [&](const std::string& d) { return fmt::format("<path {} d=\"{}\"/>\n", paint, d); };
  switch (Colour(style)) {
    case 0: return fmt::format("<circle {} cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:g}\"/>\n", paint, x, y, size);
    case 1:
      return fmt::format("<rect {0} x=\"{1:.1f}\" y=\"{2:.1f}\" width=\"{3:.1f}\" height=\"{3:.1f}\"/>\n", paint,
                         x - 0.9 * size, y - 0.9 * size, 1.8 * size);
    case 2:  // a triangle
      return path(
          fmt::format("M{:.1f} {:.1f}l{:.1f} {:.1f}h{:.1f}z", x, y - 1.4 * size, 1.3 * size, 2.3 * size, -2.6 * size));
    case 3:  // a diamond
      return path(fmt::format("M{0:.1f} {1:.1f}l{2:.1f} {2:.1f}l-{2:.1f} {2:.1f}l-{2:.1f} -{2:.1f}z", x, y - 1.3 * size,
                              1.3 * size));
    case 4:  // a triangle on its tip
      return path(
          fmt::format("M{:.1f} {:.1f}l{:.1f} {:.1f}h{:.1f}z", x, y + 1.4 * size, 1.3 * size, -2.3 * size, -2.6 * size));
    default:  // a bar
      return fmt::format("<rect {} x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>\n", paint,
                         x - 1.4 * size, y - 0.5 * size, 2.8 * size, size);
  }
}

std::string Dash(const PlotStyle& style) {
  const std::string_view dash = kDashes[static_cast<size_t>(style.dash) % kDashes.size()];
  return dash.empty() ? "" : fmt::format(" stroke-dasharray=\"{}\"", dash);
}

std::string Whole(double height, std::string_view title, const std::string& body) {
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" viewBox=\"0 0 {0:g} {1:.0f}\" role=\"img\" "
             "aria-label=\"{2}\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#1f1d1a\">\n",
             kWidth, height, EscapedMarkup(title)) +
         body + "</svg>\n";
}

// 1, 2 or 5 times a power of ten, so that `high` is reached in at most five steps.
double NiceStep(double high) {
  const double rough = high / 5, power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

struct Axis {
  double low = 0, high = 1, from = 0, to = 1;  // numbers low … high lie at from … to
  bool log = false;
  double At(double value) const {
    const double a = log ? std::log(value / low) : value - low, b = log ? std::log(high / low) : high - low;
    return from + (to - from) * (b > 0 ? a / b : 0.5);
  }
};

bool Drawable(const LineChart& chart, const PlotPoint& point) {
  return std::isfinite(point.x) && std::isfinite(point.y) && (!chart.log_x || point.x > 0) &&
         (!chart.log_y || point.y > 0);
}

// The labels with their markers, in as many lines as they need.
std::string Legend(const std::vector<PlotLine>& lines, double* y) {
  std::string svg;
  double x = 4;
  for (const PlotLine& line : lines) {
    const double width = 34 + kCharacter * static_cast<double>(CountCharacters(line.label)) + 14;
    if (x > 4 && x + width > kWidth) {
      x = 4;
      *y += kLine;
    }
    svg += fmt::format("<line {} stroke-width=\"2\"{} x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
                       Stroke(line.style), Dash(line.style), x, *y - 4, x + 28, *y - 4);
    svg += Marker(line.style, x + 14, *y - 4) + Text(x + 34, *y, "start", line.label);
    x += width;
  }
  return svg;
}

std::string DrawLine(const LineChart& chart, const PlotLine& line, double width, const Axis& x, const Axis& y) {
  std::string path;
  for (const PlotPoint& point : line.points) {
    if (!Drawable(chart, point)) continue;
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x.At(point.x), y.At(point.y));
  }
  if (path.empty()) return "";
  return fmt::format("<path {} fill=\"none\" stroke-width=\"{:g}\" stroke-linejoin=\"round\"{} d=\"{}\"/>\n",
                     Stroke(line.style), width, Dash(line.style), path);
}

// Whether a piece of one line lies on the other: two of their points, or all that both have.
bool Meet(const LineChart& chart, const PlotLine& a, const PlotLine& b, const Axis& y) {
  constexpr double kNear = 3;
  size_t both = 0, near = 0;
  for (const PlotPoint& one : a.points) {
    for (const PlotPoint& other : b.points) {
      if (one.x != other.x || !Drawable(chart, one) || !Drawable(chart, other)) continue;
      ++both;
      if (std::abs(y.At(one.y) - y.At(other.y)) < kNear) ++near;
    }
  }
  return near >= 2 || (near == 1 && both == 1);
}

std::string DrawMarkers(const LineChart& chart, const PlotLine& line, const Axis& x, const Axis& y) {
  std::string marks;
  const double size = line.points.size() > 16 ? 2.2 : 4;  // many stand close
  for (const PlotPoint& point : line.points) {
    if (!Drawable(chart, point)) continue;
    const double at_x = x.At(point.x), at_y = y.At(point.y);
    if (point.range) {
      marks += fmt::format("<line {} x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", Stroke(line.style),
                           at_x, y.At(point.range->low), at_x, y.At(point.range->high));
    }
    const std::string title = fmt::format("{}, {}: {}", line.label, chart.x_text(point.x), chart.y_text(point.y));
    marks += fmt::format("<g><title>{}</title>{}</g>\n", EscapedMarkup(title), Marker(line.style, at_x, at_y, size));
  }
  return marks;
}

}  // namespace

std::string EscapedMarkup(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = ScanUtf8(text, at);
    const std::string_view bytes = text.substr(at, step.size);
    at += step.size;
    if (step.kind != Utf8Step::Kind::kCharacter) {
      out += "\ufffd";
    } else if (step.code < 0x20) {
      out += ' ';
    } else if (step.code == U'&') {
      out += "&amp;";
    } else if (step.code == U'<') {
      out += "&lt;";
    } else if (step.code == U'>') {
      out += "&gt;";
    } else if (step.code == U'"') {
      out += "&quot;";
    } else {
      out += bytes;
    }
  }
  return out;
}

size_t CountCharacters(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string TokensLabel(int64_t tokens) {
  constexpr int64_t kKilo = 1024;
  if (tokens > 0 && tokens % (kKilo * kKilo) == 0) return fmt::format("{}M", tokens / (kKilo * kKilo));
  return tokens > 0 && tokens % kKilo == 0 ? fmt::format("{}k", tokens / kKilo) : fmt::format("{}", tokens);
}

std::string Thousands(double value) {
  std::string digits = fmt::format("{:.0f}", value);
  for (size_t at = digits.size(); at > 3 && digits[at - 4] != '-'; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

std::string LineChartSvg(const LineChart& chart) {
  Axis x, y;
  x.log = chart.log_x;
  y.log = chart.log_y;
  std::set<double> xs;
  bool any = false;
  for (const PlotLine& line : chart.lines) {
    for (const PlotPoint& point : line.points) {
      if (!Drawable(chart, point)) continue;
      const Interval range = point.range.value_or(Interval{point.y, point.y});
      y.low = any ? std::min(y.low, range.low) : range.low;
      y.high = any ? std::max(y.high, range.high) : range.high;
      xs.insert(point.x);
      any = true;
    }
  }
  double top = kLine;
  std::string body = Text(4, top, "start", chart.title, kBold);
  top += kLine + 4;
  body += Legend(chart.lines, &top);
  top += 16;
  const double bottom = top + kPlotHeight, height = bottom + 42;
  if (!any) return Whole(height, chart.title, body + Text(kWidth / 2, top + 60, "middle", "no measurements", kSoft));

  std::vector<double> ticks;
  if (y.log) {
    y.low = std::pow(10, std::floor(std::log10(y.low) + 1e-9));
    y.high = std::pow(10, std::max(std::ceil(std::log10(y.high) - 1e-9), std::log10(y.low) + 1));
    // Not more than six labels, however many decades.
    const int decades = static_cast<int>(std::lround(std::log10(y.high / y.low))), step = (decades + 5) / 6;
    for (int i = 0; i <= decades; i += step) ticks.push_back(y.low * std::pow(10, i));
  } else {
    y.low = 0;
    const double wanted = chart.y_high.value_or(y.high > 0 ? y.high : 1), step = NiceStep(wanted);
    y.high = chart.y_high ? wanted : step * std::ceil(wanted / step - 1e-9);
    for (int i = 0; i * step <= y.high * (1 + 1e-9); ++i) ticks.push_back(i * step);
  }
  x.low = chart.log_x ? *xs.begin() : 0;
  x.high = *xs.rbegin();
  x.from = kLeft + 6;
  x.to = kWidth - kRight - 6;
  y.from = bottom;
  y.to = top;
  for (const double tick : ticks) {
    body += Rule(kLeft, y.At(tick), kWidth - kRight, y.At(tick));
    body += Text(kLeft - 7, y.At(tick) + 4.5, "end", chart.y_text(tick), kSoft);
  }
  double free_from = 0;  // where the label before ends
  for (const double tick : xs) {
    const std::string label = chart.x_text(tick);
    const double half = kCharacter * static_cast<double>(CountCharacters(label)) / 2, at = x.At(tick);
    if (at - half < free_from) continue;
    free_from = at + half + 6;
    body += Text(at, bottom + 18, "middle", label, kSoft);
  }
  body += Text(kWidth - kRight, bottom + 36, "end", chart.x_title, kSoft);
  // The first line on top; one that lies below another of its dashes is wider, so that it shows.
  for (size_t i = chart.lines.size(); i-- > 0;) {
    const PlotLine& line = chart.lines[i];
    double width = 2;
    for (size_t j = 0; j < i; ++j) {
      if (chart.lines[j].style.dash == line.style.dash && Meet(chart, line, chart.lines[j], y)) width += 2.4;
    }
    body += DrawLine(chart, line, width, x, y);
  }
  for (const PlotLine& line : chart.lines) body += DrawMarkers(chart, line, x, y);
  return Whole(height, chart.title, body);
}

std::string BarChartSvg(const BarChart& chart) {
  constexpr double kBar = 14, kPitch = 40;
  const Axis x = {0, chart.high, 4, kWidth - kRight - 4};
  double top = kLine;
  std::string body = Text(4, top, "start", chart.title, kBold);
  top += 10;
  const double bottom = top + kPitch * static_cast<double>(chart.bars.size()) + 4;
  for (int i = 0; i <= 4; ++i) {
    const double value = chart.high * i / 4;
    body += Rule(x.At(value), top, x.At(value), bottom);
    body += Text(x.At(value), bottom + 16, i == 0 ? "start" : i == 4 ? "end" : "middle", chart.text(value), kSoft);
  }
  double y = top;
  for (const PlotBar& bar : chart.bars) {
    const double value = std::isfinite(bar.value) ? std::clamp(bar.value, 0.0, chart.high) : 0;
    body += Text(4, y + 17, "start", bar.label) + Text(kWidth - kRight - 4, y + 17, "end", bar.text, kBold);
    // Nothing is still a line.
    body += fmt::format("<rect {} x=\"4\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:g}\" rx=\"2\"/>\n", Fill(bar.style),
                        y + 23, std::max(1.5, x.At(value) - 4), kBar);
    if (bar.range) {
      const double low = x.At(std::clamp(bar.range->low, 0.0, chart.high));
      const double high = x.At(std::clamp(bar.range->high, 0.0, chart.high));
      body += fmt::format(
          "<path class=\"whisker\" stroke=\"#1f1d1a\" fill=\"none\" stroke-width=\"1.5\" "
          "d=\"M{0:.1f} {1:.1f}v8M{0:.1f} {2:.1f}H{3:.1f}M{3:.1f} {1:.1f}v8\"/>\n",
          low, y + 26, y + 30, high);
    }
    y += kPitch;
  }
  return Whole(bottom + 24, chart.title, body);
}

}  // namespace phsa
