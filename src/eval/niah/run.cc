#include "eval/niah/run.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/errors.h"
#include "engine/scheduler.h"
#include "eval/tokens_read.h"
#include "io/sha256.h"
#include "model/kv_file.h"
#include "phsa/punctuation.h"

namespace phsa {
namespace {

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// A sample with some attention, and its record so far.
struct Attempt {
  const NiahSample* sample;
  NiahRecord record;

  void Look() {
    for (size_t i = 0; i < sample->references.size(); ++i) {
      if (!record.found[i]) record.found[i] = NiahFound(record.answer, sample->references[i]);
    }
  }
  bool found_all() const { return std::count(record.found.begin(), record.found.end(), false) == 0; }
  void Count(const TokensRead& read) {
    record.read += read.read;
    record.dense += read.dense;
  }
};

// Greedy generation until every reference is there: what follows cannot change the score. False: stopped.
bool Generate(Engine& engine, std::span<Attempt> attempts, const std::function<bool()>& stop) {
  bool interrupted = false;
  std::vector<Request> requests(attempts.size());
  for (size_t i = 0; i < attempts.size(); ++i) {
    Attempt& attempt = attempts[i];
    requests[i].prompt = attempt.sample->tokens;
    requests[i].options.max_tokens = kNiahAnswerTokens;
    requests[i].options.sampler.temperature = 0;
    requests[i].text = [&attempt](std::string_view text) {
      attempt.record.answer += text;
      attempt.Look();
    };
    requests[i].stop = [&attempt, &interrupted, &stop] {
      interrupted = interrupted || stop();
      return interrupted || attempt.found_all();
    };
  }
  const std::vector<GenerateResult> results =
      GenerateAll(engine, std::move(requests), static_cast<int32_t>(attempts.size()));
  for (size_t i = 0; i < attempts.size(); ++i) {
    attempts[i].Count(results[i].tokens_read);
    // What a prompt took from another one counts as read: the record of a sample is the same in every batch.
    const LayerSettings& attention = attempts[i].record.attention;
    attempts[i].Count(CountTokensRead(engine.config(), attention, results[i].reused_tokens));
  }
  return !interrupted;
}

// Which tokens of an answer are a reference's: by byte, as a token may begin within one.
std::vector<bool> TokensOf(const Tokenizer& tokenizer, const std::string& answer, std::span<const int32_t> tokens,
                           const std::string& reference) {
  const size_t begin = answer.find(reference), end = begin + reference.size();
  PHSA_CHECK(begin != std::string::npos);
  std::vector<bool> of(tokens.size());
  size_t at = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const size_t next = tokenizer.Decode(tokens.first(i + 1), false).size();
    of[i] = at < end && next > begin;
    at = next;
  }
  return of;
}

// Prefills the prompts with the right answers behind them. False: stopped.
bool ScoreAnswers(Engine& engine, std::span<Attempt> attempts, NiahScoring scoring, const std::function<bool()>& stop) {
  struct Text {
    std::vector<int32_t> answer, tokens;  // tokens: those of prompt and answer but the last, which predicts nothing
    Sequence sequence;
    std::vector<int32_t> likeliest;  // in the places of the answer's tokens
    std::vector<double> losses;      // of the answer's tokens
  };
  const Tokenizer& tokenizer = engine.tokenizer();
  std::vector<Text> texts;
  for (const Attempt& attempt : attempts) {
    std::vector<int32_t> answer = tokenizer.Encode(attempt.sample->answer, SpecialTokens::kAsText);
    std::vector<int32_t> tokens = attempt.sample->tokens;
    tokens.insert(tokens.end(), answer.begin(), answer.end() - 1);
    texts.push_back({std::move(answer), std::move(tokens), Sequence(engine.cache()), {}, {}});
  }
  // Models pad their vocabulary: ids that the tokenizer does not have cannot be text.
  const int32_t known = std::min(engine.config().vocab_size, tokenizer.vocab_size());
  for (;;) {
    std::vector<BatchItem> items;
    std::vector<size_t> text_of;  // each item
    auto rows = static_cast<size_t>(engine.decoder().max_rows());
    for (size_t i = 0; i < texts.size(); ++i) {
      Text& text = texts[i];
      const auto begin = static_cast<size_t>(text.sequence.length());
      const size_t count = std::min(text.tokens.size() - begin, rows);
      if (count == 0) continue;
      const size_t wanted = std::max(begin, attempts[i].sample->tokens.size() - 1);
      items.push_back({&text.sequence, std::span(text.tokens).subspan(begin, count),
                       wanted < begin + count ? BatchItem::Logits::kAll : BatchItem::Logits::kNone,
                       static_cast<int32_t>(wanted - begin)});
      text_of.push_back(i);
      rows -= count;
    }
    if (items.empty()) break;
    if (stop()) return false;
    engine.decoder().Step(items, [&](int32_t item, int32_t, const LogitsRow& logits) {
      Text& text = texts[text_of[static_cast<size_t>(item)]];
      const int32_t right = text.answer[text.likeliest.size()];
      text.losses.push_back(logits.LogSumExp() - static_cast<double>(logits[right]));
      text.likeliest.push_back(logits.Likeliest(known));
    });
    for (size_t i = 0; i < items.size(); ++i) attempts[text_of[i]].Count(engine.decoder().step_tokens_read()[i]);
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    const Text& text = texts[i];
    const NiahSample& sample = *attempts[i].sample;
    NiahRecord& record = attempts[i].record;
    record.answer = tokenizer.Decode(text.likeliest, false);
    const int32_t free = scoring == NiahScoring::kForced ? LeadingSpaces(tokenizer, text.answer) : 0;
    double loss = 0;
    int32_t count = 0;
    for (size_t r = 0; r < sample.references.size(); ++r) {
      // Of several, what stands between them does not count.
      std::vector<bool> counts(text.answer.size());
      std::fill(counts.begin() + free, counts.end(), true);
      if (sample.references.size() > 1) counts = TokensOf(tokenizer, sample.answer, text.answer, sample.references[r]);
      bool found = true;
      for (size_t j = 0; j < counts.size(); ++j) {
        if (!counts[j]) continue;
        found = found && text.likeliest[j] == text.answer[j];
        loss += text.losses[j];
        ++count;
      }
      record.found[r] = found;
    }
    record.nll = loss / std::max(count, 1);
  }
  return true;
}

}  // namespace

