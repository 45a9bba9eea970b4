// FakeModel with a tokenizer, as a loaded engine.
#ifndef PHSA_TESTS_FAKE_ENGINE_H_
#define PHSA_TESTS_FAKE_ENGINE_H_

#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/policies.h"
#include "engine/engine.h"
#include "fake_model.h"

namespace phsa {

// The vocabulary of FakeModel: letters, some punctuation, a control token, and the bytes of "é" and "😀" one by one.
inline constexpr int32_t kEnd = 100;
inline Tokenizer SmallTokenizer() {
  BpeVocabulary vocabulary;
  vocabulary.model = "gpt2";
  vocabulary.pre = "gpt-2";
  for (char c = 'a'; c <= 'z'; ++c) vocabulary.tokens.emplace_back(1, c);
  for (const char* token : {".", ",", "Ġ", "Ċ", "<", "/", ">", "Ã", "©", "ð", "Ł", "ĺ", "Ģ"}) {
    vocabulary.tokens.emplace_back(token);
  }
  while (vocabulary.tokens.size() < static_cast<size_t>(kEnd)) {
    vocabulary.tokens.push_back("x" + std::to_string(vocabulary.tokens.size()));
  }
  vocabulary.tokens.emplace_back("<|end|>");
  vocabulary.token_types.assign(vocabulary.tokens.size(), 1);
  vocabulary.token_types.back() = 3;
  return Tokenizer::FromVocabulary(vocabulary, "small");
}

inline std::unique_ptr<Engine> LoadedEngine(const EngineOptions& options,
                                            std::unique_ptr<FakeModel> model = std::make_unique<FakeModel>()) {
  auto engine = std::make_unique<Engine>(std::move(model), SmallTokenizer(), options);
  engine->Load([](double) { return true; });
  return engine;
}

// Few blocks, so that short texts are read sparsely.
inline Settings SmallSettings(Policy policy, int32_t top_k) {
  Settings settings;
  settings.policy = policy;
  settings.block_size = BlockSizeOf(policy);
  settings.init_tokens = settings.block_size;
  settings.local_tokens = 2 * settings.block_size;
  settings.top_k = top_k;
  settings.lambda = 0.8f;
  settings.punctuation = "none";
  return settings;
}

// f32 weights, two threads.
inline EngineOptions FakeOptions(int32_t context, int32_t chunk = 512,
                                 const Settings& attention = SmallSettings(Policy::kDense, 0)) {
  EngineOptions options;
  options.weights = WeightsMode::kF32;
  options.context = context;
  options.threads = 2;
  options.chunk = chunk;
  options.attention.base = attention;
  return options;
}

// Rows of each step's items.
class StepWatch {
 public:
  explicit StepWatch(Decoder& decoder) : decoder_(decoder) {
    decoder.Observe([this](const LayerAttention& attention) {
      if (attention.layer == 0) steps.emplace_back(attention.q_lens.begin(), attention.q_lens.end());
    });
  }
  ~StepWatch() { decoder_.Observe({}); }
  static int32_t Rows(const std::vector<int32_t>& step) { return std::accumulate(step.begin(), step.end(), 0); }
  int32_t all_rows() const {
    return std::accumulate(steps.begin(), steps.end(), 0, [](int32_t sum, const auto& one) { return sum + Rows(one); });
  }

  std::vector<std::vector<int32_t>> steps;

 private:
  Decoder& decoder_;
};

inline std::vector<int32_t> Joined(std::span<const int32_t> a, std::span<const int32_t> b) {
  std::vector<int32_t> both(a.begin(), a.end());
  both.insert(both.end(), b.begin(), b.end());
  return both;
}

}  // namespace phsa

#endif  // PHSA_TESTS_FAKE_ENGINE_H_
