#include "attention/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/dtype.h"
#include "base/errors.h"

namespace phsa::reference {
namespace {

double Dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

// log(e^a + e^b).
double LogAdd(double a, double b) {
  const double largest = std::max(a, b);
  return std::isinf(largest) ? largest : largest + std::log1p(std::exp(std::min(a, b) - largest));
}

// The logarithms of the softmax, in place; nothing for an empty row.
void LogSoftmax(std::vector<double>* row) {
  if (row->empty()) return;
  const double largest = *std::max_element(row->begin(), row->end());
  double sum = 0;
  for (const double x : *row) sum += std::exp(x - largest);
  for (double& x : *row) x -= largest + std::log(sum);
}

void RoundRow(int32_t dtype, std::span<double> row) {
  for (double& x : row) x = RoundTo(dtype, static_cast<float>(x));
}

// M(t) = λ·M0(t) + (1 - λ)·Mp(t) of the t-th run of m tokens, where Mp(t) = M0(t) if it has no punctuation.
void MixedMean(const Method& method, const Matrix& k, std::span<const uint8_t> flags, int32_t m, int32_t t,
               std::span<double> out) {
  std::vector<double> mean(out.size()), punctuation_mean(out.size());
  int32_t count = 0;
  for (int32_t i = t * m; i < (t + 1) * m; ++i) {
    const bool flag = !flags.empty() && flags[static_cast<size_t>(i)] != 0;
    const std::span<const double> key = k.Row(i);
    for (size_t c = 0; c < out.size(); ++c) {
      mean[c] += key[c] / m;
      if (flag) punctuation_mean[c] += key[c];
    }
    count += flag;
  }
  for (size_t c = 0; c < out.size(); ++c) {
    const double mp = count > 0 ? punctuation_mean[c] / count : mean[c];
    out[c] = method.lambda * mean[c] + (1 - method.lambda) * mp;
  }
}

void PooledMean(const Matrix& k, int32_t j, std::span<double> out) {
  for (int32_t i = j * kPoolStride; i < j * kPoolStride + kPoolSize; ++i) {
    for (size_t c = 0; c < out.size(); ++c) out[c] += k.Row(i)[c] / kPoolSize;
  }
}

void Bounds(const Method& method, const Matrix& k, int32_t t, std::span<double> out) {
  const size_t d = out.size() / 2;
  for (size_t c = 0; c < d; ++c) {
    double high = k.Row(t * method.block)[c], low = high;
    for (int32_t i = t * method.block; i < (t + 1) * method.block; ++i) {
      high = std::max(high, k.Row(i)[c]);
      low = std::min(low, k.Row(i)[c]);
    }
    out[c] = high;
    out[d + c] = low;
  }
}

// The logit of one query head for one row of reps, before the scale.
double Relevance(const Method& method, std::span<const double> q, std::span<const double> rep) {
  if (method.representation != Representation::kBounds) return Dot(q, rep);
  double sum = 0;
  for (size_t c = 0; c < q.size(); ++c) sum += std::max(q[c] * rep[c], q[c] * rep[q.size() + c]);
  return sum;
}

}  // namespace

Method MethodOf(const Settings& settings, int32_t kv_head, int32_t head_dim, int32_t dtype, double scale) {
  Method out;
  switch (settings.policy) {
    case Policy::kPhsa:
    case Policy::kInfllm2: out.representation = Representation::kMixedMean; break;
    case Policy::kInfllm2_64: out.representation = Representation::kPooled; break;
    case Policy::kQuest: out.representation = Representation::kBounds; break;
    case Policy::kDense:
    case Policy::kStreaming:
    case Policy::kSepllm: out.representation = Representation::kNone; break;
  }
  out.dense = settings.policy == Policy::kDense;
  out.block = settings.block_size;
  out.init_blocks = (settings.init_tokens + out.block - 1) / out.block;
  out.local_blocks = (settings.local_tokens + out.block - 1) / out.block;
  out.top_k = out.representation == Representation::kNone ? 0 : settings.top_k;
  out.dense_below = settings.dense_below;
  if (out.representation == Representation::kMixedMean) out.parts = settings.parts;
  out.survivors = settings.survivors == 0 ? 0 : std::max(settings.survivors, settings.top_k);
  out.lambda = settings.head_lambda.empty() ? settings.lambda : settings.head_lambda[static_cast<size_t>(kv_head)];
  if (settings.policy == Policy::kInfllm2) out.lambda = 1;
  out.scale = scale > 0 ? scale : 1 / std::sqrt(static_cast<double>(head_dim));
  out.group_reduce = settings.group_reduce;
  out.dtype = dtype;
  return out;
}

Matrix Represent(const Method& method, const Matrix& k, std::span<const uint8_t> flags) {
  Matrix reps;
  switch (method.representation) {
    case Representation::kNone: break;
    case Representation::kMixedMean:
      reps = Matrix(k.rows / method.block, k.cols);
      for (int32_t t = 0; t < reps.rows; ++t) MixedMean(method, k, flags, method.block, t, reps.Row(t));
      break;
    case Representation::kPooled:
      reps = Matrix(k.rows < kPoolSize ? 0 : (k.rows - kPoolSize) / kPoolStride + 1, k.cols);
      for (int32_t j = 0; j < reps.rows; ++j) PooledMean(k, j, reps.Row(j));
      break;
    case Representation::kBounds:
      reps = Matrix(k.rows / method.block, 2 * k.cols);
      for (int32_t t = 0; t < reps.rows; ++t) Bounds(method, k, t, reps.Row(t));
      break;
  }
  RoundRow(method.dtype, reps.data);
  return reps;
}

Matrix RepresentParts(const Method& method, const Matrix& k, std::span<const uint8_t> flags) {
  const int32_t m = method.block / method.parts;
  Matrix rows(k.rows / m, k.cols);
  for (int32_t t = 0; t < rows.rows; ++t) MixedMean(method, k, flags, m, t, rows.Row(t));
  RoundRow(method.dtype, rows.data);
  return rows;
}

std::vector<double> LogScores(const Method& method, const Matrix& q, const Matrix& reps, int32_t position) {
  const int32_t own = position / method.block;
  const bool pooled = method.representation == Representation::kPooled;
  // Rows of reps whose last token lies before the own block.
  int32_t visible = own;
  if (pooled) {
    visible = 0;
    while (visible * kPoolStride + kPoolSize <= own * method.block) ++visible;
  }
  PHSA_CHECK(visible <= reps.rows);

  constexpr double kNone = -std::numeric_limits<double>::infinity();
  std::vector<double> group(static_cast<size_t>(visible), kNone);
  for (int32_t h = 0; h < q.rows; ++h) {
    std::vector<double> s(static_cast<size_t>(visible));
    for (int32_t t = 0; t < visible; ++t) {
      s[static_cast<size_t>(t)] = Relevance(method, q.Row(h), reps.Row(t)) * method.scale;
    }
    LogSoftmax(&s);
    for (size_t t = 0; t < s.size(); ++t) {
      group[t] = method.group_reduce == GroupReduce::kMax ? std::max(group[t], s[t]) : LogAdd(group[t], s[t]);
    }
  }
  if (!pooled) return group;

  // Max-pooling with window 5, stride 4, pad 1: block B takes the best of the entries that touch it.
  std::vector<double> blocks(static_cast<size_t>(own), kNone);
  for (int32_t block = 0; block < own; ++block) {
    for (int32_t j = std::max(0, 4 * block - 1); j <= 4 * block + 3 && j < visible; ++j) {
      blocks[static_cast<size_t>(block)] = std::max(blocks[static_cast<size_t>(block)], group[static_cast<size_t>(j)]);
    }
  }
  return blocks;
}

std::vector<int32_t> FineBlocks(const Method& method, std::span<const double> coarse, int32_t position) {
  const int32_t own = position / method.block, local_begin = own - method.local_blocks;
  Method survive = method;
  survive.top_k = method.survivors == 0 ? own : method.survivors;
  survive.dense_below = 0;
  const std::vector<int32_t> survivors = Select(survive, coarse, position);
  std::vector<int32_t> blocks;
  for (int32_t t = 0; t < own; ++t) {
    if (t < method.init_blocks || t >= local_begin ||
        std::find(survivors.begin(), survivors.end(), t) != survivors.end()) {
      blocks.push_back(t);
    }
  }
  return blocks;
}

std::vector<double> LogScoresOfParts(const Method& method, const Matrix& q, const Matrix& parts,
                                     std::span<const int32_t> fine_blocks, int32_t position) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  std::vector<double> group(static_cast<size_t>(position / method.block), kNone);
  for (int32_t h = 0; h < q.rows; ++h) {
    std::vector<double> s;
    for (const int32_t t : fine_blocks) {
      for (int32_t p = 0; p < method.parts; ++p) {
        s.push_back(Relevance(method, q.Row(h), parts.Row(t * method.parts + p)) * method.scale);
      }
    }
    LogSoftmax(&s);
    for (size_t i = 0; i < fine_blocks.size(); ++i) {
      double block = kNone;
      for (size_t p = 0; p < static_cast<size_t>(method.parts); ++p) {
        block = LogAdd(block, s[i * static_cast<size_t>(method.parts) + p]);
      }
      double& total = group[static_cast<size_t>(fine_blocks[i])];
      total = method.group_reduce == GroupReduce::kMax ? std::max(total, block) : LogAdd(total, block);
    }
  }
  return group;
}

