// `phsa models`: which models can be had, which are here, and fetching and removing them.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "io/hub_fetch.h"
#include "io/model_source.h"
#include "io/model_store.h"

namespace phsa::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ModelsFlags {
  bool json = false;
  std::vector<std::string> fetch, remove;
  std::string path;
};

const PackagedModel& Packaged(const std::string& name) {
  if (const PackagedModel* model = FindPackagedModel(name)) return *model;
  std::vector<std::string> names;
  for (const PackagedModel& model : PackagedModels()) names.push_back(model.name);
  ThrowInvalid("models: {} is not a packaged model; allowed: {}", Quoted(name), fmt::join(names, ", "));
}

uint64_t DownloadBytes(const PackagedModel& model) {
  uint64_t out = 0;
  for (const ModelPart& part : model.parts) out += part.wheel_bytes;
  return out;
}

// Paths may hold any bytes.
void PrintJson(const Json& json) { WriteOut(json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"); }

void ListAsJson(const std::vector<HubModel>& hub) {
  Json packaged = Json::array(), cached = Json::array();
  for (const PackagedModel& model : PackagedModels()) {
    const std::filesystem::path path = CachedModel(model);
    packaged.push_back({{"name", model.name},
                        {"description", model.description},
                        {"bytes", model.bytes},
                        {"download_bytes", DownloadBytes(model)},
                        {"sha256", model.sha256},
                        {"here", !path.empty()},
                        {"path", path.empty() ? Json(nullptr) : Json(path.string())}});
  }
  for (const HubModel& model : hub) cached.push_back({{"name", model.name}, {"path", model.path.string()}});
  PrintJson({{"cache", CacheFolder().string()}, {"packaged", packaged}, {"hugging_face", cached}});
}

void List(bool json) {
  const std::vector<HubModel> hub = HubModels();
  if (json) return ListAsJson(hub);
  std::string out;
  for (const PackagedModel& model : PackagedModels()) {
    const std::filesystem::path path = CachedModel(model);
    const std::string place = path.empty() ? fmt::format("{}: phsa models fetch {} ({})",
                                                         DamagedModel(model).empty() ? "not here" : "damaged",
                                                         model.name, BytesInWords(DownloadBytes(model)))
                                           : path.string();
    out += fmt::format("{:<20} {:>8}  {}\n{:<30} {}\n", model.name, BytesInWords(model.bytes), place, "",
                       model.description);
  }
  if (!hub.empty()) out += "\nIn the Hugging Face cache:\n";
  for (const HubModel& model : hub) out += fmt::format("{:<30} {}\n", model.name, model.path.string());
  WriteOut(out);
}

void FetchFromHub(const HubName& name, bool json) {
  std::filesystem::path path;
  {
    ProgressBar bar(name.repository);
    const auto progress = [&](const FetchProgress& now) {
      bar.Update(static_cast<double>(now.done) / static_cast<double>(std::max<uint64_t>(now.total, 1)),
                 fmt::format("{} of {}, {}", BytesInWords(now.done), BytesInWords(now.total), now.what));
    };
    path = phsa::FetchFromHub(name, progress, WasInterrupted);
  }
  ModelSource::Open(path);  // one that we cannot run is said so now
  if (json) {
    PrintJson({{"name", name.repository}, {"path", path.string()}});
  } else {
    Note("{} is here, its sums are right", name.repository);
    WriteOut(path.string() + "\n");
  }
}

void Fetch(const PackagedModel& model, bool json) {
  const bool was_here = !CachedModel(model).empty();
  if (!was_here) Note("fetching {} ({})", model.name, BytesInWords(DownloadBytes(model)));
  std::filesystem::path path;
  {
    ProgressBar bar(model.name);
    const auto progress = [&](const FetchProgress& now) {
      bar.Update(static_cast<double>(now.done) / static_cast<double>(std::max<uint64_t>(now.total, 1)),
                 fmt::format("{} of {}, {}", BytesInWords(now.done), BytesInWords(now.total), now.what));
    };
    path = FetchModel(model, progress, WasInterrupted);
  }
  if (json) {
    PrintJson({{"name", model.name}, {"path", path.string()}, {"bytes", model.bytes}, {"fetched", !was_here}});
  } else {
    Note("{} {}", model.name, was_here ? "is here already" : "is here, its sha256 is right");
    WriteOut(path.string() + "\n");
  }
}

void Remove(const PackagedModel& model, bool json) {
  const uint64_t freed = RemoveModel(model);
  if (json) {
    PrintJson({{"name", model.name}, {"freed_bytes", freed}});
  } else if (freed == 0) {
    Note("{} was not here", model.name);
  } else {
    Note("{} is removed, {} are free again", model.name, BytesInWords(freed));
  }
}

void FindPath(const std::string& name, bool json) {
  const std::filesystem::path path = ResolveModel(name);
  if (json) {
    PrintJson({{"name", name}, {"path", path.string()}});
  } else {
    WriteOut(path.string() + "\n");
  }
}

}  // namespace

void AddModelsCommand(CLI::App& app) {
  const auto flags = std::make_shared<ModelsFlags>();
  CLI::App* command = app.add_subcommand("models", "list models that can be had by name; fetch and remove them");
  command->add_flag("--json", flags->json, "one JSON object");
  command->require_subcommand(0, 1);
  command->callback([command, flags] {
    if (command->get_subcommands().empty()) List(flags->json);
  });

  CLI::App* fetch = command->add_subcommand("fetch", "download models, packaged ones or from a Hugging Face hub");
  fetch->fallthrough();
  fetch->add_option("NAME", flags->fetch, "names that `phsa models` lists, or owner/name[:FILE.gguf] of a hub")
      ->required();
  fetch->callback([flags] {
    // A misspelt second name is told before the first is fetched.
    for (const std::string& name : flags->fetch) {
      if (!ParseHubName(name)) Packaged(name);
    }
    for (const std::string& name : flags->fetch) {
      if (const std::optional<HubName> of_hub = ParseHubName(name)) {
        FetchFromHub(*of_hub, flags->json);
      } else {
        Fetch(Packaged(name), flags->json);
      }
    }
  });

  CLI::App* remove = command->add_subcommand("remove", "remove packaged models from the cache");
  remove->fallthrough();
  remove->add_option("NAME", flags->remove, "names that `phsa models` lists")->required();
  remove->callback([flags] {
    for (const std::string& name : flags->remove) Packaged(name);
    for (const std::string& name : flags->remove) Remove(Packaged(name), flags->json);
  });

  CLI::App* path = command->add_subcommand("path", "print where a model is");
  path->fallthrough();
  path->add_option("NAME", flags->path, "a name that `phsa models` lists, or a path")->required();
  path->callback([flags] { FindPath(flags->path, flags->json); });
}

}  // namespace phsa::cli
