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

// bf16 of 32 whole numbers from `first` on.
PHSA_INLINE __m512i Bf16Numbers(int first) {
  const __m512i index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(index, index), _mm512_set1_epi32(first));
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16),
                                 _mm512_castps_si512(_mm512_cvtepi32_ps(odd)));
}

// int8 weights: the bytes of a word as integers, as f32, and of two columns the upper halves, which hold all their
// bits.
struct DirectInt8 : Bf16WithoutMinimum {
  static constexpr int kOperands = 2, kLoads = 8, kGroupBytes = 512;
  using Scales = F16Scales<1>;
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
};

// int4 weights: after a shift, the low bits of each 16-bit half are a column's code, and the look-up ignores all but
// five bits; the table holds the sixteen codes twice, so that the fifth does not matter either.
template <class ScalesOf>
struct FourBits : Bf16WithMinimum {
  static constexpr int kOperands = 4, kLoads = 4, kGroupBytes = 256;
  using Scales = ScalesOf;
  __m512i table =
      _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                                               0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) { return _mm512_loadu_si512(codes + load * 64); }
  PHSA_INLINE __m512i Operand(__m512i loaded, int i) const {
    return _mm512_permutexvar_epi16(i == 0 ? loaded : _mm512_srli_epi16(loaded, static_cast<unsigned>(4 * i)), table);
  }
};
using DirectInt4 = FourBits<F16Scales<2>>;
using DirectInt4K = FourBits<SixBitScales>;

// int5 weights: the fifth bit joins the four, and the look-up ignores the other bits of the 16.
template <class ScalesOf>
struct FiveBits : Bf16WithMinimum {
  static constexpr int kOperands = 4, kLoads = 4, kGroupBytes = 320;
  using Scales = ScalesOf;
  __m512i table;  // bf16 of 0 to 31
  PHSA_INLINE FiveBits() : table(Bf16Numbers(0)) {}
  using Loaded = Int5Codes;
  static PHSA_INLINE Int5Codes Load(const uint8_t* codes, int load) { return Int5Codes::Load(codes, load); }
  PHSA_INLINE __m512i Operand(const Int5Codes& loaded, int i) const {
    const __m512i low = i == 0 ? loaded.low : _mm512_srli_epi16(loaded.low, static_cast<unsigned>(4 * i));
    const __m512i high = i == 0   ? _mm512_slli_epi16(loaded.high, 4)
                         : i == 1 ? _mm512_slli_epi16(loaded.high, 3)
                         : i == 2 ? _mm512_srli_epi16(loaded.high, 4)
                                  : _mm512_srli_epi16(loaded.high, 5);
    return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca), table);
  }
};
using DirectInt5 = FiveBits<F16Scales<2>>;
using DirectInt5K = FiveBits<SixBitScales>;

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
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512 sum, __m512 scale, __m512, const XHalfGroup*) {
    return _mm512_fmadd_ps(sum, scale, acc);
  }
};

struct DirectInt6 : Int6Sums {
  static constexpr int kOperands = 4, kLoads = 2, kGroupBytes = 192;
  using Scales = Int6Scales;
  __m512i negative, positive;  // bf16 of the codes' values: -32 to -1, 0 to 31
  PHSA_INLINE DirectInt6() : negative(Bf16Numbers(-32)), positive(Bf16Numbers(0)) {}
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
};
