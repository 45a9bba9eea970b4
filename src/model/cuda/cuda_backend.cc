#include "model/cuda/cuda_backend.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "attention/cuda/backend.h"
#include "attention/cuda/cuda.h"
#include "attention/cuda/decode_backward.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "model/cuda/device_weights.h"
#include "model/distinct_settings.h"
#include "model/rope.h"
#include "ops/cuda/linear.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/runtime.h"

namespace phsa::cuda {
namespace {

constexpr size_t kAlignment = 256;
constexpr int32_t kLogitRows = 128;              // logits are made this many rows at a time
constexpr int32_t kLongestText = 1 << 20;        // what the attention's kernels read
constexpr int32_t kLargestTopK = 64;             // likewise
constexpr size_t kPageTables = size_t{1} << 20;  // bytes that a step's page tables have to begin with
constexpr size_t kMaxGraphs = 32;

constexpr const char* kStep = "a step of the decoder";

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Arrays one behind the other in one piece of memory. Without an address only the size is counted.
class Arena {
 public:
  explicit Arena(uint8_t* memory) : memory_(memory) {}
  template <class T>
  T* Take(size_t count) {
    const size_t at = size_;
    size_ += Aligned(count * sizeof(T));
    return memory_ != nullptr ? reinterpret_cast<T*>(memory_ + at) : nullptr;
  }
  size_t size() const { return size_; }

