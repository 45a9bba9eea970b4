#include "eval/tune_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "attention/policies.h"
#include "base/as_given.h"
#include "base/errors.h"
#include "eval/plot.h"
#include "eval/settings_text.h"
#include "eval/tune_meter.h"

namespace phsa {

extern const std::string_view kComparePage;

namespace {

using Json = nlohmann::ordered_json;

std::string Percent(double share) { return fmt::format("{:.1f}", 100 * share); }

std::string Settled(const TuneRow& row) {
  return row.trial.stage.empty() ? std::string("dense") : SettingsInWords(row.trial.attention);
}

void Measure(const TuneAbout& about, const NiahRecords& records, TuneRow* row) {
  const LayerSettings attention = Canonical(row->trial.attention);
  const int32_t samples = row->trial.samples;
  double nll = 0;
  for (const NiahTask task : about.tasks) {
    double right = 0;
    for (int32_t i = 0; i < samples; ++i) {
      const NiahRecord* const record = records.Find(task, about.length, attention, i);
      PHSA_CHECK(record != nullptr && record->nll.has_value());
      right += record->score();
      nll += *record->nll;
    }
    row->scores.push_back(right / samples);
    row->score += row->scores.back() / static_cast<double>(about.tasks.size());
  }
  const auto all = static_cast<int64_t>(about.tasks.size()) * samples;
  row->nll = nll / static_cast<double>(all);
  row->ci95 = WilsonInterval(row->score, all);
  row->share = ShareAtEnd(row->trial.attention, about.num_layers, about.length);
  const LayerSettings dense = Canonical({DenseSettings(), {}});
  double above = 0;
  int32_t windows = 0;
  for (int32_t window = 0; window < WindowsFor(samples); ++window) {
    const std::optional<double> ours = records.ProseLoss(about.length, attention, window);
    const std::optional<double> theirs = records.ProseLoss(about.length, dense, window);
    if (!ours || !theirs) break;
    above += *ours - *theirs;
    ++windows;
  }
  if (windows > 0) row->prose = std::exp(above / windows) - 1;
}

std::string Prose(const TuneRow& row) { return row.prose ? fmt::format("{:+.2f} %", 100 * *row.prose) : "-"; }

const TuneRow& Best(std::span<const TuneRow> rows) {
  const auto best = std::find_if(rows.begin(), rows.end(), [](const TuneRow& row) { return row.best; });
  PHSA_CHECK(best != rows.end());
  return *best;
}

// The best answers at each share of the tokens read, by the number of parts.
std::string Chart(std::span<const TuneRow> rows, bool nll) {
  LineChart chart;
  chart.title = nll ? "Loss of the answers, by tokens read" : "Right answers, by tokens read";
  chart.x_title = "of the text, read by the last query";
  if (!nll) chart.y_high = 1;
  chart.x_text = [](double x) { return fmt::format("{:.2g} %", x); };
  chart.y_text = [nll](double y) { return nll ? fmt::format("{:g}", y) : fmt::format("{:g} %", 100 * y); };
  std::map<int32_t, std::map<double, const TuneRow*>> lines;
  double widest = 0;
  for (const TuneRow& row : rows) {
    if (row.trial.stage.empty()) continue;
    widest = std::max(widest, 100 * row.share);
    const TuneRow*& at = lines[row.trial.attention.base.parts][100 * row.share];
    const auto better = [](const TuneRow& a, const TuneRow& b) {
      return a.trial.samples != b.trial.samples ? a.trial.samples > b.trial.samples : a.nll < b.nll;
    };
    if (at == nullptr || better(row, *at)) at = &row;
  }
  const auto point = [&](double x, const TuneRow& row) {
    return PlotPoint{x, nll ? row.nll : row.score, nll ? std::nullopt : std::optional(row.ci95)};
  };
  const TuneRow& dense = rows.front();
  chart.lines.push_back({"dense (100 %)", {0, 1, false}, {point(0, dense), point(widest, dense)}});
  for (PlotPoint& one : chart.lines.front().points) one.range.reset();
  int32_t colour = 1;
  for (const auto& [parts, points] : lines) {
    PlotLine line{
        parts == 1 ? std::string("one mean a block") : fmt::format("{} parts", parts), {colour++, 0, false}, {}};
    for (const auto& [x, row] : points) line.points.push_back(point(x, *row));
    chart.lines.push_back(std::move(line));
  }
  return LineChartSvg(chart);
}

std::vector<std::string> Titles(const TuneAbout& about) {
  std::vector<std::string> titles = {"stage", "settings", "read", "samples", "answers", "loss"};
  for (const NiahTask task : about.tasks) titles.emplace_back(Name(task));
  if (!about.prose.empty()) titles.emplace_back("perplexity");
  return titles;
}

std::vector<std::string> Cells(const TuneAbout& about, const TuneRow& row) {
  std::vector<std::string> cells = {
      row.trial.stage.empty() ? "-" : row.trial.stage,
      Settled(row),
      fmt::format("{:.2f} %", 100 * row.share),
      fmt::format("{}", row.trial.samples),
      fmt::format("{} ({}–{})", Percent(row.score), Percent(row.ci95.low), Percent(row.ci95.high)),
      fmt::format("{:.3f}", row.nll)};
  for (const double score : row.scores) cells.push_back(Percent(score));
  if (!about.prose.empty()) cells.push_back(row.trial.stage.empty() ? "-" : Prose(row));
  return cells;
}

}  // namespace

std::vector<TuneRow> TuneRows(const TuneAbout& about, const TuneResult& result, const NiahRecords& records) {
  std::vector<TuneRow> rows;
  TuneRow dense;
  dense.trial.attention.base = DenseSettings();
  for (const TuneTrial& trial : result.trials) dense.trial.samples = std::max(dense.trial.samples, trial.samples);
  Measure(about, records, &dense);
  rows.push_back(std::move(dense));
  for (const TuneTrial& trial : result.trials) {
    TuneRow row;
    row.trial = trial;
    Measure(about, records, &row);
    row.best = trial.stage == "final" && trial.won;
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string TuneTable(const TuneAbout& about, std::span<const TuneRow> rows) {
  const std::vector<std::string> titles = Titles(about);
  std::string out = fmt::format("| {} |\n|", fmt::join(titles, " | "));
  for (size_t i = 0; i < titles.size(); ++i) out += "---|";
  out += "\n";
  for (const TuneRow& row : rows) {
    std::vector<std::string> cells = Cells(about, row);
    if (row.best) cells[1] = "**" + cells[1] + "**";
    out += fmt::format("| {} |\n", fmt::join(cells, " | "));
  }
  return out;
}

std::string TuneInWords(const TuneAbout& about, std::span<const TuneRow> rows) {
  const TuneRow& best = Best(rows);
  const TuneRow& dense = rows.front();
  std::string words = fmt::format(
      "{}: {} of 100 answers at {} tokens ({} to {}; dense {}), {:.2f} % of the text read by the last query",
      SettingsInWords(best.trial.attention), Percent(best.score), about.length, Percent(best.ci95.low),
      Percent(best.ci95.high), Percent(dense.score), 100 * best.share);
  if (best.prose) words += fmt::format(", perplexity of prose {}", Prose(best));
  return words;
}

Json TuneJson(const TuneAbout& about, std::span<const TuneRow> rows) {
  const auto measured = [&](const TuneRow& row) {
    Json json = {{"settings", SettingsObject(row.trial.attention)},
                 {"read", row.share},
                 {"samples", row.trial.samples},
                 {"score", row.score},
                 {"ci95", {row.ci95.low, row.ci95.high}},
                 {"nll", row.nll}};
    for (size_t i = 0; i < about.tasks.size(); ++i) json["tasks"][Name(about.tasks[i])] = row.scores[i];
    json["prose"] = row.prose ? Json(*row.prose) : Json();
    return json;
  };
  Json json = {{"model", about.model}, {"length", about.length},   {"budget", about.budget},
               {"seed", about.seed},   {"samples", about.samples}, {"seconds", about.seconds}};
  json["best"] = measured(Best(rows));
  json["dense"] = measured(rows.front());
  json["trials"] = Json::array();
  for (const TuneRow& row : rows) {
    if (row.trial.stage.empty()) continue;
    Json trial = {{"stage", row.trial.stage}};
    trial.update(measured(row));
    trial["loss"] = row.trial.loss;
    trial["won"] = row.trial.won;
    json["trials"].push_back(std::move(trial));
  }
  return json;
}

std::string TuneHtml(const TuneAbout& about, std::span<const TuneRow> rows) {
  const std::string title =
      fmt::format("{}: settings for {:g} % of {} tokens", about.model, 100 * about.budget, TokensLabel(about.length));
  std::vector<std::string> tasks;
  for (const NiahTask task : about.tasks) tasks.emplace_back(Name(task));
  std::string body = fmt::format("<header><h1>{}</h1>\n<dl>\n", EscapedMarkup(title));
  const auto fact = [&](std::string_view name, const std::string& text) {
    body += fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", name, EscapedMarkup(text));
  };
  fact("found", TuneInWords(about, rows));
  fact("settings", SettingsToJson(Best(rows).trial.attention));
  fact("needles",
       fmt::format("{}; seed {}, up to {} samples of each", fmt::join(tasks, ", "), about.seed, about.samples));
  if (!about.prose.empty()) fact("prose", fmt::format("{}: the second half of each window", about.prose));
  fact("command", about.command);
  body += "</dl></header>\n<section><h2>Answers against tokens read</h2>\n<div class=\"charts\">\n";
  for (const bool nll : {false, true}) body += fmt::format("<figure>{}</figure>\n", Chart(rows, nll));
  body +=
      "</div>\n<p class=\"note\">Of each share of the text, the trial with the most samples and the least loss. The "
      "settings were chosen on these samples: report others.</p></section>\n"
      "<section><h2>What was tried</h2>\n<div class=\"scroll\"><table><thead><tr>";
  for (const std::string& one : Titles(about)) body += fmt::format("<th>{}</th>", EscapedMarkup(one));
  body += "</tr></thead><tbody>\n";
  for (const TuneRow& row : rows) {
    const std::vector<std::string> cells = Cells(about, row);
    body += "<tr>";
    for (size_t i = 0; i < cells.size(); ++i) {
      const std::string text = EscapedMarkup(cells[i]);
      const std::string shown = row.best ? "<strong>" + text + "</strong>" : text;
      body += i == 0 ? fmt::format("<th>{}</th>", shown)
                     : fmt::format("<td{}>{}</td>", i == 1 ? " class=\"prose\"" : "", shown);
    }
    body += "</tr>\n";
  }
  body += "</tbody></table></div></section>\n";
  std::string page(kComparePage);
  for (const auto& [placeholder, text] :
       {std::pair<std::string_view, std::string>("{{title}}", EscapedMarkup(title)), {"{{body}}", std::move(body)}}) {
    const size_t at = page.find(placeholder);
    PHSA_CHECK(at != std::string::npos);
    page.replace(at, placeholder.size(), text);
  }
  return page;
}

}  // namespace phsa
