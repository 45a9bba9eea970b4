// Random attention problems, and a session that lays one out in memory and runs it through phsa::Plan. Shared by the
// tests, and free of any test framework, so that benchmarks and fuzzers may use it.
//
// A problem (AttentionCase, AttentionData) says what is computed; RunOptions says how it lies in memory and how it is
// cut into calls. Results are indexed by sequence and position, whatever the options, so that two runs of one problem
// are compared by ==.
#ifndef PHSA_TESTS_ATTENTION_CASES_H_
#define PHSA_TESTS_ATTENTION_CASES_H_

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/policies.h"
#include "base/dtype.h"
#include "phsa/attention.h"

namespace phsa::cases {

using Random = std::mt19937;

inline int32_t Uniform(Random* random, int32_t low, int32_t high) {  // both ends included
  return low + static_cast<int32_t>((*random)() % static_cast<uint32_t>(high - low + 1));
}
template <class T>
T OneOf(Random* random, std::initializer_list<T> values) {
  return values.begin()[(*random)() % values.size()];
}

struct AttentionCase {
  Settings settings;
  int32_t dtype = PHSA_F32;
  bool codes = false;  // keys and values are 8-bit codes
  int32_t num_kv_heads = 1;
  int32_t group = 1;
  int32_t head_dim = 64;
  std::vector<int32_t> kv_lens;
  std::vector<int32_t> first;  // the queries of sequence s are its positions first[s] … kv_lens[s] - 1
  bool flags = true;
  float scale = 0;
  int32_t window = 0;
  std::vector<float> sinks;  // [q_head]; empty: none
  uint32_t seed = 1;

  int32_t num_q_heads() const { return num_kv_heads * group; }
  int32_t num_seqs() const { return static_cast<int32_t>(kv_lens.size()); }
};

inline std::string Joined(const std::vector<int32_t>& values) {
  std::string out;
  for (const int32_t value : values) {
    if (!out.empty()) out += ',';
    out += std::to_string(value);
  }
  return out;
}

inline std::string Describe(const AttentionCase& c) {
  return fmt::format("{} {}{} heads {}x{} head_dim {} kv_lens [{}] first [{}] flags {} scale {} seed {}",
                     SettingsToJson(c.settings), DtypeName(c.dtype), c.codes ? " int8" : "", c.num_kv_heads, c.group,
                     c.head_dim, Joined(c.kv_lens), Joined(c.first), c.flags, c.scale, c.seed);
}

inline std::vector<float> Normal(Random* random, int64_t count, float deviation, int32_t dtype) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = RoundTo(dtype, normal(*random));
  return out;
}

// What the sequences hold: every value is one that the case's dtype has. All positions have queries, so that any cut
// of the sequence into calls has its data here.
struct AttentionData {
  std::vector<std::vector<float>> q;        // [seq][position][q_head][head_dim]
  std::vector<std::vector<float>> k, v;     // [seq][position][kv_head][head_dim]
  std::vector<std::vector<uint8_t>> flags;  // [seq][position]
  // Where keys and values are codes: [seq][position][kv_head].
  std::vector<std::vector<uint16_t>> k_scales, v_scales;
};

// The code of which `value` is what it stands for, at least nearly. 0 beside a scale that is none.
inline int8_t CodeOf(float value, uint16_t scale) {
  const float code = std::nearbyint(value / F32FromBf16(scale));
  return std::isnan(code) ? int8_t{0} : static_cast<int8_t>(std::clamp(code, -127.0f, 127.0f));
}

// Makes of each row of `width` numbers those that its codes stand for, and returns the scales.
inline std::vector<uint16_t> ToCodes(int32_t width, int32_t dtype, std::vector<float>* rows) {
  std::vector<uint16_t> scales;
  for (size_t at = 0; at < rows->size(); at += static_cast<size_t>(width)) {
    const std::span row = std::span(*rows).subspan(at, static_cast<size_t>(width));
    float largest = 0;
    for (const float x : row) largest = std::max(largest, std::fabs(x));
    scales.push_back(CodeScale(largest));
    for (float& x : row) x = FromCode(CodeOf(x, scales.back()), scales.back(), dtype);
  }
  return scales;
}

