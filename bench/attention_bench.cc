// Times the attention's stages on the CPU and compares policies with our own dense path, in one run, on the same
// inputs.
//
// Every timed result is checked: sampled queries are computed again in double precision from the same inputs, their
// choice included. Times are the best of --repeat runs.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "command_line.h"
#include "peak.h"
#include "phsa/attention.h"
#include "phsa/threads.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<int> lengths = {4096, 8192, 16384, 32768, 65536};
  int q_heads = 16, kv_heads = 8, dim = 128, top_k = 16, init = 128, local = 512, parts = 1, survivors = 0;
  int threads = 0, repeat = 3;
  float lambda = 0.9f;
  std::vector<std::string> dtypes = {"f32", "bf16"}, policies = {"dense", "phsa"};
  bool backward = true, decode = true, json = false;
};

constexpr const char* kOptions =
    "bench_attention [--lengths 4096,8192] [--heads 16/8] [--dim 128] [--dtype f32,bf16] [--top-k 16] [--init 128]\n"
    "                [--local 512] [--parts 1] [--survivors 0] [--lambda 0.9] [--policies dense,phsa] [--threads N] "
    "[--repeat 3] [--backward 0|1]\n"
    "                [--decode 0|1] [--json]\n";

constexpr CommandLine kCommandLine = {"bench_attention", kOptions};

Options Parse(int argc, char** argv) {
  Options o;
  const auto take = [&](const std::string& flag, const std::string& value) {
    if (flag == "--json") {
      o.json = true;
    } else if (flag == "--lengths") {
      o.lengths.clear();
      for (const std::string& v : Split(value)) o.lengths.push_back(std::atoi(v.c_str()));
    } else if (flag == "--heads") {
      if (std::sscanf(value.c_str(), "%d/%d", &o.q_heads, &o.kv_heads) != 2)
        kCommandLine.Refuse("--heads wants QUERY/KV");
    } else if (flag == "--dim") {
      o.dim = std::atoi(value.c_str());
    } else if (flag == "--dtype") {
      o.dtypes = Split(value);
    } else if (flag == "--policies") {
      o.policies = Split(value);
    } else if (flag == "--top-k") {
      o.top_k = std::atoi(value.c_str());
    } else if (flag == "--parts") {
      o.parts = std::atoi(value.c_str());
    } else if (flag == "--survivors") {
      o.survivors = std::atoi(value.c_str());
    } else if (flag == "--init") {
      o.init = std::atoi(value.c_str());
    } else if (flag == "--local") {
      o.local = std::atoi(value.c_str());
    } else if (flag == "--lambda") {
      o.lambda = std::strtof(value.c_str(), nullptr);
    } else if (flag == "--threads") {
      o.threads = std::atoi(value.c_str());
    } else if (flag == "--repeat") {
      o.repeat = std::max(1, std::atoi(value.c_str()));
    } else if (flag == "--backward") {
      o.backward = value == "1";
    } else if (flag == "--decode") {
      o.decode = value == "1";
    } else {
      return false;
    }
    return true;
  };
  kCommandLine.Read(argc, argv, "--json", take);
  if (o.threads == 0) o.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return o;
}

