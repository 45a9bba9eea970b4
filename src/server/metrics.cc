#include "server/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace phsa::server {
namespace {

// vLLM's bounds, so that dashboards made for it fit.
std::vector<double> LatencyBounds() { return {0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60}; }
std::vector<double> FirstTokenBounds() {
  return {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
}
std::vector<double> PerTokenBounds() {
  return {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5};
}
std::vector<double> LengthBounds() {
  return {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};
}

// Labels stand between quotes.
std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

void Head(const std::string& name, const char* type, const std::string& help, std::string* out) {
  fmt::format_to(std::back_inserter(*out), "# HELP {0} {2}\n# TYPE {0} {1}\n", name, type, help);
}

template <class T>
void One(const std::string& name, const char* type, const std::string& help, const std::string& labels, T value,
         std::string* out) {
  Head(name, type, help, out);
  fmt::format_to(std::back_inserter(*out), "{}{{{}}} {}\n", name, labels, value);
}

}  // namespace

const char* FinishReason(StopReason reason) {
  return reason == StopReason::kMaxTokens || reason == StopReason::kContextFull ? "length" : "stop";
}

Histogram::Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

void Histogram::Add(double value) {
  const auto bound = std::lower_bound(bounds_.begin(), bounds_.end(), value);
  ++counts_[static_cast<size_t>(bound - bounds_.begin())];
  sum_ += value;
}

void Histogram::Print(const std::string& name, const std::string& help, const std::string& labels,
                      std::string* out) const {
  Head(name, "histogram", help, out);
  const auto append = std::back_inserter(*out);
  uint64_t total = 0;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    total += counts_[i];
    fmt::format_to(append, "{}_bucket{{{},le=\"{}\"}} {}\n", name, labels, bounds_[i], total);
  }
  total += counts_.back();
  fmt::format_to(append, "{0}_bucket{{{1},le=\"+Inf\"}} {2}\n{0}_sum{{{1}}} {3}\n{0}_count{{{1}}} {2}\n", name, labels,
                 total, sum_);
}

Metrics::Metrics(const std::string& model)
    : labels_(fmt::format("model_name=\"{}\"", Escaped(model))),
      first_token_(FirstTokenBounds()),
      per_token_(PerTokenBounds()),
      whole_(LatencyBounds()),
      queued_(LatencyBounds()),
      prefill_(LatencyBounds()),
      decode_(LatencyBounds()),
      prompt_length_(LengthBounds()),
      answer_length_(LengthBounds()) {}

void Metrics::SetState(const EngineState& state) {
  const std::lock_guard lock(mutex_);
  state_ = state;
}

EngineState Metrics::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

void Metrics::CountAnswer(const GenerateResult& result, const AnswerTimes& times, int64_t blocks) {
  const std::lock_guard lock(mutex_);
  prompt_tokens_ += static_cast<uint64_t>(result.prompt_tokens);
  cached_tokens_ += static_cast<uint64_t>(result.reused_tokens);
  generated_tokens_ += result.tokens.size();
  blocks_ += static_cast<uint64_t>(blocks);
  tokens_read_ += result.tokens_read;
  ++finished_[result.reason == StopReason::kInterrupted ? "abort" : FinishReason(result.reason)];
  if (result.reason == StopReason::kInterrupted) return;
  first_token_.Add(times.first_token);
  whole_.Add(times.end);
  queued_.Add(times.queued);
  prefill_.Add(result.prefill_seconds);
  decode_.Add(result.decode_seconds);
  if (result.tokens.size() > 1) per_token_.Add(result.decode_seconds / static_cast<double>(result.tokens.size() - 1));
  prompt_length_.Add(result.prompt_tokens);
  answer_length_.Add(static_cast<double>(result.tokens.size()));
}

void Metrics::CountFailure() {
  const std::lock_guard lock(mutex_);
  ++failed_;
}

void Metrics::CountHttp(const std::string& path, int status) {
  const std::lock_guard lock(mutex_);
  ++responses_[{path, status}];
}

void Metrics::CountRefused() {
  const std::lock_guard lock(mutex_);
  ++refused_;
}

void Metrics::CountConnection(int change) {
  const std::lock_guard lock(mutex_);
  connections_ += change;
}

