#include "eval/compare_sections.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "attention/policies.h"
#include "eval/plot.h"

namespace phsa {
namespace {

constexpr const char* kNothing = "–";
constexpr double kUnlikely = 0.05;  // what is usually called significant

std::string Percent(double share) { return fmt::format("{:.1f} %", 100 * share); }
std::string PercentOf(double share) { return fmt::format("{:.0f} %", 100 * share); }
std::string Points(double difference) { return fmt::format("{:+.0f}", 100 * difference); }
std::string Range(const Interval& shares) {
  return fmt::format("{:.0f}–{:.0f} %", 100 * shares.low, 100 * shares.high);
}
std::string Plural(int64_t count, const char* one) { return fmt::format("{} {}{}", count, one, count == 1 ? "" : "s"); }

// 2.31e12 is "2.31 T".
std::string Si(double value, const char* format) {
  constexpr const char* kUnits[] = {"", " k", " M", " G", " T", " P", " E", " Z"};
  size_t unit = 0;
  for (; value >= 1000 && unit + 1 < std::size(kUnits); value /= 1000) ++unit;
  return fmt::format(fmt::runtime(format), value) + kUnits[unit];
}
std::string Flop(double value) { return Si(value, value >= 1 ? "{:.3g}" : "{:g}"); }

// In all charts the colour and the marker tell the policy, the dashes tell K. Two that differ in neither (a policy by
// its name and as what the model carries) differ in their markers: those of the second are hollow.
std::vector<PlotStyle> Styles(const CompareResult& result) {
  std::set<int32_t> ks;
  for (const ComparedPolicy& policy : result.policies) {
    if (Chooses(policy.attention.base.policy)) ks.insert(policy.attention.base.top_k);
  }
  std::vector<PlotStyle> styles;
  for (const ComparedPolicy& policy : result.policies) {
    const Settings& base = policy.attention.base;
    PlotStyle style;
    style.colour = RowOf(base.policy).colour;
    if (Chooses(base.policy)) style.dash = static_cast<int32_t>(std::distance(ks.begin(), ks.find(base.top_k)));
    style.hollow = std::any_of(styles.begin(), styles.end(), [&](const PlotStyle& other) {
      return other.colour == style.colour && other.dash == style.dash;
    });
    styles.push_back(style);
  }
  return styles;
}

class Teller {
 public:
  explicit Teller(const CompareResult& result)
      : result_(result), styles_(Styles(result)), dense_(result.dense()), niah_rows_(NiahRowsOf(result)) {}

  CompareStory Tell() const {
    CompareStory story;
    story.title = Title();
    story.facts = Facts();
    story.warnings = Warnings();
    story.summary = Summary();
    if (result_.answers) story.sections.push_back(AnswersSection(*result_.answers));
    if (result_.speed) story.sections.push_back(SpeedSection(*result_.speed));
    if (result_.niah) story.sections.push_back(NiahSection());
    if (result_.text && result_.text->perplexity) story.sections.push_back(PerplexitySection(*result_.text));
    if (result_.text && result_.text->recall) story.sections.push_back(RecallSection(*result_.text));
    if (result_.flops) story.sections.push_back(FlopsSection(*result_.flops));
    story.sections.push_back(SettingsSection());
    return story;
  }

 private:
  size_t num_policies() const { return result_.policies.size(); }
  const std::string& Label(size_t policy) const { return result_.policies[policy].label; }
  const LayerSettings& Attention(size_t policy) const { return result_.policies[policy].attention; }
  bool IsDense(size_t policy) const { return result_.policies[policy].dense; }
  // What `policy` is compared with, where there is something.
  std::optional<size_t> PeerOf(size_t policy) const { return IsDense(policy) ? std::nullopt : dense_; }

  std::string Title() const {
    std::string title = result_.about.model + ": ";
    for (size_t i = 0; i < num_policies(); ++i) {
      title += (i == 0 ? "" : i + 1 == num_policies() ? " and " : ", ") + Label(i);
    }
    return title;
  }

