// The operations of the CPU, in one table: what each takes, what comes out by its definition in double precision, how
// far off it may be, and its backward pass where it has one. operations_test.cc checks every row on every SIMD target;
// bench/operations_bench.cc times the same rows in the sizes of a model.
#ifndef PHSA_TESTS_OPERATIONS_H_
#define PHSA_TESTS_OPERATIONS_H_

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "attention/policies.h"
#include "attention/reference.h"
#include "base/dtype.h"
#include "base/simd.h"
#include "matrices.h"
#include "ops/layers.h"
#include "ops/linear.h"
#include "phsa/attention.h"

namespace phsa::operations {

using Arrays = std::vector<std::vector<float>>;
using Doubles = std::vector<std::vector<double>>;

struct Expected {
  std::vector<double> value, bound;  // of the error
};

struct Operation {
  std::string name;
  Arrays inputs;
  size_t outputs = 0;
  double flops = 0;       // of one run, a multiplication and an addition one each
  bool in_place = false;  // out may be inputs[0]
  std::function<void(const Arrays& in, float* out, const Executor& executor)> run;
  // From the definition. It may ask which target is active where instructions round in another way.
  std::function<Expected(const Doubles& in)> reference;
  // d_inputs for a d_out, by the kernels; null: there is no backward pass.
  std::function<Arrays(const Arrays& in, const std::vector<float>& d_out)> gradients;
};

// Each row in small odd shapes, or in those of a model's layer.
enum class Size { kTest, kModel };

inline size_t Count(int64_t n) { return static_cast<size_t>(n); }

// Rows of a layer that are computed element by element: bound = relative · |value| + absolute(in[0][i], in[1][i]).
inline Operation Gate(const char* name, int32_t m, int32_t dim, float size,
                      std::function<void(const float*, const float*, int32_t, int32_t, float*, const Executor&)> run,
                      std::function<double(double, double)> formula, std::function<double(double, double)> bound) {
  Operation op;
  op.name = fmt::format("{} {}x{} of {:g}", name, m, dim, size);
  const size_t n = Count(int64_t{m} * dim);
  op.inputs = {matrices::RandomFloats(n, 111, size), matrices::RandomFloats(n, 112, size)};
  op.outputs = n;
  op.flops = 8.0 * static_cast<double>(n);
  op.in_place = true;
  op.run = [=](const Arrays& in, float* out, const Executor& executor) {
    run(in[0].data(), in[1].data(), m, dim, out, executor);
  };
  op.reference = [=](const Doubles& in) {
    Expected e;
    for (size_t i = 0; i < n; ++i) {
      e.value.push_back(formula(in[0][i], in[1][i]));
      e.bound.push_back(bound(in[0][i], in[1][i]));
    }
    return e;
  };
  return op;
}

inline void AddGates(Size size, std::vector<Operation>* all) {
  constexpr float kAlpha = 1.702f, kLimit = 7;
  const auto silu = [](double g) { return g / (1 + std::exp(-g)); };
  const auto gelu_angle = [](double g) { return 0.7978845608028654 * (g + 0.044715 * g * g * g); };
  // 1 + tanh(u) without what cancels far below zero; there u's own rounding counts |u| times.
  const auto gelu = [=](double g) { return g / (1 + std::exp(-2 * gelu_angle(g))); };
  const auto clamped = [](double g) { return std::min(g, double{kLimit}); };
  const auto swish = [=](double g) { return clamped(g) / (1 + std::exp(-double{kAlpha} * clamped(g))); };
  const auto add = [&](int32_t m, int32_t dim, float magnitude) {
    all->push_back(Gate(
        "silu_mul", m, dim, magnitude,
        [](const float* g, const float* u, int32_t rows, int32_t width, float* out, const Executor& executor) {
          SiluMul(g, width, u, width, rows, width, out, width, executor);
        },
        // Below e^-87 the sigmoid is taken for zero.
        [=](double g, double u) { return silu(g) * u; },
        [=](double g, double u) { return 1e-6 * std::fabs(silu(g) * u) + 1e-34 * std::max(1.0, std::fabs(u)); }));
    all->push_back(Gate(
        "gelu_mul", m, dim, magnitude,
        [](const float* g, const float* u, int32_t rows, int32_t width, float* out, const Executor& executor) {
          GeluMul(g, width, u, width, rows, width, out, width, executor);
        },
        [=](double g, double u) { return gelu(g) * u; },
        [=](double g, double u) {
          return 1e-6 * (1 + std::fabs(gelu_angle(g))) * std::fabs(gelu(g) * u) + 1e-33 * std::max(1.0, std::fabs(u));
        }));
    all->push_back(Gate(
        "clamped_swiglu", m, dim, magnitude,
        [](const float* g, const float* u, int32_t rows, int32_t width, float* out, const Executor& executor) {
          ClampedSwiglu(g, width, u, width, rows, width, kAlpha, kLimit, out, width, executor);
        },
        [=](double g, double u) { return swish(g) * (std::clamp(u, -double{kLimit}, double{kLimit}) + 1); },
        [=](double g, double u) {
          const double value = swish(g) * (std::clamp(u, -double{kLimit}, double{kLimit}) + 1);
          return 1e-6 * (1 + std::fabs(clamped(g))) * std::fabs(value) + 1e-6 * std::fabs(swish(g)) + 1e-33;
        }));
  };
  if (size == Size::kModel) return add(512, 8960, 1);
  for (const int32_t dim : {1, 7, 16, 33, 1000}) {
    for (const float magnitude : {0.01f, 1.0f, 30.0f, 1000.0f}) add(1, dim, magnitude);
  }
}

inline void AddNorm(int32_t m, int32_t dim, std::vector<Operation>* all) {
  constexpr float kEps = 1e-5f;
  Operation op;
  op.name = fmt::format("rms_norm {}x{}", m, dim);
  op.inputs = {matrices::RandomFloats(Count(int64_t{m} * dim), 101, 3), matrices::RandomFloats(Count(dim), 103)};
  op.outputs = Count(int64_t{m} * dim);
  op.flops = 4.0 * m * dim;
  op.in_place = true;
  op.run = [=](const Arrays& in, float* out, const Executor& executor) {
    RmsNorm(in[0].data(), dim, m, dim, in[1].data(), kEps, out, dim, executor);
  };
  op.reference = [=](const Doubles& in) {
    Expected e;
    for (int32_t r = 0; r < m; ++r) {
      const double* const x = in[0].data() + int64_t{r} * dim;
      double sum = 0;
      for (int32_t i = 0; i < dim; ++i) sum += x[i] * x[i];
      for (int32_t i = 0; i < dim; ++i) {
        e.value.push_back(x[i] / std::sqrt(sum / dim + kEps) * in[1][Count(i)]);
        e.bound.push_back(1e-6 * std::fabs(e.value.back()));
      }
    }
    return e;
  };
  all->push_back(std::move(op));
}

// Heads turn, after their norm where there is one, and are stored in rows out of order, as pages are.
inline void AddRope(int32_t m, int32_t heads, int32_t dim, bool norm, int32_t dtype, std::vector<Operation>* all) {
  constexpr float kEps = 1e-6f, kFactor = 1.25f;
  const int32_t half = dim / 2, width = heads * dim;
  std::vector<int32_t> positions;
  std::vector<int64_t> rows;
  for (int32_t r = 0; r < m; ++r) {
    positions.push_back(r == 1 ? 32001 : 17 * r);
    rows.push_back(int64_t{m - 1 - r} * width);
  }
  std::vector<double> frequencies;
  for (int32_t i = 0; i < half; ++i) frequencies.push_back(std::pow(1e4, -2.0 * i / dim));
  Operation op;
  op.name = fmt::format("rope {}x{}x{}{} to {}", m, heads, dim, norm ? " after its norm" : "", DtypeName(dtype));
  op.inputs = {matrices::RandomFloats(Count(int64_t{m} * width), 121), matrices::RandomFloats(Count(dim), 122)};
  op.outputs = Count(int64_t{m} * width);
  op.flops = (norm ? 7.0 : 3.0) * m * width;
  op.run = [=](const Arrays& in, float* out, const Executor& executor) {
    std::vector<float> table(Count(int64_t{m} * dim));
    RopeTable(positions.data(), m, frequencies.data(), half, kFactor, table.data(), executor);
    std::vector<uint8_t> stored(Count(int64_t{m} * width) * DtypeSize(dtype));
    RopeParams p;
    p.x = in[0].data();
    p.x_stride = width;
    p.m = m, p.heads = heads, p.head_dim = dim;
    p.cos_sin = table.data();
    p.norm = norm ? in[1].data() : nullptr;
    p.eps = kEps;
    p.out_dtype = dtype;
    p.out = stored.data();
    p.out_rows = rows.data();
    p.out_head_stride = dim;
    Rope(p, executor);
    for (int32_t r = 0; r < m; ++r) {
      LoadRows(dtype, stored.data() + Count(rows[Count(r)]) * DtypeSize(dtype), width, 1, width,
               out + int64_t{r} * width, width, executor);
    }
  };
  op.reference = [=](const Doubles& in) {
    Expected e{std::vector<double>(Count(int64_t{m} * width)), std::vector<double>(Count(int64_t{m} * width))};
    for (int32_t r = 0; r < m; ++r) {
      for (int32_t h = 0; h < heads; ++h) {
        const size_t at = Count(int64_t{r} * width + h * dim);
        std::vector<double> x(in[0].begin() + static_cast<int64_t>(at), in[0].begin() + static_cast<int64_t>(at) + dim);
        if (norm) {
          double sum = 0;
          for (const double v : x) sum += v * v;
          for (int32_t i = 0; i < dim; ++i) x[Count(i)] *= in[1][Count(i)] / std::sqrt(sum / dim + kEps);
        }
        for (int32_t i = 0; i < half; ++i) {
          const double angle = positions[Count(r)] * frequencies[Count(i)];
          const double a = x[Count(i)], b = x[Count(i + half)];
          e.value[at + Count(i)] = kFactor * (a * std::cos(angle) - b * std::sin(angle));
          e.value[at + Count(i + half)] = kFactor * (b * std::cos(angle) + a * std::sin(angle));
          e.bound[at + Count(i)] = e.bound[at + Count(i + half)] =
              (std::fabs(a) + std::fabs(b)) * kFactor * (1e-6 + DtypeEpsilon(dtype)) + 1e-7;
        }
      }
    }
    return e;
  };
  all->push_back(std::move(op));
}

inline void AddLinear(const matrices::Pair& pair, int32_t m, int32_t rows, int32_t cols, bool biased,
                      std::vector<Operation>* all) {
  const auto w = std::make_shared<matrices::Weights>(
      matrices::MakeWeights(pair.weights, rows, cols, 7u + static_cast<uint32_t>(cols)));
  Operation op;
  op.name = fmt::format("linear {} {}x{}x{}{}", matrices::Name(pair), m, rows, cols, biased ? " + bias" : "");
  op.inputs = {matrices::RandomFloats(Count(int64_t{m} * cols), 3), matrices::RandomFloats(Count(rows), 4)};
  op.outputs = Count(int64_t{m} * rows);
  op.flops = 2.0 * m * rows * cols;
  op.run = [=](const Arrays& in, float* out, const Executor& executor) {
    const int32_t threads = executor.run == nullptr ? 1 : std::max(executor.num_threads, 1);
    const size_t size = LinearWorkspaceSize(pair.weights, pair.activations, m, cols, threads);
    const std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(64, (size + 63) / 64 * 64), std::free);
    const LinearOutput output = {&w->matrix, biased ? in[1].data() : nullptr, out, rows};
    Linear(in[0].data(), cols, m, pair.activations, {&output, 1}, workspace.get(), size, executor);
  };
  op.reference = [=, x = op.inputs[0], bias = op.inputs[1]](const Doubles&) {
    matrices::ExpectedProduct e =
        matrices::Expect(*w, x, m, pair.activations, biased ? bias.data() : nullptr, ActiveSimd() == Simd::kAvx3Amx);
    return Expected{std::move(e.value), std::move(e.bound)};
  };
  all->push_back(std::move(op));
}