inline AttentionData MakeData(const AttentionCase& c) {
  Random random(c.seed);
  AttentionData data;
  // Flat, usual and peaked softmax rows.
  const float sharpness = OneOf(&random, {0.3f, 1.0f, 3.0f, 30.0f, 300.0f, 3000.0f});
  for (const int32_t len : c.kv_lens) {
    const int64_t kv = int64_t{len} * c.num_kv_heads * c.head_dim;
    data.q.push_back(Normal(&random, kv * c.group, sharpness, c.dtype));
    data.k.push_back(Normal(&random, kv, 1, c.dtype));
    data.v.push_back(Normal(&random, kv, 1, c.dtype));
    data.k_scales.emplace_back();
    data.v_scales.emplace_back();
    if (c.codes) {
      data.k_scales.back() = ToCodes(c.head_dim, c.dtype, &data.k.back());
      data.v_scales.back() = ToCodes(c.head_dim, c.dtype, &data.v.back());
    }
    data.flags.emplace_back();
    // Stretches without any punctuation, and dense ones.
    const uint32_t rate = OneOf(&random, {2u, 8u, 40u});
    for (int32_t i = 0; i < len; ++i) data.flags.back().push_back(random() % rate == 0);
  }
  return data;
}

enum class Layout {
  kPacked,     // [token][head][head_dim], nothing between
  kPadded,     // the same with odd gaps between heads, tokens, pages and sequences
  kHeadMajor,  // [head][token][head_dim]
};

struct RunOptions {
  Layout layout = Layout::kPacked;
  int32_t page_size = 0;
  bool reps = true;     // keep representatives in memory of the caller
  bool stages = false;  // represent, select and attend apart in place of forward
  bool lists = true;    // ask for lse, selection and scores
  Executor executor = Init<Executor>();
};

// Indexed by sequence and position; rows of positions that were not computed hold NaN and -2.
struct AttentionResult {
  std::vector<std::vector<float>> out;          // [seq][position][q_head][head_dim]
  std::vector<std::vector<float>> lse;          // [seq][position][q_head]
  std::vector<std::vector<int32_t>> selection;  // [seq][position][selection_head][slot]
  std::vector<std::vector<float>> scores;
  std::vector<std::vector<float>> reps;  // [seq][row][kv_head][rep_width]
};

// Same bits, where NaN equals NaN.
inline bool SameBits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size()) return false;
  for (size_t s = 0; s < a.size(); ++s) {
    if (a[s].size() != b[s].size()) return false;
    if (!a[s].empty() && std::memcmp(a[s].data(), b[s].data(), a[s].size() * sizeof(float)) != 0) return false;
  }
  return true;
}

// Memory that starts at a multiple of 64 and holds a pattern that is NaN in every dtype.
class Buffer {
 public:
  explicit Buffer(size_t bytes = 0) : size_(bytes), data_(bytes == 0 ? nullptr : Allocate(bytes)) {}
  void* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static void* Allocate(size_t bytes) {
    const size_t rounded = (bytes + 63) / 64 * 64;
    void* const p = std::aligned_alloc(64, rounded);
    std::memset(p, 0xff, rounded);
    return p;
  }
  size_t size_;
  std::unique_ptr<void, Free> data_;
};

