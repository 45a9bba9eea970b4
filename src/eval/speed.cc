#include "eval/speed.h"

#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <numeric>
#include <random>

#include "base/errors.h"

namespace phsa {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// What the decoder has counted so far.
struct Counters {
  StepTimes times;
  TokensRead read;
  explicit Counters(const Decoder& decoder) : times(decoder.times()), read(decoder.tokens_read()) {}
};

SpeedRow OneRun(SpeedTest test, int32_t tokens, int32_t depth, int32_t batch, const Counters& before,
                const Counters& after, double seconds) {
  return {test,
          tokens,
          depth,
          batch,
          {seconds},
          {after.times.products - before.times.products, after.times.attention - before.times.attention,
           after.times.other - before.times.other, after.times.selection - before.times.selection},
          {after.read.read - before.read.read, after.read.dense - before.read.dense}};
}

}  // namespace

const char* Name(SpeedTest test) { return test == SpeedTest::kPrefill ? "pp" : "tg"; }

double SpeedRow::best() const { return all_tokens() / *std::min_element(seconds.begin(), seconds.end()); }

double SpeedRow::slowest() const { return all_tokens() / *std::max_element(seconds.begin(), seconds.end()); }

double SpeedRow::mean() const {
  return all_tokens() * static_cast<double>(seconds.size()) / std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

void SpeedRow::Join(const SpeedRow& other) {
  seconds.insert(seconds.end(), other.seconds.begin(), other.seconds.end());
  times.products += other.times.products;
  times.attention += other.times.attention;
  times.other += other.times.other;
  times.selection += other.times.selection;
  tokens_read.read += other.tokens_read.read;
  tokens_read.dense += other.tokens_read.dense;
}

nlohmann::ordered_json SpeedToJson(const SpeedRow& row) {
  return {{"test", Name(row.test)},
          {"tokens", row.tokens},
          {"depth", row.depth},
          {"batch", row.batch},
          {"tokens_per_s", row.best()},
          {"tokens_per_s_mean", row.mean()},
          {"repeats", row.seconds.size()},
          {"read_share", row.tokens_read.share()}};
}

SpeedMeter::SpeedMeter(Engine& engine, GenerateCallbacks callbacks, std::vector<int32_t> text)
    : engine_(engine), callbacks_(std::move(callbacks)), tokens_(std::move(text)) {
  texts_.emplace_back(engine.cache());
  const auto count = static_cast<size_t>(engine.memory().context);
  if (const size_t length = tokens_.size(); length > 0) {
    tokens_.resize(count);
    for (size_t i = length; i < count; ++i) tokens_[i] = tokens_[i - length];
    return;
  }
  std::mt19937 random(1);
  tokens_.resize(count);
  for (int32_t& token : tokens_) {
    token = static_cast<int32_t>(random() % static_cast<uint32_t>(engine.config().vocab_size));
  }
}

bool SpeedMeter::Advance(int32_t length, int32_t step) {
  bool finite = true;
  std::vector<BatchItem> items(texts_.size());
  while (texts_.front().length() < length) {
    if (callbacks_.stop && callbacks_.stop()) return false;
    const int32_t first = texts_.front().length(), count = std::min(step, length - first);
    if (callbacks_.prefill) callbacks_.prefill(first, length);
    for (size_t i = 0; i < texts_.size(); ++i) {
      items[i] = {&texts_[i],
                  {tokens_.data() + first, static_cast<size_t>(count)},
                  first + count == length || step == 1 ? BatchItem::Logits::kLast : BatchItem::Logits::kNone};
    }
    engine_.decoder().Step(items,
                           [&](int32_t, int32_t, const LogitsRow& logits) { finite = finite && logits.IsFinite(); });
  }
  if (!finite) {
    ThrowInvalid(
        "{}: the logits after {} tokens are not all finite, so a time would mean nothing; are its weights whole?",
        engine_.source().path(), length);
  }
  return true;
}

void SpeedMeter::Truncate(int32_t length) {
  for (Sequence& text : texts_) text.Truncate(std::min(text.length(), length));
}

bool SpeedMeter::Prepare(int32_t depth, int32_t tokens, int32_t step, int32_t batch) {
  texts_.erase(texts_.begin() + 1, texts_.end());
  Truncate(depth);
  if (!Advance(depth, engine_.decoder().max_rows())) return false;
  // Pages of their own: shared ones would be read once for all texts where a cache of the device holds them.
  const std::vector<int32_t> read = texts_.front().tokens();
  while (texts_.size() < static_cast<size_t>(batch)) {
    Sequence& text = texts_.emplace_back(engine_.cache());
    if (!read.empty()) text.Append(read);
    for (size_t i = 0; i < text.pages().size(); ++i) {
      engine_.cache().memory().Copy(texts_.front().pages()[i], text.pages()[i]);
    }
  }
  const bool done = Advance(depth + std::min(tokens, step), step);
  Truncate(depth);
  return done;
}

std::vector<SpeedRow> SpeedMeter::Prefill(int32_t depth, std::span<const int32_t> lengths, int32_t repeats) {
  PHSA_CHECK(!lengths.empty() && lengths.front() > 0 && std::is_sorted(lengths.begin(), lengths.end()));
  std::vector<SpeedRow> rows;
  for (const int32_t length : lengths) rows.push_back({SpeedTest::kPrefill, length, depth, 1, {}, {}, {}});
  const int32_t step = engine_.decoder().max_rows();
  bool go_on = Prepare(depth, lengths.back(), step, 1);
  for (int32_t i = 0; i < repeats && go_on; ++i) {
    Truncate(depth);
    const Counters before(engine_.decoder());
    const auto start = Clock::now();
    for (SpeedRow& row : rows) {
      go_on = Advance(depth + row.tokens, step);
      if (!go_on) break;
      const double seconds = SecondsSince(start);
      row.Join(OneRun(row.test, row.tokens, depth, 1, before, Counters(engine_.decoder()), seconds));
    }
  }
  rows.erase(std::remove_if(rows.begin(), rows.end(), [](const SpeedRow& row) { return row.seconds.empty(); }),
             rows.end());
  return rows;
}

SpeedRow SpeedMeter::Decode(int32_t depth, int32_t tokens, int32_t repeats, int32_t batch) {
  PHSA_CHECK(tokens > 0 && batch > 0 && batch <= engine_.decoder().max_rows());
  SpeedRow row{SpeedTest::kDecode, tokens, depth, batch, {}, {}, {}};
  bool go_on = Prepare(depth, tokens, 1, batch);
  for (int32_t i = 0; i < repeats && go_on; ++i) {
    Truncate(depth);
    const Counters before(engine_.decoder());
    const auto start = Clock::now();
    go_on = Advance(depth + tokens, 1);
    const double seconds = SecondsSince(start);
    if (go_on) row.Join(OneRun(row.test, tokens, depth, batch, before, Counters(engine_.decoder()), seconds));
  }
  Truncate(depth);
  return row;
}

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  struct utsname system {};
  return uname(&system) == 0 ? system.machine : "unknown";
}

}  // namespace phsa
