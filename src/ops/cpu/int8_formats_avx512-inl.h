// How codes become bytes, and what is done with sums of their products: what the files for vpdpbusd and for matrix
// tiles share. To be included inside their namespaces, behind grouped_avx512-inl.h.

struct Int8Sums {
  using Group = Int8Group;
  using Sum = __m512i;
  using Loaded = __m512i;
  static PHSA_INLINE __m512i Load(const uint8_t* codes, int load) { return _mm512_loadu_si512(codes + load * 64); }
  static PHSA_INLINE __m512i Dot(__m512i sum, __m512i operand, __m512i e) {
    // The intrinsic makes GCC 12 copy every sum before and after each instruction of a loop.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(operand), "v"(e));
    return sum;
  }
};

struct Int8WithoutMinimum : Int8Sums {
  static PHSA_INLINE __m512i Start(const Int8Group* x) { return _mm512_set1_epi32(x->start); }
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512i sum, __m512 scale, __m512, const Int8Group* x) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(x->scale)), acc);
  }
};

struct Int8WithMinimum : Int8Sums {
  static PHSA_INLINE __m512i Start(const Int8Group*) { return _mm512_setzero_si512(); }
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512i sum, __m512 scale, __m512 minimum, const Int8Group* x) {
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(x->scale)), acc);
    return _mm512_fmadd_ps(minimum, _mm512_set1_ps(x->sum), acc);
  }
};

// int8 weights: a word is an operand as it lies.
struct DirectInt8 : Int8WithoutMinimum {
  static constexpr int kOperands = 1, kLoads = 8, kGroupBytes = 512;
  using Scales = F16Scales<1>;
  PHSA_INLINE __m512i Operand(__m512i loaded, int) const { return loaded; }
};

// int4 weights: the low halves of the bytes are one operand, the high halves the next.
template <class ScalesOf>
struct FourBits : Int8WithMinimum {
  static constexpr int kOperands = 2, kLoads = 4, kGroupBytes = 256;
  using Scales = ScalesOf;
  PHSA_INLINE __m512i Operand(__m512i loaded, int i) const {
    const __m512i low = _mm512_set1_epi8(15);
    return _mm512_and_si512(i == 0 ? loaded : _mm512_srli_epi16(loaded, 4), low);
  }
};
using DirectInt4 = FourBits<F16Scales<2>>;
using DirectInt4K = FourBits<SixBitScales>;

// int5 weights: the same, with the fifth bit.
template <class ScalesOf>
struct FiveBits : Int8WithMinimum {
  static constexpr int kOperands = 2, kLoads = 4, kGroupBytes = 320;
  using Scales = ScalesOf;
  using Loaded = Int5Codes;
  static PHSA_INLINE Int5Codes Load(const uint8_t* codes, int load) { return Int5Codes::Load(codes, load); }
  PHSA_INLINE __m512i Operand(const Int5Codes& loaded, int i) const {
    const __m512i low = i == 0 ? loaded.low : _mm512_srli_epi16(loaded.low, 4);
    const __m512i high = _mm512_slli_epi16(loaded.high, i == 0 ? 4 : 3);
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, 0xca);
    return _mm512_and_si512(code, _mm512_set1_epi8(31));
  }
};
using DirectInt5 = FiveBits<F16Scales<2>>;
using DirectInt5K = FiveBits<SixBitScales>;

// int6 weights: as int4's, with two bits more.
struct Int6Sums {
  using Group = Int8HalfGroup;
  using Sum = __m512i;
  static PHSA_INLINE __m512i Dot(__m512i sum, __m512i operand, __m512i e) { return Int8Sums::Dot(sum, operand, e); }
  static PHSA_INLINE __m512i Start(const Group* x) { return _mm512_set1_epi32(x->start); }
  static PHSA_INLINE __m512 Finish(__m512 acc, __m512i sum, __m512 scale, __m512, const Group* x) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(x->scale)), acc);
  }
};

struct DirectInt6 : Int6Sums {
  static constexpr int kOperands = 2, kLoads = 2, kGroupBytes = 192;
  using Scales = Int6Scales;
  using Loaded = Int6Codes;
  static PHSA_INLINE Int6Codes Load(const uint8_t* codes, int load) { return Int6Codes::Load(codes, load); }
  PHSA_INLINE __m512i Operand(const Int6Codes& loaded, int i) const {
    const __m512i low = i == 0 ? loaded.low : _mm512_srli_epi16(loaded.low, 4);
    const __m512i high = _mm512_slli_epi16(loaded.high, i == 0 ? 4 : 2);
    // Bits 0 to 3 of the one, the others of the other.
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, 0xca);
    return _mm512_and_si512(code, _mm512_set1_epi8(63));
  }
};