 private:
  uint8_t* memory_;
  size_t size_ = 0;
};

int32_t QWidth(const ModelConfig& config) { return config.num_q_heads * config.head_dim; }
int32_t QkvWidth(const ModelConfig& config) { return (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim; }
int32_t LogitRows(int32_t max_rows) { return std::min(max_rows, kLogitRows); }
// Rows of logits begin at multiples of 256 bytes.
int64_t LogitsStride(const ModelConfig& config) { return (int64_t{config.vocab_size} + 63) / 64 * 64; }

// The activations of a step, all of device memory. [max_rows][…] unless it says something else.
struct Activations {
  float* residual = nullptr;   // [hidden]
  uint16_t* normed = nullptr;  // [hidden]
  // [(heads + 2 · kv heads) · head_dim]. When queries, keys and values are where they belong, the attention's output
  // takes its place, [heads · head_dim].
  uint16_t* qkv = nullptr;
  uint16_t* queries = nullptr;    // [heads · head_dim] in the cache's dtype
  uint16_t* gate_up = nullptr;    // [2 · intermediate]
  uint16_t* activated = nullptr;  // [intermediate]
  float* cos_sin = nullptr;       // [head_dim]
  double* frequencies = nullptr;  // [head_dim / 2], no rows
  float* kept = nullptr;          // [LogitRows][hidden]: rows of the residual stream behind the last attention
  float* logits = nullptr;        // [LogitRows][LogitsStride]
  TopLogits* top = nullptr;       // one of each
  uint8_t* top_workspace = nullptr;
  size_t size = 0;

  Activations() = default;
  Activations(const ModelConfig& config, int32_t max_rows, uint8_t* memory) {
    Arena arena(memory);
    const auto m = static_cast<size_t>(max_rows), logit_rows = static_cast<size_t>(LogitRows(max_rows));
    residual = arena.Take<float>(m * static_cast<size_t>(config.hidden));
    normed = arena.Take<uint16_t>(m * static_cast<size_t>(config.hidden));
    qkv = arena.Take<uint16_t>(m * static_cast<size_t>(QkvWidth(config)));
    queries = arena.Take<uint16_t>(m * static_cast<size_t>(QWidth(config)));
    gate_up = arena.Take<uint16_t>(m * 2 * static_cast<size_t>(config.intermediate));
    activated = arena.Take<uint16_t>(m * static_cast<size_t>(config.intermediate));
    cos_sin = arena.Take<float>(m * static_cast<size_t>(config.head_dim));
    frequencies = arena.Take<double>(static_cast<size_t>(config.head_dim) / 2);
    kept = arena.Take<float>(logit_rows * static_cast<size_t>(config.hidden));
    logits = arena.Take<float>(logit_rows * static_cast<size_t>(LogitsStride(config)));
    top = arena.Take<TopLogits>(m);
    top_workspace = arena.Take<uint8_t>(TopWorkspaceSize(LogitRows(max_rows), config.vocab_size));
    size = arena.size();
  }
};

// What a step brings from the host, in one copy.
struct StepData {
  int64_t* cache_rows = nullptr;                    // [row]
  int64_t* flag_rows = nullptr;                     // [row]
  int32_t *tokens = nullptr, *positions = nullptr;  // [row]
  int32_t* kv_lens = nullptr;                       // [item]
  int32_t* page_table = nullptr;                    // [item][stride]
  int32_t *wanted = nullptr, *asked = nullptr;      // [wanted row]
  uint8_t* flags = nullptr;                         // [row]
  size_t size = 0;

  StepData() = default;
  StepData(size_t rows, size_t items, size_t stride, size_t wanted_rows, uint8_t* memory) {
    Arena arena(memory);
    cache_rows = arena.Take<int64_t>(rows);
    flag_rows = arena.Take<int64_t>(rows);
    tokens = arena.Take<int32_t>(rows);
    positions = arena.Take<int32_t>(rows);
    kv_lens = arena.Take<int32_t>(items);
    page_table = arena.Take<int32_t>(items * stride);
    wanted = arena.Take<int32_t>(wanted_rows);
    asked = arena.Take<int32_t>(wanted_rows);
    flags = arena.Take<uint8_t>(rows);
    size = arena.size();
  }
};

size_t StepBytes(int32_t max_rows) {
  const auto m = static_cast<size_t>(max_rows);
  return StepData(m, m, 0, m, nullptr).size + kPageTables;
}

// What the attention of a step takes: as many queries as there can be, of a text as long as the model reads.
size_t AttentionBytes(const ModelConfig& config, int32_t kv_dtype, int32_t max_rows) {
  Shape shape{};
  shape.dtype = static_cast<Dtype>(kv_dtype);
  shape.num_q_heads = config.num_q_heads;
  shape.num_kv_heads = config.num_kv_heads;
  shape.head_dim = config.head_dim;
  shape.selection_heads = config.num_q_heads;
  shape.top_k = kLargestTopK;
  Batch batch{};
  batch.num_seqs = 1;
  batch.total_q = batch.max_q_len = max_rows;
  batch.max_kv_len = std::min(kLongestText, config.context);
  batch.page_size = kPageTokens;
  const size_t lists = static_cast<size_t>(max_rows) * static_cast<size_t>(config.num_q_heads) * kLargestTopK;
  const size_t representatives = static_cast<size_t>(batch.max_kv_len / kBlockTokens) *
                                 static_cast<size_t>(config.num_kv_heads * config.head_dim) * DtypeSize(kv_dtype);
  return Aligned(SelectWorkspaceSize(shape, batch)) + Aligned(lists * sizeof(int32_t)) + Aligned(representatives) +
         kPageTables;
}

size_t DequantizedBytes(size_t largest_int8) { return Aligned(largest_int8 * sizeof(uint16_t)); }

// A page memory on the device, in the order of the backend's stream.
class DevicePages final : public PageMemory {
 public:
  DevicePages(size_t page_bytes, int32_t num_pages, int32_t device, cudaStream_t stream)
      : page_bytes_(page_bytes),
        device_(device),
        stream_(stream),
        memory_(page_bytes * static_cast<size_t>(num_pages), "the KV cache") {
    Check(cudaMemsetAsync(memory_.data(), 0, memory_.size(), stream), kWhat);
  }
  uint8_t* data() const override { return memory_.data(); }
  bool on_host() const override { return false; }
  void Copy(int32_t from_page, int32_t to_page) override {
    Use();
    Check(cudaMemcpyAsync(At(to_page, 0), At(from_page, 0), page_bytes_, cudaMemcpyDeviceToDevice, stream_), kWhat);
  }
  void Read(int32_t page, size_t offset, std::span<uint8_t> to) const override {
    Use();
    Check(cudaMemcpyAsync(to.data(), At(page, offset), to.size(), cudaMemcpyDeviceToHost, stream_), kWhat);
    Check(cudaStreamSynchronize(stream_), kWhat);
  }
  void Write(int32_t page, size_t offset, std::span<const uint8_t> from) override {
    Use();
    Check(cudaMemcpyAsync(At(page, offset), from.data(), from.size(), cudaMemcpyHostToDevice, stream_), kWhat);
    Check(cudaStreamSynchronize(stream_), kWhat);
  }

 private:
  static constexpr const char* kWhat = "the KV cache";
  void Use() const { Check(cudaSetDevice(device_), kWhat); }
  uint8_t* At(int32_t page, size_t offset) const {
    return memory_.data() + static_cast<size_t>(page) * page_bytes_ + offset;
  }
  size_t page_bytes_;
  int32_t device_;
  cudaStream_t stream_;
  DeviceBuffer memory_;
};

class GraphExec {
 public:
  GraphExec() = default;
  ~GraphExec() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
  }
  GraphExec(GraphExec&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  GraphExec& operator=(GraphExec&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  cudaGraphExec_t get() const { return exec_; }
  cudaGraphExec_t* out() { return &exec_; }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// A decode step of up to `num_seqs` sequences of up to `max_kv_len` tokens, all read in the same way. The first such
// step runs kernel by kernel, so that all of them are loaded; the second one is captured, and replayed from then on.
struct DecodeGraph {
  int32_t num_seqs = 0, max_kv_len = 0;
  LayerSettings settings;
  int64_t page_table_stride() const { return static_cast<int64_t>(PagesFor(static_cast<size_t>(max_kv_len))); }

  std::vector<Plan> plans;  // one for each of the settings that the layers have
  std::vector<size_t> plan_of_layer;
  DeviceBuffer lambdas;  // [plan][kv head]
  bool possible = true;  // for the decode kernels
  size_t workspace = 0;  // that they take
  bool has_run = false;
  GraphExec exec;
  uint64_t last_used = 0;
};

// Numbers of sequences that graphs are made for: 1, 2, 4, 8, then multiples of 8.
int32_t SequencesBucket(int32_t count) {
  if (count <= 8) return static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(count)));
  return (count + 7) / 8 * 8;
}

constexpr int32_t kShortestBucket = 1024;
int32_t LengthBucket(int32_t length) {
  return std::max(kShortestBucket, static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(length))));
}

class CudaBackend final : public ModelBackend {
 public:
  CudaBackend(const ModelSource& source, const BackendOptions& options, std::string name);
  // False where `progress` asked to stop.
  bool Load(const ModelSource& source, WeightsMode mode, ThreadPool& threads, const LoadProgress& progress);

  int32_t device() const override { return PHSA_DEVICE_CUDA; }
  std::string device_name() const override { return name_; }
  int32_t max_rows() const override { return max_rows_; }
  std::unique_ptr<PageMemory> MakePages(size_t page_bytes, int32_t num_pages) override;
  void Begin(const StepRows& rows) override;
  bool RunLayers(const StepRows& rows) override;
  void QueriesKeysValues(int32_t layer) override;
  void Attend(int32_t layer, const StepGroup& group, const Plan& plan, AttentionTrace* trace) override;
  void OutputAndMlp(int32_t layer) override;
  void Logits(const std::function<void(size_t wanted, const LogitsRow& logits)>& use) override;
  void TimeStages(bool apart) override { timed_ = apart; }
  const StepTimes& times() const override { return times_; }

 private:
  friend class DeviceLogitsRow;
  using Result = LinearParams::Result;

  void Use() const { Check(cudaSetDevice(device_), kStep); }
  cudaStream_t stream() const { return stream_.get(); }
  const DeviceLayer& Weights(int32_t layer) const { return weights_.layers[static_cast<size_t>(layer)]; }

