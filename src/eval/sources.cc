#include "eval/sources.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "attention/policies.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "eval/recall.h"
#include "tokenizer/normalizer.h"

namespace phsa {
namespace {

constexpr std::string_view kWhiteSpace = " \t\r\n\f\v";

// Queries before the texts' end whose mass is no passage's, and how near to them a token is when it is not judged by
// theirs: what is close to a query is looked at for being close.
constexpr int32_t kOtherQueries = 32, kNear = 64;
// Of a longer answer this many tokens, evenly.
constexpr int32_t kMostAnswerQueries = 256;
// Less of a query's mass on a token than this is none: most tokens, and each would cost an exponential.
constexpr float kLeastLog = -9;
constexpr size_t kMostPassageBytes = 1200;

std::string_view Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kWhiteSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kWhiteSpace) + 1 - begin);
}

// Where an offset of `from` is in `to`, where both have the same lines with other bytes: NFC changes no line break.
class LineMap {
 public:
  LineMap(std::string_view from, std::string_view to) : from_(Begins(from)), to_(Begins(to)) {
    from_.push_back(from.size());
    to_.push_back(to.size());
  }
  bool valid() const { return from_.size() == to_.size(); }
  size_t operator()(size_t offset) const {
    const auto next = std::upper_bound(from_.begin(), from_.end() - 1, offset);
    const auto line = static_cast<size_t>(next - from_.begin()) - 1;
    const size_t size = from_[line + 1] - from_[line], other = to_[line + 1] - to_[line];
    const size_t within = std::min(offset - from_[line], size);
    return to_[line] + (size == 0 ? 0 : within * other / size);
  }

 private:
  static std::vector<size_t> Begins(std::string_view text) {
    std::vector<size_t> begins = {0};
    for (size_t at = text.find('\n'); at != std::string_view::npos; at = text.find('\n', at + 1)) {
      begins.push_back(at + 1);
    }
    return begins;
  }
  std::vector<size_t> from_, to_;
};

void AsFloats(const void* from, int32_t dtype, int64_t offset, int32_t count, float* to, int32_t stride) {
  for (int32_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(offset + i);
    switch (dtype) {
      case PHSA_F32: to[i * stride] = static_cast<const float*>(from)[at]; break;
      case PHSA_F16: to[i * stride] = F32FromF16(static_cast<const uint16_t*>(from)[at]); break;
      default: to[i * stride] = F32FromBf16(static_cast<const uint16_t*>(from)[at]); break;
    }
  }
}

// What the answer's queries gave to each sentence, by head, from the attention of all layers.
class MassMeter {
 public:
  MassMeter(const ModelConfig& config, int32_t kv_type, std::vector<int32_t> sentence_of, int32_t sentences,
            int32_t first_query, int32_t queries)
      : config_(config),
        kv_type_(kv_type),
        sentence_of_(std::move(sentence_of)),
        sentences_(static_cast<size_t>(sentences)),
        first_query_(first_query),
        end_query_(first_query + queries),
        stride_((queries + kMostAnswerQueries - 1) / kMostAnswerQueries) {
    const auto heads = static_cast<size_t>(config.num_layers) * static_cast<size_t>(config.num_q_heads);
    mass_.assign(heads * sentences_, 0);
    others_.resize(heads);
    uses_.resize(static_cast<size_t>(config.num_q_heads));
    by_query_.assign(static_cast<size_t>((queries + stride_ - 1) / stride_) * sentences_, 0);
  }

  // Of steps with one sequence. A step has other queries (those before the texts' end) or the answer's, never both.
  void Watch(const LayerAttention& attention, bool others) {
    const int32_t end = attention.kv_lens[0], begin = end - attention.q_lens[0];
    rows_.clear();
    for (int32_t position = begin; position < end; ++position) {
      const bool wanted =
          others || (position >= first_query_ && position < end_query_ && (position - first_query_) % stride_ == 0);
      if (wanted) rows_.push_back({position - begin, position});
    }
    if (rows_.empty()) return;
    if (others && attention.layer == 0) {
      num_others_ += attention.q_lens[0];
      end_others_ = end;
    }
    FindTokensRead(attention);
    const Executor& executor = attention.params.executor;
    struct Call {
      MassMeter& meter;
      const LayerAttention& attention;
      bool others;
    } call{*this, attention, others};
    const auto run = [](void* arg, int32_t head, int32_t) {
      const Call& own = *static_cast<const Call*>(arg);
      if (own.others) {
        own.meter.WatchOthers(own.attention, head);
      } else {
        own.meter.WatchAnswer(own.attention, head);
      }
    };
    if (executor.run != nullptr) {
      executor.run(executor.context, config_.num_q_heads, run, &call);
    } else {
      for (int32_t head = 0; head < config_.num_q_heads; ++head) run(&call, head, 0);
    }
    // In the heads' order, whoever was first.
    for (std::vector<Use>& uses : uses_) {
      for (const Use& use : uses) {
        const auto query = static_cast<size_t>((rows_[use.row].position - first_query_) / stride_);
        by_query_[query * sentences_ + use.sentence] += use.mass;
      }
      uses.clear();
    }
  }

