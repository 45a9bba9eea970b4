// What a query reads, in blocks: the one place of this arithmetic, for the host and the device. The query's own block
// is b = position / block size. It reads init blocks [0, init_blocks), chosen ones of the candidates [CandidateBegin(),
// CandidateEnd(b)), and local blocks [LocalBegin(b), b], of its own block the tokens up to itself. The reference and
// the PyTorch fallback do not use it: they are what it is tested against.
#ifndef PHSA_ATTENTION_BLOCKS_H_
#define PHSA_ATTENTION_BLOCKS_H_

#include <cstdint>

namespace phsa {

// BlockRules::dense_blocks where every query reads everything.
inline constexpr int32_t kDenseEverywhere = INT32_MAX;

constexpr int32_t BlocksFor(int32_t tokens, int32_t block_size) {
  return static_cast<int32_t>((int64_t{tokens} + block_size - 1) / block_size);
}

// Functions of a query take its block b, so a result depends on the position alone, never on the call.
struct BlockRules {
  int32_t init_blocks = 0;
  int32_t local_blocks = 0;  // beside the query's own
  int32_t top_k = 0;         // blocks that a query chooses; 0: none
  int32_t dense_blocks = 0;  // queries of the first so many blocks read everything and have no list
  int32_t window = 0;        // tokens that a query reads at most, its own included; 0: no limit

  constexpr bool Dense(int32_t b) const { return b < dense_blocks; }

  constexpr int32_t CandidateBegin() const { return init_blocks; }
  constexpr int32_t CandidateEnd(int32_t b) const {
    return init_blocks > b - local_blocks ? init_blocks : b - local_blocks;
  }
  constexpr int32_t Candidates(int32_t b) const { return CandidateEnd(b) - init_blocks; }
  // Blocks in a query's list, the rest of which is -1.
  constexpr int32_t Chosen(int32_t b) const { return Dense(b) ? 0 : Candidates(b) < top_k ? Candidates(b) : top_k; }
  // Whether nothing need be scored: the query reads everything, or has no more candidates than it may choose. Lists
  // name the candidates all the same, but for dense queries.
  constexpr bool ReadsAll(int32_t b) const { return Dense(b) || Candidates(b) <= top_k; }

  // Init blocks that exist for the query, and the first block of the rest that it reads without choosing it: blocks
  // [0, InitEnd(b)) and [LocalBegin(b), b] are read whatever is chosen, each once. A dense query reads [0, b] as local.
  constexpr int32_t InitEnd(int32_t b) const { return Dense(b) ? 0 : init_blocks < b + 1 ? init_blocks : b + 1; }
  constexpr int32_t LocalBegin(int32_t b) const {
    return Dense(b) ? 0 : CandidateEnd(b) < b + 1 ? CandidateEnd(b) : b + 1;
  }
  // Whether block t, at most b, is read whatever is chosen.
  constexpr bool Always(int32_t t, int32_t b) const { return t < init_blocks || b - local_blocks <= t || Dense(b); }
  // The other way around: queries of this block and later ones read block t only as init or chosen.
  constexpr int32_t LocalQueryEnd(int32_t t) const {
    return dense_blocks > t + local_blocks + 1 ? dense_blocks : t + local_blocks + 1;
  }

  // The first token that a query may read at all: a window cuts the local blocks off at a token.
  constexpr int32_t WindowBegin(int32_t position) const {
    return window > 0 && window <= position ? position + 1 - window : 0;
  }
  // Tokens that a query reads if `chosen` of its candidates are.
  constexpr int64_t TokensRead(int32_t position, int64_t chosen, int32_t block_size) const {
    if (window > 0) return position + 1 - WindowBegin(position);
    const int32_t b = position / block_size;
    return int64_t{position} + 1 - (int64_t{LocalBegin(b)} - InitEnd(b) - chosen) * block_size;
  }
};

// Rows of representatives: row j covers tokens [j · rep_stride, j · rep_stride + rep_span).
struct RepRules {
  int32_t rep_stride = 16, rep_span = 16;

  // Rows that exist once `tokens` tokens are there.
  constexpr int32_t NumRepRows(int32_t tokens) const {
    return tokens < rep_span ? 0 : (tokens - rep_span) / rep_stride + 1;
  }
};

}  // namespace phsa

#endif  // PHSA_ATTENTION_BLOCKS_H_
