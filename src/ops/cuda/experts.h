// MLPs of experts on the GPU: each row of a step goes through some of many. Which rows go to which expert is found and
// used on the device, so that a step with experts can be captured in a CUDA graph. As in ops.h nothing here allocates
// or waits, and a row's results depend on that row alone, to the last bit.
//
// A row and one of its experts are a pair: pair row · taken + i is the row's i-th.
#ifndef PHSA_OPS_CUDA_EXPERTS_H_
#define PHSA_OPS_CUDA_EXPERTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/limits.h"

namespace phsa::cuda {

// The norm of rows, and the `taken` experts of the largest softmax values of what a router makes of it, all in f32;
// ties go to the lower expert.
struct RouteParams {
  int32_t m, dim;              // dim up to kMaxRoutedDim
  int32_t num_experts, taken;  // up to kMaxExperts, kMaxTakenExperts
  const float* x;              // [m][dim], the residual stream
  const float* norm;           // [dim]
  float eps;
  const float* router;  // [num_experts][dim]
  const float* bias;    // [num_experts] or null
  bool normalized;      // a row's weights add up to 1
  void* normed;         // bf16 [m][dim]
  float* logits;        // [m][num_experts]
  int32_t* experts;     // [m][taken]
  float* weights;       // [m][taken]
};
cudaError_t Route(const RouteParams& params, cudaStream_t stream);

// The pairs by expert, and the tiles that products make of them: up to TileRows pairs of one expert.
struct GroupParams {
  int32_t pairs, num_experts;
  const int32_t* experts;  // [pairs]
  int32_t* order;          // [pairs]
  int32_t* starts;         // [num_experts + 1]: where each expert's begin in `order`
  int32_t* tiles;          // [MaxTiles][2]: the expert, or -1, and the tile's first place in `order`
};
int32_t TileRows(int32_t pairs, int32_t num_experts);
int32_t MaxTiles(int32_t pairs, int32_t num_experts);
// Of all numbers of pairs up to `pairs`.
int32_t MostTiles(int32_t pairs, int32_t num_experts);
cudaError_t GroupByExpert(const GroupParams& params, cudaStream_t stream);

// y[pair] = x[pair / pairs_of_row] · weights[expert]ᵀ + bias[expert]. n and k are multiples of 8.
struct GroupedParams {
  GroupParams groups;  // as GroupByExpert has filled them
  int32_t n, k, pairs_of_row;
  const void* x;        // bf16 [rows][k]
  const void* weights;  // bf16 [num_experts][n][k]
  const float* bias;    // [num_experts][n] or null
  void* y;              // [pairs][n], f32 or bf16
  bool f32;
};
cudaError_t MultiplyGrouped(const GroupedParams& params, cudaStream_t stream);

// y[row] = scale · Σ weights · x of the row's pairs, or y += that.
struct CombineParams {
  int32_t m, dim, taken;
  const float* x;        // [m · taken][dim]
  const float* weights;  // [m][taken]
  float scale;
  bool add;
  float* y;  // [m][dim]
};
cudaError_t CombineExperts(const CombineParams& params, cudaStream_t stream);

}  // namespace phsa::cuda

#endif  // PHSA_OPS_CUDA_EXPERTS_H_
