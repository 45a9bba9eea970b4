// A table of SentencePiece that says what characters become: the precompiled_charsmap of its files.
#ifndef PHSA_TOKENIZER_CHARSMAP_H_
#define PHSA_TOKENIZER_CHARSMAP_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phsa {

class Charsmap {
 public:
  // `blob`: the size of a trie in bytes, the trie (a double array of 32-bit units, as Darts writes it), and texts that
  // end with a zero byte, to whose beginnings the trie's values point. Throws phsa::Error; `where` begins its message.
  Charsmap(std::string_view blob, const std::string& where);

  // Appends what becomes of `text`, as tokenizers does it. What is seen as one (a letter and its marks) and is shorter
  // than six bytes becomes what its shortest beginning in the table says, all of it; else each character by itself.
  void Append(std::string_view text, std::string* out) const;
  // Whether nothing becomes of the character that the text begins with.
  bool DropsFirst(std::string_view text) const;

 private:
  // What the shortest beginning of `text` in the table becomes; nothing: none is there.
  std::optional<std::string_view> Find(std::string_view text) const;

  std::vector<uint32_t> units_;
  std::string texts_;
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_CHARSMAP_H_
