// One conversation with a model: prompts in, answers out. What the new prompt shares with the text so far is in the
// cache, and not prefilled again.
#ifndef PHSA_ENGINE_SESSION_H_
#define PHSA_ENGINE_SESSION_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "engine/answer.h"
#include "engine/engine.h"

namespace phsa {

struct GenerateCallbacks {
  std::function<void(std::string_view text)> text;           // as it comes; whole characters
  std::function<void(int32_t done, int32_t total)> prefill;  // tokens of the prompt
  std::function<bool()> stop;                                // asked before every step
};

class Session {
 public:
  // `attention`: none for the engine's own.
  explicit Session(Engine& engine, std::shared_ptr<const TextAttention> attention = nullptr)
      : engine_(engine), sequence_(engine.cache(), std::move(attention)) {}

  // Refuses what CheckPrompt refuses.
  GenerateResult Generate(std::span<const int32_t> prompt, const GenerateOptions& options,
                          const GenerateCallbacks& callbacks);
  // The prefill of a text, and no answer. Returns how many of its tokens were there already; none: stopped.
  std::optional<int32_t> Prefill(std::span<const int32_t> tokens, const GenerateCallbacks& callbacks,
                                 const LogitsSink& sink, BatchItem::Logits logits);
  Sequence& sequence() { return sequence_; }
  // The text so far with its cache, to and from a file (model/kv_file.h). Restore replaces the text by what the file's
  // and `prompt` have in common and returns how many tokens that are.
  void Save(const std::filesystem::path& path) const;
  int32_t Restore(const std::filesystem::path& path, std::span<const int32_t> prompt);

 private:
  // Of the tokens of a prefill, how many are there already.
  int32_t Reusable(std::span<const int32_t> tokens) const;

  Engine& engine_;
  Sequence sequence_;
};

}  // namespace phsa

#endif  // PHSA_ENGINE_SESSION_H_
