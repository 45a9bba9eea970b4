#include "eval/inspect_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "attention/policies.h"
#include "base/utf8.h"
#include "eval/settings_text.h"

namespace phsa {
namespace {

using Json = nlohmann::json;

constexpr size_t kMostChosenInText = 12, kMostChosenInJson = 100;
constexpr size_t kBestBlocks = 4;  // of a head, in the table
constexpr size_t kSnippet = 48, kLongSnippet = 72;

// Characters that move the cursor, colour the screen or turn the line around must not come from a text.
bool IsHarmless(char32_t c) {
  const bool control = c < 0x20 || (c >= 0x7f && c < 0xa0);
  const bool line_end = c == 0x2028 || c == 0x2029;
  const bool direction = (c >= 0x200e && c <= 0x200f) || (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
  return !control && !line_end && !direction;
}

std::string TokenText(const Inspection& inspection, int32_t position) {
  return fmt::format("\"{}\"", OneLine(inspection.text[static_cast<size_t>(position)], kSnippet));
}

std::string BlockText(const Inspection& inspection, int32_t block, int32_t block_size) {
  const auto size = static_cast<size_t>(block_size);
  const size_t first = static_cast<size_t>(block) * size;
  std::string text;
  for (size_t i = first; i < std::min(first + size, inspection.text.size()); ++i) text += inspection.text[i];
  return text;
}

std::string Range(int32_t first, int32_t end) {
  if (first >= end) return "none";
  return end - first == 1 ? fmt::format("{}", first) : fmt::format("{}-{}", first, end - 1);
}

// The chosen blocks of a head, the best first.
std::vector<size_t> ByScore(const HeadChoice& head) {
  std::vector<size_t> order(head.blocks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return head.scores[a] > head.scores[b]; });
  return order;
}

std::string SettingsInWords(const Inspection& inspection) {
  const Settings& s = inspection.attention.base;
  std::string out = fmt::format("{}, K {}", Name(s.policy), Chooses(s.policy) ? s.top_k : 0);
  out += PartsInWords(s);
  if (Weighs(s.policy)) {
    out += s.head_lambda.empty() ? fmt::format(", lambda {:g}", s.lambda) : ", lambda by head";
    out += fmt::format(", punctuation {}", OneLine(s.punctuation, kSnippet));
  }
  out += fmt::format(", init {}, local {}, block {}", s.init_tokens, s.local_tokens, s.block_size);
  if (s.group_reduce != GroupReduce::kSum) out += fmt::format(", group-reduce {}", Name(s.group_reduce));
  if (!inspection.attention.layers.empty()) {
    out += fmt::format("; {} layers have settings of their own", inspection.attention.layers.size());
  }
  return out;
}

void AddTable(const Inspection& inspection, const QueryChoice& query, std::string* out) {
  fmt::format_to(std::back_inserter(*out), "{:>5} {:>4}  {:>6}  {:>6}  {:<46}  {}\n", "layer", "head", "recall",
                 "least", "best blocks: score", "text of the best");
  for (size_t layer = 0; layer < query.layers.size(); ++layer) {
    const LayerChoice& choice = query.layers[layer];
    for (size_t h = 0; h < choice.heads.size(); ++h) {
      const HeadChoice& head = choice.heads[h];
      const std::vector<size_t> order = ByScore(head);
      std::string blocks;
      for (size_t i = 0; i < std::min(kBestBlocks, order.size()); ++i) {
        blocks += fmt::format("{}{}: {:.3f}", i > 0 ? "  " : "", head.blocks[order[i]], head.scores[order[i]]);
      }
      if (order.size() > kBestBlocks) blocks += fmt::format("  +{}", order.size() - kBestBlocks);
      fmt::format_to(std::back_inserter(*out), "{:>5} {:>4}  {:>6.3f}  {:>6.3f}  ", layer, h, Recall(head),
                     *std::min_element(head.recall.begin(), head.recall.end()));
      if (order.empty()) {
        *out += choice.blocks.reads_all() ? "reads everything\n" : "none\n";
        continue;
      }
      const std::string text = BlockText(inspection, head.blocks[order[0]], choice.blocks.block_size);
      fmt::format_to(std::back_inserter(*out), "{:<46}  {}\n", blocks, OneLine(text, kSnippet));
    }
  }
}

void AddQuery(const Inspection& inspection, const QueryChoice& query, std::string* out) {
  const auto append = std::back_inserter(*out);
  fmt::format_to(append, "\nQuery {} {}", query.position, TokenText(inspection, query.position));
  if (query.position + 1 < static_cast<int32_t>(inspection.tokens.size())) {
    fmt::format_to(append, ", next {}", TokenText(inspection, query.position + 1));
  }
  const QueryBlocks& blocks = query.layers.front().blocks;
  fmt::format_to(append, ": recall {:.3f}\n", Recall(query));
  if (blocks.dense()) {
    *out += "layer 0 reads everything\n\n";
  } else {
    fmt::format_to(append, "blocks always read: {} (init), {} (local); candidates: {}{}\n\n",
                   Range(0, blocks.init_end()), Range(blocks.local_begin(), blocks.own + 1),
                   Range(blocks.init_end(), blocks.local_begin()),
                   blocks.reads_all() ? ", all of them taken: nothing is left out" : "");
  }
  AddTable(inspection, query, out);
}

// Enough digits for any reader, and no more bytes than that.
double Rounded(double value) { return std::round(value * 1e6) / 1e6; }

Json Rounded(const std::vector<float>& values) {
  Json list = Json::array();
  for (const float value : values) list.push_back(Rounded(static_cast<double>(value)));
  return list;
}

Json Positions(const std::vector<uint8_t>& marks) {
  Json list = Json::array();
  for (size_t i = 0; i < marks.size(); ++i) {
    if (marks[i] != 0) list.push_back(i);
  }
  return list;
}

Json LayerJson(const LayerChoice& layer, size_t index) {
  Json heads = Json::array();
  for (const HeadChoice& head : layer.heads) {
    heads.push_back({{"recall", Rounded(Recall(head))},
                     {"recall_by_query_head", Rounded(head.recall)},
                     {"blocks", head.blocks},
                     {"scores", Rounded(head.scores)}});
  }
  Json out = {{"layer", index},
              {"block_size", layer.blocks.block_size},
              {"reads_all", layer.blocks.reads_all()},
              {"heads", std::move(heads)}};
  if (!layer.blocks.dense()) {
    out["init"] = {0, layer.blocks.init_end()};
    out["local"] = {layer.blocks.local_begin(), std::max(layer.blocks.local_begin(), layer.blocks.own + 1)};
  }
  return out;
}

}  // namespace

std::string OneLine(std::string_view text, size_t longest) {
  std::string out;
  size_t count = 0;
  for (size_t at = 0; at < text.size(); ++count) {
    if (count == longest) return out + "…";
    const Utf8Step step = ScanUtf8(text, at);
    if (text[at] == '\n') {
      out += "⏎";
    } else if (step.kind == Utf8Step::Kind::kCharacter && IsHarmless(step.code)) {
      out += text.substr(at, step.size);
    } else {
      out += ' ';
    }
    at += step.size;
  }
  return out;
}

std::string InspectionText(const Inspection& inspection) {
  const int32_t unit = inspection.BlockSize();
  const auto length = static_cast<int32_t>(inspection.tokens.size());
  std::string out;
  const auto append = std::back_inserter(out);
  fmt::format_to(append, "{}: {}\n", OneLine(inspection.model, kLongSnippet), SettingsInWords(inspection));
  fmt::format_to(append, "{} tokens of prompt, {} of answer; {} blocks of {}; {} tokens are punctuation\n",
                 inspection.prompt_tokens, length - inspection.prompt_tokens, (length + unit - 1) / unit, unit,
                 std::count(inspection.flags.begin(), inspection.flags.end(), 1));
  fmt::format_to(append, "recall {:.4f}, {:.1f} % of the tokens read, over {} quer{}\n", inspection.Recall(),
                 100 * inspection.Read().share(), inspection.queries.size(),
                 inspection.queries.size() == 1 ? "y" : "ies");
  for (const QueryChoice& query : inspection.queries) AddQuery(inspection, query, &out);

  const std::vector<ChosenBlock> most = MostChosen(inspection, kMostChosenInText);
  if (most.empty()) return out;
  fmt::format_to(append, "\nMost chosen blocks, of {} choices\n{:>6}  {:>12}  {:>6}  {:>8}  text\n",
                 Choosers(inspection), "block", "tokens", "times", "score");
  for (const ChosenBlock& block : most) {
    fmt::format_to(append, "{:>6}  {:>12}  {:>6}  {:>8.3f}  {}\n", block.block,
                   Range(block.block * unit, std::min(length, (block.block + 1) * unit)), block.count, block.score,
                   OneLine(BlockText(inspection, block.block, unit), kLongSnippet));
  }
  return out;
}

std::string InspectionJson(const Inspection& inspection) {
  const int32_t unit = inspection.BlockSize();
  Json queries = Json::array();
  for (const QueryChoice& query : inspection.queries) {
    Json layers = Json::array();
    for (size_t i = 0; i < query.layers.size(); ++i) layers.push_back(LayerJson(query.layers[i], i));
    queries.push_back({{"position", query.position},
                       {"text", inspection.text[static_cast<size_t>(query.position)]},
                       {"answer", query.position >= inspection.prompt_tokens},
                       {"recall", Rounded(Recall(query))},
                       {"layers", std::move(layers)}});
  }
  Json most = Json::array();
  for (const ChosenBlock& block : MostChosen(inspection, kMostChosenInJson)) {
    most.push_back({{"block", block.block},
                    {"times", block.count},
                    {"score", Rounded(block.score)},
                    {"text", BlockText(inspection, block.block, unit)}});
  }
  const Json out = {{"model", inspection.model},
                    {"attention", Json::parse(SettingsToJson(inspection.attention))},
                    {"num_layers", inspection.num_layers},
                    {"num_q_heads", inspection.num_q_heads},
                    {"num_kv_heads", inspection.num_kv_heads},
                    {"block_size", unit},
                    {"prompt_tokens", inspection.prompt_tokens},
                    {"tokens", inspection.tokens},
                    {"text", inspection.text},
                    {"punctuation", Positions(inspection.flags)},
                    {"special", Positions(inspection.special)},
                    {"answer", inspection.result.text},
                    {"recall", Rounded(inspection.Recall())},
                    {"read_share", Rounded(inspection.Read().share())},
                    {"queries", std::move(queries)},
                    {"choices", Choosers(inspection)},
                    {"most_chosen", std::move(most)}};
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace phsa
