#include "engine/scheduler.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <exception>
#include <map>
#include <numeric>
#include <utility>

#include "base/errors.h"
#include "engine/prefill_pace.h"
#include "engine/speculation.h"

namespace phsa {
namespace {

// Finished texts that are kept for requests with the same beginning, as long as nobody needs their pages.
constexpr size_t kKeptTexts = 32;
// Tokens that an answer can go on by when another request begins. What it writes beyond them may take the pages of one
// that began later.
constexpr int32_t kAnswerRoom = kPageTokens;

double SystemClock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Job {
  Job(Engine& engine, int64_t job_id, Request&& job_request)
      : id(job_id),
        request(std::move(job_request)),
        answer(engine, request.options, request.text),
        sequence(engine.cache(), request.attention),
        hidden_sum(request.embed ? static_cast<size_t>(engine.config().hidden) : 0) {
    if (request.options.speculation == Speculation::kNgram) drafts.emplace(request.prompt);
  }

  // What is to be read before the answer begins or, after a preemption, goes on.
  std::span<const int32_t> prompt() const { return again.empty() ? request.prompt : again; }
  // Whether its text may begin with pages of a text that is read in this way.
  bool reads_like(const Sequence& other) const { return sequence.attention() == other.attention(); }
  bool in_prefill() const { return static_cast<size_t>(sequence.length()) < prompt().size(); }
  bool answers() const { return !answer.result().tokens.empty(); }
  // Of the prompt, in a step. What was read before a preemption and what was not are in two steps: only one is counted.
  size_t left() const {
    const auto length = static_cast<size_t>(sequence.length());
    return (length < read_before ? read_before : prompt().size()) - length;
  }

  int64_t id;
  Request request;
  Answer answer;
  Sequence sequence;
  int32_t longest = 0;  // tokens that it may come to read
  bool cancelled = false, finished = false;
  // It waits until another one has read what their prompts share. 0: it does not wait.
  int64_t leader = 0;
  size_t shared_with_leader = 0;
  bool looked_up = false;  // in the store
  size_t chosen_at = 0;    // tokens that were read when the next one was chosen, the last time
  // Since the last preemption: what it had read of prompt and answer, if that was more than the prompt; and how many
  // tokens it had read.
  std::vector<int32_t> again;
  size_t read_before = 0;
  double admitted_at = 0, first_token_at = 0;
  std::vector<double> hidden_sum;  // [hidden], of the tokens that were read; empty: nobody asks
  std::exception_ptr error;
  std::optional<Drafts> drafts;
};

// The mean as a direction: the number of tokens cancels out.
std::vector<float> DirectionOf(const std::vector<double>& sum) {
  const double length = std::sqrt(std::inner_product(sum.begin(), sum.end(), sum.begin(), 0.0));
  std::vector<float> out(sum.size());
  if (!std::isfinite(length) || length == 0) Throw(PHSA_INTERNAL, "the model gave hidden states that are no numbers");
  std::transform(sum.begin(), sum.end(), out.begin(), [&](double value) { return static_cast<float>(value / length); });
  return out;
}

// A request and how many of its tokens a step reads.
struct Share {
  Job* job;
  size_t tokens;
};

}  // namespace

class Scheduler::Impl {
 public:
  Impl(Engine& engine, int32_t max_running, const Pacing& pacing, TextStore* store)
      : engine_(engine),
        max_running_(static_cast<size_t>(max_running)),
        clock_(pacing.clock ? pacing.clock : SystemClock),
        pace_(pacing.step_seconds),
        store_(store) {
    if (max_running < 1) ThrowInvalid("{} requests are to run at once; allowed: 1 and up", max_running);
  }

