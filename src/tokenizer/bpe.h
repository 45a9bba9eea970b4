// The merges of a vocabulary: one word to token ids, from its bytes on or, as SentencePiece does it, its characters.
#ifndef PHSA_TOKENIZER_BPE_H_
#define PHSA_TOKENIZER_BPE_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tokenizer/text_range.h"

namespace phsa {

struct BpeMerge {
  int32_t left, right, result;
};

// What SentencePiece writes for a space: U+2581.
inline constexpr char32_t kSpaceMarkCode = 0x2581;
inline constexpr std::string_view kSpaceMark = "\xe2\x96\x81";

struct BpeModel {
  std::array<int32_t, 256> byte_ids;  // the token of each byte; -1: the vocabulary has none
  // SentencePiece: the token of each character; one without a token is its bytes. Empty: all is bytes.
  std::unordered_map<char32_t, int32_t> character_ids;
  // Likewise: the characters behind which a token goes on with kSpaceMark.
  std::unordered_set<char32_t> before_space;
  std::vector<BpeMerge> merges;  // first merged first; a pair that comes again takes its later place
  int32_t unknown = -1;          // for a byte without a token; -1: such bytes give nothing, as in tokenizers
  bool fuse_unknown = false;     // several of them in a row are one
  // ignore_merges: a word that is a token is that token, whatever the merges would make of it. Empty: not asked for.
  std::unordered_map<std::string, int32_t> whole_words;
};

class Bpe {
 public:
  // Buffers that one thread at a time may use.
  struct Scratch {
    std::vector<int32_t> symbols;
    std::vector<uint32_t> ranks;
    std::vector<int32_t> results;
    std::vector<uint32_t> previous, next;
    std::vector<std::pair<uint32_t, uint32_t>> heap;  // (rank, position)
  };

  explicit Bpe(BpeModel model);

  // Appends the ids. With `forbidden` (one entry per id), nothing merges into a token whose entry is not 0, and such an
  // unknown token is left out.
  void Encode(std::string_view word, const std::vector<uint8_t>* forbidden, Scratch* scratch,
              std::vector<int32_t>* ids) const;

  // Whether a merge, a whole word or an unknown byte can give a token whose entry is not 0.
  bool CanGive(const std::vector<uint8_t>& tokens) const;

  // Appends the pieces of a stretch of a SentencePiece text across whose ends nothing merges: the words, mostly.
  void Cut(std::string_view text, TextRange range, std::vector<TextRange>* pieces) const;
  bool of_characters() const { return !model_.character_ids.empty(); }

  const std::vector<BpeMerge>& merges() const { return model_.merges; }

 private:
  // A pair's merge, in a flat table with linear probing: one cache line answers most lookups.
  struct Entry {
    uint64_t pair = kFree;
    uint32_t rank = 0;
    int32_t result = 0;
  };
  static constexpr uint64_t kFree = ~uint64_t{0};
  static constexpr uint32_t kNoMerge = ~uint32_t{0};

  static uint64_t Pair(int32_t left, int32_t right);
  size_t Slot(uint64_t pair) const { return (pair * 0x9e3779b97f4a7c15u) >> shift_; }
  // The rank of the pair, and its result; kNoMerge where it does not merge.
  uint32_t Find(int32_t left, int32_t right, const std::vector<uint8_t>* forbidden, int32_t* result) const;
  void MergeShort(const std::vector<uint8_t>* forbidden, Scratch* scratch) const;
  void MergeLong(const std::vector<uint8_t>* forbidden, Scratch* scratch) const;

  BpeModel model_;
  std::vector<Entry> table_;
  int shift_ = 0;
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_BPE_H_