// Rows of [page or sequence][token][head][width] in one of the layouts.
class Rows {
 public:
  Rows() = default;
  // `tokens`: of one page, or of everything where there are no pages.
  Rows(Layout layout, int32_t dtype, int64_t pages, int64_t tokens, int32_t heads, int32_t width) : dtype_(dtype) {
    if (layout == Layout::kHeadMajor) {
      token_stride = width;
      head_stride = tokens * width;
      page_stride = heads * head_stride;
    } else {
      const int64_t pad = layout == Layout::kPadded ? 3 : 0;
      head_stride = width + pad;
      token_stride = heads * head_stride + 2 * pad;
      page_stride = tokens * token_stride + 4 * pad;
    }
    // Without a gap behind the last row: a sanitizer sees whoever reads beyond it.
    const int64_t last = (pages - 1) * page_stride + (tokens - 1) * token_stride + (heads - 1) * head_stride + width;
    buffer_ = Buffer(pages * tokens == 0 ? 0 : static_cast<size_t>(last) * DtypeSize(dtype));
  }
  int64_t Offset(int64_t page, int64_t token, int32_t head) const {
    return page * page_stride + token * token_stride + head * head_stride;
  }
  void Store(int64_t offset, const float* values, int32_t count) {
    for (int32_t c = 0; c < count; ++c) StoreElement(dtype_, buffer_.data(), offset + c, values[c]);
  }
  void StoreCodes(int64_t offset, const float* values, uint16_t scale, int32_t count) {
    for (int32_t c = 0; c < count; ++c) static_cast<int8_t*>(buffer_.data())[offset + c] = CodeOf(values[c], scale);
  }
  void StoreScale(int64_t offset, uint16_t scale) { static_cast<uint16_t*>(buffer_.data())[offset] = scale; }
  void Load(int64_t offset, float* values, int32_t count) const {
    for (int32_t c = 0; c < count; ++c) values[c] = LoadElement(dtype_, buffer_.data(), offset + c);
  }
  // Never null: an empty tensor still has an address.
  void* data() const { return buffer_.data() != nullptr ? buffer_.data() : const_cast<Rows*>(this); }

  int64_t token_stride = 0, head_stride = 0, page_stride = 0;

 private:
  int32_t dtype_ = PHSA_F32;
  Buffer buffer_;
};

// One problem in memory, run call by call. Tokens that have not been given yet hold NaN, as the stale end of a cache's
// page may: whoever lets them into a sum is seen.
class Session {
 public:
  Session(const AttentionCase& c, const AttentionData& data, const RunOptions& options)
      : case_(c), data_(data), options_(options), given_(static_cast<size_t>(c.num_seqs()), 0) {
    // A plan over the whole lengths knows the widths.
    const Plan plan = MakePlan(given_, c.kv_lens);
    selection_heads_ = plan.SelectionHeads();
    slots_ = plan.SelectionSlots();
    rep_width_ = plan.RepWidth();
    rep_stride_ = plan.RepStride();
    rep_span_ = RepRulesOf(c.settings).rep_span;
    LayOut();
    for (int32_t s = 0; s < c.num_seqs(); ++s) {
      const auto len = static_cast<size_t>(c.kv_lens[Index(s)]);
      const auto heads = static_cast<size_t>(c.num_q_heads());
      const size_t lists = len * static_cast<size_t>(selection_heads_) * static_cast<size_t>(slots_);
      result.out.emplace_back(len * heads * static_cast<size_t>(c.head_dim), kNan);
      result.lse.emplace_back(len * heads, kNan);
      result.selection.emplace_back(lists, -2);
      result.scores.emplace_back(lists, kNan);
      result.reps.emplace_back();
    }
  }

  // Appends the tokens up to to[s] of every sequence and computes the attention of these positions.
  void Forward(const std::vector<int32_t>& to) { Step(to, true); }
  // Appends them without attention: what another worker or an earlier call left in the cache.
  void Fill(const std::vector<int32_t>& to) { Step(to, false); }

  AttentionResult result;

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  static size_t Index(int64_t i) { return static_cast<size_t>(i); }

  int32_t RepRows(int32_t tokens) const {
    return rep_width_ == 0 || tokens < rep_span_ ? 0 : (tokens - rep_span_) / rep_stride_ + 1;
  }

  Plan MakePlan(const std::vector<int32_t>& from, const std::vector<int32_t>& to) const {
    std::vector<int32_t> q_lens;
    for (size_t s = 0; s < to.size(); ++s) q_lens.push_back(to[s] - from[s]);
    PlanDesc desc;
    desc.settings = case_.settings;
    desc.dtype = case_.dtype;
    desc.kv_dtype = case_.codes ? PHSA_INT8 : 0;
    desc.num_q_heads = case_.num_q_heads();
    desc.num_kv_heads = case_.num_kv_heads;
    desc.head_dim = case_.head_dim;
    desc.num_seqs = case_.num_seqs();
    desc.q_lens = q_lens.data();
    desc.kv_lens = to.data();
    // NULL wherever packed is what they are, so that both ways are tried.
    const bool packed = options_.page_size == 0 && to == case_.kv_lens && options_.layout != Layout::kPadded;
    desc.kv_starts = packed || kv_starts_.empty() ? nullptr : kv_starts_.data();
    desc.rep_starts = packed || rep_starts_.empty() ? nullptr : rep_starts_.data();
    desc.page_size = options_.page_size;
    desc.scale = case_.scale;
    desc.window = case_.window;
    desc.max_threads = std::max(1, options_.executor.num_threads);
    return Plan(desc);
  }

