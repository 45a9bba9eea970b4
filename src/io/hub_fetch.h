// Fetching a model from a Hugging Face hub into the hub's cache, where other programs find it too.
#ifndef PHSA_IO_HUB_FETCH_H_
#define PHSA_IO_HUB_FETCH_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/model_store.h"

namespace phsa {

// "owner/name", or "owner/name:FILE" for one of several .gguf files; FILE may be a part of its name ("Q4_K_M").
struct HubName {
  std::string repository, file;
};
// Nothing where the text is not of that form.
std::optional<HubName> ParseHubName(std::string_view text);

// A file of a repository, as the hub lists it.
struct HubFile {
  std::string name;
  uint64_t size = 0;
  std::string sha256;  // of large files; empty: git_sha1 is known
  std::string git_sha1;
};

// The files to fetch: the named .gguf file with all its parts, else a Hugging Face model, else the only .gguf file.
// Throws phsa::Error, listing what there is.
std::vector<HubFile> ChooseHubFiles(const HubName& name, const std::vector<HubFile>& files);

// Fetches what is missing and returns where the model is: a folder, or the first .gguf file. HF_ENDPOINT names another
// hub, HF_TOKEN who asks. Each file is checked by its size and sum before it gets its name; what was interrupted goes
// on from where it was. Throws phsa::Error with what to do. `stop` is asked often.
std::filesystem::path FetchFromHub(const HubName& name, const std::function<void(const FetchProgress&)>& progress,
                                   const std::function<bool()>& stop);

}  // namespace phsa

#endif  // PHSA_IO_HUB_FETCH_H_