  int64_t Add(Request&& request) {
    CheckPrompt(engine_, request.prompt);
    if (request.embed) request.options.max_tokens = 0;
    auto job = std::make_unique<Job>(engine_, next_id_, std::move(request));
    // The answer's last token is not read.
    const int64_t answer = std::max(0, job->request.options.max_tokens - 1);
    const auto prompt = static_cast<int64_t>(job->request.prompt.size());
    job->longest = static_cast<int32_t>(std::min<int64_t>(prompt + answer, engine_.memory().context));
    job->answer.result().prompt_tokens = static_cast<int32_t>(prompt);
    waiting_.push_back(std::move(job));
    return next_id_++;
  }

  void Cancel(int64_t id) {
    for (const auto& job : waiting_) job->cancelled = job->cancelled || job->id == id;
    for (const auto& job : running_) job->cancelled = job->cancelled || job->id == id;
    for (const auto& job : ended_) job->cancelled = job->cancelled || job->id == id;
  }

  bool Step() {
    for (const auto& job : waiting_) EndIfStopped(*job);
    for (const auto& job : running_) EndIfStopped(*job);
    RemoveFinished();
    const bool closes = CloseEnded();
    Admit();
    if (running_.empty()) return closes;
    for (const auto& job : running_) {
      if (job->leader == 0 || LeaderReads(*job)) continue;
      job->leader = 0;
      StartWithSharedText(*job);
    }
    std::vector<Share> shares = ChooseRows();
    while (!MakeRoomFor(shares)) {
      if (running_.size() == 1) {
        // What has ended, or somebody for whom pages are reserved, will give some back.
        if (ended_.empty() && !granted_) Guarded(*running_.front(), [&] { ThrowFull(*running_.front()); });
        RemoveFinished();
        return true;
      }
      Preempt();
      shares = ChooseRows();
    }
    Read(std::move(shares));
    RemoveFinished();
    return true;
  }

  std::optional<GenerateResult> Take(int64_t id) {
    const auto found = finished_.find(id);
    if (found == finished_.end()) return std::nullopt;
    const std::unique_ptr<Job> job = std::move(found->second);
    finished_.erase(found);
    if (job->error) std::rethrow_exception(job->error);
    return std::move(job->answer.result());
  }

  void Reserve(int32_t tokens) {
    reserved_ = PagesFor(static_cast<size_t>(tokens));
    granted_ = false;
    begun_.clear();
  }

  bool HasReserve() {
    while (Free() < PagesToCome(nullptr) && !kept_.empty()) ShrinkKept();
    granted_ = Free() >= PagesToCome(nullptr);
    return granted_;
  }

  int32_t Known(std::span<const int32_t> tokens, const TextAttention* attention) const {
    return static_cast<int32_t>(FindSharedText(tokens, attention).tokens);
  }

  Sequence Begin(std::span<const int32_t> tokens, std::shared_ptr<const TextAttention> attention) {
    const SharedText shared = FindSharedText(tokens, attention.get());
    if (shared.sequence == nullptr) return Sequence(engine_.cache(), std::move(attention));
    Sequence text = shared.sequence->Fork();
    text.Truncate(static_cast<int32_t>(shared.tokens));
    begun_ = text.pages();
    return text;
  }

  void Keep(Sequence sequence) {
    if (static_cast<size_t>(sequence.length()) < kWorthSharing) return;
    const auto begins = [](const Sequence& a, const Sequence& b) {
      return a.attention() == b.attention() && CommonPrefix(a.tokens(), b.tokens()) == a.tokens().size();
    };
    const auto longer =
        std::find_if(kept_.begin(), kept_.end(), [&](const auto& kept) { return begins(sequence, kept); });
    if (longer != kept_.end()) {
      std::rotate(longer, longer + 1, kept_.end());  // it has been of use: now it is the youngest
      return;
    }
    std::erase_if(kept_, [&](const Sequence& kept) { return begins(kept, sequence); });
    kept_.push_back(std::move(sequence));
    if (kept_.size() > kKeptTexts) kept_.pop_front();
  }

