#include "engine/scorer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "base/errors.h"
#include "engine/sampler.h"

namespace phsa {
namespace {

void Check(const Engine& engine, std::span<const ScoreRequest> requests) {
  const auto most = static_cast<size_t>(engine.memory().context);
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto& [context, continuation] = requests[i];
    if (context.empty()) {
      ThrowInvalid(
          "request {} has no context, so that nothing predicts its first token; put a begin or end token there", i);
    }
    if (continuation.empty()) ThrowInvalid("request {} has no continuation; there is nothing to score", i);
    const size_t read = context.size() + continuation.size() - 1;
    if (read > most) {
      ThrowInvalid("request {} has {} tokens, and the context holds {}; {}", i, read, most, engine.TooLongAdvice());
    }
    engine.CheckTokens(context, fmt::format("request {}", i));
    engine.CheckTokens(continuation, fmt::format("request {}", i));
  }
}

// One request, as it is read. The tokens [0, shared) are those of `source`, an earlier text of the same batch.
struct Text {
  size_t request = 0, context = 0;
  std::vector<int32_t> tokens;  // context and continuation, without the last one, which predicts nothing
  size_t source = 0, shared = 0;
  std::optional<Sequence> sequence;  // none: its source has not come far enough

  // Whether the token behind this one is scored.
  bool Scores(size_t position) const { return position + 1 >= context && position < tokens.size(); }
};

class Scorer {
 public:
  Scorer(Engine& engine, std::span<const ScoreRequest> requests, const ScoreCallbacks& callbacks)
      : engine_(engine), requests_(requests), callbacks_(callbacks), scores_(requests.size()), last_(engine.cache()) {
    // Equal contexts follow one another. A context comes before longer ones that begin with it, so that no text wants
    // logits of tokens that only an earlier batch has read.
    order_.resize(requests.size());
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::sort(order_.begin(), order_.end(), [&](size_t a, size_t b) {
      return std::tie(requests[a].context, requests[a].continuation) <
             std::tie(requests[b].context, requests[b].continuation);
    });
  }

  std::optional<std::vector<Score>> Run() {
    for (size_t first = 0; first < order_.size(); first += batch_.size()) {
      TakeBatch(first);
      if (!ReadBatch()) return std::nullopt;
      last_ = std::move(*batch_.back().sequence);
      if (callbacks_.progress) callbacks_.progress(first + batch_.size(), order_.size());
    }
    return std::move(scores_);
  }

 private:
  Text MakeText(size_t request) const {
    const auto& [context, continuation] = requests_[request];
    Text text;
    text.request = request;
    text.context = context.size();
    text.tokens = context;
    text.tokens.insert(text.tokens.end(), continuation.begin(), continuation.end() - 1);
    return text;
  }

  // What the text takes from those before it in the batch. Where it would have to wait for a few tokens only, it takes
  // fewer, from a text that has them sooner.
  void FindSource(Text& text) const {
    text.source = batch_.size() - 1;
    text.shared = CommonPrefix(batch_.back().tokens, text.tokens);
    // Several continuations go on together from the end of their context.
    if (text.shared >= text.context && text.shared < text.context + kWorthSharing) text.shared = text.context;
    for (;;) {
      const Text& source = batch_[text.source];
      if (text.shared >= source.shared + kWorthSharing) return;
      text.shared = std::min(text.shared, source.shared);
      if (text.source == 0) return;
      text.source = source.source;
    }
  }

  // The texts from order_[first] on that are read together: as many as fit into a step and into the cache, but all
  // continuations of a context or none, where there is a choice. At least one.
  void TakeBatch(size_t first) {
    batch_.clear();
    const auto max_rows = static_cast<size_t>(engine_.decoder().max_rows());
    const KvCache& cache = engine_.cache();
    const size_t available = static_cast<size_t>(cache.free_pages()) + last_.pages().size();
    size_t rows = 0, pages = 0, whole_contexts = 0;
    for (size_t i = first; i < order_.size(); ++i) {
      Text text = MakeText(order_[i]);
      size_t new_rows = 0, new_pages = PagesFor(text.tokens.size());
      if (batch_.empty()) {
        // The first goes on from the text before the batch, whose logits are gone. However long its context is, the
        // continuations behind it are one batch.
        text.shared = std::min(CommonPrefix(last_.tokens(), text.tokens), text.context - 1);
        new_rows = text.tokens.size() - text.context;
      } else {
        if (requests_[order_[i]].context != requests_[order_[i - 1]].context) whole_contexts = batch_.size();
        FindSource(text);
        new_rows = text.tokens.size() - text.shared;
        // All full pages are shared but those at the end that this text writes into as well. The decoder wants room
        // for copies of them for the source too, as it does not know who copies first.
        const size_t copies = cache.layout().overhang > 0 ? 2 : 1;
        new_pages += 2 * copies - 1;
        new_pages -= text.shared / kPageTokens;
        if (rows + new_rows > max_rows || pages + new_pages > available) {
          if (whole_contexts > 0) batch_.resize(whole_contexts);
          return;
        }
      }
      rows += new_rows;
      pages += new_pages;
      batch_.push_back(std::move(text));
    }
  }

