// What the two kinds of ModelSource share. Not for other folders: they open models with ModelSource::Open.
#ifndef PHSA_IO_SOURCE_H_
#define PHSA_IO_SOURCE_H_

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "base/mapped_file.h"
#include "io/model_source.h"

namespace phsa {

std::unique_ptr<ModelSource> OpenGguf(MappedFile file);
std::unique_ptr<ModelSource> OpenHuggingFace(const std::filesystem::path& folder);

inline constexpr std::string_view kEmbeddingName = "model.embed_tokens.weight";
inline constexpr std::string_view kHeadName = "lm_head.weight";

// Far above every known model, far below what could overflow.
inline constexpr int64_t kMaxLayers = 4096;
inline constexpr int64_t kMaxWidth = 1 << 24;
inline constexpr int64_t kMaxVocab = 1 << 24;
inline constexpr int64_t kMaxContext = 1 << 30;
inline constexpr int64_t kMaxModelHeads = 65536;
inline constexpr int64_t kMaxHeadDim = 4096;
inline constexpr double kMaxRopeBase = 1e15;

// `where` is "FILE: key"; both throw where the value is outside of the range, NaN included.
int32_t CheckedInt(const std::string& where, int64_t value, int64_t low, int64_t high);
float CheckedFloat(const std::string& where, double value, double low, double high);

// What longrope multiplies sin and cos by, for a context that grew by that from the original one.
float LongRopeMagnitude(float growth, int32_t original_context);

// What the fields of a configuration must be to each other. `path` is for messages.
void CheckConfig(const std::string& path, const ModelConfig& config);

// The embedding's shape, and that it is there: the first thing that shows that configuration and weights are not of
// one model.
void CheckEmbedding(const ModelSource& source, std::string_view name_in_file);

}  // namespace phsa

#endif  // PHSA_IO_SOURCE_H_
