// Speed of prefill and decode, for `phsa bench` and `phsa compare`.
#ifndef PHSA_EVAL_SPEED_H_
#define PHSA_EVAL_SPEED_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "engine/session.h"

namespace phsa {

enum class SpeedTest : uint8_t { kPrefill, kDecode };
const char* Name(SpeedTest test);  // "pp" and "tg", as llama-bench calls them

// `tokens` tokens of each of `batch` texts were prefilled at once, or decoded one after the other, after `depth`
// others.
struct SpeedRow {
  SpeedTest test = SpeedTest::kPrefill;
  int32_t tokens = 0, depth = 0, batch = 1;
  std::vector<double> seconds;  // of each run; at least one
  StepTimes times;              // of all runs
  TokensRead tokens_read;       // of all runs

  double all_tokens() const { return static_cast<double>(tokens) * batch; }
  double best() const;  // tokens per second, of all texts together
  double mean() const;
  double slowest() const;
  void Join(const SpeedRow& other);  // the runs of both, of the same measurement
};

// test, tokens, depth, batch, tokens_per_s, tokens_per_s_mean, repeats, read_share
nlohmann::ordered_json SpeedToJson(const SpeedRow& row);

// Measures the attention that the engine has, on random tokens, or those of a text: neighbouring queries of a text
// choose alike, those of random tokens do not, and what is chosen alike is read once. Throws phsa::Error where a logit
// is not finite: then what was timed was no computation.
class SpeedMeter {
 public:
  // `callbacks.stop` is asked before every step, `callbacks.prefill` told the tokens that are in the cache.
  // `text`: its tokens are prefilled, again and again where they are fewer than is asked for; empty: random ones.
  SpeedMeter(Engine& engine, GenerateCallbacks callbacks, std::vector<int32_t> text = {});

  // Prefill of each of `lengths` tokens, ascending, after `depth` others: a row for each. One pass of the longest
  // measures all. What callbacks.stop cut short is left out, rows without a run too.
  std::vector<SpeedRow> Prefill(int32_t depth, std::span<const int32_t> lengths, int32_t repeats);
  // Decode after `depth` tokens of each of `batch` texts: no more than a step has rows and the cache holds. What was
  // prefilled for the call before is not prefilled again. No run where it was stopped.
  SpeedRow Decode(int32_t depth, int32_t tokens, int32_t repeats, int32_t batch = 1);

 private:
  // Goes on to `length` tokens of each text in steps; false where it was stopped.
  bool Advance(int32_t length, int32_t step);
  void Truncate(int32_t length);
  // Prefills `depth` tokens of `batch` texts and the first `step` after them, so that buffers are as in use, and goes
  // back.
  bool Prepare(int32_t depth, int32_t tokens, int32_t step, int32_t batch);

  Engine& engine_;
  GenerateCallbacks callbacks_;
  std::vector<Sequence> texts_;  // at least one; all of them alike
  std::vector<int32_t> tokens_;
};

// As the system names it.
std::string CpuName();

}  // namespace phsa

#endif  // PHSA_EVAL_SPEED_H_
