#include "eval/speed.h"

#include <sys/utsname.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <fstream>
#include <numeric>
#include <random>

#include "base/errors.h"

namespace phsa {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// By the bits, which the compiler makes a few instructions of: it runs while the time is taken.
bool AllFinite(std::span<const float> values) {
  bool finite = true;
  for (const float value : values) finite &= (std::bit_cast<uint32_t>(value) & 0x7f800000u) != 0x7f800000u;
  return finite;
}

// What the decoder has counted so far.
struct Counters {
  StepTimes times;
  TokensRead read;
  explicit Counters(const Decoder& decoder) : times(decoder.times()), read(decoder.tokens_read()) {}
};

SpeedRow OneRun(SpeedTest test, int32_t tokens, int32_t depth, const Counters& before, const Counters& after,
                double seconds) {
  return {test,
          tokens,
          depth,
          {seconds},
          {after.times.products - before.times.products, after.times.attention - before.times.attention,
           after.times.other - before.times.other, after.times.selection - before.times.selection},
          {after.read.read - before.read.read, after.read.dense - before.read.dense}};
}

}  // namespace

const char* Name(SpeedTest test) { return test == SpeedTest::kRead ? "pp" : "tg"; }

double SpeedRow::best() const { return tokens / *std::min_element(seconds.begin(), seconds.end()); }

double SpeedRow::slowest() const { return tokens / *std::max_element(seconds.begin(), seconds.end()); }

double SpeedRow::mean() const {
  return tokens * static_cast<double>(seconds.size()) / std::accumulate(seconds.begin(), seconds.end(), 0.0);
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
          {"tokens_per_s", row.best()},
          {"tokens_per_s_mean", row.mean()},
          {"repeats", row.seconds.size()},
          {"read_share", row.tokens_read.share()}};
}

SpeedMeter::SpeedMeter(Engine& engine, GenerateCallbacks callbacks)
    : engine_(engine), callbacks_(std::move(callbacks)), sequence_(engine.cache()) {
  std::mt19937 random(1);
  tokens_.resize(static_cast<size_t>(engine.plan().context));
  for (int32_t& token : tokens_) {
    token = static_cast<int32_t>(random() % static_cast<uint32_t>(engine.config().vocab_size));
  }
}

bool SpeedMeter::Advance(int32_t length, int32_t step) {
  const auto vocab = static_cast<size_t>(engine_.config().vocab_size);
  bool finite = true;
  while (sequence_.length() < length) {
    if (callbacks_.stop && callbacks_.stop()) return false;
    const int32_t first = sequence_.length(), count = std::min(step, length - first);
    if (callbacks_.prefill) callbacks_.prefill(first, length);
    const BatchItem item{&sequence_,
                         {tokens_.data() + first, static_cast<size_t>(count)},
                         first + count == length || step == 1 ? BatchItem::Logits::kLast : BatchItem::Logits::kNone};
    engine_.decoder().Step({&item, 1}, [&](int32_t, int32_t, const float* logits) {
      finite = finite && AllFinite({logits, vocab});
    });
  }
  if (!finite) {
    ThrowInvalid(
        "{}: the logits after {} tokens are not all finite, so a time would mean nothing; are its weights whole?",
        engine_.source().path(), length);
  }
  return true;
}

bool SpeedMeter::Prepare(int32_t depth, int32_t tokens, int32_t step) {
  sequence_.Truncate(std::min(sequence_.length(), depth));
  const bool done = Advance(depth, engine_.decoder().max_rows()) && Advance(depth + std::min(tokens, step), step);
  sequence_.Truncate(std::min(sequence_.length(), depth));
  return done;
}

std::vector<SpeedRow> SpeedMeter::Read(int32_t depth, std::span<const int32_t> lengths, int32_t repeats) {
  PHSA_CHECK(!lengths.empty() && lengths.front() > 0 && std::is_sorted(lengths.begin(), lengths.end()));
  std::vector<SpeedRow> rows;
  for (const int32_t length : lengths) rows.push_back({SpeedTest::kRead, length, depth, {}, {}, {}});
  const int32_t step = engine_.decoder().max_rows();
  bool go_on = Prepare(depth, lengths.back(), step);
  for (int32_t i = 0; i < repeats && go_on; ++i) {
    sequence_.Truncate(depth);
    const Counters before(engine_.decoder());
    const auto start = Clock::now();
    for (SpeedRow& row : rows) {
      go_on = Advance(depth + row.tokens, step);
      if (!go_on) break;
      const double seconds = SecondsSince(start);
      row.Join(OneRun(row.test, row.tokens, depth, before, Counters(engine_.decoder()), seconds));
    }
  }
  rows.erase(std::remove_if(rows.begin(), rows.end(), [](const SpeedRow& row) { return row.seconds.empty(); }),
             rows.end());
  return rows;
}

SpeedRow SpeedMeter::Write(int32_t depth, int32_t tokens, int32_t repeats) {
  PHSA_CHECK(tokens > 0);
  SpeedRow row{SpeedTest::kWrite, tokens, depth, {}, {}, {}};
  bool go_on = Prepare(depth, tokens, 1);
  for (int32_t i = 0; i < repeats && go_on; ++i) {
    sequence_.Truncate(depth);
    const Counters before(engine_.decoder());
    const auto start = Clock::now();
    go_on = Advance(depth + tokens, 1);
    const double seconds = SecondsSince(start);
    if (go_on) row.Join(OneRun(row.test, tokens, depth, before, Counters(engine_.decoder()), seconds));
  }
  sequence_.Truncate(std::min(sequence_.length(), depth));
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
