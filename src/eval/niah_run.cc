#include "eval/niah_run.h"

#include <algorithm>
#include <chrono>

#include "engine/session.h"

namespace phsa {
namespace {

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Greedy generation until every reference is there: what follows cannot change the score.
bool Generate(Engine& engine, const NiahSample& sample, const GenerateCallbacks& reading, NiahRecord& record) {
  Session session(engine);
  GenerateOptions options;
  options.max_tokens = kNiahAnswerTokens;
  options.sampler.temperature = 0;
  bool interrupted = false;
  const auto look = [&] {
    for (size_t i = 0; i < sample.references.size(); ++i) {
      if (!record.found[i]) record.found[i] = NiahFound(record.answer, sample.references[i]);
    }
  };
  GenerateCallbacks callbacks = reading;
  callbacks.text = [&](std::string_view text) {
    record.answer += text;
    look();
  };
  callbacks.stop = [&] {
    interrupted = reading.stop();
    return interrupted || std::count(record.found.begin(), record.found.end(), false) == 0;
  };
  session.Generate(sample.tokens, options, callbacks);
  return !interrupted;
}

bool ReadAnswer(Engine& engine, const NiahSample& sample, NiahScoring scoring, const GenerateCallbacks& reading,
                NiahRecord& record) {
  const Tokenizer& tokenizer = engine.tokenizer();
  const std::vector<int32_t> answer = tokenizer.Encode(sample.answer, SpecialTokens::kAsText);
  // Models pad their vocabulary: ids that the tokenizer does not have cannot be text.
  const int32_t known = std::min(engine.config().vocab_size, tokenizer.vocab_size());
  std::vector<int32_t> likeliest;
  const LogitsSink sink = [&](int32_t, int32_t, const float* logits) {
    likeliest.push_back(static_cast<int32_t>(std::max_element(logits, logits + known) - logits));
  };
  Session session(engine);
  if (!session.Prefill(sample.tokens, reading, sink, BatchItem::Logits::kLast)) return false;
  if (answer.size() > 1) {
    const BatchItem item{&session.sequence(), std::span(answer).first(answer.size() - 1), BatchItem::Logits::kAll};
    engine.decoder().Step({&item, 1}, sink);
  }
  record.answer = tokenizer.Decode(likeliest, false);
  const int32_t free = scoring == NiahScoring::kForced ? LeadingSpaces(tokenizer, answer) : 0;
  record.found[0] = std::equal(answer.begin() + free, answer.end(), likeliest.begin() + free, likeliest.end());
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

bool ForEachNiahSample(const NiahPlan& plan, const NiahRecords& records, const NiahSampleFn& fn) {
  std::vector<int32_t> lengths;
  for (const NiahConfiguration& one : plan.configurations) {
    if (std::find(lengths.begin(), lengths.end(), one.length) == lengths.end()) lengths.push_back(one.length);
  }
  std::sort(lengths.begin(), lengths.end());
  for (int32_t sample = plan.shard; sample < plan.samples; sample += plan.shards) {
    for (const NiahTask task : plan.tasks) {
      for (const int32_t length : lengths) {
        std::vector<const LayerSettings*> missing;
        for (const NiahConfiguration& one : plan.configurations) {
          if (one.length == length && !records.Contains(task, length, one.attention, sample)) {
            missing.push_back(&one.attention);
          }
        }
        if (!missing.empty() && !fn({task, length, sample}, missing)) return false;
      }
    }
  }
  return true;
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

bool RunNiah(Engine& engine, const NiahPrompts& prompts, const NiahPlan& plan, NiahRecords& records,
             const NiahCallbacks& callbacks) {
  NiahProgress progress;
  double all_tokens = 0, done_tokens = 0;
  ForEachNiahSample(plan, records, [&](const NiahPlace& place, const auto& missing) {
    progress.missing += static_cast<int64_t>(missing.size());
    all_tokens += static_cast<double>(place.length) * static_cast<double>(missing.size());
    return true;
  });

  return ForEachNiahSample(plan, records, [&](const NiahPlace& place, const auto& missing) {
    const NiahSample sample = prompts.Build(place.task, place.length, place.sample);
    for (const LayerSettings* attention : missing) {
      if (callbacks.stop()) return false;
      engine.SetAttention(*attention);
      NiahRecord record = EmptyNiahRecord(place, sample, *attention);
      GenerateCallbacks reading;
      reading.stop = callbacks.stop;
      reading.prefill = [&](int32_t done, int32_t) {
        progress.share = (done_tokens + done) / all_tokens;
        callbacks.progress(progress);
      };
      const TokensRead before = engine.decoder().tokens_read();
      const auto start = std::chrono::steady_clock::now();
      const bool answered = plan.scoring == NiahScoring::kReferences
                                ? Generate(engine, sample, reading, record)
                                : ReadAnswer(engine, sample, plan.scoring, reading, record);
      if (!answered) return false;
      record.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      const TokensRead& after = engine.decoder().tokens_read();
      record.read = after.read - before.read;
      record.dense = after.dense - before.dense;
      callbacks.record(record);
      records.Add(std::move(record), "this run");
      done_tokens += place.length;
      ++progress.done;
      progress.share = done_tokens / all_tokens;
      callbacks.progress(progress);
    }
    return true;
  });
}

}  // namespace phsa