// One sequence of the attention: the queries are its last positions.
struct AttentionShape {
  Settings settings;
  int32_t dtype = PHSA_F32, tokens = 0, queries = 0, kv_heads = 2, group = 2, head_dim = 64;
  int32_t q_heads() const { return kv_heads * group; }
};

// Its stages on q, k and v, all [token][head][head_dim], with lists that the reference chose.
class AttentionCall {
 public:
  AttentionCall(const AttentionShape& shape, const Arrays& qkv) : shape_(shape) {
    std::mt19937 random(9);
    for (int32_t i = 0; i < shape.tokens; ++i) flags_.push_back(random() % 8 == 0);
    for (int32_t h = 0; h < shape.kv_heads; ++h) {
      methods_.push_back(reference::MethodOf(shape.settings, h, shape.head_dim, shape.dtype));
    }
    slots_ = methods_[0].top_k;
    const Doubles in = {{qkv[0].begin(), qkv[0].end()}, {qkv[1].begin(), qkv[1].end()}};
    lists_.assign(Count(int64_t{shape.queries} * shape.kv_heads * slots_), -1);
    for (int32_t h = 0; h < shape.kv_heads && slots_ > 0; ++h) {
      const reference::Method& method = methods_[Count(h)];
      const reference::Matrix k = Head(in[1], shape.tokens, shape.kv_heads, h);
      const reference::Matrix reps = reference::Represent(method, k, flags_);
      const reference::Matrix parts =
          method.parts > 1 ? reference::RepresentParts(method, k, flags_) : reference::Matrix();
      for (int32_t i = 0; i < shape.queries; ++i) {
        reference::Matrix q(shape.group, shape.head_dim);
        for (int32_t g = 0; g < shape.group; ++g) {
          const int64_t row = int64_t{i} * shape.q_heads() + h * shape.group + g;
          std::copy_n(in[0].begin() + row * shape.head_dim, shape.head_dim, q.Row(g).begin());
        }
        const reference::Choice choice = reference::Choose(method, q, reps, parts, first() + i);
        std::copy(choice.blocks.begin(), choice.blocks.end(), lists_.begin() + ListAt(i, h));
      }
    }
  }