  std::vector<std::pair<std::string, std::string>> Facts() const {
    const CompareAbout& about = result_.about;
    return {{"model", fmt::format("{} ({}; {} layers, {} query and {} KV heads of {}, context {})", about.model,
                                  about.format, about.num_layers, about.num_q_heads, about.num_kv_heads, about.head_dim,
                                  Thousands(about.context))},
            {"weights", fmt::format("{}; {} cache", about.weights, about.kv_type)},
            {"machine", fmt::format("{}{}, {}", about.device == "cpu" ? "" : about.device + ", ", about.cpu,
                                    Plural(about.threads, "thread"))},
            {"made", fmt::format("{} by phsa {} in {:.0f} s", about.date, about.version, about.seconds)},
            {"command", about.command}};
  }

  std::vector<std::string> Warnings() const {
    std::vector<std::string> warnings;
    if (result_.about.interrupted) {
      warnings.emplace_back("The run was interrupted. This is the report of what was done until then.");
    }
    const bool sparse = std::any_of(result_.policies.begin(), result_.policies.end(),
                                    [](const ComparedPolicy& policy) { return !policy.dense; });
    if (sparse && !result_.about.carries_settings) {
      warnings.emplace_back(
          "The model carries no settings of sparse attention: as far as its files say it was never trained with it. "
          "Expect it to lose some of what lies far back in a text, the smaller the model the more.");
    }
    return warnings;
  }

  // The column of the longest prefill, of the deepest decode, and so on.
  CompareTable Summary() const {
    CompareTable table;
    table.columns = {"attention", "settings"};
    table.prose = {1};
    for (size_t i = 0; i < num_policies(); ++i) table.rows.push_back({Label(i), SettingsInWords(Attention(i))});
    const auto add = [&](const std::string& column, const auto& cell) {
      table.columns.push_back(column);
      for (size_t i = 0; i < num_policies(); ++i) table.rows[i].push_back(cell(i));
    };
    if (result_.answers && std::any_of(result_.answers->questions.begin(), result_.answers->questions.end(),
                                       [](const CompareQuestion& one) { return !one.expected.empty(); })) {
      add("answers right", [&](size_t i) { return RightCount(*result_.answers, i); });
    }
    if (result_.speed) {
      const CompareSpeed& speed = *result_.speed;
      if (const std::vector<SpeedRow> rows = Longest(speed); !rows.empty()) {
        for (const SpeedRow& row : rows) {
          add(row.test == SpeedTest::kPrefill ? fmt::format("prefill of {}, tokens/s", TokensLabel(row.tokens))
                                              : fmt::format("decode at {}, tokens/s", TokensLabel(row.depth)),
              [&](size_t i) { return SpeedCell(speed, i, row); });
        }
        add(fmt::format("tokens read at {}", TokensLabel(rows.front().depth + rows.front().tokens)), [&](size_t i) {
          const SpeedRow* row = speed.Find(i, rows.front().test, rows.front().tokens, rows.front().depth);
          return row == nullptr ? kNothing : Percent(row->tokens_read.share());
        });
      }
    }
    if (result_.niah) {
      std::set<NiahTask> tasks;
      for (const auto& [task, length] : NiahColumns()) tasks.insert(task);
      for (const auto& [task, length] : NiahColumns()) {
        add(fmt::format("{} found at {}", tasks.size() == 1 ? "needles" : Name(task), TokensLabel(length)),
            [&, task = task, length = length](size_t i) {
              const NiahRow* row = FindNiahRow(niah_rows_, Attention(i), task, length);
              return row == nullptr ? kNothing : fmt::format("{} ({})", PercentOf(row->score), Range(row->ci95));
            });
      }
    }
    if (result_.text) {
      const CompareText& text = *result_.text;
      if (text.perplexity) {
        add("perplexity", [&](size_t i) {
          return text.results[i] ? fmt::format("{:.2f}", text.results[i]->perplexity()) : std::string(kNothing);
        });
      }
      if (text.recall) {
        add("recall", [&](size_t i) {
          return text.recalls[i] && text.recalls[i]->all ? Percent(*text.recalls[i]->all) : std::string(kNothing);
        });
      }
      if (!result_.speed) {
        add(fmt::format("tokens read at {}", TokensLabel(text.tokens)), [&](size_t i) { return ReadShare(text, i); });
      }
    }
    return table;
  }

