#include "eval/tune_meter.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "attention/policies.h"
#include "base/errors.h"
#include "eval/niah/random.h"
#include "eval/perplexity.h"

namespace phsa {
namespace {

constexpr size_t kLeastProse = 256;  // tokens
// Four samples of each task are a window of prose: a window is thousands of predictions.
constexpr int32_t kSamplesOfWindow = 4;

LayerSettings Dense() { return Canonical({DenseSettings(), {}}); }

}  // namespace

std::vector<std::vector<int32_t>> ProseWindows(std::span<const int32_t> text, uint64_t seed, int32_t length,
                                               int32_t count) {
  std::vector<std::vector<int32_t>> windows;
  if (text.size() < kLeastProse) return windows;
  const size_t size = std::min(text.size(), static_cast<size_t>(length));
  NiahRandom random(fmt::format("tune prose {} {}", seed, length));
  for (int32_t i = 0; i < count; ++i) {
    const size_t start = random.Below(text.size() - size + 1);
    windows.emplace_back(text.begin() + static_cast<std::ptrdiff_t>(start),
                         text.begin() + static_cast<std::ptrdiff_t>(start + size));
    if (size == text.size()) break;  // another one would be the same
  }
  return windows;
}

int32_t WindowsFor(int32_t samples) { return std::max(1, samples / kSamplesOfWindow); }

TuneMeter::TuneMeter(Engine& engine, const NiahPrompts& prompts, std::vector<NiahTask> tasks, int32_t length,
                     std::vector<std::vector<int32_t>> windows, NiahRecords& records, TuneMeterCallbacks callbacks)
    : engine_(engine),
      prompts_(prompts),
      tasks_(std::move(tasks)),
      length_(length),
      windows_(std::move(windows)),
      records_(records),
      callbacks_(std::move(callbacks)) {}

NiahRuns TuneMeter::RunsFor(std::span<const LayerSettings> attentions, int32_t samples) const {
  NiahRuns runs;
  runs.tasks = tasks_;
  runs.samples = samples;
  runs.scoring = NiahScoring::kForced;
  runs.configurations.push_back({length_, Dense()});
  for (const LayerSettings& one : attentions) runs.configurations.push_back({length_, Canonical(one)});
  return runs;
}

// The second half of a window: before it, sparse attention reads nearly as much as dense.
bool TuneMeter::Read(const LayerSettings& attention, int32_t window) {
  if (records_.ProseLoss(length_, attention, window)) return true;
  engine_.SetAttention(attention);
  GenerateCallbacks callbacks;
  callbacks.stop = callbacks_.stop;
  const PerplexityResult result = Perplexity(engine_, windows_[static_cast<size_t>(window)], callbacks);
  if (result.tokens == 0) return false;
  const auto half = result.losses.begin() + static_cast<std::ptrdiff_t>(result.losses.size() / 2);
  NiahProse prose{length_, window, attention, 0};
  prose.loss =
      std::accumulate(half, result.losses.end(), 0.0) / static_cast<double>(std::distance(half, result.losses.end()));
  records_.AddProse(prose);
  callbacks_.prose(prose);
  return true;
}

std::optional<std::vector<TuneLosses>> TuneMeter::Measure(std::span<const LayerSettings> attentions, int32_t samples) {
  const NiahRuns runs = RunsFor(attentions, samples);
  const int32_t windows = std::min(WindowsFor(samples), static_cast<int32_t>(windows_.size()));
  // A window takes about as long as a sample of one task.
  const double needles = static_cast<double>(samples) * static_cast<double>(tasks_.size());
  const double needles_share = needles / (needles + windows);
  NiahCallbacks callbacks;
  callbacks.progress = [&](const NiahProgress& progress) { callbacks_.progress(needles_share * progress.share); };
  callbacks.record = callbacks_.record;
  callbacks.stop = callbacks_.stop;
  if (!RunNiah(engine_, prompts_, runs, records_, callbacks)) return std::nullopt;
  int32_t read = 0;
  const auto readings = static_cast<double>(windows) * static_cast<double>(runs.configurations.size());
  for (int32_t window = 0; window < windows; ++window) {
    for (const NiahConfiguration& one : runs.configurations) {
      if (callbacks_.stop() || !Read(one.attention, window)) return std::nullopt;
      callbacks_.progress(needles_share + (1 - needles_share) * ++read / readings);
    }
  }

  const LayerSettings& dense = runs.configurations.front().attention;
  std::vector<TuneLosses> losses;
  for (size_t i = 1; i < runs.configurations.size(); ++i) {
    const LayerSettings& attention = runs.configurations[i].attention;
    TuneLosses one;
    for (const NiahTask task : tasks_) {
      std::vector<double> above;
      for (int32_t sample = 0; sample < samples; ++sample) {
        const NiahRecord* const ours = records_.Find(task, length_, attention, sample);
        const NiahRecord* const theirs = records_.Find(task, length_, dense, sample);
        PHSA_CHECK(ours != nullptr && theirs != nullptr);
        if (!ours->nll || !theirs->nll) {
          ThrowInvalid("tune: a record of {} has no nll, so another program wrote it; take another file", Name(task));
        }
        above.push_back(*ours->nll - *theirs->nll);
      }
      one.tasks.push_back(std::move(above));
    }
    for (int32_t window = 0; window < windows; ++window) {
      one.prose.push_back(*records_.ProseLoss(length_, attention, window) -
                          *records_.ProseLoss(length_, dense, window));
    }
    losses.push_back(std::move(one));
  }
  return losses;
}

}  // namespace phsa
