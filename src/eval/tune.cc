#include "eval/tune.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

#include "attention/policies.h"
#include "base/errors.h"

namespace phsa {
namespace {

constexpr double kProseWeight = 4;
// Losses this close are the same; the cheaper settings win.
constexpr double kSame = 0.002;
// A candidate that is worse than the leader by as many standard errors is out, whichever half it is in.
constexpr double kHopeless = 3;
constexpr int32_t kInits[] = {16, 32, 64, 128};
constexpr int32_t kLeastBlocks = 4;  // init, local, the query's own block and one that is chosen

double Mean(const std::vector<double>& values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// The squared standard error of the mean of first - second.
double SquaredError(const std::vector<double>& first, const std::vector<double>& second) {
  const size_t count = first.size();
  if (count < 2) return std::numeric_limits<double>::infinity();
  const double mean = Mean(first) - Mean(second);
  double sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const double off = first[i] - second[i] - mean;
    sum += off * off;
  }
  return sum / static_cast<double>((count - 1) * count);
}

int32_t BudgetBlocks(const TuneOptions& options) {
  // A share that was meant to be a whole number of blocks is one, whatever its last bit says.
  return static_cast<int32_t>(options.budget * options.length / options.base.block_size + 1e-6);
}

// The settings whose K is what the band leaves of the budget; none: nothing is left, or the band covers the text.
std::optional<Settings> Filled(const TuneOptions& options, Settings settings) {
  const int32_t block = settings.block_size;
  if (settings.init_tokens % block != 0 || settings.local_tokens % block != 0) return std::nullopt;
  const int32_t band = (settings.init_tokens + settings.local_tokens) / block + 1;
  const int32_t candidates = options.length / block - band;
  settings.top_k = std::min({BudgetBlocks(options) - band, options.max_top_k, candidates});
  if (settings.top_k < 1) return std::nullopt;
  return settings;
}

// The cheaper ones first: representatives (of all layers) and survivors are what choosing costs.
auto Cost(const LayerSettings& settings, int32_t num_layers) {
  int64_t parts = int64_t{settings.base.parts} * (num_layers - static_cast<int32_t>(settings.layers.size()));
  for (const auto& [layer, one] : settings.layers) parts += one.parts;
  const int32_t survivors =
      settings.base.survivors == 0 ? std::numeric_limits<int32_t>::max() : settings.base.survivors;
  return std::tuple(parts, settings.base.parts > 1 ? survivors : 0, !settings.layers.empty());
}

class Search {
 public:
  Search(const TuneOptions& options, const TuneCallbacks& callbacks) : options_(options), callbacks_(callbacks) {}

  std::optional<TuneResult> Run() {
    const bool done = Parts() && Band() && Lambda() && Survivors() && Layers() && Final() && Fewer();
    if (!done) return std::nullopt;
    return std::move(result_);
  }

 private:
  struct Candidate {
    LayerSettings attention;
    TuneLosses losses;
    double loss = 0;
    size_t trial = 0;
  };

  bool Fits(const LayerSettings& one) const { return !callbacks_.fits || callbacks_.fits(one); }

  // The settings in each stage's order, without those that the device cannot run and without doubles.
  std::vector<Candidate> Candidates(const std::vector<LayerSettings>& all) const {
    std::vector<Candidate> out;
    for (const LayerSettings& one : all) {
      const bool known =
          std::any_of(out.begin(), out.end(), [&](const Candidate& other) { return other.attention == one; });
      if (!known && Fits(one)) out.push_back({one, {}, 0, 0});
    }
    return out;
  }