  // Answers

  static std::string RightCount(const CompareAnswers& answers, size_t policy) {
    int64_t right = 0, judged = 0;
    for (size_t q = 0; q < answers.questions.size(); ++q) {
      const std::optional<bool> one = answers.Right(policy, q);
      judged += one.has_value() ? 1 : 0;
      right += one.value_or(false) ? 1 : 0;
    }
    return judged == 0 ? kNothing : fmt::format("{} of {}", right, judged);
  }

  CompareSection AnswersSection(const CompareAnswers& answers) const {
    CompareSection section;
    section.title = fmt::format("{} about a text", answers.questions.size() == 1 ? "A question" : "Questions");
    CompareTable costs;
    costs.caption = "What the answers took: one prefill of the text, for the first question";
    costs.columns = {"attention",        "right",      "tokens of the prompt", "prefill, tokens/s",
                     "decode, tokens/s", "tokens read"};
    for (size_t i = 0; i < num_policies(); ++i) {
      const std::vector<GenerateResult>& results = answers.results[i];
      if (results.empty()) continue;
      const GenerateResult& first = results.front();
      double decoded = 0, seconds = 0;
      TokensRead read;
      for (const GenerateResult& one : results) {
        decoded += std::max(0.0, static_cast<double>(one.tokens.size()) - 1);
        seconds += one.decode_seconds;
        read.read += one.tokens_read.read;
        read.dense += one.tokens_read.dense;
      }
      costs.rows.push_back(
          {Label(i), RightCount(answers, i), Thousands(first.prompt_tokens),
           first.prefill_seconds > 0 ? Thousands(first.prompt_tokens / first.prefill_seconds) : kNothing,
           seconds > 0 && decoded > 0 ? Thousands(decoded / seconds) : kNothing, Percent(read.share())});
    }
    section.tables.push_back(std::move(costs));
    for (size_t q = 0; q < answers.questions.size(); ++q) {
      const CompareQuestion& question = answers.questions[q];
      CompareTable table;
      table.caption = fmt::format("“{}”", question.question);
      if (!question.expected.empty()) table.caption += fmt::format(" A right answer says “{}”.", question.expected);
      table.columns = {"attention", "", "answer"};
      table.prose = {1, 2};
      for (size_t i = 0; i < num_policies(); ++i) {
        if (q >= answers.results[i].size()) continue;
        const std::optional<bool> right = answers.Right(i, q);
        table.rows.push_back({Label(i), right ? (*right ? "right" : "wrong") : "", answers.results[i][q].text});
      }
      section.tables.push_back(std::move(table));
    }
    section.notes.push_back(fmt::format(
        "Greedy, through the model's chat template. {} to look at, not a measurement: needles and perplexity are.",
        Plural(static_cast<int64_t>(answers.questions.size()), "question")));
    return section;
  }

  // Speed

  // The longest prefill and the deepest decode that any policy has, prefill first.
  std::vector<SpeedRow> Longest(const CompareSpeed& speed) const {
    std::vector<SpeedRow> found;
    for (const SpeedTest test : {SpeedTest::kPrefill, SpeedTest::kDecode}) {
      const SpeedRow* longest = nullptr;
      for (const auto& rows : speed.rows) {
        for (const SpeedRow& row : rows) {
          if (row.test != test) continue;
          if (longest == nullptr || row.tokens + row.depth > longest->tokens + longest->depth) longest = &row;
        }
      }
      if (longest != nullptr) found.push_back(*longest);
    }
    return found;
  }

