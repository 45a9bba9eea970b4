// The operators phsa_kernels::*, over the C ABI, for tensors on the CPU or on a CUDA device. Python (phsa/ops.py)
// allocates the outputs and has checked that every sequence lies within its tensors; shapes, types and strides are
// checked here, settings by the plan.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <string>

#include "phsa/c.h"
#include "status.h"
#include "threads.h"

namespace phsa_torch {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

void Require(bool condition, const char* name, const char* what) {
  if (!condition) Refuse(std::string("phsa_kernels: ") + name + " " + what);
}

int32_t Dtype(const Tensor& q) {
  switch (q.scalar_type()) {
    case ScalarType::Float: return PHSA_F32;
    case ScalarType::Half: return PHSA_F16;
    case ScalarType::BFloat16: return PHSA_BF16;
    default: Refuse("phsa_kernels: the dtype must be float32, float16 or bfloat16");
  }
}

// Where the tensors of a call are: where q is.
int32_t DeviceOf(const Tensor& q) { return q.is_cuda() ? PHSA_DEVICE_CUDA : PHSA_DEVICE_CPU; }

void RequireDevice(const Tensor& tensor, const char* name, int32_t device) {
  const bool there = device == PHSA_DEVICE_CUDA ? tensor.is_cuda() : tensor.is_cpu();
  Require(there, name, device == PHSA_DEVICE_CUDA ? "must be on the CUDA device" : "must be on the CPU");
}

// The last dimension has `width` elements, one behind the other; `dimensions` says how many there must be.
void RequireRows(const Tensor& tensor, const char* name, ScalarType type, int64_t width, int32_t device, int64_t last,
                 const char* dimensions) {
  RequireDevice(tensor, name, device);
  Require(tensor.dim() == last + 1, name, dimensions);
  Require(tensor.scalar_type() == type, name, "has another dtype than q");
  Require(tensor.size(last) == width, name, "has a wrong last dimension");
  Require(width <= 1 || tensor.stride(last) == 1, name, "must be contiguous in the last dimension");
}

// A tensor (rows, heads, width) whose last dimension is contiguous.
struct Rows {
  Rows(const Tensor& tensor, const char* name, ScalarType type, int64_t width, int32_t device) {
    RequireRows(tensor, name, type, width, device, 2, "must have 3 dimensions");
    data = tensor.data_ptr();
    rows = tensor.size(0);
    heads = tensor.size(1);
    row_stride = tensor.stride(0);
    head_stride = tensor.stride(1);
  }
  // The kernels want a pointer even where there is nothing to read.
  void* pointer() const { return data != nullptr ? data : const_cast<char*>(&kNothing); }

  alignas(16) static constexpr char kNothing = 0;
  void* data;
  int64_t rows, heads, row_stride, head_stride;
};

// A tensor (pages, rows, heads, width) whose last dimension is contiguous, such as a view of a serving engine's cache.
struct Pages {
  Pages(const Tensor& tensor, const char* name, ScalarType type, int64_t width, int32_t device) {
    RequireRows(tensor, name, type, width, device, 3, "must have 4 dimensions");
    data = tensor.data_ptr();
    pages = tensor.size(0);
    rows = tensor.size(1);
    heads = tensor.size(2);
    page_stride = tensor.stride(0);
    row_stride = tensor.stride(1);
    head_stride = tensor.stride(2);
  }

