#include "model/cuda/step_data.h"

#include <algorithm>

#include "base/carver.h"
#include "model/cuda/step_timer.h"

namespace phsa::cuda {

StepData::StepData(size_t rows, size_t items, size_t stride, size_t wanted_rows, uint8_t* memory) {
  Carver carver(memory, kDeviceAlignment);
  cache_rows = carver.Take<int64_t>(rows);
  flag_rows = carver.Take<int64_t>(rows);
  tokens = carver.Take<int32_t>(rows);
  positions = carver.Take<int32_t>(rows);
  kv_lens = carver.Take<int32_t>(items);
  page_table = carver.Take<int32_t>(items * stride);
  wanted = carver.Take<int32_t>(wanted_rows);
  asked = carver.Take<int32_t>(wanted_rows);
  flags = carver.Take<uint8_t>(rows);
  size = carver.size();
}

size_t StepStaging::Bytes(int32_t max_rows) {
  constexpr size_t kPageTables = size_t{1} << 20;
  const auto m = static_cast<size_t>(max_rows);
  return StepData(m, m, 0, m, nullptr).size + kPageTables;
}

StepStaging::StepStaging(int32_t max_rows, cudaStream_t stream)
    : stream_(stream), memory_(Bytes(max_rows), "the activations") {
  for (Side& side : sides_) side.memory = PinnedBuffer(Bytes(max_rows));
}

StepData StepStaging::Take(size_t rows, size_t items, size_t stride, size_t wanted,
                           const std::function<void()>& moved) {
  const size_t bytes = StepData(rows, items, stride, wanted, nullptr).size;
  current_ ^= 1;
  Side& side = sides_[current_];
  Check(cudaEventSynchronize(side.sent.get()), kStep);
  if (side.memory.size() < bytes) {
    side.memory = {};
    side.memory = PinnedBuffer(2 * bytes);
  }
  if (memory_.size() < bytes) {
    Check(cudaStreamSynchronize(stream_), kStep);
    moved();
    memory_ = {};
    memory_ = DeviceBuffer(2 * bytes, "the page tables of a step");
  }
  on_device_ = StepData(rows, items, stride, wanted, memory_.data());
  return {rows, items, stride, wanted, side.memory.data()};
}

void StepStaging::Send() {
  Side& side = sides_[current_];
  Check(cudaMemcpyAsync(memory_.data(), side.memory.data(), on_device_.size, cudaMemcpyHostToDevice, stream_), kStep);
  Check(cudaEventRecord(side.sent.get(), stream_), kStep);
}

void FillRows(const StepRows& rows, const StepData& host) {
  std::ranges::copy(rows.cache_rows, host.cache_rows);
  std::ranges::transform(rows.cache_rows, host.flag_rows, [&](int64_t at) { return rows.cache->FlagByte(at); });
  std::ranges::copy(rows.tokens, host.tokens);
  std::ranges::copy(rows.positions, host.positions);
  std::ranges::copy(rows.kv_lens, host.kv_lens);
  std::ranges::copy(rows.flags, host.flags);
}

}  // namespace phsa::cuda