  const SpeedRow* PeerRow(const CompareSpeed& speed, size_t policy, const SpeedRow& row) const {
    const std::optional<size_t> peer = PeerOf(policy);
    return peer ? speed.Find(*peer, row.test, row.tokens, row.depth) : nullptr;
  }

  std::string SpeedCell(const CompareSpeed& speed, size_t policy, const SpeedRow& which) const {
    const SpeedRow* row = speed.Find(policy, which.test, which.tokens, which.depth);
    if (row == nullptr) return kNothing;
    const SpeedRow* peer = PeerRow(speed, policy, which);
    const std::string value = Thousands(row->best());
    return peer == nullptr ? value : fmt::format("{} ({:.2f}×)", value, row->best() / peer->best());
  }

  // "1.53 times as fast as dense attention (1,114 against 725 tokens/s)"
  static std::string SpeedWords(const SpeedRow& row, const SpeedRow& peer) {
    const std::string both = fmt::format("{} against {} tokens/s", Thousands(row.best()), Thousands(peer.best()));
    const size_t runs = std::min(row.seconds.size(), peer.seconds.size());
    const bool overlap = row.slowest() <= peer.best() && peer.slowest() <= row.best();
    if (runs > 1 && overlap)
      return fmt::format("{} runs overlap with dense's and do not tell ({} at best)", runs, both);
    return fmt::format("{:.2f} times as fast as dense{} ({})", row.best() / peer.best(), runs > 1 ? "" : " in one run",
                       both);
  }

  CompareSection SpeedSection(const CompareSpeed& speed) const {
    CompareSection section;
    section.title = "Speed";
    double spread = 1;
    size_t fewest = static_cast<size_t>(speed.repeats);
    std::set<std::pair<int32_t, int32_t>> prefill, decode;  // tokens and depth
    for (const auto& rows : speed.rows) {
      for (const SpeedRow& row : rows) {
        (row.test == SpeedTest::kPrefill ? prefill : decode).insert({row.tokens, row.depth});
        spread = std::max(spread, row.best() / row.slowest());
        fewest = std::min(fewest, row.seconds.size());
      }
    }
    for (size_t i = 0; i < num_policies(); ++i) {
      std::string sentence;
      for (const SpeedRow& longest : Longest(speed)) {
        const SpeedRow* row = speed.Find(i, longest.test, longest.tokens, longest.depth);
        const SpeedRow* peer = PeerRow(speed, i, longest);
        if (row == nullptr || peer == nullptr) continue;
        sentence += longest.test == SpeedTest::kPrefill
                        ? fmt::format("prefill of {} tokens: {}", Thousands(row->tokens), SpeedWords(*row, *peer))
                        : fmt::format("{}decode after {}: {}", sentence.empty() ? "" : "; ", Thousands(row->depth),
                                      SpeedWords(*row, *peer));
      }
      if (!sentence.empty()) section.findings.push_back(fmt::format("{}, {}.", Label(i), sentence));
    }
    if (!dense_)
      section.findings.emplace_back("Dense attention was not measured, so there is nothing to compare with.");
    AddSpeedTable(speed, SpeedTest::kPrefill, prefill, &section);
    AddSpeedTable(speed, SpeedTest::kDecode, decode, &section);
    const bool times = dense_ && num_policies() > 1;
    section.notes.push_back(fmt::format(
        "Random tokens. The best of {} per number{}; the policies ran in turn. {}{}", Plural(speed.repeats, "run"),
        fewest < static_cast<size_t>(speed.repeats) ? ", fewer where the run was interrupted" : "",
        speed.repeats > 1
            ? fmt::format("Runs of the same thing differed by up to {:.0f} % (the whiskers). ", 100 * (spread - 1))
            : std::string("One run says nothing about its own noise; three runs do. "),
        times ? "In brackets: times dense attention in the same run." : ""));
    return section;
  }

