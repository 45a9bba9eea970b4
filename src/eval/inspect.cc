#include "eval/inspect.h"

#include <algorithm>
#include <map>

#include "base/errors.h"
#include "base/utf8.h"
#include "eval/recall.h"

namespace phsa {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

// Keeps what the observer shows of the wanted queries.
class Watcher {
 public:
  Watcher(Engine& engine, int32_t first_position)
      : probe_(engine.config(), engine.cache().layout().kv_type),
        num_q_heads_(engine.config().num_q_heads),
        first_position_(first_position) {}

  void Watch(const LayerAttention& attention) {
    const int32_t end = attention.kv_lens[0];
    const int32_t rows = std::min(attention.q_lens[0], end - first_position_);
    if (rows <= 0) return;
    const std::span<const float> recall = probe_.Measure(attention, rows);
    for (int32_t row = 0; row < rows; ++row) {
      const int32_t position = end - rows + row;
      const auto index = static_cast<size_t>(position - first_position_);
      if (queries.size() == index) queries.push_back({position, {}});
      queries[index].layers.push_back(Choice(attention, position, attention.q_lens[0] - rows + row,
                                             recall.subspan(static_cast<size_t>(row * num_q_heads_))));
    }
  }

  std::vector<QueryChoice> queries;

 private:
  // `row`: of the step's queries; recall: of this one's heads.
  LayerChoice Choice(const LayerAttention& attention, int32_t position, int64_t row,
                     std::span<const float> recall) const {
    const int32_t heads = attention.plan.SelectionHeads(), slots = attention.plan.SelectionSlots();
    const auto group = static_cast<size_t>(num_q_heads_ / heads);
    LayerChoice out;
    out.blocks = {attention.settings, position};
    for (int32_t head = 0; head < heads; ++head) {
      HeadChoice& choice = out.heads.emplace_back();
      const std::span<const float> own = recall.subspan(static_cast<size_t>(head) * group, group);
      choice.recall.assign(own.begin(), own.end());
      if (attention.params.selection == nullptr) continue;
      const int64_t list = (row * heads + head) * slots;
      for (int32_t slot = 0; slot < slots && attention.params.selection[list + slot] >= 0; ++slot) {
        choice.blocks.push_back(attention.params.selection[list + slot]);
        choice.scores.push_back(attention.params.selection_scores[list + slot]);
      }
    }
    return out;
  }

  RecallProbe probe_;
  int32_t num_q_heads_, first_position_;
};

struct Sum {
  double sum = 0;
  int64_t count = 0;
  void Add(const HeadChoice& head) {
    for (const float recall : head.recall) sum += static_cast<double>(recall);
    count += static_cast<int64_t>(head.recall.size());
  }
  void Add(const QueryChoice& query) {
    for (const LayerChoice& layer : query.layers) {
      for (const HeadChoice& head : layer.heads) Add(head);
    }
  }
  double mean() const { return count > 0 ? sum / static_cast<double>(count) : 0; }
};

}  // namespace

int32_t Inspection::BlockSize() const {
  int32_t smallest = attention.ForLayer(0).block_size;
  for (int32_t layer = 1; layer < num_layers; ++layer) {
    smallest = std::min(smallest, attention.ForLayer(layer).block_size);
  }
  return smallest;
}

double Inspection::Recall() const {
  Sum sum;
  for (const QueryChoice& query : queries) sum.Add(query);
  return sum.mean();
}

TokensRead Inspection::Read() const {
  TokensRead out;
  for (const QueryChoice& query : queries) {
    for (const LayerChoice& layer : query.layers) {
      for (const HeadChoice& head : layer.heads) {
        const auto group = static_cast<int64_t>(head.recall.size());
        out.read += layer.blocks.TokensRead(static_cast<int64_t>(head.blocks.size())) * group;
        out.dense += (int64_t{query.position} + 1) * group;
      }
    }
  }
  return out;
}

double Recall(const QueryChoice& query) {
  Sum sum;
  sum.Add(query);
  return sum.mean();
}

double Recall(const HeadChoice& head) {
  Sum sum;
  sum.Add(head);
  return sum.mean();
}

