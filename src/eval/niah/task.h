// The needle tasks of RULER (Hsieh et al., 2024): what is hidden, in what, and what is asked.
#ifndef PHSA_EVAL_NIAH_TASK_H_
#define PHSA_EVAL_NIAH_TASK_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eval/niah/random.h"

namespace phsa {

enum class NiahTask : uint8_t {
  kSingle1,
  kSingle2,
  kSingle3,
  kMultikey1,
  kMultikey2,
  kMultikey3,
  kMultivalue,
  kMultiquery,
};
inline constexpr int kNumNiahTasks = 8;

const char* Name(NiahTask task);                   // "single_1", …
NiahTask NiahTaskFromName(std::string_view name);  // throws phsa::Error listing the names

struct NiahTaskShape {
  enum class Hay : uint8_t { kNoise, kEssay, kNeedles } hay;
  enum class Item : uint8_t { kWords, kNumbers, kUuids } key, value;
  int32_t keys, values, queries;  // values: of each key
  int32_t references() const { return queries * values; }
};
const NiahTaskShape& Shape(NiahTask task);

enum class NiahLanguage : uint8_t { kEnglish, kChinese };
const char* Name(NiahLanguage language);                   // "en", "zh"
NiahLanguage NiahLanguageFromName(std::string_view name);  // throws phsa::Error

// When an answer is right. References: each one that appears in a greedy generation, as in RULER. Strict: every token
// of the answer is the likeliest one given the right ones before it. Forced: the same, but for the space that the
// answer begins with, so that a model that would rather write a colon first is not called wrong.
enum class NiahScoring : uint8_t { kReferences, kStrict, kForced };
const char* Name(NiahScoring scoring);                   // "references", "strict", "forced"
NiahScoring NiahScoringFromName(std::string_view name);  // throws phsa::Error

// RULER's room for the answer, part of a sample's length.
inline constexpr int32_t kNiahAnswerTokens = 128;

// The sentences of a task in a language.
class NiahTexts {
 public:
  NiahTexts(NiahTask task, NiahLanguage language) : shape_(Shape(task)), language_(language) {}

  std::string DrawKey(NiahRandom& random) const { return Draw(shape_.key, random); }
  std::string DrawValue(NiahRandom& random) const { return Draw(shape_.value, random); }
  std::string Needle(const std::string& key, const std::string& value) const;
  std::string_view Noise() const;
  // Between the pieces of a haystack.
  std::string_view Joint() const;

  std::string Introduction() const;
  std::string Question(std::span<const std::string> keys) const;
  std::string AnswerPrefix(std::span<const std::string> keys) const;
  // Between question and answer prefix where both are one text, and between answer prefix and answer.
  std::string_view Space() const { return language_ == NiahLanguage::kEnglish ? " " : ""; }
  // Keys in a question, values in an answer.
  std::string List(std::span<const std::string> items) const;

 private:
  std::string Draw(NiahTaskShape::Item item, NiahRandom& random) const;
  bool one_answer() const { return shape_.references() == 1; }
  const NiahTaskShape& shape_;
  NiahLanguage language_;
};

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_TASK_H_
