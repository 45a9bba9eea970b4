#include "eval/niah/task.h"

#include <fmt/format.h>

#include <array>

#include "base/errors.h"
#include "eval/niah/words.h"

namespace phsa {
namespace {

using Hay = NiahTaskShape::Hay;
using Item = NiahTaskShape::Item;

struct NamedTask {
  const char* name;
  NiahTaskShape shape;
};

// In the order of NiahTask. Asking for four keys takes four keys.
constexpr std::array<NamedTask, kNumNiahTasks> kTasks = {{
    {"single_1", {Hay::kNoise, Item::kWords, Item::kNumbers, 1, 1, 1}},
    {"single_2", {Hay::kEssay, Item::kWords, Item::kNumbers, 1, 1, 1}},
    {"single_3", {Hay::kEssay, Item::kWords, Item::kUuids, 1, 1, 1}},
    {"multikey_1", {Hay::kEssay, Item::kWords, Item::kNumbers, 4, 1, 1}},
    {"multikey_2", {Hay::kNeedles, Item::kWords, Item::kNumbers, 1, 1, 1}},
    {"multikey_3", {Hay::kNeedles, Item::kUuids, Item::kUuids, 1, 1, 1}},
    {"multivalue", {Hay::kEssay, Item::kWords, Item::kNumbers, 1, 4, 1}},
    {"multiquery", {Hay::kEssay, Item::kWords, Item::kNumbers, 4, 1, 4}},
}};

// What the values are called: "number", "numbers".
std::string_view ValueName(const NiahTaskShape& shape, NiahLanguage language, bool plural) {
  const bool uuid = shape.value == Item::kUuids;
  if (language == NiahLanguage::kChinese) return uuid ? "UUID" : "数字";
  return uuid ? (plural ? "uuids" : "uuid") : (plural ? "numbers" : "number");
}

// A random UUID, version 4.
std::string DrawUuid(NiahRandom& random) {
  const uint64_t high = (random.Next() & 0xffffffffffff0fff) | 0x4000;
  const uint64_t low = (random.Next() & 0x3fffffffffffffff) | 0x8000000000000000;
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", high >> 32, (high >> 16) & 0xffff, high & 0xffff, low >> 48,
                     low & 0xffffffffffff);
}

}  // namespace

const char* Name(NiahTask task) { return kTasks[static_cast<size_t>(task)].name; }
const NiahTaskShape& Shape(NiahTask task) { return kTasks[static_cast<size_t>(task)].shape; }

NiahTask NiahTaskFromName(std::string_view name) {
  std::string names;
  for (size_t i = 0; i < kTasks.size(); ++i) {
    if (name == kTasks[i].name) return static_cast<NiahTask>(i);
    names += fmt::format("{}{}", i == 0 ? "" : ", ", kTasks[i].name);
  }
  ThrowInvalid("niah: there is no task {}; the tasks are {}", Quoted(name), names);
}

const char* Name(NiahLanguage language) { return language == NiahLanguage::kEnglish ? "en" : "zh"; }

NiahLanguage NiahLanguageFromName(std::string_view name) {
  for (const NiahLanguage language : {NiahLanguage::kEnglish, NiahLanguage::kChinese}) {
    if (name == Name(language)) return language;
  }
  ThrowInvalid("niah: there is no language {}; the languages are en and zh", Quoted(name));
}

const char* Name(NiahScoring scoring) {
  switch (scoring) {
    case NiahScoring::kReferences: return "references";
    case NiahScoring::kStrict: return "strict";
    case NiahScoring::kForced: return "forced";
  }
  return "";
}

NiahScoring NiahScoringFromName(std::string_view name) {
  for (const NiahScoring scoring : {NiahScoring::kReferences, NiahScoring::kStrict, NiahScoring::kForced}) {
    if (name == Name(scoring)) return scoring;
  }
  ThrowInvalid("niah: there is no scoring {}; there are references, strict and forced", Quoted(name));
}

std::string NiahTexts::Draw(Item item, NiahRandom& random) const {
  switch (item) {
    case Item::kNumbers: return fmt::format("{}", 1000000 + random.Below(9000000));
    case Item::kUuids: return DrawUuid(random);
    case Item::kWords: break;
  }
  const bool english = language_ == NiahLanguage::kEnglish;
  const NiahWords& words = english ? EnglishNiahWords() : ChineseNiahWords();
  const std::string_view adjective = words.adjectives[random.Below(words.adjectives.size())];
  const std::string_view noun = words.nouns[random.Below(words.nouns.size())];
  return fmt::format("{}{}{}", adjective, english ? "-" : "", noun);
}

std::string NiahTexts::Needle(const std::string& key, const std::string& value) const {
  const std::string_view name = ValueName(shape_, language_, true);
  if (language_ == NiahLanguage::kChinese) return fmt::format("{}的特殊魔法{}之一是：{}。", key, name, value);
  return fmt::format("One of the special magic {} for {} is: {}.", name, key, value);
}

std::string_view NiahTexts::Noise() const {
  if (language_ == NiahLanguage::kChinese) return "草是绿的。天是蓝的。太阳是黄的。我们走吧。去了又回来。";
  return "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
}

std::string_view NiahTexts::Joint() const {
  if (shape_.hay != Hay::kEssay) return "\n";
  return Space();
}

std::string NiahTexts::Introduction() const {
  const std::string_view name = ValueName(shape_, language_, !one_answer());
  if (language_ == NiahLanguage::kChinese) {
    return one_answer()
               ? fmt::format("下面的文本中隐藏着一个特殊的魔法{0}。请务必记住它，稍后我会就这个{0}向你提问。", name)
               : fmt::format("下面的文本中隐藏着一些特殊的魔法{0}。请务必记住它们，稍后我会就这些{0}向你提问。", name);
  }
  return fmt::format(
      "{0} special magic {1} {2} hidden within the following text. Make sure to memorize it. I will quiz you about the "
      "{1} afterwards.",
      one_answer() ? "A" : "Some", name, one_answer() ? "is" : "are");
}

std::string NiahTexts::List(std::span<const std::string> keys) const {
  const bool english = language_ == NiahLanguage::kEnglish;
  std::string list = keys.front();
  for (size_t i = 1; i < keys.size(); ++i) {
    const bool last = i + 1 == keys.size();
    list += english ? (last ? ", and " : ", ") : (last ? "和" : "、");
    list += keys[i];
  }
  return list;
}

std::string NiahTexts::Question(std::span<const std::string> keys) const {
  const std::string_view name = ValueName(shape_, language_, !one_answer());
  if (language_ == NiahLanguage::kChinese) {
    return one_answer() ? fmt::format("文中提到的{}的特殊魔法{}是什么？", List(keys), name)
                        : fmt::format("文中提到的{}的所有特殊魔法{}是什么？", List(keys), name);
  }
  return fmt::format("What {} the special magic {} for {} mentioned in the provided text?",
                     one_answer() ? "is" : "are all", name, List(keys));
}

std::string NiahTexts::AnswerPrefix(std::span<const std::string> keys) const {
  const std::string_view name = ValueName(shape_, language_, !one_answer());
  // The Chinese one ends with the needle's colon: without it a model may as well begin with one.
  if (language_ == NiahLanguage::kChinese) return fmt::format("文中提到的{}的特殊魔法{}是：", List(keys), name);
  return fmt::format("The special magic {} for {} mentioned in the provided text {}", name, List(keys),
                     one_answer() ? "is" : "are");
}

}  // namespace phsa
