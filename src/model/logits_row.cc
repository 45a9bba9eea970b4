#include "model/logits_row.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "ops/layers.h"

namespace phsa {
namespace {

bool Before(const TokenLogit& a, const TokenLogit& b) {
  if (std::isnan(a.logit) || std::isnan(b.logit)) {
    return std::isnan(a.logit) == std::isnan(b.logit) ? a.token < b.token : std::isnan(b.logit);
  }
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

}  // namespace

std::vector<TokenLogit> LogitsRow::Top(size_t count, int32_t known) const {
  std::vector<TokenLogit> best;
  for (const TokenLogit& leader : Leaders()) {
    if (best.size() == count) return best;
    if (leader.token < known) best.push_back(leader);
  }
  if (best.size() == count) return best;

  best.clear();
  std::span<const float> all = All();
  all = all.first(std::min(all.size(), static_cast<size_t>(known)));
  // A heap with the worst of them in front. Most logits are below it, which comparisons say for many at once: one after
  // the other they would take a fiftieth of a small model's step on sixteen cores.
  constexpr size_t kAtOnce = 64;
  for (size_t begin = 0; begin < all.size(); begin += kAtOnce) {
    const std::span<const float> some = all.subspan(begin, std::min(kAtOnce, all.size() - begin));
    if (best.size() == count && !std::isnan(best.front().logit)) {
      const float worst = best.front().logit;
      int above = 0;  // or no number
      for (const float logit : some) above |= static_cast<int>(!(logit <= worst));
      if (above == 0) continue;
    }
    for (size_t i = 0; i < some.size(); ++i) {
      if (best.size() == count && some[i] <= best.front().logit) continue;
      const TokenLogit one{static_cast<int32_t>(begin + i), some[i]};
      if (best.size() == count) {
        if (!Before(one, best.front())) continue;
        std::pop_heap(best.begin(), best.end(), Before);
        best.pop_back();
      }
      best.push_back(one);
      std::push_heap(best.begin(), best.end(), Before);
    }
  }
  std::sort_heap(best.begin(), best.end(), Before);
  return best;
}

double HostLogitsRow::LogSumExp() const {
  return phsa::LogSumExp(logits_.data(), static_cast<int64_t>(logits_.size()));
}

// By the bits, which the compiler makes a few instructions of: it runs while times are taken.
bool HostLogitsRow::IsFinite() const {
  bool finite = true;
  for (const float value : logits_) finite &= (std::bit_cast<uint32_t>(value) & 0x7f800000u) != 0x7f800000u;
  return finite;
}

}  // namespace phsa