  Arrays Run(const Arrays& qkv, bool choose, const std::vector<float>* d_out, const Executor& executor) const {
    const AttentionShape& s = shape_;
    PlanDesc desc;
    desc.settings = s.settings;
    desc.dtype = s.dtype;
    desc.num_q_heads = s.q_heads();
    desc.num_kv_heads = s.kv_heads;
    desc.head_dim = s.head_dim;
    desc.num_seqs = 1;
    desc.q_lens = &s.queries;
    desc.kv_lens = &s.tokens;
    desc.max_threads = std::max(1, executor.num_threads);
    const Plan plan(desc);
    const std::vector<uint8_t> q = Stored(qkv[0]), k = Stored(qkv[1]), v = Stored(qkv[2]);
    std::vector<uint8_t> out(q.size());
    std::vector<float> lse(Count(int64_t{s.queries} * s.q_heads()));
    std::vector<int32_t> lists = lists_;
    const Memory workspace(std::max(plan.WorkspaceSize(), d_out != nullptr ? plan.BackwardWorkspaceSize() : 0));
    auto params = Init<ForwardParams>();
    params.q = q.data();
    params.q_token_stride = params.out_token_stride = int64_t{s.q_heads()} * s.head_dim;
    params.q_head_stride = params.out_head_stride = s.head_dim;
    params.kv = Keys(k.data(), v.data());
    params.out = out.data();
    params.lse = lse.data();
    params.selection = lists.data();
    params.workspace = workspace.data.get();
    params.workspace_size = workspace.size;
    params.executor = executor;
    if (choose) {
      plan.Forward(params);
    } else {
      plan.Attend(params);
    }
    if (d_out == nullptr) return {Loaded(out)};
    auto backward = Init<BackwardParams>();
    const std::vector<uint8_t> d = Stored(*d_out);
    std::vector<uint8_t> d_q(q.size()), d_k(k.size()), d_v(v.size());
    backward.q = q.data();
    backward.kv = params.kv;
    backward.out = out.data();
    backward.lse = lse.data();
    backward.selection = slots_ > 0 ? lists.data() : nullptr;
    backward.d_out = d.data();
    backward.d_q = d_q.data();
    backward.d_k = d_k.data();
    backward.d_v = d_v.data();
    backward.q_token_stride = backward.out_token_stride = backward.d_out_token_stride = backward.d_q_token_stride =
        params.q_token_stride;
    backward.d_k_token_stride = backward.d_v_token_stride = int64_t{s.kv_heads} * s.head_dim;
    backward.q_head_stride = backward.out_head_stride = backward.d_out_head_stride = backward.d_q_head_stride =
        backward.d_k_head_stride = backward.d_v_head_stride = s.head_dim;
    backward.workspace = workspace.data.get();
    backward.workspace_size = workspace.size;
    backward.executor = executor;
    plan.Backward(backward);
    return {Loaded(d_q), Loaded(d_k), Loaded(d_v)};
  }

