#include "eval/niah/prompt.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/errors.h"

namespace phsa {
namespace {

// RULER draws essay depths from 40 percentages, evenly spaced and rounded.
constexpr size_t kRulerDepths = 40;
double RulerDepth(size_t i) { return std::nearbyint(100.0 * static_cast<double>(i) / (kRulerDepths - 1)); }

// Hay that is gathered beyond what its pieces' tokens fill: joined they may take fewer.
constexpr int64_t kSpareTokens = 64;

}  // namespace

// A sample before it is known how much haystack fits around its needles.
struct NiahPrompts::Draft {
  NiahTexts texts;
  std::vector<std::string> needles;
  std::vector<double> depths;  // of each needle, in percent
  std::vector<size_t> asked;   // the needles that hold the answers
  std::vector<std::string> queries, references;
  std::set<std::string> used;  // keys and values

  // Everything but the answer prefix, around the first `count` pieces of hay.
  std::string Text(std::span<const std::string> hay, size_t count) const;
};

struct NiahPrompts::Hay {
  std::vector<std::string> pieces;
  // [pieces + 1], as if each were encoded alone. Joined they may take a few tokens more or less.
  std::vector<int64_t> tokens_before = {0};

  void Add(std::string piece, int64_t tokens) {
    pieces.push_back(std::move(piece));
    tokens_before.push_back(tokens_before.back() + std::max<int64_t>(tokens, 1));
  }
  int64_t tokens() const { return tokens_before.back(); }
  // How many pieces are at most `room` tokens.
  size_t Fitting(int64_t room) const {
    const auto over = std::upper_bound(tokens_before.begin(), tokens_before.end(), room);
    return static_cast<size_t>(over - tokens_before.begin()) - 1;
  }
};

NiahPrompts::NiahPrompts(const Tokenizer& tokenizer, const Haystack* haystack, NiahPromptOptions options)
    : tokenizer_(tokenizer), haystack_(haystack), options_(std::move(options)) {
  for (const double depth : options_.depths) {
    if (!(depth >= 0 && depth <= 100))
      ThrowInvalid("niah: {} has {}; depths are percentages, 0 to 100", Option{"depths"}, depth);
  }
  tokens_before_.push_back(0);
  if (haystack_ == nullptr) return;
  const std::string_view joint = NiahTexts(NiahTask::kSingle2, options_.language).Joint();
  for (const std::string& sentence : haystack_->sentences()) {
    const size_t tokens = tokenizer_.Encode(fmt::format("{}{}", joint, sentence), SpecialTokens::kAsText).size();
    tokens_before_.push_back(tokens_before_.back() + static_cast<int64_t>(tokens));
  }
}

NiahPrompts::Draft NiahPrompts::Draw(NiahTask task, int32_t index, NiahRandom& random) const {
  const NiahTaskShape& shape = Shape(task);
  Draft draft{NiahTexts(task, options_.language), {}, {}, {}, {}, {}, {}};
  // No two keys and no two values are alike: the question would have two answers.
  const auto fresh = [&](const auto& draw) {
    for (;;) {
      std::string item = draw();
      if (draft.used.insert(item).second) return item;
    }
  };
  std::vector<std::string> keys, values;
  for (int32_t k = 0; k < shape.keys; ++k) {
    keys.push_back(fresh([&] { return draft.texts.DrawKey(random); }));
    for (int32_t v = 0; v < shape.values; ++v) {
      values.push_back(fresh([&] { return draft.texts.DrawValue(random); }));
      draft.needles.push_back(draft.texts.Needle(keys.back(), values.back()));
    }
  }
  if (shape.hay == NiahTaskShape::Hay::kEssay) {
    for (const size_t i : random.Sample(kRulerDepths, draft.needles.size())) draft.depths.push_back(RulerDepth(i));
  } else {
    // RULER draws one of the places between the lines.
    for (size_t i = 0; i < draft.needles.size(); ++i) draft.depths.push_back(100 * random.Unit());
  }
  const auto values_per_key = static_cast<size_t>(shape.values);
  for (const size_t k : random.Sample(keys.size(), static_cast<size_t>(shape.queries))) {
    draft.queries.push_back(keys[k]);
    for (size_t i = k * values_per_key; i < (k + 1) * values_per_key; ++i) {
      draft.asked.push_back(i);
      draft.references.push_back(values[i]);
    }
  }
  if (!options_.depths.empty()) {
    draft.depths[draft.asked.front()] = options_.depths[static_cast<size_t>(index) % options_.depths.size()];
  }
  return draft;
}

std::string NiahPrompts::Draft::Text(std::span<const std::string> hay, size_t count) const {
  std::vector<size_t> by_depth(needles.size());
  std::iota(by_depth.begin(), by_depth.end(), 0);
  std::stable_sort(by_depth.begin(), by_depth.end(), [&](size_t a, size_t b) { return depths[a] < depths[b]; });
  std::string text = texts.Introduction() + "\n";
  std::string_view joint;
  const auto add = [&](const std::string& piece) {
    text += joint;
    text += piece;
    joint = texts.Joint();
  };
  size_t next = 0;
  for (const size_t i : by_depth) {
    const auto place = static_cast<size_t>(depths[i] / 100 * static_cast<double>(count));
    for (; next < place; ++next) add(hay[next]);
    add(needles[i]);
  }
  for (; next < count; ++next) add(hay[next]);
  return text + "\n" + texts.Question(queries);
}

NiahPrompts::Hay NiahPrompts::GatherSentences(NiahTask task, int32_t length, int64_t room, NiahRandom& random) const {
  PHSA_CHECK(haystack_ != nullptr);
  const std::vector<std::string>& sentences = haystack_->sentences();
  if (HaystackTokens() < room && !options_.repeat) {
    ThrowInvalid("niah: {} has {} tokens, {} of {} tokens needs {}; give a longer text, a smaller {}, or {}",
                 haystack_->name(), HaystackTokens(), Name(task), length, room, Option{"lengths"},
                 Option{"repeat_haystack"});
  }
  const int64_t wanted = room + kSpareTokens;
  // Sentences from which the text is still long enough; a text that is repeated has no end.
  size_t starts = sentences.size();
  if (!options_.repeat || HaystackTokens() >= wanted) {
    const int64_t last = std::max<int64_t>(HaystackTokens() - wanted, 0);
    const auto beyond = std::upper_bound(tokens_before_.begin(), tokens_before_.end(), last);
    starts = static_cast<size_t>(beyond - tokens_before_.begin());
  }
  Hay hay;
  const size_t start = options_.random_start ? static_cast<size_t>(random.Below(starts)) : 0;
  for (size_t i = start; hay.tokens() < wanted && (i < sentences.size() || options_.repeat); ++i) {
    const size_t at = i % sentences.size();
    hay.Add(sentences[at], tokens_before_[at + 1] - tokens_before_[at]);
  }
  return hay;
}

NiahPrompts::Hay NiahPrompts::GatherLines(NiahTask task, int64_t room, const Draft& draft, NiahRandom& random) const {
  const auto tokens_of = [&](const std::string& line) {
    return static_cast<int64_t>(tokenizer_.Encode(line + "\n", SpecialTokens::kAsText).size());
  };
  const NiahTexts& texts = draft.texts;
  const std::string noise(texts.Noise());
  const int64_t noise_tokens = tokens_of(noise);
  Hay hay;
  while (hay.tokens() < room + kSpareTokens) {
    if (Shape(task).hay == NiahTaskShape::Hay::kNoise) {
      hay.Add(noise, noise_tokens);
      continue;
    }
    const std::string key = texts.DrawKey(random), value = texts.DrawValue(random);
    if (draft.used.count(key) > 0 || draft.used.count(value) > 0) continue;
    std::string line = texts.Needle(key, value);
    const int64_t tokens = tokens_of(line);
    hay.Add(std::move(line), tokens);
  }
  return hay;
}

std::vector<int32_t> NiahPrompts::Encode(const std::string& question, const std::string& answer_prefix,
                                         std::string_view space) const {
  if (options_.chat) {
    const ChatMessage message{"user", question};
    std::vector<int32_t> tokens = options_.chat->Encode({&message, 1}, true, tokenizer_);
    const std::vector<int32_t> prefix = tokenizer_.Encode(answer_prefix, SpecialTokens::kAsText);
    tokens.insert(tokens.end(), prefix.begin(), prefix.end());
    return tokens;
  }
  std::vector<int32_t> tokens =
      tokenizer_.Encode(fmt::format("{}{}{}", question, space, answer_prefix), SpecialTokens::kAsText);
  if (tokenizer_.add_bos() && tokenizer_.bos() >= 0) tokens.insert(tokens.begin(), tokenizer_.bos());
  return tokens;
}

NiahSample NiahPrompts::Build(NiahTask task, int32_t length, int32_t index) const {
  NiahRandom random(fmt::format("niah {} {} {} {}", options_.seed, Name(task), length, index));
  const Draft draft = Draw(task, index, random);
  const NiahTexts& texts = draft.texts;
  const std::string prefix = texts.AnswerPrefix(draft.queries);
  Hay hay;
  const auto tokens_with = [&](size_t count) { return Encode(draft.Text(hay.pieces, count), prefix, texts.Space()); };

  const auto bare = static_cast<int64_t>(tokens_with(0).size());
  const int64_t budget = length - kNiahAnswerTokens;
  if (bare >= budget) {
    ThrowInvalid("niah: {} has {}; question, needles and answer of {} alone take {} tokens: give a few hundred more",
                 Option{"lengths"}, length, Name(task), bare + kNiahAnswerTokens);
  }
  const int64_t room = budget - bare;
  hay = Shape(task).hay == NiahTaskShape::Hay::kEssay ? GatherSentences(task, length, room, random)
                                                      : GatherLines(task, room, draft, random);
  const auto fits = [&](const std::vector<int32_t>& tokens) { return static_cast<int64_t>(tokens.size()) <= budget; };
  NiahSample sample;
  size_t count = hay.Fitting(room);
  for (sample.tokens = tokens_with(count); !fits(sample.tokens);) sample.tokens = tokens_with(--count);
  for (; count < hay.pieces.size(); ++count) {
    std::vector<int32_t> more = tokens_with(count + 1);
    if (!fits(more)) break;
    sample.tokens = std::move(more);
  }
  sample.text = fmt::format("{}{}{}", draft.Text(hay.pieces, count), texts.Space(), prefix);
  sample.references = draft.references;
  for (const size_t i : draft.asked) sample.depths.push_back(draft.depths[i]);
  // Keys are answered as they are asked, values of one key as they stand in the text.
  std::vector<size_t> order(sample.references.size());
  std::iota(order.begin(), order.end(), 0);
  if (draft.queries.size() == 1) {
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return sample.depths[a] < sample.depths[b]; });
  }
  std::vector<std::string> answers;
  for (const size_t i : order) answers.push_back(sample.references[i]);
  sample.answer = fmt::format("{}{}", texts.Space(), texts.List(answers));
  return sample;
}

void NiahPrompts::Check(NiahTask task, int32_t length) const {
  if (!options_.depths.empty() && Shape(task).references() > 1) {
    ThrowInvalid("niah: {0} places one needle, and {1} asks for {2}; leave {0} out, or take another task",
                 Option{"depths"}, Name(task), Shape(task).references());
  }
  Build(task, length, 0);
}

}  // namespace phsa
