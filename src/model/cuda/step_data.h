// What a step brings from the host to a GPU, in one copy.
#ifndef PHSA_MODEL_CUDA_STEP_DATA_H_
#define PHSA_MODEL_CUDA_STEP_DATA_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "model/backend.h"
#include "ops/cuda/runtime.h"

namespace phsa::cuda {

struct StepData {
  int64_t* cache_rows = nullptr;                    // [row]
  int64_t* flag_rows = nullptr;                     // [row]
  int32_t *tokens = nullptr, *positions = nullptr;  // [row]
  int32_t* kv_lens = nullptr;                       // [item]
  int32_t* page_table = nullptr;                    // [item][stride]
  int32_t *wanted = nullptr, *asked = nullptr;      // [wanted row]
  uint8_t* flags = nullptr;                         // [row]
  size_t size = 0;

  StepData() = default;
  StepData(size_t rows, size_t items, size_t stride, size_t wanted_rows, uint8_t* memory);
};

// The data's way: host memory, in turn, so that a step is packed while the last one's is still read, and the device's.
class StepStaging {
 public:
  // Bytes that are taken at first, on each side: rows, and room for page tables.
  static size_t Bytes(int32_t max_rows);
  StepStaging(int32_t max_rows, cudaStream_t stream);

  // Room for a step in host memory. `moved` is called before the data get another place on the device.
  StepData Take(size_t rows, size_t items, size_t stride, size_t wanted, const std::function<void()>& moved);
  void Send();  // what was taken last
  const StepData& on_device() const { return on_device_; }

 private:
  struct Side {
    PinnedBuffer memory;
    Event sent;
  };
  cudaStream_t stream_;
  std::array<Side, 2> sides_;
  size_t current_ = 0;
  DeviceBuffer memory_;
  StepData on_device_;
};

// Rows, positions, tokens and lengths of `rows`, at the front of each array.
void FillRows(const StepRows& rows, const StepData& host);

}  // namespace phsa::cuda

#endif  // PHSA_MODEL_CUDA_STEP_DATA_H_