  void AddSpeedTable(const CompareSpeed& speed, SpeedTest test, const std::set<std::pair<int32_t, int32_t>>& points,
                     CompareSection* section) const {
    if (points.empty()) return;
    const bool prefill = test == SpeedTest::kPrefill;
    CompareTable table;
    LineChart chart;
    chart.title = prefill ? "Prefill, tokens/s" : "Decode, tokens/s";
    chart.x_title = prefill ? "tokens of the text" : "tokens in the cache";
    chart.log_x = prefill && points.size() > 1;
    chart.x_text = [](double x) { return TokensLabel(std::llround(x)); };
    chart.y_text = Thousands;
    table.caption = prefill ? "Prefill of so many tokens, tokens/s"
                            : fmt::format("Decode of {} tokens after so many, tokens/s", speed.decode_tokens);
    table.columns = {"attention"};
    const auto [last_tokens, last_depth] = *points.rbegin();
    for (const auto& [tokens, depth] : points) table.columns.push_back(TokensLabel(prefill ? tokens : depth));
    table.columns.push_back(fmt::format("tokens read at {}", table.columns.back()));
    for (size_t i = 0; i < num_policies(); ++i) {
      table.rows.push_back({Label(i)});
      PlotLine& line = chart.lines.emplace_back(PlotLine{Label(i), styles_[i], {}});
      for (const auto& [tokens, depth] : points) {
        SpeedRow which;
        which.test = test;
        which.tokens = tokens;
        which.depth = depth;
        table.rows[i].push_back(SpeedCell(speed, i, which));
        const SpeedRow* row = speed.Find(i, test, tokens, depth);
        if (row == nullptr) continue;
        PlotPoint& point = line.points.emplace_back(PlotPoint{double(prefill ? tokens : depth), row->best(), {}});
        if (row->seconds.size() > 1) point.range = Interval{row->slowest(), row->best()};
      }
      const SpeedRow* last = speed.Find(i, test, last_tokens, last_depth);
      table.rows[i].push_back(last == nullptr ? kNothing : Percent(last->tokens_read.share()));
    }
    section->charts.push_back(LineChartSvg(chart));
    section->tables.push_back(std::move(table));
  }

  // Needles

  std::vector<std::pair<NiahTask, int32_t>> NiahColumns() const {
    std::set<std::pair<NiahTask, int32_t>> columns;
    for (const NiahRow& row : niah_rows_) columns.insert({row.task, row.length});
    return {columns.begin(), columns.end()};
  }

  // "-50 points (95 % interval -80 to -20, p = 0.002)"
  static std::string DifferenceNumbers(const PairedDifference& difference) {
    return fmt::format("{} points (95 % interval {} to {}, {})", Points(difference.mean), Points(difference.ci95.low),
                       Points(difference.ci95.high),
                       difference.p < 0.001 ? "p < 0.001" : fmt::format("p = {:.3f}", difference.p));
  }

  static std::string DifferenceWords(const PairedDifference& difference) {
    if (difference.p < kUnlikely) return difference.mean < 0 ? "fewer, beyond chance" : "more, beyond chance";
    return fmt::format("{} not enough to tell them apart",
                       difference.samples == 1 ? "1 sample is" : fmt::format("{} samples are", difference.samples));
  }

