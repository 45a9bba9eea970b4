// From a plan and the C ABI's parameters to the kernels'. The kernels read lengths, starts and lambdas from device
// memory: each call copies them from the plan into the front of the workspace, on the stream.
#include "attention/cuda/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "attention/cuda/cuda.h"
#include "base/carver.h"
#include "base/cuda_error.h"
#include "base/errors.h"

namespace phsa::cuda {
namespace {

constexpr size_t kMostDecoded = 65535;  // sequences: a grid's limit

// The batch as the kernels read it, at the front of the workspace. With a null memory only the size is counted.
struct Tables {
  Tables(const PlanImpl& plan, void* memory) {
    const auto seqs = static_cast<int64_t>(plan.seqs.size());
    Carver carver(memory, sizeof(int64_t));
    kv_starts = carver.Take<int64_t>(seqs);
    rep_starts = carver.Take<int64_t>(seqs);
    packed_rep_starts = carver.Take<int64_t>(seqs);
    cu_q = carver.Take<int32_t>(seqs + 1);
    kv_lens = carver.Take<int32_t>(seqs);
    lambda = carver.Take<float>(static_cast<int64_t>(plan.lambda.size()));
    size = carver.size();
  }

  int64_t *kv_starts, *rep_starts, *packed_rep_starts;
  int32_t *cu_q, *kv_lens;
  float* lambda;
  size_t size;
};

std::vector<char> FillTables(const PlanImpl& plan) {
  std::vector<char> bytes(Tables(plan, nullptr).size);
  const Tables tables(plan, bytes.data());
  for (size_t s = 0; s < plan.seqs.size(); ++s) {
    const PlanSequence& seq = plan.seqs[s];
    tables.kv_starts[s] = seq.kv_start;
    tables.rep_starts[s] = seq.rep_start;
    tables.packed_rep_starts[s] = seq.packed_rep_start;
    tables.cu_q[s] = static_cast<int32_t>(seq.q_start);
    tables.kv_lens[s] = seq.kv_len;
  }
  tables.cu_q[plan.seqs.size()] = static_cast<int32_t>(plan.num_queries);
  std::copy(plan.lambda.begin(), plan.lambda.end(), tables.lambda);
  return bytes;
}

Shape MakeShape(const PlanImpl& plan) {
  Shape shape{};
  static_cast<BlockRules&>(shape) = plan;
  shape.dtype = static_cast<Dtype>(plan.dtype);
  shape.num_q_heads = plan.num_q_heads;
  shape.num_kv_heads = plan.num_kv_heads;
  shape.head_dim = plan.head_dim;
  // Where nothing is chosen the heads of a group share what they read, whatever group_reduce says.
  shape.selection_heads = plan.top_k > 0 ? plan.selection_heads : plan.num_kv_heads;
  shape.group_max = plan.settings.group_reduce == GroupReduce::kMax;
  shape.parts = plan.PartsInReps() ? plan.parts : 1;
  shape.scale = plan.scale;
  return shape;
}

// Without the device pointers.
Batch MakeBatch(const PlanImpl& plan) {
  Batch batch{};
  batch.num_seqs = static_cast<int32_t>(plan.seqs.size());
  batch.total_q = static_cast<int32_t>(plan.num_queries);
  for (const PlanSequence& seq : plan.seqs) batch.max_q_len = std::max(batch.max_q_len, seq.q_len);
  batch.max_kv_len = plan.max_kv_len;
  batch.page_size = plan.page_size;
  return batch;
}

size_t RepBytes(const PlanImpl& plan) {
  return static_cast<size_t>(plan.num_reps) * plan.num_kv_heads * plan.rep_width * sizeof(uint16_t);
}

// One query per sequence, and lists for groups: what the decode kernels take.
bool IsDecode(const PlanImpl& plan) {
  const auto one = [](const PlanSequence& seq) { return seq.q_len == 1; };
  return MakeShape(plan).selection_heads == plan.num_kv_heads && plan.seqs.size() <= kMostDecoded &&
         std::all_of(plan.seqs.begin(), plan.seqs.end(), one);
}

// Whether representatives on pages are copied together before blocks are chosen: it pays for many queries.
bool CopiesReps(const PlanImpl& plan) {
  constexpr int64_t kManyQueries = 256;
  return plan.page_size != 0 && plan.num_queries >= kManyQueries;
}

// A forward's workspace. With a null memory only sizes are counted.
struct ForwardWorkspace {
  ForwardWorkspace(const PlanImpl& plan, void* memory) : tables(plan, memory) {
    scratch_size = SelectWorkspaceSize(MakeShape(plan), MakeBatch(plan));
    if (IsDecode(plan)) scratch_size = std::max(scratch_size, DecodeWorkspaceSize(MakeShape(plan), MakeBatch(plan)));
    scratch_size = Aligned(scratch_size, kDeviceAlignment);
    Carver carver(memory, kDeviceAlignment);
    carver.Take<char>(static_cast<int64_t>(tables.size));
    reps = carver.Take<char>(plan.page_size == 0 || CopiesReps(plan) ? static_cast<int64_t>(RepBytes(plan)) : 0);
    selection = carver.Take<int32_t>(plan.num_queries * plan.selection_heads * plan.top_k);
    scratch = carver.Take<char>(static_cast<int64_t>(scratch_size));
    size = carver.size();
  }

