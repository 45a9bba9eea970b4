#include "server/model_pool.h"

#include <algorithm>
#include <utility>

#include "attention/policies.h"
#include "base/errors.h"
#include "server/answers.h"

namespace phsa::server {
namespace {

// Ways to read that are kept; each has a table of the vocabulary's size.
constexpr size_t kMaxAttentions = 32;
// How often it is seen who is idle, and, while somebody waits for room, whether there is some.
constexpr std::chrono::milliseconds kIdlePoll{500}, kRoomPoll{20};

std::string Id(const Json& description) { return description["id"].get<std::string>(); }

}  // namespace

LoadedModel::LoadedModel(std::unique_ptr<Engine> engine, std::vector<ServedModel> served, const WorkerOptions& options,
                         Metrics& metrics)
    : engine_(std::move(engine)),
      served_(std::move(served)),
      own_worker_(std::make_unique<Worker>(*engine_, options, metrics)),
      worker_(own_worker_.get()) {}

LoadedModel::LoadedModel(ServedModel served, Worker& worker) : worker_(&worker) {
  served_.push_back(std::move(served));
}

std::shared_ptr<const TextAttention> LoadedModel::AttentionFor(const LayerSettings& settings,
                                                               const ServedModel& served) {
  const LayerSettings& own = served.engine.options().attention;
  // Dense attention is one, whatever else its settings say.
  if (served.adapter == 0 && (settings == own || (IsDense(settings) && IsDense(own)))) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto known = std::find_if(attentions_.begin(), attentions_.end(), [&](const auto& attention) {
    return attention->adapter == served.adapter &&
           (attention->settings == settings || (IsDense(attention->settings) && IsDense(settings)));
  });
  if (known != attentions_.end()) {
    attentions_.splice(attentions_.begin(), attentions_, known);
    return attentions_.front();
  }
  try {
    attentions_.push_front(served.engine.MakeAttention(settings, served.adapter));
  } catch (const Error& error) {
    throw HttpError(400, error.what(), "phsa", "invalid_value");
  }
  if (attentions_.size() > kMaxAttentions) attentions_.pop_back();
  return attentions_.front();
}

ModelPool::ModelPool(std::vector<ModelSpec> specs, PoolOptions options) : options_(std::move(options)) {
  for (ModelSpec& spec : specs) {
    const size_t model = entries_.size();
    for (size_t i = 0; i < spec.descriptions.size(); ++i) {
      const std::string own = Id(spec.descriptions.front()), name = Id(spec.descriptions[i]);
      if (std::any_of(names_.begin(), names_.end(), [&](const Name& other) { return other.name == name; })) {
        ThrowInvalid("two models or adapters are called {}; {} and {} give them other names", Quoted(name),
                     Option{"alias"}, Option{"lora", "NAME=FOLDER"});
      }
      names_.push_back({name, {model, i}});
    }
    entries_.push_back({std::move(spec), nullptr, Clock::now()});
  }
  entries_.front().loaded = entries_.front().spec.load();
  entries_.front().used = Clock::now();
  if (entries_.size() > 1 || options_.keep_alive) thread_ = std::thread([this] { Run(); });
}

ModelPool::ModelPool(std::shared_ptr<LoadedModel> only) : options_() {
  Entry& entry = entries_.emplace_back();
  for (const ServedModel& served : only->served()) {
    names_.push_back({served.id, {0, names_.size()}});
    entry.spec.descriptions.push_back({{"id", served.id}, {"object", "model"}});
  }
  entry.loaded = std::move(only);
}

ModelPool::~ModelPool() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  FailAll();
}

ModelPool::Place ModelPool::Find(std::string_view name) const {
  if (name.empty() || names_.size() == 1) return names_.front().place;
  std::vector<std::string> all;
  for (const Name& one : names_) {
    if (one.name == name) return one.place;
    // An adapter by its model's name and its own.
    if (one.place.served > 0 && name == Id(entries_[one.place.model].spec.descriptions.front()) + ":" + one.name) {
      return one.place;
    }
    all.push_back(Quoted(one.name));
  }
  throw HttpError(404, fmt::format("there is no model {}; there are: {}", Quoted(name), fmt::join(all, ", ")), "model",
                  "model_not_found");
}

bool ModelPool::IsIdle(const Entry& entry) {
  // Whoever is answered holds it, so that nobody but the pool does.
  return entry.loaded != nullptr && entry.loaded.use_count() == 1 && entry.loaded->worker().Idle();
}

uint64_t ModelPool::Used() const {
  uint64_t used = 0;
  for (const Entry& entry : entries_) used += entry.loaded != nullptr ? entry.spec.memory : 0;
  return used;
}

std::shared_ptr<LoadedModel> ModelPool::TryGet(size_t model) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[model];
  if (entry.loaded == nullptr || wants_room_) return nullptr;
  entry.used = Clock::now();
  return entry.loaded;
}

void ModelPool::Wait(size_t model, Cancelled cancelled, std::function<void(std::shared_ptr<LoadedModel>)> use,
                     std::function<void(std::exception_ptr)> fail) {
  {
    const std::lock_guard lock(mutex_);
    if (ending_ || cancelled_) throw HttpError(503, StatusText(503));
    if (waiting_.size() >= options_.max_waiting) {
      throw HttpError(429, "the queue is full; try again a little later", "", "queue_full");
    }
    waiting_.push_back({model, std::move(cancelled), std::move(use), std::move(fail)});
  }
  wake_.notify_all();
}

