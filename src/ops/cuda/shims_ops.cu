// C entry points of the operations for the tests, which load them with ctypes.
#include "ops/cuda/experts.h"
#include "ops/cuda/ops.h"

namespace cuda = phsa::cuda;

extern "C" {

// So that the mirrors of the structs on the other side can be checked.
size_t phsa_ops_params_size(int which) {
  constexpr size_t kSizes[] = {sizeof(cuda::NormParams),    sizeof(cuda::RowsParams), sizeof(cuda::HeadsParams),
                               sizeof(cuda::TopParams),     sizeof(cuda::TopLogits),  sizeof(cuda::FewRowsParams),
                               sizeof(cuda::SomeRowsParams), sizeof(cuda::KeepParams),
                               sizeof(cuda::AddNormParams), sizeof(cuda::GateParams), sizeof(cuda::RouteParams),
                               sizeof(cuda::GroupedParams), sizeof(cuda::CombineParams)};
  return kSizes[which];
}
int phsa_ops_norm(const cuda::NormParams* p, const int32_t* rows, const void* embedding, float scale) {
  if (embedding != nullptr) return cuda::EmbedAndNorm(*p, embedding, scale, rows, nullptr);
  return rows != nullptr ? cuda::RmsNormOfRows(*p, rows, nullptr) : cuda::RmsNorm(*p, nullptr);
}
int phsa_ops_add_norm(const cuda::AddNormParams* p) { return cuda::AddRmsNorm(*p, nullptr); }
int phsa_ops_keep(const cuda::KeepParams* p) { return cuda::KeepRows(*p, nullptr); }
int phsa_ops_few_rows(const cuda::FewRowsParams* p) {
  return cuda::IsForFewRows(p->m, p->k) ? cuda::MultiplyFewRows(*p, nullptr) : cudaErrorInvalidValue;
}
int phsa_ops_some_rows(const cuda::SomeRowsParams* p) { return cuda::MultiplySomeRows(*p, nullptr); }
int phsa_ops_rows(const cuda::RowsParams* p) { return cuda::PrepareRows(*p, nullptr); }
int phsa_ops_heads(const cuda::HeadsParams* p) { return cuda::RopeAndAppend(*p, nullptr); }
int phsa_ops_bf16_from_f16(void* x, int64_t count) { return cuda::Bf16FromF16(x, count, nullptr); }
int phsa_ops_bf16_from_int8(const cuda::MatrixView* weights, int32_t n, int32_t k, void* out) {
  return cuda::Bf16FromInt8(*weights, n, k, out, nullptr);
}
int phsa_ops_gate_mul(const cuda::GateParams* gate, const void* gate_up, int64_t m, int32_t dim, void* out) {
  return cuda::GateMul(*gate, gate_up, m, dim, out, nullptr);
}
int phsa_ops_route(const cuda::RouteParams* p) { return cuda::Route(*p, nullptr); }
int32_t phsa_ops_most_tiles(int32_t pairs, int32_t num_experts) { return cuda::MostTiles(pairs, num_experts); }
int phsa_ops_group(const cuda::GroupParams* p) { return cuda::GroupByExpert(*p, nullptr); }
int phsa_ops_grouped(const cuda::GroupedParams* p) { return cuda::MultiplyGrouped(*p, nullptr); }
int phsa_ops_combine(const cuda::CombineParams* p) { return cuda::CombineExperts(*p, nullptr); }
size_t phsa_ops_top_workspace(int32_t m, int32_t vocab) { return cuda::TopWorkspaceSize(m, vocab); }
int phsa_ops_top(const cuda::TopParams* p) { return cuda::FindTop(*p, nullptr); }

}  // extern "C"