double Seconds(const std::function<void()>& fn, int repeat) {
  double best = 1e30;
  for (int i = 0; i < repeat; ++i) {
    const auto start = Clock::now();
    fn();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

double PeakGflops(phsa::ThreadPool& pool) {
  constexpr int64_t kSteps = 4000000;
  volatile float sink = 0;
  float results[1024] = {};
  const double seconds = Seconds(
      [&] {
        pool.Run(
            pool.num_threads(),
            [](void* arg, int32_t task, int32_t) { static_cast<float*>(arg)[task] = phsa::PeakLoop(kSteps); }, results);
        sink = sink + results[0];
      },
      3);
  return 2.0 * 16 * 12 * static_cast<double>(kSteps) * pool.num_threads() / seconds / 1e9;
}

uint16_t Bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float FromBf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// A tensor [token][head][dim] in the wanted type, with the same values readable as float. A cache that is decoded from
// lies [head][token][dim]: a head's rows beside each other, or every row costs a page of its own in the TLB.
struct Tensor {
  std::vector<float> f32;
  std::vector<uint16_t> bf16;
  int heads, dim;
  int64_t head_rows = 0;  // 0: [token][head][dim]; else tokens between the heads
  const void* data() const { return bf16.empty() ? static_cast<const void*>(f32.data()) : bf16.data(); }
  void* data() { return bf16.empty() ? static_cast<void*>(f32.data()) : bf16.data(); }
  int64_t token_stride() const { return head_rows > 0 ? dim : int64_t{heads} * dim; }
  int64_t head_stride() const { return head_rows > 0 ? head_rows * dim : dim; }
  float at(int64_t token, int head, int c) const {
    const size_t i = static_cast<size_t>(token * token_stride() + head * head_stride() + c);
    return bf16.empty() ? f32[i] : FromBf16(bf16[i]);
  }
};

// Neighbouring tokens of real text ask for similar things: each head's rows drift (`memory`) instead of being drawn
// anew. With 0.95 a tile of 64 queries names about 8 K distinct blocks, as queries of Qwen2.5-Coder-1.5B on essays do;
// the table prints what it was.
Tensor Make(int tokens, int heads, int dim, bool bf16, float memory, float size, uint32_t seed) {
  Tensor t{std::vector<float>(static_cast<size_t>(tokens) * heads * dim), {}, heads, dim};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const float fresh = std::sqrt(1 - memory * memory);
  const size_t row = static_cast<size_t>(heads) * dim;
  std::vector<float> state(row);
  for (float& x : state) x = normal(random);
  for (size_t i = 0; i < t.f32.size(); ++i) {
    float& x = state[i % row];
    x = memory * x + fresh * normal(random);
    t.f32[i] = x * size;
  }
  if (bf16) {
    t.bf16.resize(t.f32.size());
    for (size_t i = 0; i < t.f32.size(); ++i) t.bf16[i] = Bf16(t.f32[i]);
    t.f32.clear();
  }
  return t;
}

Tensor HeadMajor(const Tensor& t, int tokens) {
  Tensor turned = t;
  turned.head_rows = tokens;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t head = 0; head < t.heads; ++head) {
      const int64_t from = token * t.token_stride() + head * t.dim, to = head * turned.head_stride() + token * t.dim;
      if (t.bf16.empty()) {
        std::copy_n(t.f32.begin() + from, t.dim, turned.f32.begin() + to);
      } else {
        std::copy_n(t.bf16.begin() + from, t.dim, turned.bf16.begin() + to);
      }
    }
  }
  return turned;
}

struct Run {
  phsa::Settings settings;
  phsa::Plan plan;
  phsa::ForwardParams params;
  std::vector<std::byte> workspace, backward_workspace;
  std::vector<int32_t> selection;
  std::vector<float> lse;
  Tensor out;
};

std::byte* Align(std::vector<std::byte>& buffer) {
  return buffer.data() + (64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64) % 64;
}

Run Prepare(const Options& o, const std::string& policy, bool bf16, int q_len, int kv_len, const Tensor& q,
            const Tensor& k, const Tensor& v, const std::vector<uint8_t>& flags, phsa::ThreadPool& pool,
            bool backward) {
  phsa::PlanDesc desc;
  desc.settings.policy = phsa::PolicyFromName(policy);
  desc.settings.top_k = o.top_k;
  desc.settings.lambda = o.lambda;
  desc.settings.parts = o.parts;
  desc.settings.survivors = o.survivors;
  desc.settings.init_tokens = o.init;
  desc.settings.local_tokens = o.local;
  if (desc.settings.policy == phsa::Policy::kInfllm2_64) desc.settings.block_size = 64;
  desc.dtype = bf16 ? PHSA_BF16 : PHSA_F32;
  desc.num_q_heads = o.q_heads;
  desc.num_kv_heads = o.kv_heads;
  desc.head_dim = o.dim;
  desc.num_seqs = 1;
  desc.q_lens = &q_len;
  desc.kv_lens = &kv_len;
  desc.max_threads = pool.num_threads();
  Run run{desc.settings, phsa::Plan(desc), phsa::Init<phsa::ForwardParams>(), {}, {}, {}, {}, {}};
  run.workspace.resize(run.plan.WorkspaceSize() + 64);
  if (backward) run.backward_workspace.resize(run.plan.BackwardWorkspaceSize() + 64);
  run.selection.resize(static_cast<size_t>(q_len) * run.plan.SelectionHeads() * run.plan.SelectionSlots());
  run.lse.resize(static_cast<size_t>(q_len) * o.q_heads);
  run.out = Tensor{{}, {}, o.q_heads, o.dim};
  if (bf16) {
    run.out.bf16.resize(static_cast<size_t>(q_len) * o.q_heads * o.dim);
  } else {
    run.out.f32.resize(static_cast<size_t>(q_len) * o.q_heads * o.dim);
  }
  phsa::ForwardParams& p = run.params;
  p.q = q.data();
  p.q_token_stride = q.token_stride();
  p.q_head_stride = o.dim;
  p.kv = phsa::Init<phsa::KeyValues>();
  p.kv.k = k.data();
  p.kv.k_token_stride = k.token_stride();
  p.kv.k_head_stride = k.head_stride();
  p.kv.v = v.data();
  p.kv.v_token_stride = v.token_stride();
  p.kv.v_head_stride = v.head_stride();
  p.kv.flags = flags.data();
  p.executor = pool.executor();
  return run;
}

