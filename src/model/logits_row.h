// The logits of one token, wherever they were computed. What a device can answer itself need not leave it.
#ifndef PHSA_MODEL_LOGITS_ROW_H_
#define PHSA_MODEL_LOGITS_ROW_H_

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace phsa {

struct TokenLogit {
  int32_t token;
  float logit;
};

class LogitsRow {
 public:
  virtual ~LogitsRow() = default;

  virtual std::span<const float> All() const = 0;     // [vocab], in host memory
  virtual float operator[](int32_t token) const = 0;  // of one token of the vocabulary
  virtual double LogSumExp() const = 0;  // over the whole vocabulary; not finite where one is NaN or +infinity
  virtual bool IsFinite() const = 0;     // whether all logits are

  // The likeliest tokens among those below `known`, at most `count` of them; the lower one first where two are equal.
  // A logit that is no number is below all others.
  std::vector<TokenLogit> Top(size_t count, int32_t known = std::numeric_limits<int32_t>::max()) const;
  int32_t Likeliest(int32_t known = std::numeric_limits<int32_t>::max()) const { return Top(1, known).front().token; }

 protected:
  // The likeliest tokens of the whole vocabulary, in the order of Top, as far as they are at hand without All(): none,
  // or some number of them. Nothing but the time it takes depends on it.
  virtual std::span<const TokenLogit> Leaders() const { return {}; }
};

// Logits in host memory.
class HostLogitsRow final : public LogitsRow {
 public:
  explicit HostLogitsRow(std::span<const float> logits) : logits_(logits) {}
  std::span<const float> All() const override { return logits_; }
  float operator[](int32_t token) const override { return logits_[static_cast<size_t>(token)]; }
  double LogSumExp() const override;
  bool IsFinite() const override;

 private:
  std::span<const float> logits_;
};

}  // namespace phsa

#endif  // PHSA_MODEL_LOGITS_ROW_H_
