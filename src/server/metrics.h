// Counters for /metrics, in Prometheus' text format. The names are vLLM's where it has them.
#ifndef PHSA_SERVER_METRICS_H_
#define PHSA_SERVER_METRICS_H_

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/answer.h"

namespace phsa::server {

// Times of one answer, in seconds since its request came.
struct AnswerTimes {
  double first_token = 0, end = 0;
  double queued = 0;  // until its prompt was begun
};

// What the engine holds now.
struct EngineState {
  int32_t running = 0, waiting = 0;
  int64_t preemptions = 0;
  int32_t pages = 0, used_pages = 0;
  uint64_t cache_bytes = 0, representative_bytes = 0;  // of the used pages
};

class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);
  void Add(double value);
  void Print(const std::string& name, const std::string& help, const std::string& labels, std::string* out) const;

 private:
  std::vector<double> bounds_;
  std::vector<uint64_t> counts_;  // one more than bounds: what is above them all
  double sum_ = 0;
};

// All functions may be called by any thread.
class Metrics {
 public:
  explicit Metrics(const std::string& model);

  void SetState(const EngineState& state);
  EngineState state() const;
  // `blocks`: that queries chose, over layers and choosing heads.
  void CountAnswer(const GenerateResult& result, const AnswerTimes& times, int64_t blocks);
  void CountFailure();
  void CountHttp(const std::string& path, int status);
  void CountRefused();  // as the queue was full
  void CountConnection(int change);
  // With those of other models behind each of its own lines.
  std::string Text(const std::vector<const Metrics*>& others = {}) const;

 private:
  std::string OwnText(bool with_http) const;

  const std::string labels_;
  mutable std::mutex mutex_;
  EngineState state_;
  uint64_t prompt_tokens_ = 0, generated_tokens_ = 0, cached_tokens_ = 0, blocks_ = 0;
  uint64_t failed_ = 0, refused_ = 0;
  int64_t connections_ = 0;
  TokensRead tokens_read_;
  std::map<std::string, uint64_t> finished_;                   // by reason
  std::map<std::pair<std::string, int>, uint64_t> responses_;  // by path and status
  Histogram first_token_, per_token_, whole_, queued_, prefill_, decode_, prompt_length_, answer_length_;
};

// "stop" or "length", as OpenAI's API calls them.
const char* FinishReason(StopReason reason);

}  // namespace phsa::server

#endif  // PHSA_SERVER_METRICS_H_
