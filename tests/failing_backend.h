// A backend that fails in the steps that a test says, wherever in them.
#ifndef PHSA_TESTS_FAILING_BACKEND_H_
#define PHSA_TESTS_FAILING_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "model/backend.h"

namespace phsa {

class FailingBackend final : public ModelBackend {
 public:
  enum class Where : uint8_t { kBegin, kLayer, kLogits };  // kLogits: behind those of the first row
  explicit FailingBackend(std::unique_ptr<ModelBackend> backend) : backend_(std::move(backend)) {}

  int32_t device() const override { return backend_->device(); }
  std::string device_name() const override { return backend_->device_name(); }
  int32_t max_rows() const override { return backend_->max_rows(); }
  std::unique_ptr<PageMemory> MakePages(size_t page_bytes, int32_t num_pages) override {
    return backend_->MakePages(page_bytes, num_pages);
  }
  void Begin(const StepRows& rows) override {
    failing_ = fails && fails(rows);
    FailAt(Where::kBegin);
    backend_->Begin(rows);
  }
  bool RunLayers(const StepRows& rows) override { return backend_->RunLayers(rows); }
  void QueriesKeysValues(int32_t layer) override { backend_->QueriesKeysValues(layer); }
  void Attend(int32_t layer, const StepGroup& group, const Plan& plan, AttentionTrace* trace) override {
    backend_->Attend(layer, group, plan, trace);
  }
  void OutputAndMlp(int32_t layer) override {
    FailAt(Where::kLayer);
    backend_->OutputAndMlp(layer);
  }
  void Logits(const std::function<void(size_t wanted, const LogitsRow& logits)>& use) override {
    backend_->Logits([&](size_t wanted, const LogitsRow& logits) {
      use(wanted, logits);
      FailAt(Where::kLogits);
    });
    FailAt(Where::kLogits);
  }
  void TimeStages(bool apart) override { backend_->TimeStages(apart); }
  const StepTimes& times() const override { return backend_->times(); }

  std::function<bool(const StepRows&)> fails;  // whether this step does
  Where where = Where::kLayer;
  std::function<void()> fail = [] { throw std::bad_alloc(); };

 private:
  void FailAt(Where at) const {
    if (failing_ && at == where) fail();
  }
  std::unique_ptr<ModelBackend> backend_;
  bool failing_ = false;
};

}  // namespace phsa

#endif  // PHSA_TESTS_FAILING_BACKEND_H_