// Pointers into the Run itself: set once it has its final address.
void Attach(Run& run) {
  phsa::ForwardParams& p = run.params;
  p.out = run.out.data();
  p.out_token_stride = run.out.token_stride();
  p.out_head_stride = run.out.dim;
  p.lse = run.lse.data();
  p.selection = run.selection.empty() ? nullptr : run.selection.data();
  p.workspace = Align(run.workspace);
  p.workspace_size = run.plan.WorkspaceSize();
}

// The largest error of sampled outputs against double precision, and how many sampled choices differ from one made in
// double precision by more than rounding explains.
struct Check {
  double error = 0;
  int wrong_choices = 0;
};

Check Verify(const Options& o, const Run& run, int q_len, int kv_len, const Tensor& q, const Tensor& k, const Tensor& v,
             const std::vector<uint8_t>& flags, bool bf16) {
  Check check;
  std::mt19937 random(7);
  const int m = run.settings.block_size, group = o.q_heads / o.kv_heads, slots = run.plan.SelectionSlots();
  const double scale = 1 / std::sqrt(static_cast<double>(o.dim));
  for (int sample = 0; sample < 12; ++sample) {
    const int i = sample == 0 ? q_len - 1 : static_cast<int>(random() % static_cast<uint32_t>(q_len));
    const int position = kv_len - q_len + i, kv_head = static_cast<int>(random() % static_cast<uint32_t>(o.kv_heads));
    const int b = position / m, candidates_end = b - o.local / m, init = o.init / m;
    std::vector<int> tokens;
    const bool everything = slots == 0 || candidates_end - init <= slots;
    const int32_t* chosen =
        slots == 0 ? nullptr : run.selection.data() + (static_cast<size_t>(i) * o.kv_heads + kv_head) * slots;
    for (int t = 0; t <= position; ++t) {
      const int block = t / m;
      if (everything || block < init || block >= candidates_end ||
          std::find(chosen, chosen + slots, block) != chosen + slots) {
        tokens.push_back(t);
      }
    }
    if (!everything && run.settings.policy == phsa::Policy::kPhsa) {
      const double rounding = bf16 ? 1e-2 : 1e-4;
      // The heads' softmax values over `parts` means of each of the blocks, summed by block.
      const auto scores = [&](int parts, const std::vector<int>& blocks) {
        std::vector<double> total(static_cast<size_t>(b));
        const int run_tokens = m / parts;
        for (int g = 0; g < group; ++g) {
          std::vector<double> s;
          for (const int t : blocks) {
            for (int part = 0; part < parts; ++part) {
              const int first = t * m + part * run_tokens;
              int marks = 0;
              for (int j = first; j < first + run_tokens; ++j) marks += flags[static_cast<size_t>(j)];
              double dot = 0;
              for (int c = 0; c < o.dim; ++c) {
                double mean = 0, mean_marks = 0;
                for (int j = first; j < first + run_tokens; ++j) {
                  const double key = k.at(j, kv_head, c);
                  mean += key / run_tokens;
                  if (flags[static_cast<size_t>(j)]) mean_marks += key / marks;
                }
                double rep = marks == 0 ? mean : o.lambda * mean + (1 - o.lambda) * mean_marks;
                if (bf16) rep = FromBf16(Bf16(static_cast<float>(rep)));
                dot += rep * q.at(i, kv_head * group + g, c);
              }
              s.push_back(dot * scale);
            }
          }
          const double max = *std::max_element(s.begin(), s.end());
          double sum = 0;
          for (double& x : s) sum += x = std::exp(x - max);
          for (size_t n = 0; n < s.size(); ++n) {
            total[static_cast<size_t>(blocks[n / static_cast<size_t>(parts)])] += s[n] / sum;
          }
        }
        return total;
      };
      // The n-th best of the blocks of `list` that are candidates.
      const auto nth = [&](const std::vector<double>& total, const std::vector<int>& list, int n) {
        std::vector<double> sorted;
        for (const int t : list) {
          if (t >= init && t < candidates_end) sorted.push_back(total[static_cast<size_t>(t)]);
        }
        std::nth_element(sorted.begin(), sorted.begin() + n - 1, sorted.end(), std::greater<>());
        return sorted[static_cast<size_t>(n - 1)];
      };
      std::vector<int> all(static_cast<size_t>(b));
      std::iota(all.begin(), all.end(), 0);
      std::vector<double> total = scores(1, all);
      std::vector<int> certain = all;
      if (o.parts > 1) {
        // Where rounding decides which blocks survive, some may and some must.
        std::vector<int> possible = all;
        const int survivors = std::max(o.survivors, slots);
        if (o.survivors > 0 && candidates_end - init > survivors) {
          const double last = nth(total, all, survivors);
          const auto without = [&](double least) {
            std::vector<int> kept;
            for (const int t : all) {
              if (t < init || t >= candidates_end || total[static_cast<size_t>(t)] >= least) kept.push_back(t);
            }
            return kept;
          };
          possible = without(last * (1 - rounding));
          certain = without(last * (1 + rounding));
        }
        total = scores(o.parts, possible);
      }
      const double least = nth(total, certain, slots) * (1 - rounding);
      for (int j = 0; j < slots; ++j) check.wrong_choices += !(total[static_cast<size_t>(chosen[j])] >= least);
    }
    for (int g = 0; g < group; ++g) {
      const int head = kv_head * group + g;
      std::vector<double> p(tokens.size());
      double max = -1e300, sum = 0;
      for (size_t t = 0; t < tokens.size(); ++t) {
        double dot = 0;
        for (int c = 0; c < o.dim; ++c) dot += double{q.at(i, head, c)} * k.at(tokens[t], kv_head, c);
        p[t] = dot * scale;
        max = std::max(max, p[t]);
      }
      for (double& x : p) sum += x = std::exp(x - max);
      for (int c = 0; c < o.dim; ++c) {
        double expected = 0;
        for (size_t t = 0; t < tokens.size(); ++t) expected += p[t] / sum * v.at(tokens[t], kv_head, c);
        check.error = std::max(check.error, std::abs(expected - run.out.at(i, head, c)));
      }
    }
  }
  return check;
}

