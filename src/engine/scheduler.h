// Several answers at once: requests join and leave between the steps of the decoder. Answers go on first; what is left
// of a step's rows is prefill, so that a long prompt holds nobody up. What a prompt shares with another text that
// is in the cache is not prefilled again. A request begins where the cache has room for its prompt and the next part of
// its answer; where the pages run out later, those that began last give theirs back, wait, are prefilled again and go
// on.
#ifndef PHSA_ENGINE_SCHEDULER_H_
#define PHSA_ENGINE_SCHEDULER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/session.h"

namespace phsa {

// The callbacks are called within Step, and must not call the scheduler.
struct Request {
  std::vector<int32_t> prompt;
  GenerateOptions options;
  std::function<void(std::string_view text)> text;  // as it comes, whole characters; may be empty
  std::function<bool()> stop;                       // asked before every step; may be empty
  // After each token, and at the end: what there is so far; may be empty.
  std::function<void(const GenerateResult& so_far)> progress;
  // How many of the prompt's tokens there are: when it begins, and after each step but the last; may be empty.
  std::function<void(int32_t done, int32_t total)> prefill = {};
  std::shared_ptr<const TextAttention> attention = nullptr;  // none: the engine's
  // Called once a step when the answer has ended by itself, with its text, until it says false: nothing is left to do
  // with it. Only then is the request finished. It may use the decoder, may not leave the text longer than it was, and
  // what it throws ends the request as failed. May be empty.
  std::function<bool(Sequence& text)> after = {};
  int32_t after_from = 0;  // tokens at the text's begin that it leaves as they are
  // What is wanted is GenerateResult::embedding, and no answer. All of the text is prefilled, and not kept for others.
  bool embed = false;
};

// How long a step may take while somebody waits for the next token of an answer; a long prompt is then prefilled in
// smaller pieces, and later. 0: as long as it takes, which prefills the most tokens in the end.
struct Pacing {
  double step_seconds = 0;
  std::function<double()> clock = {};  // seconds from whenever; none: the system's
};

// Where the KV caches of earlier texts are kept, for when no sequence has them.
class TextStore {
 public:
  virtual ~TextStore() = default;
  // Of how many of the text's tokens it has keys and values, with this attention.
  virtual size_t Find(const TextAttention* attention, std::span<const int32_t> text) = 0;
  // As many of them into an empty sequence, or none where that fails.
  virtual void Restore(Sequence& sequence, std::span<const int32_t> text) = 0;
};

// One thread at a time. The engine's cache is the scheduler's as long as it lives: nobody else may take pages of it, or
// change the engine's attention.
class Scheduler {
 public:
  // `max_running`: the most requests that are in work at the same time; the others wait, in order of arrival.
  // `store`: is asked for the beginning of each text that begins, and outlives the scheduler; may be null.
  Scheduler(Engine& engine, int32_t max_running, const Pacing& pacing = {}, TextStore* store = nullptr);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Returns the request's id. Refuses what Session::Generate refuses. What the engine's context holds fits into its
  // cache, so every other request has its turn, and the oldest one never loses its pages.
  int64_t Add(Request request);
  // Ends a request before the next step, as "interrupted". One that is finished stays as it is.
  void Cancel(int64_t id);
  // One step of the decoder. False: there is nothing to do. Where a step fails, the others go on without the request
  // that it fails for, and that one ends as failed. Where the device failed (PHSA_IO), it throws; then all requests are
  // as they were, or as after a whole step.
  bool Step();
  // The result of a finished request, once; none: it is not finished, or was taken. Where the request failed (its
  // callback threw, the model gave no numbers, there was no memory for it), that exception is thrown, and it counts
  // as taken. Seconds are the clock's, beside all others; those of the prompt begin where the waiting ends.
  std::optional<GenerateResult> Take(int64_t id);

  // Pages for `tokens` tokens that somebody else will take from the cache: from now on no request begins that would
  // leave fewer. HasReserve says whether they are free already, as they will be once enough of the running ones have
  // ended; when it has said so, no answer goes on that would leave fewer. 0: nobody needs any.
  void Reserve(int32_t tokens);
  bool HasReserve();
  // How many of a text's first tokens are there, read in this way: pages that who reads it need not reserve. Begin is a
  // text that begins with what is there now, for who has the reserve; Keep takes it back, for who comes later.
  int32_t Known(std::span<const int32_t> tokens, const TextAttention* attention) const;
  Sequence Begin(std::span<const int32_t> tokens, std::shared_ptr<const TextAttention> attention);
  void Keep(Sequence text);

  // The texts that the cache still has of finished requests, the oldest first.
  std::vector<const Sequence*> Kept() const;
  int32_t waiting() const;
  int32_t running() const;
  int64_t preemptions() const;  // how often a request has given its pages back

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Answers in the order of the requests. What Scheduler::Add refuses is refused before any work.
std::vector<GenerateResult> GenerateAll(Engine& engine, std::vector<Request> requests, int32_t max_running);

}  // namespace phsa

#endif  // PHSA_ENGINE_SCHEDULER_H_
