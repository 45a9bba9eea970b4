// The text that needles are hidden in: a list of sentences.
#ifndef PHSA_EVAL_NIAH_HAYSTACK_H_
#define PHSA_EVAL_NIAH_HAYSTACK_H_

#include <string>
#include <string_view>
#include <vector>

namespace phsa {

// The sentences of an English or Chinese text, white space inside them collapsed to one space. A sentence ends after
// . ! ? before white space, not after "Mr." and the like, and after 。！？ anywhere; closing quotes and brackets belong
// to it. What has no end for very long is cut between words.
std::vector<std::string> SplitSentences(std::string_view text);

class Haystack {
 public:
  // `name` is for messages. The text is UTF-8. Throws phsa::Error where it has no sentence.
  Haystack(std::string_view text, std::string name);
  // The beginning of Bret Harte's "From Sand Hill to Pine": about 23,000 tokens of public-domain English.
  static Haystack BuiltIn();

  const std::vector<std::string>& sentences() const { return sentences_; }
  const std::string& name() const { return name_; }
  const std::string& sha256() const { return sha256_; }  // of the text as it was given

 private:
  std::string name_, sha256_;
  std::vector<std::string> sentences_;
};

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_HAYSTACK_H_