  // The softmax over the tokens that the lists and rules give each query. What a kernel may lose: see
  // attention_test.cc.
  Expected Attend(const Doubles& qkv) const {
    const AttentionShape& s = shape_;
    Expected e{std::vector<double>(qkv[0].size()), std::vector<double>(qkv[0].size())};
    for (int32_t h = 0; h < s.q_heads(); ++h) {
      const reference::Method& method = methods_[Count(h / s.group)];
      const reference::Matrix q = Head(qkv[0], s.queries, s.q_heads(), h);
      const reference::Matrix k = Head(qkv[1], s.tokens, s.kv_heads, h / s.group);
      const reference::Matrix v = Head(qkv[2], s.tokens, s.kv_heads, h / s.group);
      reference::Matrix sizes = v;
      for (double& x : sizes.data) x = std::fabs(x);
      const double weights = (32 * Longest(q) * Longest(k) * method.scale + 64) * 0x1p-24;
      const double relative = 2 * weights + (s.dtype == PHSA_F32 ? 0 : 3 * DtypeEpsilon(s.dtype));
      for (int32_t i = 0; i < s.queries; ++i) {
        const auto list = std::span(lists_).subspan(Count(ListAt(i, h / s.group)), Count(slots_));
        const std::vector<int32_t> tokens = reference::Tokens(method, list, first() + i);
        const std::vector<double> out = reference::Attend(method, q.Row(i), k, v, tokens).out;
        const std::vector<double> size = reference::Attend(method, q.Row(i), k, sizes, tokens).out;
        for (int32_t d = 0; d < s.head_dim; ++d) {
          const size_t at = Count((int64_t{i} * s.q_heads() + h) * s.head_dim + d);
          e.value[at] = out[Count(d)];
          e.bound[at] = relative * size[Count(d)] + 1e-6;
        }
      }
    }
    return e;
  }