  CompareSection NiahSection() const {
    CompareSection section;
    section.title = "Needles in a haystack";
    const auto columns = NiahColumns();
    if (columns.empty()) {
      section.findings.emplace_back("No sample was finished.");
      return section;
    }
    for (const auto& [task, length] : columns) {
      const std::string place = fmt::format("{} at {} tokens", Name(task), Thousands(length));
      CompareTable table;
      BarChart chart;
      chart.title = fmt::format("Found, {}, with 95 % intervals", place);
      chart.text = PercentOf;
      table.caption = fmt::format("Needles found, {}", place);
      table.columns = {"attention", "found", "95 % interval", "samples", "tokens read", "sparsity", "against dense"};
      table.prose = {6};
      for (size_t i = 0; i < num_policies(); ++i) {
        const NiahRow* row = FindNiahRow(niah_rows_, Attention(i), task, length);
        if (row == nullptr) continue;
        std::string against = kNothing;
        if (const std::optional<size_t> peer = PeerOf(i)) {
          const NiahRow* other = FindNiahRow(niah_rows_, Attention(*peer), task, length);
          const std::optional<PairedDifference> difference = other ? Compare(*row, *other) : std::nullopt;
          if (difference) {
            against = DifferenceNumbers(*difference);
            section.findings.push_back(fmt::format("{}: {} found {}, dense {}: {}.", place, Label(i),
                                                   PercentOf(row->score), PercentOf(other->score),
                                                   DifferenceWords(*difference)));
          }
        }
        chart.bars.push_back({Label(i), PercentOf(row->score), styles_[i], row->score, row->ci95});
        table.rows.push_back({Label(i), PercentOf(row->score), Range(row->ci95), fmt::format("{}", row->records.size()),
                              Percent(row->read_share), Percent(row->sparsity), against});
      }
      section.charts.push_back(BarChartSvg(chart));
      section.tables.push_back(std::move(table));
    }
    section.notes.emplace_back(
        "The tasks are RULER's: a number is hidden in a text and asked for, greedily. Intervals of a share are "
        "Wilson's, "
        "those of a difference Bonett and Price's, p is McNemar's exact test on the same samples. Nothing is corrected "
        "for the number of comparisons.");
    return section;
  }

  // Perplexity and recall

  std::string ReadShare(const CompareText& text, size_t policy) const {
    return text.results[policy] ? Percent(text.results[policy]->tokens_read.share()) : std::string(kNothing);
  }

  static std::string Change(double loss) { return fmt::format("{:+.1f} %", 100 * (std::exp(loss) - 1)); }

  CompareSection PerplexitySection(const CompareText& text) const {
    CompareSection section;
    section.title = "Perplexity";
    CompareTable table;
    table.caption = fmt::format("{} tokens of {}", Thousands(text.tokens), text.name);
    table.columns = {"attention", "perplexity", "against dense", "95 % interval", "tokens read"};
    for (size_t i = 0; i < num_policies(); ++i) {
      if (!text.results[i]) continue;
      std::string change = kNothing, interval = kNothing;
      const std::optional<size_t> peer = PeerOf(i);
      if (peer && text.results[*peer]) {
        const PerplexityResult &own = *text.results[i], &other = *text.results[*peer];
        change = Change(own.loss - other.loss);
        std::string words = "the text is too short for an interval";
        if (const std::optional<LossDifference> difference = CompareLosses(own.losses, other.losses)) {
          interval = fmt::format("{} to {}", Change(difference->ci95.low), Change(difference->ci95.high));
          const bool clear = difference->ci95.low > 0 || difference->ci95.high < 0;
          words = fmt::format("95 % interval {}{}", interval, clear ? "" : ", so this text does not tell them apart");
        }
        section.findings.push_back(fmt::format("{}: {:.2f} against {:.2f} with dense attention, {} ({}).", Label(i),
                                               own.perplexity(), other.perplexity(), change, words));
      }
      table.rows.push_back(
          {Label(i), fmt::format("{:.3f}", text.results[i]->perplexity()), change, interval, ReadShare(text, i)});
    }
    if (table.rows.empty()) section.findings.emplace_back("Nothing was finished.");
    section.tables.push_back(std::move(table));
    section.notes.emplace_back(
        "Lower is better. One window, as phsa perplexity reads it. The interval is of the mean difference in loss "
        "over "
        "32 pieces of this text; it says nothing about other texts. Most tokens of most texts can be told from what is "
        "near: a model can keep its perplexity and lose its needles.");
    return section;
  }

