// Turns "the blocks that each list names" into "the lists that name each block", for one tile.
#ifndef PHSA_ATTENTION_CPU_BLOCK_LISTS_H_
#define PHSA_ATTENTION_CPU_BLOCK_LISTS_H_

#include <algorithm>
#include <cstdint>

namespace phsa::cpu {

class BlockLists {
 public:
  // head: [blocks], all -1 between uses. bits: [blocks / 64 + 1], all 0 between uses. next: [entries].
  BlockLists(int32_t* head, uint64_t* bits, int32_t* next, int32_t window)
      : head_(head), bits_(bits), next_(next), window_(window) {}

  static void Reset(int32_t* head, uint64_t* bits, int32_t blocks) {
    std::fill_n(head, blocks, -1);
    std::fill_n(bits, blocks / 64 + 1, 0);
  }

  // Slot `slot` (< window) of list `list` names `block`.
  void Add(int32_t list, int32_t slot, int32_t block) {
    const int32_t entry = list * window_ + slot;
    next_[entry] = head_[block];
    head_[block] = entry;
    bits_[block / 64] |= uint64_t{1} << (block % 64);
    first_word_ = std::min(first_word_, block / 64);
    last_word_ = std::max(last_word_, block / 64);
  }

  // fn(block) in ascending order. Ascending, because a row's sums must run in one order whatever tile it is in.
  template <class Fn>
  void ForEachBlock(Fn&& fn) const {
    for (int32_t w = first_word_; w <= last_word_; ++w) {
      for (uint64_t word = bits_[w]; word != 0; word &= word - 1) fn(w * 64 + __builtin_ctzll(word));
    }
  }

  // fn(list, slot) for the lists that name the block.
  template <class Fn>
  void ForEachList(int32_t block, Fn&& fn) const {
    for (int32_t e = head_[block]; e >= 0; e = next_[e]) fn(e / window_, e % window_);
  }

  // Back to "between uses".
  void Clear() {
    ForEachBlock([&](int32_t block) { head_[block] = -1; });
    for (int32_t w = first_word_; w <= last_word_; ++w) bits_[w] = 0;
    first_word_ = INT32_MAX;
    last_word_ = -1;
  }

 private:
  int32_t* head_;
  uint64_t* bits_;
  int32_t* next_;
  int32_t window_;
  int32_t first_word_ = INT32_MAX;
  int32_t last_word_ = -1;
};

}  // namespace phsa::cpu

#endif  // PHSA_ATTENTION_CPU_BLOCK_LISTS_H_