  double TokensRead() const {
    const BlockRules rules = RulesOf(shape_.settings);
    const int32_t block = shape_.settings.block_size;
    double read = 0;
    for (int32_t p = first(); p < shape_.tokens; ++p) {
      read += static_cast<double>(rules.TokensRead(p, rules.Chosen(p / block), block));
    }
    return read;
  }

 private:
  struct Memory {
    explicit Memory(size_t bytes)
        : size((bytes + 63) / 64 * 64), data(size > 0 ? std::aligned_alloc(64, size) : nullptr, std::free) {}
    size_t size;
    std::unique_ptr<void, void (*)(void*)> data;
  };

  int32_t first() const { return shape_.tokens - shape_.queries; }
  int64_t ListAt(int32_t query, int32_t kv_head) const { return (int64_t{query} * shape_.kv_heads + kv_head) * slots_; }
  reference::Matrix Head(const std::vector<double>& rows, int32_t num_rows, int32_t heads, int32_t head) const {
    reference::Matrix out(num_rows, shape_.head_dim);
    for (int32_t r = 0; r < num_rows; ++r) {
      std::copy_n(rows.begin() + (int64_t{r} * heads + head) * shape_.head_dim, shape_.head_dim, out.Row(r).begin());
    }
    return out;
  }
  static double Longest(const reference::Matrix& m) {
    double longest = 0;
    for (int32_t r = 0; r < m.rows; ++r) {
      double sum = 0;
      for (const double x : m.Row(r)) sum += x * x;
      longest = std::max(longest, sum);
    }
    return std::sqrt(longest);
  }
  KeyValues Keys(const void* k, const void* v) const {
    auto kv = Init<KeyValues>();
    kv.k = k;
    kv.v = v;
    kv.k_token_stride = kv.v_token_stride = int64_t{shape_.kv_heads} * shape_.head_dim;
    kv.k_head_stride = kv.v_head_stride = shape_.head_dim;
    kv.flags = flags_.data();
    return kv;
  }
  std::vector<uint8_t> Stored(const std::vector<float>& values) const {
    std::vector<uint8_t> out(values.size() * DtypeSize(shape_.dtype));
    for (size_t i = 0; i < values.size(); ++i) {
      StoreElement(shape_.dtype, out.data(), static_cast<int64_t>(i), values[i]);
    }
    return out;
  }
  std::vector<float> Loaded(const std::vector<uint8_t>& bytes) const {
    std::vector<float> out(bytes.size() / DtypeSize(shape_.dtype));
    for (size_t i = 0; i < out.size(); ++i) out[i] = LoadElement(shape_.dtype, bytes.data(), static_cast<int64_t>(i));
    return out;
  }