  Tables tables;
  void* reps;          // representatives, where the caller gives no room for them, or has them on pages
  int32_t* selection;  // lists, likewise
  void* scratch;       // of the kernels
  size_t scratch_size = 0;
  size_t size;
};

void Check(cudaError_t error, const char* where) {
  if (error == cudaSuccess) return;
  const bool missing = error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver;
  if (!missing && DeviceFailed(error)) {
    Throw(PHSA_IO, "{}: the GPU failed ({}); start the program again", where, cudaGetErrorString(error));
  }
  Throw(missing ? PHSA_UNSUPPORTED : PHSA_INTERNAL, "{}: CUDA: {}", where, cudaGetErrorString(error));
}

// The kernels load 16 bytes at a time.
Rows MakeRows(const char* where, const char* name, const void* data, int64_t token_stride, int64_t head_stride,
              int64_t page_stride = 0) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || token_stride % 8 != 0 || head_stride % 8 != 0 ||
      page_stride % 8 != 0) {
    ThrowInvalid("{}: {} is at {} with strides {}, {}, {}; allowed: a multiple of 16 bytes, and of 8 elements", where,
                 name, data, token_stride, head_stride, page_stride);
  }
  return {const_cast<void*>(data), token_stride, head_stride, page_stride};
}

// Copies the plan's tables into the workspace.
void UploadTables(const PlanImpl& plan, void* workspace, cudaStream_t stream, const char* where) {
  Check(Upload(plan.device_tables.data(), plan.device_tables.size(), workspace, stream), where);
}

// `attends`: values and outputs are there.
ForwardParams FromC(const PlanImpl& plan, const phsa::ForwardParams& c, bool attends, const char* where) {
  const ForwardWorkspace workspace(plan, c.workspace);
  const Tables& tables = workspace.tables;
  const bool paged = plan.page_size != 0;
  ForwardParams p{};
  p.shape = MakeShape(plan);
  p.batch = MakeBatch(plan);
  p.batch.cu_q = tables.cu_q;
  p.batch.kv_lens = tables.kv_lens;
  p.batch.kv_starts = tables.kv_starts;
  p.batch.page_table = c.kv.page_table;
  p.batch.page_table_stride = c.kv.page_table_stride;
  if (c.q != nullptr) p.q = MakeRows(where, "q", c.q, c.q_token_stride, c.q_head_stride);
  p.k = MakeRows(where, "kv.k", c.kv.k, c.kv.k_token_stride, c.kv.k_head_stride, paged ? c.kv.k_page_stride : 0);
  if (attends) {
    p.v = MakeRows(where, "kv.v", c.kv.v, c.kv.v_token_stride, c.kv.v_head_stride, paged ? c.kv.v_page_stride : 0);
    p.out = MakeRows(where, "out", c.out, c.out_token_stride, c.out_head_stride);
    p.sinks = c.sinks;
  }
  if (c.kv.reps != nullptr) {
    p.reps = MakeRows(where, "kv.reps", c.kv.reps, c.kv.rep_row_stride, c.kv.rep_head_stride,
                      paged ? c.kv.rep_page_stride : 0);
    p.batch.rep_starts = tables.rep_starts;
  } else if (plan.top_k > 0) {
    if (paged) ThrowInvalid("{}: kv.reps is null, which CUDA kernels take with contiguous keys only", where);
    p.reps = {workspace.reps, int64_t{plan.num_kv_heads} * plan.rep_width, plan.rep_width, 0};
    p.batch.rep_starts = tables.packed_rep_starts;
  }
  p.flags = c.kv.flags;
  p.flags_page_stride = c.kv.flags_page_stride;
  p.lambda = tables.lambda;
  p.lse = c.lse;
  p.selection = c.selection != nullptr ? c.selection : workspace.selection;
  p.selection_scores = c.selection_scores;
  p.workspace = workspace.scratch;
  p.workspace_size = workspace.scratch_size;
  return p;
}

