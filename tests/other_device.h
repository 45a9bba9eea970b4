// A device whose memory the host must not touch: the CPU behind locked pages. Whoever follows their address outside of
// the device's own calls ends the process.
#ifndef PHSA_TESTS_OTHER_DEVICE_H_
#define PHSA_TESTS_OTHER_DEVICE_H_

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "model/backend.h"

namespace phsa {

class LockedPages final : public PageMemory {
 public:
  LockedPages(size_t page_bytes, int32_t num_pages)
      : page_bytes_(page_bytes), bytes_(page_bytes * static_cast<size_t>(num_pages)) {
    void* const memory = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    PHSA_CHECK(memory != MAP_FAILED);
    data_ = static_cast<uint8_t*>(memory);
  }
  ~LockedPages() override { munmap(data_, bytes_); }
  LockedPages(const LockedPages&) = delete;
  LockedPages& operator=(const LockedPages&) = delete;

  // While it lives, the device works.
  class Unlocked {
   public:
    explicit Unlocked(const LockedPages& pages) : pages_(pages) { pages_.Protect(PROT_READ | PROT_WRITE); }
    ~Unlocked() { pages_.Protect(PROT_NONE); }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

   private:
    const LockedPages& pages_;
  };

  uint8_t* data() const override { return data_; }
  bool on_host() const override { return false; }
  void Copy(int32_t from_page, int32_t to_page) override {
    const Unlocked unlocked(*this);
    std::memcpy(Page(to_page), Page(from_page), page_bytes_);
  }
  void Read(int32_t page, size_t offset, std::span<uint8_t> to) const override {
    const Unlocked unlocked(*this);
    std::copy_n(Page(page) + offset, to.size(), to.begin());
  }
  void Write(int32_t page, size_t offset, std::span<const uint8_t> from) override {
    const Unlocked unlocked(*this);
    std::ranges::copy(from, Page(page) + offset);
  }

 private:
  uint8_t* Page(int32_t page) const { return data_ + static_cast<size_t>(page) * page_bytes_; }
  void Protect(int protection) const { PHSA_CHECK(mprotect(data_, bytes_, protection) == 0); }
  size_t page_bytes_, bytes_;
  uint8_t* data_ = nullptr;
};

// Logits of which the device tells the sum and the likeliest few; the others are fetched, and that is counted.
class FetchedLogits final : public LogitsRow {
 public:
  FetchedLogits(const LogitsRow& row, size_t leaders, int64_t& fetched)
      : row_(row), leaders_(row.Top(leaders)), fetched_(fetched) {}
  std::span<const float> All() const override {
    ++fetched_;
    return row_.All();
  }
  float operator[](int32_t token) const override { return row_[token]; }
  double LogSumExp() const override { return row_.LogSumExp(); }
  bool IsFinite() const override { return row_.IsFinite(); }

 protected:
  std::span<const TokenLogit> Leaders() const override { return leaders_; }

 private:
  const LogitsRow& row_;
  std::vector<TokenLogit> leaders_;
  int64_t& fetched_;
};

class OtherDevice final : public ModelBackend {
 public:
  // Steps in which each text gets one token are run as a whole.
  OtherDevice(const ModelConfig& config, std::unique_ptr<ModelBackend> cpu) : config_(config), cpu_(std::move(cpu)) {}

  int32_t device() const override { return PHSA_DEVICE_CPU; }  // the CPU's kernels are what it computes with
  std::string device_name() const override { return "other"; }
  int32_t max_rows() const override { return cpu_->max_rows(); }
  std::unique_ptr<PageMemory> MakePages(size_t page_bytes, int32_t num_pages) override {
    return std::make_unique<LockedPages>(page_bytes, num_pages);
  }
  void Begin(const StepRows& rows) override {
    rows_ = &rows;
    const LockedPages::Unlocked unlocked(Pages());
    cpu_->Begin(rows);
  }
  bool RunLayers(const StepRows& rows) override {
    if (failing_layer >= 0) return false;
    if (std::ranges::count(rows.q_lens, 1) != static_cast<std::ptrdiff_t>(rows.q_lens.size())) return false;
    const LockedPages::Unlocked unlocked(Pages());
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      cpu_->QueriesKeysValues(layer);
      for (const StepGroup& group : rows.groups) {
        PlanDesc desc = PagedPlan(config_, group.settings->ForLayer(layer), rows.cache->layout().kv_type);
        desc.num_seqs = static_cast<int32_t>(group.num_items);
        desc.q_lens = rows.q_lens.data() + group.first_item;
        desc.kv_lens = rows.kv_lens.data() + group.first_item;
        desc.max_threads = 8;
        cpu_->Attend(layer, group, Plan(desc), nullptr);
      }
      cpu_->OutputAndMlp(layer);
    }
    ++whole_steps;
    return true;
  }
  void QueriesKeysValues(int32_t layer) override {
    if (layer == failing_layer) Throw(PHSA_IO, "the other device failed");
    const LockedPages::Unlocked unlocked(Pages());
    cpu_->QueriesKeysValues(layer);
  }
  void Attend(int32_t layer, const StepGroup& group, const Plan& plan, AttentionTrace* trace) override {
    const LockedPages::Unlocked unlocked(Pages());
    cpu_->Attend(layer, group, plan, trace);
  }
  void OutputAndMlp(int32_t layer) override { cpu_->OutputAndMlp(layer); }
  void Logits(const std::function<void(size_t wanted, const LogitsRow& logits)>& use) override {
    cpu_->Logits([&](size_t wanted, const LogitsRow& row) { use(wanted, FetchedLogits(row, 8, fetched)); });
  }
  void TimeStages(bool apart) override { cpu_->TimeStages(apart); }
  const StepTimes& times() const override { return cpu_->times(); }

  int64_t whole_steps = 0;
  int64_t fetched = 0;                      // rows of logits
  std::atomic<int32_t> failing_layer = -1;  // -1: none

 private:
  const LockedPages& Pages() const { return static_cast<const LockedPages&>(rows_->cache->memory()); }
  const ModelConfig& config_;
  std::unique_ptr<ModelBackend> cpu_;
  const StepRows* rows_ = nullptr;
};

}  // namespace phsa

#endif  // PHSA_TESTS_OTHER_DEVICE_H_