  void LayOut() {
    const AttentionCase& c = case_;
    const int32_t gap = options_.layout == Layout::kPadded ? 5 : 0;
    int64_t tokens = gap, rows = gap, pages = 1;
    int64_t longest = 0;
    for (const int32_t len : c.kv_lens) {
      kv_starts_.push_back(tokens);
      rep_starts_.push_back(rows);
      tokens += len + gap;
      rows += RepRows(len) + gap;
      if (options_.page_size > 0) {
        longest = std::max<int64_t>(longest, (len + options_.page_size - 1) / options_.page_size);
        pages += (len + options_.page_size - 1) / options_.page_size + 1;
      }
    }
    if (options_.page_size > 0) {
      // Pages of all sequences shuffled together, with some that belong to none.
      std::vector<int32_t> free_pages(Index(pages));
      std::iota(free_pages.begin(), free_pages.end(), 0);
      Random random(c.seed + 7);
      std::shuffle(free_pages.begin(), free_pages.end(), random);
      table_stride_ = longest + 2;
      page_table_.assign(Index(table_stride_ * c.num_seqs()), -1);
      size_t next = 0;
      for (int32_t s = 0; s < c.num_seqs(); ++s) {
        for (int64_t p = 0; p * options_.page_size < c.kv_lens[Index(s)]; ++p) {
          page_table_[Index(s * table_stride_ + p)] = free_pages[next++];
        }
      }
      tokens = options_.page_size;
      rows = options_.page_size / rep_stride_;
    }
    const int32_t kv_dtype = c.codes ? PHSA_INT8 : c.dtype;
    k_ = Rows(options_.layout, kv_dtype, pages, tokens, c.num_kv_heads, c.head_dim);
    v_ = Rows(options_.layout, kv_dtype, pages, tokens, c.num_kv_heads, c.head_dim);
    if (c.codes) {
      k_scales_ = Rows(options_.layout, PHSA_BF16, pages, tokens, c.num_kv_heads, 1);
      v_scales_ = Rows(options_.layout, PHSA_BF16, pages, tokens, c.num_kv_heads, 1);
    }
    flags_page_stride_ = tokens + gap;
    flags_.assign(Index(pages * flags_page_stride_), 0xff);
    if (options_.reps && rep_width_ > 0) {
      reps_ = Rows(options_.layout, c.dtype, pages, rows, c.num_kv_heads, rep_width_);
    }
  }

  // Page and row of a token, or of a row of reps.
  std::pair<int64_t, int64_t> Place(int32_t s, int32_t token) const {
    if (options_.page_size == 0) return {0, kv_starts_[Index(s)] + token};
    return {page_table_[Index(s * table_stride_ + token / options_.page_size)], token % options_.page_size};
  }
  std::pair<int64_t, int64_t> RepPlace(int32_t s, int32_t row) const {
    if (options_.page_size == 0) return {0, rep_starts_[Index(s)] + row};
    const int32_t rows = options_.page_size / rep_stride_;
    return {page_table_[Index(s * table_stride_ + row / rows)], row % rows};
  }

  void Append(const std::vector<int32_t>& to) {
    const AttentionCase& c = case_;
    for (int32_t s = 0; s < c.num_seqs(); ++s) {
      for (int32_t i = given_[Index(s)]; i < to[Index(s)]; ++i) {
        const auto [page, row] = Place(s, i);
        flags_[Index(page * flags_page_stride_ + row)] = data_.flags[Index(s)][Index(i)];
        for (int32_t h = 0; h < c.num_kv_heads; ++h) {
          const size_t source = Index((int64_t{i} * c.num_kv_heads + h) * c.head_dim);
          const float* const key = &data_.k[Index(s)][source];
          const float* const value = &data_.v[Index(s)][source];
          if (c.codes) {
            const size_t scale = Index(int64_t{i} * c.num_kv_heads + h);
            StoreCodes(key, data_.k_scales[Index(s)][scale], page, row, h, &k_, &k_scales_);
            StoreCodes(value, data_.v_scales[Index(s)][scale], page, row, h, &v_, &v_scales_);
            continue;
          }
          k_.Store(k_.Offset(page, row, h), key, c.head_dim);
          v_.Store(v_.Offset(page, row, h), value, c.head_dim);
        }
      }
    }
  }

