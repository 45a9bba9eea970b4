// A GPU without a GPU: CUDA's run time, the operations of src/ops/cuda and the attention's entrances, all of them here
// in plain C++ on the host, so that the engine's CUDA backend runs on machines that have no device. A program that
// links this file first takes it in place of theirs.
//
// The device's memory is locked but for the time that an operation or a copy takes: a host that follows an address of
// the device ends the process. While a graph is captured nothing runs, and what was captured runs when it is launched,
// as on a device. Products are rounded where the kernels round them.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include <cuda_runtime_api.h>

#include "attention/cuda/backend.h"
#include "attention/cuda/cuda.h"
#include "attention/plan.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "ops/cuda/experts.h"
#include "ops/cuda/linear.h"
#include "ops/cuda/ops.h"

namespace {

using phsa::F32FromBf16;

std::map<void*, size_t> g_memory;  // the device's
int g_open = 0;

void Protect(int protection) {
  for (const auto& [data, size] : g_memory) PHSA_CHECK(mprotect(data, size, protection) == 0);
}

// While it lives, the device works.
struct Open {
  Open() {
    if (g_open++ == 0) Protect(PROT_READ | PROT_WRITE);
  }
  ~Open() {
    if (--g_open == 0) Protect(PROT_NONE);
  }
};

using Work = std::vector<std::function<void()>>;
Work* g_captured = nullptr;

template <class Function>
cudaError_t Do(const Function& function) {
  if (g_captured != nullptr) {
    g_captured->push_back(function);
  } else {
    const Open open;
    function();
  }
  return cudaSuccess;
}

uint16_t* Bf16(void* data) { return static_cast<uint16_t*>(data); }
float Round(float x) { return F32FromBf16(phsa::Bf16FromF32(x)); }

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** data, size_t bytes) {
  bytes = (bytes + 4095) / 4096 * 4096;
  *data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*data == MAP_FAILED) return cudaErrorMemoryAllocation;
  // What is read before it is written is no number.
  PHSA_CHECK(mprotect(*data, bytes, PROT_READ | PROT_WRITE) == 0);
  std::memset(*data, 0xff, bytes);
  PHSA_CHECK(mprotect(*data, bytes, g_open > 0 ? PROT_READ | PROT_WRITE : PROT_NONE) == 0);
  g_memory[*data] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (data == nullptr) return cudaSuccess;
  munmap(data, g_memory.at(data));
  g_memory.erase(data);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** data, size_t bytes) {
  *data = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return Do([=] { std::memcpy(to, from, bytes); });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return Do([=] { std::memset(to, value, bytes); });
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "host");
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "of the host"; }
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = *total = size_t{1} << 40;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* time, cudaEvent_t, cudaEvent_t) {
  *time = 1;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  g_captured = new Work;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(std::exchange(g_captured, nullptr));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {  // NOLINT: CUDA's type
  *exec = reinterpret_cast<cudaGraphExec_t>(new Work(*reinterpret_cast<Work*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
  for (const auto& work : *reinterpret_cast<Work*>(exec)) Do(work);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Work*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete reinterpret_cast<Work*>(exec);
  return cudaSuccess;
}

}  // extern "C"

namespace phsa::cuda {
namespace {

// Element i of row `row` of a matrix.
float Weight(const MatrixView& w, int64_t row, int64_t i, int64_t k) {
  const int64_t at = row * k + i;
  if (!w.is_int8()) return F32FromBf16(static_cast<const uint16_t*>(w.data)[at]);
  const float code = static_cast<float>(static_cast<const uint8_t*>(w.data)[at]) - 128;
  return code * F32FromF16(w.scales[at / 32]) * w.factors[row];
}

double Dot(const float* x, const MatrixView& w, int64_t row, int64_t k) {
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += static_cast<double>(x[i]) * Weight(w, row, i, k);
  return sum;
}

std::vector<float> RowOfBf16(const void* x, int64_t row, int64_t k) {
  std::vector<float> out(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) {
    out[static_cast<size_t>(i)] = F32FromBf16(static_cast<const uint16_t*>(x)[row * k + i]);
  }
  return out;
}

std::vector<float> Normed(const float* x, const float* weight, float eps, int64_t dim) {
  double sum = 0;
  for (int64_t i = 0; i < dim; ++i) sum += static_cast<double>(x[i]) * x[i];
  const double scale = 1 / std::sqrt(sum / static_cast<double>(dim) + eps);
  std::vector<float> out(static_cast<size_t>(dim));
  for (int64_t i = 0; i < dim; ++i) out[static_cast<size_t>(i)] = static_cast<float>(x[i] * scale * weight[i]);
  return out;
}

void StoreBf16(const std::vector<float>& x, void* to, int64_t row) {
  for (size_t i = 0; i < x.size(); ++i)
    Bf16(to)[row * static_cast<int64_t>(x.size()) + static_cast<int64_t>(i)] = Bf16FromF32(x[i]);
}

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

float Gated(const GateParams& p, double gate, double up) {
  switch (p.kind) {
    case GateParams::Kind::kSilu: return static_cast<float>(gate * Sigmoid(gate) * up);
    case GateParams::Kind::kGeluTanh:
      return static_cast<float>(gate * (1 + std::tanh(0.7978845608 * (gate + 0.044715 * gate * gate * gate))) / 2 * up);
    case GateParams::Kind::kClampedSwiglu: {
      const double g = std::min<double>(gate, p.limit), u = std::clamp<double>(up, -p.limit, p.limit);
      return static_cast<float>(g * Sigmoid(p.alpha * g) * (u + 1));
    }
  }
  return 0;
}

// A product's number where it belongs. Result: that of LinearParams, and of the others by the same names.
template <class Result>
void Put(Result result, double sum, float scale, const void* bias, int64_t column, void* y, int64_t at) {
  if (result == Result::kBf16) {
    if (bias != nullptr) sum += F32FromBf16(static_cast<const uint16_t*>(bias)[column]);
    Bf16(y)[at] = Bf16FromF32(static_cast<float>(sum));
    return;
  }
  sum *= scale;
  if (bias != nullptr) sum += static_cast<const float*>(bias)[column];
  float& out = static_cast<float*>(y)[at];
  out = static_cast<float>(result == Result::kAddToF32 ? out + sum : sum);
}

}  // namespace

cudaError_t KernelsRun() { return cudaSuccess; }
std::string LinearUnavailable() { return ""; }
struct Linear::Impl {};
Linear::Linear(cudaStream_t) {}
Linear::~Linear() = default;
void Linear::Multiply(const LinearParams& p) {
  Do([p] {
    for (int64_t row = 0; row < p.m; ++row) {
      const std::vector<float> x = RowOfBf16(p.x, row, p.k);
      for (int64_t n = 0; n < p.n; ++n) {
        Put(p.result, Dot(x.data(), {p.weights}, n, p.k), p.scale, p.bias, n, p.y, row * p.y_stride + n);
      }
    }
  });
}

cudaError_t RmsNorm(const NormParams& p, cudaStream_t) {
  return Do([p] {
    for (int64_t row = 0; row < p.m; ++row) StoreBf16(Normed(p.x + row * p.dim, p.weight, p.eps, p.dim), p.out, row);
  });
}
cudaError_t RmsNormOfRows(const NormParams& p, const int32_t* rows, cudaStream_t) {
  return Do([p, rows] {
    for (int64_t row = 0; row < p.m; ++row) {
      StoreBf16(Normed(p.x + int64_t{rows[row]} * p.dim, p.weight, p.eps, p.dim), p.out, row);
    }
  });
}
cudaError_t EmbedAndNorm(const NormParams& p, const void* embedding, float scale, const int32_t* tokens, cudaStream_t) {
  return Do([=] {
    for (int64_t row = 0; row < p.m; ++row) {
      std::vector<float> x = RowOfBf16(embedding, tokens[row], p.dim);
      for (float& value : x) value *= scale;
      std::ranges::copy(x, p.x + row * p.dim);
      StoreBf16(Normed(x.data(), p.weight, p.eps, p.dim), p.out, row);
    }
  });
}
cudaError_t AddRmsNorm(const AddNormParams& p, cudaStream_t) {
  return Do([p] {
    for (int64_t row = 0; row < p.m; ++row) {
      const std::vector<float> y = Normed(p.y + row * p.dim, p.weight, p.eps, p.dim);
      for (int64_t i = 0; i < p.dim; ++i) p.x[row * p.dim + i] += y[static_cast<size_t>(i)];
    }
  });
}
cudaError_t KeepRows(const KeepParams& p, cudaStream_t) {
  return Do([p] {
    for (int64_t i = 0; i < p.m; ++i) {
      std::copy_n(p.x + int64_t{p.rows[i]} * p.x_dim, p.x_dim, p.kept_x + i * p.x_dim);
      std::copy_n(static_cast<const uint16_t*>(p.y) + int64_t{p.rows[i]} * p.y_dim, p.y_dim,
                  Bf16(p.kept_y) + i * p.y_dim);
    }
  });
}

cudaError_t MultiplyFewRows(const FewRowsParams& p, cudaStream_t) {
  using Result = FewRowsParams::Result;
  return Do([p] {
    const bool normed = p.result == Result::kBf16 || p.result == Result::kGateMul;
    for (int64_t row = 0; row < p.m; ++row) {
      std::vector<float> x;
      if (normed) {
        x = Normed(static_cast<const float*>(p.x) + row * p.k, p.norm, p.eps, p.k);
        for (float& value : x) value = Round(value);
      } else {
        x = RowOfBf16(p.x, row, p.k);
      }
      for (int64_t n = 0; n < p.n; ++n) {
        const int64_t at = row * p.n + n;
        if (p.result != Result::kGateMul) {
          Put(p.result, Dot(x.data(), p.weights, n, p.k), p.scale, p.bias, n, p.y, at);
          continue;
        }
        uint16_t halves[2];
        for (int64_t i = 0; i < 2; ++i) {
          Put(Result::kBf16, Dot(x.data(), p.weights, i * p.n + n, p.k), 1, p.bias, i * p.n + n, halves, i);
        }
        Bf16(p.y)[at] = Bf16FromF32(Gated(p.gate, F32FromBf16(halves[0]), F32FromBf16(halves[1])));
      }
    }
  });
}
cudaError_t MultiplySomeRows(const SomeRowsParams& p, cudaStream_t) {
  return Do([p] {
    for (int64_t row = 0; row < p.m; ++row) {
      const std::vector<float> x = RowOfBf16(p.x, row, p.k);
      for (int64_t n = 0; n < p.n; ++n) {
        Put(p.result, Dot(x.data(), p.weights, n, p.k), p.scale, p.bias, n, p.y, row * p.n + n);
      }
    }
  });
}
cudaError_t Bf16FromInt8(const MatrixView& w, int32_t n, int32_t k, void* out, cudaStream_t) {
  return Do([=] {
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t i = 0; i < k; ++i) Bf16(out)[row * k + i] = Bf16FromF32(Weight(w, row, i, k));
    }
  });
}
cudaError_t Bf16FromF16(void* x, int64_t count, cudaStream_t) {
  return Do([=] {
    for (int64_t i = 0; i < count; ++i) Bf16(x)[i] = Bf16FromF32(F32FromF16(Bf16(x)[i]));
  });
}
cudaError_t GateMul(const GateParams& gate, const void* gate_up, int64_t m, int32_t dim, void* out, cudaStream_t) {
  return Do([=] {
    for (int64_t row = 0; row < m; ++row) {
      const std::vector<float> halves = RowOfBf16(gate_up, row, 2 * dim);
      for (int32_t i = 0; i < dim; ++i) {
        const auto at = static_cast<size_t>(i);
        Bf16(out)[row * dim + i] = Bf16FromF32(Gated(gate, halves[at], halves[at + static_cast<size_t>(dim)]));
      }
    }
  });
}

cudaError_t PrepareRows(const RowsParams& p, cudaStream_t) {
  return Do([p] {
    for (int64_t row = 0; row < p.m; ++row) {
      float* const to = p.cos_sin + row * 2 * p.half;
      for (int32_t i = 0; i < p.half; ++i) {
        const double angle = p.positions[row] * p.frequencies[i], factor = p.frequencies[i] == 0 ? 1 : p.factor;
        to[i] = static_cast<float>(std::cos(angle) * factor);
        to[p.half + i] = static_cast<float>(std::sin(angle) * factor);
      }
      if (p.flags != nullptr && p.flag_rows[row] >= 0) p.pages[p.flag_rows[row]] = p.flags[row];
    }
  });
}
cudaError_t RopeAndAppend(const HeadsParams& p, cudaStream_t) {
  return Do([p] {
    const int32_t dim = p.head_dim, half = dim / 2, heads = p.num_q_heads + 2 * p.num_kv_heads;
    const int32_t dtype = p.f16 ? PHSA_F16 : PHSA_BF16;
    for (int64_t row = 0; row < p.m; ++row) {
      const float* const turn = p.cos_sin + row * dim;
      for (int32_t head = 0; head < heads; ++head) {
        std::vector<float> x = RowOfBf16(p.qkv, row * heads + head, dim);
        const bool query = head < p.num_q_heads, value = head >= p.num_q_heads + p.num_kv_heads;
        const float* const norm = query ? p.q_norm : value ? nullptr : p.k_norm;
        if (norm != nullptr) x = Normed(x.data(), norm, p.eps, dim);
        if (!value) {
          for (int32_t i = 0; i < half; ++i) {
            const auto low = static_cast<size_t>(i), high = static_cast<size_t>(i + half);
            const float a = x[low], b = x[high];
            x[low] = a * turn[i] - b * turn[half + i];
            x[high] = b * turn[i] + a * turn[half + i];
          }
        }
        if (!query && p.cache_rows[row] < 0) continue;
        const int32_t kv_head = (head - p.num_q_heads) % p.num_kv_heads;
        void* const to = query ? p.queries : value ? p.values : p.keys;
        const int64_t at =
            query ? (row * p.num_q_heads + head) * dim : p.cache_rows[row] + kv_head * p.cache_head_stride;
        for (int32_t i = 0; i < dim; ++i) StoreElement(dtype, to, at + i, x[static_cast<size_t>(i)]);
      }
    }
  });
}

cudaError_t FindTop(const TopParams& p, cudaStream_t) {
  return Do([p] {
    for (int64_t row = 0; row < p.m; ++row) {
      const float* const logits = p.logits + row * p.logits_stride;
      std::vector<int32_t> order(static_cast<size_t>(p.vocab));
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
      std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
      TopLogits& out = p.out[row];
      out.count = std::min(kTopLogits, p.vocab);
      for (int32_t i = 0; i < out.count; ++i) {
        out.top[i] = {order[static_cast<size_t>(i)], logits[order[static_cast<size_t>(i)]]};
      }
      double sum = 0;
      for (int32_t i = 0; i < p.vocab; ++i) sum += std::exp(static_cast<double>(logits[i]) - out.top[0].logit);
      out.log_sum_exp = out.top[0].logit + std::log(sum);
      out.finite = std::isfinite(sum) ? 1 : 0;
      out.asked = p.asked[row] >= 0 ? logits[p.asked[row]] : 0;
    }
  });
}

cudaError_t Route(const RouteParams& p, cudaStream_t) {
  return Do([p] {
    for (int64_t row = 0; row < p.m; ++row) {
      const std::vector<float> x = Normed(p.x + row * p.dim, p.norm, p.eps, p.dim);
      StoreBf16(x, p.normed, row);
      std::vector<double> logits(static_cast<size_t>(p.num_experts));
      std::vector<int32_t> order;
      for (int32_t e = 0; e < p.num_experts; ++e) {
        double& logit = logits[static_cast<size_t>(e)] = p.bias != nullptr ? p.bias[e] : 0;
        for (int32_t i = 0; i < p.dim; ++i) {
          logit += static_cast<double>(x[static_cast<size_t>(i)]) * p.router[int64_t{e} * p.dim + i];
        }
        order.push_back(e);
      }
      const auto of = [&](int32_t e) { return logits[static_cast<size_t>(e)]; };
      std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return of(a) > of(b); });
      double sum = 0;
      for (int32_t i = 0; i < (p.normalized ? p.taken : p.num_experts); ++i) {
        sum += std::exp(of(order[static_cast<size_t>(i)]) - of(order[0]));
      }
      for (int32_t i = 0; i < p.taken; ++i) {
        const int32_t expert = order[static_cast<size_t>(i)];
        p.experts[row * p.taken + i] = expert;
        p.weights[row * p.taken + i] = static_cast<float>(std::exp(of(expert) - of(order[0])) / sum);
      }
    }
  });
}
cudaError_t GroupByExpert(const GroupParams& p, cudaStream_t) {
  return Do([p] {
    const int32_t tile_rows = TileRows(p.pairs, p.num_experts), max_tiles = MaxTiles(p.pairs, p.num_experts);
    int32_t at = 0, tile = 0;
    for (int32_t e = 0; e < p.num_experts; ++e) {
      p.starts[e] = at;
      for (int32_t i = 0; i < p.pairs; ++i) {
        if (p.experts[i] == e) p.order[at++] = i;
      }
      for (int32_t first = p.starts[e]; first < at; first += tile_rows, ++tile) {
        PHSA_CHECK(tile < max_tiles);
        p.tiles[2 * tile] = e;
        p.tiles[2 * tile + 1] = first;
      }
    }
    p.starts[p.num_experts] = at;
    for (; tile < max_tiles; ++tile) p.tiles[2 * tile] = -1;
  });
}
cudaError_t MultiplyGrouped(const GroupedParams& p, cudaStream_t) {
  return Do([p] {
    const GroupParams& groups = p.groups;
    const int32_t tile_rows = TileRows(groups.pairs, groups.num_experts);
    for (int32_t tile = 0; tile < MaxTiles(groups.pairs, groups.num_experts); ++tile) {
      const int32_t expert = groups.tiles[2 * tile];
      if (expert < 0) continue;
      const int32_t first = groups.tiles[2 * tile + 1], end = std::min(first + tile_rows, groups.starts[expert + 1]);
      for (int32_t i = first; i < end; ++i) {
        const int64_t pair = groups.order[i];
        const std::vector<float> x = RowOfBf16(p.x, pair / p.pairs_of_row, p.k);
        for (int64_t n = 0; n < p.n; ++n) {
          double sum = Dot(x.data(), {p.weights}, int64_t{expert} * p.n + n, p.k);
          if (p.bias != nullptr) sum += p.bias[int64_t{expert} * p.n + n];
          if (p.f32) {
            static_cast<float*>(p.y)[pair * p.n + n] = static_cast<float>(sum);
          } else {
            Bf16(p.y)[pair * p.n + n] = Bf16FromF32(static_cast<float>(sum));
          }
        }
      }
    }
  });
}
cudaError_t CombineExperts(const CombineParams& p, cudaStream_t) {
  return Do([p] {
    for (int64_t row = 0; row < p.m; ++row) {
      for (int64_t i = 0; i < p.dim; ++i) {
        float sum = 0;
        for (int64_t j = row * p.taken; j < (row + 1) * p.taken; ++j) sum += p.weights[j] * p.x[j * p.dim + i];
        float& y = p.y[row * p.dim + i];
        y = p.scale * sum + (p.add ? y : 0);
      }
    }
  });
}

