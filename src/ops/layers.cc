// The drivers of the row operations: who does which rows. The loops over a row are in cpu/kernels.cc.
#include "ops/layers.h"

#include <algorithm>
#include <cmath>

#include "base/dtype.h"
#include "base/errors.h"
#include "ops/cpu/kernels.h"

namespace phsa {
namespace {

// Elements that are done sooner than another thread is woken for them: about 10 µs.
constexpr int64_t kTooFewForThreads = 32768;

// row(r) for every r < m, spread over the threads where there is enough to do.
template <class Row>
void ForRows(int32_t m, int64_t row_cost, const phsa_executor& executor, const Row& row) {
  const int64_t rows_per_task = std::max<int64_t>(1, kTooFewForThreads / 2 / std::max<int64_t>(row_cost, 1));
  if (executor.run == nullptr || executor.num_threads <= 1 || m <= 1 || m * row_cost <= kTooFewForThreads) {
    for (int32_t r = 0; r < m; ++r) row(r);
    return;
  }
  struct Job {
    const Row* row;
    int64_t m, per_task;
  } job = {&row, m, rows_per_task};
  const auto tasks = static_cast<int32_t>((m + rows_per_task - 1) / rows_per_task);
  executor.run(
      executor.context, tasks,
      [](void* arg, int32_t task, int32_t) {
        const Job& j = *static_cast<Job*>(arg);
        const int64_t end = std::min(j.m, (task + 1) * j.per_task);
        for (int64_t r = task * j.per_task; r < end; ++r) (*j.row)(static_cast<int32_t>(r));
      },
      &job);
}

void NormRow(const ops::Kernels& k, const float* x, int32_t dim, const float* weight, float eps, float* out) {
  const float mean = k.sum_of_squares(x, dim) / static_cast<float>(dim);
  k.scale_by(x, 1.0f / std::sqrt(mean + eps), weight, dim, out);
}

void* OutRow(void* out, int32_t dtype, const int64_t* rows, int64_t row_stride, int32_t r, int64_t offset) {
  const int64_t at = (rows != nullptr ? rows[r] : r * row_stride) + offset;
  return static_cast<uint8_t*>(out) + at * static_cast<int64_t>(DtypeSize(dtype));
}

}  // namespace

void RmsNorm(const float* x, int64_t x_stride, int32_t m, int32_t dim, const float* weight, float eps, float* out,
             int64_t out_stride, const phsa_executor& executor) {
  const ops::Kernels& k = ops::ActiveKernels();
  ForRows(m, dim, executor, [&](int32_t r) { NormRow(k, x + r * x_stride, dim, weight, eps, out + r * out_stride); });
}

void AddRows(float* x, int64_t x_stride, const float* y, int64_t y_stride, int32_t m, int32_t dim,
             const phsa_executor& executor) {
  const ops::Kernels& k = ops::ActiveKernels();
  ForRows(m, dim, executor, [&](int32_t r) { k.add(x + r * x_stride, y + r * y_stride, dim); });
}

void AddRmsNorm(float* x, int64_t x_stride, const float* y, int64_t y_stride, int32_t m, int32_t dim,
                const float* weight, float eps, float* out, int64_t out_stride, const phsa_executor& executor) {
  const ops::Kernels& k = ops::ActiveKernels();
  ForRows(m, dim, executor, [&](int32_t r) {
    k.add(x + r * x_stride, y + r * y_stride, dim);
    NormRow(k, x + r * x_stride, dim, weight, eps, out + r * out_stride);
  });
}

void SiluMul(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int32_t m, int32_t dim,
             float* out, int64_t out_stride, const phsa_executor& executor) {
  const ops::Kernels& k = ops::ActiveKernels();
  constexpr int kCost = 4;  // the exponential and the division
  ForRows(m, int64_t{kCost} * dim, executor,
          [&](int32_t r) { k.silu_mul(gate + r * gate_stride, up + r * up_stride, dim, out + r * out_stride); });
}

void GeluMul(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int32_t m, int32_t dim,
             float* out, int64_t out_stride, const phsa_executor& executor) {
  const ops::Kernels& k = ops::ActiveKernels();
  constexpr int kCost = 5;
  ForRows(m, int64_t{kCost} * dim, executor,
          [&](int32_t r) { k.gelu_mul(gate + r * gate_stride, up + r * up_stride, dim, out + r * out_stride); });
}

void ClampedSwiglu(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int32_t m, int32_t dim,
                   float alpha, float limit, float* out, int64_t out_stride, const phsa_executor& executor) {
  const ops::Kernels& k = ops::ActiveKernels();
  constexpr int kCost = 5;
  ForRows(m, int64_t{kCost} * dim, executor, [&](int32_t r) {
    k.clamped_swiglu(gate + r * gate_stride, up + r * up_stride, dim, alpha, limit, out + r * out_stride);
  });
}

void ScaleRows(float* x, int64_t x_stride, int32_t m, int32_t dim, float factor, const phsa_executor& executor) {
  ForRows(m, dim, executor, [&](int32_t r) {
    for (int32_t i = 0; i < dim; ++i) x[r * x_stride + i] *= factor;
  });
}

void RopeTable(const int32_t* positions, int32_t m, const double* frequencies, int32_t half, float factor,
               float* cos_sin, const phsa_executor& executor) {
  constexpr int kCost = 200;  // sin and cos in double precision
  ForRows(m, int64_t{kCost} * half, executor, [&](int32_t r) {
    float* const cos = cos_sin + int64_t{r} * 2 * half;
    for (int32_t i = 0; i < half; ++i) {
      if (frequencies[i] == 0) {  // beyond the part of a head that is turned, nothing changes
        cos[i] = 1;
        cos[half + i] = 0;
        continue;
      }
      const double angle = positions[r] * frequencies[i];
      cos[i] = static_cast<float>(std::cos(angle) * factor);
      cos[half + i] = static_cast<float>(std::sin(angle) * factor);
    }
  });
}

void Rope(const RopeParams& p, const phsa_executor& executor) {
  PHSA_CHECK(p.head_dim % 2 == 0 && p.head_dim <= kMaxHeadDim && IsDtype(p.out_dtype));
  const ops::Kernels& k = ops::ActiveKernels();
  const int32_t half = p.head_dim / 2;
  ForRows(p.m, int64_t{p.heads} * p.head_dim * 2, executor, [&](int32_t r) {
    const float* const cos = p.cos_sin + int64_t{r} * p.head_dim;
    alignas(64) float head[kMaxHeadDim];
    for (int32_t h = 0; h < p.heads; ++h) {
      const float* x = p.x + r * p.x_stride + int64_t{h} * p.head_dim;
      if (p.norm != nullptr) {
        NormRow(k, x, p.head_dim, p.norm, p.eps, head);
        x = head;
      }
      k.rotate(x, cos, cos + half, half, head);
      if (p.channel_scale != nullptr) {
        k.scale_by(head, 1, p.channel_scale + int64_t{h} * p.head_dim, p.head_dim, head);
      }
      if (p.mix) k.mix(head, p.head_dim);
      k.from_f32(head, p.out_dtype, p.head_dim,
                 OutRow(p.out, p.out_dtype, p.out_rows, p.out_row_stride, r, h * p.out_head_stride));
    }
  });
}

void StoreRows(const float* x, int64_t x_stride, int32_t m, int32_t dim, int32_t dtype, void* out,
               const int64_t* out_rows, int64_t out_row_stride, const phsa_executor& executor) {
  PHSA_CHECK(IsDtype(dtype));
  const ops::Kernels& k = ops::ActiveKernels();
  ForRows(m, dim, executor, [&](int32_t r) {
    k.from_f32(x + r * x_stride, dtype, dim, OutRow(out, dtype, out_rows, out_row_stride, r, 0));
  });
}

void LoadRows(int32_t dtype, const void* x, int64_t x_row_stride, int32_t m, int32_t dim, float* out,
              int64_t out_stride, const phsa_executor& executor) {
  PHSA_CHECK(IsDtype(dtype));
  const ops::Kernels& k = ops::ActiveKernels();
  ForRows(m, dim, executor, [&](int32_t r) {
    const auto* row = static_cast<const uint8_t*>(x) + r * x_row_stride * static_cast<int64_t>(DtypeSize(dtype));
    k.to_f32(row, dtype, dim, out + r * out_stride);
  });
}

void StoreCodes(const float* x, int64_t x_stride, int32_t m, int32_t dim, int8_t* codes, const int64_t* code_rows,
                uint16_t* scales, const int64_t* scale_rows, const phsa_executor& executor) {
  const ops::Kernels& k = ops::ActiveKernels();
  constexpr int kCost = 2;
  ForRows(m, int64_t{kCost} * dim, executor,
          [&](int32_t r) { scales[scale_rows[r]] = k.to_codes(x + r * x_stride, dim, codes + code_rows[r]); });
}

double LogSumExp(const float* x, int64_t count) {
  if (count <= 0) return -HUGE_VAL;
  float largest = -HUGE_VALF;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, x[i]);
  if (std::isinf(largest)) return largest;
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(static_cast<double>(x[i]) - largest);
  return largest + std::log(sum);
}

}  // namespace phsa