  CompareSection RecallSection(const CompareText& text) const {
    CompareSection section;
    section.title = "Recall";
    CompareTable table;
    table.caption = fmt::format("Share of dense attention's mass that was read, {} tokens of {}",
                                Thousands(text.tokens), text.name);
    table.columns = {"attention", "all queries", "queries that leave something out", "lowest layer", "tokens read"};
    LineChart chart;
    chart.title = "Recall by layer, queries that leave something out";
    chart.x_title = "layer";
    chart.y_high = 1;
    chart.x_text = [](double x) { return fmt::format("{:.0f}", x); };
    chart.y_text = PercentOf;
    const auto share = [](const std::optional<double>& value) {
      return value ? Percent(*value) : std::string(kNothing);
    };
    for (size_t i = 0; i < num_policies(); ++i) {
      if (!text.recalls[i]) continue;
      const CompareRecall& recall = *text.recalls[i];
      PlotLine line{Label(i), styles_[i], {}};
      std::optional<std::pair<double, size_t>> lowest;
      for (size_t layer = 0; layer < recall.sparse_by_layer.size(); ++layer) {
        const std::optional<double>& value = recall.sparse_by_layer[layer];
        if (!value) continue;
        line.points.push_back({static_cast<double>(layer), *value, {}});
        if (!lowest || *value < lowest->first) lowest = {*value, layer};
      }
      std::string lowest_text = kNothing;
      if (lowest) {
        lowest_text = fmt::format("{} (layer {})", Percent(lowest->first), lowest->second);
        section.findings.push_back(
            fmt::format("{} reads {} of the tokens, and they hold {} of what dense attention would weigh.", Label(i),
                        ReadShare(text, i), share(recall.all)));
        chart.lines.push_back(std::move(line));
      } else {
        section.findings.push_back(fmt::format("{} leaves nothing out of a text this short.", Label(i)));
      }
      table.rows.push_back({Label(i), share(recall.all), share(recall.sparse), lowest_text, ReadShare(text, i)});
    }
    if (table.rows.empty()) {
      section.findings.emplace_back(
          "Nothing to show: dense attention reads everything, and nothing else was finished.");
      return section;
    }
    if (!chart.lines.empty()) section.charts.push_back(LineChartSvg(chart));
    section.tables.push_back(std::move(table));
    section.notes.emplace_back(
        "The mean over queries, layers and heads, measured on the same keys. Mass is not meaning: the one token that "
        "matters may weigh little.");
    return section;
  }

  // FLOPs

  CompareSection FlopsSection(const CompareFlops& flops) const {
    CompareSection section;
    section.title = "FLOPs of attention by length";
    LineChart chart;
    chart.title = "FLOPs of all layers' attention";
    chart.x_title = "tokens of the text";
    chart.log_x = chart.log_y = true;
    chart.x_text = [](double x) { return TokensLabel(std::llround(x)); };
    chart.y_text = Flop;
    CompareTable table, parts;
    table.caption = dense_ ? "FLOPs of a prefill of so many tokens, and their share of dense attention's"
                           : "FLOPs of a prefill of so many tokens";
    table.columns = {"attention"};
    for (const int32_t length : flops.lengths) table.columns.push_back(TokensLabel(length));
    parts.caption = fmt::format("What they are spent on at {}", table.columns.back());
    parts.columns = {"attention", "attention itself", "scores", "representatives"};
    for (size_t i = 0; i < num_policies(); ++i) {
      table.rows.push_back({Label(i)});
      PlotLine& line = chart.lines.emplace_back(PlotLine{Label(i), styles_[i], {}});
      const std::optional<size_t> peer = PeerOf(i);
      for (size_t j = 0; j < flops.lengths.size(); ++j) {
        const double total = flops.counts[i][j].total();
        line.points.push_back({static_cast<double>(flops.lengths[j]), total, {}});
        table.rows[i].push_back(
            peer ? fmt::format("{} ({})", Flop(total), Percent(total / flops.counts[*peer][j].total())) : Flop(total));
      }
      const AttentionFlops& last = flops.counts[i].back();
      const auto part = [&](double value) {
        if (value == 0) return std::string(kNothing);
        const double share = value / last.total();
        return fmt::format("{} ({})", Flop(value), share < 0.01 ? "under 1 %" : PercentOf(share));
      };
      parts.rows.push_back({Label(i), part(last.attention), part(last.scores), part(last.representatives)});
      if (peer) {
        const double ratio = flops.counts[*peer].back().total() / last.total();
        section.findings.push_back(fmt::format("At {}, {} needs {} of dense attention's FLOPs{}.", table.columns.back(),
                                               Label(i), Percent(1 / ratio),
                                               ratio >= 2 ? fmt::format(", one in {:.0f}", ratio) : ""));
      }
    }
    section.charts.push_back(LineChartSvg(chart));
    section.tables.push_back(std::move(table));
    section.tables.push_back(std::move(parts));
    section.notes.push_back(fmt::format(
        "Counted from the method's formulas for this model's shape, not measured: a multiplication and an addition are "
        "one each, softmax and top-K are left out, so are the other layers. Every length has the same settings.{}",
        flops.lengths.back() > result_.about.context
            ? fmt::format(" The model's own context ends at {}.", Thousands(result_.about.context))
            : ""));
    return section;
  }

