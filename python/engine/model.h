// A loaded model for Python: one call at a time, each outside of Python's lock.
#ifndef PHSA_PYTHON_ENGINE_MODEL_H_
#define PHSA_PYTHON_ENGINE_MODEL_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/attention_choice.h"
#include "engine/engine.h"
#include "engine/sampling_choice.h"
#include "engine/scheduler.h"
#include "engine/scorer.h"
#include "eval/inspect.h"
#include "grammar/grammar_cache.h"
#include "outside_python.h"
#include "tokenizer/chat_template.h"

namespace phsa::python {

using Ids = std::vector<int32_t>;

struct GenerateChoice {
  SamplingChoice sampling;
  int32_t max_tokens = 512;
  std::vector<std::string> stops;
  std::vector<int32_t> stop_tokens;
  bool ignore_eos = false;
  std::optional<int32_t> log_probabilities;  // with this many of the likeliest tokens
  std::optional<std::string> adapter;        // the folder of the one to use; empty: none; unset: SetAdapter's
  std::shared_ptr<const Grammar> grammar;    // none: any text
};

class Model {
 public:
  // Called with Python's lock held, now and then: what is done, and which share of it.
  using Progress = std::function<void(const char* what, double share)>;

  // `adapter`: the folder of a LoRA adapter; empty: none. `other_adapters`: those that may be asked for later, which
  // are checked now.
  Model(const std::string& model, const std::string& adapter, const std::vector<std::string>& other_adapters,
        const AttentionChoice& attention, EngineOptions options, const std::string& chat_template, Progress progress);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const { return engine_->config(); }
  const Tokenizer& tokenizer() const { return engine_->tokenizer(); }
  const std::optional<ChatTemplate>& chat_template() const { return chat_template_; }
  std::string device_name() const { return engine_->device_name(); }
  const std::string& device_note() const { return engine_->device().note; }
  // As they are now: another thread may change the attention.
  MemoryNeeds memory() const;
  LayerSettings attention() const;
  void SetAttention(const AttentionChoice& choice);
  void SetAdapter(const std::string& folder);  // empty: none

  Ids Encode(std::string_view text, SpecialTokens special) const;
  std::string Decode(std::span<const int32_t> ids, bool skip_special) const;
  std::string RenderChat(std::span<const ChatMessage> messages, bool add_generation_prompt) const;
  Ids EncodeChat(std::span<const ChatMessage> messages, bool add_generation_prompt) const;

  // `n` answers to each of the prompts, those of one side by side. `seeds`: one for each prompt, or empty: the choice's
  // for all. The answers to one prompt have seeds that count up from it.
  std::vector<GenerateResult> Generate(const std::vector<Ids>& prompts, const std::vector<uint64_t>& seeds,
                                       const GenerateChoice& choice, int32_t n, int32_t max_batch);
  std::vector<Score> LogLikelihoods(std::span<const ScoreRequest> requests);
  // [ids.size()][vocab_size]
  std::unique_ptr<float[]> Logits(std::span<const int32_t> ids);
  Inspection Inspect(std::span<const int32_t> ids, int32_t last, int32_t max_tokens);

 private:
  friend class Stream;
  class Turn;
  class Batch;

  GenerateOptions Options(const GenerateChoice& choice) const;
  const ChatTemplate& RequireChatTemplate() const;
  void KeepState();  // for memory() and attention()

  LayerSettings Resolve(const AttentionChoice& choice) const;

  // These are called by whoever has the turn.
  void UseAdapter(const std::string& folder);
  // Ends what the scheduler keeps for later, so that all of the cache can be had. Throws where a stream is open.
  void EmptyCache(const char* what);
  Scheduler& SchedulerFor(int32_t max_batch);
  bool Step();  // false: nothing is left to do

  const pid_t process_;
  std::unique_ptr<Engine> engine_;
  int32_t asked_context_ = 0;
  std::optional<ChatTemplate> chat_template_;
  Progress progress_;

  std::timed_mutex turn_mutex_;
  std::atomic<std::thread::id> turn_owner_;
  // Lives from call to call, as the next prompt may begin as the last one did.
  std::unique_ptr<Scheduler> scheduler_;
  int32_t max_batch_ = 0;
  AttentionChoice attention_choice_;      // as asked for: another adapter may carry other settings
  std::string adapter_, chosen_adapter_;  // the one in use, that of calls which ask for none
  std::vector<int64_t> ending_;           // cancelled, and not yet taken from the scheduler

  mutable std::mutex state_mutex_;  // never held for long: what follows can be had without a turn
  MemoryNeeds memory_;
  LayerSettings attention_;
  int32_t open_streams_ = 0;
  // Requests that nobody waits for any more; the next step cancels them. Python's garbage collection puts streams here,
  // perhaps those of a thread that has the turn.
  std::vector<int64_t> abandoned_;
};

// An answer as it is written. Must not outlive its model.
class Stream {
 public:
  Stream(Model& model, Ids prompt, const GenerateChoice& choice, int32_t max_batch);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // The next piece of text; none: that was all.
  std::optional<std::string> Next();
  // After the last piece; none: before, or the stream was closed.
  const std::optional<GenerateResult>& result() const { return result_; }
  // From any thread, also while another one waits in Next(), which then ends before its next step.
  void Close();

 private:
  bool IsOpen() const;
  void End();  // its result was taken
  Model& model_;
  int64_t id_ = 0;
  std::shared_ptr<std::string> text_ = std::make_shared<std::string>();  // what Next() has not given yet
  std::optional<GenerateResult> result_;
  bool open_ = false;  // under the model's state_mutex_
};

}  // namespace phsa::python

#endif  // PHSA_PYTHON_ENGINE_MODEL_H_