// Distinct chosen blocks in tiles of 64 queries, over K.
double Distinct(const Options& o, const Run& run, int q_len) {
  const int slots = run.plan.SelectionSlots();
  if (slots == 0) return 0;
  double total = 0;
  int tiles = 0;
  for (int begin = q_len / 2 / 64 * 64; begin + 64 <= q_len; begin += 1024, ++tiles) {
    std::vector<int32_t> seen;
    for (int i = begin; i < begin + 64; ++i) {
      const int32_t* row = run.selection.data() + static_cast<size_t>(i) * o.kv_heads * slots;
      for (int j = 0; j < slots; ++j) {
        if (row[j] >= 0) seen.push_back(row[j]);
      }
    }
    std::sort(seen.begin(), seen.end());
    total += static_cast<double>(std::unique(seen.begin(), seen.end()) - seen.begin()) / slots;
  }
  return tiles == 0 ? 0 : total / tiles;
}

void Report(const Options& o, const std::string& test, const std::string& dtype, const std::string& policy, int length,
            double ms, double dense_ms, double gflops, double peak, double read_share, double distinct,
            const std::string& stages, const Check& check) {
  const double tolerance = dtype == "bf16" ? 4e-2 : 1e-4;
  const bool ok = check.error < tolerance && check.wrong_choices == 0;
  if (o.json) {
    std::printf(
        "{\"test\":\"%s\",\"dtype\":\"%s\",\"attention\":\"%s\",\"top_k\":%d,\"tokens\":%d,\"ms\":%.4f,"
        "\"against_dense\":%.3f,\"gflops\":%.1f,\"peak_gflops\":%.1f,\"read_share\":%.4f,\"distinct_blocks_over_k\":%."
        "2f,"
        "\"max_error\":%.2e,\"checked\":%s,\"threads\":%d,\"target\":\"%s\"}\n",
        test.c_str(), dtype.c_str(), policy.c_str(), o.top_k, length, ms, dense_ms / ms, gflops, peak, read_share,
        distinct, check.error, ok ? "true" : "false", o.threads, phsa_target());
  } else {
    std::printf(
        "%-9s %-5s %-11s %7d %10.3f ms %7.2fx %8.1f GFLOP/s (%3.0f %%)  read %5.1f %%  blocks/K %4.1f  error %.0e %s  "
        "%s\n",
        test.c_str(), dtype.c_str(), policy.c_str(), length, ms, dense_ms / ms, gflops, 100 * gflops / peak,
        100 * read_share, distinct, check.error, ok ? "ok" : "WRONG", stages.c_str());
  }
  std::fflush(stdout);
  if (!ok) std::exit(1);
}