  std::vector<const Sequence*> Kept() const {
    std::vector<const Sequence*> all;
    for (const Sequence& kept : kept_) all.push_back(&kept);
    return all;
  }

  size_t waiting() const { return waiting_.size(); }
  size_t running() const { return running_.size(); }
  int64_t preemptions() const { return preemptions_; }

 private:
  void Finish(Job& job) {
    job.finished = true;
    if (job.first_token_at > 0) job.answer.result().decode_seconds = clock_() - job.first_token_at;
    if (!job.error && job.request.progress) job.request.progress(job.answer.result());
  }

  // Runs what belongs to one request, so that what goes wrong ends that request and no other.
  template <class Fn>
  void Guarded(Job& job, const Fn& fn) {
    try {
      fn();
    } catch (...) {
      job.error = std::current_exception();
      Finish(job);
    }
  }

  void TellPrefill(Job& job) {
    if (!job.request.prefill || job.answers()) return;
    Guarded(job, [&] { job.request.prefill(job.sequence.length(), static_cast<int32_t>(job.prompt().size())); });
  }

  void EndIfStopped(Job& job) {
    Guarded(job, [&] {
      if (!job.cancelled && !(job.request.stop && job.request.stop())) return;
      job.answer.Interrupt();
      Finish(job);
    });
  }

  // One more step of what is done with the text of the answer that ended first. False: there was nothing to do.
  bool CloseEnded() {
    if (ended_.empty()) return false;
    Job& job = *ended_.front();
    const bool stopped = job.cancelled || (job.request.stop && job.request.stop());
    if (!stopped) {
      // It may write into pages that others share by now. It goes before those that run, as nothing else holds it up.
      const auto has_room = [&] { return ToCome(job) + Held() <= Free(); };
      while (!has_room() && !kept_.empty()) ShrinkKept();
      while (!has_room() && !running_.empty()) {
        Preempt();
        while (!has_room() && !kept_.empty()) ShrinkKept();
      }
      if (!has_room() && Held() > 0) return true;
    }
    bool more = false;
    try {
      more = !stopped && job.request.after(job.sequence);
    } catch (const Error& error) {
      if (error.status() == PHSA_IO) throw;
      job.error = std::current_exception();
    } catch (...) {
      job.error = std::current_exception();
    }
    if (more) return true;
    Keep(std::move(job.sequence));
    finished_[job.id] = std::move(ended_.front());
    ended_.pop_front();
    return true;
  }

  void RemoveFinished() {
    const auto take_finished = [&](auto& jobs) {
      for (auto& job : jobs) {
        if (!job->finished) continue;
        const bool closes =
            job->request.after && !job->error && job->answer.result().reason != StopReason::kInterrupted;
        if (closes) {
          job->longest = job->sequence.length();  // it will not be more
          ended_.push_back(std::move(job));
          continue;
        }
        if (job->request.embed) {
          job->sequence.Truncate(0);
        } else {
          Keep(std::move(job->sequence));
        }
        finished_[job->id] = std::move(job);
      }
      std::erase(jobs, nullptr);
    };
    take_finished(waiting_);
    take_finished(running_);
  }

  size_t Free() const { return static_cast<size_t>(engine_.cache().free_pages()); }

  // Pages that this one takes soon: for the rest of its prompt and for some of its answer, or for what is done with its
  // text. Not for all that its answer may come to: few do, and what did not fit then waits its turn again.
  size_t ToCome(const Job& job) const {
    const Sequence& text = job.sequence;
    if (job.finished) {
      // Pages that others share are copied where they are written into.
      const auto from = static_cast<size_t>(std::max(0, job.request.after_from - text.layout().overhang)) / kPageTokens;
      size_t pages = PagesFor(static_cast<size_t>(job.longest)) - text.pages().size();
      for (size_t i = from; i < text.pages().size(); ++i) pages += engine_.cache().IsShared(text.pages()[i]) ? 1 : 0;
      return pages;
    }
    const auto read = std::max<int32_t>(text.length(), static_cast<int32_t>(job.prompt().size()));
    return text.PagesToAppend(std::min(job.longest, read + std::min(kAnswerRoom, job.longest - read)) - text.length());
  }

