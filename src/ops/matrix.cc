// How weights are packed: cpu/kernels.h says where each code lies.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "base/carver.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "ops/cpu/kernels.h"
#include "ops/linear.h"

namespace phsa {
namespace {

using ops::LayoutOf;
using ops::NumGroups;
using ops::RoundUp;

constexpr int kWord = 4 * kPanelRows;  // bytes from a row's word to its next

bool IsQuantised(WeightType type) {
  return type == WeightType::kInt8 || type == WeightType::kInt4 || type == WeightType::kInt6;
}

int64_t NumPanels(int32_t rows) { return RoundUp(rows, kPanelRows) / kPanelRows; }

// int8 and int4: the rows' powers of two come first.
int64_t FactorBytes(WeightType type, int32_t rows) { return IsQuantised(type) ? NumPanels(rows) * kPanelRows * 4 : 0; }

// Column of nibble i (from the low bits up) of an int4 word.
constexpr int kNibbleColumn[8] = {0, 2, 4, 6, 1, 3, 5, 7};

constexpr int kNibbleOf[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // and the other way round

// Where the two high bits of column c of an int6 group lie in their word.
constexpr int HighBit(int c) {
  const int nibble = kNibbleOf[c % 8];
  return 8 * (nibble / 2) + 4 * (c / 8) + 2 * (nibble % 2);
}

uint32_t PackNibbles(const uint8_t* codes) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) word |= static_cast<uint32_t>(codes[kNibbleColumn[i]] & 15) << (4 * i);
  return word;
}

void Store32(uint8_t* at, uint32_t value) { std::memcpy(at, &value, 4); }
void Store16(uint8_t* at, uint16_t value) { std::memcpy(at, &value, 2); }
uint32_t Load32(const uint8_t* at) {
  uint32_t value;
  std::memcpy(&value, at, 4);
  return value;
}
uint32_t Load32From16(const uint8_t* bf16) {
  uint16_t bits;
  std::memcpy(&bits, bf16, 2);
  return static_cast<uint32_t>(bits) << 16;
}
float LoadScale(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return F32FromF16(bits);
}

// The power of two that brings the largest finite magnitude near the upper end of f16, and its inverse: f16 then keeps
// 11 bits of every scale down to 2^-28 of the largest. What was f16 before stays exact.
struct RowFactor {
  float factor, inverse;
};
RowFactor RowFactorOf(float largest) {
  if (!(largest > 0)) return {1, 1};
  const int shift = std::clamp(14 - std::ilogb(largest), -100, 100);
  return {std::ldexp(1.0f, -shift), std::ldexp(1.0f, shift)};
}

// Weights are read from end to end once a token, which costs a TLB miss every 4 KB, and the prefetchers stop there,
// unless pages are large: 2 MB. Small matrices therefore lie together, in chunks that live as long as any of them.
constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kChunk = 8 * kLargePage;

std::shared_ptr<uint8_t> AllocateLarge(size_t size) {
  void* data = nullptr;
  if (size > SIZE_MAX / 2) return nullptr;
  size = (size + kLargePage - 1) / kLargePage * kLargePage;
  if (posix_memalign(&data, kLargePage, size) != 0) return nullptr;
#if defined(__linux__)
  madvise(data, size, MADV_HUGEPAGE);
#endif
  return {static_cast<uint8_t*>(data), [](uint8_t* p) { std::free(p); }};
}

// Aligned to 64, not cleared; null where there is not enough.
std::shared_ptr<uint8_t> Allocate(size_t size) {
  if (size > kChunk / 4) return AllocateLarge(size);
  static std::mutex mutex;
  static std::weak_ptr<uint8_t> current;
  static size_t used;
  const std::lock_guard lock(mutex);
  std::shared_ptr<uint8_t> chunk = current.lock();
  if (chunk == nullptr || used + size > kChunk) {
    chunk = AllocateLarge(kChunk);
    if (chunk == nullptr) return nullptr;
    current = chunk;
    used = 0;
  }
  std::shared_ptr<uint8_t> piece(chunk, chunk.get() + used);
  used += Aligned(size);
  return piece;
}

float LargestFinite(const float* values, int32_t n, float largest) {
  for (int32_t i = 0; i < n; ++i) {
    if (std::isfinite(values[i])) largest = std::max(largest, std::fabs(values[i]));
  }
  return largest;
}

}  // namespace

const char* WeightTypeName(WeightType type) {
  switch (type) {
    case WeightType::kF32: return "f32";
    case WeightType::kBf16: return "bf16";
    case WeightType::kInt8: return "int8";
    case WeightType::kInt4: return "int4";
    case WeightType::kInt6: return "int6";
  }
  return "unknown";
}