  // A row that a test has put something into that is no number becomes none as a whole.
  void StoreCodes(const float* values, uint16_t scale, int64_t page, int64_t row, int32_t head, Rows* codes,
                  Rows* scales) {
    const bool finite = std::all_of(values, values + case_.head_dim, [](float x) { return std::isfinite(x); });
    codes->StoreCodes(codes->Offset(page, row, head), values, scale, case_.head_dim);
    scales->StoreScale(scales->Offset(page, row, head), finite ? scale : CodeScale(kNan));
  }

  void Step(const std::vector<int32_t>& to, bool attend) {
    const AttentionCase& c = case_;
    const std::vector<int32_t> from = given_;
    Append(to);
    given_ = to;
    const Plan plan = MakePlan(from, to);
    const int64_t queries = plan.NumQueries();

    Rows q(options_.layout, c.dtype, 1, queries, c.num_q_heads(), c.head_dim);
    Rows out(options_.layout, c.dtype, 1, queries, c.num_q_heads(), c.head_dim);
    int64_t query = 0;
    for (int32_t s = 0; s < c.num_seqs(); ++s) {
      for (int32_t i = from[Index(s)]; i < to[Index(s)]; ++i, ++query) {
        for (int32_t h = 0; h < c.num_q_heads(); ++h) {
          q.Store(q.Offset(0, query, h), &data_.q[Index(s)][Index((int64_t{i} * c.num_q_heads() + h) * c.head_dim)],
                  c.head_dim);
        }
      }
    }

    KeyValues kv = Init<KeyValues>();
    kv.k = k_.data();
    kv.k_token_stride = k_.token_stride;
    kv.k_head_stride = k_.head_stride;
    kv.k_page_stride = k_.page_stride;
    kv.v = v_.data();
    kv.v_token_stride = v_.token_stride;
    kv.v_head_stride = v_.head_stride;
    kv.v_page_stride = v_.page_stride;
    if (c.flags) kv.flags = flags_.data();
    kv.flags_page_stride = flags_page_stride_;
    if (options_.reps && rep_width_ > 0) {
      kv.reps = reps_.data();
      kv.rep_row_stride = reps_.token_stride;
      kv.rep_head_stride = reps_.head_stride;
      kv.rep_page_stride = reps_.page_stride;
    }
    if (options_.page_size > 0) {
      kv.page_table = page_table_.data();
      kv.page_table_stride = table_stride_;
    }
    ForwardParams params = Init<ForwardParams>();
    params.kv = kv;
    params.executor = options_.executor;
    if (c.codes) {
      params.kv_scales = {static_cast<const uint16_t*>(k_scales_.data()),
                          static_cast<const uint16_t*>(v_scales_.data()), k_scales_.token_stride, k_scales_.head_stride,
                          k_scales_.page_stride};
    }
    const auto represent = [&] {
      if (kv.reps == nullptr) return;
      if (c.codes) {
        plan.Represent(params);
      } else {
        plan.Represent(kv, options_.executor);
      }
    };
    if (!attend) {
      represent();
      return;
    }

    const size_t lists = Index(queries * selection_heads_ * slots_);
    std::vector<float> lse(Index(queries * c.num_q_heads()), kNan), scores(lists, kNan);
    std::vector<int32_t> selection(lists, 12345);
    Buffer workspace(plan.WorkspaceSize());
    params.q = q.data();
    params.q_token_stride = q.token_stride;
    params.q_head_stride = q.head_stride;
    params.out = out.data();
    params.out_token_stride = out.token_stride;
    params.out_head_stride = out.head_stride;
    if (options_.lists || options_.stages) {
      params.lse = lse.data();
      params.selection = selection.data();
      params.selection_scores = scores.data();
    }
    params.workspace = workspace.data();
    params.workspace_size = workspace.size();
    if (!c.sinks.empty()) params.sinks = c.sinks.data();
    if (options_.stages) {
      represent();
      plan.Select(params);
      plan.Attend(params);
    } else {
      plan.Forward(params);
    }

    query = 0;
    const auto per_query = selection_heads_ * slots_;
    for (int32_t s = 0; s < c.num_seqs(); ++s) {
      for (int32_t i = from[Index(s)]; i < to[Index(s)]; ++i, ++query) {
        for (int32_t h = 0; h < c.num_q_heads(); ++h) {
          const int64_t head = int64_t{i} * c.num_q_heads() + h;
          out.Load(out.Offset(0, query, h), &result.out[Index(s)][Index(head * c.head_dim)], c.head_dim);
          result.lse[Index(s)][Index(head)] = lse[Index(query * c.num_q_heads() + h)];
        }
        for (int64_t j = 0; j < per_query; ++j) {
          result.selection[Index(s)][Index(i * per_query + j)] = selection[Index(query * per_query + j)];
          result.scores[Index(s)][Index(i * per_query + j)] = scores[Index(query * per_query + j)];
        }
      }
      if (kv.reps == nullptr) continue;
      result.reps[Index(s)].resize(Index(int64_t{RepRows(to[Index(s)])} * c.num_kv_heads * rep_width_));
      for (int32_t row = 0; row < RepRows(to[Index(s)]); ++row) {
        const auto [page, place] = RepPlace(s, row);
        for (int32_t h = 0; h < c.num_kv_heads; ++h) {
          reps_.Load(reps_.Offset(page, place, h),
                     &result.reps[Index(s)][Index((int64_t{row} * c.num_kv_heads + h) * rep_width_)], rep_width_);
        }
      }
    }
  }

