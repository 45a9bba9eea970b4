#include "eval/compare.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "attention/policies.h"
#include "base/errors.h"

namespace phsa {
namespace {

// How long things take, for the progress bar, in FLOPs of matrix products. A decoded token needs all weights for one
// row: it takes as long as a few that are prefilled together.
class Work {
 public:
  explicit Work(const ModelConfig& config) : config_(config) {
    const double hidden = config.hidden, heads = config.num_q_heads, kv_heads = config.num_kv_heads;
    token_ = 2 * config.num_layers *
             (hidden * config.head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config.intermediate);
  }
  double Prefill(const LayerSettings& attention, int32_t tokens) const {
    return token_ * tokens + CountAttentionFlops(attention, config_, tokens).total();
  }
  double Decode(int32_t tokens) const { return 6 * token_ * tokens; }

 private:
  const ModelConfig& config_;
  double token_ = 0;
};

// A piece of the run. `run` tells its `done` how much of the cost is done.
struct Task {
  std::string what;
  double cost = 0;
  std::function<void(const std::function<void(double cost)>& done)> run;
};

class Runner {
 public:
  Runner(Engine& engine, const CompareRuns& runs, const CompareCallbacks& callbacks, CompareResult& result)
      : engine_(engine), runs_(runs), callbacks_(callbacks), result_(result), work_(engine.config()) {}

  // Everything that is quick or asked for by name comes first, needles last: they are many, and some are better than
  // none.
  void Run() {
    if (runs_.answers) AddAnswers(*runs_.answers);
    if (!runs_.flops_lengths.empty()) AddFlops();
    if (runs_.text) AddText(*runs_.text);
    if (runs_.speed) AddSpeed(*runs_.speed);
    if (runs_.niah) AddNiah(*runs_.niah);
    double total = 0, before = 0;
    for (const Task& task : tasks_) total += task.cost;
    for (const Task& task : tasks_) {
      if (callbacks_.stop()) break;
      double most = 0;  // a bar does not go back
      const auto done = [&](double cost) {
        most = std::max(most, std::min(cost, task.cost));
        callbacks_.progress(total > 0 ? (before + most) / total : 1, task.what);
      };
      done(0);
      task.run(done);
      before += task.cost;
    }
    result_.about.interrupted = callbacks_.stop();
  }

 private:
  const std::string& Label(size_t policy) const { return runs_.policies[policy].name; }
  const LayerSettings& Attention(size_t policy) const { return runs_.policies[policy].attention; }

  // `all`: the tokens whose prefill costs `cost`, where the calls that are made do not know them.
  GenerateCallbacks Prefilling(const std::function<void(double)>& done, double cost, int32_t all = 0) const {
    GenerateCallbacks callbacks;
    callbacks.stop = callbacks_.stop;
    callbacks.prefill = [=](int32_t tokens, int32_t total) { done(cost * tokens / (all > 0 ? all : total)); };
    return callbacks;
  }

  void AddAnswers(const CompareAnswersRuns& runs) {
    CompareAnswers& answers = result_.answers.emplace();
    answers.questions = runs.questions;
    answers.results.resize(runs_.policies.size());
    for (size_t i = 0; i < runs_.policies.size(); ++i) {
      const double prefill = work_.Prefill(Attention(i), static_cast<int32_t>(runs.questions.front().tokens.size()));
      const double all = prefill + work_.Decode(runs.max_tokens) * static_cast<double>(runs.questions.size());
      tasks_.push_back({"answers: " + Label(i), all, [&answers, &runs, prefill, i, this](const auto& done) {
                          engine_.SetAttention(Attention(i));
                          Session session(engine_);  // one for all questions: one prefill of the text
                          GenerateOptions options;
                          options.max_tokens = runs.max_tokens;
                          options.sampler.temperature = 0;
                          for (const CompareQuestion& question : runs.questions) {
                            GenerateResult one = session.Generate(question.tokens, options, Prefilling(done, prefill));
                            if (one.reason == StopReason::kInterrupted) return;
                            answers.results[i].push_back(std::move(one));
                          }
                        }});
    }
  }

  void AddFlops() {
    CompareFlops& flops = result_.flops.emplace();
    flops.lengths = runs_.flops_lengths;
    flops.counts.resize(runs_.policies.size());
    for (size_t i = 0; i < runs_.policies.size(); ++i) {
      for (const int32_t length : flops.lengths) {
        flops.counts[i].push_back(CountAttentionFlops(Attention(i), engine_.config(), length));
      }
    }
  }

