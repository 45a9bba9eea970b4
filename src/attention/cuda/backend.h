// The CUDA kernels behind a plan. Without CUDA in the build, no_cuda.cc has the same functions, and they refuse.
#ifndef PHSA_ATTENTION_CUDA_BACKEND_H_
#define PHSA_ATTENTION_CUDA_BACKEND_H_

#include "attention/plan.h"

namespace phsa::cuda {

bool Compiled();

// Sets the plan's workspace sizes and tables. Throws phsa::Error where the kernels cannot run it, naming what they can.
void Prepare(PlanImpl* plan);

// `Plan` has checked pointers and sizes. All queue their work on params.stream.
void Represent(const PlanImpl& plan, const phsa::ForwardParams& params);
void Select(const PlanImpl& plan, const phsa::ForwardParams& params);
void Attend(const PlanImpl& plan, const phsa::ForwardParams& params);
void Forward(const PlanImpl& plan, const phsa::ForwardParams& params);
void Backward(const PlanImpl& plan, const phsa::BackwardParams& params);

// A plan of one query a sequence as the decode kernels take it, for CUDA graphs that are replayed while sequences grow:
// nothing is copied from the plan, whose lengths are upper limits. False where these kernels cannot run it.
// kv_lens: device [num_seqs]; lambda: device [num_kv_heads]. The workspace takes
// DecodeWorkspaceSize(decode->shape, decode->batch) bytes.
struct ForwardParams;
PHSA_API bool PrepareDecode(const PlanImpl& plan, const phsa::ForwardParams& params, const int32_t* kv_lens,
                            const float* lambda, ForwardParams* decode);

}  // namespace phsa::cuda

#endif  // PHSA_ATTENTION_CUDA_BACKEND_H_