  // The answer's tokens whose queries were watched, and what each gave to these sentences, over all heads.
  std::vector<Passage::Use> UsesOf(size_t first_sentence, size_t end_sentence) const {
    std::vector<Passage::Use> uses;
    for (size_t query = 0; query < by_query_.size() / sentences_; ++query) {
      const auto begin = by_query_.begin() + static_cast<std::ptrdiff_t>(query * sentences_);
      const double mass = std::accumulate(begin + static_cast<std::ptrdiff_t>(first_sentence),
                                          begin + static_cast<std::ptrdiff_t>(end_sentence), 0.0);
      uses.push_back({static_cast<int32_t>(query) * stride_, mass});
    }
    return uses;
  }

  // Of each sentence, over all heads.
  std::vector<double> Total() const {
    std::vector<double> total(sentences_);
    for (size_t i = 0; i < mass_.size(); ++i) total[i % sentences_] += static_cast<double>(mass_[i]);
    return total;
  }

 private:
  static constexpr int32_t kTile = kPageTokens;
  // Less than this of a query and a head is nothing to show: most pairs of a query and a sentence.
  static constexpr float kLeastUse = 1e-4f;
  struct Row {
    int32_t row, position;
  };
  struct Use {
    size_t row, sentence;  // of rows_
    float mass;
  };

  // Which blocks each row and choosing head reads; empty: everything.
  void FindTokensRead(const LayerAttention& attention) {
    reads_.clear();
    choosing_heads_ = 0;
    bool all = true;
    const BlockRules rules = RulesOf(attention.settings);
    block_size_ = attention.settings.block_size;
    for (const Row& row : rows_) all = all && rules.ReadsAll(row.position / block_size_);
    if (all) return;
    choosing_heads_ = attention.plan.SelectionHeads();
    blocks_ = (rows_.back().position / block_size_) + 1;
    const int32_t slots = attention.plan.SelectionSlots();
    reads_.assign(rows_.size() * static_cast<size_t>(choosing_heads_) * static_cast<size_t>(blocks_), 0);
    for (size_t i = 0; i < rows_.size(); ++i) {
      const int32_t own = rows_[i].position / block_size_;
      for (int32_t head = 0; head < choosing_heads_; ++head) {
        uint8_t* const reads = reads_.data() + (i * static_cast<size_t>(choosing_heads_) + static_cast<size_t>(head)) *
                                                   static_cast<size_t>(blocks_);
        for (int32_t block = 0; block <= own; ++block) {
          reads[block] = rules.ReadsAll(own) || rules.Always(block, own) ? 1 : 0;
        }
        if (attention.params.selection == nullptr) continue;
        const int64_t list = (int64_t{rows_[i].row} * choosing_heads_ + head) * slots;
        for (int32_t slot = 0; slot < slots && attention.params.selection[list + slot] >= 0; ++slot) {
          reads[attention.params.selection[list + slot]] = 1;
        }
      }
    }
  }

  // The queries of the rows, by one head, times the attention's scale: [row][head_dim].
  std::vector<float> ScaledQueries(const ForwardParams& params, int32_t head) const {
    const int32_t dim = config_.head_dim;
    const float scale = config_.attention_scale > 0 ? config_.attention_scale : 1 / std::sqrt(static_cast<float>(dim));
    std::vector<float> queries(rows_.size() * static_cast<size_t>(dim));
    for (size_t i = 0; i < rows_.size(); ++i) {
      float* const query = queries.data() + i * static_cast<size_t>(dim);
      AsFloats(params.q, AttentionType(kv_type_), rows_[i].row * params.q_token_stride + head * params.q_head_stride,
               dim, query, 1);
      for (int32_t d = 0; d < dim; ++d) query[d] *= scale;
    }
    return queries;
  }