  // Pages that the running requests and this one (null: none) take soon, and those that are reserved.
  size_t PagesToCome(const Job* extra) const {
    size_t pages = granted_ ? Held() : reserved_;
    bool counted = extra == nullptr;
    for (const auto& job : running_) {
      pages += ToCome(*job);
      counted = counted || job.get() == extra;
    }
    for (const auto& job : ended_) {
      pages += ToCome(*job);
      counted = counted || job.get() == extra;
    }
    return pages + (counted ? 0 : ToCome(*extra));
  }

  // Pages that requests (this one, too) have, and those that only kept texts have.
  struct OwnPages {
    size_t of_requests = 0, of_kept = 0;
  };
  OwnPages CountPages(const Job* extra) const {
    std::vector<bool> seen(static_cast<size_t>(engine_.cache().num_pages()));
    const auto count_pages = [&](const std::vector<int32_t>& pages) {
      size_t count = 0;
      for (const int32_t page : pages) {
        if (!seen[static_cast<size_t>(page)]) ++count;
        seen[static_cast<size_t>(page)] = true;
      }
      return count;
    };
    const auto count_new = [&](const Sequence& sequence) { return count_pages(sequence.pages()); };
    OwnPages count;
    count.of_requests += count_pages(begun_);  // in use, and none of the reserve
    for (const auto& job : running_) count.of_requests += count_new(job->sequence);
    for (const auto& job : ended_) count.of_requests += count_new(job->sequence);
    if (extra != nullptr) count.of_requests += count_new(extra->sequence);
    for (const Sequence& kept : kept_) count.of_kept += count_new(kept);
    return count;
  }

  // Pages that nobody may take: those that were reserved and promised, and that who asked for them has not taken yet.
  size_t Held() const {
    if (!granted_) return 0;
    const OwnPages own = CountPages(nullptr);
    const size_t taken = static_cast<size_t>(engine_.cache().num_pages()) - Free() - own.of_requests - own.of_kept;
    return reserved_ - std::min(reserved_, taken);
  }

  // The oldest kept text gives back its last page: what is left of it may still be of use.
  void ShrinkKept() {
    Sequence& oldest = kept_.front();
    const auto full = static_cast<int32_t>(oldest.pages().size() - 1) * kPageTokens;
    oldest.Truncate(full);
    if (full == 0) kept_.pop_front();
  }

  // Whether all that this request and the running ones take soon is free, if need be after dropping kept texts.
  bool MakeRoom(const Job& job) {
    if (PagesToCome(&job) > Free() + CountPages(&job).of_kept) return false;
    while (PagesToCome(&job) > Free() && !kept_.empty()) ShrinkKept();
    return true;
  }

  // Whether what these read now is free, likewise.
  bool MakeRoomFor(std::span<const Share> shares) {
    const auto has_room = [&] {
      size_t pages = Held();
      for (const auto& [job, tokens] : shares) pages += job->sequence.PagesToAppend(static_cast<int32_t>(tokens));
      return pages <= Free();
    };
    while (!has_room() && !kept_.empty()) ShrinkKept();
    return has_room();
  }

  // The request that began last gives its pages back, and waits as the first of those that wait. What it read it reads
  // again then, as far as its pages were taken. Requests run and wait in the order in which they came, so the oldest
  // one always goes on.
  void Preempt() {
    Job& job = *running_.back();
    const auto read = static_cast<size_t>(job.sequence.length());
    if (read > job.prompt().size()) job.again = job.sequence.tokens();
    job.read_before = std::max(job.read_before, read);
    job.leader = 0;
    std::fill(job.hidden_sum.begin(), job.hidden_sum.end(), 0);
    Sequence text(engine_.cache(), job.request.attention);
    std::swap(text, job.sequence);
    Keep(std::move(text));
    waiting_.push_front(std::move(running_.back()));
    running_.pop_back();
    ++preemptions_;
  }