Choice Choose(const Method& method, const Matrix& q, const Matrix& reps, const Matrix& parts, int32_t position) {
  Choice out{LogScores(method, q, reps, position), {}};
  if (method.parts == 1) {
    out.blocks = Select(method, out.scores, position);
    return out;
  }
  const std::vector<int32_t> fine = FineBlocks(method, out.scores, position);
  out.scores = LogScoresOfParts(method, q, parts, fine, position);
  out.blocks = Select(method, out.scores, fine, position);
  return out;
}

std::vector<int32_t> Select(const Method& method, std::span<const double> scores, int32_t position) {
  std::vector<int32_t> all(static_cast<size_t>(position / method.block));
  std::iota(all.begin(), all.end(), 0);
  return Select(method, scores, all, position);
}

std::vector<int32_t> Select(const Method& method, std::span<const double> scores, std::span<const int32_t> scored,
                            int32_t position) {
  if (method.dense || position < method.dense_below) return {};
  std::vector<int32_t> candidates;
  for (const int32_t t : scored) {
    if (t >= method.init_blocks && t < position / method.block - method.local_blocks) candidates.push_back(t);
  }
  const auto score = [&](int32_t t) {
    const double s = scores[static_cast<size_t>(t)];
    return std::isnan(s) ? -std::numeric_limits<double>::infinity() : s;
  };
  // Stable: equal scores keep the lower block first.
  std::stable_sort(candidates.begin(), candidates.end(), [&](int32_t a, int32_t b) { return score(a) > score(b); });
  if (candidates.size() > static_cast<size_t>(method.top_k)) candidates.resize(static_cast<size_t>(method.top_k));
  std::sort(candidates.begin(), candidates.end());
  return candidates;
}

