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
  bool replace = false;  // what is there already
  // Settings that the output carries in place of the model's, as a JSON text of docs/settings.md; empty: the model's.
  std::string settings;
  std::function<bool(double share)> progress;  // false: stop
};

// False where `progress` asked to stop; then nothing is left behind. Throws phsa::Error: what the other format has no
// word for, a number that the type cannot hold, a full disk.
bool ExportModel(const ModelSource& source, const std::filesystem::path& out, const ExportOptions& options,
                 ThreadPool& threads);

// Writes settings, a JSON text of docs/settings.md, where the model keeps its own: into the phsa.json of its adapter,
// config.json of a Hugging Face folder, or the metadata of a GGUF file, whose weights stay as they are. Throws
// phsa::Error where they are not such settings, or the file is a packaged model, which its checksum guards.
void InstallSettings(const ModelSource& source, const std::string& settings);
// The same error before any work.
void CheckInstall(const ModelSource& source);

}  // namespace phsa

#endif  // PHSA_ENGINE_EXPORT_H_