  CompareSection SettingsSection() const {
    CompareSection section;
    section.title = "Settings";
    CompareTable table;
    table.columns = {"attention", "block", "init", "local", "K", "parts", "λ", "punctuation", "group", "dense below"};
    bool layers_differ = false;
    std::string same;
    for (size_t i = 0; i < num_policies(); ++i) {
      const Settings& base = Attention(i).base;
      for (const std::string& other : result_.policies[i].same) {
        same += fmt::format(" {} is the same as {} here and was measured once.", other, Label(i));
      }
      if (IsDense(i)) {
        table.rows.push_back({Label(i)});
        table.rows.back().resize(table.columns.size(), kNothing);
        continue;
      }
      layers_differ = layers_differ || !Attention(i).layers.empty();
      table.rows.push_back({Label(i), fmt::format("{}", base.block_size), fmt::format("{}", base.init_tokens),
                            fmt::format("{}", base.local_tokens),
                            Chooses(base.policy) ? fmt::format("{}", base.top_k) : std::string(kNothing),
                            HasMeans(base.policy) ? fmt::format("{}", base.parts) : std::string(kNothing),
                            !Weighs(base.policy)       ? std::string(kNothing)
                            : base.head_lambda.empty() ? fmt::format("{:g}", base.lambda)
                                                       : std::string("per head"),
                            Weighs(base.policy) ? base.punctuation : std::string(kNothing), Name(base.group_reduce),
                            fmt::format("{}", base.dense_below)});
    }
    section.tables.push_back(std::move(table));
    section.notes.push_back(
        fmt::format("All parts of this page have these settings. The preset is that of the longest text: init 16 and "
                    "local 128 up to 4,096 tokens, 128 and 512 above, unless flags or the model say otherwise.{} "
                    "report.json has every number of this page.{}",
                    same, layers_differ ? " Some layers have settings of their own; report.json has them." : ""));
    return section;
  }

  const CompareResult& result_;
  std::vector<PlotStyle> styles_;
  std::optional<size_t> dense_;
  std::vector<NiahRow> niah_rows_;
};

}  // namespace

std::vector<NiahRow> NiahRowsOf(const CompareResult& result) {
  if (!result.niah) return {};
  std::vector<const NiahRecord*> records;
  for (const NiahRecord& record : result.niah->records.all()) records.push_back(&record);
  return NiahRows(records, result.about.num_layers);
}

const NiahRow* FindNiahRow(std::span<const NiahRow> rows, const LayerSettings& attention, NiahTask task,
                           int32_t length) {
  for (const NiahRow& row : rows) {
    if (row.task == task && row.length == length && row.attention == attention) return &row;
  }
  return nullptr;
}

CompareStory TellComparison(const CompareResult& result) { return Teller(result).Tell(); }

}  // namespace phsa
