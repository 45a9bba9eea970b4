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

}  // namespace phsa::cuda

#endif  // PHSA_ATTENTION_CUDA_BACKEND_H_