  void* data;
  int64_t pages, rows, heads, page_stride, row_stride, head_stride;
};

// A contiguous tensor of that many elements.
template <class T>
T* Elements(const Tensor& tensor, const char* name, ScalarType type, int64_t count, int32_t device) {
  RequireDevice(tensor, name, device);
  Require(tensor.scalar_type() == type, name, "has a wrong dtype");
  Require(tensor.is_contiguous(), name, "must be contiguous");
  Require(tensor.numel() == count, name, "has a wrong number of elements");
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
T* Elements(const MaybeTensor& tensor, const char* name, ScalarType type, int64_t count, int32_t device) {
  return tensor ? Elements<T>(*tensor, name, type, count, device) : nullptr;
}

struct Layout {
  const Tensor& q_lens;
  const Tensor& kv_lens;
  const Tensor* kv_starts;
  const Tensor* rep_starts;
  int64_t page_size = 0;
};

struct SettingArgs {
  int64_t policy, block, init, local, top_k;
  double lam;
  const MaybeTensor& head_lambda;
  int64_t group_reduce, dense_below, parts, survivors;
  double scale;
};

class Plan {
 public:
  Plan(int32_t device, int32_t dtype, int64_t q_heads, int64_t kv_heads, int64_t head_dim, const Layout& layout,
       const SettingArgs& args, int64_t threads) {
    // Lengths, starts and lambdas are in host memory for every device.
    constexpr int32_t kHost = PHSA_DEVICE_CPU;
    phsa_settings settings = PHSA_INIT(phsa_settings);
    settings.policy = static_cast<int32_t>(args.policy);
    settings.block_size = static_cast<int32_t>(args.block);
    settings.init_tokens = static_cast<int32_t>(args.init);
    settings.local_tokens = static_cast<int32_t>(args.local);
    settings.top_k = static_cast<int32_t>(args.top_k);
    settings.lambda = static_cast<float>(args.lam);
    settings.group_reduce = static_cast<int32_t>(args.group_reduce);
    settings.dense_below = static_cast<int32_t>(args.dense_below);
    settings.parts = static_cast<int32_t>(args.parts);
    settings.survivors = static_cast<int32_t>(args.survivors);
    settings.head_lambda = Elements<float>(args.head_lambda, "head_lambda", ScalarType::Float, kv_heads, kHost);

    const int64_t seqs = layout.q_lens.numel();
    phsa_plan_desc desc = PHSA_INIT(phsa_plan_desc);
    desc.settings = &settings;
    desc.dtype = dtype;
    desc.num_q_heads = static_cast<int32_t>(q_heads);
    desc.num_kv_heads = static_cast<int32_t>(kv_heads);
    desc.head_dim = static_cast<int32_t>(head_dim);
    desc.num_seqs = static_cast<int32_t>(seqs);
    desc.q_lens = Elements<int32_t>(layout.q_lens, "q_lens", ScalarType::Int, seqs, kHost);
    desc.kv_lens = Elements<int32_t>(layout.kv_lens, "kv_lens", ScalarType::Int, seqs, kHost);
    if (layout.kv_starts != nullptr) {
      desc.kv_starts = Elements<int64_t>(*layout.kv_starts, "kv_starts", ScalarType::Long, seqs, kHost);
    }
    if (layout.rep_starts != nullptr) {
      desc.rep_starts = Elements<int64_t>(*layout.rep_starts, "rep_starts", ScalarType::Long, seqs, kHost);
    }
    desc.page_size = static_cast<int32_t>(layout.page_size);
    desc.scale = static_cast<float>(args.scale);
    desc.max_threads = static_cast<int32_t>(threads);
    desc.device = device;
    phsa_plan* plan = nullptr;
    Check(phsa_plan_create(&desc, &plan));
    plan_.reset(plan);
  }

  const phsa_plan* get() const { return plan_.get(); }
  int64_t SelectionSize(int64_t queries) const {
    return queries * phsa_plan_selection_heads(get()) * phsa_plan_selection_slots(get());
  }

 private:
  struct Destroy {
    void operator()(phsa_plan* plan) const { phsa_plan_destroy(plan); }
  };
  std::unique_ptr<phsa_plan, Destroy> plan_;
};

// Scratch memory of the calling thread, kept between calls: a layer would otherwise fault the same pages in again.
void* HostWorkspace(size_t size) {
  constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t capacity = 0;
  if (size > capacity) {
    memory.reset();
    capacity = 0;
    const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    memory.reset(std::aligned_alloc(kAlignment, rounded));
    if (!memory) throw std::bad_alloc();
    capacity = rounded;
  }
  return memory.get();
}

// Scratch memory where q is. On a CUDA device it comes from torch's allocator, which may give it away again as soon as
// the call has queued its work: what comes after runs on the same stream.
class Workspace {
 public:
  Workspace(const Tensor& q, size_t size) {
    if (q.is_cuda()) {
      const int64_t shape[] = {static_cast<int64_t>(size)};
      tensor_ = torch::stable::new_empty(q, shape, ScalarType::Byte);
      data_ = tensor_->data_ptr();
    } else {
      data_ = HostWorkspace(size);
    }
  }
  void* data() const { return data_; }

 private:
  MaybeTensor tensor_;
  void* data_;
};

void* Stream(int64_t stream) { return reinterpret_cast<void*>(static_cast<uintptr_t>(stream)); }

phsa_kv KeyValues(const Rows& k, const Rows* v, const MaybeTensor& flags, int32_t device) {
  phsa_kv kv = PHSA_INIT(phsa_kv);
  kv.k = k.pointer();
  kv.k_token_stride = k.row_stride;
  kv.k_head_stride = k.head_stride;
  if (v != nullptr) {
    Require(v->rows == k.rows && v->heads == k.heads, "v", "has another shape than k");
    kv.v = v->pointer();
    kv.v_token_stride = v->row_stride;
    kv.v_head_stride = v->head_stride;
  }
  kv.flags = Elements<uint8_t>(flags, "flags", ScalarType::Byte, k.rows, device);
  return kv;
}

void AddReps(const Rows& reps, int64_t kv_heads, phsa_kv* kv) {
  Require(reps.heads == kv_heads, "reps", "has a wrong number of heads");
  kv->reps = reps.pointer();
  kv->rep_row_stride = reps.row_stride;
  kv->rep_head_stride = reps.head_stride;
}

template <class Params>
void SetQueries(const Rows& queries, Params* params) {
  params->q = queries.pointer();
  params->q_token_stride = queries.row_stride;
  params->q_head_stride = queries.head_stride;
}

template <class Params>
void SetOut(const Rows& out, Params* params) {
  params->out = out.pointer();
  params->out_token_stride = out.row_stride;
  params->out_head_stride = out.head_stride;
}

// `out` where the attention of these queries is written.
void SetOutFor(const Rows& queries, const Tensor& out, ScalarType type, int64_t width, int32_t device,
               phsa_forward_params* params) {
  const Rows outputs(out, "out", type, width, device);
  Require(outputs.rows == queries.rows && outputs.heads == queries.heads, "out", "has another shape than q");
  SetOut(outputs, params);
}

// Runs `stage` with scratch memory where `like` is.
template <class Params>
void Run(phsa_status (*stage)(const phsa_plan*, const Params*), const Plan& plan, Params* params, size_t workspace_size,
         const Tensor& like, int64_t threads, int64_t stream) {
  params->workspace_size = workspace_size;
  const Workspace workspace(like, workspace_size);
  params->workspace = workspace.data();
  params->stream = Stream(stream);
  const Threads pool = Threads::Get(static_cast<int32_t>(threads));
  params->executor = pool.executor();
  Check(stage(plan.get(), params));
}

void RunForward(phsa_status (*stage)(const phsa_plan*, const phsa_forward_params*), const Plan& plan,
                phsa_forward_params* params, const Tensor& like, int64_t threads, int64_t stream) {
  Run(stage, plan, params, phsa_plan_workspace_size(plan.get()), like, threads, stream);
}

void Represent(Tensor k, MaybeTensor flags, Tensor q_lens, Tensor kv_lens, Tensor kv_starts, Tensor rep_starts,
               int64_t policy, int64_t block, int64_t init, int64_t local, int64_t top_k, double lam,
               MaybeTensor head_lambda, int64_t group_reduce, int64_t dense_below, int64_t parts, int64_t survivors,
               int64_t threads, int64_t stream, Tensor reps) {
  Require(k.dim() == 3, "k", "must have 3 dimensions");
  const ScalarType type = k.scalar_type();
  const int32_t device = DeviceOf(k);
  const Rows keys(k, "k", type, k.size(2), device);
  const Plan plan(device, Dtype(k), keys.heads, keys.heads, k.size(2), {q_lens, kv_lens, &kv_starts, &rep_starts},
                  {policy, block, init, local, top_k, lam, head_lambda, group_reduce, dense_below, parts, survivors, 0},
                  threads);
  phsa_forward_params params = PHSA_INIT(phsa_forward_params);
  params.kv = KeyValues(keys, nullptr, flags, device);
  AddReps(Rows(reps, "reps", type, phsa_plan_rep_width(plan.get()), device), keys.heads, &params.kv);
  RunForward(&phsa_represent_with, plan, &params, k, threads, stream);
}

// Whether the device's kernels take such a call: refuses as the call itself would.
void CheckPlan(Tensor lens, int64_t dtype, int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t policy,
               int64_t block, int64_t init, int64_t local, int64_t top_k, double lam, MaybeTensor head_lambda,
               int64_t group_reduce, int64_t dense_below, int64_t parts, int64_t survivors, int64_t device) {
  const Tensor starts = torch::stable::new_empty(lens, {1}, ScalarType::Long);
  *static_cast<int64_t*>(starts.data_ptr()) = 0;
  Plan(static_cast<int32_t>(device), static_cast<int32_t>(dtype), q_heads, kv_heads, head_dim,
       {lens, lens, &starts, nullptr},
       {policy, block, init, local, top_k, lam, head_lambda, group_reduce, dense_below, parts, survivors, 0}, 1);
}

// With v: attention. Without: the selection alone.
void Forward(Tensor q, Tensor k, MaybeTensor v, MaybeTensor flags, MaybeTensor reps, Tensor q_lens, Tensor kv_lens,
             Tensor kv_starts, Tensor rep_starts, int64_t policy, int64_t block, int64_t init, int64_t local,
             int64_t top_k, double lam, MaybeTensor head_lambda, int64_t group_reduce, int64_t dense_below,
             int64_t parts, int64_t survivors, double scale, int64_t threads, int64_t stream, MaybeTensor out,
             MaybeTensor lse, Tensor selection, MaybeTensor scores) {
  Require(q.dim() == 3, "q", "must have 3 dimensions");
  const ScalarType type = q.scalar_type();
  const int64_t head_dim = q.size(2);
  const int32_t device = DeviceOf(q);
  const Rows queries(q, "q", type, head_dim, device);
  const Rows keys(k, "k", type, head_dim, device);
  const Plan plan(
      device, Dtype(q), queries.heads, keys.heads, head_dim, {q_lens, kv_lens, &kv_starts, &rep_starts},
      {policy, block, init, local, top_k, lam, head_lambda, group_reduce, dense_below, parts, survivors, scale},
      threads);

  phsa_forward_params params = PHSA_INIT(phsa_forward_params);
  SetQueries(queries, &params);
  if (v) {
    const Rows values(*v, "v", type, head_dim, device);
    params.kv = KeyValues(keys, &values, flags, device);
    Require(out.has_value() && lse.has_value(), "out", "and lse are needed with v");
    SetOutFor(queries, *out, type, head_dim, device, &params);
    params.lse = Elements<float>(lse, "lse", ScalarType::Float, queries.rows * queries.heads, device);
  } else {
    params.kv = KeyValues(keys, nullptr, flags, device);
  }
  const int32_t rep_width = phsa_plan_rep_width(plan.get());
  if (reps && rep_width > 0) AddReps(Rows(*reps, "reps", type, rep_width, device), keys.heads, &params.kv);
  const int64_t selection_size = plan.SelectionSize(queries.rows);
  params.selection = Elements<int32_t>(selection, "selection", ScalarType::Int, selection_size, device);
  params.selection_scores = Elements<float>(scores, "scores", ScalarType::Float, selection_size, device);
  if (v || selection_size > 0) RunForward(v ? &phsa_forward : &phsa_select, plan, &params, q, threads, stream);
}

phsa_kv PagedKeyValues(const Pages& keys, const Pages& values, const MaybeTensor& flags, int32_t device) {
  phsa_kv kv = PHSA_INIT(phsa_kv);
  kv.k = keys.data;
  kv.k_token_stride = keys.row_stride;
  kv.k_head_stride = keys.head_stride;
  kv.k_page_stride = keys.page_stride;
  kv.v = values.data;
  kv.v_token_stride = values.row_stride;
  kv.v_head_stride = values.head_stride;
  kv.v_page_stride = values.page_stride;
  if (flags) {
    RequireDevice(*flags, "flags", device);
    Require(flags->scalar_type() == ScalarType::Byte, "flags", "has a wrong dtype");
    Require(flags->dim() == 2 && flags->size(0) == keys.pages && flags->size(1) == keys.rows && flags->stride(1) == 1,
            "flags", "must be (pages, page_size), contiguous in the last dimension");
    kv.flags = static_cast<const uint8_t*>(flags->data_ptr());
    kv.flags_page_stride = flags->stride(0);
  }
  return kv;
}

void AddPagedReps(const Pages& reps, const Pages& keys, const Plan& plan, phsa_kv* kv) {
  Require(
      reps.pages == keys.pages && reps.heads == keys.heads && reps.rows == keys.rows / phsa_plan_rep_stride(plan.get()),
      "reps", "must be (pages, rows of a page, kv_heads, width)");
  kv->reps = reps.data;
  kv->rep_row_stride = reps.row_stride;
  kv->rep_head_stride = reps.head_stride;
  kv->rep_page_stride = reps.page_stride;
}

// Every page that a sequence's keys lie on must be there.
void AddPageTable(const Tensor& page_table, const Tensor& kv_lens, const Pages& keys, int32_t device, phsa_kv* kv) {
  RequireDevice(page_table, "page_table", device);
  Require(page_table.scalar_type() == ScalarType::Int && page_table.dim() == 2 && page_table.stride(1) == 1,
          "page_table", "must be int32 (sequences, pages), contiguous in the last dimension");
  Require(page_table.size(0) == kv_lens.numel(), "page_table", "has another number of sequences than kv_lens");
  const auto* const lens = static_cast<const int32_t*>(kv_lens.data_ptr());
  for (int64_t s = 0; s < kv_lens.numel(); ++s) {
    const int64_t needed = (lens[s] + keys.rows - 1) / keys.rows;
    Require(needed <= page_table.size(1), "page_table", "has too few pages for a sequence");
    if (device != PHSA_DEVICE_CPU) continue;  // the device's numbers are its own
    const auto* const pages = static_cast<const int32_t*>(page_table.data_ptr()) + s * page_table.stride(0);
    for (int64_t i = 0; i < needed; ++i) {
      Require(pages[i] >= 0 && pages[i] < keys.pages, "page_table", "names a page that does not exist");
    }
  }
  kv->page_table = static_cast<const int32_t*>(page_table.data_ptr());
  kv->page_table_stride = page_table.stride(0);
}

// Attention over keys on pages, such as those of a serving engine, where they are: k, v (pages, page_size, kv_heads,
// head_dim), flags (pages, page_size), reps (pages, rows, kv_heads, width), of any strides but the last; page_table
// (sequences, at least as many pages as the longest sequence has). device_lens: see phsa_forward_params.kv_lens.
void ForwardPaged(Tensor q, Tensor k, Tensor v, MaybeTensor flags, MaybeTensor reps, MaybeTensor sinks, Tensor q_lens,
                  Tensor kv_lens, Tensor page_table, MaybeTensor device_lens, int64_t policy, int64_t block,
                  int64_t init, int64_t local, int64_t top_k, double lam, MaybeTensor head_lambda, int64_t group_reduce,
                  int64_t dense_below, int64_t parts, int64_t survivors, double scale, int64_t threads, int64_t stream,
                  Tensor out, MaybeTensor selection) {
  Require(q.dim() == 3, "q", "must have 3 dimensions");
  const ScalarType type = q.scalar_type();
  const int64_t head_dim = q.size(2);
  const int32_t device = DeviceOf(q);
  const Rows queries(q, "q", type, head_dim, device);
  const Pages keys(k, "k", type, head_dim, device);
  const Pages values(v, "v", type, head_dim, device);
  Require(values.pages == keys.pages && values.rows == keys.rows && values.heads == keys.heads, "v",
          "has another shape than k");
  const Plan plan(
      device, Dtype(q), queries.heads, keys.heads, head_dim, {q_lens, kv_lens, nullptr, nullptr, keys.rows},
      {policy, block, init, local, top_k, lam, head_lambda, group_reduce, dense_below, parts, survivors, scale},
      threads);

  phsa_forward_params params = PHSA_INIT(phsa_forward_params);
  SetQueries(queries, &params);
  SetOutFor(queries, out, type, head_dim, device, &params);
  params.kv = PagedKeyValues(keys, values, flags, device);
  const int32_t rep_width = phsa_plan_rep_width(plan.get());
  if (reps && rep_width > 0) AddPagedReps(Pages(*reps, "reps", type, rep_width, device), keys, plan, &params.kv);
  const auto* const new_lens = static_cast<const int32_t*>(q_lens.data_ptr());
  Require(std::accumulate(new_lens, new_lens + q_lens.numel(), int64_t{0}) == queries.rows, "q",
          "has another number of tokens than q_lens");
  AddPageTable(page_table, kv_lens, keys, device, &params.kv);
  params.sinks = Elements<float>(sinks, "sinks", ScalarType::Float, queries.heads, device);
  params.kv_lens = Elements<int32_t>(device_lens, "device_lens", ScalarType::Int, kv_lens.numel(), device);
  params.selection =
      Elements<int32_t>(selection, "selection", ScalarType::Int, plan.SelectionSize(queries.rows), device);
  RunForward(&phsa_forward, plan, &params, q, threads, stream);
}

void Backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor selection, Tensor q_lens,
              Tensor kv_lens, Tensor kv_starts, int64_t policy, int64_t block, int64_t init, int64_t local,
              int64_t top_k, double lam, MaybeTensor head_lambda, int64_t group_reduce, int64_t dense_below,
              int64_t parts, int64_t survivors, double scale, int64_t threads, int64_t stream, Tensor d_q, Tensor d_k,
              Tensor d_v) {
  Require(q.dim() == 3, "q", "must have 3 dimensions");
  const ScalarType type = q.scalar_type();
  const int64_t head_dim = q.size(2);
  const int32_t device = DeviceOf(q);
  const Rows queries(q, "q", type, head_dim, device);
  const Rows keys(k, "k", type, head_dim, device);
  const Rows values(v, "v", type, head_dim, device);
  const Plan plan(
      device, Dtype(q), queries.heads, keys.heads, head_dim, {q_lens, kv_lens, &kv_starts, nullptr},
      {policy, block, init, local, top_k, lam, head_lambda, group_reduce, dense_below, parts, survivors, scale},
      threads);
  const auto like = [&](const Tensor& tensor, const char* name, const Rows& other) {
    const Rows rows(tensor, name, type, head_dim, device);
    Require(rows.rows == other.rows && rows.heads == other.heads, name, "has a wrong shape");
    return rows;
  };
  const Rows outputs = like(out, "out", queries);
  const Rows d_outputs = like(d_out, "d_out", queries);
  const Rows d_queries = like(d_q, "d_q", queries);
  const Rows d_keys = like(d_k, "d_k", keys);
  const Rows d_values = like(d_v, "d_v", keys);

  phsa_backward_params params = PHSA_INIT(phsa_backward_params);
  SetQueries(queries, &params);
  params.kv = KeyValues(keys, &values, std::nullopt, device);
  SetOut(outputs, &params);
  params.lse = Elements<float>(lse, "lse", ScalarType::Float, queries.rows * queries.heads, device);
  params.selection =
      Elements<int32_t>(selection, "selection", ScalarType::Int, plan.SelectionSize(queries.rows), device);
  params.d_out = d_outputs.pointer();
  params.d_out_token_stride = d_outputs.row_stride;
  params.d_out_head_stride = d_outputs.head_stride;
  params.d_q = d_queries.pointer();
  params.d_q_token_stride = d_queries.row_stride;
  params.d_q_head_stride = d_queries.head_stride;
  params.d_k = d_keys.pointer();
  params.d_k_token_stride = d_keys.row_stride;
  params.d_k_head_stride = d_keys.head_stride;
  params.d_v = d_values.pointer();
  params.d_v_token_stride = d_values.row_stride;
  params.d_v_head_stride = d_values.head_stride;
  Run(&phsa_backward, plan, &params, phsa_plan_backward_workspace_size(plan.get()), q, threads, stream);
}

}  // namespace
}  // namespace phsa_torch