  // Calls visit(token, mass_of) for each token of a sentence, where mass_of(i) is what the i-th row gives to it by this
  // head; 0 where it does not read it, and where it is next to nothing.
  template <class Visit>
  void VisitTokens(const LayerAttention& attention, int32_t head, const Visit& visit) const {
    const ForwardParams& params = attention.params;
    const auto dim = static_cast<size_t>(config_.head_dim);
    const int32_t group = config_.num_q_heads / config_.num_kv_heads;
    const auto tokens = std::min(static_cast<int32_t>(sentence_of_.size()), attention.kv_lens[0]);
    const std::vector<float> queries = ScaledQueries(params, head);
    std::vector<float> keys(dim * kTile);
    std::vector<std::array<float, kTile>> logits(rows_.size());
    for (int32_t first = 0; first < tokens; first += kTile) {
      const int32_t count = std::min(kTile, tokens - first);
      if (std::all_of(sentence_of_.begin() + first, sentence_of_.begin() + first + count,
                      [](int32_t s) { return s < 0; })) {
        continue;
      }
      const int64_t page = params.kv.page_table[first / kPageTokens];
      for (int32_t t = 0; t < count; ++t) {
        LoadKey(params, page, t, head / group, keys.data() + t);
      }
      for (size_t i = 0; i < rows_.size(); ++i) {
        logits[i].fill(0);
        AddProducts(queries.data() + i * dim, keys.data(), logits[i].data());
      }
      for (int32_t t = 0; t < count; ++t) {
        const int32_t token = first + t;
        if (sentence_of_[static_cast<size_t>(token)] < 0) continue;
        visit(token, [&](size_t i) {
          const Row& row = rows_[i];
          if (token > row.position) return 0.0f;
          const float log =
              logits[i][static_cast<size_t>(t)] - params.lse[int64_t{row.row} * config_.num_q_heads + head];
          if (!(log > kLeastLog) || !Reads(i, head, token)) return 0.0f;
          return std::min(1.0f, std::exp(log));
        });
      }
    }
  }

  size_t IndexOf(const LayerAttention& attention, int32_t head) const {
    return static_cast<size_t>(attention.layer) * static_cast<size_t>(config_.num_q_heads) + static_cast<size_t>(head);
  }

  // What the queries before the texts' end give to each token.
  void WatchOthers(const LayerAttention& attention, int32_t head) {
    std::vector<std::pair<int32_t, float>> found;
    VisitTokens(attention, head, [&](int32_t token, const auto& mass_of) {
      float sum = 0;
      for (size_t i = 0; i < rows_.size(); ++i) {
        if (rows_[i].position - token >= kNear) sum += mass_of(i);
      }
      if (sum > 0) found.emplace_back(token, sum);
    });
    AddOthers(found, others_[IndexOf(attention, head)]);
  }

  // What the answer's queries give to each sentence, beyond what the others give to its tokens.
  void WatchAnswer(const LayerAttention& attention, int32_t head) {
    const size_t index = IndexOf(attention, head);
    std::vector<Use>& uses = uses_[static_cast<size_t>(head)];
    std::vector<float> own(rows_.size());  // of each row, on the sentence that is being read
    int32_t sentence = -1;
    const auto flush = [&](int32_t next) {
      if (sentence >= 0) {
        float& mass = mass_[index * sentences_ + static_cast<size_t>(sentence)];
        for (size_t i = 0; i < own.size(); ++i) {
          const float square = own[i] * own[i];
          mass += square;
          if (square > kLeastUse) uses.push_back({i, static_cast<size_t>(sentence), square});
        }
      }
      std::fill(own.begin(), own.end(), 0.0f);
      sentence = next;
    };
    const std::vector<std::pair<int32_t, float>>& others = others_[index];
    auto other = others.begin();
    VisitTokens(attention, head, [&](int32_t token, const auto& mass_of) {
      const int32_t in = sentence_of_[static_cast<size_t>(token)];
      if (in != sentence) flush(in);
      while (other != others.end() && other->first < token) ++other;
      float baseline = 0;
      if (other != others.end() && other->first == token) {
        baseline = other->second / static_cast<float>(std::min(num_others_, end_others_ - kNear - token));
      }
      for (size_t i = 0; i < rows_.size(); ++i) own[i] += std::max(0.0f, mass_of(i) - baseline);
    });
    flush(-1);
  }