  const AttentionCase& case_;
  const AttentionData& data_;
  const RunOptions options_;
  std::vector<int32_t> given_;  // tokens of each sequence that are in memory
  int32_t selection_heads_ = 0, slots_ = 0, rep_width_ = 0, rep_stride_ = 1, rep_span_ = 1;
  std::vector<int64_t> kv_starts_, rep_starts_;
  std::vector<int32_t> page_table_;
  int64_t table_stride_ = 0;
  Rows k_, v_, reps_, k_scales_, v_scales_;
  std::vector<uint8_t> flags_;
  int64_t flags_page_stride_ = 0;
};

// The case as it is: its earlier tokens are in the cache, its queries run in one call.
inline AttentionResult RunCase(const AttentionCase& c, const AttentionData& data, const RunOptions& options = {}) {
  Session session(c, data, options);
  const bool fill = std::any_of(c.first.begin(), c.first.end(), [](int32_t f) { return f > 0; });
  if (fill) session.Fill(c.first);
  session.Forward(c.kv_lens);
  return std::move(session.result);
}

struct CaseLimits {
  // Multiply-adds of dense attention's scores over the case, which bound the time of the double-precision oracle.
  int64_t work = 4'000'000;
  bool self_attention = false;  // no earlier tokens, as the backward pass wants it
};