int32_t LeadingSpaces(const Tokenizer& tokenizer, std::span<const int32_t> answer) {
  int32_t count = 0;
  for (const int32_t token : answer) {
    if (tokenizer.Decode({&token, 1}, false).find_first_not_of(' ') != std::string::npos) break;
    ++count;
  }
  return count;
}

bool NiahFound(std::string_view answer, std::string_view reference) {
  return std::search(answer.begin(), answer.end(), reference.begin(), reference.end(),
                     [](char a, char b) { return Lower(a) == Lower(b); }) != answer.end() ||
         reference.empty();
}

bool ForEachNiahBatch(const NiahRuns& runs, const NiahRecords& records,
                      const std::function<int32_t(int32_t length)>& batch, const NiahBatchFn& fn) {
  std::vector<int32_t> lengths;
  for (const NiahConfiguration& one : runs.configurations) {
    if (std::find(lengths.begin(), lengths.end(), one.length) == lengths.end()) lengths.push_back(one.length);
  }
  std::sort(lengths.begin(), lengths.end());
  // All tasks and lengths of these samples come before the next ones.
  int64_t together = 1;
  for (const int32_t length : lengths) together = std::max<int64_t>(together, batch(length));
  const int64_t stride = together * runs.shards;
  for (int64_t first = runs.shard; first < runs.samples; first += stride) {
    for (const NiahTask task : runs.tasks) {
      for (const int32_t length : lengths) {
        std::vector<NiahMissing> missing;
        const int64_t end = std::min<int64_t>(first + stride, runs.samples);
        for (int64_t sample = first; sample < end; sample += runs.shards) {
          NiahMissing one{{task, length, static_cast<int32_t>(sample)}, {}};
          for (const NiahConfiguration& configuration : runs.configurations) {
            if (configuration.length == length &&
                !records.Contains(task, length, configuration.attention, one.place.sample)) {
              one.attentions.push_back(&configuration.attention);
            }
          }
          if (!one.attentions.empty()) missing.push_back(std::move(one));
        }
        const auto size = static_cast<size_t>(batch(length));
        for (size_t i = 0; i < missing.size(); i += size) {
          if (!fn(std::span(missing).subspan(i, std::min(size, missing.size() - i)))) return false;
        }
      }
    }
  }
  return true;
}

