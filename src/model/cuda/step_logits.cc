#include "model/cuda/step_logits.h"

#include <algorithm>
#include <array>

namespace phsa::cuda {
namespace {

class DeviceLogitsRow final : public LogitsRow {
 public:
  DeviceLogitsRow(StepLogits& logits, size_t wanted, const TopLogits& top, int32_t asked)
      : logits_(logits), wanted_(wanted), top_(top), asked_(asked) {
    for (int32_t i = 0; i < top.count; ++i) leaders_[static_cast<size_t>(i)] = {top.top[i].token, top.top[i].logit};
  }
  std::span<const float> All() const override { return logits_.All(wanted_); }
  float operator[](int32_t token) const override {
    if (token == asked_) return top_.asked;
    for (const TokenLogit& leader : Leaders()) {
      if (leader.token == token) return leader.logit;
    }
    return logits_.Logit(wanted_, token);
  }
  double LogSumExp() const override { return top_.log_sum_exp; }
  bool IsFinite() const override { return top_.finite != 0; }

 protected:
  std::span<const TokenLogit> Leaders() const override { return {leaders_.data(), static_cast<size_t>(top_.count)}; }

 private:
  StepLogits& logits_;
  size_t wanted_;
  const TopLogits& top_;
  int32_t asked_;
  std::array<TokenLogit, kTopLogits> leaders_;
};

}  // namespace

StepLogits::StepLogits(const ModelConfig& config, int32_t max_rows, LayerRunner& runner, StepTimer& timer,
                       cudaStream_t stream)
    : config_(config),
      piece_rows_(static_cast<size_t>(LogitRows(max_rows))),
      runner_(runner),
      timer_(timer),
      stream_(stream),
      host_top_(static_cast<size_t>(max_rows) * sizeof(TopLogits)) {}

void StepLogits::Begin(const StepRows& rows) {
  rows_ = &rows;
  kept_ = decoded_ = false;
  current_piece_ = kNoPiece;
}

void StepLogits::ComputePiece(size_t piece) {
  const size_t first = piece * piece_rows_;
  const auto count = static_cast<int32_t>(std::min(piece_rows_, rows_->wanted.size() - first));
  if (kept_) {
    runner_.FinalNorm(count, runner_.at().kept);  // all wanted rows are in one piece
  } else {
    runner_.FinalNormOfRows(count, data_.wanted + first);
  }
  runner_.ComputeLogits(count, runner_.at().top + first, data_.asked + first);
  current_piece_ = piece;
}

void StepLogits::Use(const StepData& data, const std::function<void(size_t wanted, const LogitsRow& logits)>& use) {
  data_ = data;
  const std::vector<StepRows::Wanted>& wanted = rows_->wanted;
  const size_t count = wanted.size();
  if (!decoded_) {
    for (size_t piece = 0; piece * piece_rows_ < count; ++piece) ComputePiece(piece);
  }
  // A step whose logits nobody wants may still be under way when the next one is packed.
  if (count > 0) {
    const size_t results = decoded_ ? static_cast<size_t>(rows_->count) : count;
    Check(cudaMemcpyAsync(host_top_.data(), runner_.at().top, results * sizeof(TopLogits), cudaMemcpyDeviceToHost,
                          stream_),
          kStep);
  }
  if (count > 0 || timer_.timed()) Check(cudaStreamSynchronize(stream_), kStep);
  if (timer_.timed()) timer_.Take();
  const auto* const top = reinterpret_cast<const TopLogits*>(host_top_.data());
  for (size_t i = 0; i < count; ++i) {
    use(i, decoded_ ? DeviceLogitsRow(*this, i, top[wanted[i].row], -1)
                    : DeviceLogitsRow(*this, i, top[i], wanted[i].next));
  }
}

const float* StepLogits::Row(size_t wanted) {
  const float* const logits = runner_.at().logits;
  if (decoded_) return logits + rows_->wanted[wanted].row * LogitsStride(config_);
  if (current_piece_ != wanted / piece_rows_) ComputePiece(wanted / piece_rows_);  // a later one has taken its place
  return logits + static_cast<int64_t>(wanted % piece_rows_) * LogitsStride(config_);
}

float StepLogits::Logit(size_t wanted, int32_t token) {
  float logit = 0;
  Check(cudaMemcpyAsync(&logit, Row(wanted) + token, sizeof(logit), cudaMemcpyDeviceToHost, stream_), kStep);
  Check(cudaStreamSynchronize(stream_), kStep);
  return logit;
}

std::span<const float> StepLogits::All(size_t wanted) {
  all_.resize(static_cast<size_t>(config_.vocab_size));
  Check(cudaMemcpyAsync(all_.data(), Row(wanted), all_.size() * sizeof(float), cudaMemcpyDeviceToHost, stream_), kStep);
  Check(cudaStreamSynchronize(stream_), kStep);
  return all_;
}

}  // namespace phsa::cuda
