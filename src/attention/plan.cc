// Validation of a batch's shapes, once per step, and the public Plan.
#include "attention/plan.h"

#include <cmath>
#include <limits>

#include "attention/cpu/workspace.h"
#include "attention/cuda/backend.h"
#include "base/errors.h"
#include "base/simd.h"

namespace phsa {
namespace {

void TakeSettings(const Settings& settings, PlanImpl* plan) {
  Validate(settings);
  if (!Runs(settings.policy)) {
    Throw(PHSA_UNSUPPORTED, "plan: policy {} exists in the reference only; allowed: {}", Name(settings.policy),
          PolicyNames());
  }
  plan->settings = settings;
  plan->block = settings.block_size;
  static_cast<BlockRules&>(*plan) = RulesOf(settings);
  static_cast<RepRules&>(*plan) = RepRulesOf(settings);
  plan->representation = RowOf(settings.policy).representation;
  if (HasMeans(settings.policy)) plan->parts = settings.parts;
  plan->survivors = settings.survivors == 0 ? kMaxTokens : std::max(settings.survivors, plan->top_k);
}

// A window is local attention cut off at a token and not at a block.
void TakeWindow(const PlanDesc& desc, PlanImpl* plan) {
  if (desc.window == 0) return;
  if (desc.window < 0 || desc.window > kMaxTokens) {
    ThrowInvalid("plan: window is {}; allowed: 0 (no limit) to {}", desc.window, kMaxTokens);
  }
  if (IsSparse(desc.settings.policy)) {
    Throw(PHSA_UNSUPPORTED, "plan: window is {} with the policy {}; a window takes dense", desc.window,
          Name(desc.settings.policy));
  }
  plan->window = desc.window;
  plan->settings.dense_below = 0;
  plan->dense_blocks = 0;
  plan->init_blocks = 0;
  plan->local_blocks = BlocksFor(desc.window - 1, plan->block);
}

void TakeHeads(const PlanDesc& desc, PlanImpl* plan) {
  if (desc.dtype != PHSA_F32 && desc.dtype != PHSA_F16 && desc.dtype != PHSA_BF16) {
    ThrowInvalid("plan: dtype is {}; allowed: 0 (f32), 1 (f16), 2 (bf16)", desc.dtype);
  }
  if (desc.kv_dtype != 0 && desc.kv_dtype != desc.dtype && desc.kv_dtype != PHSA_INT8) {
    ThrowInvalid("plan: kv_dtype is {}; allowed: 0 (as dtype), {} (the dtype), {} (8-bit codes)", desc.kv_dtype,
                 desc.dtype, static_cast<int>(PHSA_INT8));
  }
  if (desc.num_kv_heads < 1 || desc.num_kv_heads > kMaxHeads) {
    ThrowInvalid("plan: num_kv_heads is {}; allowed: 1 to {}", desc.num_kv_heads, kMaxHeads);
  }
  if (desc.num_q_heads < 1 || desc.num_q_heads > kMaxHeads || desc.num_q_heads % desc.num_kv_heads != 0) {
    ThrowInvalid("plan: num_q_heads is {}; allowed: a multiple of num_kv_heads ({}), at most {}", desc.num_q_heads,
                 desc.num_kv_heads, kMaxHeads);
  }
  if (desc.head_dim != 64 && desc.head_dim != 80 && desc.head_dim != 96 && desc.head_dim != 128 &&
      desc.head_dim != 256) {
    ThrowInvalid("plan: head_dim is {}; allowed: 64, 80, 96, 128, 256", desc.head_dim);
  }
  if (!std::isfinite(desc.scale) || desc.scale < 0) {
    ThrowInvalid("plan: scale is {}; allowed: a positive number, or 0 for 1/sqrt(head_dim)", desc.scale);
  }
  if (desc.max_threads < 0 || desc.max_threads > kMaxThreads) {
    ThrowInvalid("plan: max_threads is {}; allowed: 0 (one) to {}", desc.max_threads, kMaxThreads);
  }
  plan->dtype = desc.dtype;
  plan->kv_dtype = desc.kv_dtype == PHSA_INT8 ? PHSA_INT8 : desc.dtype;
  plan->num_q_heads = desc.num_q_heads;
  plan->num_kv_heads = desc.num_kv_heads;
  plan->group = desc.num_q_heads / desc.num_kv_heads;
  plan->head_dim = desc.head_dim;
  plan->scale = desc.scale > 0 ? desc.scale : 1.0f / std::sqrt(static_cast<float>(desc.head_dim));
  plan->max_threads = std::max(1, desc.max_threads);
  plan->rep_width = plan->representation == Representation::kNone     ? 0
                    : plan->representation == Representation::kBounds ? 2 * desc.head_dim
                                                                      : desc.head_dim;
  plan->selection_heads = plan->settings.group_reduce == GroupReduce::kNone ? plan->num_q_heads : plan->num_kv_heads;

  const Settings& settings = plan->settings;
  if (!settings.head_lambda.empty() && settings.head_lambda.size() != static_cast<size_t>(desc.num_kv_heads)) {
    ThrowInvalid("plan: lambda lists {} values; allowed: one, or one per KV head ({})", settings.head_lambda.size(),
                 desc.num_kv_heads);
  }
  plan->lambda = settings.head_lambda;
  plan->lambda.resize(desc.num_kv_heads, settings.lambda);
  if (HasPlainMeans(settings.policy)) plan->lambda.assign(desc.num_kv_heads, 1.0f);
}

void TakeSequences(const PlanDesc& desc, PlanImpl* plan) {
  if (desc.num_seqs < 1) ThrowInvalid("plan: num_seqs is {}; allowed: 1 and up", desc.num_seqs);
  if (desc.q_lens == nullptr || desc.kv_lens == nullptr) {
    ThrowInvalid("plan: q_lens and kv_lens must point to num_seqs lengths");
  }
  if (desc.page_size < 0 || desc.page_size % plan->block != 0) {
    ThrowInvalid("plan: page_size is {}; allowed: 0 (contiguous) or a multiple of block_size ({})", desc.page_size,
                 plan->block);
  }
  plan->page_size = desc.page_size;
  plan->seqs.reserve(desc.num_seqs);
  int64_t tokens = 0;
  for (int32_t s = 0; s < desc.num_seqs; ++s) {
    PlanSequence seq{};
    seq.q_len = desc.q_lens[s];
    seq.kv_len = desc.kv_lens[s];
    if (seq.q_len < 0 || seq.kv_len < 0 || seq.q_len > seq.kv_len || seq.kv_len > kMaxTokens) {
      ThrowInvalid("plan: sequence {} has q_len {} and kv_len {}; allowed: 0 <= q_len <= kv_len <= {}", s, seq.q_len,
                   seq.kv_len, kMaxTokens);
    }
    seq.q_start = plan->num_queries;
    seq.kv_start = desc.kv_starts != nullptr ? desc.kv_starts[s] : tokens;
    seq.packed_rep_start = plan->num_reps;
    seq.rep_start = desc.rep_starts != nullptr ? desc.rep_starts[s] : plan->num_reps;
    if (seq.kv_start < 0 || seq.rep_start < 0) {
      ThrowInvalid("plan: sequence {} starts at key {} and representative {}; allowed: 0 and up", s, seq.kv_start,
                   seq.rep_start);
    }
    tokens += seq.kv_len;
    plan->num_queries += seq.q_len;
    if (plan->representation != Representation::kNone) plan->num_reps += plan->NumRepRows(seq.kv_len);
    plan->max_kv_len = std::max(plan->max_kv_len, seq.kv_len);
    plan->self_attention = plan->self_attention && seq.q_len == seq.kv_len;
    plan->seqs.push_back(seq);
  }
}

void CheckKv(const PlanImpl& plan, const KeyValues& kv, const char* where, bool values) {
  if (kv.struct_size != sizeof(KeyValues)) {
    ThrowInvalid("{}: kv.struct_size is {}; allowed: {} (use PHSA_INIT)", where, kv.struct_size, sizeof(KeyValues));
  }
  if (kv.k == nullptr || (values && kv.v == nullptr)) ThrowInvalid("{}: kv.k or kv.v is null", where);
  if (plan.page_size > 0 && kv.page_table == nullptr) {
    ThrowInvalid("{}: kv.page_table is null, but the plan has pages of {} tokens", where, plan.page_size);
  }
}

void CheckScales(const PlanImpl& plan, const KvScales& scales, const char* where, bool values) {
  if (plan.kv_dtype == PHSA_INT8 && (scales.k == nullptr || (values && scales.v == nullptr))) {
    ThrowInvalid("{}: kv_scales.k or kv_scales.v is null, but the plan's kv_dtype is {} (8-bit codes)", where,
                 plan.kv_dtype);
  }
}

void CheckExecutor(const PlanImpl& plan, const Executor& executor, const char* where) {
  if (executor.run != nullptr && (executor.num_threads < 1 || executor.num_threads > plan.max_threads)) {
    ThrowInvalid("{}: the executor has {} threads; allowed: 1 to the plan's max_threads ({})", where,
                 executor.num_threads, plan.max_threads);
  }
}

void CheckWorkspace(const void* workspace, size_t size, size_t needed, const char* where) {
  if (needed > 0 && (workspace == nullptr || size < needed || reinterpret_cast<uintptr_t>(workspace) % 64 != 0)) {
    ThrowInvalid("{}: the workspace has {} bytes at {}; it needs {} bytes aligned to 64", where,
                 workspace == nullptr ? 0 : size, workspace, needed);
  }
}

const Backend& ActiveBackend() { return ActiveSimd() == Simd::kReference ? ReferenceBackend() : CpuBackend(); }

// What a stage reads and writes.
enum class Needs { kKeys, kQueries, kAll, kForward };

void CheckForward(const PlanImpl& plan, const ForwardParams& params, const char* where, Needs needs) {
  if (params.struct_size != sizeof(ForwardParams)) {
    ThrowInvalid("{}: struct_size is {}; allowed: {} (use PHSA_INIT)", where, params.struct_size,
                 sizeof(ForwardParams));
  }
  const bool attends = needs == Needs::kAll || needs == Needs::kForward;
  CheckKv(plan, params.kv, where, attends);
  CheckScales(plan, params.kv_scales, where, attends);
  CheckExecutor(plan, params.executor, where);
  if (needs != Needs::kKeys && params.q == nullptr) ThrowInvalid("{}: q is null", where);
  if (attends && params.out == nullptr) ThrowInvalid("{}: out is null", where);
  if (params.kv_lens != nullptr && (needs != Needs::kForward || plan.device != PHSA_DEVICE_CUDA)) {
    Throw(PHSA_UNSUPPORTED, "{}: kv_lens is given; allowed: in phsa_forward with a plan for CUDA", where);
  }
  CheckWorkspace(params.workspace, params.workspace_size, plan.workspace_size, where);
}

// Needs no workspace.
void RepresentOnCpu(const PlanImpl& plan, const ForwardParams& params) {
  CheckKv(plan, params.kv, "represent", false);
  CheckScales(plan, params.kv_scales, "represent", false);
  CheckExecutor(plan, params.executor, "represent");
  if (plan.num_reps == 0) return;  // nothing to represent, or no block complete yet
  if (params.kv.reps == nullptr) ThrowInvalid("represent: kv.reps is null");
  ActiveBackend().represent(plan, params);
}

}  // namespace

Plan::Plan(const PlanDesc& desc) {
  auto plan = std::make_unique<PlanImpl>();
  TakeSettings(desc.settings, plan.get());
  TakeWindow(desc, plan.get());
  TakeHeads(desc, plan.get());
  TakeSequences(desc, plan.get());
  if (desc.device == PHSA_DEVICE_CUDA) {
    if (plan->kv_dtype == PHSA_INT8) {
      Throw(PHSA_UNSUPPORTED, "plan: kv_dtype is {} (8-bit codes) on device 1 (CUDA); allowed there: 0 (as dtype)",
            plan->kv_dtype);
    }
    plan->device = desc.device;
    cuda::Prepare(plan.get());
  } else if (desc.device == PHSA_DEVICE_CPU) {
    plan->workspace_size = cpu::ForwardWorkspaceSize(*plan);
    plan->backward_workspace_size = cpu::BackwardWorkspaceSize(*plan);
  } else {
    ThrowInvalid("plan: device is {}; allowed: 0 (the CPU), 1 (CUDA)", desc.device);
  }
  impl_ = std::move(plan);
}

Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;

size_t Plan::WorkspaceSize() const { return impl_->workspace_size; }
size_t Plan::BackwardWorkspaceSize() const { return impl_->backward_workspace_size; }
int64_t Plan::NumReps() const { return impl_->num_reps; }
int32_t Plan::RepWidth() const { return impl_->rep_width; }
int32_t Plan::RepStride() const { return impl_->rep_stride; }
int32_t Plan::SelectionHeads() const { return impl_->selection_heads; }
int32_t Plan::SelectionSlots() const { return impl_->top_k; }
int64_t Plan::NumQueries() const { return impl_->num_queries; }

void Plan::Represent(const KeyValues& kv, const Executor& executor) const {
  if (impl_->device == PHSA_DEVICE_CUDA) {
    throw Error(PHSA_UNSUPPORTED, "represent: a plan for CUDA needs a workspace and a stream; use phsa_represent_with");
  }
  if (impl_->kv_dtype == PHSA_INT8) {
    throw Error(PHSA_UNSUPPORTED, "represent: keys that are codes need their scales; use phsa_represent_with");
  }
  auto params = Init<ForwardParams>();
  params.kv = kv;
  params.executor = executor;
  RepresentOnCpu(*impl_, params);
}

void Plan::Represent(const ForwardParams& params) const {
  if (impl_->device == PHSA_DEVICE_CPU) return RepresentOnCpu(*impl_, params);
  CheckForward(*impl_, params, "represent", Needs::kKeys);
  if (impl_->num_reps == 0) return;
  if (params.kv.reps == nullptr) ThrowInvalid("represent: kv.reps is null");
  cuda::Represent(*impl_, params);
}

void Plan::Select(const ForwardParams& params) const {
  CheckForward(*impl_, params, "select", Needs::kQueries);
  if (impl_->top_k == 0) return;
  if (params.selection == nullptr) ThrowInvalid("select: selection is null");
  if (impl_->device == PHSA_DEVICE_CUDA) return cuda::Select(*impl_, params);
  ActiveBackend().select(*impl_, params);
}

void Plan::Attend(const ForwardParams& params) const {
  CheckForward(*impl_, params, "attend", Needs::kAll);
  if (impl_->top_k > 0 && params.selection == nullptr) ThrowInvalid("attend: selection is null");
  if (impl_->device == PHSA_DEVICE_CUDA) return cuda::Attend(*impl_, params);
  CheckSelection(*impl_, params.selection, "attend");
  ActiveBackend().attend(*impl_, params);
}

void Plan::Forward(const ForwardParams& params) const {
  CheckForward(*impl_, params, "forward", Needs::kForward);
  if (impl_->device == PHSA_DEVICE_CUDA) return cuda::Forward(*impl_, params);
  ActiveBackend().forward(*impl_, params);
}

void Plan::Backward(const BackwardParams& params) const {
  const PlanImpl& plan = *impl_;
  if (params.struct_size != sizeof(BackwardParams)) {
    ThrowInvalid("backward: struct_size is {}; allowed: {} (use PHSA_INIT)", params.struct_size,
                 sizeof(BackwardParams));
  }
  if (plan.kv_dtype == PHSA_INT8) {
    Throw(PHSA_UNSUPPORTED, "backward: kv_dtype is {} (8-bit codes); allowed: 0 (as dtype)", plan.kv_dtype);
  }
  CheckKv(plan, params.kv, "backward", true);
  CheckExecutor(plan, params.executor, "backward");
  if (plan.window > 0) Throw(PHSA_UNSUPPORTED, "backward: window is {}; allowed: 0", plan.window);
  if (plan.page_size > 0 || !plan.self_attention) {
    throw Error(PHSA_UNSUPPORTED,
                "backward: allowed: contiguous keys (page_size 0) and q_len = kv_len for every sequence");
  }
  if (params.q == nullptr || params.out == nullptr || params.lse == nullptr || params.d_out == nullptr ||
      params.d_q == nullptr || params.d_k == nullptr || params.d_v == nullptr) {
    ThrowInvalid("backward: q, out, lse, d_out, d_q, d_k or d_v is null");
  }
  if (plan.top_k > 0 && params.selection == nullptr) ThrowInvalid("backward: selection is null");
  CheckWorkspace(params.workspace, params.workspace_size, plan.backward_workspace_size, "backward");
  if (plan.device == PHSA_DEVICE_CUDA) return cuda::Backward(plan, params);
  CheckSelection(plan, params.selection, "backward");
  ActiveBackend().backward(plan, params);
}

// Kernels trust their lists, and these may come from a file or from Python: one cheap pass keeps them in bounds. Lists
// are as long as they can be, so that "all candidates are taken" follows from the position alone.
void CheckSelection(const PlanImpl& plan, const int32_t* selection, const char* where) {
  if (plan.top_k == 0) return;
  const int64_t row_size = int64_t{plan.selection_heads} * plan.top_k;
  for (const PlanSequence& seq : plan.seqs) {
    for (int32_t i = 0; i < seq.q_len; ++i) {
      const int32_t b = (seq.first_position() + i) / plan.block;
      const int32_t end = plan.CandidateEnd(b), count = plan.Chosen(b);
      const int32_t* row = selection + (seq.q_start + i) * row_size;
      for (int32_t h = 0; h < plan.selection_heads; ++h, row += plan.top_k) {
        int32_t last = plan.init_blocks - 1;
        for (int32_t j = 0; j < plan.top_k; ++j) {
          const bool valid = j < count ? row[j] > last && row[j] < end : row[j] == -1;
          if (!valid) {
            ThrowInvalid(
                "{}: selection of query {}, head {}, slot {} is {}; allowed: {} ascending blocks of [{}, {}), then -1",
                where, seq.q_start + i, h, j, row[j], count, plan.init_blocks, end);
          }
          last = row[j];
        }
      }
    }
  }
}

void Plan::TokensRead(const int32_t* selection, int64_t* read, int64_t* dense) const {
  const PlanImpl& plan = *impl_;
  if (read == nullptr || dense == nullptr) ThrowInvalid("tokens_read: read or dense is null");
  *read = *dense = 0;
  for (const PlanSequence& seq : plan.seqs) {
    for (int32_t i = 0; i < seq.q_len; ++i) {
      const int32_t position = seq.first_position() + i;
      const int64_t chosen = selection == nullptr ? plan.Chosen(position / plan.block) : 0;
      *dense += (int64_t{position} + 1) * plan.num_q_heads;
      *read += plan.TokensRead(position, chosen, plan.block) * plan.num_q_heads;
      if (selection == nullptr || plan.top_k == 0) continue;
      const int32_t* row = selection + (seq.q_start + i) * int64_t{plan.selection_heads} * plan.top_k;
      for (int64_t j = 0; j < int64_t{plan.selection_heads} * plan.top_k; ++j) {
        if (row[j] >= 0) *read += int64_t{plan.block} * plan.rows_of_group();
      }
    }
  }
}

}  // namespace phsa