  void AddText(const CompareTextRuns& runs) {
    const auto tokens = static_cast<int32_t>(runs.tokens.size());
    CompareText& text = result_.text.emplace();
    text.name = runs.name;
    text.tokens = tokens;
    text.perplexity = runs.perplexity;
    text.recall = runs.recall;
    text.results.resize(runs_.policies.size());
    text.recalls.resize(runs_.policies.size());
    for (size_t i = 0; i < runs_.policies.size(); ++i) {
      const bool recall = runs.recall && !result_.policies[i].dense;
      if (!runs.perplexity && !recall) continue;
      double cost = work_.Prefill(Attention(i), tokens);
      if (recall) cost += CountAttentionFlops({DenseSettings(), {}}, engine_.config(), tokens).total();
      tasks_.push_back({(runs.perplexity ? "perplexity: " : "recall: ") + Label(i), cost,
                        [&text, &runs, recall, cost, i, this](const auto& done) {
                          engine_.SetAttention(Attention(i));
                          std::optional<RecallMeter> meter;
                          if (recall) meter.emplace(engine_.config(), engine_.cache().layout().kv_type);
                          PerplexityResult one =
                              Perplexity(engine_, runs.tokens, Prefilling(done, cost), meter ? &*meter : nullptr);
                          if (one.tokens == 0) return;
                          CheckFinite(one.loss);
                          text.results[i] = std::move(one);
                          if (meter) text.recalls[i] = RecallOf(*meter);
                        }});
    }
  }

  static CompareRecall RecallOf(const RecallMeter& meter) {
    const RecallMeter::Part total = meter.total();
    CompareRecall recall{total.all.value(), total.sparse.value(), {}};
    for (int32_t layer = 0; layer < meter.num_layers(); ++layer) {
      recall.sparse_by_layer.push_back(meter.layer(layer).sparse.value());
    }
    return recall;
  }

  void CheckFinite(double loss) const {
    if (std::isfinite(loss)) return;
    ThrowInvalid("{}: the loss on the text is not a number; are its weights whole?", engine_.source().path());
  }

  // Runs of all policies in turn, so that a machine that grows slower does so for all of them.
  void AddSpeed(const CompareSpeedRuns& runs) {
    CompareSpeed& speed = result_.speed.emplace();
    speed.decode_tokens = runs.decode_tokens;
    speed.repeats = runs.repeats;
    speed.rows.resize(runs_.policies.size());
    for (int32_t repeat = 0; repeat < runs.repeats; ++repeat) {
      for (size_t i = 0; i < runs_.policies.size(); ++i) {
        const int32_t longest =
            std::max(runs.lengths.empty() ? 0 : runs.lengths.back(), runs.depths.empty() ? 0 : runs.depths.back());
        const double prefill = work_.Prefill(Attention(i), longest), decode = work_.Decode(runs.decode_tokens);
        tasks_.push_back({fmt::format("speed, run {} of {}: {}", repeat + 1, runs.repeats, Label(i)),
                          prefill + decode * static_cast<double>(runs.depths.size()),
                          [&speed, &runs, prefill, decode, longest, i, this](const auto& done) {
                            engine_.SetAttention(Attention(i));
                            MeasureSpeed(
                                runs, Prefilling(done, prefill, longest),
                                [&](size_t decoded) { done(prefill + decode * static_cast<double>(decoded)); },
                                &speed.rows[i]);
                          }});
      }
    }
  }

  void MeasureSpeed(const CompareSpeedRuns& runs, const GenerateCallbacks& prefill,
                    const std::function<void(size_t)>& decoded, std::vector<SpeedRow>* rows) {
    SpeedMeter meter(engine_, prefill);
    if (!runs.lengths.empty()) {
      for (const SpeedRow& row : meter.Prefill(0, runs.lengths, 1)) AddRow(row, rows);
    }
    // From the deepest up: the text in the cache is only cut.
    for (size_t i = 0; i < runs.depths.size(); ++i) {
      const SpeedRow row = meter.Decode(runs.depths[runs.depths.size() - 1 - i], runs.decode_tokens, 1);
      if (!row.seconds.empty()) AddRow(row, rows);
      decoded(i + 1);
    }
  }

  // The runs of one measurement in one row; rows by test, then length, then depth.
  static void AddRow(const SpeedRow& row, std::vector<SpeedRow>* rows) {
    const auto key = [](const SpeedRow& one) { return std::tuple(one.test, one.tokens, one.depth); };
    const auto at = std::lower_bound(rows->begin(), rows->end(), row,
                                     [&](const SpeedRow& a, const SpeedRow& b) { return key(a) < key(b); });
    if (at != rows->end() && key(*at) == key(row)) {
      at->Join(row);
    } else {
      rows->insert(at, row);
    }
  }

