// One model with several ways to attend: answers, speed, needles, perplexity, recall, and what attention costs.
#ifndef PHSA_EVAL_COMPARE_H_
#define PHSA_EVAL_COMPARE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/session.h"
#include "eval/flops.h"
#include "eval/niah/run.h"
#include "eval/niah/statistics.h"
#include "eval/perplexity.h"
#include "eval/settings_text.h"
#include "eval/speed.h"

namespace phsa {

struct CompareQuestion {
  std::string question, expected;  // expected: what a right answer holds; empty: nobody judges
  std::vector<int32_t> tokens;     // the text and the question, as the model reads them
};

struct CompareAnswersRuns {
  std::vector<CompareQuestion> questions;
  int32_t max_tokens = 48, context = 0;
};
struct CompareSpeedRuns {
  std::vector<int32_t> lengths, depths;  // ascending; one of them may be empty
  int32_t decode_tokens = 32, repeats = 2;
  int32_t context() const;
};
struct CompareTextRuns {
  std::string name;
  std::vector<int32_t> tokens;
  bool perplexity = true, recall = true;
};
struct CompareNiahRuns {
  std::vector<NiahTask> tasks;
  std::vector<int32_t> lengths;  // ascending
  int32_t samples = 10;
  const NiahPrompts* prompts = nullptr;
};

// What is measured. A policy has the same settings in all parts, so that its numbers are about one thing.
struct CompareRuns {
  std::vector<NamedAttention> policies;  // at least one; "PHSA K=16"
  std::optional<CompareAnswersRuns> answers;
  std::optional<CompareSpeedRuns> speed;
  std::optional<CompareTextRuns> text;
  std::optional<CompareNiahRuns> niah;
  std::vector<int32_t> flops_lengths;  // may exceed the model's context: nothing is run

  int32_t Context() const;  // that the parts which are run need: what the engine's cache must hold. 0: none is
};

// The results of the parts, [policy] everywhere, without what an interruption left out.
struct ComparedPolicy {
  std::string label;
  LayerSettings attention;        // in all parts
  bool dense = false;             // in all layers: what the others are compared with
  std::vector<std::string> same;  // labels that were asked for too and mean the same
};
struct CompareAnswers {
  std::vector<CompareQuestion> questions;
  std::vector<std::vector<GenerateResult>> results;                 // [policy][question]
  std::optional<bool> Right(size_t policy, size_t question) const;  // none: not judged, or not asked
};
struct CompareSpeed {
  int32_t decode_tokens = 0, repeats = 0;
  std::vector<std::vector<SpeedRow>> rows;  // of a policy: prefill by length, then decode by depth
  const SpeedRow* Find(size_t policy, SpeedTest test, int32_t tokens, int32_t depth) const;  // null: not measured
};
struct CompareRecall {
  std::optional<double> all, sparse;  // over all queries, over those that leave something out
  std::vector<std::optional<double>> sparse_by_layer;
};
struct CompareText {
  std::string name;
  int32_t tokens = 0;
  bool perplexity = false, recall = false;
  std::vector<std::optional<PerplexityResult>> results;
  std::vector<std::optional<CompareRecall>> recalls;  // not of dense attention: it is 1 by definition
};
struct CompareNiah {
  int32_t samples = 0;
  NiahRecords records;
};
struct CompareFlops {
  std::vector<int32_t> lengths;
  std::vector<std::vector<AttentionFlops>> counts;  // [policy][length]
};
// The caller of RunCompare knows the command, the version and the date.
struct CompareAbout {
  std::string model, format, weights, kv_type, device, cpu, command, version, date;
  int32_t threads = 0, context = 0, num_layers = 0, num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  bool carries_settings = false;  // of sparse attention: it was trained or checked for it
  double seconds = 0;
  bool interrupted = false;
};

struct CompareResult {
  CompareAbout about;
  std::vector<ComparedPolicy> policies;
  std::optional<CompareAnswers> answers;
  std::optional<CompareSpeed> speed;
  std::optional<CompareText> text;
  std::optional<CompareNiah> niah;
  std::optional<CompareFlops> flops;

  std::optional<size_t> dense() const;  // which policy is dense attention; none: it was not asked for
};

struct CompareCallbacks {
  std::function<void(double share, const std::string& what)> progress;
  std::function<bool()> stop;
};

// The engine's context must be that of the runs or larger. Where callbacks.stop asks for it, the result holds what is
// done and about.interrupted. Throws phsa::Error where what a model computes is not finite.
CompareResult RunCompare(Engine& engine, const CompareRuns& runs, const CompareCallbacks& callbacks);

// The mean of first minus second over the tokens of one text, with its 95 % interval: the text is cut into 32 pieces
// whose means are taken for independent, as neighbouring tokens are not (Student's t). None where it is too short.
struct LossDifference {
  double mean = 0;
  Interval ci95;
};
std::optional<LossDifference> CompareLosses(std::span<const float> first, std::span<const float> second);

}  // namespace phsa

#endif  // PHSA_EVAL_COMPARE_H_
