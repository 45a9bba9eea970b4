#include "model/cuda/cuda_backend.h"

#include <algorithm>
#include <utility>

#include "attention/cuda/backend.h"
#include "attention/cuda/cuda.h"
#include "base/carver.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "model/cuda/decode_graphs.h"
#include "model/cuda/device_pages.h"
#include "model/cuda/step_logits.h"
#include "model/distinct_settings.h"

namespace phsa::cuda {
namespace {

constexpr int32_t kLongestText = 1 << 20;  // what the attention's kernels read
constexpr int32_t kLargestTopK = 64;       // likewise

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
  constexpr size_t kTables = size_t{1} << 20;  // what a plan copies in front of it
  return Aligned(SelectWorkspaceSize(shape, batch), kDeviceAlignment) +
         Aligned(lists * sizeof(int32_t), kDeviceAlignment) + Aligned(representatives, kDeviceAlignment) + kTables;
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
  void TimeStages(bool apart) override { timer_.TimeStages(apart); }
  const StepTimes& times() const override { return timer_.times(); }

 private:
  void Use() const { Check(cudaSetDevice(device_), kStep); }
  cudaStream_t stream() const { return stream_.get(); }
  StepData TakeData(size_t rows, size_t items, size_t stride, size_t wanted) {
    return staging_.Take(rows, items, stride, wanted, [this] { graphs_.Clear(); });
  }
  // A step that does not run as a whole.
  void SendStep();

  // What the last layer gives is not needed where no logits are wanted: only its keys, values and representatives.
  bool IsUnread(int32_t layer) const { return layer + 1 == config_.num_layers && rows_->wanted.empty(); }

  phsa::ForwardParams AttentionOf(int32_t layer, const StepGroup& group, int64_t page_table_stride);
  void ReserveAttention(size_t bytes);

  void MakeGraph(const StepGroup& group, DecodeGraph& graph);
  void EnqueueDecode(const DecodeGraph& graph, const StepGroup& group);

  const ModelConfig config_;
  const int32_t kv_dtype_, max_rows_, device_;
  const std::string name_;
  Stream stream_;
  StepTimer timer_;
  LayerRunner runner_;
  StepLogits logits_;
  StepStaging staging_;
  DecodeGraphs graphs_;
  DeviceBuffer attention_workspace_;

  const StepRows* rows_ = nullptr;
  bool sent_ = false;  // whether the step's data are on their way

