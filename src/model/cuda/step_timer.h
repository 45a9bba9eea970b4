// Where the time of a step goes on a GPU.
#ifndef PHSA_MODEL_CUDA_STEP_TIMER_H_
#define PHSA_MODEL_CUDA_STEP_TIMER_H_

#include <vector>

#include "model/backend.h"
#include "ops/cuda/runtime.h"

namespace phsa::cuda {

inline constexpr const char* kStep = "a step of the decoder";

class StepTimer {
 public:
  explicit StepTimer(cudaStream_t stream) : stream_(stream) {}
  void TimeStages(bool apart) { timed_ = apart; }
  bool timed() const { return timed_; }
  const StepTimes& times() const { return times_; }

  void Begin() { parts_.clear(); }
  // The time since the last mark belongs to `part`; null: it begins here.
  void Mark(double StepTimes::*part) {
    if (!timed_) return;
    if (events_.size() == parts_.size()) events_.emplace_back(/*timed=*/true);
    Check(cudaEventRecord(events_[parts_.size()].get(), stream_), kStep);
    parts_.push_back(part);
  }
  // When the step's work has ended.
  void Take() {
    for (size_t i = 1; i < parts_.size(); ++i) {
      float milliseconds = 0;
      Check(cudaEventElapsedTime(&milliseconds, events_[i - 1].get(), events_[i].get()), kStep);
      times_.*parts_[i] += static_cast<double>(milliseconds) * 1e-3;
    }
  }

 private:
  cudaStream_t stream_;
  bool timed_ = false;
  StepTimes times_;
  std::vector<Event> events_;
  std::vector<double StepTimes::*> parts_;  // of the events of this step
};

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_STEP_TIMER_H_