  // Which text of the batch reads this token of text `index`.
  size_t ReaderOf(size_t index, size_t position) const {
    while (index > 0 && position < batch_[index].shared) index = batch_[index].source;
    return index;
  }

  // fn(text) for those that want the logits that text `reader` has at this token.
  template <class Fn>
  void ForEachWanting(size_t reader, size_t position, const Fn& fn) const {
    for (size_t i = reader; i < batch_.size(); ++i) {
      if (batch_[i].Scores(position) && ReaderOf(i, position) == reader) fn(batch_[i]);
    }
  }

  struct Reader {
    size_t text, begin;  // in the batch; of its tokens in this step
  };

  bool ReadBatch() {
    last_.Truncate(static_cast<int32_t>(batch_.front().shared));
    batch_.front().sequence = std::move(last_);
    std::vector<BatchItem> items;
    std::vector<Reader> readers;  // of the items
    for (;;) {
      NextStep(items, readers);
      if (items.empty()) return true;
      if (callbacks_.stop && callbacks_.stop()) return false;
      engine_.decoder().Step(items, [&](int32_t item, int32_t row, const LogitsRow& logits) {
        const Reader& reader = readers[static_cast<size_t>(item)];
        Take(reader.text, reader.begin + static_cast<size_t>(row), logits);
      });
    }
  }

  // What all texts of the batch can read now. A text stops where others go on from it, so that they do it together.
  void NextStep(std::vector<BatchItem>& items, std::vector<Reader>& readers) {
    items.clear();
    readers.clear();
    std::vector<size_t> ends;
    for (Text& text : batch_) {
      ends.push_back(text.tokens.size());
      if (text.sequence) continue;
      const Sequence* const source = batch_[text.source].sequence ? &*batch_[text.source].sequence : nullptr;
      if (source != nullptr && static_cast<size_t>(source->length()) >= text.shared) {
        text.sequence = source->Fork();
        text.sequence->Truncate(static_cast<int32_t>(text.shared));
      } else {
        ends[text.source] = std::min(ends[text.source], text.shared);
      }
    }
    size_t rows = static_cast<size_t>(engine_.decoder().max_rows());
    for (size_t i = 0; i < batch_.size() && rows > 0; ++i) {
      Text& text = batch_[i];
      if (!text.sequence) continue;
      const auto begin = static_cast<size_t>(text.sequence->length());
      const size_t count = std::min(ends[i] - begin, rows);
      if (count == 0) continue;
      size_t wanted = begin;
      const auto is_wanted = [&] {
        bool any = false;
        ForEachWanting(i, wanted, [&](const Text&) { any = true; });
        return any;
      };
      while (wanted < begin + count && !is_wanted()) ++wanted;
      items.push_back({&*text.sequence, std::span(text.tokens).subspan(begin, count),
                       wanted < begin + count ? BatchItem::Logits::kAll : BatchItem::Logits::kNone,
                       static_cast<int32_t>(wanted - begin)});
      readers.push_back({i, begin});
      rows -= count;
    }
  }

  void Take(size_t reader, size_t position, const LogitsRow& logits) {
    // Both pass over the whole vocabulary: once, and where somebody wants it.
    std::optional<double> sum;
    std::optional<int32_t> likeliest;
    ForEachWanting(reader, position, [&](const Text& text) {
      if (!sum) sum = logits.LogSumExp();
      if (!std::isfinite(*sum)) ThrowNoFiniteLogits();
      const int32_t token = requests_[text.request].continuation[position + 1 - text.context];
      const double log_probability = static_cast<double>(logits[token]) - *sum;
      Score& score = scores_[text.request];
      score.log_likelihood += log_probability;
      if (score.greedy) {
        if (!likeliest) likeliest = logits.Likeliest();
        score.greedy = token == *likeliest;
      }
      score.token_log_probabilities.push_back(static_cast<float>(log_probability));
    });
  }

  Engine& engine_;
  std::span<const ScoreRequest> requests_;
  const ScoreCallbacks& callbacks_;
  std::vector<Score> scores_;
  std::vector<size_t> order_;
  std::vector<Text> batch_;
  Sequence last_;  // of the batch before
};

}  // namespace

std::optional<std::vector<Score>> ScoreAll(Engine& engine, std::span<const ScoreRequest> requests,
                                           const ScoreCallbacks& callbacks) {
  Check(engine, requests);
  return Scorer(engine, requests, callbacks).Run();
}

}  // namespace phsa