// The attention, by the reference.
cudaError_t Upload(const void* from, size_t size, void* to, cudaStream_t) {
  const auto* const bytes = static_cast<const uint8_t*>(from);
  return Do([copy = std::vector<uint8_t>(bytes, bytes + size), to] { std::memcpy(to, copy.data(), copy.size()); });
}
void Represent(const PlanImpl& plan, const phsa::ForwardParams& params) {
  if (params.kv.reps == nullptr || plan.top_k == 0) return;
  Do([&plan, params] { ReferenceBackend().represent(plan, params); });
}
void Select(const PlanImpl& plan, const phsa::ForwardParams& params) {
  Do([&plan, params] { ReferenceBackend().select(plan, params); });
}
void Attend(const PlanImpl& plan, const phsa::ForwardParams& params) {
  Do([&plan, params] { ReferenceBackend().attend(plan, params); });
}
void Forward(const PlanImpl& plan, const phsa::ForwardParams& params) {
  Do([&plan, params] { ReferenceBackend().forward(plan, params); });
}

namespace {

struct DecodeStep {
  PlanImpl plan;
  phsa::ForwardParams params;
  const int32_t* kv_lens;
};

}  // namespace

bool PrepareDecode(const PlanImpl& plan, const phsa::ForwardParams& params, const int32_t* kv_lens, const float*,
                   ForwardParams* decode) {
  static std::deque<DecodeStep> all;  // graphs have their addresses
  *decode = {};
  decode->workspace = &all.emplace_back(DecodeStep{plan, params, kv_lens});
  return true;
}
size_t DecodeWorkspaceSize(const Shape&, const Batch&) { return 0; }
cudaError_t Decode(const ForwardParams& params, cudaStream_t) {
  auto* const step = static_cast<DecodeStep*>(params.workspace);
  return Do([step] {
    for (size_t i = 0; i < step->plan.seqs.size(); ++i) {
      PlanSequence& seq = step->plan.seqs[i];
      seq.kv_len = step->kv_lens[i];
      seq.q_len = seq.kv_len > 0 ? 1 : 0;
      if (seq.q_len > 0) continue;  // else a sequence of nothing, whose output is zero
      for (int32_t head = 0; head < step->plan.num_q_heads; ++head) {
        const int64_t at = seq.q_start * step->params.out_token_stride + head * step->params.out_head_stride;
        std::fill_n(Bf16(step->params.out) + at, step->plan.head_dim, uint16_t{0});
      }
    }
    ReferenceBackend().forward(step->plan, step->params);
  });
}

}  // namespace phsa::cuda