  // One key of a page, its elements kTile apart.
  void LoadKey(const ForwardParams& params, int64_t page, int32_t t, int32_t kv_head, float* to) const {
    const KeyValues& kv = params.kv;
    const int64_t at = page * kv.k_page_stride + t * kv.k_token_stride + kv_head * kv.k_head_stride;
    if (kv_type_ != PHSA_INT8) return AsFloats(kv.k, kv_type_, at, config_.head_dim, to, kTile);
    const KvScales& scales = params.kv_scales;
    const uint16_t scale = scales.k[page * scales.page_stride + t * scales.token_stride + kv_head * scales.head_stride];
    const int8_t* const codes = static_cast<const int8_t*>(kv.k) + at;
    for (int32_t d = 0; d < config_.head_dim; ++d) to[d * kTile] = FromCode(codes[d], scale, AttentionType(kv_type_));
  }

  // Adds what one step found to what those before it did; both ascend by token.
  static void AddOthers(const std::vector<std::pair<int32_t, float>>& found,
                        std::vector<std::pair<int32_t, float>>& all) {
    if (found.empty()) return;
    std::vector<std::pair<int32_t, float>> merged;
    auto old = all.begin();
    for (const auto& [token, sum] : found) {
      while (old != all.end() && old->first < token) merged.push_back(*old++);
      merged.emplace_back(token, sum);
      if (old != all.end() && old->first == token) merged.back().second += (old++)->second;
    }
    merged.insert(merged.end(), old, all.end());
    all = std::move(merged);
  }

  bool Reads(size_t row, int32_t head, int32_t token) const {
    if (reads_.empty()) return true;
    const int32_t chooser = head / (config_.num_q_heads / choosing_heads_);
    const size_t list = row * static_cast<size_t>(choosing_heads_) + static_cast<size_t>(chooser);
    return reads_[list * static_cast<size_t>(blocks_) + static_cast<size_t>(token / block_size_)] != 0;
  }

  // sums[t] += query[d] · keys[d][t], four dimensions at a time, which the compiler turns into vectors of tokens.
  void AddProducts(const float* query, const float* keys, float* sums) const {
    int32_t d = 0;
    for (; d + 4 <= config_.head_dim; d += 4) {
      const float* const k0 = keys + d * kTile;
      const float *const k1 = k0 + kTile, *const k2 = k1 + kTile, *const k3 = k2 + kTile;
      const float q0 = query[d], q1 = query[d + 1], q2 = query[d + 2], q3 = query[d + 3];
      for (int32_t t = 0; t < kTile; ++t) sums[t] += (q0 * k0[t] + q1 * k1[t]) + (q2 * k2[t] + q3 * k3[t]);
    }
    for (; d < config_.head_dim; ++d) {
      for (int32_t t = 0; t < kTile; ++t) sums[t] += query[d] * keys[d * kTile + t];
    }
  }

  const ModelConfig& config_;
  int32_t kv_type_;
  std::vector<int32_t> sentence_of_;  // [token]: -1: of no text
  size_t sentences_;
  int32_t first_query_, end_query_, stride_;
  std::vector<float> mass_;                                     // [layer][q head][sentence]
  std::vector<std::vector<std::pair<int32_t, float>>> others_;  // [layer][q head]: tokens and the others' mass, summed
  int32_t num_others_ = 0, end_others_ = 0;                     // how many there were, the position behind the last one
  std::vector<float> by_query_;                                 // [query of the answer][sentence]
  // Of the layer that is watched.
  std::vector<std::vector<Use>> uses_;  // [q head]
  std::vector<Row> rows_;
  std::vector<uint8_t> reads_;  // [row][choosing head][block]
  int32_t choosing_heads_ = 0, block_size_ = 1, blocks_ = 0;
};

// Of a passage's uses those worth showing, as shares of all.
std::vector<Passage::Use> WorthShowing(std::vector<Passage::Use> uses) {
  double sum = 0, best = 0;
  for (const Passage::Use& use : uses) {
    sum += use.share;
    best = std::max(best, use.share);
  }
  std::erase_if(uses, [&](const Passage::Use& use) { return use.share <= 0 || use.share < best / 4; });
  for (Passage::Use& use : uses) use.share /= sum;
  return uses;
}

int32_t EndOf(std::span<const SourceText> texts) {
  int32_t end = 0;
  for (const SourceText& text : texts) end = std::max(end, text.end);
  return end;
}