float RoundInt8Scales(const float* scales, int32_t groups, uint16_t* rounded) {
  const RowFactor f = RowFactorOf(LargestFinite(scales, groups, 0));
  for (int32_t g = 0; g < groups; ++g) rounded[g] = F16FromF32(scales[g] * f.inverse);
  return f.factor;
}

float QuantizeInt8(const float* values, int32_t cols, int8_t* codes, uint16_t* scales) {
  const int32_t groups = NumGroups(cols);
  std::vector<float> wanted(static_cast<size_t>(groups));
  for (int32_t g = 0; g < groups; ++g) {
    const int32_t begin = g * kWeightGroup, end = std::min(begin + kWeightGroup, cols);
    wanted[static_cast<size_t>(g)] = LargestFinite(values + begin, end - begin, 0) / 127.0f;
  }
  const float factor = RoundInt8Scales(wanted.data(), groups, scales);
  for (int32_t g = 0; g < groups; ++g) {
    const int32_t begin = g * kWeightGroup, end = std::min(begin + kWeightGroup, cols);
    const float scale = F32FromF16(scales[g]) * factor;  // the codes belong to the scales as they are stored
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (int32_t c = begin; c < end; ++c) {
      const float code = std::isfinite(values[c]) ? std::nearbyint(values[c] * inverse) : 0.0f;
      codes[c] = static_cast<int8_t>(std::clamp(code, -127.0f, 127.0f));
    }
  }
  return factor;
}

size_t Matrix::Bytes(WeightType type, int32_t rows, int32_t cols) {
  // More than any machine has, and the sums below would overflow.
  if (int64_t{rows} * cols > int64_t{1} << 56) return SIZE_MAX;
  return static_cast<size_t>(FactorBytes(type, rows) + NumPanels(rows) * LayoutOf(type, cols).bytes);
}

Matrix::Matrix(WeightType type, int32_t rows, int32_t cols) : type_(type), rows_(rows), cols_(cols) {
  PHSA_CHECK(rows >= 0 && cols >= 0);
  const size_t bytes = Bytes(type, rows, cols);
  data_ = Allocate(bytes);
  if (data_ == nullptr) {
    Throw(PHSA_OUT_OF_MEMORY, "linear: no memory for a {} matrix of {} × {} ({} bytes)", WeightTypeName(type), rows,
          cols, bytes);
  }
  std::memset(data_.get(), 0, bytes);
  if (IsQuantised(type)) {
    auto* factors = reinterpret_cast<float*>(data_.get());
    std::fill_n(factors, NumPanels(rows) * kPanelRows, 1.0f);
  }
}

Matrix Matrix::OfFile(WeightType type, int32_t rows, int32_t cols, const uint8_t* data) {
  PHSA_CHECK((type == WeightType::kF32 || type == WeightType::kBf16) && rows >= 0 && cols >= 0 && data != nullptr);
  Matrix matrix;
  matrix.type_ = type;
  matrix.rows_ = rows;
  matrix.cols_ = cols;
  matrix.file_ = data;
  return matrix;
}

void Matrix::Interleave(int32_t first_panel, int32_t count, uint8_t* panels) const {
  using Words = uint32_t __attribute__((vector_size(16)));
  const int64_t row_bytes = int64_t{cols_} * (type_ == WeightType::kF32 ? 4 : 2), bytes = LayoutOf(type_, cols_).bytes;
  const int64_t words = bytes / kWord, whole = row_bytes / 16 * 4;  // of a row here; those read four at a time
  if (row_bytes < words * 4 || (first_panel + count) * kPanelRows > rows_) {
    std::memset(panels, 0, static_cast<size_t>(bytes * count));  // what lies behind the last row and column
  }
  for (int32_t panel = 0; panel < count; ++panel, panels += bytes) {
    const int32_t first = (first_panel + panel) * kPanelRows, rows = std::min(kPanelRows, rows_ - first);
    const uint8_t* const from = file_ + first * row_bytes;
    for (int32_t lane = 0; lane < rows; lane += 4) {
      const int32_t lanes = std::min(4, rows - lane);
      const uint8_t* row[4];
      for (int32_t i = 0; i < 4; ++i) row[i] = from + (lane + std::min(i, lanes - 1)) * row_bytes;
      uint8_t* at = panels + lane * 4;
      for (int64_t word = 0; word < whole; word += 4, at += 4 * kWord) {
        Words in[4];
        for (int i = 0; i < 4; ++i) std::memcpy(&in[i], row[i] + word * 4, 16);
        const Words low = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5),
                    high = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7),
                    other_low = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5),
                    other_high = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
        const Words out[4] = {__builtin_shufflevector(low, other_low, 0, 1, 4, 5),
                              __builtin_shufflevector(low, other_low, 2, 3, 6, 7),
                              __builtin_shufflevector(high, other_high, 0, 1, 4, 5),
                              __builtin_shufflevector(high, other_high, 2, 3, 6, 7)};
        if (lanes == 4) {  // a length that the compiler knows: one instruction each
          for (int w = 0; w < 4; ++w) std::memcpy(at + w * kWord, &out[w], 16);
        } else {
          for (int w = 0; w < 4; ++w) std::memcpy(at + w * kWord, &out[w], static_cast<size_t>(lanes) * 4);
        }
      }
      for (int64_t word = whole; word < words; ++word) {
        const int64_t left = std::min<int64_t>(4, row_bytes - word * 4);
        for (int32_t i = 0; i < lanes && left > 0; ++i) {
          std::memcpy(panels + word * kWord + (lane + i) * 4, row[i] + word * 4, static_cast<size_t>(left));
        }
      }
    }
  }
}