std::vector<int32_t> Tokens(const Method& method, std::span<const int32_t> chosen, int32_t position) {
  const int32_t own = position / method.block;
  const bool all = method.dense || position < method.dense_below;
  std::vector<int32_t> tokens;
  for (int32_t t = 0; t <= own; ++t) {
    const bool init = t < method.init_blocks;
    const bool local = t >= own - method.local_blocks;
    if (!all && !init && !local && std::find(chosen.begin(), chosen.end(), t) == chosen.end()) continue;
    for (int32_t i = t * method.block; i < (t + 1) * method.block && i <= position; ++i) {
      if (method.window == 0 || i > position - method.window) tokens.push_back(i);
    }
  }
  return tokens;
}

std::vector<int32_t> SepllmTokens(const Method& method, std::span<const uint8_t> separators, int32_t position) {
  const int32_t local_begin = (position / method.block - method.local_blocks) * method.block;
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i <= position; ++i) {
    if (i < method.init_blocks * method.block || i >= local_begin || separators[static_cast<size_t>(i)] != 0 ||
        position < method.dense_below) {
      tokens.push_back(i);
    }
  }
  return tokens;
}

Attention Attend(const Method& method, std::span<const double> q, const Matrix& k, const Matrix& v,
                 std::span<const int32_t> tokens, const float* sink) {
  std::vector<double> s;
  for (const int32_t i : tokens) s.push_back(Dot(q, k.Row(i)) * method.scale);
  double largest = *std::max_element(s.begin(), s.end());
  if (sink != nullptr) largest = std::max(largest, double{*sink});
  double sum = sink != nullptr ? std::exp(*sink - largest) : 0;
  Attention result;
  result.out.assign(static_cast<size_t>(v.cols), 0);
  for (size_t n = 0; n < tokens.size(); ++n) {
    const double p = std::exp(s[n] - largest);
    sum += p;
    const std::span<const double> value = v.Row(tokens[n]);
    for (size_t c = 0; c < value.size(); ++c) result.out[c] += p * value[c];
  }
  for (double& x : result.out) x /= sum;
  result.lse = largest + std::log(sum);
  return result;
}

void AttendGradients(const Method& method, std::span<const double> q, const Matrix& k, const Matrix& v,
                     std::span<const int32_t> tokens, std::span<const double> d_out, std::span<double> d_q, Matrix* d_k,
                     Matrix* d_v) {
  const Attention forward = Attend(method, q, k, v, tokens);
  // Through the softmax: dS_i = P_i · (dP_i - Σ_j P_j·dP_j), and Σ_j P_j·dP_j = out · d_out.
  const double delta = Dot(forward.out, d_out);
  std::fill(d_q.begin(), d_q.end(), 0);
  for (const int32_t i : tokens) {
    const double p = std::exp(Dot(q, k.Row(i)) * method.scale - forward.lse);
    const double ds = p * (Dot(d_out, v.Row(i)) - delta) * method.scale;
    const std::span<const double> key = k.Row(i);
    const std::span<double> d_key = d_k->Row(i), d_value = d_v->Row(i);
    for (size_t c = 0; c < q.size(); ++c) {
      d_q[c] += ds * key[c];
      d_key[c] += ds * q[c];
      d_value[c] += p * d_out[c];
    }
  }
}

}  // namespace phsa::reference
