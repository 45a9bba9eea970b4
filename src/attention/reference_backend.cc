// The oracle as a backend: gathers rows from wherever they lie, calls the stages, and writes back. One thread, no
// workspace. It answers to the plan's numbers, as every backend does.
#include <cmath>
#include <vector>

#include "attention/plan.h"
#include "attention/reference.h"
#include "base/dtype.h"

namespace phsa {
namespace {

using reference::Matrix;
using reference::Method;

Method MethodOf(const PlanImpl& plan, int32_t kv_head) {
  Method method;
  method.representation = plan.representation;
  method.dense = plan.dense_blocks == kDenseEverywhere;
  method.block = plan.block;
  method.init_blocks = plan.init_blocks;
  method.local_blocks = plan.local_blocks;
  method.top_k = plan.top_k;
  method.dense_below = plan.settings.dense_below;
  method.window = plan.window;
  method.parts = plan.parts;
  method.survivors = plan.survivors;
  method.lambda = plan.lambda[static_cast<size_t>(kv_head)];
  method.scale = plan.scale;
  method.group_reduce = plan.settings.group_reduce;
  method.dtype = plan.dtype;
  return method;
}

void LoadRow(int32_t dtype, const void* data, int64_t offset, std::span<double> row) {
  for (size_t c = 0; c < row.size(); ++c) row[c] = LoadElement(dtype, data, offset + static_cast<int64_t>(c));
}

void StoreRow(int32_t dtype, std::span<const double> row, void* data, int64_t offset) {
  for (size_t c = 0; c < row.size(); ++c) {
    StoreElement(dtype, data, offset + static_cast<int64_t>(c), static_cast<float>(row[c]));
  }
}

// A row of keys or values, which may be codes.
void LoadKvRow(const PlanImpl& plan, const void* data, int64_t offset, const uint16_t* scale, std::span<double> row) {
  if (plan.kv_dtype != PHSA_INT8) return LoadRow(plan.dtype, data, offset, row);
  const int8_t* const codes = static_cast<const int8_t*>(data) + offset;
  for (size_t c = 0; c < row.size(); ++c) row[c] = FromCode(codes[c], *scale, plan.dtype);
}

Matrix LoadKeys(const PlanImpl& plan, const ForwardParams& params, int32_t s, int32_t kv_head) {
  Matrix keys(plan.seqs[s].kv_len, plan.head_dim);
  for (int32_t i = 0; i < keys.rows; ++i) {
    LoadKvRow(plan, params.kv.k, KeyOffset(plan, params.kv, s, i, kv_head),
              params.kv_scales.k + ScaleOffset(plan, params, s, i, kv_head), keys.Row(i));
  }
  return keys;
}

Matrix LoadValues(const PlanImpl& plan, const ForwardParams& params, int32_t s, int32_t kv_head) {
  Matrix values(plan.seqs[s].kv_len, plan.head_dim);
  for (int32_t i = 0; i < values.rows; ++i) {
    LoadKvRow(plan, params.kv.v, ValueOffset(plan, params.kv, s, i, kv_head),
              params.kv_scales.v + ScaleOffset(plan, params, s, i, kv_head), values.Row(i));
  }
  return values;
}

std::vector<uint8_t> LoadFlags(const PlanImpl& plan, const KeyValues& kv, int32_t s) {
  std::vector<uint8_t> flags;
  if (kv.flags == nullptr) return flags;
  for (int32_t i = 0; i < plan.seqs[s].kv_len; ++i) flags.push_back(kv.flags[FlagOffset(plan, kv, s, i)]);
  return flags;
}

Matrix LoadRows(const PlanImpl& plan, const KeyValues& kv, int32_t s, int32_t kv_head) {
  Matrix reps(plan.NumRepRows(plan.seqs[s].kv_len), plan.rep_width);
  for (int32_t r = 0; r < reps.rows; ++r) {
    LoadRow(plan.dtype, kv.reps, RepOffset(plan, kv, s, r, kv_head), reps.Row(r));
  }
  return reps;
}

Matrix LoadReps(const PlanImpl& plan, const ForwardParams& params, int32_t s, int32_t kv_head) {
  const KeyValues& kv = params.kv;
  if (kv.reps == nullptr || plan.PartsInReps()) {
    return reference::Represent(MethodOf(plan, kv_head), LoadKeys(plan, params, s, kv_head), LoadFlags(plan, kv, s));
  }
  return LoadRows(plan, kv, s, kv_head);
}

Matrix LoadParts(const PlanImpl& plan, const ForwardParams& params, int32_t s, int32_t kv_head) {
  if (plan.parts == 1) return {};
  const KeyValues& kv = params.kv;
  if (kv.reps != nullptr && plan.PartsInReps()) return LoadRows(plan, kv, s, kv_head);
  return reference::RepresentParts(MethodOf(plan, kv_head), LoadKeys(plan, params, s, kv_head), LoadFlags(plan, kv, s));
}

// The rows of one query's heads [first_head, first_head + heads).
Matrix LoadHeads(const PlanImpl& plan, const void* data, int64_t token_stride, int64_t head_stride, int64_t query,
                 int32_t first_head, int32_t heads) {
  Matrix rows(heads, plan.head_dim);
  for (int32_t h = 0; h < heads; ++h) {
    LoadRow(plan.dtype, data, query * token_stride + (first_head + h) * head_stride, rows.Row(h));
  }
  return rows;
}

// Where the list of a query and a choosing head starts in selection and selection_scores.
int64_t SelectionOffset(const PlanImpl& plan, int64_t query, int32_t selection_head) {
  return (query * plan.selection_heads + selection_head) * plan.top_k;
}

// The blocks listed there, without the -1 at the end.
std::span<const int32_t> Chosen(const PlanImpl& plan, const int32_t* selection, int64_t query, int32_t q_head) {
  if (plan.top_k == 0) return {};
  const int32_t* list = selection + SelectionOffset(plan, query, q_head / plan.rows_of_group());
  size_t count = 0;
  while (count < static_cast<size_t>(plan.top_k) && list[count] >= 0) ++count;
  return {list, count};
}

void Represent(const PlanImpl& plan, const ForwardParams& params) {
  const KeyValues& kv = params.kv;
  for (int32_t s = 0; s < static_cast<int32_t>(plan.seqs.size()); ++s) {
    const int32_t begin = plan.NumRepRows(plan.seqs[s].first_position());
    const int32_t end = plan.NumRepRows(plan.seqs[s].kv_len);
    if (begin == end) continue;
    const std::vector<uint8_t> flags = LoadFlags(plan, kv, s);
    for (int32_t kv_head = 0; kv_head < plan.num_kv_heads; ++kv_head) {
      const Method method = MethodOf(plan, kv_head);
      const Matrix keys = LoadKeys(plan, params, s, kv_head);
      const Matrix reps = plan.PartsInReps() ? reference::RepresentParts(method, keys, flags)
                                             : reference::Represent(method, keys, flags);
      for (int32_t r = begin; r < end; ++r) {
        StoreRow(plan.dtype, reps.Row(r), kv.reps, RepOffset(plan, kv, s, r, kv_head));
      }
    }
  }
}

void Select(const PlanImpl& plan, const ForwardParams& params) {
  if (plan.top_k == 0) return;
  const int32_t choosing = plan.rows_of_group();  // query heads that share a choice
  for (int32_t s = 0; s < static_cast<int32_t>(plan.seqs.size()); ++s) {
    const PlanSequence& seq = plan.seqs[s];
    if (seq.q_len == 0) continue;
    for (int32_t kv_head = 0; kv_head < plan.num_kv_heads; ++kv_head) {
      const Method method = MethodOf(plan, kv_head);
      const Matrix reps = LoadReps(plan, params, s, kv_head);
      const Matrix parts = LoadParts(plan, params, s, kv_head);
      for (int32_t first = kv_head * plan.group; first < (kv_head + 1) * plan.group; first += choosing) {
        for (int32_t i = 0; i < seq.q_len; ++i) {
          const int64_t query = seq.q_start + i;
          const int32_t position = seq.first_position() + i;
          const Matrix q =
              LoadHeads(plan, params.q, params.q_token_stride, params.q_head_stride, query, first, choosing);
          const auto [scores, chosen] = reference::Choose(method, q, reps, parts, position);
          const int64_t offset = SelectionOffset(plan, query, first / choosing);
          for (size_t j = 0; j < static_cast<size_t>(plan.top_k); ++j) {
            const bool listed = j < chosen.size();
            params.selection[offset + static_cast<int64_t>(j)] = listed ? chosen[j] : -1;
            if (params.selection_scores == nullptr) continue;
            params.selection_scores[offset + static_cast<int64_t>(j)] =
                listed ? static_cast<float>(std::exp(scores[static_cast<size_t>(chosen[j])])) : 0;
          }
        }
      }
    }
  }
}

void Attend(const PlanImpl& plan, const ForwardParams& params) {
  for (int32_t s = 0; s < static_cast<int32_t>(plan.seqs.size()); ++s) {
    const PlanSequence& seq = plan.seqs[s];
    if (seq.q_len == 0) continue;
    for (int32_t kv_head = 0; kv_head < plan.num_kv_heads; ++kv_head) {
      const Method method = MethodOf(plan, kv_head);
      const Matrix k = LoadKeys(plan, params, s, kv_head);
      const Matrix v = LoadValues(plan, params, s, kv_head);
      for (int32_t h = kv_head * plan.group; h < (kv_head + 1) * plan.group; ++h) {
        for (int32_t i = 0; i < seq.q_len; ++i) {
          const int64_t query = seq.q_start + i;
          const int32_t position = seq.first_position() + i;
          const Matrix q = LoadHeads(plan, params.q, params.q_token_stride, params.q_head_stride, query, h, 1);
          const std::vector<int32_t> tokens =
              reference::Tokens(method, Chosen(plan, params.selection, query, h), position);
          const float* const sink = params.sinks != nullptr ? params.sinks + h : nullptr;
          const reference::Attention result = reference::Attend(method, q.Row(0), k, v, tokens, sink);
          StoreRow(plan.dtype, result.out, params.out, query * params.out_token_stride + h * params.out_head_stride);
          if (params.lse != nullptr) params.lse[query * plan.num_q_heads + h] = static_cast<float>(result.lse);
        }
      }
    }
  }
}

void Forward(const PlanImpl& plan, const ForwardParams& params) {
  if (plan.representation != Representation::kNone && params.kv.reps != nullptr) {
    Represent(plan, params);
  }
  ForwardParams stages = params;
  std::vector<int32_t> selection;
  if (params.selection == nullptr) {
    selection.resize(static_cast<size_t>(plan.num_queries * plan.selection_heads * plan.top_k));
    stages.selection = selection.data();
  }
  Select(plan, stages);
  Attend(plan, stages);
}

void Backward(const PlanImpl& plan, const BackwardParams& params) {
  auto read = Init<ForwardParams>();
  read.kv = params.kv;
  for (int32_t s = 0; s < static_cast<int32_t>(plan.seqs.size()); ++s) {
    const PlanSequence& seq = plan.seqs[s];
    for (int32_t kv_head = 0; kv_head < plan.num_kv_heads; ++kv_head) {
      const Method method = MethodOf(plan, kv_head);
      const Matrix k = LoadKeys(plan, read, s, kv_head);
      const Matrix v = LoadValues(plan, read, s, kv_head);
      Matrix d_k(k.rows, k.cols), d_v(v.rows, v.cols), d_q(1, k.cols);
      for (int32_t h = kv_head * plan.group; h < (kv_head + 1) * plan.group; ++h) {
        for (int32_t i = 0; i < seq.q_len; ++i) {
          const int64_t query = seq.q_start + i;
          const Matrix q = LoadHeads(plan, params.q, params.q_token_stride, params.q_head_stride, query, h, 1);
          const Matrix d_out =
              LoadHeads(plan, params.d_out, params.d_out_token_stride, params.d_out_head_stride, query, h, 1);
          const std::vector<int32_t> tokens =
              reference::Tokens(method, Chosen(plan, params.selection, query, h), seq.first_position() + i);
          reference::AttendGradients(method, q.Row(0), k, v, tokens, d_out.Row(0), d_q.Row(0), &d_k, &d_v);
          StoreRow(plan.dtype, d_q.Row(0), params.d_q, query * params.d_q_token_stride + h * params.d_q_head_stride);
        }
      }
      for (int32_t i = 0; i < seq.kv_len; ++i) {
        const int64_t row = seq.kv_start + i;
        StoreRow(plan.dtype, d_k.Row(i), params.d_k, row * params.d_k_token_stride + kv_head * params.d_k_head_stride);
        StoreRow(plan.dtype, d_v.Row(i), params.d_v, row * params.d_v_token_stride + kv_head * params.d_v_head_stride);
      }
    }
  }
}

}  // namespace

const Backend& ReferenceBackend() {
  static constexpr Backend kBackend = {Represent, Select, Attend, Forward, Backward};
  return kBackend;
}

}  // namespace phsa
