#include "eval/compare_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "attention/policies.h"
#include "base/errors.h"
#include "eval/plot.h"
#include "eval/query_blocks.h"

namespace phsa {

extern const std::string_view kComparePage;  // compare_page.html

namespace {

using Json = nlohmann::ordered_json;

// Markdown

// What a terminal or a table cannot hold becomes a space.
std::string OneLine(std::string_view text) {
  std::string out;
  for (const char c : text) out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c;
  return out;
}

// Text of a model or a file must not become markup.
std::string MarkdownText(std::string_view text) {
  std::string out;
  for (const char c : OneLine(text)) {
    if (std::string_view("\\`*<>[]|").find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

// Columns as wide as their widest cell, so that it can be read as it is, too.
std::string MarkdownTable(const CompareTable& table) {
  std::vector<std::vector<std::string>> lines = {table.columns};
  lines.insert(lines.end(), table.rows.begin(), table.rows.end());
  std::vector<size_t> widths(table.columns.size(), 3);
  for (auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      line[i] = MarkdownText(line[i]);
      widths[i] = std::max(widths[i], CountCharacters(line[i]));
    }
  }
  const auto is_text = [&](size_t column) {
    return column == 0 || std::find(table.prose.begin(), table.prose.end(), column) != table.prose.end();
  };
  std::string out;
  for (size_t l = 0; l < lines.size(); ++l) {
    std::string line = "|", rule = "|";
    for (size_t i = 0; i < lines[l].size(); ++i) {
      const std::string space(widths[i] - CountCharacters(lines[l][i]), ' ');
      line += is_text(i) ? fmt::format(" {}{} |", lines[l][i], space) : fmt::format(" {}{} |", space, lines[l][i]);
      rule += fmt::format("{}{}|", std::string(widths[i] + 1, '-'), is_text(i) ? '-' : ':');
    }
    out += line + "\n" + (l == 0 ? rule + "\n" : "");
  }
  return out;
}

// HTML

std::string Element(std::string_view name, std::string_view text) {
  return fmt::format("<{0}>{1}</{0}>\n", name, EscapedMarkup(text));
}

std::string List(const std::vector<std::string>& items) {
  if (items.empty()) return "";
  std::string out = "<ul>\n";
  for (const std::string& item : items) out += Element("li", item);
  return out + "</ul>\n";
}

std::string HtmlTable(const CompareTable& table) {
  const auto attributes = [&](size_t column) {
    return std::find(table.prose.begin(), table.prose.end(), column) != table.prose.end() ? " class=\"prose\"" : "";
  };
  // Not a caption, which would be as wide as its table, and leave a narrow screen with it.
  std::string out = table.caption.empty() ? "" : Element("h3", table.caption);
  out += "<div class=\"scroll\"><table>\n<thead><tr>";
  for (size_t i = 0; i < table.columns.size(); ++i) {
    out += fmt::format("<th scope=\"col\"{}>{}</th>", attributes(i), EscapedMarkup(table.columns[i]));
  }
  out += "</tr></thead>\n<tbody>\n";
  for (const std::vector<std::string>& row : table.rows) {
    out += fmt::format("<tr><th scope=\"row\">{}</th>", EscapedMarkup(row.front()));
    for (size_t i = 1; i < row.size(); ++i) out += fmt::format("<td{}>{}</td>", attributes(i), EscapedMarkup(row[i]));
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

std::string HtmlSection(const CompareSection& section) {
  std::string out = "<section>\n" + Element("h2", section.title) + List(section.findings);
  if (!section.charts.empty()) {
    out += "<div class=\"charts\">\n";
    for (const std::string& chart : section.charts) out += fmt::format("<figure>{}</figure>\n", chart);
    out += "</div>\n";
  }
  for (const CompareTable& table : section.tables) out += HtmlTable(table);
  for (const std::string& note : section.notes) {
    out += fmt::format("<p class=\"note\">{}</p>\n", EscapedMarkup(note));
  }
  return out + "</section>\n";
}

// JSON

Json OrNull(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

// What each line of a part begins with.
Json Identity(const CompareResult& result, size_t policy) {
  const Settings& base = result.policies[policy].attention.base;
  return {{"policy", result.policies[policy].label},
          {"attention", Name(base.policy)},
          {"top_k", Chooses(base.policy) ? Json(base.top_k) : Json(nullptr)},
          {"parts", HasMeans(base.policy) ? Json(base.parts) : Json(nullptr)},
          {"lambda", Weighs(base.policy) ? Json::parse(fmt::format("{}", base.lambda)) : Json(nullptr)}};
}

Json AnswersJson(const CompareResult& result) {
  const CompareAnswers& answers = *result.answers;
  Json lines = Json::array();
  for (size_t i = 0; i < result.policies.size(); ++i) {
    for (size_t q = 0; q < answers.results[i].size(); ++q) {
      const GenerateResult& one = answers.results[i][q];
      const std::optional<bool> right = answers.Right(i, q);
      Json line = Identity(result, i);
      line.update({{"question", answers.questions[q].question},
                   {"expected", answers.questions[q].expected},
                   {"answer", one.text},
                   {"right", right ? Json(*right) : Json(nullptr)},
                   {"stop_reason", Name(one.reason)},
                   {"prompt_tokens", one.prompt_tokens},
                   {"reused_tokens", one.reused_tokens},
                   {"tokens", one.tokens.size()},
                   {"prefill_seconds", one.prefill_seconds},
                   {"decode_seconds", one.decode_seconds},
                   {"read_share", one.tokens_read.share()}});
      lines.push_back(std::move(line));
    }
  }
  return lines;
}

Json SpeedJson(const CompareResult& result) {
  const CompareSpeed& speed = *result.speed;
  const std::optional<size_t> dense = result.dense();
  Json lines = Json::array();
  for (size_t i = 0; i < result.policies.size(); ++i) {
    for (const SpeedRow& row : speed.rows[i]) {
      const SpeedRow* const peer = dense ? speed.Find(*dense, row.test, row.tokens, row.depth) : nullptr;
      Json line = Identity(result, i);
      line.update(SpeedToJson(row));
      line["seconds"] = row.seconds;
      line["times_dense"] = peer != nullptr ? Json(row.best() / peer->best()) : Json(nullptr);
      lines.push_back(std::move(line));
    }
  }
  return lines;
}

Json NiahJson(const CompareResult& result) {
  const std::vector<NiahRow> rows = NiahRowsOf(result);
  const std::string text = NiahJsonLines(rows);
  Json lines = Json::array();
  size_t begin = 0;
  for (const NiahRow& row : rows) {
    const size_t end = text.find('\n', begin);
    Json line = Json::object();
    for (size_t i = 0; i < result.policies.size(); ++i) {
      if (result.policies[i].attention == row.attention) line["policy"] = result.policies[i].label;
    }
    line.update(Json::parse(std::string_view(text).substr(begin, end - begin)));
    lines.push_back(std::move(line));
    begin = end + 1;
  }
  return lines;
}

// One line for a policy, with perplexity, recall or both.
Json TextJson(const CompareResult& result) {
  const CompareText& text = *result.text;
  const std::optional<size_t> dense = result.dense();
  Json lines = Json::array();
  for (size_t i = 0; i < result.policies.size(); ++i) {
    if (!text.results[i]) continue;
    const PerplexityResult& one = *text.results[i];
    Json line = Identity(result, i);
    line.update({{"tokens", one.tokens},
                 {"read_share", one.tokens_read.share()},
                 {"sparsity", BudgetSparsity(result.policies[i].attention, result.about.num_layers, one.tokens)}});
    if (text.perplexity) {
      line.update({{"ppl", one.perplexity()}, {"loss", one.loss}});
      if (dense && *dense != i && text.results[*dense]) {
        const auto difference = CompareLosses(one.losses, text.results[*dense]->losses);
        line["loss_difference"] = one.loss - text.results[*dense]->loss;
        line["loss_difference_ci95"] = difference ? Json{difference->ci95.low, difference->ci95.high} : Json(nullptr);
      }
    }
    if (text.recalls[i]) {
      line["recall"] = OrNull(text.recalls[i]->all);
      line["recall_sparse"] = OrNull(text.recalls[i]->sparse);
      line["recall_sparse_by_layer"] = Json::array();
      for (const auto& layer : text.recalls[i]->sparse_by_layer)
        line["recall_sparse_by_layer"].push_back(OrNull(layer));
    }
    lines.push_back(std::move(line));
  }
  return {{"text", text.name}, {"tokens", text.tokens}, {"policies", std::move(lines)}};
}

Json FlopsJson(const CompareResult& result) {
  const CompareFlops& flops = *result.flops;
  Json lines = Json::array();
  for (size_t i = 0; i < result.policies.size(); ++i) {
    for (size_t j = 0; j < flops.lengths.size(); ++j) {
      const AttentionFlops& one = flops.counts[i][j];
      Json line = Identity(result, i);
      line.update({{"length", flops.lengths[j]},
                   {"total", one.total()},
                   {"attention_flops", one.attention},
                   {"score_flops", one.scores},
                   {"representative_flops", one.representatives}});
      lines.push_back(std::move(line));
    }
  }
  return lines;
}

}  // namespace

std::string CompareHtml(const CompareStory& story) {
  std::string body = "<header>\n" + Element("h1", story.title) + "<dl>\n";
  for (const auto& [name, value] : story.facts) {
    const std::string text = EscapedMarkup(value);
    body += fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", EscapedMarkup(name),
                        name == "command" ? "<code>" + text + "</code>" : text);
  }
  body += "</dl>\n</header>\n";
  for (const std::string& warning : story.warnings) {
    body += fmt::format("<p class=\"warning\">{}</p>\n", EscapedMarkup(warning));
  }
  body += "<section>\n" + Element("h2", "In short") + HtmlTable(story.summary) + "</section>\n";
  for (const CompareSection& section : story.sections) body += HtmlSection(section);

  std::string page(kComparePage);
  for (const auto& [placeholder, text] :
       {std::pair<std::string_view, std::string>("{{title}}", EscapedMarkup(story.title)),
        {"{{body}}", std::move(body)}}) {
    const size_t at = page.find(placeholder);
    PHSA_CHECK(at != std::string::npos);
    page.replace(at, placeholder.size(), text);
  }
  return page;
}

std::string CompareMarkdown(const CompareStory& story) {
  std::string out = fmt::format("# {}\n\n", MarkdownText(story.title));
  for (const auto& [name, value] : story.facts) out += fmt::format("- {}: {}\n", name, MarkdownText(value));
  for (const std::string& warning : story.warnings) out += fmt::format("\n**{}**\n", MarkdownText(warning));
  out += "\n## In short\n\n" + MarkdownTable(story.summary);
  for (const CompareSection& section : story.sections) {
    out += fmt::format("\n## {}\n", MarkdownText(section.title));
    if (!section.findings.empty()) out += "\n";
    for (const std::string& finding : section.findings) out += fmt::format("- {}\n", MarkdownText(finding));
    for (const CompareTable& table : section.tables) {
      out += "\n";
      if (!table.caption.empty()) out += MarkdownText(table.caption) + "\n\n";
      out += MarkdownTable(table);
    }
    for (const std::string& note : section.notes) out += fmt::format("\n{}\n", MarkdownText(note));
  }
  return out;
}

std::string CompareSummary(const CompareResult& result, const CompareStory& story) {
  std::string out;
  for (size_t q = 0; result.answers && q < result.answers->questions.size(); ++q) {
    const CompareAnswers& answers = *result.answers;
    out += OneLine(answers.questions[q].question) + "\n";
    size_t width = 0;
    for (const auto& policy : result.policies) width = std::max(width, CountCharacters(policy.label));
    for (size_t i = 0; i < result.policies.size(); ++i) {
      if (q >= answers.results[i].size()) continue;
      const std::string& label = result.policies[i].label;
      const std::optional<bool> right = answers.Right(i, q);
      out += fmt::format("  {}{}  {}{}\n", label, std::string(width - CountCharacters(label), ' '),
                         !right   ? ""
                         : *right ? "right: "
                                  : "WRONG: ",
                         OneLine(answers.results[i][q].text));
    }
    out += "\n";
  }
  out += MarkdownTable(story.summary);
  for (const std::string& warning : story.warnings) out += "\n" + warning + "\n";
  return out;
}

std::string CompareJson(const CompareResult& result) {
  const CompareAbout& about = result.about;
  Json json = {{"about",
                {{"model", about.model},
                 {"format", about.format},
                 {"weights", about.weights},
                 {"kv_type", about.kv_type},
                 {"cpu", about.cpu},
                 {"threads", about.threads},
                 {"device", about.device},
                 {"context", about.context},
                 {"num_layers", about.num_layers},
                 {"num_q_heads", about.num_q_heads},
                 {"num_kv_heads", about.num_kv_heads},
                 {"head_dim", about.head_dim},
                 {"carries_settings", about.carries_settings},
                 {"command", about.command},
                 {"version", about.version},
                 {"date", about.date},
                 {"seconds", about.seconds},
                 {"interrupted", about.interrupted}}}};
  json["policies"] = Json::array();
  for (size_t i = 0; i < result.policies.size(); ++i) {
    const ComparedPolicy& policy = result.policies[i];
    json["policies"].push_back({{"label", policy.label},
                                {"dense", policy.dense},
                                {"settings", SettingsObject(policy.attention)},
                                {"same", policy.same}});
  }
  if (result.answers) json["answers"] = AnswersJson(result);
  if (result.speed) json["speed"] = SpeedJson(result);
  if (result.niah) json["niah"] = NiahJson(result);
  if (result.text) json["text"] = TextJson(result);
  if (result.flops) json["flops"] = FlopsJson(result);
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace phsa
