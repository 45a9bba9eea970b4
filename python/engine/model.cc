#include "model.h"
#include "attention/policies.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/errors.h"
#include "base/mapped_file.h"
#include "base/memory.h"
#include "engine/session.h"
#include "io/model_store.h"

namespace phsa::python {

// The one call that uses the model, outside of Python's lock.
class Model::Turn {
 public:
  explicit Turn(Model& model) : model_(model), lock_(model.turn_mutex_, std::defer_lock) {
    if (getpid() != model.process_) {
      throw std::runtime_error(
          "this LLM belongs to the process that made it, and a forked child has none of its threads: make one in the "
          "child");
    }
    if (model.turn_owner_.load() == std::this_thread::get_id()) {
      throw std::runtime_error("this LLM is in a call of this very thread, which a signal's handler interrupted");
    }
    while (!lock_.try_lock_for(std::chrono::milliseconds(50))) {
      if (Interrupted()) outside_.Return();
    }
    model.turn_owner_.store(std::this_thread::get_id());
  }
  ~Turn() { Release(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  bool Interrupted() { return outside_.Interrupted(); }
  bool Interrupted(const char* what, double share) {
    return outside_.Interrupted([&] {
      if (model_.progress_) model_.progress_(what, share);
    });
  }
  // Back to Python. Throws what a signal's handler raised meanwhile.
  void Return() {
    Release();
    outside_.Return();
  }

 private:
  void Release() {
    if (!lock_.owns_lock()) return;
    model_.turn_owner_.store({});
    lock_.unlock();
  }
  Model& model_;
  OutsidePython outside_;  // entered before the lock is taken, left after it is given back
  std::unique_lock<std::timed_mutex> lock_;
};

// Requests of one call. Those that are not finished when it ends, by an error or by Ctrl-C, are abandoned.
class Model::Batch {
 public:
  Batch(Model& model, int32_t max_batch) : model_(model), scheduler_(model.SchedulerFor(max_batch)) {}
  ~Batch() {
    const std::lock_guard lock(model_.state_mutex_);
    model_.abandoned_.insert(model_.abandoned_.end(), pending_.begin(), pending_.end());
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  void Add(Ids prompt, const GenerateOptions& options) {
    pending_.push_back(scheduler_.Add({std::move(prompt), options, {}, {}}));
    slots_.push_back(results_.size());
    results_.emplace_back();
  }
  // Takes what has finished.
  void Collect() {
    // They are worked on in order, so that those behind the first `max_batch_` cannot have finished.
    int32_t unfinished = 0;
    for (size_t i = 0; i < pending_.size() && unfinished < model_.max_batch_;) {
      std::optional<GenerateResult> result = scheduler_.Take(pending_[i]);
      if (!result) {
        ++unfinished;
        ++i;
        continue;
      }
      results_[slots_[i]] = std::move(*result);
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
      slots_.erase(slots_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  bool Done() const { return pending_.empty(); }
  double Share() const { return 1 - static_cast<double>(pending_.size()) / static_cast<double>(results_.size()); }
  std::vector<GenerateResult> TakeResults() { return std::move(results_); }

 private:
  Model& model_;
  Scheduler& scheduler_;
  std::vector<int64_t> pending_;  // ids
  std::vector<size_t> slots_;     // where their results go
  std::vector<GenerateResult> results_;
};

Model::Model(const std::string& model, const std::string& adapter, const std::vector<std::string>& other_adapters,
             const AttentionChoice& attention, EngineOptions options, const std::string& chat_template,
             Progress progress)
    : process_(getpid()),
      asked_context_(options.context),
      progress_(std::move(progress)),
      attention_choice_(attention),
      adapter_(adapter),
      chosen_adapter_(adapter) {
  OutsidePython outside;
  // The process is the user's: the line is printed, then whoever had the signal before (faulthandler, the system) goes
  // on.
  ReportCutFiles(AfterCutFile::kHandOn);
  std::unique_ptr<ModelSource> source = ModelSource::Open(ResolveModel(model));
  for (const std::string& other : other_adapters) source->SetAdapter(other);
  source->SetAdapter(adapter);
  Tokenizer tokenizer = LoadTokenizer(*source);
  const int32_t context = options.context > 0 ? options.context : source->config().context;
  options.attention = ResolveAttention(attention, source->config(), context);
  RefuseWithoutEffect(attention, {&options.attention, 1});
  if (!chat_template.empty()) {
    chat_template_ = ChatTemplate::ByName(chat_template);
  } else {
    try {
      chat_template_ = ChatTemplate::Recognise(source->chat_template());
    } catch (const Error&) {
      // Told to those who chat.
    }
  }
  engine_ = std::make_unique<Engine>(std::move(source), std::move(tokenizer), options);
  engine_->Load([&](double share) {
    return !outside.Interrupted([&] {
      if (progress_) progress_("loading", share);
    });
  });
  KeepState();
  outside.Return();
  if (progress_) progress_("loading", 1);
}

Model::~Model() {
  if (getpid() == process_) return;
  // A forked child has no threads that could be joined: what it inherited is left to its end.
  (void)scheduler_.release();
  (void)engine_.release();
}

MemoryNeeds Model::memory() const {
  const std::lock_guard lock(state_mutex_);
  return memory_;
}

LayerSettings Model::attention() const {
  const std::lock_guard lock(state_mutex_);
  return attention_;
}

void Model::KeepState() {
  const std::lock_guard lock(state_mutex_);
  memory_ = engine_->memory();
  attention_ = engine_->options().attention;
}

LayerSettings Model::Resolve(const AttentionChoice& choice) const {
  return ResolveAttention(choice, config(), asked_context_ > 0 ? asked_context_ : config().context);
}

void Model::SetAttention(const AttentionChoice& choice) {
  Turn turn(*this);
  UseAdapter(chosen_adapter_);
  const LayerSettings attention = Resolve(choice);
  RefuseWithoutEffect(choice, {&attention, 1});
  EmptyCache("set_attention");
  engine_->SetAttention(attention);
  attention_choice_ = choice;
  KeepState();
  turn.Return();
}

void Model::SetAdapter(const std::string& folder) {
  Turn turn(*this);
  UseAdapter(folder);
  chosen_adapter_ = folder;
  turn.Return();
}

void Model::UseAdapter(const std::string& folder) {
  if (folder == adapter_) return;
  EmptyCache("another adapter");
  engine_->SetAdapter(folder, [&](const ModelConfig&) { return Resolve(attention_choice_); });
  adapter_ = folder;
  KeepState();
}

Ids Model::Encode(std::string_view text, SpecialTokens special) const {
  OutsidePython outside;
  Ids ids = tokenizer().Encode(text, special);
  outside.Return();
  return ids;
}

std::string Model::Decode(std::span<const int32_t> ids, bool skip_special) const {
  OutsidePython outside;
  std::string text = tokenizer().Decode(ids, skip_special);
  outside.Return();
  return text;
}

const ChatTemplate& Model::RequireChatTemplate() const {
  if (!chat_template_) (void)ChatTemplate::Recognise(engine_->source().chat_template());  // throws
  return *chat_template_;
}

std::string Model::RenderChat(std::span<const ChatMessage> messages, bool add_generation_prompt) const {
  return RequireChatTemplate().Render(messages, add_generation_prompt, tokenizer());
}

Ids Model::EncodeChat(std::span<const ChatMessage> messages, bool add_generation_prompt) const {
  const ChatTemplate& chat = RequireChatTemplate();
  OutsidePython outside;
  Ids ids = chat.Encode(messages, add_generation_prompt, tokenizer());
  outside.Return();
  return ids;
}

GenerateOptions Model::Options(const GenerateChoice& choice) const {
  GenerateOptions options;
  options.max_tokens = choice.max_tokens;
  options.sampler = ResolveSampling(choice.sampling, config());
  options.stops = choice.stops;
  options.stop_tokens = choice.stop_tokens;
  options.ignore_eos = choice.ignore_eos;
  options.log_probabilities = choice.log_probabilities;
  options.grammar = choice.grammar;
  return options;
}

void Model::EmptyCache(const char* what) {
  {
    const std::lock_guard lock(state_mutex_);
    if (open_streams_ > 0) {
      throw std::runtime_error(
          fmt::format("{}: {} of this LLM is open; read it to its end, leave its loop or close() it first", what,
                      open_streams_ == 1 ? "a stream" : fmt::format("{} streams", open_streams_)));
    }
    abandoned_.clear();
  }
  ending_.clear();
  scheduler_.reset();
}

Scheduler& Model::SchedulerFor(int32_t max_batch) {
  const bool streaming = [&] {
    const std::lock_guard lock(state_mutex_);
    return open_streams_ > 0;
  }();
  // With a stream open the batch stays as large as it is.
  if (scheduler_ != nullptr && (max_batch == max_batch_ || streaming)) return *scheduler_;
  EmptyCache("generate");
  scheduler_ = std::make_unique<Scheduler>(*engine_, max_batch);
  max_batch_ = max_batch;
  return *scheduler_;
}

bool Model::Step() {
  {
    const std::lock_guard lock(state_mutex_);
    for (const int64_t request : abandoned_) {
      scheduler_->Cancel(request);
      ending_.push_back(request);
    }
    abandoned_.clear();
  }
  const bool more = scheduler_->Step();
  std::erase_if(ending_, [&](int64_t request) {
    try {
      return scheduler_->Take(request).has_value();
    } catch (const std::exception&) {
      return true;  // nobody is left to be told
    }
  });
  return more;
}

std::vector<GenerateResult> Model::Generate(const std::vector<Ids>& prompts, const std::vector<uint64_t>& seeds,
                                            const GenerateChoice& choice, int32_t n, int32_t max_batch) {
  Turn turn(*this);
  UseAdapter(choice.adapter.value_or(chosen_adapter_));
  Batch batch(*this, max_batch);
  for (size_t i = 0; i < prompts.size(); ++i) {
    GenerateChoice one = choice;
    if (!seeds.empty()) one.sampling.seed = seeds.at(i);
    try {
      // Each resolved for itself: without a seed each has another one.
      for (int32_t answer = 0; answer < n; ++answer) {
        batch.Add(prompts[i], Options(one));
        if (one.sampling.seed) ++*one.sampling.seed;
      }
    } catch (const Error& error) {
      if (prompts.size() == 1) throw;
      Throw(error.status(), "prompt {} of {}, counted from 0: {}", i, prompts.size(), error.message());
    }
  }
  const bool several = prompts.size() * static_cast<size_t>(n) > 1;
  while (!batch.Done() && !(several ? turn.Interrupted("generating", batch.Share()) : turn.Interrupted())) {
    const bool more = Step();
    batch.Collect();
    PHSA_CHECK(more || batch.Done());
  }
  turn.Return();
  return batch.TakeResults();
}

std::vector<Score> Model::LogLikelihoods(std::span<const ScoreRequest> requests) {
  Turn turn(*this);
  UseAdapter(chosen_adapter_);
  EmptyCache("loglikelihood");
  double share = 0;
  ScoreCallbacks callbacks;
  callbacks.progress = [&](size_t done, size_t total) {
    share = static_cast<double>(done) / static_cast<double>(total);
  };
  callbacks.stop = [&] { return turn.Interrupted("scoring", share); };
  std::optional<std::vector<Score>> scores = ScoreAll(*engine_, requests, callbacks);
  turn.Return();
  return std::move(*scores);
}

std::unique_ptr<float[]> Model::Logits(std::span<const int32_t> ids) {
  const auto vocab = static_cast<size_t>(config().vocab_size);
  if (ids.empty()) ThrowInvalid("logits: there are no tokens; give at least one");
  Turn turn(*this);
  UseAdapter(chosen_adapter_);
  EmptyCache("logits");
  engine_->CheckTokens(ids, "logits");
  const auto context = static_cast<size_t>(engine_->memory().context);
  if (ids.size() > context) ThrowInvalid("logits: there are {} tokens, and the context holds {}", ids.size(), context);
  const uint64_t bytes = ids.size() * vocab * sizeof(float), available = AvailableMemory();
  if (bytes > available) {
    Throw(PHSA_OUT_OF_MEMORY, "logits: {} tokens of {} values take {} bytes, and {} can be had; give fewer tokens",
          ids.size(), vocab, bytes, available);
  }
  std::unique_ptr<float[]> logits(new float[ids.size() * vocab]);
  Session session(*engine_);
  GenerateCallbacks callbacks;
  callbacks.stop = [&] { return turn.Interrupted(); };
  const auto keep = [&](int32_t, int32_t row, const LogitsRow& values) {
    std::ranges::copy(values.All(), logits.get() + static_cast<size_t>(row) * vocab);
  };
  (void)session.Prefill(ids, callbacks, keep, BatchItem::Logits::kAll);  // what stops it, Return() throws
  turn.Return();
  return logits;
}

Inspection Model::Inspect(std::span<const int32_t> ids, int32_t last, int32_t max_tokens) {
  Turn turn(*this);
  UseAdapter(chosen_adapter_);
  EmptyCache("inspect");
  for (const int32_t id : ids) (void)tokenizer().TokenBytes(id);  // shown by its text, so it must have one
  if (last < 1 || static_cast<size_t>(last) > std::max<size_t>(ids.size(), 1)) {
    ThrowInvalid("inspect: last is {}; the prompt has {} tokens", last, ids.size());
  }
  const LayerSettings& attention = engine_->options().attention;
  if (IsDense(attention, config().num_layers)) {
    ThrowInvalid("inspect: dense attention reads everything, so there is no choice to show; choose {} (set_attention)",
                 PolicyNames(IsSparse, " or "));
  }
  GenerateChoice greedy;
  greedy.sampling.temperature = 0;
  greedy.sampling.seed = 0;
  greedy.max_tokens = max_tokens;
  GenerateCallbacks callbacks;
  callbacks.stop = [&] { return turn.Interrupted(); };
  Inspection inspection = phsa::Inspect(*engine_, ids, last, Options(greedy), callbacks);
  turn.Return();
  return inspection;
}

Stream::Stream(Model& model, Ids prompt, const GenerateChoice& choice, int32_t max_batch) : model_(model) {
  Model::Turn turn(model_);
  model_.UseAdapter(choice.adapter.value_or(model_.chosen_adapter_));
  // The text is shared: a step that has begun may still bring some when the stream is gone.
  const auto keep = [text = text_](std::string_view piece) { *text += piece; };
  id_ = model_.SchedulerFor(max_batch).Add({std::move(prompt), model_.Options(choice), keep, {}});
  {
    const std::lock_guard lock(model_.state_mutex_);
    open_ = true;
    ++model_.open_streams_;
  }
  turn.Return();
}

Stream::~Stream() { Close(); }

bool Stream::IsOpen() const {
  const std::lock_guard lock(model_.state_mutex_);
  return open_;
}

void Stream::Close() {
  if (getpid() != model_.process_) return;
  const std::lock_guard lock(model_.state_mutex_);
  if (!open_) return;
  open_ = false;
  --model_.open_streams_;
  model_.abandoned_.push_back(id_);
}

void Stream::End() {
  const std::lock_guard lock(model_.state_mutex_);
  if (open_) --model_.open_streams_;
  open_ = false;
  std::erase(model_.abandoned_, id_);  // another thread may have closed it meanwhile
}

std::optional<std::string> Stream::Next() {
  Model::Turn turn(model_);
  for (bool more = true; text_->empty() && IsOpen() && !turn.Interrupted();) {
    // First taken, then stepped: the steps of another call may have finished it.
    try {
      result_ = model_.scheduler_->Take(id_);
    } catch (...) {
      End();
      throw;
    }
    if (result_) {
      End();
    } else {
      PHSA_CHECK(more);
      more = model_.Step();
    }
  }
  std::string text = std::exchange(*text_, {});
  turn.Return();
  if (text.empty()) return std::nullopt;
  return text;
}

}  // namespace phsa::python