Inspection Inspect(Engine& engine, std::span<const int32_t> prompt, int32_t last, const GenerateOptions& options,
                   const GenerateCallbacks& callbacks, const std::shared_ptr<const TextAttention>& attention,
                   Sequence* text) {
  PHSA_CHECK(last >= 1 && static_cast<size_t>(last) <= prompt.size());
  const int32_t first_watched = static_cast<int32_t>(prompt.size()) - last;
  Watcher watcher(engine, first_watched);
  Inspection out;
  {
    const Observing observing(engine.decoder(), [&](const LayerAttention& seen) { watcher.Watch(seen); });
    Session session(engine, attention);
    if (text != nullptr) {
      PHSA_CHECK(text->attention() == attention.get());
      text->Truncate(std::min(text->length(), first_watched));
      session.sequence() = std::move(*text);
    }
    out.result = session.Generate(prompt, options, callbacks);
    if (text != nullptr) *text = std::move(session.sequence());
  }
  const ModelConfig& config = engine.config();
  out.model = config.name;
  out.attention = attention != nullptr ? attention->settings : engine.options().attention;
  out.num_layers = config.num_layers;
  out.num_q_heads = config.num_q_heads;
  out.num_kv_heads = config.num_kv_heads;
  out.tokens.assign(prompt.begin(), prompt.end());
  out.tokens.insert(out.tokens.end(), out.result.tokens.begin(), out.result.tokens.end());
  out.prompt_tokens = static_cast<int32_t>(prompt.size());
  out.text = TokenTexts(engine.tokenizer(), out.tokens);
  out.flags.resize(out.tokens.size());
  PunctuationOf(engine.tokenizer(), out.attention.base.punctuation).Flags(out.tokens, out.flags.data());
  for (const int32_t token : out.tokens) out.special.push_back(engine.tokenizer().IsSpecial(token) ? 1 : 0);
  out.queries = std::move(watcher.queries);
  return out;
}

std::vector<std::string> TokenTexts(const Tokenizer& tokenizer, std::span<const int32_t> tokens) {
  std::vector<std::string> texts;
  std::string pending;  // the start of a character
  // Whole characters of `pending` into `text`; the start of one stays, unless nothing follows it.
  const auto take = [&](std::string& text, bool all) {
    size_t at = 0;
    while (at < pending.size()) {
      const Utf8Step step = ScanUtf8(pending, at);
      if (step.kind == Utf8Step::Kind::kCut && !all) break;
      text += step.kind == Utf8Step::Kind::kCharacter ? std::string_view(pending).substr(at, step.size) : kReplacement;
      at += step.size;
    }
    pending.erase(0, at);
  };
  for (const int32_t token : tokens) {
    if (tokenizer.IsSpecial(token) && !texts.empty()) take(texts.back(), true);
    pending += tokenizer.TokenBytes(token);
    take(texts.emplace_back(), tokenizer.IsSpecial(token));
  }
  if (!texts.empty()) take(texts.back(), true);
  return texts;
}

std::vector<ChosenBlock> MostChosen(const Inspection& inspection, size_t most) {
  const int32_t unit = inspection.BlockSize();
  std::map<int32_t, ChosenBlock> blocks;
  for (const QueryChoice& query : inspection.queries) {
    for (const LayerChoice& layer : query.layers) {
      const int32_t units = layer.blocks.block_size / unit;
      for (const HeadChoice& head : layer.heads) {
        for (size_t i = 0; i < head.blocks.size(); ++i) {
          for (int32_t block = head.blocks[i] * units; block < (head.blocks[i] + 1) * units; ++block) {
            ChosenBlock& sum = blocks[block];
            sum.block = block;
            ++sum.count;
            sum.score += static_cast<double>(head.scores[i]);
          }
        }
      }
    }
  }
  std::vector<ChosenBlock> all;
  for (const auto& [block, sum] : blocks) all.push_back(sum);
  std::stable_sort(all.begin(), all.end(), [](const ChosenBlock& a, const ChosenBlock& b) {
    return a.count != b.count ? a.count > b.count : a.score > b.score;
  });
  if (all.size() > most) all.resize(most);
  return all;
}

int64_t Choosers(const Inspection& inspection) {
  int64_t count = 0;
  for (const QueryChoice& query : inspection.queries) {
    for (const LayerChoice& layer : query.layers) {
      for (const HeadChoice& head : layer.heads) count += head.blocks.empty() ? 0 : 1;
    }
  }
  return count;
}

}  // namespace phsa
