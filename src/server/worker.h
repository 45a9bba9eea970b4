// The one thread that uses the engine. It sees tokens: what is JSON, text of others or a socket stays with those who
// give it work.
#ifndef PHSA_SERVER_WORKER_H_
#define PHSA_SERVER_WORKER_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/scheduler.h"
#include "engine/text_cache.h"
#include "eval/inspect.h"
#include "eval/sources.h"
#include "server/metrics.h"

namespace phsa::server {

// What is new of an answer.
struct AnswerPart {
  std::string text;
  std::vector<int32_t> tokens;
  std::vector<TokenLogProbability> log_probabilities;
  std::vector<TokenLogProbability> prompt_log_probabilities;  // in the first part, where they were asked for
  TokensRead tokens_read;                                     // so far
};

// The texts of a prompt in which an answer's sources are sought.
struct SourceTask {
  std::vector<SourceText> texts;
  SourceOptions options;
};

// What was found in them.
struct AnswerSources {
  std::vector<Passage> passages;
  double seconds = 0;  // that it took, beside all others
  std::string error;   // why there are none; empty: nothing went wrong
};

// Who gave the work hears of it here, from the worker's thread. `index` is the task's.
class TaskListener {
 public:
  virtual ~TaskListener() = default;
  virtual void OnPart(size_t index, AnswerPart part) = 0;  // of tasks that stream
  // Of tasks that ask for it, and inspections: how much of the prompt there is.
  virtual void OnPrefill(size_t /*index*/, int32_t /*done*/, int32_t /*total*/) {}
  virtual void OnSources(size_t /*index*/, AnswerSources /*sources*/) {}  // of tasks that ask for them, before the end
  virtual void OnEnd(size_t index, GenerateResult result, const AnswerTimes& times) = 0;
  virtual void OnInspection(Inspection inspection) = 0;
  virtual void OnFailure(std::exception_ptr error) = 0;
};

struct Task {
  size_t index = 0;
  std::vector<int32_t> prompt;
  GenerateOptions options;
  std::shared_ptr<const TextAttention> attention;  // none: the engine's
  bool stream = false, tells_prefill = false;
  std::shared_ptr<const SourceTask> sources = nullptr;  // none: nobody asks for them
  bool embed = false;                                   // Request::embed
};

struct InspectTask {
  std::vector<int32_t> prompt;
  int32_t last = 1;  // tokens of the prompt that are shown
  GenerateOptions options;
  std::shared_ptr<const TextAttention> attention;
};

// Engines that share a machine step in turn: side by side each would wait for the other's cores at every product.
class StepTurns {
 public:
  class Turn {
   public:
    explicit Turn(StepTurns* turns);  // waits for it; null: there is nobody else
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    StepTurns* turns_;
  };

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  uint64_t next_ = 0, now_ = 0;
};

struct WorkerOptions {
  int32_t max_running = 64, max_waiting = 256;
  double step_seconds = 0.25;                  // that an answer may wait for its next token while prompts are prefilled
  std::shared_ptr<StepTurns> turns = nullptr;  // with other models; none: there are none
  // Where long texts are kept for later processes, when nobody waits for anything; none: nowhere.
  std::shared_ptr<const TextCache> texts = nullptr;
  Speculation speculation = Speculation::kNone;
};

class Worker {
 public:
  // `cancelled`: raised when nobody waits for the answers any more.
  using Cancelled = std::shared_ptr<const std::atomic<bool>>;

  Worker(Engine& engine, const WorkerOptions& options, Metrics& metrics);
  ~Worker();  // cancels what is left
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // False: the queue is full. Work that is more than the queue holds is taken if nothing waits.
  bool Submit(std::vector<Task> tasks, const std::shared_ptr<TaskListener>& listener, const Cancelled& cancelled);
  bool SubmitInspection(InspectTask task, std::shared_ptr<TaskListener> listener, Cancelled cancelled);
  void CancelAll();  // all end soon, as interrupted
  bool Idle() const;
  // What the device said when it failed, and nothing has worked since; empty: it works.
  std::string device_failure() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    Task task;
    std::shared_ptr<TaskListener> listener;
    Cancelled cancelled;
    Clock::time_point submitted;
  };
  struct PendingInspection {
    InspectTask task;
    std::shared_ptr<TaskListener> listener;
    Cancelled cancelled;
  };
  struct Active {
    std::shared_ptr<TaskListener> listener;
    size_t index = 0;
    std::shared_ptr<const TextAttention> attention;
    Clock::time_point submitted;
    double first_token = 0;  // seconds; 0: none yet
    int32_t tokens = 0;      // of the answer, so far
    std::optional<AnswerSources> sources = {};
  };

  class Store;
  std::unique_ptr<Scheduler> MakeScheduler();
  bool KeepText();  // one of those that only the cache has; false: there is none
  void Run();
  void TakeIncoming();
  void Begin(Pending pending);
  // What finds an answer's sources when it has ended, step by step.
  std::function<bool(Sequence&)> SourceFinding(Active* active, std::shared_ptr<const SourceTask> task,
                                               int32_t prompt_tokens);
  void Step();
  void Collect();
  void Fail(const std::exception_ptr& error);  // everything that is in work
  void SetDeviceFailure(std::string what);
  void RunInspection();
  void PublishState();
  bool Stopping(const Cancelled& cancelled) const { return cancel_all_.load() || cancelled->load(); }
  int64_t BlocksChosen(const GenerateResult& result, const TextAttention* attention) const;

  Engine& engine_;
  const WorkerOptions options_;
  Metrics& metrics_;
  std::unique_ptr<Store> store_;  // outlives the scheduler
  std::unique_ptr<Scheduler> scheduler_;
  bool keeps_texts_ = false;                           // there may be some to keep; only the worker's thread changes it
  int64_t earlier_preemptions_ = 0;                    // of schedulers before this one
  std::map<int64_t, std::unique_ptr<Active>> active_;  // by the scheduler's number

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Pending> incoming_;
  std::deque<PendingInspection> inspections_;
  size_t begun_ = 0;  // tasks that the scheduler has, waiting or running
  bool inspecting_ = false, ending_ = false;
  std::string device_failure_;  // only the worker's thread changes it
  std::atomic<bool> cancel_all_ = false;
  std::thread thread_;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_WORKER_H_
