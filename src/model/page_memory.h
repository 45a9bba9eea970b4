// The memory of a KV cache's pages, wherever the attention that reads them runs.
#ifndef PHSA_MODEL_PAGE_MEMORY_H_
#define PHSA_MODEL_PAGE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace phsa {

// Pages of equal size, one behind the other, with the same contents byte by byte on every device.
class PageMemory {
 public:
  virtual ~PageMemory() = default;

  // Where page 0 begins, for the attention. Only where `on_host` may the host follow this address.
  virtual uint8_t* data() const = 0;
  virtual bool on_host() const = 0;
  // These come after all steps that were begun before, and before those that are begun later.
  virtual void Copy(int32_t from_page, int32_t to_page) = 0;
  // A part of a page to and from host memory; whoever called may use `to` and change `from` when they return.
  virtual void Read(int32_t page, size_t offset, std::span<uint8_t> to) const = 0;
  virtual void Write(int32_t page, size_t offset, std::span<const uint8_t> from) = 0;
};

// Address space of the host; memory is taken as pages are written. Throws phsa::Error where there is not enough.
std::unique_ptr<PageMemory> MakeHostPages(size_t page_bytes, int32_t num_pages);

}  // namespace phsa

#endif  // PHSA_MODEL_PAGE_MEMORY_H_
