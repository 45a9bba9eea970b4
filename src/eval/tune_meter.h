// What `phsa tune` measures: needles of several tasks, read with the right answers behind them, and windows of prose.
#ifndef PHSA_EVAL_TUNE_METER_H_
#define PHSA_EVAL_TUNE_METER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "eval/niah/run.h"
#include "eval/tune.h"

namespace phsa {

// Windows of a text, each begun at another place that the seed draws; none where the text has fewer than 256 tokens.
// At most `length` tokens each.
std::vector<std::vector<int32_t>> ProseWindows(std::span<const int32_t> text, uint64_t seed, int32_t length,
                                               int32_t count);
// How many of them belong to so many samples of each task.
int32_t WindowsFor(int32_t samples);

struct TuneMeterCallbacks {
  std::function<void(double share)> progress;  // of one call of Measure
  std::function<void(const NiahRecord&)> record;
  std::function<void(const NiahProse&)> prose;
  std::function<bool()> stop;
};

class TuneMeter {
 public:
  // `windows`: WindowsFor(the most samples) of them, or none. Everything must outlive this.
  TuneMeter(Engine& engine, const NiahPrompts& prompts, std::vector<NiahTask> tasks, int32_t length,
            std::vector<std::vector<int32_t>> windows, NiahRecords& records, TuneMeterCallbacks callbacks);

  // Of the first `samples` samples of each task, against dense attention; what `records` has is not measured again.
  // None: stopped.
  std::optional<std::vector<TuneLosses>> Measure(std::span<const LayerSettings> attentions, int32_t samples);

  // The runs whose header the records have.
  NiahRuns RunsFor(std::span<const LayerSettings> attentions, int32_t samples) const;
  const std::vector<NiahTask>& tasks() const { return tasks_; }
  int32_t length() const { return length_; }
  bool has_prose() const { return !windows_.empty(); }

 private:
  bool Read(const LayerSettings& attention, int32_t window);

  Engine& engine_;
  const NiahPrompts& prompts_;
  std::vector<NiahTask> tasks_;
  int32_t length_;
  std::vector<std::vector<int32_t>> windows_;
  NiahRecords& records_;
  TuneMeterCallbacks callbacks_;
};

}  // namespace phsa

#endif  // PHSA_EVAL_TUNE_METER_H_