  // The step's data: room for it in host memory, and its way to the device.
  StepData HostData(size_t rows, size_t items, size_t stride, size_t wanted);
  void SendData(const StepData& host);
  void FillRows(const StepData& host) const;
  void SendStep();

  // Nobody reads what the last layer gives where no logits are wanted: only its keys, values and representatives.
  bool IsUnread(int32_t layer) const { return layer + 1 == config_.num_layers && rows_->wanted.empty(); }

  // The parts of a step on the first m rows of the activations. `result` is kBf16 or kAddToF32.
  void Multiply(int32_t m, const void* x, int32_t k, const MatrixView& weights, const void* bias, int32_t n, void* y,
                Result result);
  // Of rows of the residual stream, which are normed first, where the result is not kAddToF32.
  void MultiplyFew(int32_t m, const void* x, int32_t k, const float* norm, const MatrixView& weights, const void* bias,
                   int32_t n, void* y, FewRowsParams::Result result);
  // Whether the products of so many rows have kernels of their own; the norms are in them.
  bool AreFew(int32_t m) const {
    return IsForFewRows(m, std::max({config_.hidden, QWidth(config_), config_.intermediate}));
  }
  void Embed(int32_t m);
  void ProjectHeads(int32_t layer, int32_t m);
  // From m rows of what attention gave, into as many rows of the residual stream.
  void FinishLayer(int32_t layer, int32_t m, uint16_t* attended, float* residual);
  void ComputeLogits(int32_t m, TopLogits* top, const int32_t* asked);
  void ComputePiece(size_t piece);

  phsa::ForwardParams AttentionOf(int32_t layer, const StepGroup& group, int64_t page_table_stride);
  void ReserveAttention(size_t bytes);

  DecodeGraph& FindGraph(int32_t num_seqs, int32_t max_kv_len, const StepGroup& group);
  void EnqueueDecode(const DecodeGraph& graph, const StepGroup& group);
  void Capture(DecodeGraph& graph, const StepGroup& group);

  // The time since the last mark belongs to `part`.
  void Mark(double StepTimes::*part);
  void TakeTimes();

  // What LogitsRow asks for.
  float Logit(size_t wanted, int32_t token);
  std::span<const float> AllLogits(size_t wanted);
  const float* LogitsOf(size_t wanted);

  const ModelConfig config_;
  const int32_t kv_dtype_, max_rows_, device_;
  const std::string name_;
  const RopeFrequencies rope_;
  Stream stream_;
  Linear linear_;
  DeviceWeights weights_;
  DeviceBuffer activation_memory_, attention_workspace_, step_memory_;
  DeviceBuffer dequantized_;  // bf16: the int8 matrix that is being multiplied with many rows
  Activations at_;
  PinnedBuffer host_top_;  // TopLogits [max_rows]

  struct Staging {
    PinnedBuffer memory;
    Event sent;
  };
  std::array<Staging, 2> staging_;
  size_t current_staging_ = 0;
  StepData data_;  // of the step, on the device

  const StepRows* rows_ = nullptr;
  bool sent_ = false;     // whether the step's data are on their way
  bool decoded_ = false;  // whether RunLayers ran it, its logits included
  bool kept_ = false;     // whether the last layer went on with the rows alone whose logits are wanted
  static constexpr size_t kNoPiece = ~size_t{0};
  size_t current_piece_ = kNoPiece;  // whose logits are in at_.logits

  std::vector<DecodeGraph> graphs_;
  uint64_t steps_ = 0;

  bool timed_ = false;
  StepTimes times_;
  std::vector<Event> events_;
  std::vector<double StepTimes::*> parts_;  // of the events of this step; null: where it begins

  DeviceBuffer traced_;  // lse, selection and scores of a group, for those who look
  std::vector<uint8_t> traced_queries_;
  std::vector<float> all_logits_;
};

class DeviceLogitsRow final : public LogitsRow {
 public:
  DeviceLogitsRow(CudaBackend& backend, size_t wanted, const TopLogits& top, int32_t asked)
      : backend_(backend), wanted_(wanted), top_(top), asked_(asked) {
    for (int32_t i = 0; i < top.count; ++i) leaders_[static_cast<size_t>(i)] = {top.top[i].token, top.top[i].logit};
  }
  std::span<const float> All() const override { return backend_.AllLogits(wanted_); }
  float operator[](int32_t token) const override {
    if (token == asked_) return top_.asked;
    for (const TokenLogit& leader : Leaders()) {
      if (leader.token == token) return leader.logit;
    }
    return backend_.Logit(wanted_, token);
  }
  double LogSumExp() const override { return top_.log_sum_exp; }
  bool IsFinite() const override { return top_.finite != 0; }

 protected:
  std::span<const TokenLogit> Leaders() const override { return {leaders_.data(), static_cast<size_t>(top_.count)}; }

