// The attention itself, for C++: a plan for a batch, then the stages. The structs are those of the C ABI.
#ifndef PHSA_ATTENTION_H_
#define PHSA_ATTENTION_H_

#include <cstdint>
#include <memory>

#include "phsa/c.h"
#include "phsa/error.h"
#include "phsa/settings.h"

namespace phsa {

using KeyValues = phsa_kv;
using KvScales = phsa_kv_scales;
using Executor = phsa_executor;
using ForwardParams = phsa_forward_params;
using BackwardParams = phsa_backward_params;

// Zero, with struct_size set.
template <class T>
T Init() {
  T t{};
  t.struct_size = sizeof(T);
  return t;
}

struct PlanDesc {
  Settings settings;
  int32_t dtype = PHSA_F32;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t num_seqs = 0;
  const int32_t* q_lens = nullptr;
  const int32_t* kv_lens = nullptr;
  const int64_t* kv_starts = nullptr;
  const int64_t* rep_starts = nullptr;
  int32_t page_size = 0;
  float scale = 0;
  int32_t max_threads = 1;
  int32_t device = PHSA_DEVICE_CPU;
  int32_t kv_dtype = 0;  // PHSA_INT8: k and v are codes with scales; 0: they have dtype
  // Tokens that a query attends to at most, its own included; 0: no limit. For the layers of models with sliding
  // windows: with the policy dense, forward only.
  int32_t window = 0;
};

struct PlanImpl;

// What phsa_plan is in C; the comments of phsa/c.h hold. All throw phsa::Error.
class PHSA_API Plan {
 public:
  explicit Plan(const PlanDesc& desc);
  ~Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;

  size_t WorkspaceSize() const;
  size_t BackwardWorkspaceSize() const;
  int64_t NumReps() const;
  int32_t RepWidth() const;
  int32_t RepStride() const;
  int32_t SelectionHeads() const;
  int32_t SelectionSlots() const;
  int64_t NumQueries() const;

  void Represent(const KeyValues& kv, const Executor& executor) const;
  void Represent(const ForwardParams& params) const;
  void Select(const ForwardParams& params) const;
  void Attend(const ForwardParams& params) const;
  void Forward(const ForwardParams& params) const;
  void Backward(const BackwardParams& params) const;
  void TokensRead(const int32_t* selection, int64_t* read, int64_t* dense) const;

  const PlanImpl& impl() const { return *impl_; }  // for phsa itself

 private:
  std::unique_ptr<const PlanImpl> impl_;
};

}  // namespace phsa

#endif  // PHSA_ATTENTION_H_