  void AddNiah(const CompareNiahRuns& runs) {
    CompareNiah& niah = result_.niah.emplace();
    niah.samples = runs.samples;
    NiahRuns run;
    run.tasks = runs.tasks;
    run.samples = runs.samples;
    double cost = 0;
    for (const int32_t length : runs.lengths) {
      for (size_t i = 0; i < runs_.policies.size(); ++i) {
        cost += (work_.Prefill(Attention(i), length) + work_.Decode(kNiahAnswerTokens / 2)) * runs.samples *
                static_cast<double>(runs.tasks.size());
        run.configurations.push_back({length, Attention(i)});
      }
    }
    tasks_.push_back({"needles", cost, [&niah, &runs, run, cost, this](const auto& done) {
                        NiahCallbacks callbacks;
                        callbacks.progress = [&](const NiahProgress& progress) { done(cost * progress.share); };
                        callbacks.record = [](const NiahRecord&) {};
                        callbacks.stop = callbacks_.stop;
                        RunNiah(engine_, *runs.prompts, run, niah.records, callbacks);
                      }});
  }

  Engine& engine_;
  const CompareRuns& runs_;
  const CompareCallbacks& callbacks_;
  CompareResult& result_;
  Work work_;
  std::vector<Task> tasks_;
};

}  // namespace

int32_t CompareSpeedRuns::context() const {
  return std::max(lengths.empty() ? 0 : lengths.back(), depths.empty() ? 0 : depths.back() + decode_tokens);
}

int32_t CompareRuns::Context() const {
  int32_t context = 0;
  if (answers) context = std::max(context, answers->context);
  if (speed) context = std::max(context, speed->context());
  if (text) context = std::max(context, static_cast<int32_t>(text->tokens.size()));
  if (niah && !niah->lengths.empty()) context = std::max(context, niah->lengths.back());
  return context;
}

std::optional<bool> CompareAnswers::Right(size_t policy, size_t question) const {
  if (questions[question].expected.empty() || question >= results[policy].size()) return std::nullopt;
  return NiahFound(results[policy][question].text, questions[question].expected);
}

const SpeedRow* CompareSpeed::Find(size_t policy, SpeedTest test, int32_t tokens, int32_t depth) const {
  for (const SpeedRow& row : rows[policy]) {
    if (row.test == test && row.tokens == tokens && row.depth == depth) return &row;
  }
  return nullptr;
}

std::optional<size_t> CompareResult::dense() const {
  for (size_t i = 0; i < policies.size(); ++i) {
    if (policies[i].dense) return i;
  }
  return std::nullopt;
}

CompareResult RunCompare(Engine& engine, const CompareRuns& runs, const CompareCallbacks& callbacks) {
  const auto start = std::chrono::steady_clock::now();
  const ModelConfig& config = engine.config();
  CompareResult result;
  for (const NamedAttention& policy : runs.policies) {
    result.policies.push_back(
        {policy.name, policy.attention, IsDense(policy.attention, config.num_layers), policy.same});
  }
  CompareAbout& about = result.about;
  about.model = config.name;
  about.format = engine.source().format();
  about.weights = engine.memory().weight_types;
  about.kv_type = engine.memory().kv_type;
  about.device = engine.device_name();
  about.cpu = CpuName();
  about.threads = engine.threads().num_threads();
  about.context = config.context;
  about.num_layers = config.num_layers;
  about.num_q_heads = config.num_q_heads;
  about.num_kv_heads = config.num_kv_heads;
  about.head_dim = config.head_dim;
  about.carries_settings = !config.phsa_settings.empty();
  Runner(engine, runs, callbacks, result).Run();
  about.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

std::optional<LossDifference> CompareLosses(std::span<const float> first, std::span<const float> second) {
  PHSA_CHECK(first.size() == second.size());
  constexpr size_t kPieces = 32;
  constexpr double kStudent = 2.0395;  // 97.5 %, 31 degrees of freedom
  if (first.size() < 2 * kPieces) return std::nullopt;
  double mean = 0;
  std::vector<double> pieces(kPieces);
  for (size_t piece = 0; piece < kPieces; ++piece) {
    const size_t begin = piece * first.size() / kPieces, end = (piece + 1) * first.size() / kPieces;
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += static_cast<double>(first[i]) - static_cast<double>(second[i]);
    mean += sum / static_cast<double>(first.size());
    pieces[piece] = sum / static_cast<double>(end - begin);
  }
  double squares = 0;
  for (const double piece : pieces) squares += (piece - mean) * (piece - mean);
  const double half = kStudent * std::sqrt(squares / (kPieces - 1) / kPieces);
  return LossDifference{mean, {mean - half, mean + half}};
}

}  // namespace phsa