 private:
  CudaBackend& backend_;
  size_t wanted_;
  const TopLogits& top_;
  int32_t asked_;
  std::array<TokenLogit, kTopLogits> leaders_;
};

CudaBackend::CudaBackend(const ModelSource& source, const BackendOptions& options, std::string name)
    : config_(source.config()),
      kv_dtype_(options.kv_dtype),
      max_rows_(options.max_rows),
      device_(options.device_index),
      name_(std::move(name)),
      rope_(MakeRope(config_)),
      linear_(stream_.get()) {}

bool CudaBackend::Load(const ModelSource& source, WeightsMode mode, ThreadPool& threads, const LoadProgress& progress) {
  std::optional<DeviceWeights> weights = LoadDeviceWeights(source, mode, threads, stream(), progress);
  if (!weights) return false;
  weights_ = std::move(*weights);
  dequantized_ = DeviceBuffer(DequantizedBytes(weights_.largest_int8), "the activations");
  activation_memory_ = DeviceBuffer(Activations(config_, max_rows_, nullptr).size, "the activations");
  at_ = Activations(config_, max_rows_, activation_memory_.data());
  attention_workspace_ = DeviceBuffer(AttentionBytes(config_, kv_dtype_, max_rows_), "the attention's workspace");
  step_memory_ = DeviceBuffer(StepBytes(max_rows_), "the activations");
  for (Staging& staging : staging_) staging.memory = PinnedBuffer(StepBytes(max_rows_));
  host_top_ = PinnedBuffer(static_cast<size_t>(max_rows_) * sizeof(TopLogits));
  Check(cudaMemcpyAsync(at_.frequencies, rope_.frequencies.data(), rope_.frequencies.size() * sizeof(double),
                        cudaMemcpyHostToDevice, stream()),
        kStep);
  Check(cudaStreamSynchronize(stream()), kStep);
  return true;
}

std::unique_ptr<PageMemory> CudaBackend::MakePages(size_t page_bytes, int32_t num_pages) {
  Use();
  Check(cudaStreamSynchronize(stream()), kStep);
  graphs_.clear();  // they have the address of the earlier ones
  return std::make_unique<DevicePages>(page_bytes, num_pages, device_, stream());
}

StepData CudaBackend::HostData(size_t rows, size_t items, size_t stride, size_t wanted) {
  const size_t bytes = StepData(rows, items, stride, wanted, nullptr).size;
  current_staging_ ^= 1;
  Staging& staging = staging_[current_staging_];
  Check(cudaEventSynchronize(staging.sent.get()), kStep);
  if (staging.memory.size() < bytes) {
    staging.memory = {};
    staging.memory = PinnedBuffer(2 * bytes);
  }
  if (step_memory_.size() < bytes) {
    Check(cudaStreamSynchronize(stream()), kStep);
    graphs_.clear();  // they read the step's data where they were
    step_memory_ = {};
    step_memory_ = DeviceBuffer(2 * bytes, "the page tables of a step");
  }
  data_ = StepData(rows, items, stride, wanted, step_memory_.data());
  return {rows, items, stride, wanted, staging.memory.data()};
}

void CudaBackend::SendData(const StepData& host) {
  Staging& staging = staging_[current_staging_];
  Check(cudaMemcpyAsync(step_memory_.data(), staging.memory.data(), host.size, cudaMemcpyHostToDevice, stream()),
        kStep);
  Check(cudaEventRecord(staging.sent.get(), stream()), kStep);
  sent_ = true;
}

void CudaBackend::FillRows(const StepData& host) const {
  const StepRows& rows = *rows_;
  std::ranges::copy(rows.cache_rows, host.cache_rows);
  std::ranges::transform(rows.cache_rows, host.flag_rows, [&](int64_t at) { return rows.cache->FlagByte(at); });
  std::ranges::copy(rows.tokens, host.tokens);
  std::ranges::copy(rows.positions, host.positions);
  std::ranges::copy(rows.kv_lens, host.kv_lens);
  std::ranges::copy(rows.flags, host.flags);
}

void CudaBackend::Begin(const StepRows& rows) {
  Use();
  rows_ = &rows;
  sent_ = decoded_ = kept_ = false;
  current_piece_ = kNoPiece;
  parts_.clear();
  ++steps_;
}

// A step that does not run as a whole.
void CudaBackend::SendStep() {
  const StepRows& rows = *rows_;
  const auto stride = static_cast<size_t>(rows.page_table_stride);
  const StepData host = HostData(static_cast<size_t>(rows.count), rows.q_lens.size(), stride, rows.wanted.size());
  FillRows(host);
  std::ranges::copy(rows.page_table, host.page_table);
  for (size_t i = 0; i < rows.wanted.size(); ++i) {
    host.wanted[i] = rows.wanted[i].row;
    host.asked[i] = rows.wanted[i].next;
  }
  SendData(host);
  Mark(nullptr);
  Embed(rows.count);
  Mark(&StepTimes::other);
}

void CudaBackend::Multiply(int32_t m, const void* x, int32_t k, const MatrixView& weights, const void* bias, int32_t n,
                           void* y, Result result) {
  PHSA_CHECK(result != Result::kF32);
  const SomeRowsParams some{m, n, k, weights, bias, x, y, result == Result::kAddToF32};
  if (IsForSomeRows(some)) {
    Check(MultiplySomeRows(some, stream()), kStep);
    return;
  }
  if (weights.is_int8()) Check(Bf16FromInt8(weights, n, k, dequantized_.data(), stream()), kStep);
  LinearParams p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.x = x;
  p.weights = weights.is_int8() ? dequantized_.data() : weights.data;
  p.bias = bias;
  p.y = y;
  p.y_stride = n;
  p.result = result;
  linear_.Multiply(p);
}

void CudaBackend::MultiplyFew(int32_t m, const void* x, int32_t k, const float* norm, const MatrixView& weights,
                              const void* bias, int32_t n, void* y, FewRowsParams::Result result) {
  FewRowsParams p{};
  p.result = result;
  p.m = m;
  p.n = n;
  p.k = k;
  p.weights = weights;
  p.bias = bias;
  p.x = x;
  p.norm = norm;
  p.eps = config_.rms_eps;
  p.y = y;
  Check(MultiplyFewRows(p, stream()), kStep);
}

void CudaBackend::Embed(int32_t m) {
  RowsParams rows{};
  rows.m = m;
  rows.half = config_.head_dim / 2;
  rows.positions = data_.positions;
  rows.frequencies = at_.frequencies;
  rows.factor = rope_.factor;
  rows.cos_sin = at_.cos_sin;
  rows.flags = data_.flags;
  rows.flag_rows = data_.flag_rows;
  rows.pages = rows_->cache->memory().data();
  Check(PrepareRows(rows, stream()), kStep);
  const NormParams norm{m, config_.hidden, at_.residual, Weights(0).attention_norm, config_.rms_eps, at_.normed};
  Check(EmbedAndNorm(norm, weights_.embedding, data_.tokens, stream()), kStep);
}

void CudaBackend::ProjectHeads(int32_t layer, int32_t m) {
  const DeviceLayer& w = Weights(layer);
  if (AreFew(m)) {
    MultiplyFew(m, at_.residual, config_.hidden, w.attention_norm, w.qkv, w.qkv_bias, QkvWidth(config_), at_.qkv,
                FewRowsParams::Result::kBf16);
  } else {
    Multiply(m, at_.normed, config_.hidden, w.qkv, w.qkv_bias, QkvWidth(config_), at_.qkv, Result::kBf16);
  }
  Mark(&StepTimes::products);
  const KvCache& cache = *rows_->cache;
  const KeyValues kv = cache.View(layer, nullptr, 0, cache.layout());
  HeadsParams heads{};
  heads.m = m;
  heads.num_q_heads = config_.num_q_heads;
  heads.num_kv_heads = config_.num_kv_heads;
  heads.head_dim = config_.head_dim;
  heads.qkv = at_.qkv;
  heads.cos_sin = at_.cos_sin;
  heads.q_norm = w.q_norm;
  heads.k_norm = w.k_norm;
  heads.eps = config_.rms_eps;
  heads.f16 = kv_dtype_ == PHSA_F16;
  heads.queries = at_.queries;
  heads.keys = const_cast<void*>(kv.k);
  heads.values = const_cast<void*>(kv.v);
  heads.cache_rows = data_.cache_rows;
  heads.cache_head_stride = cache.head_stride();
  Check(RopeAndAppend(heads, stream()), kStep);
  Mark(&StepTimes::other);
}

void CudaBackend::QueriesKeysValues(int32_t layer) {
  if (!sent_) SendStep();
  ProjectHeads(layer, rows_->count);
}

phsa::ForwardParams CudaBackend::AttentionOf(int32_t layer, const StepGroup& group, int64_t page_table_stride) {
  const int32_t q_width = QWidth(config_);
  const int64_t first = int64_t{group.first_row} * q_width;
  auto forward = Init<phsa::ForwardParams>();
  forward.q = at_.queries + first;
  forward.q_token_stride = q_width;
  forward.q_head_stride = config_.head_dim;
  forward.kv = rows_->cache->View(layer, data_.page_table + static_cast<int64_t>(group.first_item) * page_table_stride,
                                  page_table_stride, *group.layout);
  forward.out = at_.qkv + first;
  forward.out_token_stride = q_width;
  forward.out_head_stride = config_.head_dim;
  forward.workspace = attention_workspace_.data();
  forward.workspace_size = attention_workspace_.size();
  forward.stream = stream();
  return forward;
}

void CudaBackend::ReserveAttention(size_t bytes) {
  if (attention_workspace_.size() >= bytes) return;
  Check(cudaStreamSynchronize(stream()), kStep);
  graphs_.clear();  // they have its address
  attention_workspace_ = {};
  attention_workspace_ = DeviceBuffer(bytes + bytes / 2, "the attention's workspace");
}

void CudaBackend::Attend(int32_t layer, const StepGroup& group, const Plan& plan, AttentionTrace* trace) {
  ReserveAttention(plan.WorkspaceSize());
  phsa::ForwardParams forward = AttentionOf(layer, group, rows_->page_table_stride);
  if (IsUnread(layer) && trace == nullptr) {
    plan.Represent(forward);
    Mark(&StepTimes::selection);
    return;
  }
  const auto rows = static_cast<size_t>(group.num_rows);
  const size_t slots = rows * static_cast<size_t>(plan.SelectionHeads()) * static_cast<size_t>(plan.SelectionSlots());
  const size_t sums = rows * static_cast<size_t>(config_.num_q_heads);
  // One token a sequence has kernels of its own, which choose and attend together: all of it counts as attention.
  const bool decodes = static_cast<size_t>(group.num_rows) == group.num_items;
  const bool apart = timed_ && slots > 0 && !decodes;
  if (trace != nullptr || apart) {
    const auto lay_out = [&](uint8_t* memory) {
      Arena arena(memory);
      auto* const selection = arena.Take<int32_t>(slots);
      auto* const lse = arena.Take<float>(sums);
      auto* const scores = arena.Take<float>(slots);
      if (memory != nullptr) {
        if (slots > 0) forward.selection = selection;
        if (trace != nullptr) forward.lse = lse;
        if (trace != nullptr && slots > 0) forward.selection_scores = scores;
      }
      return arena.size();
    };
    if (const size_t bytes = lay_out(nullptr); traced_.size() < bytes) {
      Check(cudaStreamSynchronize(stream()), kStep);
      traced_ = {};
      traced_ = DeviceBuffer(bytes, "the attention's scores");
    }
    lay_out(traced_.data());
  }
  if (apart) {
    plan.Represent(forward);
    plan.Select(forward);
    Mark(&StepTimes::selection);
    plan.Attend(forward);
  } else {
    plan.Forward(forward);
  }
  Mark(&StepTimes::attention);
  if (trace == nullptr) return;
  traced_queries_.resize(sums * static_cast<size_t>(config_.head_dim) * DtypeSize(kv_dtype_));
  trace->queries = traced_queries_.data();
  trace->lse.resize(sums);
  trace->selection.resize(slots);
  trace->selection_scores.resize(slots);
  const auto read = [&](void* to, const void* from, size_t bytes) {
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream()), kStep);
  };
  read(traced_queries_.data(), forward.q, traced_queries_.size());
  read(trace->lse.data(), forward.lse, sums * sizeof(float));
  if (slots > 0) {
    read(trace->selection.data(), forward.selection, slots * sizeof(int32_t));
    read(trace->selection_scores.data(), forward.selection_scores, slots * sizeof(float));
  }
  Check(cudaStreamSynchronize(stream()), kStep);
}