// Neighbours that both count become one passage.
std::vector<Passage> MakePassages(std::span<const SourceText> texts, const MassMeter& meter,
                                  const SourceOptions& options) {
  struct Candidate {
    Passage passage;
    size_t first, end;  // sentences, of all texts
  };
  const std::vector<double> total = meter.Total();
  const double sum = std::accumulate(total.begin(), total.end(), 0.0);
  if (sum <= 0) return {};
  const double best = *std::max_element(total.begin(), total.end()) / sum;
  std::vector<Candidate> candidates;
  size_t index = 0;
  for (size_t text = 0; text < texts.size(); ++text) {
    bool joins = false;
    for (const SourceText::Sentence& sentence : texts[text].sentences) {
      const double weight = total[index] / sum;
      const bool counts = weight >= std::max(options.least, best / 4);
      if (counts && joins && sentence.end - candidates.back().passage.begin <= kMostPassageBytes) {
        candidates.back().passage.end = sentence.end;
        candidates.back().passage.weight += weight;
        candidates.back().end = index + 1;
      } else {
        candidates.push_back({{text, sentence.begin, sentence.end, weight}, index, index + 1});
      }
      joins = counts;
      ++index;
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.passage.weight > b.passage.weight; });
  std::vector<Passage> passages;
  for (Candidate& one : candidates) {
    const bool counts = one.passage.weight >= options.least || (passages.empty() && one.passage.weight > 0);
    if (!counts || passages.size() == options.most) break;
    one.passage.used_by = WorthShowing(meter.UsesOf(one.first, one.end));
    passages.push_back(std::move(one.passage));
  }
  return passages;
}

}  // namespace

SourceFinder::SourceFinder(const Tokenizer& tokenizer, std::span<const int32_t> prompt) {
  ends_.reserve(prompt.size());
  for (const int32_t token : prompt) {
    bytes_ += tokenizer.TokenBytes(token);
    ends_.push_back(bytes_.size());
  }
}

void SourceFinder::Enter(std::string_view part) {
  const size_t found = bytes_.find(part, at_);
  if (found != std::string::npos) at_ = found;
}

void SourceFinder::Pass(std::string_view part) {
  const size_t found = bytes_.find(part, at_);
  if (found != std::string::npos) at_ = found + part.size();
}

std::optional<SourceText> SourceFinder::Find(std::string_view text, SentenceKind kind) {
  const std::string_view trimmed = Trimmed(text);
  if (trimmed.empty()) return SourceText{{}, 0};
  size_t found = bytes_.find(trimmed, at_), size = trimmed.size();
  std::string storage;
  std::optional<LineMap> map;  // from the text's offsets to those in the prompt
  if (found == std::string::npos) {
    const std::string_view normal = NormalizeNfc(trimmed, &storage);
    found = bytes_.find(normal, at_);
    size = normal.size();
    if (found == std::string::npos) return std::nullopt;
    map.emplace(trimmed, normal);
    if (!map->valid()) return std::nullopt;
  }
  at_ = found + size;
  const auto token_of = [&](size_t byte) {  // the one that has this byte of the prompt
    return static_cast<int32_t>(std::upper_bound(ends_.begin(), ends_.end(), byte) - ends_.begin());
  };
  SourceText out;
  int32_t next = token_of(found);
  size_t begin = 0;
  for (const size_t end : SentenceEnds(trimmed, kind)) {
    // A token belongs to the sentence that has its last byte: " The" to the one that begins with it.
    const size_t behind = found + (map ? (*map)(end) : end);
    int32_t last = token_of(behind - 1);
    if (ends_[static_cast<size_t>(last)] > behind && end != trimmed.size()) --last;
    const std::string_view own = Trimmed(trimmed.substr(begin, end - begin));
    if (!own.empty()) {
      const auto at = static_cast<size_t>(own.data() - text.data());
      out.sentences.push_back({at, at + own.size(), next, last});
    }
    next = std::max(next, last + 1);
    begin = end;
  }
  out.end = next;
  return out;
}

