// Matrix tiles (AMX), for the files that multiply with them: to be included inside their namespaces, behind
// <immintrin.h>. GCC 12's own intrinsics for tiles do not tell it that they read
// memory.

#if !defined(PHSA_EMULATE_AMX)

#define PHSA_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define PHSA_TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define PHSA_TILE_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(static_cast<int64_t>(stride)) : "memory")
// sums += x · operand: pairs of bf16; bytes, those of x with a sign, those of the operand with or without.
#define PHSA_TILE_BF16(sums, x, operand) asm volatile("tdpbf16ps %%tmm" #operand ", %%tmm" #x ", %%tmm" #sums ::)
#define PHSA_TILE_INT8(sums, x, operand) asm volatile("tdpbssd %%tmm" #operand ", %%tmm" #x ", %%tmm" #sums ::)

inline void LoadShapes(const unsigned char* bytes) {
  asm volatile("ldtilecfg %0" ::"m"(*reinterpret_cast<const unsigned char(*)[64]>(bytes)));
}
inline void ReleaseTiles() { asm volatile("tilerelease" ::); }

#else

// The same in plain C++, for tests where the CPU has no tiles.
struct EmulatedTiles {
  unsigned char shapes[64];
  alignas(64) unsigned char data[8][16][64];
  int rows(int tile) const { return shapes[48 + tile]; }
  int bytes(int tile) const { return shapes[16 + 2 * tile]; }
};
static thread_local EmulatedTiles emulated_tiles;

inline void LoadShapes(const unsigned char* bytes) {
  emulated_tiles = {};
  __builtin_memcpy(emulated_tiles.shapes, bytes, 64);
}
inline void ReleaseTiles() { emulated_tiles = {}; }
inline void ZeroTile(int tile) { __builtin_memset(emulated_tiles.data[tile], 0, sizeof(emulated_tiles.data[tile])); }
inline void LoadTile(int tile, const void* from, int64_t stride) {
  ZeroTile(tile);
  for (int r = 0; r < emulated_tiles.rows(tile); ++r) {
    __builtin_memcpy(emulated_tiles.data[tile][r], static_cast<const unsigned char*>(from) + r * stride,
                     static_cast<size_t>(emulated_tiles.bytes(tile)));
  }
}
inline void StoreTile(int tile, void* to, int64_t stride) {
  for (int r = 0; r < emulated_tiles.rows(tile); ++r) {
    __builtin_memcpy(static_cast<unsigned char*>(to) + r * stride, emulated_tiles.data[tile][r],
                     static_cast<size_t>(emulated_tiles.bytes(tile)));
  }
}
// sum(word of x, word of operand, sums) for each word that both have.
template <class Number, class Add>
inline void MultiplyTiles(int sums, int x, int operand, const Add& add) {
  EmulatedTiles& t = emulated_tiles;
  for (int r = 0; r < t.rows(sums); ++r) {
    for (int n = 0; n < t.bytes(sums) / 4; ++n) {
      Number all[2] = {}, sum;
      for (int k = 0; k < t.bytes(x) / 4; ++k) add(t.data[x][r] + 4 * k, t.data[operand][k] + 4 * n, all);
      __builtin_memcpy(&sum, t.data[sums][r] + 4 * n, 4);
      sum += all[0] + all[1];
      __builtin_memcpy(t.data[sums][r] + 4 * n, &sum, 4);
    }
  }
}
inline void MultiplyBf16(int sums, int x, int operand) {
  MultiplyTiles<float>(sums, x, operand, [](const unsigned char* a, const unsigned char* b, float* all) {
    for (int i = 0; i < 2; ++i) {
      float e[2] = {};
      __builtin_memcpy(reinterpret_cast<unsigned char*>(e) + 2, a + 2 * i, 2);
      __builtin_memcpy(reinterpret_cast<unsigned char*>(e + 1) + 2, b + 2 * i, 2);
      all[i] = __builtin_fmaf(e[0], e[1], all[i]);
    }
  });
}
inline void MultiplyInt8(int sums, int x, int operand) {
  MultiplyTiles<int>(sums, x, operand, [](const unsigned char* a, const unsigned char* b, int* all) {
    for (int i = 0; i < 4; ++i) all[0] += static_cast<signed char>(a[i]) * static_cast<signed char>(b[i]);
  });
}

#define PHSA_TILE_ZERO(tile) ZeroTile(tile)
#define PHSA_TILE_LOAD(tile, from, stride) LoadTile(tile, from, stride)
#define PHSA_TILE_STORE(tile, to, stride) StoreTile(tile, to, stride)
#define PHSA_TILE_BF16(sums, x, operand) MultiplyBf16(sums, x, operand)
#define PHSA_TILE_INT8(sums, x, operand) MultiplyInt8(sums, x, operand)

#endif

// The shapes of tiles, in use from Load() until it dies.
class TileShapes {
 public:
  TileShapes() { bytes_[0] = 1; }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
  ~TileShapes() { ReleaseTiles(); }
  // Tiles [first, last]: so many rows of so many words of 32 bits, 16 of each at most.
  void Set(int first, int last, int rows, int words) {
    for (int i = first; i <= last; ++i) {
      bytes_[16 + 2 * i] = static_cast<unsigned char>(4 * words);
      bytes_[48 + i] = static_cast<unsigned char>(rows);
    }
  }
  void Load() { LoadShapes(bytes_); }

 private:
  alignas(64) unsigned char bytes_[64] = {};
};