void CudaBackend::FinishLayer(int32_t layer, int32_t m, uint16_t* attended, float* residual) {
  const DeviceLayer& w = Weights(layer);
  const int32_t hidden = config_.hidden, intermediate = config_.intermediate, q_width = QWidth(config_);
  if (kv_dtype_ == PHSA_F16) Check(Bf16FromF16(attended, int64_t{m} * q_width, stream()), kStep);
  if (AreFew(m)) {
    using Few = FewRowsParams::Result;
    MultiplyFew(m, attended, q_width, nullptr, w.o, w.o_bias, hidden, residual, Few::kAddToF32);
    MultiplyFew(m, residual, hidden, w.mlp_norm, w.gate_up, w.gate_up_bias, intermediate, at_.activated, Few::kSiluMul);
    MultiplyFew(m, at_.activated, intermediate, nullptr, w.down, w.down_bias, hidden, residual, Few::kAddToF32);
    Mark(&StepTimes::products);
    return;
  }
  Multiply(m, attended, q_width, w.o, w.o_bias, hidden, residual, Result::kAddToF32);
  Mark(&StepTimes::products);
  Check(RmsNorm({m, hidden, residual, w.mlp_norm, config_.rms_eps, at_.normed}, stream()), kStep);
  Mark(&StepTimes::other);
  Multiply(m, at_.normed, hidden, w.gate_up, w.gate_up_bias, 2 * intermediate, at_.gate_up, Result::kBf16);
  Mark(&StepTimes::products);
  Check(SiluMul(at_.gate_up, m, intermediate, at_.activated, stream()), kStep);
  Mark(&StepTimes::other);
  Multiply(m, at_.activated, intermediate, w.down, w.down_bias, hidden, residual, Result::kAddToF32);
  Mark(&StepTimes::products);
  // The last norm is that of the rows whose logits are wanted.
  if (layer + 1 == config_.num_layers) return;
  Check(RmsNorm({m, hidden, residual, Weights(layer + 1).attention_norm, config_.rms_eps, at_.normed}, stream()),
        kStep);
  Mark(&StepTimes::other);
}