void SelectBlocks(const PlanImpl& plan, const ForwardParams& p, void* memory, cudaStream_t stream, const char* where) {
  if (!CopiesReps(plan)) return Check(Select(p, stream), where);
  const ForwardWorkspace workspace(plan, memory);
  ForwardParams packed = p;
  packed.reps = {workspace.reps, int64_t{plan.num_kv_heads} * plan.rep_width, plan.rep_width, 0};
  packed.batch.rep_starts = workspace.tables.packed_rep_starts;
  packed.batch.page_size = 0;
  Check(PackRepresentatives(p, packed.batch.rep_starts, packed.reps.data, stream), where);
  Check(Select(packed, stream), where);
}

cudaStream_t Stream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

bool Compiled() { return true; }

void Prepare(PlanImpl* plan) {
  if (plan->block != kBlockTokens) {
    Throw(PHSA_UNSUPPORTED, "plan: block_size is {}; the CUDA kernels take {}", plan->block, kBlockTokens);
  }
  if (!RunsOnCuda(plan->settings.policy)) {
    Throw(PHSA_UNSUPPORTED, "plan: the CUDA kernels take the policies {}", PolicyNames(RunsOnCuda, " and "));
  }
  if (plan->parts > 1 && plan->top_k > 0 && !plan->PartsInReps()) {
    Throw(PHSA_UNSUPPORTED, "plan: survivors is {}; the CUDA kernels score the parts of all blocks (0)",
          plan->settings.survivors);
  }
  if (plan->num_queries > phsa::kMaxTokens) {
    Throw(PHSA_UNSUPPORTED, "plan: {} queries; the CUDA kernels take up to {}", plan->num_queries, phsa::kMaxTokens);
  }
  const Shape shape = MakeShape(*plan);
  if (const char* reason = Unsupported(shape, plan->max_kv_len)) Throw(PHSA_UNSUPPORTED, "plan: {}", reason);
  plan->device_tables = FillTables(*plan);
  plan->workspace_size = ForwardWorkspace(*plan, nullptr).size;
  if (plan->page_size == 0 && plan->self_attention) {  // else Plan refuses a backward
    plan->backward_workspace_size =
        Aligned(Tables(*plan, nullptr).size, kDeviceAlignment) + BackwardWorkspaceSize(shape, MakeBatch(*plan));
  }
}

void Represent(const PlanImpl& plan, const phsa::ForwardParams& params) {
  const cudaStream_t stream = Stream(params.stream);
  const ForwardParams p = FromC(plan, params, false, "represent");
  UploadTables(plan, params.workspace, stream, "represent");
  Check(Represent(p, false, stream), "represent");
}

void Select(const PlanImpl& plan, const phsa::ForwardParams& params) {
  const cudaStream_t stream = Stream(params.stream);
  const ForwardParams p = FromC(plan, params, false, "select");
  UploadTables(plan, params.workspace, stream, "select");
  if (params.kv.reps == nullptr) Check(Represent(p, true, stream), "select");
  SelectBlocks(plan, p, params.workspace, stream, "select");
}