  [[noreturn]] void ThrowFull(const Job& job) const {
    ThrowInvalid("the request may come to {} tokens, and the KV cache has room for {}; something else uses it",
                 job.longest, engine_.cache().free_tokens());
  }

  // What a prompt can take from others: all but its last token, whose logits are needed.
  // Nothing where the logits, or the hidden states, of all of them are.
  static std::span<const int32_t> Shareable(const Job& job) {
    if (job.request.options.prompt_log_probabilities || job.request.embed) return {};
    return job.prompt().first(job.prompt().size() - 1);
  }

  struct SharedText {
    const Sequence* sequence = nullptr;
    size_t tokens = 0;
  };
  // The text that has the most of a prompt's beginning, where that is worth it.
  SharedText FindSharedText(const Job& job) const { return FindSharedText(Shareable(job), job.sequence.attention()); }
  SharedText FindSharedText(std::span<const int32_t> prompt, const TextAttention* attention) const {
    SharedText best;
    const auto consider = [&](const Sequence& sequence) {
      if (sequence.attention() != attention) return;
      const size_t tokens = CommonPrefix(sequence.tokens(), prompt);
      if (tokens >= kWorthSharing && tokens > best.tokens) best = {&sequence, tokens};
    };
    for (const auto& other : running_) consider(other->sequence);
    for (const Sequence& kept : kept_) consider(kept);
    return best;
  }

  // Takes what another text has of the prompt.
  void StartWithSharedText(Job& job) {
    const SharedText shared = FindSharedText(job);
    if (shared.sequence == nullptr) return;
    job.sequence = shared.sequence->Fork();
    job.sequence.Truncate(static_cast<int32_t>(shared.tokens));
    if (job.read_before == 0) job.answer.result().reused_tokens = job.sequence.length();
  }

  static void Restart(Job& job) {
    job.sequence.Truncate(0);
    if (job.read_before == 0) job.answer.result().reused_tokens = 0;
  }

  // What was kept of its text elsewhere, where that is more than the cache has.
  void StartWithStoredText(Job& job) {
    if (store_ == nullptr || std::exchange(job.looked_up, true) || job.leader != 0) return;
    const std::span<const int32_t> text = Shareable(job);
    const size_t stored = text.empty() ? 0 : store_->Find(job.sequence.attention(), text);
    if (stored < static_cast<size_t>(job.sequence.length()) + kPageTokens) return;
    // Into pages of its own; where there is no room for those, what the cache has is better than nothing.
    Restart(job);
    if (MakeRoom(job)) store_->Restore(job.sequence, text);
    if (job.sequence.length() == 0) StartWithSharedText(job);
    if (job.read_before == 0) job.answer.result().reused_tokens = job.sequence.length();
  }

  // Whether a running request is about to read more of this prompt than any text has now.
  bool FindLeader(Job& job) const {
    size_t most = FindSharedText(job).tokens;
    for (const auto& other : running_) {
      if (!job.reads_like(other->sequence)) continue;
      const size_t shared = CommonPrefix(other->prompt(), Shareable(job));
      if (shared < most + kWorthSharing) continue;
      most = shared;
      job.leader = other->id;
      job.shared_with_leader = shared;
    }
    return job.leader != 0;
  }

  bool LeaderReads(const Job& job) const {
    const auto leader =
        std::find_if(running_.begin(), running_.end(), [&](const auto& other) { return other->id == job.leader; });
    return leader != running_.end() && static_cast<size_t>((*leader)->sequence.length()) < job.shared_with_leader;
  }