  AttentionShape shape_;
  std::vector<uint8_t> flags_;
  std::vector<reference::Method> methods_;  // [kv_head]
  int32_t slots_ = 0;
  std::vector<int32_t> lists_;  // [query][kv_head][slot]
};

// attend (with lists that are given) and forward (which chooses them), the former with its backward pass.
inline void AddAttention(const AttentionShape& s, std::vector<Operation>* all) {
  const auto normal = [&](int32_t tokens, int32_t heads, uint32_t seed) {
    std::vector<float> values = matrices::RandomFloats(Count(int64_t{tokens} * heads * s.head_dim), seed);
    for (float& v : values) v = RoundTo(s.dtype, v);
    return values;
  };
  const Arrays qkv = {normal(s.queries, s.q_heads(), 1), normal(s.tokens, s.kv_heads, 2),
                      normal(s.tokens, s.kv_heads, 3)};
  const auto call = std::make_shared<AttentionCall>(s, qkv);
  for (const bool choose : {false, true}) {
    Operation op;
    op.name = fmt::format("{} {} {} {} of {} tokens{}", s.queries == 1 ? "decode" : "prefill",
                          choose ? "forward" : "attend", Name(s.settings.policy), DtypeName(s.dtype), s.tokens,
                          s.settings.parts > 1 ? fmt::format(", {} parts", s.settings.parts) : "");
    op.inputs = qkv;
    op.outputs = qkv[0].size();
    op.flops = 4.0 * s.head_dim * s.q_heads() * call->TokensRead();
    op.run = [=](const Arrays& in, float* out, const Executor& executor) {
      const Arrays results = call->Run(in, choose, nullptr, executor);
      std::copy(results[0].begin(), results[0].end(), out);
    };
    op.reference = [=](const Doubles& in) { return call->Attend(in); };
    if (!choose && s.queries == s.tokens && s.dtype == PHSA_F32) {
      op.gradients = [=](const Arrays& in, const std::vector<float>& d_out) {
        return call->Run(in, false, &d_out, Init<Executor>());
      };
    }
    all->push_back(std::move(op));
  }
}

inline std::vector<Operation> Operations(Size size) {
  std::vector<Operation> all;
  const bool model = size == Size::kModel;
  for (const matrices::Pair& pair : matrices::kPairs) {
    if (model) {
      for (const int32_t m : {1, 512}) AddLinear(pair, m, 1536, 1536, false, &all);
      continue;
    }
    constexpr int32_t kShapes[][3] = {{1, 1, 1},   {3, 5, 7},    {2, 16, 32},  {5, 17, 33},    {6, 32, 64},
                                      {7, 48, 31}, {9, 33, 160}, {13, 64, 96}, {20, 100, 300}, {1, 130, 576}};
    for (const auto& [m, rows, cols] : kShapes) {
      for (const bool biased : {false, true}) AddLinear(pair, m, rows, cols, biased, &all);
    }
  }
  AddGates(size, &all);
  if (model) {
    AddNorm(512, 1536, &all);
    AddRope(512, 12, 128, false, PHSA_BF16, &all);
  } else {
    for (const int32_t dim : {1, 7, 16, 33, 64, 576, 1000}) AddNorm(5, dim, &all);
    for (const int32_t dim : {2, 64, 80, 96, 128, 256}) {
      for (const bool norm : {false, true}) {
        for (const int32_t dtype : {PHSA_F32, PHSA_F16, PHSA_BF16}) AddRope(3, 2, dim, norm, dtype, &all);
      }
    }
  }
  for (const Policy policy : PoliciesThat(Runs)) {
    AttentionShape shape;
    shape.settings.policy = policy;
    shape.settings.block_size = BlockSizeOf(policy);
    if (!model) {
      shape.settings.init_tokens = shape.settings.local_tokens = shape.settings.block_size;
      shape.settings.top_k = 2;
    } else {
      shape.dtype = PHSA_BF16;
      shape.head_dim = 128;
    }
    for (const int32_t parts : {1, 4}) {
      if (parts > 1 && !HasMeans(policy)) continue;
      shape.settings.parts = parts;
      shape.tokens = model ? 2048 : 7 * shape.settings.block_size + 3;
      for (const int32_t queries : {shape.tokens, 1}) {
        shape.queries = queries;
        AddAttention(shape, &all);
      }
    }
  }
  return all;
}

}  // namespace phsa::operations

#endif  // PHSA_TESTS_OPERATIONS_H_