void ModelPool::Drop(Entry& entry, const char* why, std::unique_lock<std::mutex>& lock) {
  std::shared_ptr<LoadedModel> gone = std::move(entry.loaded);
  entry.loaded = nullptr;
  lock.unlock();
  gone.reset();  // may take a while: its thread ends, its memory is given back
  if (entry.spec.metrics != nullptr) entry.spec.metrics->SetState({});
  if (options_.note) options_.note(fmt::format("{} was dropped: {}", Id(entry.spec.descriptions.front()), why));
  lock.lock();
}

void ModelPool::DropIdle(std::unique_lock<std::mutex>& lock) {
  for (Entry& entry : entries_) {
    if (entry.loaded == nullptr) continue;
    if (!IsIdle(entry)) {
      entry.used = Clock::now();
    } else if (options_.keep_alive && Clock::now() - entry.used >= *options_.keep_alive) {
      Drop(entry, "nobody asked for it", lock);
    }
  }
}

bool ModelPool::MakeRoom(size_t model, std::unique_lock<std::mutex>& lock) {
  while (Used() + entries_[model].spec.memory > options_.memory) {
    Entry* oldest = nullptr;
    for (Entry& entry : entries_) {
      if (IsIdle(entry) && (oldest == nullptr || entry.used < oldest->used)) oldest = &entry;
    }
    if (oldest == nullptr) return Used() == 0;  // alone it fits: that was seen at the start
    Drop(*oldest, "another model needs its room", lock);
  }
  return true;
}

void ModelPool::Serve(std::unique_lock<std::mutex>& lock) {
  const size_t model = waiting_.front().model;
  Entry& entry = entries_[model];
  if (entry.loaded == nullptr && !*waiting_.front().cancelled) {
    wants_room_ = true;
    const bool has_room = MakeRoom(model, lock);
    if (!has_room) wake_.wait_for(lock, kRoomPoll);
    if (!has_room || waiting_.empty()) return;  // they may all have been refused meanwhile
    wants_room_ = false;
  }
  const Waiting first = std::move(waiting_.front());
  waiting_.pop_front();
  if (*first.cancelled) return;
  std::shared_ptr<LoadedModel> loaded = entry.loaded;
  busy_ = true;
  lock.unlock();
  try {
    if (loaded == nullptr) {
      const auto begin = Clock::now();
      loaded = entry.spec.load();
      if (options_.note) {
        options_.note(fmt::format("{} was loaded in {:.1f} s", Id(entry.spec.descriptions.front()),
                                  std::chrono::duration<double>(Clock::now() - begin).count()));
      }
    }
    // Before it answers: who has the answer may ask whether it is there.
    lock.lock();
    entry.loaded = loaded;
    entry.used = Clock::now();
    lock.unlock();
    first.use(std::move(loaded));
  } catch (const std::exception& error) {
    first.fail(std::make_exception_ptr(HttpError(
        503, fmt::format("{} cannot be loaded: {}", Quoted(Id(entry.spec.descriptions.front())), error.what()), "model",
        "model_not_loaded")));
  }
  lock.lock();
  busy_ = false;
  entry.used = Clock::now();
}

void ModelPool::Run() {
  std::unique_lock lock(mutex_);
  while (!ending_ && !cancelled_) {
    wake_.wait_for(lock, kIdlePoll, [&] { return ending_ || cancelled_ || !waiting_.empty(); });
    if (ending_ || cancelled_) return;
    DropIdle(lock);
    if (!waiting_.empty() && !ending_ && !cancelled_) Serve(lock);
    if (waiting_.empty()) wants_room_ = false;
  }
}

void ModelPool::FailAll() {
  std::deque<Waiting> waiting;
  {
    const std::lock_guard lock(mutex_);
    waiting.swap(waiting_);
  }
  for (const Waiting& one : waiting) one.fail(std::make_exception_ptr(HttpError(503, StatusText(503))));
}

Json ModelPool::Descriptions() const {
  const std::lock_guard lock(mutex_);
  Json all = Json::array();
  for (const Entry& entry : entries_) {
    for (Json one : entry.spec.descriptions) {
      one["phsa"]["loaded"] = entry.loaded != nullptr;
      all.push_back(std::move(one));
    }
  }
  return all;
}

std::vector<std::shared_ptr<LoadedModel>> ModelPool::Loaded() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<LoadedModel>> all;
  for (const Entry& entry : entries_) {
    if (entry.loaded != nullptr) all.push_back(entry.loaded);
  }
  return all;
}

std::vector<Metrics*> ModelPool::AllMetrics() const {
  std::vector<Metrics*> all;
  for (const Entry& entry : entries_) {
    if (entry.spec.metrics != nullptr) all.push_back(entry.spec.metrics);
  }
  return all;
}

void ModelPool::CancelAll() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  wake_.notify_all();
  FailAll();
  for (const auto& model : Loaded()) model->worker().CancelAll();
}

bool ModelPool::Idle() const {
  {
    const std::lock_guard lock(mutex_);
    if (busy_ || !waiting_.empty()) return false;
  }
  const auto loaded = Loaded();
  return std::all_of(loaded.begin(), loaded.end(), [](const auto& model) { return model->worker().Idle(); });
}

}  // namespace phsa::server
