#include "model/cuda/layer_runner.h"

#include <algorithm>
#include <utility>

#include "base/carver.h"
#include "base/errors.h"
#include "io/architecture.h"
#include "ops/cuda/experts.h"

namespace phsa::cuda {
namespace {

GateParams GateOf(const ModelConfig& config) {
  using Kind = GateParams::Kind;
  Kind kind = Kind::kSilu;
  switch (ArchitectureOf(config).gate) {
    case Gate::kSilu: break;
    case Gate::kGeluTanh: kind = Kind::kGeluTanh; break;
    case Gate::kClampedSwiglu: kind = Kind::kClampedSwiglu; break;
  }
  return {kind, config.swiglu_alpha, config.swiglu_limit};
}

size_t DequantizedBytes(size_t largest_int8) { return Aligned(largest_int8 * sizeof(uint16_t), kDeviceAlignment); }

}  // namespace

LayerRunner::LayerRunner(const ModelConfig& config, int32_t kv_dtype, int32_t max_rows, StepTimer& timer,
                         cudaStream_t stream)
    : config_(config),
      kv_dtype_(kv_dtype),
      max_rows_(max_rows),
      ropes_(MakeLayerRopes(config)),
      gate_(GateOf(config)),
      timer_(timer),
      stream_(stream),
      linear_(stream) {}

size_t LayerRunner::Bytes(const ModelConfig& config, int32_t max_rows, size_t largest_int8) {
  return Activations(config, max_rows, nullptr).size + Linear::kWorkspace + DequantizedBytes(largest_int8);
}

void LayerRunner::Load(DeviceWeights weights) {
  weights_ = std::move(weights);
  dequantized_ = DeviceBuffer(DequantizedBytes(weights_.largest_int8), "the activations");
  activation_memory_ = DeviceBuffer(Activations(config_, max_rows_, nullptr).size, "the activations");
  at_ = Activations(config_, max_rows_, activation_memory_.data());
  for (size_t i = 0; i < ropes_.all.size(); ++i) {
    const std::vector<double>& frequencies = ropes_.all[i].frequencies;
    Check(cudaMemcpyAsync(at_.frequencies + i * frequencies.size(), frequencies.data(),
                          frequencies.size() * sizeof(double), cudaMemcpyHostToDevice, stream_),
          kStep);
  }
  Check(cudaStreamSynchronize(stream_), kStep);
}

bool LayerRunner::AreFew(int32_t m) const {
  return IsForFewRows(m, std::max({config_.hidden, QWidth(config_), config_.intermediate}));
}

void LayerRunner::Multiply(int32_t m, const void* x, int32_t k, const MatrixView& weights, const void* bias, int32_t n,
                           void* y, Result result, float scale) {
  using Some = SomeRowsParams::Result;
  const Some of_some = result == Result::kBf16 ? Some::kBf16 : result == Result::kF32 ? Some::kF32 : Some::kAddToF32;
  const SomeRowsParams some{m, n, k, weights, bias, x, y, of_some, scale};
  if (IsForSomeRows(some)) {
    Check(MultiplySomeRows(some, stream_), kStep);
    return;
  }
  if (weights.is_int8()) Check(Bf16FromInt8(weights, n, k, dequantized_.data(), stream_), kStep);
  LinearParams p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.x = x;
  p.weights = weights.is_int8() ? dequantized_.data() : weights.data;
  p.bias = bias;
  p.y = y;
  p.y_stride = n;
  p.scale = scale;
  p.result = result;
  linear_.Multiply(p);
}

void LayerRunner::MultiplyFew(int32_t m, const void* x, int32_t k, const float* norm, const MatrixView& weights,
                              const void* bias, int32_t n, void* y, FewRowsParams::Result result, float scale) {
  FewRowsParams p{};
  p.result = result;
  p.m = m;
  p.n = n;
  p.k = k;
  p.weights = weights;
  p.bias = bias;
  p.x = x;
  p.norm = norm;
  p.eps = config_.rms_eps;
  p.y = y;
  p.scale = scale;
  p.gate = gate_;
  Check(MultiplyFewRows(p, stream_), kStep);
}

void LayerRunner::Embed(const StepData& data, const KvCache& cache, int32_t m) {
  RowsParams rows{};
  rows.m = m;
  rows.half = config_.head_dim / 2;
  rows.positions = data.positions;
  rows.flags = data.flags;
  rows.flag_rows = data.flag_rows;
  rows.pages = cache.memory().data();
  for (size_t i = 0; i < ropes_.all.size(); ++i) {
    rows.frequencies = at_.frequencies + i * static_cast<size_t>(rows.half);
    rows.factor = ropes_.all[i].factor;
    rows.cos_sin = at_.cos_sin + i * static_cast<size_t>(max_rows_) * static_cast<size_t>(config_.head_dim);
    Check(PrepareRows(rows, stream_), kStep);
    rows.flags = nullptr;  // they are written
  }
  Check(EmbedAndNorm(Norm(m, at_.residual, Weights(0).attention_norm), weights_.embedding, config_.embedding_scale,
                     data.tokens, stream_),
        kStep);
}

void LayerRunner::ProjectHeads(int32_t layer, const StepData& data, const KvCache& cache, int32_t m) {
  const DeviceLayer& w = Weights(layer);
  if (AreFew(m)) {
    MultiplyFew(m, at_.residual, config_.hidden, w.attention_norm, w.qkv, w.qkv_bias, QkvWidth(config_), at_.qkv,
                FewRowsParams::Result::kBf16);
  } else {
    Multiply(m, at_.normed, config_.hidden, w.qkv, w.qkv_bias, QkvWidth(config_), at_.qkv, Result::kBf16);
  }
  timer_.Mark(&StepTimes::products);
  const KeyValues kv = cache.View(layer, nullptr, 0, cache.layout());
  HeadsParams heads{};
  heads.m = m;
  heads.num_q_heads = config_.num_q_heads;
  heads.num_kv_heads = config_.num_kv_heads;
  heads.head_dim = config_.head_dim;
  heads.qkv = at_.qkv;
  heads.cos_sin = at_.cos_sin + ropes_.of_layer[static_cast<size_t>(layer)] * static_cast<size_t>(max_rows_) *
                                    static_cast<size_t>(config_.head_dim);
  heads.q_norm = w.q_norm;
  heads.k_norm = w.k_norm;
  heads.eps = config_.rms_eps;
  heads.f16 = kv_dtype_ == PHSA_F16;
  heads.queries = at_.queries;
  heads.keys = const_cast<void*>(kv.k);
  heads.values = const_cast<void*>(kv.v);
  heads.cache_rows = data.cache_rows;
  heads.cache_head_stride = cache.head_stride();
  Check(RopeAndAppend(heads, stream_), kStep);
  timer_.Mark(&StepTimes::other);
}

void LayerRunner::ProjectBack(int32_t m, const uint16_t* x, int32_t k, const MatrixView& weights, const float* bias,
                              const float* post_norm, float* residual) {
  using Few = FewRowsParams::Result;
  const int32_t hidden = config_.hidden;
  const bool normed = post_norm != nullptr;
  const float scale = HalfScale(config_, post_norm);
  float* const y = normed ? at_.projected : residual;
  if (AreFew(m)) {
    MultiplyFew(m, x, k, nullptr, weights, bias, hidden, y, normed ? Few::kF32 : Few::kAddToF32, scale);
  } else {
    Multiply(m, x, k, weights, bias, hidden, y, normed ? Result::kF32 : Result::kAddToF32, scale);
  }
  timer_.Mark(&StepTimes::products);
  if (!normed) return;
  Check(AddRmsNorm({m, hidden, y, post_norm, config_.rms_eps, residual}, stream_), kStep);
  timer_.Mark(&StepTimes::other);
}

void LayerRunner::RunMlp(const DeviceLayer& w, int32_t m, float* residual) {
  const int32_t hidden = config_.hidden, intermediate = config_.intermediate;
  if (AreFew(m)) {
    MultiplyFew(m, residual, hidden, w.mlp_norm, w.gate_up, w.gate_up_bias, intermediate, at_.activated,
                FewRowsParams::Result::kGateMul);
    timer_.Mark(&StepTimes::products);
  } else {
    Check(RmsNorm(Norm(m, residual, w.mlp_norm), stream_), kStep);
    timer_.Mark(&StepTimes::other);
    Multiply(m, at_.normed, hidden, w.gate_up, w.gate_up_bias, 2 * intermediate, at_.gate_up, Result::kBf16);
    timer_.Mark(&StepTimes::products);
    Check(GateMul(gate_, at_.gate_up, m, intermediate, at_.activated, stream_), kStep);
    timer_.Mark(&StepTimes::other);
  }
  ProjectBack(m, at_.activated, intermediate, w.down, w.down_bias, w.mlp_post_norm, residual);
}

void LayerRunner::RunExperts(const DeviceLayer& w, int32_t m, float* residual) {
  const DeviceLayer::Experts& of = w.experts;
  const Activations::Routed& at = at_.routed;
  const int32_t hidden = config_.hidden, width = config_.expert_width, taken = config_.experts_per_token;
  const int32_t most = RoutedRows(config_, max_rows_);
  const bool normed = w.mlp_post_norm != nullptr;
  float* const to = normed ? at_.projected : residual;
  for (int32_t first = 0; first < m; first += most) {
    const int32_t rows = std::min(most, m - first);
    const int64_t begin = int64_t{first} * hidden;
    RouteParams route{};
    route.m = rows;
    route.dim = hidden;
    route.num_experts = config_.num_experts;
    route.taken = taken;
    route.x = residual + begin;
    route.norm = w.mlp_norm;
    route.eps = config_.rms_eps;
    route.router = of.router;
    route.bias = of.router_bias;
    route.normalized = config_.normalized_experts;
    route.normed = at_.normed;
    route.logits = at.logits;
    route.experts = at.experts;
    route.weights = at.weights;
    Check(Route(route, stream_), kStep);
    const GroupParams groups{rows * taken, config_.num_experts, at.experts, at.order, at.starts, at.tiles};
    Check(GroupByExpert(groups, stream_), kStep);
    timer_.Mark(&StepTimes::other);
    Check(MultiplyGrouped({groups, 2 * width, hidden, taken, at_.normed, of.gate_up, of.gate_up_bias, at.gate_up,
                           /*f32=*/false},
                          stream_),
          kStep);
    timer_.Mark(&StepTimes::products);
    Check(GateMul(gate_, at.gate_up, groups.pairs, width, at.activated, stream_), kStep);
    timer_.Mark(&StepTimes::other);
    Check(
        MultiplyGrouped({groups, hidden, width, 1, at.activated, of.down, of.down_bias, at.out, /*f32=*/true}, stream_),
        kStep);
    timer_.Mark(&StepTimes::products);
    const float scale = HalfScale(config_, w.mlp_post_norm);
    Check(CombineExperts({rows, hidden, taken, at.out, at.weights, scale, !normed, to + begin}, stream_), kStep);
    timer_.Mark(&StepTimes::other);
  }
  if (!normed) return;
  Check(AddRmsNorm({m, hidden, to, w.mlp_post_norm, config_.rms_eps, residual}, stream_), kStep);
  timer_.Mark(&StepTimes::other);
}

void LayerRunner::Finish(int32_t layer, int32_t m, uint16_t* attended, float* residual) {
  const DeviceLayer& w = Weights(layer);
  const int32_t q_width = QWidth(config_);
  if (kv_dtype_ == PHSA_F16) Check(Bf16FromF16(attended, int64_t{m} * q_width, stream_), kStep);
  ProjectBack(m, attended, q_width, w.o, w.o_bias, w.attention_post_norm, residual);
  if (w.experts.router != nullptr) {
    RunExperts(w, m, residual);
  } else {
    RunMlp(w, m, residual);
  }
  // The last norm is that of the rows whose logits are wanted; a few rows' is in their product.
  if (layer + 1 == config_.num_layers || AreFew(m)) return;
  Check(RmsNorm(Norm(m, residual, Weights(layer + 1).attention_norm), stream_), kStep);
  timer_.Mark(&StepTimes::other);
}

void LayerRunner::FinalNorm(int32_t m, float* residual) {
  Check(RmsNorm(Norm(m, residual, weights_.final_norm), stream_), kStep);
}

void LayerRunner::FinalNormOfRows(int32_t m, const int32_t* rows) {
  Check(RmsNormOfRows(Norm(m, at_.residual, weights_.final_norm), rows, stream_), kStep);
}

void LayerRunner::ComputeLogits(int32_t m, TopLogits* top, const int32_t* asked) {
  timer_.Mark(&StepTimes::other);
  LinearParams p;
  p.m = m;
  p.n = config_.vocab_size;
  p.k = config_.hidden;
  p.x = at_.normed;
  p.weights = weights_.logits;
  p.y = at_.logits;
  p.y_stride = LogitsStride(config_);
  p.result = Result::kF32;
  linear_.Multiply(p);
  timer_.Mark(&StepTimes::products);
  TopParams find{};
  find.m = m;
  find.vocab = config_.vocab_size;
  find.logits = at_.logits;
  find.logits_stride = LogitsStride(config_);
  find.asked = asked;
  find.out = top;
  find.workspace = at_.top_workspace;
  Check(FindTop(find, stream_), kStep);
  timer_.Mark(&StepTimes::other);
}

}  // namespace phsa::cuda
