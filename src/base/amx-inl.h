// Matrix tiles (AMX), for the files that multiply with them: to be included inside their namespaces, behind
// <immintrin.h>. GCC 12's own intrinsics for tiles do not tell it that they read
// memory.

#define PHSA_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define PHSA_TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define PHSA_TILE_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(static_cast<int64_t>(stride)) : "memory")
// sums += x · operand: pairs of bf16; bytes, those of x with a sign, those of the operand with or without.
#define PHSA_TILE_BF16(sums, x, operand) asm volatile("tdpbf16ps %%tmm" #operand ", %%tmm" #x ", %%tmm" #sums ::)
#define PHSA_TILE_INT8(sums, x, operand) asm volatile("tdpbssd %%tmm" #operand ", %%tmm" #x ", %%tmm" #sums ::)

// The shapes of tiles, in use from Load() until it dies.
class TileShapes {
 public:
  TileShapes() { bytes_[0] = 1; }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
  ~TileShapes() { asm volatile("tilerelease" ::); }
  // Tiles [first, last]: so many rows of so many words of 32 bits, 16 of each at most.
  void Set(int first, int last, int rows, int words) {
    for (int i = first; i <= last; ++i) {
      bytes_[16 + 2 * i] = static_cast<unsigned char>(4 * words);
      bytes_[48 + i] = static_cast<unsigned char>(rows);
    }
  }
  void Load() { asm volatile("ldtilecfg %0" ::"m"(bytes_)); }

 private:
  alignas(64) unsigned char bytes_[64] = {};
};
