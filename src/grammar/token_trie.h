// A vocabulary as a tree of bytes: what the tokens that begin alike have in common is looked at once.
#ifndef PHSA_GRAMMAR_TOKEN_TRIE_H_
#define PHSA_GRAMMAR_TOKEN_TRIE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace phsa {

class TokenTrie {
 public:
  // The bytes of each token; empty: it is never part of a text. Control tokens begin with kControlByte.
  explicit TokenTrie(const std::vector<std::string>& token_bytes);

  // In the order of a walk that visits a node before those below it.
  struct Node {
    uint8_t byte;                // that leads to it
    uint16_t depth;              // bytes of its text; the root has 0
    int32_t end;                 // the first node that is not below it
    int32_t tokens, tokens_end;  // of tokens(): those with exactly this text
  };
  std::span<const Node> nodes() const { return nodes_; }
  std::span<const int32_t> tokens() const { return tokens_; }
  int32_t vocab_size() const { return static_cast<int32_t>(offsets_.size()) - 1; }
  size_t mask_words() const { return (offsets_.size() - 1 + 63) / 64; }
  size_t depth() const { return depth_; }  // the longest token
  std::string_view Bytes(int32_t token) const {
    const auto begin = offsets_[static_cast<size_t>(token)];
    return std::string_view(bytes_).substr(begin, offsets_[static_cast<size_t>(token) + 1] - begin);
  }

 private:
  std::vector<Node> nodes_;
  std::vector<int32_t> tokens_;
  std::string bytes_;
  std::vector<size_t> offsets_;
  size_t depth_ = 0;
};

// No UTF-8 has this byte: a control token is this byte and its text, so that no letters can be taken for it.
inline constexpr char kControlByte = '\xff';

}  // namespace phsa

#endif  // PHSA_GRAMMAR_TOKEN_TRIE_H_
