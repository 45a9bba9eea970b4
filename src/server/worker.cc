#include "server/worker.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "attention/policies.h"
#include "base/errors.h"

namespace phsa::server {
namespace {

// Inspections hold the engine longer than any step; a second one may wait, a crowd may not.
constexpr size_t kMaxInspections = 4;
// What a step that looks for sources may look at, so that the others' next tokens need not wait long for it.
constexpr int64_t kSourcePairs = int64_t{1} << 17;

// Pages at the end of a text that others have too are copied before they are written to: at most two.
constexpr int64_t kCopiedTokens = 2 * kPageTokens;

double Seconds(std::chrono::steady_clock::time_point from) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
}

// How much of an answer was told.
struct Told {
  size_t text = 0, tokens = 0;
};

AnswerPart NewPart(const GenerateResult& result, Told& told) {
  AnswerPart part;
  const auto from = [&](const auto& list) { return list.begin() + static_cast<std::ptrdiff_t>(told.tokens); };
  part.text = result.text.substr(told.text);
  part.tokens.assign(from(result.tokens), result.tokens.end());
  if (!result.log_probabilities.empty()) {
    part.log_probabilities.assign(from(result.log_probabilities), result.log_probabilities.end());
  }
  if (told.tokens == 0) part.prompt_log_probabilities = result.prompt_log_probabilities;
  part.tokens_read = result.tokens_read;
  told = {result.text.size(), result.tokens.size()};
  return part;
}

}  // namespace

StepTurns::Turn::Turn(StepTurns* turns) : turns_(turns) {
  if (turns_ == nullptr) return;
  std::unique_lock lock(turns_->mutex_);
  turns_->wake_.wait(lock, [this, own = turns_->next_++] { return turns_->now_ == own; });
}

StepTurns::Turn::~Turn() {
  if (turns_ == nullptr) return;
  {
    const std::lock_guard lock(turns_->mutex_);
    ++turns_->now_;
  }
  turns_->wake_.notify_all();
}

class Worker::Store : public TextStore {
 public:
  Store(const Engine& engine, const TextCache& texts) : engine_(engine), texts_(texts) {}
  size_t Find(const TextAttention* attention, std::span<const int32_t> text) override {
    found_ = texts_.Find(engine_, attention, text);
    return found_ ? found_->tokens : 0;
  }
  void Restore(Sequence& sequence, std::span<const int32_t> text) override {
    texts_.Restore(engine_, sequence, text, *found_);
  }

 private:
  const Engine& engine_;
  const TextCache& texts_;
  std::optional<TextCache::Beginning> found_;
};

Worker::Worker(Engine& engine, const WorkerOptions& options, Metrics& metrics)
    : engine_(engine),
      options_(options),
      metrics_(metrics),
      store_(options.texts != nullptr ? std::make_unique<Store>(engine, *options_.texts) : nullptr),
      scheduler_(MakeScheduler()) {
  PublishState();
  thread_ = std::thread([this] { Run(); });
}

Worker::~Worker() {
  cancel_all_ = true;
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

std::unique_ptr<Scheduler> Worker::MakeScheduler() {
  return std::make_unique<Scheduler>(engine_, options_.max_running, Pacing{.step_seconds = options_.step_seconds},
                                     store_.get());
}

bool Worker::KeepText() {
  const std::vector<const Sequence*> kept = scheduler_->Kept();
  return std::any_of(kept.begin(), kept.end(),
                     [&](const Sequence* text) { return options_.texts->Keep(engine_, *text); });
}

bool Worker::Submit(std::vector<Task> tasks, const std::shared_ptr<TaskListener>& listener,
                    const Cancelled& cancelled) {
  const auto now = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    const size_t there = begun_ + incoming_.size();
    const auto running = static_cast<size_t>(options_.max_running), waiting = static_cast<size_t>(options_.max_waiting);
    if (there >= running && there + tasks.size() > running + waiting) return false;
    for (Task& task : tasks) incoming_.push_back({std::move(task), listener, cancelled, now});
  }
  wake_.notify_one();
  return true;
}

bool Worker::SubmitInspection(InspectTask task, std::shared_ptr<TaskListener> listener, Cancelled cancelled) {
  {
    const std::lock_guard lock(mutex_);
    if (inspections_.size() >= kMaxInspections) return false;
    inspections_.push_back({std::move(task), std::move(listener), std::move(cancelled)});
  }
  wake_.notify_one();
  return true;
}

void Worker::CancelAll() {
  cancel_all_ = true;
  wake_.notify_one();
}

bool Worker::Idle() const {
  const std::lock_guard lock(mutex_);
  return incoming_.empty() && inspections_.empty() && begun_ == 0 && !inspecting_;
}

std::string Worker::device_failure() const {
  const std::lock_guard lock(mutex_);
  return device_failure_;
}

void Worker::SetDeviceFailure(std::string what) {
  const std::lock_guard lock(mutex_);
  device_failure_ = std::move(what);
}