#define PHSA_SETTINGS_SCHEMA                                                                                  \
  "int policy, int block, int init, int local, int top_k, float lam, Tensor? head_lambda, int group_reduce, " \
  "int dense_below, int parts, int survivors"

STABLE_TORCH_LIBRARY(phsa_kernels, m) {
  m.def("check(Tensor lens, int dtype, int q_heads, int kv_heads, int head_dim, " PHSA_SETTINGS_SCHEMA
        ", int device) -> ()");
  m.def(
      "represent(Tensor k, Tensor? flags, Tensor q_lens, Tensor kv_lens, Tensor kv_starts, Tensor "
      "rep_starts, " PHSA_SETTINGS_SCHEMA ", int threads, int stream, Tensor(a!) reps) -> ()");
  m.def(
      "forward(Tensor q, Tensor k, Tensor? v, Tensor? flags, Tensor(a!)? reps, Tensor q_lens, Tensor kv_lens, "
      "Tensor kv_starts, Tensor rep_starts, " PHSA_SETTINGS_SCHEMA
      ", float scale, int threads, int stream, Tensor(b!)? out, Tensor(c!)? lse, Tensor(d!) selection, Tensor(e!)? "
      "scores) "
      "-> ()");
  m.def(
      "forward_paged(Tensor q, Tensor k, Tensor v, Tensor? flags, Tensor(a!)? reps, Tensor? sinks, Tensor q_lens, "
      "Tensor kv_lens, Tensor page_table, Tensor? device_lens, " PHSA_SETTINGS_SCHEMA
      ", float scale, int threads, int stream, Tensor(b!) out, Tensor(c!)? selection) -> ()");
  m.def(
      "backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor selection, "
      "Tensor q_lens, Tensor kv_lens, Tensor kv_starts, " PHSA_SETTINGS_SCHEMA
      ", float scale, int threads, int stream, Tensor(a!) d_q, Tensor(b!) d_k, Tensor(c!) d_v) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(phsa_kernels, CUDA, m) {
  m.impl("represent", TORCH_BOX(&phsa_torch::Represent));
  m.impl("forward", TORCH_BOX(&phsa_torch::Forward));
  m.impl("forward_paged", TORCH_BOX(&phsa_torch::ForwardPaged));
  m.impl("backward", TORCH_BOX(&phsa_torch::Backward));
}

STABLE_TORCH_LIBRARY_IMPL(phsa_kernels, CPU, m) {
  m.impl("check", TORCH_BOX(&phsa_torch::CheckPlan));
  m.impl("represent", TORCH_BOX(&phsa_torch::Represent));
  m.impl("forward", TORCH_BOX(&phsa_torch::Forward));
  m.impl("forward_paged", TORCH_BOX(&phsa_torch::ForwardPaged));
  m.impl("backward", TORCH_BOX(&phsa_torch::Backward));
}
