#include "eval/inspect_html.h"

#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/errors.h"

namespace phsa {

extern const std::string_view kInspectPage;  // inspect_page.html
// What the server's page has too: web/theme.css and so on.
extern const std::string_view kWebTheme, kWebExplorer, kWebThemeScript, kWebExplorerScript;

namespace {

using Json = nlohmann::json;

// Where the page takes its parts, in this order.
constexpr std::string_view kStylesHere = "/* here: the styles */", kDataHere = "{\"here\": \"the data\"}",
                           kModulesHere = "/* here: the modules */";

// Numbers become integers in these units: half the bytes, and more digits than a colour can show.
constexpr double kScoreUnit = 1e-5, kRecallUnit = 1e-4;

Json Integers(const std::vector<float>& values, double unit) {
  Json list = Json::array();
  for (const float value : values) {
    list.push_back(std::isfinite(value) ? std::llround(static_cast<double>(value) / unit) : 0);
  }
  return list;
}

// The distances from each marked token to the one before: short numbers, however long the text.
Json Gaps(const std::vector<uint8_t>& marks) {
  Json list = Json::array();
  size_t last = 0;
  for (size_t i = 0; i < marks.size(); ++i) {
    if (marks[i] == 0) continue;
    list.push_back(i - last);
    last = i;
  }
  return list;
}

// [0: chosen, 1: all candidates taken, 2: dense; init_end; local_begin; recall; then [blocks, scores] of each head]
Json LayerData(const LayerChoice& layer) {
  const QueryBlocks& blocks = layer.blocks;
  Json recall = Json::array();
  for (const HeadChoice& head : layer.heads) {
    for (const Json& value : Integers(head.recall, kRecallUnit)) recall.push_back(value);
  }
  Json out = {blocks.dense()       ? 2
              : blocks.reads_all() ? 1
                                   : 0,
              blocks.init_end(), blocks.local_begin(), std::move(recall)};
  for (const HeadChoice& head : layer.heads) {
    out.push_back(Json::array({head.blocks, Integers(head.scores, kScoreUnit)}));
  }
  return out;
}

// JSON that may stand inside a <script>: nothing in it can end the element or open a comment, and the two line ends
// that JavaScript knows and JSON does not are escaped.
std::string ForScript(const Json& data) {
  const std::string json = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string out;
  out.reserve(json.size() + json.size() / 16);
  for (size_t i = 0; i < json.size(); ++i) {
    if (json[i] == '<' || json[i] == '>' || json[i] == '&') {
      out += json[i] == '<' ? "\\u003c" : json[i] == '>' ? "\\u003e" : "\\u0026";
    } else if (json.compare(i, 3, "\xe2\x80\xa8") == 0 || json.compare(i, 3, "\xe2\x80\xa9") == 0) {
      out += json[i + 2] == '\xa8' ? "\\u2028" : "\\u2029";
      i += 2;
    } else {
      out += json[i];
    }
  }
  return out;
}

}  // namespace

std::string InspectionHtml(const Inspection& inspection) {
  Json layers = Json::array();
  for (int32_t layer = 0; layer < inspection.num_layers; ++layer) {
    const Settings& settings = inspection.attention.ForLayer(layer);
    layers.push_back({{"block", settings.block_size}, {"policy", Name(settings.policy)}, {"k", settings.top_k}});
  }
  Json queries = Json::array();
  for (const QueryChoice& query : inspection.queries) {
    Json choices = Json::array();
    for (const LayerChoice& layer : query.layers) choices.push_back(LayerData(layer));
    queries.push_back({{"at", query.position}, {"layers", std::move(choices)}});
  }
  const Json data = {{"model", inspection.model},
                     {"attention", Json::parse(SettingsToJson(inspection.attention.base))},
                     {"prompt", inspection.prompt_tokens},
                     {"text", inspection.text},
                     {"punctuation", Gaps(inspection.flags)},
                     {"special", Gaps(inspection.special)},
                     {"block", inspection.BlockSize()},
                     {"queryHeads", inspection.num_q_heads},
                     {"recall", inspection.Recall()},
                     {"readShare", inspection.Read().share()},
                     {"layers", std::move(layers)},
                     {"queries", std::move(queries)}};
  std::string out;
  std::string_view rest = kInspectPage;
  const auto put = [&](std::string_view placeholder, std::initializer_list<std::string_view> parts) {
    const size_t at = rest.find(placeholder);
    PHSA_CHECK(at != std::string_view::npos);
    out += rest.substr(0, at);
    for (const std::string_view part : parts) out += part;
    rest.remove_prefix(at + placeholder.size());
  };
  put(kStylesHere, {kWebTheme, kWebExplorer});
  put(kDataHere, {ForScript(data)});
  put(kModulesHere, {kWebThemeScript, kWebExplorerScript});
  out += rest;
  return out;
}

}  // namespace phsa