void Worker::Run() {
  for (;;) {
    bool inspect = false;
    {
      std::unique_lock lock(mutex_);
      const auto has_work = [&] { return !incoming_.empty() || !inspections_.empty() || begun_ > 0; };
      if (keeps_texts_ && !has_work()) {
        lock.unlock();
        keeps_texts_ = KeepText();
        continue;
      }
      wake_.wait(lock, [&] { return ending_ || has_work(); });
      if (ending_ && !has_work()) return;
      inspect = !inspections_.empty();
    }
    TakeIncoming();
    if (inspect) RunInspection();
    Step();
  }
}

void Worker::TakeIncoming() {
  std::vector<Pending> incoming;
  {
    const std::lock_guard lock(mutex_);
    incoming.swap(incoming_);
    begun_ += incoming.size();
  }
  for (Pending& pending : incoming) Begin(std::move(pending));
}

void Worker::Begin(Pending pending) {
  auto active = std::make_unique<Active>();
  active->listener = pending.listener;
  active->index = pending.task.index;
  active->attention = pending.task.attention;
  active->submitted = pending.submitted;
  Request request;
  request.prompt = std::move(pending.task.prompt);
  request.options = std::move(pending.task.options);
  request.embed = pending.task.embed;
  request.options.speculation = options_.speculation;
  request.attention = std::move(pending.task.attention);
  request.stop = [this, cancelled = std::move(pending.cancelled)] { return Stopping(cancelled); };
  request.progress = [active = active.get(), stream = pending.task.stream,
                      told = Told{}](const GenerateResult& so_far) mutable {
    active->tokens = static_cast<int32_t>(so_far.tokens.size());
    if (active->first_token == 0) active->first_token = Seconds(active->submitted);
    if (!stream) return;
    AnswerPart part = NewPart(so_far, told);
    if (!part.text.empty() || !part.tokens.empty()) active->listener->OnPart(active->index, std::move(part));
  };
  if (pending.task.tells_prefill) {
    request.prefill = [active = active.get()](int32_t done, int32_t total) {
      active->listener->OnPrefill(active->index, done, total);
    };
  }
  if (pending.task.sources != nullptr) {
    const auto prompt_tokens = static_cast<int32_t>(request.prompt.size());
    request.after_from = SourceSearch::FirstRead(pending.task.sources->texts, prompt_tokens);
    request.after = SourceFinding(active.get(), std::move(pending.task.sources), prompt_tokens);
  }
  try {
    active_.emplace(scheduler_->Add(std::move(request)), std::move(active));
  } catch (...) {
    metrics_.CountFailure();
    active->listener->OnFailure(std::current_exception());
    const std::lock_guard lock(mutex_);
    --begun_;
  }
}

std::function<bool(Sequence&)> Worker::SourceFinding(Active* active, std::shared_ptr<const SourceTask> task,
                                                     int32_t prompt_tokens) {
  return [this, active, task = std::move(task), prompt_tokens, begin = Clock::time_point(),
          search = std::shared_ptr<SourceSearch>()](Sequence& text) mutable {
    AnswerSources found;
    try {
      if (search == nullptr) {
        begin = Clock::now();
        SourceOptions options = task->options;
        options.step_pairs = kSourcePairs;
        search =
            std::make_shared<SourceSearch>(engine_, text.length(), prompt_tokens, active->tokens, task->texts, options);
      }
      if (search->Step(text)) return true;
      found.passages = search->Passages();
    } catch (const Error& error) {
      if (error.status() == PHSA_IO) throw;
      found.error = error.what();  // the answer is there all the same
    }
    found.seconds = Seconds(begin);
    active->sources = std::move(found);
    return false;
  };
}

void Worker::Step() {
  try {
    const bool worked = [&] {
      const StepTurns::Turn turn(options_.turns.get());
      return scheduler_->Step();
    }();
    if (worked && !device_failure_.empty()) SetDeviceFailure("");
    Collect();
  } catch (const Error& error) {
    if (error.status() == PHSA_IO) SetDeviceFailure(error.what());  // a step has nothing else to do with the system
    Fail(std::current_exception());
  } catch (...) {
    // What one request is to blame for ends that one; this is no memory to schedule, or a bug, and would come again.
    Fail(std::current_exception());
  }
  PublishState();
}

void Worker::Collect() {
  size_t ended = 0;
  for (auto it = active_.begin(); it != active_.end();) {
    const Active& active = *it->second;
    try {
      std::optional<GenerateResult> result = scheduler_->Take(it->first);
      if (!result) {
        ++it;
        continue;
      }
      AnswerTimes times;
      times.first_token = active.first_token;
      times.end = Seconds(active.submitted);
      times.queued = std::max(0.0, times.first_token - result->prefill_seconds);
      metrics_.CountAnswer(*result, times, BlocksChosen(*result, active.attention.get()));
      if (active.sources) active.listener->OnSources(active.index, *active.sources);
      active.listener->OnEnd(active.index, std::move(*result), times);
    } catch (...) {
      metrics_.CountFailure();
      active.listener->OnFailure(std::current_exception());
    }
    it = active_.erase(it);
    ++ended;
  }
  if (ended == 0) return;
  keeps_texts_ = options_.texts != nullptr;
  const std::lock_guard lock(mutex_);
  begun_ -= ended;
}