void Attend(const PlanImpl& plan, const phsa::ForwardParams& params) {
  const cudaStream_t stream = Stream(params.stream);
  const ForwardParams p = FromC(plan, params, true, "attend");
  UploadTables(plan, params.workspace, stream, "attend");
  Check(Attend(p, stream), "attend");
}

void Forward(const PlanImpl& plan, const phsa::ForwardParams& params) {
  const cudaStream_t stream = Stream(params.stream);
  ForwardParams p = FromC(plan, params, true, "forward");
  UploadTables(plan, params.workspace, stream, "forward");
  // Decoding has kernels of its own; they keep the representatives of a cache up, and give no scores.
  const bool decodes =
      IsDecode(plan) && (params.kv.reps != nullptr || plan.top_k == 0) && params.selection_scores == nullptr;
  if (params.kv_lens != nullptr) {
    if (!decodes || plan.page_size == 0) {
      Throw(PHSA_UNSUPPORTED,
            "forward: kv_lens is given; allowed: with pages, one query a sequence, lists for groups, representatives "
            "and no selection_scores");
    }
    p.batch.kv_lens = params.kv_lens;
  }
  if (decodes) {
    p.selection = params.selection;
    Check(Decode(p, stream), "forward");
    return;
  }
  if (plan.top_k > 0) {
    Check(Represent(p, params.kv.reps == nullptr, stream), "forward");
    SelectBlocks(plan, p, params.workspace, stream, "forward");
  } else if (params.kv.reps != nullptr && plan.num_reps > 0) {
    Check(Represent(p, false, stream), "forward");
  }
  Check(Attend(p, stream), "forward");
}

bool PrepareDecode(const PlanImpl& plan, const phsa::ForwardParams& params, const int32_t* kv_lens, const float* lambda,
                   ForwardParams* decode) {
  if (!IsDecode(plan)) return false;
  *decode = FromC(plan, params, true, "decode");
  decode->batch.kv_lens = kv_lens;
  decode->lambda = lambda;
  decode->selection = params.selection;
  decode->workspace = params.workspace;
  decode->workspace_size = params.workspace_size;
  return true;
}

void Backward(const PlanImpl& plan, const phsa::BackwardParams& params) {
  for (const PlanSequence& seq : plan.seqs) {
    if (seq.kv_start != seq.q_start) Throw(PHSA_UNSUPPORTED, "backward: the CUDA kernels take packed keys");
  }
  const cudaStream_t stream = Stream(params.stream);
  const Tables tables(plan, params.workspace);
  const auto rows = [](const char* name, const void* data, int64_t token_stride, int64_t head_stride) {
    return MakeRows("backward", name, data, token_stride, head_stride);
  };
  BackwardParams b{};
  b.shape = MakeShape(plan);
  b.batch = MakeBatch(plan);
  b.batch.cu_q = tables.cu_q;
  b.q = rows("q", params.q, params.q_token_stride, params.q_head_stride);
  b.k = rows("kv.k", params.kv.k, params.kv.k_token_stride, params.kv.k_head_stride);
  b.v = rows("kv.v", params.kv.v, params.kv.v_token_stride, params.kv.v_head_stride);
  b.out = rows("out", params.out, params.out_token_stride, params.out_head_stride);
  b.d_out = rows("d_out", params.d_out, params.d_out_token_stride, params.d_out_head_stride);
  b.d_q = rows("d_q", params.d_q, params.d_q_token_stride, params.d_q_head_stride);
  b.d_k = rows("d_k", params.d_k, params.d_k_token_stride, params.d_k_head_stride);
  b.d_v = rows("d_v", params.d_v, params.d_v_token_stride, params.d_v_head_stride);
  b.lse = params.lse;
  b.selection = params.selection;
  const size_t begin = Aligned(tables.size, kDeviceAlignment);
  b.workspace = static_cast<char*>(params.workspace) + begin;
  b.workspace_size = plan.backward_workspace_size - begin;
  UploadTables(plan, params.workspace, stream, "backward");
  Check(Backward(b, stream), "backward");
}

}  // namespace phsa::cuda
