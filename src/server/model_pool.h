// The models of a server: which there are, by name; which of them are in memory, loaded when they are first asked for
// and dropped when nobody has asked for a while, or when another one needs their room.
#ifndef PHSA_SERVER_MODEL_POOL_H_
#define PHSA_SERVER_MODEL_POOL_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "io/json.h"
#include "server/api.h"
#include "server/metrics.h"
#include "server/worker.h"

namespace phsa::server {

// A model in memory, and what answers with it. Who holds it keeps it there.
class LoadedModel {
 public:
  // `served`: the model, then one for each of its adapters; they refer to the engine.
  LoadedModel(std::unique_ptr<Engine> engine, std::vector<ServedModel> served, const WorkerOptions& options,
              Metrics& metrics);
  // The caller's, which outlives it.
  LoadedModel(ServedModel served, Worker& worker);

  const std::vector<ServedModel>& served() const { return served_; }
  Worker& worker() const { return *worker_; }
  // The attention of a text that is for this one of them; none: the engine's own. Texts share pages only where it is
  // one and the same object. Any thread may call it. Throws HttpError.
  std::shared_ptr<const TextAttention> AttentionFor(const LayerSettings& settings, const ServedModel& served);

 private:
  std::unique_ptr<Engine> engine_;
  std::vector<ServedModel> served_;
  std::unique_ptr<Worker> own_worker_;  // ends before the engine
  Worker* worker_;
  std::mutex mutex_;
  std::list<std::shared_ptr<const TextAttention>> attentions_;  // that requests asked for lately, the latest first
};

// A model that can be had.
struct ModelSpec {
  std::vector<Json> descriptions = {};  // of the model, then of its adapters; each has its `id`
  uint64_t memory = 0;                  // bytes that it takes while it is loaded
  Metrics* metrics = nullptr;
  std::function<std::shared_ptr<LoadedModel>()> load = {};  // takes seconds, throws what goes wrong
};

struct PoolOptions {
  uint64_t memory = 0;                                  // bytes for all that are loaded at once
  std::optional<std::chrono::milliseconds> keep_alive;  // without a request; none: until another one needs the room
  size_t max_waiting = 256;                             // requests
  std::function<void(const std::string& text)> note;    // takes a line for the log; may be empty
};

class ModelPool {
 public:
  using Cancelled = std::shared_ptr<const std::atomic<bool>>;
  // The first one is loaded when this returns. Throws what its loading throws.
  ModelPool(std::vector<ModelSpec> specs, PoolOptions options);
  explicit ModelPool(std::shared_ptr<LoadedModel> only);  // which stays for ever
  ~ModelPool();
  ModelPool(const ModelPool&) = delete;
  ModelPool& operator=(const ModelPool&) = delete;

  // Which of a model's names: its own is the first, then those of its adapters.
  struct Place {
    size_t model = 0, served = 0;
  };
  // Where there is but one name, every name is that one's; an empty name is the first's. Throws HttpError with status
  // 404 and the names that there are.
  Place Find(std::string_view name) const;
  bool has_choice() const { return names_.size() > 1; }

  // The model if it is there, and may be used at once; else null: Wait.
  std::shared_ptr<LoadedModel> TryGet(size_t model);
  // Calls `use` from the pool's thread when it is there, or `fail`, in the order in which they came. A model that
  // somebody waits for gets its room: no others are begun before it. Throws HttpError where too many wait.
  void Wait(size_t model, Cancelled cancelled, std::function<void(std::shared_ptr<LoadedModel>)> use,
            std::function<void(std::exception_ptr)> fail);

  Json Descriptions() const;  // all names', with whether they are in memory
  std::vector<std::shared_ptr<LoadedModel>> Loaded() const;
  std::vector<Metrics*> AllMetrics() const;
  void CancelAll();
  bool Idle() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    ModelSpec spec;
    std::shared_ptr<LoadedModel> loaded;
    Clock::time_point used;
  };
  struct Waiting {
    size_t model;
    Cancelled cancelled;
    std::function<void(std::shared_ptr<LoadedModel>)> use;
    std::function<void(std::exception_ptr)> fail;
  };
  void Run();
  void Serve(std::unique_lock<std::mutex>& lock);  // the first that waits
  void DropIdle(std::unique_lock<std::mutex>& lock);
  bool MakeRoom(size_t model, std::unique_lock<std::mutex>& lock);
  void Drop(Entry& entry, const char* why, std::unique_lock<std::mutex>& lock);
  static bool IsIdle(const Entry& entry);
  uint64_t Used() const;
  void FailAll();

  const PoolOptions options_;
  struct Name {
    std::string name;
    Place place;
  };
  std::vector<Name> names_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Entry> entries_;
  std::deque<Waiting> waiting_;
  bool wants_room_ = false;  // the first that waits does
  bool busy_ = false, ending_ = false, cancelled_ = false;
  std::thread thread_;
};

}  // namespace phsa::server

#endif  // PHSA_SERVER_MODEL_POOL_H_