size_t Matrix::bytes() const { return Bytes(type_, rows_, cols_); }

uint8_t* Matrix::PanelOf(int32_t row) const {
  PHSA_CHECK(row >= 0 && row < rows_ && file_ == nullptr);
  return data_.get() + FactorBytes(type_, rows_) + int64_t{row / kPanelRows} * LayoutOf(type_, cols_).bytes;
}

const uint8_t* Matrix::panels() const { return data_.get() + FactorBytes(type_, rows_); }

const float* Matrix::factors() const {
  return IsQuantised(type_) ? reinterpret_cast<const float*>(data_.get()) : nullptr;
}

void Matrix::SetRow(int32_t row, const float* values) {
  uint8_t* const panel = PanelOf(row);
  uint8_t* at = panel + LayoutOf(type_, cols_).codes + row % kPanelRows * 4;
  switch (type_) {
    case WeightType::kF32:
      for (int32_t c = 0; c < cols_; ++c, at += kWord) std::memcpy(at, values + c, 4);
      return;
    case WeightType::kBf16:
      for (int32_t c = 0; c < cols_; c += 2, at += kWord) {
        const uint32_t high = c + 1 < cols_ ? Bf16FromF32(values[c + 1]) : 0;
        Store32(at, Bf16FromF32(values[c]) | high << 16);
      }
      return;
    case WeightType::kInt8: {
      std::vector<uint16_t> scales(static_cast<size_t>(NumGroups(cols_)));
      std::vector<int8_t> codes(static_cast<size_t>(cols_));
      const float factor = QuantizeInt8(values, cols_, codes.data(), scales.data());
      StoreInt8(row, codes.data(), scales.data(), factor);
      return;
    }
    case WeightType::kInt4:
    case WeightType::kInt6: PHSA_CHECK(!"int4 and int6 rows come with codes");
  }
}

void Matrix::SetRowInt8(int32_t row, const int8_t* codes, const float* scales) {
  std::vector<uint16_t> rounded(static_cast<size_t>(NumGroups(cols_)));
  const float factor = RoundInt8Scales(scales, NumGroups(cols_), rounded.data());
  StoreInt8(row, codes, rounded.data(), factor);
}

void Matrix::StoreInt8(int32_t row, const int8_t* codes, const uint16_t* scales, float factor) {
  PHSA_CHECK(type_ == WeightType::kInt8);
  uint8_t* const panel = PanelOf(row);
  const int32_t groups = NumGroups(cols_), lane = row % kPanelRows;
  reinterpret_cast<float*>(data_.get())[row] = factor;
  for (int32_t g = 0; g < groups; ++g) Store16(panel + (g * kPanelRows + lane) * 2, scales[g]);
  uint8_t* at = panel + LayoutOf(type_, cols_).codes + lane * 4;
  for (int32_t c = 0; c < groups * kWeightGroup; c += 4, at += kWord) {
    int8_t quad[4] = {};
    if (c < cols_) std::memcpy(quad, codes + c, static_cast<size_t>(std::min(4, cols_ - c)));
    Store32(at, Load32(reinterpret_cast<const uint8_t*>(quad)) ^ 0x80808080u);
  }
}