void CudaBackend::OutputAndMlp(int32_t layer) {
  if (IsUnread(layer)) return;
  const size_t wanted = rows_->wanted.size();
  const bool last = layer + 1 == config_.num_layers;
  if (!last || wanted > static_cast<size_t>(LogitRows(max_rows_)) || wanted >= static_cast<size_t>(rows_->count)) {
    FinishLayer(layer, rows_->count, at_.qkv, at_.residual);
    return;
  }
  // No other row is read any more.
  const auto m = static_cast<int32_t>(wanted);
  const KeepParams keep{m, config_.hidden, QWidth(config_), data_.wanted, at_.residual, at_.qkv, at_.kept, at_.queries};
  Check(KeepRows(keep, stream()), kStep);
  Mark(&StepTimes::other);
  FinishLayer(layer, m, at_.queries, at_.kept);
  kept_ = true;
}

// Of the first m rows of at_.normed.
void CudaBackend::ComputeLogits(int32_t m, TopLogits* top, const int32_t* asked) {
  LinearParams p;
  p.m = m;
  p.n = config_.vocab_size;
  p.k = config_.hidden;
  p.x = at_.normed;
  p.weights = weights_.logits;
  p.y = at_.logits;
  p.y_stride = LogitsStride(config_);
  p.result = Result::kF32;
  linear_.Multiply(p);
  Mark(&StepTimes::products);
  TopParams find{};
  find.m = m;
  find.vocab = config_.vocab_size;
  find.logits = at_.logits;
  find.logits_stride = LogitsStride(config_);
  find.asked = asked;
  find.out = top;
  find.workspace = at_.top_workspace;
  Check(FindTop(find, stream()), kStep);
  Mark(&StepTimes::other);
}

// The logits of the wanted rows from piece · LogitRows on.
void CudaBackend::ComputePiece(size_t piece) {
  const size_t first = piece * static_cast<size_t>(LogitRows(max_rows_));
  const auto count =
      static_cast<int32_t>(std::min<size_t>(static_cast<size_t>(LogitRows(max_rows_)), rows_->wanted.size() - first));
  NormParams norm{count, config_.hidden, at_.residual, weights_.final_norm, config_.rms_eps, at_.normed};
  if (kept_) {
    norm.x = at_.kept;  // all wanted rows are in one piece
    Check(RmsNorm(norm, stream()), kStep);
  } else {
    Check(RmsNormOfRows(norm, data_.wanted + first, stream()), kStep);
  }
  Mark(&StepTimes::other);
  ComputeLogits(count, at_.top + first, data_.asked + first);
  current_piece_ = piece;
}

void CudaBackend::Logits(const std::function<void(size_t wanted, const LogitsRow& logits)>& use) {
  const StepRows& rows = *rows_;
  const size_t count = rows.wanted.size();
  if (!decoded_) {
    for (size_t piece = 0; piece * static_cast<size_t>(LogitRows(max_rows_)) < count; ++piece) ComputePiece(piece);
  }
  // A step whose logits nobody wants may still be under way when the next one is packed.
  if (count > 0) {
    const size_t results = decoded_ ? static_cast<size_t>(rows.count) : count;
    Check(cudaMemcpyAsync(host_top_.data(), at_.top, results * sizeof(TopLogits), cudaMemcpyDeviceToHost, stream()),
          kStep);
  }
  if (count > 0 || timed_) Check(cudaStreamSynchronize(stream()), kStep);
  if (timed_) TakeTimes();
  const auto* const top = reinterpret_cast<const TopLogits*>(host_top_.data());
  for (size_t i = 0; i < count; ++i) {
    use(i, decoded_ ? DeviceLogitsRow(*this, i, top[rows.wanted[i].row], -1)
                    : DeviceLogitsRow(*this, i, top[i], rows.wanted[i].next));
  }
}

const float* CudaBackend::LogitsOf(size_t wanted) {
  if (decoded_) return at_.logits + rows_->wanted[wanted].row * LogitsStride(config_);
  const auto rows = static_cast<size_t>(LogitRows(max_rows_));
  if (current_piece_ != wanted / rows) ComputePiece(wanted / rows);  // a later piece has taken its place
  return at_.logits + static_cast<int64_t>(wanted % rows) * LogitsStride(config_);
}