  bool Measure(const std::string& stage, int32_t samples, std::vector<Candidate>& candidates) {
    if (callbacks_.round) callbacks_.round(stage, candidates.size(), samples);
    std::vector<LayerSettings> attentions;
    for (const Candidate& one : candidates) attentions.push_back(one.attention);
    std::optional<std::vector<TuneLosses>> losses = callbacks_.measure(attentions, samples);
    if (!losses) return false;
    for (size_t i = 0; i < candidates.size(); ++i) {
      Candidate& one = candidates[i];
      one.losses = std::move((*losses)[i]);
      one.loss = one.losses.Loss();
      TuneTrial& trial = result_.trials[one.trial];
      trial.samples = samples;
      trial.loss = one.loss;
    }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.loss < b.loss; });
    // Of those that are as good as the best one, the cheapest leads.
    const auto end = std::find_if(candidates.begin(), candidates.end(),
                                  [&](const Candidate& one) { return one.loss > candidates.front().loss + kSame; });
    const auto cheapest = std::min_element(candidates.begin(), end, [&](const Candidate& a, const Candidate& b) {
      return Cost(a.attention, options_.num_layers) < Cost(b.attention, options_.num_layers);
    });
    std::rotate(candidates.begin(), cheapest, cheapest + 1);
    return true;
  }

  // Rounds with ever more samples for ever fewer candidates. False: stopped. The last round's candidates stay, the best
  // one first.
  bool Halve(const std::string& stage, const std::vector<int32_t>& rounds, std::vector<Candidate>& candidates) {
    const size_t first_trial = result_.trials.size();
    for (Candidate& one : candidates) {
      one.trial = result_.trials.size();
      result_.trials.push_back({stage, one.attention, 0, 0, false});
    }
    for (size_t i = 0; i < rounds.size(); ++i) {
      if (!Measure(stage, rounds[i], candidates)) return false;
      if (candidates.size() == 1) break;
      if (i + 1 == rounds.size()) break;
      candidates.resize((candidates.size() + 1) / 2);
      const Candidate leader = candidates.front();
      candidates.erase(std::remove_if(candidates.begin() + 1, candidates.end(),
                                      [&](const Candidate& one) {
                                        const TuneDifference worse = ComparePaired(one.losses, leader.losses);
                                        return worse.mean > kHopeless * worse.error;
                                      }),
                       candidates.end());
      if (candidates.size() == 1) break;
    }
    result_.trials[candidates.front().trial].won = true;
    std::stable_sort(result_.trials.begin() + static_cast<std::ptrdiff_t>(first_trial), result_.trials.end(),
                     [](const TuneTrial& a, const TuneTrial& b) {
                       return std::tuple(!a.won, -a.samples, a.loss) < std::tuple(!b.won, -b.samples, b.loss);
                     });
    return true;
  }

  std::vector<int32_t> EarlyRounds() const {
    std::vector<int32_t> rounds;
    for (const int32_t part : {8, 4, 2}) {
      const int32_t samples = std::max(1, options_.samples / part);
      if (rounds.empty() || samples > rounds.back()) rounds.push_back(samples);
    }
    return rounds;
  }

  // The winner leads the next stage.
  bool Stage(const std::string& stage, std::vector<LayerSettings> tried) {
    if (best_) tried.insert(tried.begin(), *best_);
    std::vector<Candidate> candidates = Candidates(tried);
    if (candidates.empty()) {
      ThrowInvalid("tune: the device can attend by none of the settings that the budget holds; give a larger {}",
                   Option{"budget"});
    }
    if (best_ && candidates.size() == 1) return true;
    if (!Halve(stage, EarlyRounds(), candidates)) return false;
    Keep(candidates.front().attention);
    if (candidates.size() > 1) Keep(candidates[1].attention);
    best_ = candidates.front().attention;
    return true;
  }

  void Keep(const LayerSettings& one) {
    if (std::find(finalists_.begin(), finalists_.end(), one) == finalists_.end()) finalists_.push_back(one);
  }

  int32_t BudgetTokens() const { return BudgetBlocks(options_) * options_.base.block_size; }

  // Powers of two, of whole blocks, up to a share of the budget; one block where there are none.
  std::vector<int32_t> Locals(double share) const {
    std::vector<int32_t> out;
    for (int32_t local = 32; local <= share * BudgetTokens(); local *= 2) {
      if (local % options_.base.block_size == 0) out.push_back(local);
    }
    if (out.empty()) out.push_back(options_.base.block_size);
    return out;
  }
  std::vector<int32_t> Inits(double share) const {
    std::vector<int32_t> out;
    for (const int32_t init : kInits) {
      if (init % options_.base.block_size == 0 && init <= share * BudgetTokens()) out.push_back(init);
    }
    if (out.empty()) out.push_back(options_.base.block_size);
    return out;
  }

