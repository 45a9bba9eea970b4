// What the queries of a tile read without choosing: init, local, or everything.
#ifndef PHSA_ATTENTION_CPU_BAND_H_
#define PHSA_ATTENTION_CPU_BAND_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "attention/cpu/workspace.h"
#include "attention/plan.h"

namespace phsa::cpu {

enum class BandPart { kInit, kLocal };  // queries that read everything do so in the second

// Tokens that the queries of block b read in one part, none of them beyond `end`.
inline std::pair<int32_t, int32_t> BandRange(const PlanImpl& plan, int32_t b, BandPart part, int32_t end) {
  const bool all = plan.ReadsAll(b);
  if (part == BandPart::kInit) return {0, all ? 0 : plan.init_blocks * plan.block};
  return {all ? 0 : plan.CandidateEnd(b) * plan.block, std::min((b + 1) * plan.block, end)};
}

// Tokens that any of the queries at positions [begin, end) reads in one part. Both ends of a block's range grow with
// the block, and only the first blocks may read everything.
inline std::pair<int32_t, int32_t> BandTokens(const PlanImpl& plan, int32_t begin, int32_t end, BandPart part) {
  return {BandRange(plan, begin / plan.block, part, end).first,
          BandRange(plan, (end - 1) / plan.block, part, end).second};
}

// Walks over tokens [token_begin, token_end) of one part of the band for queries at positions [begin, end), in chunks
// of kChunk keys at absolute positions, so that where a tile begins changes no sum. fn(chunk, query_begin, query_end,
// lo, hi): those queries read tokens [lo, hi) of the chunk, each up to its own position. Neighbouring blocks of queries
// that read the same go together.
template <class Fn>
void ForEachBandRun(const PlanImpl& plan, int32_t begin, int32_t end, BandPart part, int32_t token_begin,
                    int32_t token_end, Fn&& fn) {
  const int32_t first_block = begin / plan.block, last_block = (end - 1) / plan.block;
  for (int32_t chunk = token_begin / kChunk * kChunk; chunk < token_end; chunk += kChunk) {
    int32_t run_begin = 0, run_end = 0, run_lo = 0, run_hi = 0;
    for (int32_t b = first_block; b <= last_block; ++b) {
      const auto [from, to] = BandRange(plan, b, part, end);
      const int32_t lo = std::max(from, chunk), hi = std::min(to, chunk + kChunk);
      if (lo >= hi) continue;
      const int32_t query_begin = std::max(begin, b * plan.block);
      if (query_begin != run_end || lo != run_lo || hi != run_hi) {
        if (run_begin < run_end) fn(chunk, run_begin, run_end, run_lo, run_hi);
        run_begin = query_begin;
        run_lo = lo;
        run_hi = hi;
      }
      run_end = std::min(end, (b + 1) * plan.block);
    }
    if (run_begin < run_end) fn(chunk, run_begin, run_end, run_lo, run_hi);
  }
}

}  // namespace phsa::cpu

#endif  // PHSA_ATTENTION_CPU_BAND_H_
