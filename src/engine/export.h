// A model as one that others read too: its adapter merged into its weights, as a Hugging Face folder or a GGUF file.
#ifndef PHSA_ENGINE_EXPORT_H_
#define PHSA_ENGINE_EXPORT_H_

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "io/model_source.h"
#include "phsa/threads.h"

namespace phsa {

enum class ExportFormat : uint8_t { kSafetensors, kGguf };

struct ExportOptions {
  ExportFormat format = ExportFormat::kSafetensors;
  // f32, f16, bf16; for GGUF also q8_0. None: the model's own where it is one of the first three, else f16.
  std::optional<TensorType> type;
  bool replace = false;                        // what is there already
  std::function<bool(double share)> progress;  // false: stop
};

// False where `progress` asked to stop; then nothing is left behind. Throws phsa::Error: what the other format has no
// word for, a number that the type cannot hold, a full disk.
bool ExportModel(const ModelSource& source, const std::filesystem::path& out, const ExportOptions& options,
                 ThreadPool& threads);

}  // namespace phsa

#endif  // PHSA_ENGINE_EXPORT_H_