std::string Metrics::Text(const std::vector<const Metrics*>& others) const {
  const std::string own = OwnText(true);
  if (others.empty()) return own;
  // A name's lines stand together behind one head.
  constexpr std::string_view kHead = "# HELP ";
  std::vector<std::string> names;
  std::map<std::string, std::string> lines;
  const auto add = [&](const std::string& text, bool with_heads) {
    std::string name;
    for (size_t at = 0, end = 0; at < text.size(); at = end + 1) {
      end = text.find('\n', at);
      const std::string line = text.substr(at, end + 1 - at);
      if (line.starts_with(kHead)) {
        name = line.substr(kHead.size(), line.find(' ', kHead.size()) - kHead.size());
        if (with_heads) names.push_back(name);
      }
      if (with_heads || line.front() != '#') lines[name] += line;
    }
  };
  add(own, true);
  for (const Metrics* other : others) add(other->OwnText(false), false);
  std::string out;
  for (const std::string& name : names) out += lines[name];
  return out;
}

std::string Metrics::OwnText(bool with_http) const {
  const std::lock_guard lock(mutex_);
  std::string out;
  const auto append = std::back_inserter(out);
  One("vllm:num_requests_running", "gauge", "Answers that are in work.", labels_, state_.running, &out);
  One("vllm:num_requests_waiting", "gauge", "Answers that wait for their turn.", labels_, state_.waiting, &out);
  One("vllm:num_preemptions_total", "counter",
      "How often a request gave its pages of the KV cache to older ones, to be prefilled again later.", labels_,
      state_.preemptions, &out);
  const double usage = state_.pages > 0 ? static_cast<double>(state_.used_pages) / state_.pages : 0;
  One("vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache's pages in use, texts kept for later included.",
      labels_, usage, &out);
  One("vllm:prompt_tokens_total", "counter", "Tokens of prompts.", labels_, prompt_tokens_, &out);
  One("vllm:generation_tokens_total", "counter", "Tokens of answers.", labels_, generated_tokens_, &out);
  One("vllm:prefix_cache_queries_total", "counter", "Tokens of prompts that were looked for in the cache.", labels_,
      prompt_tokens_, &out);
  One("vllm:prefix_cache_hits_total", "counter", "Tokens of prompts that were found there.", labels_, cached_tokens_,
      &out);
  Head("vllm:request_success_total", "counter", "Answers that ended, by reason.", &out);
  for (const char* reason : {"stop", "length", "abort"}) {
    const auto found = finished_.find(reason);
    fmt::format_to(append, "vllm:request_success_total{{{},finished_reason=\"{}\"}} {}\n", labels_, reason,
                   found != finished_.end() ? found->second : 0);
  }
  first_token_.Print("vllm:time_to_first_token_seconds", "From the request to the first token.", labels_, &out);
  per_token_.Print("vllm:time_per_output_token_seconds", "Mean time of a token after the first, by answer.", labels_,
                   &out);
  whole_.Print("vllm:e2e_request_latency_seconds", "From the request to the last token.", labels_, &out);
  queued_.Print("vllm:request_queue_time_seconds", "From the request to the begin of its prompt.", labels_, &out);
  prefill_.Print("vllm:request_prefill_time_seconds", "Prefill of the prompt.", labels_, &out);
  decode_.Print("vllm:request_decode_time_seconds", "Decode of the answer.", labels_, &out);
  prompt_length_.Print("vllm:request_prompt_tokens", "Tokens of a prompt.", labels_, &out);
  answer_length_.Print("vllm:request_generation_tokens", "Tokens of an answer.", labels_, &out);
  One("phsa:tokens_read_total", "counter", "Tokens that queries read, over layers and query heads.", labels_,
      tokens_read_.read, &out);
  One("phsa:tokens_dense_total", "counter", "Tokens that dense attention would have read.", labels_, tokens_read_.dense,
      &out);
  One("phsa:read_share", "gauge", "Share of the tokens that were read, of all answers so far.", labels_,
      tokens_read_.share(), &out);
  One("phsa:blocks_chosen_total", "counter", "Blocks that queries chose, over layers and choosing heads.", labels_,
      blocks_, &out);
  One("phsa:cache_bytes", "gauge", "Bytes of the KV cache's pages in use.", labels_, state_.cache_bytes, &out);
  One("phsa:representative_bytes", "gauge", "Bytes of them for representatives.", labels_, state_.representative_bytes,
      &out);
  One("phsa:requests_failed_total", "counter", "Answers that failed.", labels_, failed_, &out);
  if (!with_http) return out;
  One("phsa:requests_refused_total", "counter", "Requests refused as the queue was full.", labels_, refused_, &out);
  One("phsa:connections", "gauge", "Open connections.", labels_, connections_, &out);
  Head("phsa:http_responses_total", "counter", "Responses, by path and status.", &out);
  for (const auto& [key, count] : responses_) {
    fmt::format_to(append, "phsa:http_responses_total{{{},path=\"{}\",code=\"{}\"}} {}\n", labels_, key.first,
                   key.second, count);
  }
  return out;
}

}  // namespace phsa::server
