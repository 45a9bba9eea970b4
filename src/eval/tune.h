// Which settings keep a model's answers at a budget of tokens: what is tried, on how many samples, and what wins. The
// search knows losses only; where they come from is tune_meter.h's.
#ifndef PHSA_EVAL_TUNE_H_
#define PHSA_EVAL_TUNE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "phsa/settings.h"

namespace phsa {

// How much worse one way to attend is than dense attention, sample by sample.
struct TuneLosses {
  std::vector<std::vector<double>> tasks;  // [task][sample]: the answer's mean negative log-likelihood above dense's
  std::vector<double> prose;               // [window]: of the text's tokens, likewise

  // The mean over the tasks, and prose with a weight of its own: one percent of perplexity counts as much as 0.04 of
  // an answer's loss, which is about two answers of a hundred.
  double Loss() const;
};

// First minus second, of the same samples.
struct TuneDifference {
  double mean = 0, error = 0;  // error: the standard error; infinite where a task has a single sample
};
TuneDifference ComparePaired(const TuneLosses& first, const TuneLosses& second);

struct TuneOptions {
  double budget = 0.03;   // of the text's tokens, read by a query at the end of a text of this length
  int32_t length = 4096;  // tokens
  int32_t samples = 20;   // of each task, for the finalists; earlier rounds have fewer
  int32_t num_layers = 1;
  std::vector<int32_t> parts = {1, 2, 4, 8};
  std::vector<float> lambdas = {0.5f, 0.75f, 0.9f, 1.0f};
  bool layers = false;        // whether other settings for some layers are tried
  int32_t max_top_k = 65536;  // of the device
  Settings base;              // what is not searched: block size, punctuation, group, dense_below
};

struct TuneTrial {
  std::string stage;
  LayerSettings attention;
  int32_t samples = 0;  // of each task: the most that the stage gave it
  double loss = 0;      // TuneLosses::Loss() of them
  bool won = false;     // its stage
};

struct TuneResult {
  LayerSettings best;
  std::vector<TuneTrial> trials;  // in the order of the stages, the best of a stage first
};

struct TuneCallbacks {
  // The losses of the first `samples` samples of each task; none: stopped.
  std::function<std::optional<std::vector<TuneLosses>>(std::span<const LayerSettings>, int32_t samples)> measure;
  // Whether the device can attend so; may be empty.
  std::function<bool(const LayerSettings&)> fits;
  // Before each round; may be empty.
  std::function<void(const std::string& stage, size_t candidates, int32_t samples)> round;
};

// Tokens that a query at the end of a text of `length` tokens reads, as a share of them: init, local, its own block and
// K blocks; the mean over the layers.
double ShareAtEnd(const LayerSettings& settings, int32_t num_layers, int32_t length);

// Throws phsa::Error where the budget holds not even the smallest settings, or all there is.
void CheckTuneOptions(const TuneOptions& options);

// None: stopped. By stages (parts, band, lambda, survivors, layers), each of which halves its candidates while it
// doubles their samples, starting from the winner of the one before; then the winners and the paper's band on all
// samples.
std::optional<TuneResult> Tune(const TuneOptions& options, const TuneCallbacks& callbacks);

}  // namespace phsa

#endif  // PHSA_EVAL_TUNE_H_
