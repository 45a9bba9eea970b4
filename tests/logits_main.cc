// Logits of a model for tests: logits_of MODEL WEIGHTS KV_TYPE CHUNK THREADS [ADAPTER [SETTINGS [CONTEXT]]]; token
// ids on standard input, [tokens][vocab] f32 on standard output. No tokenizer is needed. ADAPTER: -, or a folder;
// SETTINGS: -, or those of the attention, as JSON; CONTEXT: the longest text, 0 or not given: the model's context.
//
// PHSA_DEVICE=cuda takes the backend for GPUs: on a GPU, or as logits_of_gpu on what plays one (host_gpu.cc). A chunk
// of 1 then decodes by graphs, three texts at a time.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "io/model_source.h"
#include "model/cuda/cuda_backend.h"
#include "model/decoder.h"
#include "phsa/error.h"
#include "test_backend.h"

int main(int argc, char** argv) {
  using namespace phsa;  // NOLINT: a program of one function
  if (argc < 6 || argc > 9) {
    std::fprintf(stderr,
                 "usage: logits_of MODEL WEIGHTS KV_TYPE CHUNK THREADS [ADAPTER [SETTINGS [CONTEXT]]] <ids >logits\n");
    return 2;
  }
  try {
    std::vector<int32_t> ids;
    for (int32_t id = 0; std::cin >> id;) ids.push_back(id);
    const auto source = ModelSource::Open(argv[1], argc > 6 && std::string_view(argv[6]) != "-" ? argv[6] : "");
    if (argc > 8 && std::stoi(argv[8]) > 0) source->SetContext(std::stoi(argv[8]));
    const ModelConfig& config = source->config();
    const int32_t kv_type = KvTypeFromName(argv[3]);
    const int32_t chunk = std::stoi(argv[4]);
    ThreadPool threads(std::stoi(argv[5]));
    const char* const device = std::getenv("PHSA_DEVICE");
    const bool gpu = device != nullptr && std::string_view(device) == "cuda";
    const size_t texts = gpu && chunk == 1 ? 3 : 1;
    const auto backend = gpu ? cuda::MakeBackend(*source, {WeightsModeFromName(argv[2]), kv_type, std::max(chunk, 4)},
                                                 threads, [](double) { return true; })
                             : TestBackend(*source, WeightsModeFromName(argv[2]), kv_type, chunk, threads);
    LayerSettings settings;
    settings.base.policy = Policy::kDense;
    if (argc > 7 && std::string_view(argv[7]) != "-") settings = SettingsFromJson(argv[7]);
    KvCache cache = TestCache(*backend, PageLayout(config, settings, kv_type),
                              static_cast<int32_t>(texts) * (static_cast<int32_t>(ids.size()) / kPageTokens + 1));
    Decoder decoder(config, *backend, settings, threads);
    std::vector<Sequence> sequences;
    for (size_t i = 0; i < texts; ++i) sequences.emplace_back(cache);
    std::vector<float> row;
    for (size_t first = 0; first < ids.size(); first += static_cast<size_t>(chunk)) {
      const auto tokens =
          std::span<const int32_t>(ids).subspan(first, std::min(ids.size() - first, static_cast<size_t>(chunk)));
      std::vector<BatchItem> batch;
      for (Sequence& sequence : sequences) batch.push_back({&sequence, tokens, BatchItem::Logits::kAll});
      decoder.Step(batch, [&](int32_t item, int32_t, const LogitsRow& logits) {
        if (item == 0) {
          row.assign(logits.All().begin(), logits.All().end());
          std::fwrite(row.data(), sizeof(float), row.size(), stdout);
        } else if (!std::ranges::equal(row, logits.All())) {
          Throw(PHSA_INTERNAL, "the same text twice in a batch has other logits");
        }
      });
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