void Matrix::SetRowInt4(int32_t row, const uint8_t* codes, const float* scales, const float* mins) {
  PHSA_CHECK(type_ == WeightType::kInt4);
  uint8_t* const panel = PanelOf(row);
  const int32_t groups = NumGroups(cols_), lane = row % kPanelRows;
  const RowFactor f = RowFactorOf(LargestFinite(mins, groups, LargestFinite(scales, groups, 0)));
  reinterpret_cast<float*>(data_.get())[row] = f.factor;
  for (int32_t g = 0; g < groups; ++g) {
    uint8_t* const pair = panel + (g * 2 * kPanelRows + lane) * 2;
    Store16(pair, F16FromF32(scales[g] * f.inverse));
    Store16(pair + kPanelRows * 2, F16FromF32(mins[g] * f.inverse));
  }
  uint8_t* at = panel + LayoutOf(type_, cols_).codes + lane * 4;
  int32_t c = 0;
  for (; c + 8 <= cols_; c += 8, at += kWord) Store32(at, PackNibbles(codes + c));
  if (c < cols_) {
    uint8_t rest[8] = {};
    std::memcpy(rest, codes + c, static_cast<size_t>(cols_ - c));
    Store32(at, PackNibbles(rest));
  }
}

void Matrix::SetRowInt6(int32_t row, const uint8_t* codes, const float* scales) {
  PHSA_CHECK(type_ == WeightType::kInt6);
  uint8_t* const panel = PanelOf(row);
  const int32_t groups = (cols_ + kInt6Group - 1) / kInt6Group, lane = row % kPanelRows;
  const RowFactor f = RowFactorOf(LargestFinite(scales, groups, 0));
  reinterpret_cast<float*>(data_.get())[row] = f.factor;
  uint8_t* at = panel + LayoutOf(type_, cols_).codes + lane * 4;
  for (int32_t g = 0; g < groups; ++g) {
    Store16(panel + (g * kPanelRows + lane) * 2, F16FromF32(scales[g] * f.inverse));
    uint8_t group[kInt6Group] = {};
    std::memcpy(group, codes + g * kInt6Group, static_cast<size_t>(std::min(kInt6Group, cols_ - g * kInt6Group)));
    uint32_t high = 0;
    for (int i = 0; i < kInt6Group; ++i) high |= static_cast<uint32_t>(group[i] >> 4 & 3) << HighBit(i);
    for (int word = 0; word < 2; ++word, at += kWord) Store32(at, PackNibbles(group + 8 * word));
    Store32(at, high);
    at += kWord;
  }
}

void Matrix::GetRow(int32_t row, float* values) const {
  if (file_ != nullptr) {
    PHSA_CHECK(row >= 0 && row < rows_);
    const bool f32 = type_ == WeightType::kF32;
    const uint8_t* at = file_ + int64_t{row} * cols_ * (f32 ? 4 : 2);
    for (int32_t c = 0; c < cols_; ++c, at += f32 ? 4 : 2) {
      values[c] = f32 ? std::bit_cast<float>(Load32(at)) : std::bit_cast<float>(Load32From16(at));
    }
    return;
  }
  const uint8_t* const panel = PanelOf(row);
  const int32_t lane = row % kPanelRows;
  const uint8_t* const words = panel + LayoutOf(type_, cols_).codes + lane * 4;
  for (int32_t c = 0; c < cols_; ++c) {
    const int32_t g = c / kWeightGroup;
    switch (type_) {
      case WeightType::kF32: values[c] = std::bit_cast<float>(Load32(words + c * kWord)); break;
      case WeightType::kBf16: {
        const uint32_t word = Load32(words + c / 2 * kWord);
        values[c] = F32FromBf16(static_cast<uint16_t>(c % 2 == 0 ? word : word >> 16));
        break;
      }
      case WeightType::kInt8: {
        const auto code = static_cast<int8_t>((Load32(words + c / 4 * kWord) >> (8 * (c % 4))) ^ 0x80u);
        values[c] = LoadScale(panel + (g * kPanelRows + lane) * 2) * code * factors()[row];
        break;
      }
      case WeightType::kInt6: {
        const int32_t half = c / kInt6Group, i = c % kInt6Group;
        const uint8_t* const group = words + int64_t{half} * 3 * kWord;
        const uint32_t low = (Load32(group + i / 8 * kWord) >> (4 * kNibbleOf[i % 8])) & 15u;
        const uint32_t high = (Load32(group + 2 * kWord) >> HighBit(i)) & 3u;
        const auto code = static_cast<float>(static_cast<int32_t>(low | high << 4) - 32);
        values[c] = LoadScale(panel + (half * kPanelRows + lane) * 2) * code * factors()[row];
        break;
      }
      case WeightType::kInt4: {
        const uint32_t code = (Load32(words + c / 8 * kWord) >> (4 * kNibbleOf[c % 8])) & 15u;
        const uint8_t* const pair = panel + (g * 2 * kPanelRows + lane) * 2;
        const float w = std::fma(LoadScale(pair), static_cast<float>(code), LoadScale(pair + kPanelRows * 2));
        values[c] = w * factors()[row];
        break;
      }
    }
  }
}

}  // namespace phsa