class SourceSearch::Impl {
 public:
  Impl(Engine& engine, int32_t length, int32_t prompt_tokens, int32_t answer_tokens, std::vector<SourceText> texts,
       const SourceOptions& options)
      : engine_(engine), options_(options), texts_(std::move(texts)) {
    int32_t sentences = 0;
    for (const SourceText& text : texts_) sentences += static_cast<int32_t>(text.sentences.size());
    const int32_t end = EndOf(texts_);
    // The query that leads to the answer's first token is the prompt's last one.
    const int32_t first_query = prompt_tokens - 1;
    const int32_t queries = std::min(answer_tokens, length - first_query);
    if (sentences == 0 || queries <= 0) return;
    PHSA_CHECK(first_query >= 0 && end <= prompt_tokens);
    std::vector<int32_t> sentence_of(static_cast<size_t>(end), -1);
    int32_t index = 0;
    for (const SourceText& text : texts_) {
      for (const SourceText::Sentence& sentence : text.sentences) {
        for (int32_t token = sentence.first; token <= sentence.last; ++token) {
          sentence_of[static_cast<size_t>(token)] = index;
        }
        ++index;
      }
    }
    meter_.emplace(engine.config(), engine.cache().layout().kv_type, std::move(sentence_of), sentences, first_query,
                   queries);
    others_end_ = std::min(end, first_query);
    at_ = FirstRead(texts_, prompt_tokens);
  }

  bool Step(Sequence& sequence) {
    if (!meter_) return false;
    if (tokens_.empty()) {
      tokens_ = sequence.tokens();
      sequence.Truncate(at_);
    }
    // Those that are nobody's first, in steps of their own.
    const bool others = at_ < others_end_;
    const int32_t count = std::min(MostRows(), (others ? others_end_ : Length()) - at_);
    const BatchItem item{&sequence, std::span(tokens_).subspan(static_cast<size_t>(at_), static_cast<size_t>(count)),
                         BatchItem::Logits::kNone};
    // Whoever watches the decoder otherwise does not see this.
    AttentionObserver before =
        engine_.decoder().Observe([&](const LayerAttention& seen) { meter_->Watch(seen, others); });
    try {
      engine_.decoder().Step({&item, 1}, [](int32_t, int32_t, const LogitsRow&) {});
    } catch (...) {
      engine_.decoder().Observe(std::move(before));
      throw;
    }
    engine_.decoder().Observe(std::move(before));
    at_ += count;
    return at_ < Length();
  }

  std::vector<Passage> Passages() const {
    return meter_ && at_ >= Length() ? MakePassages(texts_, *meter_, options_) : std::vector<Passage>();
  }

 private:
  int32_t Length() const { return static_cast<int32_t>(tokens_.size()); }
  int32_t MostRows() const {
    constexpr int64_t kFewest = 8;
    const int32_t most = engine_.decoder().max_rows();
    if (options_.step_pairs == 0) return most;
    const int64_t rows = std::max(kFewest, options_.step_pairs / std::max(1, Length()));
    return static_cast<int32_t>(std::min<int64_t>(most, rows));
  }

  Engine& engine_;
  const SourceOptions options_;
  const std::vector<SourceText> texts_;
  std::optional<MassMeter> meter_;  // none: there is nothing to find
  std::vector<int32_t> tokens_;     // from the first step on
  int32_t at_ = 0, others_end_ = 0;
};

SourceSearch::SourceSearch(Engine& engine, int32_t length, int32_t prompt_tokens, int32_t answer_tokens,
                           std::vector<SourceText> texts, const SourceOptions& options)
    : impl_(std::make_unique<Impl>(engine, length, prompt_tokens, answer_tokens, std::move(texts), options)) {}
SourceSearch::~SourceSearch() = default;
int32_t SourceSearch::FirstRead(std::span<const SourceText> texts, int32_t prompt_tokens) {
  return std::max(0, std::min(EndOf(texts), prompt_tokens - 1) - kOtherQueries);
}
SourceSearch::SourceSearch(SourceSearch&&) noexcept = default;
bool SourceSearch::Step(Sequence& sequence) { return impl_->Step(sequence); }
std::vector<Passage> SourceSearch::Passages() const { return impl_->Passages(); }

std::vector<Passage> FindSources(Engine& engine, Sequence& sequence, int32_t prompt_tokens, int32_t answer_tokens,
                                 std::span<const SourceText> texts, const std::function<bool()>& stop,
                                 const SourceOptions& options) {
  SourceSearch search(engine, sequence.length(), prompt_tokens, answer_tokens, {texts.begin(), texts.end()}, options);
  do {
    if (stop && stop()) return {};
  } while (search.Step(sequence));
  return search.Passages();
}

}  // namespace phsa
