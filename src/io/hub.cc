// The cache's layout: hub/models--ORG--NAME/snapshots/REVISION/…, where files are links, and refs/main names a
// revision.
#include "io/hub.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "base/errors.h"
#include "io/model_source.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

std::optional<fs::path> FromEnvironment(const char* name, const char* below) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return fs::path(value) / below;
}

// Sorted, so that lists do not depend on the file system.
std::vector<fs::path> Children(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    out.push_back(it->path());
  std::sort(out.begin(), out.end());
  return out;
}

bool Exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// The one that refs/main names, else the one that changed last.
std::optional<fs::path> NewestSnapshot(const fs::path& repository) {
  std::string revision;
  std::ifstream(repository / "refs" / "main") >> revision;
  const bool plain = !revision.empty() && revision.find('/') == std::string::npos && revision[0] != '.';
  if (plain && Exists(repository / "snapshots" / revision)) return repository / "snapshots" / revision;
  std::optional<fs::path> newest;
  fs::file_time_type newest_time;
  for (const fs::path& snapshot : Children(repository / "snapshots")) {
    std::error_code error;
    const fs::file_time_type time = fs::last_write_time(snapshot, error);
    if (error || (newest && time <= newest_time)) continue;
    newest = snapshot;
    newest_time = time;
  }
  return newest;
}

// "org/name" of "models--org--name".
std::optional<std::string> RepositoryName(const fs::path& folder) {
  constexpr std::string_view kPrefix = "models--";
  std::string name = folder.filename().string();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.erase(0, kPrefix.size());
  const size_t dashes = name.find("--");
  return dashes == std::string::npos ? name : name.replace(dashes, 2, "/");
}

}  // namespace

std::optional<fs::path> HubFolder() {
  if (auto path = FromEnvironment("HF_HUB_CACHE", "")) return path;
  if (auto path = FromEnvironment("HF_HOME", "hub")) return path;
  if (auto path = FromEnvironment("XDG_CACHE_HOME", "huggingface/hub")) return path;
  return FromEnvironment("HOME", ".cache/huggingface/hub");
}

std::string GgufPart::Name(int32_t part) const { return fmt::format("{}-{:05}-of-{:05}.gguf", stem, part, count); }

std::optional<GgufPart> PartOfSplitGguf(std::string_view name) {
  constexpr std::string_view kForm = "-00000-of-00000.gguf";
  if (name.size() <= kForm.size()) return std::nullopt;
  const std::string_view end = name.substr(name.size() - kForm.size());
  GgufPart part;
  for (size_t i = 0; i < kForm.size(); ++i) {
    const bool digit = end[i] >= '0' && end[i] <= '9';
    if (kForm[i] == '0' ? !digit : end[i] != kForm[i]) return std::nullopt;
    if (kForm[i] != '0') continue;
    int32_t& number = i < 6 ? part.number : part.count;
    number = number * 10 + (end[i] - '0');
  }
  if (part.number < 1 || part.number > part.count) return std::nullopt;
  part.stem = name.substr(0, name.size() - kForm.size());
  return part;
}

std::vector<HubModel> HubCandidates() {
  std::vector<HubModel> out;
  const std::optional<fs::path> hub = HubFolder();
  if (!hub) return out;
  for (const fs::path& repository : Children(*hub)) {
    const std::optional<std::string> name = RepositoryName(repository);
    const std::optional<fs::path> snapshot = name ? NewestSnapshot(repository) : std::nullopt;
    if (!snapshot) continue;
    if (Exists(*snapshot / "config.json") &&
        (Exists(*snapshot / "model.safetensors") || Exists(*snapshot / "model.safetensors.index.json"))) {
      out.push_back({*name, *snapshot});
      continue;
    }
    std::vector<fs::path> gguf_files = Children(*snapshot);
    std::erase_if(gguf_files, [](const fs::path& path) {
      const std::optional<GgufPart> part = PartOfSplitGguf(path.filename().string());
      return path.extension() != ".gguf" || !Exists(path) || (part && part->number > 1);  // the first opens them all
    });
    for (const fs::path& path : gguf_files) {
      out.push_back({gguf_files.size() == 1 ? *name : *name + "/" + path.filename().string(), path});
    }
  }
  return out;
}

std::vector<HubModel> HubModels() {
  std::vector<HubModel> out = HubCandidates();
  std::erase_if(out, [](const HubModel& model) {
    try {
      ModelSource::Open(model.path);
      return false;
    } catch (const Error&) {
      return true;
    }
  });
  return out;
}

}  // namespace phsa