void BenchLength(const Options& o, int length, const std::string& dtype, double peak_f32, phsa::ThreadPool& pool) {
  const bool bf16 = dtype == "bf16";
  const Tensor q = Make(length, o.q_heads, o.dim, bf16, 0.95f, 1.5f, 1),
               k = Make(length, o.kv_heads, o.dim, bf16, 0.95f, 1, 2),
               v = Make(length, o.kv_heads, o.dim, bf16, 0, 1, 3);
  std::vector<uint8_t> flags(static_cast<size_t>(length));
  std::mt19937 random(4);
  for (uint8_t& f : flags) f = random() % 8 == 0;
  // vdpbf16ps does twice the multiply-adds of an f32 instruction.
  const bool pairs = bf16 && std::strcmp(phsa_target(), "avx3_bf16") == 0;
  const double peak = peak_f32 * (pairs ? 2 : 1);

  double dense_forward = 0, dense_backward = 0, dense_decode = 0;
  for (const std::string& policy : o.policies) {
    const bool train = o.backward && length <= 16384;
    Run run = Prepare(o, policy, bf16, length, length, q, k, v, flags, pool, train);
    Attach(run);
    const int repeat = length > 16384 ? std::min(2, o.repeat) : o.repeat;
    const double forward = Seconds([&] { run.plan.Forward(run.params); }, repeat) * 1e3;
    int64_t read = 0, dense = 0;
    run.plan.TokensRead(run.params.selection, &read, &dense);
    const Check check = Verify(o, run, length, length, q, k, v, flags, bf16);
    std::string stages;
    double score_flops = 0;
    if (run.plan.SelectionSlots() > 0) {
      const double select = Seconds([&] { run.plan.Select(run.params); }, repeat) * 1e3;
      const double attend = Seconds([&] { run.plan.Attend(run.params); }, repeat) * 1e3;
      std::vector<std::byte> reps(static_cast<size_t>(run.plan.NumReps()) * o.kv_heads * run.plan.RepWidth() * 4);
      phsa::KeyValues kv = run.params.kv;
      kv.reps = reps.data();
      kv.rep_row_stride = int64_t{o.kv_heads} * run.plan.RepWidth();
      kv.rep_head_stride = run.plan.RepWidth();
      const double represent = Seconds([&] { run.plan.Represent(kv, run.params.executor); }, repeat) * 1e3;
      char text[128];
      std::snprintf(text, sizeof text, "represent %.2f, score+select %.2f, attend %.2f ms", represent,
                    select - represent, attend);
      stages = text;
      score_flops = double{1} * length * length / run.plan.RepStride() * o.q_heads * run.plan.RepWidth();
    }
    if (policy == "dense") dense_forward = forward;
    const double flops = 4.0 * o.dim * static_cast<double>(read) + score_flops;
    const double share = static_cast<double>(read) / static_cast<double>(dense);
    Report(o, "forward", dtype, policy, length, forward, dense_forward, flops / forward / 1e6, peak, share,
           Distinct(o, run, length), stages, check);

    if (train) {
      const Tensor d_out = Make(length, o.q_heads, o.dim, bf16, 0, 1, 5);
      Tensor d_q = d_out, d_k = k, d_v = v;
      auto p = phsa::Init<phsa::BackwardParams>();
      p.q = run.params.q;
      p.q_token_stride = p.out_token_stride = p.d_out_token_stride = p.d_q_token_stride = q.token_stride();
      p.q_head_stride = p.out_head_stride = p.d_out_head_stride = p.d_q_head_stride = o.dim;
      p.kv = run.params.kv;
      p.out = run.out.data();
      p.lse = run.lse.data();
      p.selection = run.params.selection;
      p.d_out = d_out.data();
      p.d_q = d_q.data();
      p.d_k = d_k.data();
      p.d_v = d_v.data();
      p.d_k_token_stride = p.d_v_token_stride = k.token_stride();
      p.d_k_head_stride = p.d_v_head_stride = o.dim;
      p.workspace = Align(run.backward_workspace);
      p.workspace_size = run.plan.BackwardWorkspaceSize();
      p.executor = run.params.executor;
      const double backward = Seconds([&] { run.plan.Backward(p); }, std::min(2, o.repeat)) * 1e3;
      if (policy == "dense") dense_backward = backward;
      // Softmax does not change when all keys move together: the gradients of each head's keys, summed over tokens,
      // weighted by nothing, need not vanish, but Σ_i dQ_i · Q_i = Σ_j dK_j · K_j must hold (both are Σ dS · S).
      double left = 0, right = 0, size = 0;
      for (int t = 0; t < length; ++t) {
        for (int h = 0; h < o.q_heads; ++h) {
          for (int c = 0; c < o.dim; ++c) {
            const double x = double{d_q.at(t, h, c)} * q.at(t, h, c);
            left += x;
            size += std::abs(x);
          }
        }
        for (int h = 0; h < o.kv_heads; ++h) {
          for (int c = 0; c < o.dim; ++c) right += double{d_k.at(t, h, c)} * k.at(t, h, c);
        }
      }
      Check identity;
      identity.error = std::abs(left - right) / size;
      Report(o, "backward", dtype, policy, length, backward, dense_backward,
             10.0 * o.dim * static_cast<double>(read) / backward / 1e6, peak_f32, share, 0, "", identity);
    }

    if (o.decode) {
      const Tensor cached_k = HeadMajor(k, length), cached_v = HeadMajor(v, length);
      Run one = Prepare(o, policy, bf16, 1, length, q, cached_k, cached_v, flags, pool, false);
      Attach(one);
      // As in generation: representatives are kept, and the one of a block is written when it completes.
      std::vector<std::byte> reps(static_cast<size_t>(one.plan.NumReps()) * o.kv_heads * one.plan.RepWidth() * 4);
      if (one.plan.SelectionSlots() > 0) {
        phsa::KeyValues& kv = one.params.kv;
        kv.reps = reps.data();
        kv.rep_row_stride = one.plan.RepWidth();
        kv.rep_head_stride = one.plan.NumReps() * one.plan.RepWidth();
        run.plan.Represent(kv, run.params.executor);
      }
      const double decode = Seconds([&] { one.plan.Forward(one.params); }, 20 * o.repeat) * 1e3;
      if (policy == "dense") dense_decode = decode;
      one.plan.TokensRead(one.params.selection, &read, &dense);
      const Check last = Verify(o, one, 1, length, q, cached_k, cached_v, flags, bf16);
      const double reps_flops =
          one.plan.SelectionSlots() > 0 ? 2.0 * length / one.plan.RepStride() * o.q_heads * one.plan.RepWidth() : 0;
      Report(o, "decode", dtype, policy, length, decode, dense_decode,
             (4.0 * o.dim * static_cast<double>(read) + reps_flops) / decode / 1e6, peak,
             static_cast<double>(read) / static_cast<double>(dense), 0, "", last);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options o = Parse(argc, argv);
    phsa::ThreadPool pool(o.threads);
    const double peak = PeakGflops(pool);
    if (!o.json) {
      std::printf(
          "phsa %s, target %s, %d threads, peak %.0f GFLOP/s (f32 multiply-adds); %d q / %d kv heads x %d, K = %d, "
          "init %d, local %d, lambda %.2f, %d parts of %d; best of %d\n",
          phsa_version(), phsa_target(), o.threads, peak, o.q_heads, o.kv_heads, o.dim, o.top_k, o.init, o.local,
          static_cast<double>(o.lambda), o.parts, o.parts > 1 ? o.survivors : 0, o.repeat);
    }
    for (const std::string& dtype : o.dtypes) {
      if (dtype != "f32" && dtype != "bf16") kCommandLine.Refuse("--dtype takes f32 and bf16");
      for (const int length : o.lengths) BenchLength(o, length, dtype, peak, pool);
    }
    return 0;
  } catch (const phsa::Error& e) {
    std::fprintf(stderr, "bench_attention: %s\n", e.what());
    return 2;
  }
}
