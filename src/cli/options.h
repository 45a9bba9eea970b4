// Flags that several commands share, and the way from them to a loaded model.
#ifndef PHSA_CLI_OPTIONS_H_
#define PHSA_CLI_OPTIONS_H_

#include <CLI/CLI.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/attention_choice.h"
#include "engine/sampling_choice.h"
#include "engine/session.h"
#include "phsa/settings.h"
#include "tokenizer/chat_template.h"

namespace phsa::cli {

// Which model, where and how precisely it runs.
struct ModelFlags {
  std::string model, adapter, device = "auto", weights = "auto", kv_type = "auto";
  int32_t context = 0, threads = 0, chunk = 0;
  // For commands that hold several texts at once: as EngineOptions has them.
  int32_t cache_tokens = 0, cache_texts = 1;
  bool other_attention = false;
};
void AddModelFlags(CLI::App& command, ModelFlags& flags);
void AddRunFlags(CLI::App& command, ModelFlags& flags);  // all of them but the model
void AddAdapterFlag(CLI::App& command, std::string& folder);

// How the attention reads. Lists make sweeps where a command allows them.
struct AttentionFlags {
  std::vector<std::string> policies = {"auto"};
  std::vector<int32_t> top_k;  // empty: what the settings say, 16 unless they do
  GivenSettings given;         // of the others
  std::string preset, config_file;
};
void AddAttentionFlags(CLI::App& command, AttentionFlags& flags);
// The text of a file of settings, judged.
std::string ReadSettingsFile(const std::string& path);
// The first policy and K.
AttentionChoice ChoiceOf(const AttentionFlags& flags);
// One for each policy and K, in that order; K counts once for policies that choose nothing. Flags count first, then
// --phsa-config, then what the model carries, then the preset for the context: ResolveAttention. A flag that none of
// the policies uses is refused.
std::vector<LayerSettings> AttentionSettings(const AttentionFlags& flags, const ModelConfig& config, int64_t context);
// The same for some of a command's policies, whose flags may be for the others.
std::vector<LayerSettings> SomeAttentionSettings(const AttentionFlags& flags, const ModelConfig& config,
                                                 int64_t context);

// How tokens are chosen. Unset flags take what the model recommends, then the program's own.
struct SamplingFlags : SamplingChoice {
  int32_t max_tokens = 512;  // -1: until the end token or a full context
  std::vector<std::string> stops;
  bool ignore_eos = false, allow_loops = false;
  std::string grammar_file, schema_file, speculate = "none";
};
void AddSamplingFlags(CLI::App& command, SamplingFlags& flags);
CLI::Option* AddSpeculateFlag(CLI::App& command, std::string& name);
// Says so where an answer was ended because it repeated itself.
void TellOfLoop(const GenerateResult& result);
GenerateOptions SamplingOptions(const SamplingFlags& flags, const ModelConfig& config);

// `model`: a path or a name; `adapter`: a folder, or none.
std::unique_ptr<ModelSource> OpenModel(const std::string& model, const std::string& adapter = "");
// Prints the memory that it needs and refuses what does not fit. LoadEngine has a progress bar; Ctrl-C throws
// Interrupted.
std::unique_ptr<Engine> OpenEngine(std::unique_ptr<ModelSource> source, Tokenizer tokenizer, const ModelFlags& flags,
                                   const LayerSettings& attention);
void LoadEngine(Engine& engine);

// The template that --chat-template names, else the one whose text the model carries.
ChatTemplate ChooseChatTemplate(const std::string& name, const std::string& model_template);

// Where auto found no settings and reads a long text densely: one line that says how to ask for PHSA.
void HintAtPhsa(const AttentionFlags& flags, const LayerSettings& chosen, size_t prompt_tokens);

// Once in a process, where a text is longer than the model's or adapter's settings say that it was tested with.
void WarnPastTested(const ModelConfig& config, size_t tokens);

// A file that keeps what was read for the next process.
struct PromptCacheFlags {
  std::string file;
  bool read_only = false;
};
void AddPromptCacheFlags(CLI::App& command, PromptCacheFlags& flags);
// Before the first prompt, where the file is there.
void RestorePromptCache(const PromptCacheFlags& flags, Session& session, std::span<const int32_t> prompt);
void SavePromptCache(const PromptCacheFlags& flags, const Session& session);

// "512", "8k" (8192), at least `least`; `flag` is for the message.
int32_t TokenCount(const std::string& text, const char* flag, int32_t least);

// A whole file, or standard input for "-". What is not UTF-8 is refused, naming the offset.
std::string ReadText(const std::string& path);
// A progress bar over the prompt, and Ctrl-C.
class ProgressBar;
GenerateCallbacks PrefillCallbacks(ProgressBar& bar);

}  // namespace phsa::cli

#endif  // PHSA_CLI_OPTIONS_H_
