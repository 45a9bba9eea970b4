// How codes become pairs of bf16: what the files for the bf16 dot product and for matrix tiles share. To be included
// inside their namespaces, behind grouped_avx512-inl.h.

struct XGroup {
  uint16_t x[32];
  float sum;  // for int4's minima
};

struct Bf16Sums {
  using Group = XGroup;
  using Sum = __m512;
  static PHSA_INLINE __m512 Start(const XGroup*) { return _mm512_setzero_ps(); }
  static PHSA_INLINE __m512 Dot(__m512 sum, __m512i operand, __m512i e) {
    // With the intrinsic GCC 12 keeps some operands of a loop on the stack.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(e), "v"(operand));
    return sum;
  }
};

struct Bf16WithoutMinimum : Bf16Sums {
  static PHSA_INLINE __m512 Minimum(const uint8_t*) { return _mm512_setzero_ps(); }
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512 sum, __m512 scale, __m512, const XGroup*) {
    return _mm512_fmadd_ps(sum, scale, acc);
  }
};

struct Bf16WithMinimum : Bf16Sums {
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512 sum, __m512 scale, __m512 minimum, const XGroup* x) {
    acc = _mm512_fmadd_ps(sum, scale, acc);
    return _mm512_fmadd_ps(minimum, _mm512_set1_ps(x->sum), acc);
  }
};

// int8 weights: the bytes of a word as integers, as f32, and of two columns the upper halves, which hold all their
// bits.
struct DirectInt8 : Bf16WithoutMinimum {
  static constexpr int kOperands = 2, kLoads = 8, kScaleBytes = 32, kGroupBytes = 512;
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) {
    return _mm512_xor_si512(_mm512_loadu_si512(codes + load * 64), _mm512_set1_epi8(-128));
  }
  PHSA_INLINE __m512i Operand(__m512i loaded, int i) const {
    const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(loaded, i == 0 ? 24 : 8), 24);
    const __m512i odd = _mm512_srai_epi32(i == 0 ? _mm512_slli_epi32(loaded, 16) : loaded, 24);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16),
                                   _mm512_castps_si512(_mm512_cvtepi32_ps(odd)));
  }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return LoadF16(at); }

  static void Expand(const uint8_t* codes, const uint8_t* scales, int32_t first, int32_t groups, uint8_t* out,
                     float* out_scales) {
    ExpandScales(scales + int64_t{first} * kScaleBytes, groups, out_scales);
    codes += int64_t{first} * kLoads * 64;
    const DirectInt8 format;
    for (int32_t i = 0; i < groups * kLoads; ++i, codes += 64, out += 128) {
      const __m512i loaded = Load(codes, 0);
      _mm512_storeu_si512(out, format.Operand(loaded, 0));
      _mm512_storeu_si512(out + 64, format.Operand(loaded, 1));
    }
  }
};

// int4 weights: after a shift, the low bits of each 16-bit half are a column's code, and the look-up ignores all but
// five bits; the table holds the sixteen codes twice, so that the fifth does not matter either.
struct DirectInt4 : Bf16WithMinimum {
  static constexpr int kOperands = 4, kLoads = 4, kScaleBytes = 64, kGroupBytes = 256;
  __m512i table =
      _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                                               0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) { return _mm512_loadu_si512(codes + load * 64); }
  PHSA_INLINE __m512i Operand(__m512i loaded, int i) const {
    return _mm512_permutexvar_epi16(i == 0 ? loaded : _mm512_srli_epi16(loaded, static_cast<unsigned>(4 * i)), table);
  }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return LoadF16(at); }
  static PHSA_INLINE __m512 Minimum(const uint8_t* at) { return LoadF16(at + 32); }

  static void Expand(const uint8_t* codes, const uint8_t* scales, int32_t first, int32_t groups, uint8_t* out,
                     float* out_scales) {
    ExpandScales(scales + int64_t{first} * kScaleBytes, groups * 2, out_scales);
    codes += int64_t{first} * kLoads * 64;
    const DirectInt4 format;
    for (int32_t i = 0; i < groups * kLoads; ++i, codes += 64, out += 256) {
      const __m512i loaded = Load(codes, 0);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) _mm512_storeu_si512(out + 64 * j, format.Operand(loaded, j));
    }
  }
};

// int6 weights, in groups of 16 columns: after shifts, four low bits and two high ones are a column's code, and the
// look-up ignores the other bits of its 16.
struct XHalfGroup {
  uint16_t x[16];
};
struct Int6Sums {
  using Group = XHalfGroup;
  using Sum = __m512;
  static PHSA_INLINE __m512 Start(const XHalfGroup*) { return _mm512_setzero_ps(); }
  static PHSA_INLINE __m512 Dot(__m512 sum, __m512i operand, __m512i e) { return Bf16Sums::Dot(sum, operand, e); }
  static PHSA_INLINE __m512 Minimum(const uint8_t*) { return _mm512_setzero_ps(); }
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512 sum, __m512 scale, __m512, const XHalfGroup*) {
    return _mm512_fmadd_ps(sum, scale, acc);
  }
};

struct DirectInt6 : Int6Sums {
  static constexpr int kOperands = 4, kLoads = 2, kScaleBytes = 32, kGroupBytes = 192;
  __m512i negative, positive;  // bf16 of the codes' values: -32 to -1, 0 to 31
  PHSA_INLINE DirectInt6() {
    const __m512i index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const auto table = [&](int first) {
      const __m512i even = _mm512_add_epi32(_mm512_add_epi32(index, index), _mm512_set1_epi32(first));
      const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
      return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16),
                                     _mm512_castps_si512(_mm512_cvtepi32_ps(odd)));
    };
    negative = table(-32);
    positive = table(0);
  }
  using Loaded = Int6Codes;
  static PHSA_INLINE Int6Codes Load(const uint8_t* codes, int load) { return Int6Codes::Load(codes, load); }
  PHSA_INLINE __m512i Operand(const Int6Codes& loaded, int i) const {
    const __m512i low = i == 0 ? loaded.low : _mm512_srli_epi16(loaded.low, static_cast<unsigned>(4 * i));
    const __m512i high = i == 0   ? _mm512_slli_epi16(loaded.high, 4)
                         : i == 1 ? _mm512_slli_epi16(loaded.high, 2)
                         : i == 2 ? _mm512_srli_epi16(loaded.high, 4)
                                  : _mm512_srli_epi16(loaded.high, 6);
    return _mm512_permutex2var_epi16(negative, _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca),
                                     positive);
  }
  static PHSA_INLINE __m512 Scale(const uint8_t* at) { return LoadF16(at); }

  static void Expand(const uint8_t* codes, const uint8_t* scales, int32_t first, int32_t groups, uint8_t* out,
                     float* out_scales) {
    ExpandScales(scales + int64_t{first} * kScaleBytes, groups, out_scales);
    codes += int64_t{first} * kGroupBytes;
    const DirectInt6 format;
    for (int32_t g = 0; g < groups; ++g, codes += kGroupBytes) {
      for (int word = 0; word < 2; ++word) {
        const Int6Codes loaded = Load(codes, word);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, out += 64) _mm512_storeu_si512(out, format.Operand(loaded, i));
      }
    }
  }
};
