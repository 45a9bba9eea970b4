// One memory, cut into arrays one behind the other: workspaces, activations, weights.
#ifndef PHSA_BASE_CARVER_H_
#define PHSA_BASE_CARVER_H_

#include <cstddef>
#include <cstdint>

namespace phsa {

// Where arrays begin: a cache line, and on a GPU what cuBLASLt's products want.
inline constexpr size_t kHostAlignment = 64, kDeviceAlignment = 256;

constexpr size_t Aligned(size_t bytes, size_t alignment = kHostAlignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Hands out aligned arrays; with a null memory it only counts.
class Carver {
 public:
  explicit Carver(void* memory, size_t alignment = kHostAlignment)
      : memory_(static_cast<std::byte*>(memory)), alignment_(alignment) {}

  template <class T>
  T* Take(int64_t count) {
    const size_t at = size_;
    if (count > 0) size_ = Aligned(size_ + static_cast<size_t>(count) * sizeof(T), alignment_);
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + at);
  }
  size_t size() const { return size_; }

 private:
  std::byte* memory_;
  size_t alignment_;
  size_t size_ = 0;
};

}  // namespace phsa

#endif  // PHSA_BASE_CARVER_H_