void Worker::Fail(const std::exception_ptr& error) {
  earlier_preemptions_ += scheduler_->preemptions();
  scheduler_ = MakeScheduler();
  for (const auto& [id, active] : active_) {
    metrics_.CountFailure();
    active->listener->OnFailure(error);
  }
  active_.clear();
  const std::lock_guard lock(mutex_);
  begun_ = 0;
}

void Worker::RunInspection() {
  const auto front = [&]() -> PendingInspection& {
    const std::lock_guard lock(mutex_);
    return inspections_.front();  // only this thread takes it away
  };
  const InspectTask& task = front().task;
  const auto tokens =
      std::min<int64_t>(static_cast<int64_t>(task.prompt.size()) + task.options.max_tokens, engine_.memory().context);
  // An answer that was just written is still there, and so are its prompt's keys.
  const std::span<const int32_t> before =
      std::span(task.prompt).first(task.prompt.size() - static_cast<size_t>(task.last));
  const int32_t known = scheduler_->Known(before, task.attention.get());
  // What is there ends within a page, and its end may be written to: copies of those.
  const int64_t copied = known > 0 ? kCopiedTokens : 0;
  scheduler_->Reserve(static_cast<int32_t>(std::min<int64_t>(tokens - known + copied, engine_.memory().context)));
  const bool stopping = Stopping(front().cancelled);
  if (!stopping && !scheduler_->HasReserve()) return;  // after another step, perhaps
  Sequence text = scheduler_->Begin(before, task.attention);
  if (!stopping && text.length() < known) return;  // room was made where it stood
  PendingInspection inspection;
  {
    const std::lock_guard lock(mutex_);
    inspection = std::move(inspections_.front());
    inspections_.pop_front();
    inspecting_ = true;
  }
  try {
    GenerateCallbacks callbacks;
    callbacks.stop = [&] {
      // The others go on between its steps, and are nobody's to watch.
      AttentionObserver observer = engine_.decoder().Observe({});
      TakeIncoming();
      Step();
      engine_.decoder().Observe(std::move(observer));
      return stopping || Stopping(inspection.cancelled);
    };
    callbacks.prefill = [&](int32_t done, int32_t total) { inspection.listener->OnPrefill(0, done, total); };
    inspection.listener->OnInspection(Inspect(engine_, inspection.task.prompt, inspection.task.last,
                                              inspection.task.options, callbacks, inspection.task.attention, &text));
    scheduler_->Keep(std::move(text));
  } catch (...) {
    inspection.listener->OnFailure(std::current_exception());
  }
  scheduler_->Reserve(0);
  const std::lock_guard lock(mutex_);
  inspecting_ = false;
}

void Worker::PublishState() {
  const KvCache& cache = engine_.cache();
  EngineState state;
  state.running = scheduler_->running();
  state.waiting = scheduler_->waiting();
  state.preemptions = earlier_preemptions_ + scheduler_->preemptions();
  state.pages = cache.num_pages();
  state.used_pages = cache.num_pages() - cache.free_pages();
  const auto used = static_cast<uint64_t>(state.used_pages);
  state.cache_bytes = used * cache.layout().page_bytes;
  state.representative_bytes = used * cache.layout().representative_bytes;
  metrics_.SetState(state);
}

int64_t Worker::BlocksChosen(const GenerateResult& result, const TextAttention* attention) const {
  const LayerSettings& settings = attention != nullptr ? attention->settings : engine_.options().attention;
  // The answer's last token is not a query: nothing comes after it.
  const auto end = result.prompt_tokens + std::max<int32_t>(0, static_cast<int32_t>(result.tokens.size()) - 1);
  std::map<const Settings*, int64_t> known;  // by the settings' place: layers share them
  int64_t sum = 0;
  for (int32_t layer = 0; layer < engine_.config().num_layers; ++layer) {
    const Settings& own = settings.ForLayer(layer);
    const auto [found, is_new] = known.try_emplace(&own, 0);
    if (is_new && Chooses(own.policy)) {
      const BlockRules rules = RulesOf(own);
      const int64_t heads =
          own.group_reduce == GroupReduce::kNone ? engine_.config().num_q_heads : engine_.config().num_kv_heads;
      for (int32_t position = result.reused_tokens; position < end; ++position) {
        if (!rules.ReadsAll(position / own.block_size)) found->second += own.top_k * heads;
      }
    }
    sum += found->second;
  }
  return sum;
}

}  // namespace phsa::server
