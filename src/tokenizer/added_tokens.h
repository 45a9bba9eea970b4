// Tokens that are found in the text itself, before it is cut into words: <|im_end|> and its like.
#ifndef PHSA_TOKENIZER_ADDED_TOKENS_H_
#define PHSA_TOKENIZER_ADDED_TOKENS_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/pattern.h"

namespace phsa {

struct AddedToken {
  int32_t id = 0;
  std::string text;
  bool special = false;                          // a control token
  bool normalized = false;                       // looked for in the normalised text
  bool single_word = false;                      // only where no word character touches it
  bool left_strip = false, right_strip = false;  // takes the white space on that side with it
};

// Where in a text control tokens are meant as such.
struct SpecialPlaces {
  bool everywhere = false;
  std::span<const TextRange> ranges = {};  // else: inside of one of these, which are in order and do not touch
  bool Hold(size_t begin, size_t end) const;
};

// Finds the tokens of a set, as tokenizers does: leftmost, then longest.
class AddedTokenFinder {
 public:
  struct Piece {
    std::string_view text;  // between tokens
    int32_t id;             // of a token; -1: this is text
  };

  AddedTokenFinder();
  // The first of equal texts counts.
  void Add(const AddedToken& token, std::string_view text);

  // Appends the pieces of `text`. Elsewhere than in `special`, control tokens stay text.
  void Split(std::string_view text, const SpecialPlaces& special, Pattern::Scratch* scratch,
             std::vector<Piece>* pieces) const;

 private:
  // The longest token that begins at `at`; null: none. Sets its end.
  const AddedToken* Longest(std::string_view text, size_t at, size_t* end) const;
  bool IsWordCharacter(std::string_view character, Pattern::Scratch* scratch) const;

  std::vector<AddedToken> tokens_;
  // A trie: (node, byte) to node. Node 0 is the root; token_of_ says which token ends at a node (-1: none).
  std::unordered_map<uint64_t, uint32_t> edges_;
  std::vector<int32_t> token_of_;
  std::array<bool, 256> begins_{};  // the bytes that tokens begin with: most text is passed over by this alone
  Pattern word_character_;
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_ADDED_TOKENS_H_
