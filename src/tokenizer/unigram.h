// SentencePiece's unigram model: of all ways to cut a text into tokens the one whose scores have the largest sum.
#ifndef PHSA_TOKENIZER_UNIGRAM_H_
#define PHSA_TOKENIZER_UNIGRAM_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace phsa {

struct UnigramModel {
  std::unordered_map<std::string, int32_t> ids;  // what a text may be cut into
  std::vector<double> scores;                    // by id
  double lowest_score = 0;                       // an unknown character's is 10 below
  int32_t unknown = -1;                          // for characters without a token; -1: they give nothing
  std::array<int32_t, 256> byte_ids;             // characters without a token are their bytes; -1: there is no token
};

class Unigram {
 public:
  // Of a token, in bytes: each character of a text may be looked at that often. Real ones have some dozens.
  static constexpr size_t kLongestToken = 1024;

  // Buffers that one thread at a time may use.
  struct Scratch {
    struct Best {         // the best way to where a token ends
      double score = 0;   // sum from the text's beginning on
      uint32_t size = 0;  // of its last token, in bytes; 0: nothing ends here
      int32_t id = 0;
    };
    std::vector<Best> best;
    std::vector<Best> path;
  };

  explicit Unigram(UnigramModel model);

  // Appends the ids of `text`, which must be UTF-8, those that tokenizers gives: the same sums in the same order. With
  // `forbidden` (one entry per id), it is cut into tokens whose entry is 0 only.
  void Encode(std::string_view text, const std::vector<uint8_t>* forbidden, Scratch* scratch,
              std::vector<int32_t>* ids) const;

  // Whether a text can give a token whose entry is not 0.
  bool CanGive(const std::vector<uint8_t>& tokens) const;
  const std::vector<double>& scores() const { return model_.scores; }

 private:
  struct Node {
    uint32_t children = 0;  // where they begin; they lie together, in the order of their bytes
    uint32_t count = 0;
    int32_t token = -1;
  };
  // The child of a node for a byte; 0: none.
  uint32_t Child(uint32_t node, uint8_t byte) const;

  UnigramModel model_;
  std::vector<Node> nodes_;     // the root is the first
  std::vector<uint8_t> bytes_;  // [node]: what leads to it
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_UNIGRAM_H_
