// Logits of a model for tests: logits_of MODEL WEIGHTS KV_TYPE CHUNK THREADS [ADAPTER [SETTINGS [CONTEXT]]]; token
// ids on standard input, [tokens][vocab] f32 on standard output. No tokenizer is needed. ADAPTER: -, or a folder;
// SETTINGS: -, or those of the attention, as JSON; CONTEXT: the longest text, the model's context if it is not given.
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "io/model_source.h"
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
    if (argc > 8) source->SetContext(std::stoi(argv[8]));
    const ModelConfig& config = source->config();
    const int32_t kv_type = KvTypeFromName(argv[3]);
    const int32_t chunk = std::stoi(argv[4]);
    ThreadPool threads(std::stoi(argv[5]));
    const auto backend = TestBackend(*source, WeightsModeFromName(argv[2]), kv_type, chunk, threads);
    LayerSettings settings;
    settings.base.policy = Policy::kDense;
    if (argc > 7 && std::string_view(argv[7]) != "-") settings = SettingsFromJson(argv[7]);
    KvCache cache =
        TestCache(*backend, PageLayout(config, settings, kv_type), static_cast<int32_t>(ids.size()) / kPageTokens + 1);
    Decoder decoder(config, *backend, settings, threads);
    Sequence sequence(cache);
    for (size_t first = 0; first < ids.size(); first += static_cast<size_t>(chunk)) {
      const BatchItem item{
          &sequence,
          std::span<const int32_t>(ids).subspan(first, std::min(ids.size() - first, static_cast<size_t>(chunk))),
          BatchItem::Logits::kAll};
      decoder.Step({&item, 1}, [&](int32_t, int32_t, const LogitsRow& logits) {
        std::fwrite(logits.All().data(), sizeof(float), logits.All().size(), stdout);
      });
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
