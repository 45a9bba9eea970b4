// Finds documents that hold the text of others, such as what a model is tested on.
#ifndef PHSA_DATA_OVERLAP_H_
#define PHSA_DATA_OVERLAP_H_

#include <cstdint>
#include <string_view>
#include <unordered_set>

namespace phsa {

// Texts are compared by their runs of 13 words, whatever is between the words and however they are capitalised: another
// edition of a book is found, a common phrase is not. A Chinese, Japanese or Korean character is a word.
class OverlapFinder {
 public:
  void Add(std::string_view text);
  // Whether more than 1 in 100 of the runs of `text` are in what was added. Both texts must be UTF-8.
  bool Overlaps(std::string_view text) const;
  bool empty() const { return runs_.empty(); }

 private:
  std::unordered_set<uint64_t> runs_;  // digests
};

}  // namespace phsa

#endif  // PHSA_DATA_OVERLAP_H_
