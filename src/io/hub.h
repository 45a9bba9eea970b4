// What lies in the Hugging Face cache of this machine.
#ifndef PHSA_IO_HUB_H_
#define PHSA_IO_HUB_H_

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/model_store.h"

namespace phsa {

// Where it is; nothing where the environment names no place.
std::optional<std::filesystem::path> HubFolder();

// Models by their files alone: whether they open is not tried.
std::vector<HubModel> HubCandidates();

// "NAME-00002-of-00005.gguf": which part of a split GGUF model a file is. Nothing: it is whole.
struct GgufPart {
  int32_t number = 0, count = 0;
  std::string stem;  // "NAME"
  std::string Name(int32_t part) const;
};
std::optional<GgufPart> PartOfSplitGguf(std::string_view name);

}  // namespace phsa

#endif  // PHSA_IO_HUB_H_