  void AddFilled(Settings settings, int32_t init, int32_t local, std::vector<LayerSettings>* out) const {
    settings.init_tokens = init;
    settings.local_tokens = local;
    if (const std::optional<Settings> filled = Filled(options_, settings)) out->push_back({*filled, {}});
  }

  // A narrow and a wide band with each number of parts.
  bool Parts() {
    std::vector<LayerSettings> tried;
    for (const int32_t parts : options_.parts) {
      Settings settings = options_.base;
      settings.parts = parts;
      settings.lambda = StartLambda();
      AddFilled(settings, Inits(1.0 / 16).back(), Locals(0.25).back(), &tried);
      AddFilled(settings, Inits(1.0 / 8).back(), Locals(0.6).back(), &tried);
    }
    return Stage("parts", std::move(tried));
  }

  float StartLambda() const {
    // The one nearest to what is best without tuning.
    return *std::min_element(options_.lambdas.begin(), options_.lambdas.end(), [](float a, float b) {
      return std::abs(a - Settings{}.lambda) < std::abs(b - Settings{}.lambda);
    });
  }

  bool Band() {
    std::vector<LayerSettings> tried;
    for (const int32_t init : Inits(0.25)) {
      for (const int32_t local : Locals(0.75)) AddFilled(best_->base, init, local, &tried);
    }
    return Stage("band", std::move(tried));
  }

  bool Lambda() {
    std::vector<LayerSettings> tried;
    for (const float lambda : options_.lambdas) {
      tried.push_back(*best_);
      tried.back().base.lambda = lambda;
    }
    return Stage("lambda", std::move(tried));
  }

  bool Survivors() {
    const Settings& base = best_->base;
    if (base.parts == 1) return true;
    const int32_t candidates =
        options_.length / base.block_size - (base.init_tokens + base.local_tokens) / base.block_size - 1;
    std::vector<LayerSettings> tried;
    for (const int32_t survivors : {32, 64, 128, 256}) {
      if (survivors < base.top_k || survivors >= candidates) continue;
      tried.push_back(*best_);
      tried.back().base.survivors = survivors;
    }
    return Stage("survivors", std::move(tried));
  }

  // Less for one third of the layers and more for the others, and one mean for a third.
  bool Layers() {
    const int32_t layers = options_.num_layers;
    if (!options_.layers || layers < 3 || best_->base.top_k < 2) return true;
    const auto third = [&](int32_t i) { return layers * i / 3; };
    std::vector<LayerSettings> tried;
    for (int32_t poor = 0; poor < 3; ++poor) {
      LayerSettings one = *best_;
      const int32_t top_k = one.base.top_k, less = top_k / 2, poor_layers = third(poor + 1) - third(poor);
      one.base.top_k = std::min(options_.max_top_k, top_k + (top_k - less) * poor_layers / (layers - poor_layers));
      for (int32_t layer = third(poor); layer < third(poor + 1); ++layer) {
        one.layers[layer] = one.base;
        one.layers[layer].top_k = less;
      }
      tried.push_back(std::move(one));
    }
    for (int32_t plain = 0; plain < 3 && best_->base.parts > 1; ++plain) {
      LayerSettings one = *best_;
      for (int32_t layer = third(plain); layer < third(plain + 1); ++layer) {
        one.layers[layer] = one.base;
        one.layers[layer].parts = 1;
      }
      tried.push_back(std::move(one));
    }
    return Stage("layers", std::move(tried));
  }

  bool Final() {
    // The latest ones have been compared with what came before; a few of them are enough.
    constexpr size_t kFinalists = 4;
    std::vector<LayerSettings> tried = {*best_};
    for (size_t i = finalists_.size(); i-- > 0 && tried.size() < kFinalists;) {
      if (finalists_[i] != *best_) tried.push_back(finalists_[i]);
    }
    Settings paper = options_.base;
    const Settings preset = Settings::Preset(options_.length);
    paper.lambda = StartLambda();
    std::vector<LayerSettings> band;
    AddFilled(paper, preset.init_tokens, preset.local_tokens, &band);
    tried.insert(tried.end(), band.begin(), band.end());
    std::vector<Candidate> candidates = Candidates(tried);
    if (!Halve("final", {options_.samples}, candidates)) return false;
    best_ = candidates.front().attention;
    result_.best = *best_;
    return true;
  }

