// Times the matrix products at the shapes of real models: many rows of x (prefill) in GFLOP/s, one row (decode) in GB/s
// of weights read. Beside them, measured in the same run: the multiply-adds that the cores reach, the bytes they read,
// and, where it was found, oneDNN. Every timed result is checked against double precision on sampled elements.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/dtype.h"
#include "base/simd.h"
#include "command_line.h"
#include "ops/linear.h"
#include "peak.h"
#include "phsa/threads.h"

#if defined(PHSA_HAS_ONEDNN)
#include <oneapi/dnnl/dnnl.hpp>
#endif

namespace {

using Clock = std::chrono::steady_clock;
using phsa::ActivationType;
using phsa::Matrix;
using phsa::WeightType;

struct Options {
  std::vector<int> rows = {1, 8, 64, 512};
  // rows × columns of W: SmolLM2-135M's and Qwen2.5-Coder-1.5B's.
  std::vector<std::string> shapes = {"576x576",   "1536x576",  "576x1536",  "49152x576",
                                     "1536x1536", "8960x1536", "1536x8960", "151936x1536"};
  std::vector<std::string> types = {"f32/f32", "bf16/bf16", "int8/bf16", "int8/int8", "int4/bf16", "int4/int8"};
  int threads = 0, repeat = 5;
  bool onednn = true;
};

constexpr const char* kOptions =
    "bench_linear [--m 1,8,64,512] [--shapes 576x576,49152x576] [--types int4/bf16,int4/int8] [--threads N]\n"
    "             [--repeat 5] [--target NAME] [--onednn 0|1]\n"
    "types: WEIGHTS/ACTIVATIONS: f32/f32, bf16/bf16, and int8, int4, int4k with f32, bf16, int8; where the CPU has\n"
    "both, also int5, int5k, int6 with bf16, int8\n";

constexpr CommandLine kCommandLine = {"bench_linear", kOptions};

Options Parse(int argc, char** argv) {
  Options o;
  const auto take = [&](const std::string& flag, const std::string& value) {
    if (flag == "--m") {
      o.rows.clear();
      for (const std::string& v : Split(value)) o.rows.push_back(std::max(1, std::atoi(v.c_str())));
    } else if (flag == "--shapes") {
      o.shapes = Split(value);
    } else if (flag == "--types") {
      o.types = Split(value);
    } else if (flag == "--threads") {
      o.threads = std::atoi(value.c_str());
    } else if (flag == "--repeat") {
      o.repeat = std::max(1, std::atoi(value.c_str()));
    } else if (flag == "--target") {
      phsa::SetSimd(value);
    } else if (flag == "--onednn") {
      o.onednn = value == "1";
    } else {
      return false;
    }
    return true;
  };
  kCommandLine.Read(argc, argv, "", take);
  if (o.threads <= 0) o.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return o;
}

// The best of `repeat` runs, or of as many as fit into 50 ms.
double Seconds(const std::function<void()>& fn, int repeat) {
  double best = 1e30, total = 0;
  for (int i = 0; i < repeat || total < 0.05; ++i) {
    const auto start = Clock::now();
    fn();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::min(best, seconds);
    total += seconds;
  }
  return best;
}

double PeakGflops(phsa::ThreadPool& pool) {
  constexpr int64_t kSteps = 2000000;
  std::vector<float> results(static_cast<size_t>(pool.num_threads()));
  const double seconds = Seconds(
      [&] {
        pool.Run(
            pool.num_threads(),
            [](void* arg, int32_t task, int32_t) { static_cast<float*>(arg)[task] = phsa::PeakLoop(kSteps); },
            results.data());
      },
      5);
  return 2.0 * 16 * 12 * static_cast<double>(kSteps) * pool.num_threads() / seconds / 1e9;
}

double ReadGigabytes(phsa::ThreadPool& pool) {
  struct Job {
    std::vector<uint64_t> data;
    std::vector<uint64_t> sums;
  } job;
  job.data.assign(size_t{32} << 20, 1);  // 256 MB: no cache holds it
  job.sums.resize(64);
  const double seconds = Seconds(
      [&] {
        pool.Run(
            64,
            [](void* arg, int32_t task, int32_t) {
              Job& j = *static_cast<Job*>(arg);
              const size_t share = j.data.size() / 64;
              const uint64_t* const p = j.data.data() + share * static_cast<size_t>(task);
              uint64_t sums[32] = {};
              for (size_t i = 0; i < share; i += 32) {
                for (size_t lane = 0; lane < 32; ++lane) sums[lane] += p[i + lane];
              }
              j.sums[static_cast<size_t>(task)] = sums[0] + sums[31];
            },
            &job);
      },
      5);
  return static_cast<double>(job.data.size()) * 8 / seconds / 1e9;
}

struct Type {
  WeightType weights;
  ActivationType activations;
};

Type ParseType(const std::string& text) {
  constexpr const char* kActivations[] = {"f32", "bf16", "int8"};
  for (int w = 0; w < phsa::kNumWeightTypes; ++w) {
    const auto weights = static_cast<WeightType>(w);
    for (int a = 0; a < 3; ++a) {
      const auto activations = static_cast<ActivationType>(a);
      if (text != std::string(phsa::WeightTypeName(weights)) + "/" + kActivations[a]) continue;
      if (!phsa::HasProduct(weights, activations)) kCommandLine.Refuse("this CPU has no product of " + text);
      return {weights, activations};
    }
  }
  kCommandLine.Refuse("unknown type " + text);
}

Matrix MakeMatrix(WeightType type, int rows, int cols, uint32_t seed) {
  Matrix matrix(type, rows, cols);
  std::mt19937 rng(seed);
  const size_t n = static_cast<size_t>(cols), groups = (n + 31) / 32;
  std::vector<float> values(n), scales(groups, 0.01f), mins(groups, -0.08f);
  std::vector<uint8_t> codes(n), small(n / 8 + 1, 37);  // small: scales of two levels
  std::vector<uint16_t> factors(n / 256 + 1, phsa::F16FromF32(3e-4f)), min_factors(factors.size(), factors[0] | 0x8000);
  std::vector<int8_t> signed_codes(n);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (int r = 0; r < rows; ++r) {
    if (r % 64 == 0) {  // new numbers for some rows; drawing them all would take longer than the measurements
      for (size_t i = 0; i < n; ++i) {
        values[i] = uniform(rng);
        codes[i] = rng() & (type == WeightType::kInt6                                 ? 63
                            : type == WeightType::kInt5 || type == WeightType::kInt5K ? 31
                                                                                      : 15);
        signed_codes[i] = static_cast<int8_t>(static_cast<int>(rng() % 255) - 127);
      }
    }
    scales[static_cast<size_t>(r) % groups] = 0.01f + static_cast<float>(r % 7) * 1e-3f;
    if (type == WeightType::kInt4 || type == WeightType::kInt5) {
      matrix.SetRowCodes(r, codes.data(), scales.data(), mins.data());
    } else if (type == WeightType::kInt4K || type == WeightType::kInt5K) {
      matrix.SetRowCodes(r, codes.data(), {factors.data(), min_factors.data(), small.data(), small.data()});
    } else if (type == WeightType::kInt6) {
      matrix.SetRowInt6(r, codes.data(), factors.data(), reinterpret_cast<const int8_t*>(small.data()));
    } else if (type == WeightType::kInt8) {
      matrix.SetRowInt8(r, signed_codes.data(), scales.data());
    } else {
      matrix.SetRow(r, values.data());
    }
  }
  return matrix;
}

// The largest error of sampled elements of y, relative to the sum of the magnitudes of its terms.
double WorstError(const std::vector<float>& x, int m, const Matrix& w, ActivationType activations,
                  const std::vector<float>& y) {
  std::mt19937 rng(1);
  double worst = 0;
  const auto cols = static_cast<size_t>(w.cols());
  std::vector<float> weights(cols);
  for (int sample = 0; sample < 200; ++sample) {
    const int r = static_cast<int>(rng() % static_cast<uint32_t>(m));
    const int n = static_cast<int>(rng() % static_cast<uint32_t>(w.rows()));
    w.GetRow(n, weights.data());
    double sum = 0, size = 1e-30;
    for (size_t group = 0; group < cols; group += 32) {
      const float* const g = x.data() + static_cast<size_t>(r) * cols + group;
      const size_t count = std::min<size_t>(32, cols - group);
      float largest = 0;
      for (size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(g[i]));
      for (size_t i = 0; i < count; ++i) {
        double e = g[i];
        if (activations == ActivationType::kBf16) e = phsa::RoundTo(PHSA_BF16, g[i]);
        if (activations == ActivationType::kInt8) {
          e = static_cast<double>(largest / 127.0f) * std::nearbyint(g[i] * (127.0f / largest));
        }
        sum += e * weights[group + i];
        size += std::fabs(e * weights[group + i]);
      }
    }
    const double got = y[static_cast<size_t>(r) * static_cast<size_t>(w.rows()) + static_cast<size_t>(n)];
    const double error = std::fabs(got - sum) / size;
    worst = error > worst || std::isnan(error) ? error : worst;
  }
  return worst;
}

#if defined(PHSA_HAS_ONEDNN)
// The same shape by oneDNN, weights in the layout it likes best: f32, bf16, or u8 · s8 into s32. OMP_NUM_THREADS sets
// its threads. 0 where it has no such product on this CPU.
double OneDnnSeconds(int m, int rows, int cols, ActivationType activations, int repeat) {
  using dnnl::memory;
  static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  static dnnl::stream stream(engine);
  const bool int8 = activations == ActivationType::kInt8, bf16 = activations == ActivationType::kBf16;
  const auto src_type = int8 ? memory::data_type::u8 : bf16 ? memory::data_type::bf16 : memory::data_type::f32;
  const auto weight_type = int8 ? memory::data_type::s8 : src_type;
  const auto dst_type = int8 ? memory::data_type::s32 : memory::data_type::f32;
  const memory::desc src({m, cols}, src_type, memory::format_tag::ab);
  const memory::desc weights({cols, rows}, weight_type, memory::format_tag::any);
  const memory::desc dst({m, rows}, dst_type, memory::format_tag::ab);
  try {
    const dnnl::matmul::primitive_desc desc(dnnl::matmul::desc(src, weights, dst), engine);
    const memory x(desc.src_desc(), engine), w(desc.weights_desc(), engine), y(desc.dst_desc(), engine);
    std::memset(x.get_data_handle(), 1, desc.src_desc().get_size());
    std::memset(w.get_data_handle(), 1, desc.weights_desc().get_size());
    dnnl::matmul matmul(desc);
    const auto run = [&] {
      matmul.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, y}});
      stream.wait();
    };
    run();
    return Seconds(run, repeat);
  } catch (const dnnl::error&) {
    return 0;
  }
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const Options o = Parse(argc, argv);
  phsa::ThreadPool pool(o.threads);
  const double peak = PeakGflops(pool), read = ReadGigabytes(pool);
  std::printf("target %s, %d threads; f32 multiply-adds %.0f GFLOP/s, reading %.1f GB/s\n\n",
              phsa::Name(phsa::ActiveSimd()), o.threads, peak, read);
  std::printf("| weights/x | W | m | µs | GFLOP/s | of peak | GB/s | of reading | oneDNN GFLOP/s | ratio | error |\n");
  std::printf("|---|---|---|---|---|---|---|---|---|---|---|\n");
  bool right = true;
  for (const std::string& type_name : o.types) {
    const Type type = ParseType(type_name);
    for (const std::string& shape : o.shapes) {
      int rows = 0, cols = 0;
      if (std::sscanf(shape.c_str(), "%dx%d", &rows, &cols) != 2 || rows < 1 || cols < 1)
        kCommandLine.Refuse("--shapes wants ROWSxCOLS");
      // One row reads all weights once: as many copies as no cache can hold, used in turn, as the layers of a model
      // are.
      const size_t bytes = Matrix::Bytes(type.weights, rows, cols);
      const bool decodes = *std::min_element(o.rows.begin(), o.rows.end()) < 16;
      const size_t copies = decodes ? std::max<size_t>(1, (size_t{160} << 20) / bytes) : 1;
      std::vector<Matrix> matrices;
      for (size_t i = 0; i < copies; ++i) matrices.push_back(MakeMatrix(type.weights, rows, cols, 1));
      for (const int m : o.rows) {
        std::vector<float> x(static_cast<size_t>(m) * static_cast<size_t>(cols));
        std::mt19937 rng(2);
        std::normal_distribution<float> normal;
        for (float& v : x) v = normal(rng);
        std::vector<float> y(static_cast<size_t>(m) * static_cast<size_t>(rows));
        const size_t size = phsa::LinearWorkspaceSize(type.weights, type.activations, m, cols, o.threads);
        std::vector<uint8_t> buffer(size + 64);
        uint8_t* const workspace = buffer.data() + (64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64);
        size_t turn = 0;
        const auto one = [&] {
          const phsa::LinearOutput output = {&matrices[turn++ % copies], nullptr, y.data(), rows};
          phsa::Linear(x.data(), cols, m, type.activations, {&output, 1}, workspace, size, pool.executor());
        };
        // A single small product is over before a clock can tell: several in a row, as in a model.
        const int calls = m < 16 ? static_cast<int>(std::min<size_t>(copies, 64)) : 1;
        const double seconds = Seconds(
                                   [&] {
                                     for (int i = 0; i < calls; ++i) one();
                                   },
                                   o.repeat) /
                               calls;
        const double error = WorstError(x, m, matrices[0], type.activations, y);
        right = right && error < 1e-4;
        const double flops = 2.0 * m * rows * cols;
        const double speed = type.activations == ActivationType::kInt8   ? 4
                             : type.activations == ActivationType::kBf16 ? 2
                                                                         : 1;
        double other = 0;
#if defined(PHSA_HAS_ONEDNN)
        // With few rows our weights come from memory; those of a single oneDNN product would come from a cache.
        if (o.onednn && m >= 16) other = OneDnnSeconds(m, rows, cols, type.activations, o.repeat);
#endif
        std::printf("| %s | %s | %d | %.1f | %.0f | %.0f %% | %.1f | %.0f %% | ", type_name.c_str(), shape.c_str(), m,
                    seconds * 1e6, flops / seconds / 1e9, 100 * flops / seconds / 1e9 / (peak * speed),
                    static_cast<double>(bytes) / seconds / 1e9,
                    100 * static_cast<double>(bytes) / seconds / 1e9 / read);
        if (other > 0) {
          std::printf("%.0f | %.2f", flops / other / 1e9, other / seconds);
        } else {
          std::printf("– | –");
        }
        std::printf(" | %.1e%s |\n", error, error < 1e-4 ? "" : " WRONG");
        std::fflush(stdout);
      }
    }
  }
  return right ? 0 : 1;
}
