// Bytes aligned to 64, without the cost of clearing them.
#ifndef PHSA_BASE_BUFFER_H_
#define PHSA_BASE_BUFFER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace phsa {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes)
      : data_(static_cast<uint8_t*>(::operator new[](std::max(bytes, kAlignment), std::align_val_t{kAlignment}))),
        size_(bytes) {}
  uint8_t* data() const { return data_.get(); }
  float* floats() const { return reinterpret_cast<float*>(data_.get()); }
  size_t size() const { return size_; }
  // Room for so many bytes; what was in it is lost where it had less.
  void Reserve(size_t bytes) {
    if (size_ >= bytes) return;
    *this = {};  // first give back, then take
    *this = Buffer(bytes);
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(uint8_t* data) const { ::operator delete[](data, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<uint8_t[], Free> data_;
  size_t size_ = 0;
};

}  // namespace phsa

#endif  // PHSA_BASE_BUFFER_H_
