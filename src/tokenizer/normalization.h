// What a text goes through before it is cut into words: the steps of a tokenizer.json's normalizer.
#ifndef PHSA_TOKENIZER_NORMALIZATION_H_
#define PHSA_TOKENIZER_NORMALIZATION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/charsmap.h"
#include "tokenizer/normalizer.h"
#include "tokenizer/pattern.h"

namespace phsa {

class Normalization {
 public:
  struct Scratch {
    std::string texts[2];
    std::vector<TextRange> matches;
    bool dropped_first = false;  // what the text began with is gone
  };

  void AddForm(NormalForm form);
  void AddNmt();  // control characters away, other white space as spaces
  void AddCharsmap(Charsmap charsmap);
  void AddReplace(std::string_view text, std::string_view by);
  void AddReplace(Pattern pattern, std::string_view by);
  void AddPrepend(std::string_view text);  // to what is not empty
  void AddStrip(bool left, bool right);    // white space
  bool empty() const { return steps_.empty(); }
  bool OnlyNfc() const {
    return steps_.size() == 1 && steps_[0].kind == Kind::kForm && steps_[0].form == NormalForm::kNfc;
  }

  // What becomes of `text`: itself where no step changes it, else in `scratch`. Throws phsa::Error where a file's steps
  // make very much more of it.
  std::string_view Apply(std::string_view text, Pattern::Scratch* pattern, Scratch* scratch) const;

 private:
  enum class Kind : uint8_t { kForm, kNmt, kCharsmap, kReplaceText, kReplacePattern, kPrepend, kStrip };
  struct Step {
    Kind kind;
    NormalForm form = NormalForm::kNfc;
    std::optional<Charsmap> charsmap = std::nullopt;
    std::optional<Pattern> pattern = std::nullopt;
    std::string text = {}, by = {};
    bool left = false, right = false;
  };
  std::vector<Step> steps_;
};

}  // namespace phsa

#endif  // PHSA_TOKENIZER_NORMALIZATION_H_