  // What fewer blocks would give.
  bool Fewer() {
    std::vector<LayerSettings> tried;
    for (const int32_t part : {2, 4}) {
      if (result_.best.base.top_k / part < 1) break;
      tried.push_back(result_.best);
      const auto cut = [&](Settings& one) { one.top_k = std::max(1, one.top_k / part); };
      cut(tried.back().base);
      for (auto& [layer, one] : tried.back().layers) cut(one);
    }
    std::vector<Candidate> candidates = Candidates(tried);
    if (candidates.empty()) return true;
    return Halve("fewer", {std::max(1, options_.samples / 2)}, candidates);
  }

  const TuneOptions& options_;
  const TuneCallbacks& callbacks_;
  std::optional<LayerSettings> best_;
  std::vector<LayerSettings> finalists_;
  TuneResult result_;
};

}  // namespace

double TuneLosses::Loss() const {
  double sum = 0;
  for (const std::vector<double>& task : tasks) sum += Mean(task);
  return (tasks.empty() ? 0 : sum / static_cast<double>(tasks.size())) + kProseWeight * Mean(prose);
}

TuneDifference ComparePaired(const TuneLosses& first, const TuneLosses& second) {
  PHSA_CHECK(first.tasks.size() == second.tasks.size() && first.prose.size() == second.prose.size());
  double squared = 0;
  const auto tasks = static_cast<double>(first.tasks.size());
  for (size_t i = 0; i < first.tasks.size(); ++i) {
    PHSA_CHECK(first.tasks[i].size() == second.tasks[i].size());
    squared += SquaredError(first.tasks[i], second.tasks[i]) / (tasks * tasks);
  }
  // One window says nothing of its error; prose varies little.
  if (first.prose.size() > 1) squared += kProseWeight * kProseWeight * SquaredError(first.prose, second.prose);
  return {first.Loss() - second.Loss(), std::sqrt(squared)};
}

double ShareAtEnd(const LayerSettings& settings, int32_t num_layers, int32_t length) {
  double sum = 0;
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    const Settings& one = settings.ForLayer(layer);
    const int64_t tokens = int64_t{one.init_tokens} + one.local_tokens + int64_t{one.block_size} * (one.top_k + 1);
    sum += IsDense(one) ? 1 : std::min(1.0, static_cast<double>(tokens) / length);
  }
  return num_layers > 0 ? sum / num_layers : 1;
}

void CheckTuneOptions(const TuneOptions& options) {
  const int32_t block = options.base.block_size;
  if (!(options.budget > 0 && options.budget < 1)) {
    ThrowInvalid("tune: {} is {:g}; it takes a share of the text's tokens between 0 and 1, such as 0.03",
                 Option{"budget"}, options.budget);
  }
  const int32_t blocks = BudgetBlocks(options), all = options.length / block;
  const auto budget = [](double share) { return Marked(Option{"budget", fmt::format("{:.3g}", share)}); };
  if (blocks < kLeastBlocks) {
    ThrowInvalid(
        "tune: {} of {} tokens is {:.0f} tokens; the smallest settings (init {}, local {}, K 1 and the query's own "
        "block) read {}: give {} or more, or a greater {}",
        budget(options.budget), options.length, options.budget * options.length, block, block, kLeastBlocks * block,
        budget(std::ceil(1000.0 * kLeastBlocks * block / options.length) / 1000), Option{"length"});
  }
  if (blocks >= all) {
    ThrowInvalid("tune: {} of {} tokens is all of them; give a smaller one", budget(options.budget), options.length);
  }
}

std::optional<TuneResult> Tune(const TuneOptions& options, const TuneCallbacks& callbacks) {
  CheckTuneOptions(options);
  return Search(options, callbacks).Run();
}

}  // namespace phsa