NiahHeader MakeNiahHeader(const Engine& engine, const NiahRuns& runs, const Haystack* haystack,
                          const NiahPromptOptions& options) {
  const auto hash = [](const std::string& text) {
    Sha256 sum;
    sum.Update(text.data(), text.size());
    return sum.Hex();
  };
  const ModelConfig& config = engine.config();
  NiahHeader header = {{"model", config.name}, {"layers", config.num_layers}};
  for (const auto& [name, value] : ModelIdentity(engine.source()))
    header[name == "model" ? "fingerprint" : name] = value;
  header.update({{"end_tokens", config.eos_ids},
                 {"weights", engine.memory().weight_types},
                 {"kv_type", engine.memory().kv_type},
                 {"scoring", Name(runs.scoring)},
                 {"seed", options.seed},
                 {"language", Name(options.language)},
                 {"chat", options.chat ? NiahHeader(options.chat->name()) : NiahHeader(false)},
                 {"haystack", haystack != nullptr ? haystack->sha256() : "none"},
                 {"haystack_start", options.random_start ? "random" : "first"},
                 {"repeat_haystack", options.repeat},
                 {"depths", options.depths}});
  if (options.chat) header["chat_template"] = hash(engine.source().chat_template());
  // A set is told by its name in each record; a file of that name may have changed.
  const std::vector<std::string> sets = PunctuationSetNames();
  for (const NiahConfiguration& one : runs.configurations) {
    const std::string& set = one.attention.base.punctuation;
    if (std::find(sets.begin(), sets.end(), set) != sets.end()) continue;
    header["punctuation"] = hash(fmt::format("{}", fmt::join(PunctuationOf(engine.tokenizer(), set).Ids(), ",")));
  }
  return header;
}

NiahRecord EmptyNiahRecord(const NiahPlace& place, const NiahSample& sample, const LayerSettings& attention) {
  NiahRecord record;
  record.task = place.task;
  record.length = place.length;
  record.sample = place.sample;
  record.attention = attention;
  record.references = sample.references;
  record.depths = sample.depths;
  record.found.assign(sample.references.size(), false);
  record.tokens = static_cast<int32_t>(sample.tokens.size());
  return record;
}

bool RunNiah(Engine& engine, const NiahPrompts& prompts, const NiahRuns& runs, NiahRecords& records,
             const NiahCallbacks& callbacks) {
  NiahProgress progress;
  double all_tokens = 0, done_tokens = 0;
  const auto batch = [&](int32_t length) {
    const int32_t fit =
        engine.cache().num_pages() / std::max(1, static_cast<int32_t>(PagesFor(static_cast<size_t>(length))));
    const int32_t wanted = runs.batch > 0 ? runs.batch : engine.decoder().max_rows() / length;
    return std::max(1, std::min(wanted, fit));
  };
  ForEachNiahBatch(runs, records, batch, [&](std::span<const NiahMissing> samples) {
    for (const NiahMissing& one : samples) {
      progress.missing += static_cast<int64_t>(one.attentions.size());
      all_tokens += static_cast<double>(one.place.length) * static_cast<double>(one.attentions.size());
    }
    return true;
  });

  // Those of the batch that lack the attention are prefilled together.
  const auto read = [&](const LayerSettings& attention, std::span<const NiahMissing> missing,
                        std::span<const NiahSample> samples) {
    std::vector<Attempt> attempts;
    double prompts_dense = 0;
    for (size_t i = 0; i < missing.size(); ++i) {
      const auto& lacks = missing[i].attentions;
      if (std::find(lacks.begin(), lacks.end(), &attention) == lacks.end()) continue;
      attempts.push_back({&samples[i], EmptyNiahRecord(missing[i].place, samples[i], attention)});
      prompts_dense += static_cast<double>(DenseTokensRead(engine.config(), attempts.back().record.tokens));
    }
    if (attempts.empty()) return true;
    engine.SetAttention(attention);
    const double tokens = static_cast<double>(missing.front().place.length) * static_cast<double>(attempts.size());
    const int64_t dense_before = engine.decoder().tokens_read().dense;
    const auto stop = [&] {
      // Dense attention reads the square of what the prompts have: this is the share of their tokens.
      const auto dense = static_cast<double>(engine.decoder().tokens_read().dense - dense_before);
      progress.share = (done_tokens + tokens * std::sqrt(std::min(1.0, dense / prompts_dense))) / all_tokens;
      callbacks.progress(progress);
      return callbacks.stop();
    };
    const auto start = std::chrono::steady_clock::now();
    const bool answered = runs.scoring == NiahScoring::kReferences ? Generate(engine, attempts, stop)
                                                                   : ScoreAnswers(engine, attempts, runs.scoring, stop);
    if (!answered) return false;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (Attempt& attempt : attempts) {
      attempt.record.seconds = seconds / static_cast<double>(attempts.size());
      callbacks.record(attempt.record);
      records.Add(std::move(attempt.record), "this run");
      ++progress.done;
    }
    done_tokens += tokens;
    progress.share = done_tokens / all_tokens;
    callbacks.progress(progress);
    return true;
  };

  return ForEachNiahBatch(runs, records, batch, [&](std::span<const NiahMissing> missing) {
    const int32_t length = missing.front().place.length;
    std::vector<NiahSample> samples;
    for (const NiahMissing& one : missing) {
      samples.push_back(prompts.Build(one.place.task, length, one.place.sample));
    }
    return std::all_of(runs.configurations.begin(), runs.configurations.end(), [&](const NiahConfiguration& one) {
      return one.length != length || read(one.attention, missing, samples);
    });
  });
}

}  // namespace phsa