inline Settings RandomSettings(Random* random, int32_t num_kv_heads) {
  Settings settings;
  // Our own in four cases of ten, the others as often as each other.
  const std::vector<Policy> policies = PoliciesThat(Runs);
  const int32_t which = Uniform(random, 0, 10 * static_cast<int32_t>(policies.size()) - 1);
  settings.policy = which % 10 < 4 ? kOwnPolicy : policies[static_cast<size_t>(which / 10)];
  settings.block_size = BlockSizeOf(settings.policy, OneOf(random, {16, 16, 16, 16, 32, 64}));
  const int32_t unit = BudgetUnit(settings.policy, settings.block_size);
  settings.init_tokens = Uniform(random, 0, 2) * unit;
  settings.local_tokens = OneOf(random, {0, 1, 1, 2, 5}) * unit;
  settings.top_k = OneOf(random, {0, 1, 1, 1, 2, 2, 3, 4, 8, 20});
  settings.lambda = OneOf(random, {0.0f, 0.5f, 0.75f, 0.9f, 1.0f});
  settings.group_reduce = OneOf(random, {GroupReduce::kSum, GroupReduce::kSum, GroupReduce::kMax, GroupReduce::kNone});
  settings.dense_below = OneOf(random, {0, 0, 0, 0, 0, 1, 3, 6}) * settings.block_size;
  if (Uniform(random, 0, 3) == 0) {
    for (int32_t h = 0; h < num_kv_heads; ++h) {
      settings.head_lambda.push_back(static_cast<float>(Uniform(random, 0, 4)) / 4);
    }
  }
  Random aside = *random;  // so that the cases are otherwise as they were without parts
  settings.parts = OneOf(&aside, {1, 1, 1, 2, 4, 8});
  // Few survivors, so that the coarse level decides something; all of them; the default.
  settings.survivors = OneOf(&aside, {0, 1, 2, 4, 7, settings.survivors});
  return settings;
}

inline AttentionCase RandomCase(Random* random, const CaseLimits& limits = {}) {
  AttentionCase c;
  c.seed = (*random)();
  c.dtype = OneOf(random, {PHSA_F32, PHSA_F16, PHSA_BF16});
  c.num_kv_heads = OneOf(random, {1, 1, 2, 3});
  c.group = OneOf(random, {1, 2, 3, 6, 7, 16});
  c.head_dim = OneOf(random, {64, 64, 80, 96, 128, 256});
  c.settings = RandomSettings(random, c.num_kv_heads);
  c.flags = Uniform(random, 0, 7) != 0;
  c.scale = OneOf(random, {0.0f, 0.0f, 0.0f, 0.05f});

  const int32_t block = c.settings.block_size;
  const int32_t num_seqs = OneOf(random, {1, 1, 2, 5});
  for (int32_t s = 0; s < num_seqs; ++s) {
    int32_t len = 0;
    switch (Uniform(random, 0, 7)) {
      case 0: len = 1; break;
      case 1: len = Uniform(random, 1, block - 1); break;   // shorter than a block
      case 2: len = block * Uniform(random, 1, 16); break;  // whole blocks
      default: len = Uniform(random, block, 20 * block); break;
    }
    if (num_seqs > 1 && Uniform(random, 0, 9) == 0) len = 0;
    int32_t queries = len;
    if (!limits.self_attention) {
      queries = OneOf(random, {len, len, len, std::min(len, 1), std::min(len, 17), 0});
    }
    c.kv_lens.push_back(len);
    c.first.push_back(len - queries);
  }

  Random aside = *random;  // so that the cases are otherwise as they were without codes
  c.codes = Uniform(&aside, 0, 3) == 0;

  // Too much work: fewer channels and heads first, because lengths are what makes a selection; then fewer queries.
  const auto too_much = [&] {
    int64_t pairs = 0;
    for (size_t s = 0; s < c.kv_lens.size(); ++s) pairs += int64_t{c.kv_lens[s] - c.first[s]} * c.kv_lens[s];
    return pairs * c.num_q_heads() * c.head_dim > limits.work;
  };
  if (too_much()) c.group = std::min(c.group, Uniform(random, 1, 3));
  if (too_much()) c.head_dim = OneOf(random, {64, 80});
  if (too_much()) c.num_kv_heads = 1;
  if (!c.settings.head_lambda.empty()) c.settings.head_lambda.resize(static_cast<size_t>(c.num_kv_heads));
  while (too_much()) {
    for (size_t s = 0; s < c.kv_lens.size(); ++s) {
      if (limits.self_attention) {
        c.kv_lens[s] = (c.kv_lens[s] * 7 + 7) / 8;
      } else {
        c.first[s] += (c.kv_lens[s] - c.first[s]) / 2;
      }
    }
  }
  // A batch without any query says nothing.
  if (c.first == c.kv_lens) {
    c.kv_lens[0] = std::max(c.kv_lens[0], 1);
    c.first[0] = c.kv_lens[0] - 1;
  }
  return c;
}

}  // namespace phsa::cases

#endif  // PHSA_TESTS_ATTENTION_CASES_H_