  void Admit() {
    while (!waiting_.empty() && running_.size() < max_running_) {
      Job& job = *waiting_.front();
      if (!FindLeader(job)) StartWithSharedText(job);
      // What it shares with a kept text keeps all of its pages: without it there may be room.
      if (job.sequence.length() > 0 && !MakeRoom(job)) Restart(job);
      if (MakeRoom(job)) {
        StartWithStoredText(job);
        if (job.read_before == 0) job.admitted_at = clock_();
        TellPrefill(job);
        running_.push_back(std::move(waiting_.front()));
        waiting_.pop_front();
        continue;
      }
      job.leader = 0;
      Restart(job);
      if (!running_.empty() || !ended_.empty() || reserved_ > 0) return;
      // Alone it fits, unless somebody else holds pages.
      Guarded(job, [&] { ThrowFull(job); });
      RemoveFinished();
    }
  }

  // Which requests read how many tokens: one for each answer first, then equal shares of what is left for the prompts,
  // or of what the answers can wait for.
  std::vector<Share> ChooseRows() {
    auto rows = static_cast<size_t>(engine_.decoder().max_rows());
    std::vector<Share> chosen;
    std::vector<Job*> prefilling;
    for (const auto& job : running_) {
      if (job->in_prefill()) {
        if (job->leader == 0) prefilling.push_back(job.get());
        continue;
      }
      // Each answer began in a row that the others had left, so there is one for each.
      PHSA_CHECK(rows > 0);
      chosen.push_back({job.get(), 1});
      --rows;
    }
    if (!chosen.empty()) rows = pace_.Tokens(rows);
    // The shortest first, as what they do not need goes to the others; by arrival where not everybody gets a row.
    if (prefilling.size() <= rows) {
      std::stable_sort(prefilling.begin(), prefilling.end(),
                       [](const Job* a, const Job* b) { return a->left() < b->left(); });
    }
    for (size_t i = 0; i < prefilling.size() && rows > 0; ++i) {
      const size_t share = std::max<size_t>(1, rows / (prefilling.size() - i));
      chosen.push_back({prefilling[i], std::min(prefilling[i]->left(), share)});
      rows -= chosen.back().tokens;
    }
    // Side by side what is read alike; by the number of the first of them, so that nothing depends on addresses.
    std::map<const TextAttention*, int64_t> order;
    for (const auto& job : running_) order.try_emplace(job->sequence.attention(), job->id);
    std::stable_sort(chosen.begin(), chosen.end(), [&](const Share& a, const Share& b) {
      return order[a.job->sequence.attention()] < order[b.job->sequence.attention()];
    });
    return chosen;
  }

  // One step for all of them. Where that fails each half has a step of its own, down to the one that cannot be read: it
  // ends alone. A device that failed fails all.
  void Read(std::vector<Share> shares) {
    size_t of_prompts = 0;
    for (const Share& share : shares) of_prompts += share.job->in_prefill() ? share.tokens : 0;
    const double begin = clock_();
    std::exception_ptr failure;
    try {
      RunDecoder(shares);
      pace_.Measured(of_prompts, clock_() - begin);
      return;
    } catch (const Error& error) {
      if (error.status() == PHSA_IO) throw;
      failure = std::current_exception();
    } catch (...) {
      failure = std::current_exception();
    }
    if (shares.size() == 1) {
      Guarded(*shares.front().job, [&] { std::rethrow_exception(failure); });
      return;
    }
    std::erase_if(shares, [](const Share& share) { return share.job->finished; });
    const auto middle = shares.begin() + static_cast<std::ptrdiff_t>(shares.size() / 2);
    if (middle != shares.begin()) Read({shares.begin(), middle});
    if (middle != shares.end()) Read({middle, shares.end()});
  }

  // What one step reads, and what its texts had before it.
  struct StepItems {
    std::vector<BatchItem> items;
    std::vector<int32_t> lengths;
    std::vector<size_t> scored;  // tokens of the prompts
    Drafts* drafts = nullptr;    // of the only answer
  };