float CudaBackend::Logit(size_t wanted, int32_t token) {
  float logit = 0;
  Check(cudaMemcpyAsync(&logit, LogitsOf(wanted) + token, sizeof(logit), cudaMemcpyDeviceToHost, stream()), kStep);
  Check(cudaStreamSynchronize(stream()), kStep);
  return logit;
}

std::span<const float> CudaBackend::AllLogits(size_t wanted) {
  all_logits_.resize(static_cast<size_t>(config_.vocab_size));
  Check(cudaMemcpyAsync(all_logits_.data(), LogitsOf(wanted), all_logits_.size() * sizeof(float),
                        cudaMemcpyDeviceToHost, stream()),
        kStep);
  Check(cudaStreamSynchronize(stream()), kStep);
  return all_logits_;
}

void CudaBackend::Mark(double StepTimes::*part) {
  if (!timed_) return;
  if (events_.size() == parts_.size()) events_.emplace_back(/*timed=*/true);
  Check(cudaEventRecord(events_[parts_.size()].get(), stream()), kStep);
  parts_.push_back(part);
}

void CudaBackend::TakeTimes() {
  for (size_t i = 1; i < parts_.size(); ++i) {
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, events_[i - 1].get(), events_[i].get()), kStep);
    times_.*parts_[i] += static_cast<double>(milliseconds) * 1e-3;
  }
}

// The graph for such a step, made where there is none.
DecodeGraph& CudaBackend::FindGraph(int32_t num_seqs, int32_t max_kv_len, const StepGroup& group) {
  const LayerSettings& settings = *group.settings;
  for (DecodeGraph& graph : graphs_) {
    if (graph.num_seqs == num_seqs && graph.max_kv_len == max_kv_len && graph.settings == settings) {
      graph.last_used = steps_;
      return graph;
    }
  }
  DecodeGraph made;
  made.num_seqs = num_seqs;
  made.max_kv_len = max_kv_len;
  made.settings = settings;
  made.last_used = steps_;
  const std::vector<int32_t> q_lens(static_cast<size_t>(num_seqs), 1), kv_lens(q_lens.size(), max_kv_len);
  std::vector<float> lambdas;
  DistinctSettings distinct(made.settings, config_);
  for (size_t i = 0; i < distinct.all.size(); ++i) {
    const auto first = std::ranges::find(distinct.of_layer, i);  // a layer that has them
    PlanDesc desc = PagedPlan(config_, *distinct.all[i], kv_dtype_);
    desc.num_seqs = num_seqs;
    desc.q_lens = q_lens.data();
    desc.kv_lens = kv_lens.data();
    desc.device = PHSA_DEVICE_CUDA;
    const Plan& plan = made.plans.emplace_back(desc);
    lambdas.insert(lambdas.end(), plan.impl().lambda.begin(), plan.impl().lambda.end());
    DecodeParams decode;
    const auto layer = static_cast<int32_t>(first - distinct.of_layer.begin());
    const phsa::ForwardParams forward = AttentionOf(layer, group, made.page_table_stride());
    made.possible = made.possible && PrepareDecode(plan.impl(), forward, nullptr, nullptr, &decode);
    if (made.possible) made.workspace = std::max(made.workspace, DecodeWorkspaceSize(decode));
  }
  made.plan_of_layer = std::move(distinct.of_layer);
  made.lambdas = DeviceBuffer(lambdas.size() * sizeof(float), kStep);
  Check(Upload(lambdas.data(), lambdas.size() * sizeof(float), made.lambdas.data(), stream()), kStep);
  if (graphs_.size() == kMaxGraphs) {
    const auto oldest = std::ranges::min_element(graphs_, {}, &DecodeGraph::last_used);
    Check(cudaStreamSynchronize(stream()), kStep);
    *oldest = std::move(made);
    return *oldest;
  }
  return graphs_.emplace_back(std::move(made));
}

void CudaBackend::EnqueueDecode(const DecodeGraph& graph, const StepGroup& group) {
  const int32_t m = graph.num_seqs;
  Embed(m);
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    ProjectHeads(layer, m);
    const size_t planned = graph.plan_of_layer[static_cast<size_t>(layer)];
    const float* const lambda = graph.lambdas.as<float>() + planned * static_cast<size_t>(config_.num_kv_heads);
    const phsa::ForwardParams forward = AttentionOf(layer, group, graph.page_table_stride());
    DecodeParams decode;
    PHSA_CHECK(PrepareDecode(graph.plans[planned].impl(), forward, data_.kv_lens, lambda, &decode));
    Check(Decode(decode, stream()), kStep);
    FinishLayer(layer, m, at_.qkv, at_.residual);
  }
  const NormParams norm{m, config_.hidden, at_.residual, weights_.final_norm, config_.rms_eps, at_.normed};
  Check(RmsNorm(norm, stream()), kStep);
  ComputeLogits(m, at_.top, data_.asked);
}

void CudaBackend::Capture(DecodeGraph& graph, const StepGroup& group) {
  cudaGraph_t captured = nullptr;
  Check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), kStep);
  try {
    EnqueueDecode(graph, group);
  } catch (...) {
    cudaStreamEndCapture(stream(), &captured);
    if (captured != nullptr) cudaGraphDestroy(captured);
    throw;
  }
  Check(cudaStreamEndCapture(stream(), &captured), kStep);
  const cudaError_t error = cudaGraphInstantiate(graph.exec.out(), captured, 0);
  cudaGraphDestroy(captured);
  Check(error, kStep);
}

