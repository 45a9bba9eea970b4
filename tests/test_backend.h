// A model on the CPU, for tests that need no engine.
#ifndef PHSA_TESTS_TEST_BACKEND_H_
#define PHSA_TESTS_TEST_BACKEND_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>

#include "model/cpu/cpu_backend.h"
#include "model/kv_cache.h"

namespace phsa {

inline std::unique_ptr<ModelBackend> TestBackend(const ModelSource& source, WeightsMode weights, int32_t kv_dtype,
                                                 int32_t max_rows, ThreadPool& threads) {
  BackendOptions options{weights, kv_dtype, max_rows};
  options.experts_in_file = std::getenv("PHSA_EXPERTS_IN_FILE") != nullptr;
  return MakeCpuBackend(source, options, threads, [](double) { return true; });
}

inline KvCache TestCache(ModelBackend& backend, PageLayout layout, int32_t num_pages) {
  std::unique_ptr<PageMemory> memory = backend.MakePages(layout.page_bytes, num_pages);
  return {std::move(layout), num_pages, std::move(memory)};
}

}  // namespace phsa

#endif  // PHSA_TESTS_TEST_BACKEND_H_
