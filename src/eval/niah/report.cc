#include "eval/niah/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <tuple>

#include "attention/policies.h"
#include "eval/query_blocks.h"
#include "eval/settings_text.h"

namespace phsa {
namespace {

using Json = nlohmann::ordered_json;

const char* InWords(NiahScoring scoring) {
  switch (scoring) {
    case NiahScoring::kReferences: return "references found";
    case NiahScoring::kStrict: return "answers right in every token";
    case NiahScoring::kForced: return "references right in every token";
  }
  return "";
}

std::string Method(const Settings& settings) {
  std::string method = Name(settings.policy) + PartsInWords(settings);
  if (Weighs(settings.policy)) {
    method += settings.head_lambda.empty() ? fmt::format(" λ={:g}", settings.lambda) : std::string(" λ per head");
    if (settings.punctuation != Settings{}.punctuation) method += " " + settings.punctuation;
  }
  return method;
}

// The settings that `keys` name, in words: "init 16, dense below 1024".
std::string Details(const Json& settings, const std::set<std::string>& keys) {
  static const std::map<std::string, const char*> kWords = {
      {"top_k", "K"}, {"lambda", "λ"}, {"group_reduce", "group"}, {"dense_below", "dense below"}};
  std::string words;
  for (const std::string& key : keys) {
    if (!words.empty()) words += ", ";
    if (!settings.contains(key)) {
      words += "all layers alike";  // the one key that may be missing
      continue;
    }
    const Json& value = settings[key];
    const auto name = kWords.find(key);
    words += fmt::format("{} {}", name == kWords.end() ? key : name->second,
                         value.is_string() ? value.get<std::string>() : value.dump());
  }
  return words;
}

// Methods that would look the same at one task, length and K get the settings in which they differ there, and keep them
// wherever they stand.
void TellApart(std::vector<NiahRow>& rows) {
  std::map<std::tuple<NiahTask, int32_t, std::string, std::optional<int32_t>>, std::vector<Json>> alike;
  for (const NiahRow& row : rows) {
    alike[{row.task, row.length, row.method, row.top_k}].push_back(Json::parse(SettingsToJson(row.attention)));
  }
  std::map<std::string, std::set<std::string>> differ;  // keys of settings, by method
  for (const auto& [name, all] : alike) {
    for (const Json& one : all) {
      for (const auto& [key, value] : one.items()) {
        const bool same = std::all_of(all.begin(), all.end(), [&, key = key, value = value](const Json& other) {
          return other.contains(key) && other[key] == value;
        });
        if (!same) differ[std::get<2>(name)].insert(key);
      }
    }
  }
  for (NiahRow& row : rows) {
    const auto keys = differ.find(row.method);
    if (keys == differ.end()) continue;
    row.method += fmt::format(" ({})", Details(Json::parse(SettingsToJson(row.attention)), keys->second));
  }
}

// "+5.0", with a minus sign that is as wide as the plus.
std::string Signed(double points) { return fmt::format("{}{:.1f}", points < -0.05 ? "−" : "+", std::abs(points)); }

std::string PValue(double p) { return p < 0.001 ? "p < 0.001" : fmt::format("p = {:.3f}", p); }

// Rows of one task and length.
struct Group {
  std::vector<const NiahRow*> rows;
  std::vector<std::string> methods;          // in order
  std::set<std::optional<int32_t>> columns;  // none first
};

std::vector<Group> Groups(std::span<const NiahRow> rows) {
  std::vector<Group> groups;
  for (const NiahRow& row : rows) {
    if (groups.empty() || groups.back().rows.front()->task != row.task ||
        groups.back().rows.front()->length != row.length) {
      groups.emplace_back();
    }
    Group& group = groups.back();
    group.rows.push_back(&row);
    if (std::find(group.methods.begin(), group.methods.end(), row.method) == group.methods.end()) {
      group.methods.push_back(row.method);
    }
    group.columns.insert(row.top_k);
  }
  return groups;
}

// A table with a line for each title and a column for each K; cells without text are a dash, lines without cells are
// left out.
std::string Table(const Group& group, const std::string& corner, std::span<const std::string> titles,
                  const std::function<std::string(const std::string& title, const NiahRow& row)>& cell) {
  std::string text = "| " + corner + " |", rule = "|---|";
  for (const auto& top_k : group.columns) {
    text += top_k ? fmt::format(" K={} |", *top_k) : std::string(" no K |");
    rule += "---|";
  }
  text += "\n" + rule + "\n";
  for (const std::string& title : titles) {
    std::string line = "| " + title + " |";
    bool any = false;
    for (const auto& top_k : group.columns) {
      std::string content;
      for (const NiahRow* row : group.rows) {
        if (row->top_k == top_k && content.empty()) content = cell(title, *row);
      }
      any = any || !content.empty();
      line += fmt::format(" {} |", content.empty() ? "–" : content);
    }
    if (any) text += line + "\n";
  }
  return text;
}

std::string Percent(double share) { return fmt::format("{:.1f}", 100 * share); }

std::string DifferenceTitle(const NiahRow& row, const NiahRow& peer) {
  return fmt::format("{} − {}", row.method, peer.method);
}

}  // namespace

std::vector<NiahRow> NiahRows(std::span<const NiahRecord* const> records, int32_t num_layers) {
  std::vector<NiahRow> rows;
  std::map<std::string, size_t> known;
  for (const NiahRecord* record : records) {
    const std::string key =
        fmt::format("{} {} {}", Name(record->task), record->length, SettingsToJson(record->attention));
    const auto [at, is_new] = known.try_emplace(key, rows.size());
    if (is_new) {
      NiahRow& row = rows.emplace_back();
      row.task = record->task;
      row.length = record->length;
      row.attention = record->attention;
      row.method = Method(record->attention.base);
      if (Chooses(record->attention.base.policy)) row.top_k = record->attention.base.top_k;
    }
    rows[at->second].records.push_back(record);
  }
  const auto order = [](const NiahRow& row) {
    const Settings& base = row.attention.base;
    return std::tuple(row.task, row.length, RowOf(base.policy).rank, HasMeans(base.policy) ? base.lambda : 0.0f,
                      row.method, row.top_k);
  };
  std::stable_sort(rows.begin(), rows.end(), [&](const auto& a, const auto& b) { return order(a) < order(b); });
  TellApart(rows);
  for (NiahRow& row : rows) {
    std::sort(row.records.begin(), row.records.end(),
              [](const NiahRecord* a, const NiahRecord* b) { return a->sample < b->sample; });
    double sum = 0, read = 0, dense = 0;
    for (const NiahRecord* record : row.records) {
      sum += record->score();
      read += static_cast<double>(record->read);
      dense += static_cast<double>(record->dense);
    }
    row.score = sum / static_cast<double>(row.records.size());
    row.ci95 = WilsonInterval(row.score, static_cast<int64_t>(row.records.size()));
    row.read_share = dense > 0 ? read / dense : 1;
    row.sparsity = BudgetSparsity(row.attention, num_layers, row.length);
  }
  return rows;
}

std::vector<const NiahRow*> NiahPeers(const NiahRow& row, std::span<const NiahRow> rows) {
  std::vector<const NiahRow*> peers;
  const Policy policy = row.attention.base.policy;
  for (const NiahRow& peer : rows) {
    if (peer.task != row.task || peer.length != row.length || &peer == &row) continue;
    const Policy other = peer.attention.base.policy;
    if (!RowOf(other).baseline || other == policy || IsDense(policy)) continue;
    if (IsDense(other) || peer.top_k == row.top_k) peers.push_back(&peer);
  }
  return peers;
}

std::optional<PairedDifference> Compare(const NiahRow& first, const NiahRow& second) {
  std::vector<double> a, b;
  for (size_t i = 0, j = 0; i < first.records.size() && j < second.records.size();) {
    const int32_t x = first.records[i]->sample, y = second.records[j]->sample;
    if (x == y) {
      a.push_back(first.records[i]->score());
      b.push_back(second.records[j]->score());
    }
    if (x <= y) ++i;
    if (y <= x) ++j;
  }
  if (a.empty()) return std::nullopt;
  return ComparePaired(a, b);
}

std::optional<double> MeanNll(const NiahRow& row) {
  double sum = 0;
  for (const NiahRecord* record : row.records) {
    if (!record->nll) return std::nullopt;
    sum += *record->nll;
  }
  return sum / static_cast<double>(row.records.size());
}

std::string NiahJsonLines(std::span<const NiahRow> rows) {
  std::string lines;
  for (const NiahRow& row : rows) {
    const Settings& base = row.attention.base;
    const auto identity = [](const NiahRow& one) {
      const Settings& settings = one.attention.base;
      Json json = {{"attention", Name(settings.policy)}};
      json["top_k"] = one.top_k ? Json(*one.top_k) : Json(nullptr);
      json["lambda"] = HasMeans(settings.policy) ? Json::parse(fmt::format("{}", settings.lambda)) : Json(nullptr);
      return json;
    };
    Json line = {{"task", Name(row.task)}, {"length", row.length}};
    line.update(identity(row));
    line["samples"] = row.records.size();
    line["score"] = row.score;
    line["ci95"] = {row.ci95.low, row.ci95.high};
    if (const std::optional<double> nll = MeanNll(row)) line["nll"] = *nll;
    line["read_share"] = row.read_share;
    line["sparsity"] = row.sparsity;
    line["punctuation"] = Weighs(base.policy) ? Json(base.punctuation) : Json(nullptr);
    line["method"] = row.method;
    line["settings"] = SettingsObject(row.attention);
    line["against"] = Json::array();
    for (const NiahRow* peer : NiahPeers(row, rows)) {
      const std::optional<PairedDifference> difference = Compare(row, *peer);
      if (!difference) continue;
      Json against = identity(*peer);
      against["method"] = peer->method;
      against["samples"] = difference->samples;
      against["difference"] = difference->mean;
      against["ci95"] = {difference->ci95.low, difference->ci95.high};
      against["better"] = difference->better;
      against["worse"] = difference->worse;
      against["p"] = difference->p;
      line["against"].push_back(against);
    }
    lines += line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return lines;
}

std::string NiahEmptyDepths(std::span<const NiahRow> rows, std::span<const double> asked) {
  std::string empty;
  for (const double depth : asked) {
    const bool any = std::any_of(rows.begin(), rows.end(), [&](const NiahRow& row) {
      return std::any_of(row.records.begin(), row.records.end(), [&](const NiahRecord* record) {
        return std::find(record->depths.begin(), record->depths.end(), depth) != record->depths.end();
      });
    });
    if (!any) empty += fmt::format("{}{:g} %", empty.empty() ? "" : ", ", depth);
  }
  return empty;
}

std::string NiahTables(std::span<const NiahRow> rows, NiahScoring scoring) {
  std::string text;
  for (const Group& group : Groups(rows)) {
    const NiahRow& first = *group.rows.front();
    size_t fewest = first.records.size(), most = fewest;
    for (const NiahRow* row : group.rows) {
      fewest = std::min(fewest, row->records.size());
      most = std::max(most, row->records.size());
    }
    const std::string samples = fewest == most ? fmt::format("{}", most) : fmt::format("{} to {}", fewest, most);
    text += fmt::format("{}{} at {} tokens, {} sample{}: {} (95 % interval), in percent\n\n", text.empty() ? "" : "\n",
                        Name(first.task), first.length, samples, most == 1 ? "" : "s", InWords(scoring));
    text += Table(group, "method", group.methods, [](const std::string& method, const NiahRow& row) {
      if (row.method != method) return std::string();
      return fmt::format("{} ({}–{})", Percent(row.score), Percent(row.ci95.low), Percent(row.ci95.high));
    });
    text += "\nTokens read, in percent of dense attention's (sparsity of a query at full length)\n\n";
    text += Table(group, "method", group.methods, [](const std::string& method, const NiahRow& row) {
      if (row.method != method) return std::string();
      return fmt::format("{} ({})", Percent(row.read_share), Percent(row.sparsity));
    });
    std::vector<std::string> titles;
    for (const NiahRow* row : group.rows) {
      for (const NiahRow* peer : NiahPeers(*row, rows)) {
        const std::string title = DifferenceTitle(*row, *peer);
        if (std::find(titles.begin(), titles.end(), title) == titles.end()) titles.push_back(title);
      }
    }
    if (titles.empty()) continue;
    text += "\nDifferences on the same samples, in points (95 % interval; McNemar's exact test)\n\n";
    text += Table(group, "difference", titles, [&](const std::string& title, const NiahRow& row) {
      for (const NiahRow* peer : NiahPeers(row, rows)) {
        if (DifferenceTitle(row, *peer) != title) continue;
        const std::optional<PairedDifference> difference = Compare(row, *peer);
        if (!difference) return std::string();
        return fmt::format("{} ({} to {}; {})", Signed(100 * difference->mean), Signed(100 * difference->ci95.low),
                           Signed(100 * difference->ci95.high), PValue(difference->p));
      }
      return std::string();
    });
  }
  return text;
}

}  // namespace phsa