  DeviceBuffer traced_;  // lse, selection and scores of a group, for those who look
  std::vector<uint8_t> traced_queries_;
};

CudaBackend::CudaBackend(const ModelSource& source, const BackendOptions& options, std::string name)
    : config_(source.config()),
      kv_dtype_(options.kv_dtype),
      max_rows_(options.max_rows),
      device_(options.device_index),
      name_(std::move(name)),
      timer_(stream()),
      runner_(config_, kv_dtype_, max_rows_, timer_, stream()),
      logits_(config_, max_rows_, runner_, timer_, stream()),
      staging_(max_rows_, stream()),
      graphs_(stream()) {}

bool CudaBackend::Load(const ModelSource& source, WeightsMode mode, ThreadPool& threads, const LoadProgress& progress) {
  std::optional<DeviceWeights> weights = LoadDeviceWeights(source, mode, threads, stream(), progress);
  if (!weights) return false;
  runner_.Load(std::move(*weights));
  attention_workspace_ = DeviceBuffer(AttentionBytes(config_, kv_dtype_, max_rows_), "the attention's workspace");
  return true;
}

std::unique_ptr<PageMemory> CudaBackend::MakePages(size_t page_bytes, int32_t num_pages) {
  Use();
  Check(cudaStreamSynchronize(stream()), kStep);
  graphs_.Clear();  // they have the address of the earlier ones
  return std::make_unique<DevicePages>(page_bytes, num_pages, device_, stream());
}

void CudaBackend::Begin(const StepRows& rows) {
  Use();
  rows_ = &rows;
  sent_ = false;
  logits_.Begin(rows);
  timer_.Begin();
}

void CudaBackend::SendStep() {
  const StepRows& rows = *rows_;
  const auto stride = static_cast<size_t>(rows.page_table_stride);
  const StepData host = TakeData(static_cast<size_t>(rows.count), rows.q_lens.size(), stride, rows.wanted.size());
  FillRows(rows, host);
  std::ranges::copy(rows.page_table, host.page_table);
  for (size_t i = 0; i < rows.wanted.size(); ++i) {
    host.wanted[i] = rows.wanted[i].row;
    host.asked[i] = rows.wanted[i].next;
  }
  staging_.Send();
  sent_ = true;
  timer_.Mark(nullptr);
  runner_.Embed(staging_.on_device(), *rows.cache, rows.count);
  timer_.Mark(&StepTimes::other);
}

void CudaBackend::QueriesKeysValues(int32_t layer) {
  if (!sent_) SendStep();
  runner_.ProjectHeads(layer, staging_.on_device(), *rows_->cache, rows_->count);
}

phsa::ForwardParams CudaBackend::AttentionOf(int32_t layer, const StepGroup& group, int64_t page_table_stride) {
  const int32_t q_width = QWidth(config_);
  const int64_t first = int64_t{group.first_row} * q_width;
  auto forward = Init<phsa::ForwardParams>();
  forward.q = runner_.at().queries + first;
  forward.q_token_stride = q_width;
  forward.q_head_stride = config_.head_dim;
  forward.kv = rows_->cache->View(
      layer, staging_.on_device().page_table + static_cast<int64_t>(group.first_item) * page_table_stride,
      page_table_stride, *group.layout);
  forward.out = runner_.at().qkv + first;
  forward.out_token_stride = q_width;
  forward.out_head_stride = config_.head_dim;
  forward.workspace = attention_workspace_.data();
  forward.workspace_size = attention_workspace_.size();
  forward.stream = stream();
  forward.sinks = runner_.weights().layers[static_cast<size_t>(layer)].sinks;
  return forward;
}

void CudaBackend::ReserveAttention(size_t bytes) {
  if (attention_workspace_.size() >= bytes) return;
  Check(cudaStreamSynchronize(stream()), kStep);
  graphs_.Clear();  // they have its address
  attention_workspace_ = {};
  attention_workspace_ = DeviceBuffer(bytes + bytes / 2, "the attention's workspace");
}

void CudaBackend::Attend(int32_t layer, const StepGroup& group, const Plan& plan, AttentionTrace* trace) {
  ReserveAttention(plan.WorkspaceSize());
  phsa::ForwardParams forward = AttentionOf(layer, group, rows_->page_table_stride);
  if (IsUnread(layer) && trace == nullptr) {
    plan.Represent(forward);
    timer_.Mark(&StepTimes::selection);
    return;
  }
  const auto rows = static_cast<size_t>(group.num_rows);
  const size_t slots = rows * static_cast<size_t>(plan.SelectionHeads()) * static_cast<size_t>(plan.SelectionSlots());
  const size_t sums = rows * static_cast<size_t>(config_.num_q_heads);
  // One token a sequence has kernels of its own, which choose and attend together: all of it counts as attention.
  const bool decodes = static_cast<size_t>(group.num_rows) == group.num_items;
  const bool apart = timer_.timed() && slots > 0 && !decodes;
  if (trace != nullptr || apart) {
    const auto lay_out = [&](uint8_t* memory) {
      Carver carver(memory, kDeviceAlignment);
      auto* const selection = carver.Take<int32_t>(slots);
      auto* const lse = carver.Take<float>(sums);
      auto* const scores = carver.Take<float>(slots);
      if (memory != nullptr) {
        if (slots > 0) forward.selection = selection;
        if (trace != nullptr) forward.lse = lse;
        if (trace != nullptr && slots > 0) forward.selection_scores = scores;
      }
      return carver.size();
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
    timer_.Mark(&StepTimes::selection);
    plan.Attend(forward);
  } else {
    plan.Forward(forward);
  }
  timer_.Mark(&StepTimes::attention);
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

void CudaBackend::OutputAndMlp(int32_t layer) {
  if (IsUnread(layer)) return;
  const Activations& at = runner_.at();
  const size_t wanted = rows_->wanted.size();
  const bool last = layer + 1 == config_.num_layers;
  if (!last || wanted > static_cast<size_t>(LogitRows(max_rows_)) || wanted >= static_cast<size_t>(rows_->count)) {
    runner_.Finish(layer, rows_->count, at.qkv, at.residual);
    return;
  }
  // No other row is read any more.
  const auto m = static_cast<int32_t>(wanted);
  const int32_t* const rows = staging_.on_device().wanted;
  Check(KeepRows({m, config_.hidden, QWidth(config_), rows, at.residual, at.qkv, at.kept, at.queries}, stream()),
        kStep);
  timer_.Mark(&StepTimes::other);
  runner_.Finish(layer, m, at.queries, at.kept);
  logits_.SetKept();
}

void CudaBackend::Logits(const std::function<void(size_t wanted, const LogitsRow& logits)>& use) {
  logits_.Use(staging_.on_device(), use);
}

void CudaBackend::MakeGraph(const StepGroup& group, DecodeGraph& graph) {
  const std::vector<int32_t> q_lens(static_cast<size_t>(graph.num_seqs), 1), kv_lens(q_lens.size(), graph.max_kv_len);
  std::vector<float> lambdas;
  DistinctSettings distinct(graph.settings, config_);
  for (size_t i = 0; i < distinct.all.size(); ++i) {
    const auto first = std::ranges::find(distinct.of_layer, i);  // a layer that has them
    PlanDesc desc = PagedPlan(config_, *distinct.all[i], kv_dtype_);
    desc.window = distinct.windows[i];
    desc.num_seqs = graph.num_seqs;
    desc.q_lens = q_lens.data();
    desc.kv_lens = kv_lens.data();
    desc.device = PHSA_DEVICE_CUDA;
    const Plan& plan = graph.plans.emplace_back(desc);
    lambdas.insert(lambdas.end(), plan.impl().lambda.begin(), plan.impl().lambda.end());
    ForwardParams decode;
    const auto layer = static_cast<int32_t>(first - distinct.of_layer.begin());
    const phsa::ForwardParams forward = AttentionOf(layer, group, graph.page_table_stride());
    graph.possible = graph.possible && PrepareDecode(plan.impl(), forward, nullptr, nullptr, &decode);
    if (graph.possible) graph.workspace = std::max(graph.workspace, DecodeWorkspaceSize(decode.shape, decode.batch));
  }
  graph.plan_of_layer = std::move(distinct.of_layer);
  graph.lambdas = DeviceBuffer(lambdas.size() * sizeof(float), kStep);
  Check(Upload(lambdas.data(), lambdas.size() * sizeof(float), graph.lambdas.data(), stream()), kStep);
}

void CudaBackend::EnqueueDecode(const DecodeGraph& graph, const StepGroup& group) {
  const int32_t m = graph.num_seqs;
  const StepData& data = staging_.on_device();
  const Activations& at = runner_.at();
  runner_.Embed(data, *rows_->cache, m);
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    runner_.ProjectHeads(layer, data, *rows_->cache, m);
    const size_t planned = graph.plan_of_layer[static_cast<size_t>(layer)];
    const float* const lambda = graph.lambdas.as<float>() + planned * static_cast<size_t>(config_.num_kv_heads);
    const phsa::ForwardParams forward = AttentionOf(layer, group, graph.page_table_stride());
    ForwardParams decode;
    PHSA_CHECK(PrepareDecode(graph.plans[planned].impl(), forward, data.kv_lens, lambda, &decode));
    Check(Decode(decode, stream()), kStep);
    runner_.Finish(layer, m, at.qkv, at.residual);
  }
  runner_.FinalNorm(m, at.residual);
  runner_.ComputeLogits(m, at.top, data.asked);
}

bool CudaBackend::RunLayers(const StepRows& rows) {
  const bool decodes = std::ranges::all_of(rows.q_lens, [](int32_t length) { return length == 1; });
  if (timer_.timed() || !decodes || rows.groups.size() != 1 || SequencesBucket(rows.count) > LogitRows(max_rows_))
    return false;
  const int32_t num_seqs = SequencesBucket(rows.count);
  const int32_t max_kv_len = LengthBucket(*std::ranges::max_element(rows.kv_lens));
  const auto seqs = static_cast<size_t>(num_seqs), used = static_cast<size_t>(rows.count);
  const size_t stride = PagesFor(static_cast<size_t>(max_kv_len));
  const StepData host = TakeData(seqs, seqs, stride, seqs);
  const StepGroup& group = rows.groups.front();
  const auto find = [&]() -> DecodeGraph& {
    return graphs_.Find(num_seqs, max_kv_len, *group.settings, [&](DecodeGraph& made) { MakeGraph(group, made); });
  };
  DecodeGraph* graph = &find();
  if (!graph->possible) return false;
  if (graph->workspace > attention_workspace_.size()) {
    ReserveAttention(graph->workspace);
    graph = &find();
  }
  FillRows(rows, host);
  // Padding sequences: nothing is stored for them, and nothing read.
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
  staging_.Send();
  graph->Run(stream(), [&] { EnqueueDecode(*graph, group); });
  logits_.SetDecoded();
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
  return UnsupportedModel(source.config(), options);
}

BackendSizes Sizes(const ModelSource& source, const BackendOptions& options) {
  const ModelConfig& config = source.config();
  BackendSizes sizes;
  const WeightLayout weights(source, options.weights, nullptr);
  sizes.weights = weights.bytes;
  sizes.weight_types = options.weights == WeightsMode::kInt8 ? "bf16, int8" : "bf16";
  sizes.workspace = LayerRunner::Bytes(config, options.max_rows, weights.largest_int8) +
                    AttentionBytes(config, options.kv_dtype, options.max_rows) + StepStaging::Bytes(options.max_rows);
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
    ThrowInvalid("{} is cuda:{}; this machine has {} GPUs, the first one is cuda:0", Option{"device"},
                 options.device_index, devices.size());
  }
  Check(cudaSetDevice(options.device_index), "the GPU");
  auto backend =
      std::make_unique<CudaBackend>(source, options, devices[static_cast<size_t>(options.device_index)].name);
  if (!backend->Load(source, options.weights, threads, progress)) return nullptr;
  return backend;
}

}  // namespace phsa::cuda