  StepItems ItemsOf(std::span<const Share> chosen) {
    StepItems step;
    // Only an answer that is written alone is sped up: the rows of several fill a step already.
    if (Job& only = *chosen.front().job; chosen.size() == 1 && only.drafts && !only.in_prefill()) {
      step.drafts = &*only.drafts;
    }
    for (const auto& [job, count] : chosen) {
      const auto begin = static_cast<size_t>(job->sequence.length());
      step.lengths.push_back(job->sequence.length());
      step.scored.push_back(job->answer.result().prompt_log_probabilities.size());
      if (step.drafts != nullptr) {
        const GenerateResult& result = job->answer.result();
        const size_t room = DraftRoom(engine_, job->request.options, result, job->sequence);
        step.items.push_back(
            {&job->sequence, step.drafts->Begin(result, job->sequence.length(), room), BatchItem::Logits::kAll});
        continue;
      }
      if (!job->in_prefill()) {
        step.items.push_back(
            {&job->sequence, std::span(job->answer.result().tokens).last(1), BatchItem::Logits::kLast});
        continue;
      }
      // Where an answer has begun, what comes after its prompt is known.
      const bool last = begin + count == job->prompt().size() && !job->answers();
      const bool all = job->request.options.prompt_log_probabilities && !job->answers();
      step.items.push_back({&job->sequence, job->prompt().subspan(begin, count),
                            all    ? BatchItem::Logits::kAll
                            : last ? BatchItem::Logits::kLast
                                   : BatchItem::Logits::kNone,
                            0, job->hidden_sum.empty() ? nullptr : job->hidden_sum.data()});
    }
    return step;
  }

  // `next`: the position of the token that these logits are for.
  void TakeLogits(Job& job, const LogitsRow& logits, size_t next, BatchItem::Logits asked) {
    if (asked == BatchItem::Logits::kAll && next < job.prompt().size()) {
      // Once, also where it is read again.
      const bool is_new = job.answer.result().prompt_log_probabilities.size() + 1 == next;
      if (is_new) job.answer.ScorePrompt(logits, job.prompt()[next]);
    } else if (job.chosen_at != next) {
      // Once, also where the step then fails and is tried again: a second draw would be another token.
      job.answer.Choose(logits, job.sequence.tokens());
      job.chosen_at = next;
    }
  }

  // After a step: `before` of its tokens had been read, and its answer goes on unless a draft's tokens ended it.
  void GoOn(Job& job, size_t before, bool goes_on) {
    if (job.finished) return;
    if (job.in_prefill()) {
      TellPrefill(job);
      return;
    }
    if (before < job.prompt().size() && job.answers()) return;  // it was read again, and goes on from there
    if (job.first_token_at == 0) {
      job.first_token_at = clock_();
      job.answer.result().prefill_seconds = job.first_token_at - job.admitted_at;
    }
    Guarded(job, [&] {
      if (!goes_on || !job.answer.Take(job.sequence.length())) {
        if (job.request.embed) job.answer.result().embedding = DirectionOf(job.hidden_sum);
        Finish(job);
      } else if (job.request.progress) {
        job.request.progress(job.answer.result());
      }
    });
  }

  void RunDecoder(std::span<const Share> chosen) {
    PHSA_CHECK(!chosen.empty());
    const StepItems step = ItemsOf(chosen);
    try {
      engine_.decoder().Step(step.items, [&](int32_t item, int32_t row, const LogitsRow& logits) {
        const auto i = static_cast<size_t>(item);
        Job& job = *chosen[i].job;
        if (job.finished) return;
        Guarded(job, [&] {
          if (step.drafts != nullptr) {
            step.drafts->Row(job.answer, row, logits, job.sequence.tokens());
          } else {
            TakeLogits(job, logits, static_cast<size_t>(step.lengths[i] + row + 1), step.items[i].logits);
          }
        });
      });
    } catch (...) {
      for (size_t i = 0; i < chosen.size(); ++i) {
        chosen[i].job->answer.result().prompt_log_probabilities.resize(step.scored[i]);
      }
      throw;
    }
    for (size_t i = 0; i < chosen.size(); ++i) {
      Job& job = *chosen[i].job;
      const auto before = static_cast<size_t>(step.lengths[i]);
      const bool goes_on = step.drafts == nullptr || step.drafts->End(job.sequence, job.answer.result());
      if (before >= job.read_before) job.answer.result().tokens_read += engine_.decoder().step_tokens_read()[i];
      GoOn(job, before, goes_on);
    }
  }

