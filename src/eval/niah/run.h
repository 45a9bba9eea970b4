// Runs needle samples through a model.
#ifndef PHSA_EVAL_NIAH_RUN_H_
#define PHSA_EVAL_NIAH_RUN_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "eval/niah/prompt.h"
#include "eval/niah/records.h"

namespace phsa {

struct NiahConfiguration {
  int32_t length = 0;
  LayerSettings attention;  // as Canonical() gives it
};

struct NiahRuns {
  std::vector<NiahTask> tasks;
  std::vector<NiahConfiguration> configurations;
  int32_t samples = 100;
  int32_t shard = 0, shards = 1;  // this run has the samples i with i % shards == shard
  int32_t batch = 0;              // samples that are prefilled together; 0: as many as one step of the decoder holds
  NiahScoring scoring = NiahScoring::kReferences;
};

struct NiahPlace {
  NiahTask task = NiahTask::kSingle1;
  int32_t length = 0, sample = 0;
};
// A sample with the attentions that some records lack for it.
struct NiahMissing {
  NiahPlace place;
  std::vector<const LayerSettings*> attentions;  // in the order of the configurations, of which they are
};
// fn(samples of one task and length, at most batch(length) of them), samples outermost, so that all configurations see
// a batch before the next one begins. False where fn returned false, which ends it.
using NiahBatchFn = std::function<bool(std::span<const NiahMissing>)>;
bool ForEachNiahBatch(const NiahRuns& runs, const NiahRecords& records,
                      const std::function<int32_t(int32_t length)>& batch, const NiahBatchFn& fn);

// The record of an answer that is yet to come.
NiahRecord EmptyNiahRecord(const NiahPlace& place, const NiahSample& sample, const LayerSettings& attention);

// What the samples' results depend on, as the first line of a file of records has it.
NiahHeader MakeNiahHeader(const Engine& engine, const NiahRuns& runs, const Haystack* haystack,
                          const NiahPromptOptions& options);

struct NiahProgress {
  double share = 0;               // of the tokens that this run reads
  int64_t done = 0, missing = 0;  // answers of this run: those that it began with are not counted
};

struct NiahCallbacks {
  std::function<void(const NiahProgress&)> progress;
  std::function<void(const NiahRecord&)> record;  // each answer, as soon as its batch is done
  std::function<bool()> stop;                     // asked before every step
};

// Tokens that an answer begins with before its reference: those that are nothing but spaces.
int32_t LeadingSpaces(const Tokenizer& tokenizer, std::span<const int32_t> answer);

// Whether a reference is in an answer. Case does not matter; beyond ASCII it must be the same.
bool NiahFound(std::string_view answer, std::string_view reference);

// Answers that `records` lacks are computed, given to `callbacks.record` and added; a batch with all its configurations
// before the next, so that an interrupted run has pairs. No more samples are prefilled together than the engine's cache
// holds. False where it was stopped.
bool RunNiah(Engine& engine, const NiahPrompts& prompts, const NiahRuns& runs, NiahRecords& records,
             const NiahCallbacks& callbacks);

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_RUN_H_
