// The oracle: each stage of the method in plain double precision, one sequence and one KV head at a time, in the order
// and with the names of docs/phsa.md. It is written to be read and believed; the kernels are written to be fast, and
// are tested against this.
#ifndef PHSA_ATTENTION_REFERENCE_H_
#define PHSA_ATTENTION_REFERENCE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "attention/plan.h"

namespace phsa::reference {

// Row-major.
struct Matrix {
  Matrix() = default;
  Matrix(int32_t num_rows, int32_t num_cols)
      : rows(num_rows), cols(num_cols), data(static_cast<size_t>(num_rows) * static_cast<size_t>(num_cols)) {}
  std::span<double> Row(int32_t r) {
    return std::span(data).subspan(static_cast<size_t>(r) * static_cast<size_t>(cols), static_cast<size_t>(cols));
  }
  std::span<const double> Row(int32_t r) const {
    return std::span(data).subspan(static_cast<size_t>(r) * static_cast<size_t>(cols), static_cast<size_t>(cols));
  }

  int32_t rows = 0, cols = 0;
  std::vector<double> data;
};

// What the settings mean for one KV head.
struct Method {
  Representation representation = Representation::kNone;
  bool dense = false;
  int32_t block = 16;        // m
  int32_t init_blocks = 0;   // n_init
  int32_t local_blocks = 0;  // w / m
  int32_t top_k = 0;         // k
  int32_t dense_below = 0;
  int32_t window = 0;     // tokens read at most; 0: no limit
  int32_t parts = 1;      // n
  int32_t survivors = 0;  // S; 0: all
  double lambda = 1;      // λ
  double scale = 1;       // 1/√d
  GroupReduce group_reduce = GroupReduce::kSum;
  int32_t dtype = PHSA_F32;  // of the cache, hence of the representatives
};

// Derived from the settings alone, not from a plan, so that tests judge the plan's arithmetic too. scale 0: 1/√d.
Method MethodOf(const Settings& settings, int32_t kv_head, int32_t head_dim, int32_t dtype, double scale = 0);

// represent: one row per complete block (per pooled entry for infllm2-64), rounded to the method's dtype.
//  - phsa, infllm2: M(t) = λ·M0(t) + (1 - λ)·Mp(t);
//  - infllm2-64: the mean of tokens [16j, 16j + 32);
//  - quest: the maximum of each channel, then the minimum of each.
// k: [tokens][head_dim]; flags: [tokens], or empty for none. Returns [rows][head_dim] (quest: twice as wide).
Matrix Represent(const Method& method, const Matrix& k, std::span<const uint8_t> flags);

// The parts of every complete block, n rows each: the mixed means of runs of m/n tokens, rounded likewise.
Matrix RepresentParts(const Method& method, const Matrix& k, std::span<const uint8_t> flags);

// score: what the query heads that choose together (rows of q) think of each block t before the query's own, init and
// local blocks included: the logarithm of the sum (or the largest) of their softmax values, so that scores of any
// distance are ranked. q: [heads][head_dim]; reps: as Represent returns them, at least those before the own block.
// Returns [position / block].
std::vector<double> LogScores(const Method& method, const Matrix& q, const Matrix& reps, int32_t position);

// The blocks whose parts are scored, ascending: init, local and the S candidates that score best by their reps.
std::vector<int32_t> FineBlocks(const Method& method, std::span<const double> coarse, int32_t position);

// The same as LogScores by the parts of those blocks alone (as RepresentParts returns them); others have -infinity.
std::vector<double> LogScoresOfParts(const Method& method, const Matrix& q, const Matrix& parts,
                                     std::span<const int32_t> fine_blocks, int32_t position);

// select: the top_k best candidates, ascending. Ties go to the lower block; a score that is no number is the lowest.
// With parts, `scored` lists the blocks that have a score: no other is a candidate.
// Empty where the query reads everything because of `dense` or `dense_below`.
std::vector<int32_t> Select(const Method& method, std::span<const double> scores, int32_t position);
std::vector<int32_t> Select(const Method& method, std::span<const double> scores, std::span<const int32_t> scored,
                            int32_t position);

// score and select, by parts where the method has them.
struct Choice {
  std::vector<double> scores;   // as LogScores or LogScoresOfParts
  std::vector<int32_t> blocks;  // as Select
};
Choice Choose(const Method& method, const Matrix& q, const Matrix& reps, const Matrix& parts, int32_t position);

// The tokens that a query at `position` reads: init, local and chosen blocks, ascending, without duplicates, causal.
std::vector<int32_t> Tokens(const Method& method, std::span<const int32_t> chosen, int32_t position);

// The same for sepllm: init, local, and each token before the local blocks that is a separator.
std::vector<int32_t> SepllmTokens(const Method& method, std::span<const uint8_t> separators, int32_t position);

struct Attention {
  std::vector<double> out;  // [head_dim]
  double lse = 0;           // natural logarithm
};

// attend: softmax attention of one query head over the given tokens. q: [head_dim]; k, v: [tokens][head_dim]. sink: the
// score of one more key, whose value is zero; null: there is none.
Attention Attend(const Method& method, std::span<const double> q, const Matrix& k, const Matrix& v,
                 std::span<const int32_t> tokens, const float* sink = nullptr);

// The gradients of Attend, the tokens taken as a constant. d_q, row of one query head, is overwritten; what belongs to
// the keys and values is added to d_k and d_v, which all queries and the heads of a group share.
void AttendGradients(const Method& method, std::span<const double> q, const Matrix& k, const Matrix& v,
                     std::span<const int32_t> tokens, std::span<const double> d_out, std::span<double> d_q, Matrix* d_k,
                     Matrix* d_v);

}  // namespace phsa::reference

#endif  // PHSA_ATTENTION_REFERENCE_H_
