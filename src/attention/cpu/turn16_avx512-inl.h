// Turns a 16 × 16 matrix of words in registers: x[r] lane w becomes x[w] lane r. Included inside a namespace that is
// compiled for AVX-512, hence no guard and no includes.
inline __attribute__((always_inline)) void Turn16(__m512i* x) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int r = 0; r < 16; r += 2) {
    y[r] = _mm512_unpacklo_epi32(x[r], x[r + 1]);
    y[r + 1] = _mm512_unpackhi_epi32(x[r], x[r + 1]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < 16; r += 4) {
    x[r] = _mm512_unpacklo_epi64(y[r], y[r + 2]);
    x[r + 1] = _mm512_unpackhi_epi64(y[r], y[r + 2]);
    x[r + 2] = _mm512_unpacklo_epi64(y[r + 1], y[r + 3]);
    x[r + 3] = _mm512_unpackhi_epi64(y[r + 1], y[r + 3]);
  }
  // Now x[4g + i] holds, in its 128-bit part p, words 4p + i of rows 4g … 4g + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i lo0 = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88), hi0 = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    const __m512i lo1 = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    const __m512i hi1 = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
    y[i] = _mm512_shuffle_i32x4(lo0, lo1, 0x88);
    y[4 + i] = _mm512_shuffle_i32x4(hi0, hi1, 0x88);
    y[8 + i] = _mm512_shuffle_i32x4(lo0, lo1, 0xdd);
    y[12 + i] = _mm512_shuffle_i32x4(hi0, hi1, 0xdd);
  }
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) x[r] = y[r];
}
