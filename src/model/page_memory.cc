#include "model/page_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/errors.h"

namespace phsa {
namespace {

class HostPages final : public PageMemory {
 public:
  HostPages(size_t page_bytes, int32_t num_pages)
      : page_bytes_(page_bytes), bytes_(page_bytes * static_cast<size_t>(num_pages)) {
    void* const memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      Throw(PHSA_OUT_OF_MEMORY, "cannot reserve {} bytes for the KV cache ({}); ask for a smaller {}", bytes_,
            std::strerror(errno), Option{"context"});
    }
    madvise(memory, bytes_, MADV_HUGEPAGE);  // only a wish
    data_ = static_cast<uint8_t*>(memory);
  }
  ~HostPages() override { munmap(data_, bytes_); }
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;

  uint8_t* data() const override { return data_; }
  bool on_host() const override { return true; }
  void Copy(int32_t from_page, int32_t to_page) override { std::memcpy(Page(to_page), Page(from_page), page_bytes_); }
  void Read(int32_t page, size_t offset, std::span<uint8_t> to) const override {
    std::copy_n(Page(page) + offset, to.size(), to.begin());
  }
  void Write(int32_t page, size_t offset, std::span<const uint8_t> from) override {
    std::ranges::copy(from, Page(page) + offset);
  }

 private:
  uint8_t* Page(int32_t page) const { return data_ + static_cast<size_t>(page) * page_bytes_; }
  size_t page_bytes_, bytes_;
  uint8_t* data_ = nullptr;
};

}  // namespace

std::unique_ptr<PageMemory> MakeHostPages(size_t page_bytes, int32_t num_pages) {
  return std::make_unique<HostPages>(page_bytes, num_pages);
}

}  // namespace phsa