  Engine& engine_;
  size_t max_running_;
  std::function<double()> clock_;
  PrefillPace pace_;
  TextStore* store_;
  int64_t next_id_ = 1;
  std::deque<std::unique_ptr<Job>> waiting_;
  std::vector<std::unique_ptr<Job>> running_;  // in order of arrival
  std::deque<std::unique_ptr<Job>> ended_;     // whose texts something is done with
  std::deque<Sequence> kept_;                  // texts of finished requests, the oldest first; none begins another
  std::map<int64_t, std::unique_ptr<Job>> finished_;
  size_t reserved_ = 0;         // pages for somebody else
  bool granted_ = false;        // who has been told that they are free
  std::vector<int32_t> begun_;  // pages of the text that who has the reserve began with
  int64_t preemptions_ = 0;
};

Scheduler::Scheduler(Engine& engine, int32_t max_running, const Pacing& pacing, TextStore* store)
    : impl_(std::make_unique<Impl>(engine, max_running, pacing, store)) {}
Scheduler::~Scheduler() = default;
int64_t Scheduler::Add(Request request) { return impl_->Add(std::move(request)); }
void Scheduler::Cancel(int64_t id) { impl_->Cancel(id); }
bool Scheduler::Step() { return impl_->Step(); }
std::optional<GenerateResult> Scheduler::Take(int64_t id) { return impl_->Take(id); }
void Scheduler::Reserve(int32_t tokens) { impl_->Reserve(tokens); }
bool Scheduler::HasReserve() { return impl_->HasReserve(); }
int32_t Scheduler::Known(std::span<const int32_t> tokens, const TextAttention* attention) const {
  return impl_->Known(tokens, attention);
}
Sequence Scheduler::Begin(std::span<const int32_t> tokens, std::shared_ptr<const TextAttention> attention) {
  return impl_->Begin(tokens, std::move(attention));
}
void Scheduler::Keep(Sequence text) { impl_->Keep(std::move(text)); }
std::vector<const Sequence*> Scheduler::Kept() const { return impl_->Kept(); }
int32_t Scheduler::waiting() const { return static_cast<int32_t>(impl_->waiting()); }
int32_t Scheduler::running() const { return static_cast<int32_t>(impl_->running()); }
int64_t Scheduler::preemptions() const { return impl_->preemptions(); }

std::vector<GenerateResult> GenerateAll(Engine& engine, std::vector<Request> requests, int32_t max_running) {
  Scheduler scheduler(engine, max_running);
  std::vector<int64_t> ids;
  ids.reserve(requests.size());
  for (Request& request : requests) ids.push_back(scheduler.Add(std::move(request)));
  std::vector<GenerateResult> results(ids.size());
  std::vector<size_t> open(ids.size());
  std::iota(open.begin(), open.end(), size_t{0});
  // Results are taken as they come: where one has failed, the others need not be waited for.
  for (bool more = true; more;) {
    more = scheduler.Step();
    std::erase_if(open, [&](size_t i) {
      std::optional<GenerateResult> result = scheduler.Take(ids[i]);
      if (result) results[i] = std::move(*result);
      return result.has_value();
    });
  }
  PHSA_CHECK(open.empty());
  return results;
}

}  // namespace phsa
