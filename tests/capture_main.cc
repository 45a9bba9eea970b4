// What a layer's attention reads and chooses, for tests:
//   capture_of MODEL WEIGHTS KV_TYPE CHUNK THREADS LAYERS TOP_K INIT LOCAL OUT
// Token ids and their punctuation flags ("id flag id flag …") on standard input; for each of LAYERS ("0,14,27") the
// file OUT-LAYER.safetensors: q, k, reps, flags and the lists that the CPU chose with PHSA, settings as metadata.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "io/model_source.h"
#include "model/decoder.h"
#include "test_backend.h"

namespace phsa {
namespace {

struct Tensor {
  std::string name, dtype, shape, bytes;
};

void Append(std::string* bytes, const void* from, size_t size) { bytes->append(static_cast<const char*>(from), size); }

void WriteSafetensors(const std::string& path, const std::string& metadata, const std::vector<Tensor>& tensors) {
  std::string header = "{\"__metadata__\":{" + metadata + "}";
  size_t at = 0;
  for (const Tensor& t : tensors) {
    header += fmt::format(R"(,"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", t.name, t.dtype, t.shape, at,
                          at + t.bytes.size());
    at += t.bytes.size();
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t size = header.size();
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&size), sizeof size);
  out << header;
  for (const Tensor& t : tensors) out << t.bytes;
  if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

void Run(char** argv) {
  std::vector<int32_t> ids;
  const auto source = ModelSource::Open(argv[1], "");
  const ModelConfig& config = source->config();
  std::vector<uint8_t> punctuation(static_cast<size_t>(config.vocab_size), 0);
  for (int32_t id = 0, flag = 0; std::cin >> id >> flag;) {
    ids.push_back(id);
    punctuation.at(static_cast<size_t>(id)) = flag != 0;
  }
  const int32_t kv_type = KvTypeFromName(argv[3]);
  if (kv_type == PHSA_INT8) throw std::runtime_error("capture_of writes f32, f16 and bf16");
  const auto chunk = static_cast<size_t>(std::stoi(argv[4]));
  ThreadPool threads(std::stoi(argv[5]));
  std::map<int32_t, std::pair<std::string, std::string>> captured;  // layer: queries, lists
  std::istringstream layers(argv[6]);
  for (std::string layer; std::getline(layers, layer, ',');) captured[std::stoi(layer)];

  LayerSettings settings;
  settings.base.policy = Policy::kPhsa;
  settings.base.top_k = std::stoi(argv[7]);
  settings.base.init_tokens = std::stoi(argv[8]);
  settings.base.local_tokens = std::stoi(argv[9]);
  const auto backend =
      TestBackend(*source, WeightsModeFromName(argv[2]), kv_type, static_cast<int32_t>(chunk), threads);
  KvCache cache =
      TestCache(*backend, PageLayout(config, settings, kv_type), static_cast<int32_t>(ids.size()) / kPageTokens + 1);
  Decoder decoder(config, *backend, settings, threads);
  decoder.SetPunctuation(punctuation);
  const size_t element = DtypeSize(kv_type);
  const size_t head_bytes = element * static_cast<size_t>(config.head_dim);
  const std::string dtype = kv_type == PHSA_BF16 ? "BF16" : kv_type == PHSA_F16 ? "F16" : "F32";

  decoder.Observe([&](const LayerAttention& seen) {
    const auto found = captured.find(seen.layer);
    if (found == captured.end()) return;
    auto& [queries, lists] = found->second;
    const auto rows = static_cast<size_t>(seen.q_lens[0]);
    const int32_t heads = seen.plan.SelectionHeads(), slots = seen.plan.SelectionSlots();
    Append(&queries, seen.params.q, rows * static_cast<size_t>(config.num_q_heads) * head_bytes);
    Append(&lists, seen.params.selection, rows * static_cast<size_t>(heads) * static_cast<size_t>(slots) * 4);
    const int32_t tokens = seen.kv_lens[0];
    if (tokens < static_cast<int32_t>(ids.size())) return;

    const KeyValues& kv = seen.params.kv;
    std::string keys, reps, marks;
    const auto* k = static_cast<const char*>(kv.k);
    const auto* r = static_cast<const char*>(kv.reps);
    const int32_t block = seen.settings.block_size;
    for (int32_t i = 0; i < tokens; ++i) {
      const int64_t page = kv.page_table[i / kPageTokens], row = i % kPageTokens;
      Append(&marks, kv.flags + page * kv.flags_page_stride + row, 1);
      for (int32_t h = 0; h < config.num_kv_heads; ++h) {
        const int64_t at = page * kv.k_page_stride + row * kv.k_token_stride + h * kv.k_head_stride;
        Append(&keys, k + at * static_cast<int64_t>(element), head_bytes);
        if (i % block != 0 || i + block > tokens) continue;
        const int64_t rep = page * kv.rep_page_stride + row / block * kv.rep_row_stride + h * kv.rep_head_stride;
        Append(&reps, r + rep * static_cast<int64_t>(element), head_bytes);
      }
    }
    const Settings& s = seen.settings;
    const std::string metadata =
        fmt::format(R"("layer":"{}","top_k":"{}","init":"{}","local":"{}","lambda":"{}","block":"{}")", seen.layer,
                    s.top_k, s.init_tokens, s.local_tokens, s.lambda, block);
    const auto shape = [&](int32_t count, int32_t of_heads, int32_t width) {
      return fmt::format("{},{},{}", count, of_heads, width);
    };
    WriteSafetensors(fmt::format("{}-{}.safetensors", argv[10], seen.layer), metadata,
                     {{"q", dtype, shape(tokens, config.num_q_heads, config.head_dim), queries},
                      {"k", dtype, shape(tokens, config.num_kv_heads, config.head_dim), keys},
                      {"reps", dtype, shape(tokens / block, config.num_kv_heads, config.head_dim), reps},
                      {"selection", "I32", shape(tokens, heads, slots), lists},
                      {"flags", "U8", fmt::format("{}", tokens), marks}});
  });
  Sequence sequence(cache);
  for (size_t first = 0; first < ids.size(); first += chunk) {
    const auto part = std::span<const int32_t>(ids).subspan(first, std::min(ids.size() - first, chunk));
    const BatchItem item{&sequence, part, BatchItem::Logits::kNone};
    decoder.Step({&item, 1}, [](int32_t, int32_t, const LogitsRow&) {});
  }
}

}  // namespace
}  // namespace phsa

int main(int argc, char** argv) {
  if (argc != 11) {
    std::fprintf(stderr, "usage: capture_of MODEL WEIGHTS KV_TYPE CHUNK THREADS LAYERS TOP_K INIT LOCAL OUT <ids\n");
    return 2;
  }
  try {
    phsa::Run(argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
