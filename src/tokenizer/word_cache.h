// The ids of words seen lately: text repeats its words.
#ifndef PHSA_TOKENIZER_WORD_CACHE_H_
#define PHSA_TOKENIZER_WORD_CACHE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace phsa {

// One slot per hash value: a word takes the slot of another, so that memory stays what it is (2 MiB).
class WordCache {
 public:
  // The ids of `word`; empty: not here.
  std::span<const int32_t> Find(std::string_view word) {
    if (word.size() > kLongest) return {};
    if (slots_.empty()) slots_.resize(size_t{1} << kBits);
    slot_ = &slots_[Hash(word) >> (64 - kBits)];
    if (slot_->size != word.size() || std::memcmp(slot_->word, word.data(), word.size()) != 0) return {};
    return {slot_->ids, slot_->count};
  }

  // After Find of the same word did not find it.
  void Put(std::string_view word, std::span<const int32_t> ids) {
    if (word.size() > kLongest || ids.empty() || ids.size() > kMostIds) return;
    slot_->size = static_cast<uint8_t>(word.size());
    slot_->count = static_cast<uint8_t>(ids.size());
    std::memcpy(slot_->word, word.data(), word.size());
    std::copy(ids.begin(), ids.end(), slot_->ids);
  }

 private:
  static constexpr int kBits = 15;
  static constexpr size_t kLongest = 30, kMostIds = 8;
  struct alignas(64) Slot {
    uint8_t size = 0, count = 0;
    char word[kLongest];
    int32_t ids[kMostIds];
  };

  static uint64_t Hash(std::string_view word) {
    constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;
    uint64_t hash = word.size() * kFactor;
    size_t at = 0;
    for (; word.size() - at >= 8; at += 8) {
      uint64_t eight = 0;
      std::memcpy(&eight, word.data() + at, 8);
      hash = Mix(hash ^ eight);
    }
    uint64_t rest = 0;
    std::memcpy(&rest, word.data() + at, word.size() - at);
    return Mix(hash ^ rest) * kFactor;
  }
  static uint64_t Mix(uint64_t x) {
    x *= 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 32);
  }

  std::vector<Slot> slots_;
  Slot* slot_ = nullptr;
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_WORD_CACHE_H_