bool CudaBackend::RunLayers(const StepRows& rows) {
  const bool decodes = std::ranges::all_of(rows.q_lens, [](int32_t length) { return length == 1; });
  if (timed_ || !decodes || rows.groups.size() != 1 || SequencesBucket(rows.count) > LogitRows(max_rows_)) return false;
  const int32_t num_seqs = SequencesBucket(rows.count);
  const int32_t max_kv_len = LengthBucket(*std::ranges::max_element(rows.kv_lens));
  const auto seqs = static_cast<size_t>(num_seqs), used = static_cast<size_t>(rows.count);
  const size_t stride = PagesFor(static_cast<size_t>(max_kv_len));
  const StepData host = HostData(seqs, seqs, stride, seqs);
  const StepGroup& group = rows.groups.front();
  DecodeGraph* graph = &FindGraph(num_seqs, max_kv_len, group);
  if (!graph->possible) return false;
  if (graph->workspace > attention_workspace_.size()) {
    ReserveAttention(graph->workspace);
    graph = &FindGraph(num_seqs, max_kv_len, group);
  }
  FillRows(host);
  // Sequences of nothing: nothing is written for them, and nothing read.
  for (size_t i = used; i < seqs; ++i) {
    host.cache_rows[i] = host.flag_rows[i] = -1;
    host.tokens[i] = host.positions[i] = host.kv_lens[i] = 0;
    host.flags[i] = 0;
  }
  std::fill_n(host.page_table, seqs * stride, 0);
  for (size_t i = 0; i < used; ++i) {
    const auto pages = static_cast<size_t>(rows.page_table_stride);
    std::copy_n(rows.page_table.data() + i * pages, std::min(pages, stride), host.page_table + i * stride);
  }
  std::fill_n(host.asked, seqs, -1);
  SendData(host);
  if (!graph->has_run) {
    EnqueueDecode(*graph, group);
    graph->has_run = true;
  } else {
    if (graph->exec.get() == nullptr) Capture(*graph, group);
    Check(cudaGraphLaunch(graph->exec.get(), stream()), kStep);
  }
  decoded_ = true;
  return true;
}

}  // namespace

std::vector<Device> Devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  std::vector<Device> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    Check(cudaGetDeviceProperties(&properties, i), "the GPU");
    devices.push_back({properties.name, properties.totalGlobalMem});
  }
  return devices;
}

std::string Unavailable() {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count == 0) error = cudaErrorNoDevice;
  if (error != cudaSuccess) {
    cudaGetLastError();
    if (error != cudaErrorInsufficientDriver) return fmt::format("CUDA finds no GPU: {}", cudaGetErrorString(error));
    return fmt::format("CUDA finds no GPU: there is no NVIDIA driver, or one that is too old for CUDA {}",
                       CUDART_VERSION / 1000);
  }
  error = KernelsRun();
  if (error != cudaSuccess) {
    cudaGetLastError();
    return fmt::format(
        "this build has no kernels for the GPU ({}); build with its architecture in PHSA_CUDA_ARCHITECTURES",
        cudaGetErrorString(error));
  }
  return LinearUnavailable();
}

std::string Unsupported(const ModelSource& source, const BackendOptions& options) {
  const ModelConfig& config = source.config();
  if (config.head_dim != 64 && config.head_dim != 128) {
    return fmt::format("heads of {} elements; the GPU takes 64 and 128", config.head_dim);
  }
  if (config.num_q_heads / config.num_kv_heads > 16) {
    return fmt::format("{} query heads a KV head; the GPU takes up to 16", config.num_q_heads / config.num_kv_heads);
  }
  if (config.hidden % 8 != 0 || config.intermediate % 8 != 0) {
    return fmt::format("rows of {} and {} elements; the GPU takes multiples of 8", config.hidden, config.intermediate);
  }
  if (config.vocab_size > kMaxTopVocab) {
    return fmt::format("a vocabulary of {}; the GPU takes up to {}", config.vocab_size, kMaxTopVocab);
  }
  if (options.weights == WeightsMode::kF32) {
    return fmt::format("--weights {}; the GPU takes auto, bf16 and int8", Name(options.weights));
  }
  if (options.weights == WeightsMode::kInt8 &&
      (config.hidden % kWeightGroup != 0 || config.intermediate % kWeightGroup != 0)) {
    return fmt::format(
        "--weights int8 with rows of {} and {} elements; the GPU takes multiples of {}, or --weights bf16",
        config.hidden, config.intermediate, kWeightGroup);
  }
  if (options.kv_dtype != PHSA_BF16 && options.kv_dtype != PHSA_F16) {
    return fmt::format("--kv-type {}; the GPU takes bf16 and f16", DtypeName(options.kv_dtype));
  }
  return "";
}

BackendSizes Sizes(const ModelSource& source, const BackendOptions& options) {
  const ModelConfig& config = source.config();
  BackendSizes sizes;
  const WeightLayout weights(source, options.weights, nullptr);
  sizes.weights = weights.bytes;
  sizes.weight_types = options.weights == WeightsMode::kInt8 ? "bf16, int8" : "bf16";
  sizes.workspace = Activations(config, options.max_rows, nullptr).size +
                    AttentionBytes(config, options.kv_dtype, options.max_rows) + StepBytes(options.max_rows) +
                    Linear::kWorkspace + DequantizedBytes(weights.largest_int8);
  size_t available = 0, total = 0;
  Check(cudaSetDevice(options.device_index), "the GPU");
  Check(cudaMemGetInfo(&available, &total), "the GPU");
  sizes.available = available;
  return sizes;
}

std::unique_ptr<ModelBackend> MakeBackend(const ModelSource& source, const BackendOptions& options, ThreadPool& threads,
                                          const LoadProgress& progress) {
  if (const std::string why = Unavailable(); !why.empty()) Throw(PHSA_UNSUPPORTED, "{}", why);
  if (const std::string why = Unsupported(source, options); !why.empty()) Throw(PHSA_UNSUPPORTED, "{}", why);
  const std::vector<Device> devices = Devices();
  if (options.device_index < 0 || static_cast<size_t>(options.device_index) >= devices.size()) {
    ThrowInvalid("--device is cuda:{}; this machine has {} GPUs, the first one is cuda:0", options.device_index,
                 devices.size());
  }
  Check(cudaSetDevice(options.device_index), "the GPU");
  auto backend =
      std::make_unique<CudaBackend>(source, options, devices[static_cast<size_t>(options.device_index)].name);
  if (!backend->Load(source, options.weights, threads, progress)) return nullptr;
  return backend;
}

}  // namespace phsa::cuda
