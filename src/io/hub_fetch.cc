#include "io/hub_fetch.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/errors.h"
#include "base/mapped_file.h"
#include "io/child_process.h"
#include "io/hub.h"
#include "io/json.h"
#include "io/sha256.h"
#include "io/store_files.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxListBytes = 64 << 20;
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 44;

// One download. Python's own library knows proxies and certificates, and phsa needs Python for packaged models anyway.
// The token goes to the hub alone, not to where it redirects.
constexpr const char* kDownload = R"py(
import os, sys, urllib.error, urllib.parse, urllib.request

url, path = sys.argv[1:3]

class Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, *rest):
        new = super().redirect_request(request, *rest)
        if new is not None and urllib.parse.urlsplit(new.full_url)[:2] != urllib.parse.urlsplit(request.full_url)[:2]:
            new.remove_header("Authorization")
        return new

have = os.path.getsize(path) if os.path.exists(path) else 0
request = urllib.request.Request(url, headers={"User-Agent": "phsa"})
token = os.environ.get("HF_TOKEN", "")
if token:
    request.add_header("Authorization", "Bearer " + token)
if have:
    request.add_header("Range", f"bytes={have}-")
try:
    with urllib.request.build_opener(Redirects).open(request, timeout=60) as answer:
        again = have and answer.status == 206
        rest = int(answer.headers.get("Content-Length", 0))
        with open(path, "ab" if again else "wb") as file:
            while piece := answer.read(1 << 20):
                file.write(piece)
                rest -= len(piece)
        if rest > 0:
            raise OSError("the connection ended early")
except urllib.error.HTTPError as error:
    if error.code == 416 and have:
        sys.exit(0)
    print(f"HTTP {error.code} {error.reason}")
    sys.exit(10 if error.code in (401, 403) else 11 if error.code == 404 else 1)
except Exception as error:
    print(f"{type(error).__name__}: {getattr(error, 'reason', error)}")
    sys.exit(1)
)py";

std::string Environment(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

bool IsNamePart(std::string_view text) {
  return !text.empty() && text != "." && text != ".." && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  });
}

// A file's name leads nowhere else and needs no escapes in a URL.
bool IsFileName(std::string_view name) {
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    if (!IsNamePart(name.substr(begin, end - begin))) return false;
    begin = end + 1;
  }
  return true;
}

std::string GitBlobSum(const MappedFile& file) {
  EVP_MD_CTX* const context = EVP_MD_CTX_new();
  PHSA_CHECK(context != nullptr && EVP_DigestInit_ex(context, EVP_sha1(), nullptr) == 1);
  const std::string header = fmt::format("blob {}", file.size());
  EVP_DigestUpdate(context, header.c_str(), header.size() + 1);
  EVP_DigestUpdate(context, file.data(), file.size());
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EVP_DigestFinal_ex(context, digest, &size);
  EVP_MD_CTX_free(context);
  std::string out;
  for (unsigned int i = 0; i < size; ++i) out += fmt::format("{:02x}", digest[i]);
  return out;
}

class HubFetcher {
 public:
  HubFetcher(const HubName& name, const std::function<void(const FetchProgress&)>& progress,
             const std::function<bool()>& stop)
      : name_(name), progress_(progress), stop_(stop), endpoint_(Environment("HF_ENDPOINT", "https://huggingface.co")) {
    while (endpoint_.ends_with('/')) endpoint_.pop_back();
    std::string folder = "models--" + name.repository;
    folder.replace(folder.find('/'), 1, "--");
    const std::optional<fs::path> hub = HubFolder();
    if (!hub) ThrowInvalid("there is no place for models from a hub: set HF_HUB_CACHE, or HOME");
    folder_ = *hub / folder;
  }

  fs::path Run() {
    const StoreLock lock(folder_ / ".phsa.lock", [this] { Report("waiting for another process that fetches it"); });
    const std::vector<HubFile> files = ChooseHubFiles(name_, List());
    for (const HubFile& file : files) total_ += file.size;
    const fs::path snapshot = folder_ / "snapshots" / revision_;
    for (const HubFile& file : files) {
      Fetch(file);
      Link(snapshot / file.name, folder_ / "blobs" / BlobName(file));
    }
    // Last: until then, whoever looks for the model finds the one before.
    fs::create_directories(folder_ / "refs");
    std::ofstream(folder_ / "refs" / "main", std::ios::trunc) << revision_;
    const bool gguf = files.front().name.ends_with(".gguf");
    return gguf ? snapshot / files.front().name : snapshot;
  }

 private:
  void Report(const std::string& what) const {
    if (stop_()) {
      Throw(PHSA_IO, "fetching {0} was interrupted; `phsa models fetch {0}` goes on from there", name_.repository);
    }
    progress_({std::min(done_, total_), total_, what});
  }

  // Appends to what is there of the file.
  void Download(const std::string& url, const fs::path& path, const std::string& what) {
    std::error_code error;
    fs::create_directories(path.parent_path(), error);
    if (error) Throw(PHSA_IO, "{}: cannot be created: {}", path.parent_path().string(), error.message());
    ChildProcess python;
    python.command = {Environment("PHSA_PYTHON", "python3"), "-c", kDownload, url, path.string()};
    python.log = path.string() + ".log";
    const uint64_t before = done_;
    int code = 0;
    try {
      code = RunChild(python, [&] {
        const uint64_t size = fs::file_size(path, error);
        if (!error) done_ = before + size;
        Report(what);
      });
    } catch (const Error& failure) {
      if (stop_()) throw;
      Throw(PHSA_IO, "{}: install Python 3, or name one in PHSA_PYTHON", failure.what());
    }
    done_ = before;
    std::string said;
    std::ifstream log(python.log);
    for (std::string line; std::getline(log, line);) {
      if (!line.empty()) said = line;
    }
    log.close();
    fs::remove(python.log, error);
    if (code == 0) return;
    std::replace_if(
        said.begin(), said.end(), [](char c) { return c < 0x20 || c > 0x7e; }, '?');
    const char* what_to_do = "check the network and the proxy, and run it again to go on";
    if (code == 10) what_to_do = "the repository is not open to all: set HF_TOKEN to a token that may read it";
    if (code == 11) what_to_do = "check the name: there is no such repository or file";
    Throw(PHSA_IO, "{}: {}: {}", url, said.substr(0, 200), what_to_do);
  }

  std::vector<HubFile> List() {
    const fs::path path = folder_ / ".phsa-list.json";
    std::error_code ignored;
    fs::remove(path, ignored);
    const std::string url = fmt::format("{}/api/models/{}/revision/main?blobs=true", endpoint_, name_.repository);
    Download(url, path, "asking for the list of files");
    const Json json = ReadJsonFile(path, kMaxListBytes);
    fs::remove(path, ignored);
    const JsonFields fields(json, url);
    revision_ = fields.String("sha").value_or("");
    if (!IsNamePart(revision_))
      ThrowInvalid("{} is {}; allowed: the name of a revision", fields.Where("sha"), Quoted(revision_));
    const Json* const siblings = fields.Find("siblings");
    if (siblings == nullptr || !siblings->is_array()) ThrowInvalid("{} is missing", fields.Where("siblings"));
    std::vector<HubFile> files;
    for (const Json& item : *siblings) {
      if (!item.is_object()) continue;
      const JsonFields one(item, fields.Where("siblings"));
      HubFile file;
      file.name = one.String("rfilename").value_or("");
      if (!IsFileName(file.name)) continue;
      const Json* const size = one.Find("size");
      if (size != nullptr && size->is_number_unsigned()) file.size = std::min(size->get<uint64_t>(), kMaxFileBytes);
      file.git_sha1 = one.String("blobId").value_or("");
      if (const std::optional<JsonFields> large = one.Object("lfs")) file.sha256 = large->String("sha256").value_or("");
      files.push_back(std::move(file));
    }
    return files;
  }

  // The hub's name for the content: its sum.
  static std::string BlobName(const HubFile& file) { return file.sha256.empty() ? file.git_sha1 : file.sha256; }

  void Fetch(const HubFile& file) {
    if (!IsNamePart(BlobName(file))) ThrowInvalid("{}: the hub names no sum of {}", name_.repository, file.name);
    const fs::path blob = folder_ / "blobs" / BlobName(file);
    std::error_code error;
    if (fs::file_size(blob, error) == file.size && !error) {  // checked when it got its name
      done_ += file.size;
      return Report(file.name);
    }
    const fs::path partial = blob.string() + ".incomplete";
    Download(fmt::format("{}/{}/resolve/{}/{}", endpoint_, name_.repository, revision_, file.name), partial, file.name);
    done_ += file.size;
    Report("checking " + file.name);
    const std::string wrong = WhatIsWrong(file, partial);
    if (!wrong.empty()) {
      fs::remove(partial, error);
      Throw(PHSA_IO, "{}: {}: the download was damaged; run `phsa models fetch` again", file.name, wrong);
    }
    fs::rename(partial, blob, error);
    if (error) Throw(PHSA_IO, "{}: cannot be created: {}", blob.string(), error.message());
  }

  static std::string WhatIsWrong(const HubFile& file, const fs::path& path) {
    std::error_code error;
    const uint64_t size = fs::file_size(path, error);
    if (error || size != file.size) return fmt::format("has {} bytes; expected: {}", error ? 0 : size, file.size);
    const MappedFile mapped(path);
    std::string sum;
    if (file.sha256.empty()) {
      sum = GitBlobSum(mapped);
    } else {
      Sha256 sha256;
      sha256.Update(mapped.data(), mapped.size());
      sum = sha256.Hex();
    }
    return sum == BlobName(file) ? "" : fmt::format("has the sum {}; expected: {}", sum, BlobName(file));
  }

  static void Link(const fs::path& link, const fs::path& blob) {
    std::error_code error;
    fs::create_directories(link.parent_path(), error);
    const fs::path target = fs::relative(blob, link.parent_path(), error);
    if (fs::is_symlink(link, error) && fs::read_symlink(link, error) == target) return;
    fs::remove(link, error);
    fs::create_symlink(target, link, error);
    if (error) Throw(PHSA_IO, "{}: cannot be created: {}", link.string(), error.message());
  }

  const HubName& name_;
  const std::function<void(const FetchProgress&)>& progress_;
  const std::function<bool()>& stop_;
  std::string endpoint_, revision_;
  fs::path folder_;
  uint64_t done_ = 0, total_ = 0;
};

}  // namespace

std::optional<HubName> ParseHubName(std::string_view text) {
  const size_t colon = text.find(':');
  HubName name{std::string(text.substr(0, colon)), ""};
  if (colon != std::string_view::npos) {
    name.file = text.substr(colon + 1);
    if (!IsFileName(name.file)) return std::nullopt;
  }
  const size_t slash = name.repository.find('/');
  if (slash == std::string::npos || !IsNamePart(std::string_view(name.repository).substr(0, slash)) ||
      !IsNamePart(std::string_view(name.repository).substr(slash + 1))) {
    return std::nullopt;
  }
  return name;
}

std::vector<HubFile> ChooseHubFiles(const HubName& name, const std::vector<HubFile>& files) {
  std::vector<HubFile> gguf, folder;
  bool weights = false;
  for (const HubFile& file : files) {
    if (file.name.ends_with(".gguf")) gguf.push_back(file);
    const bool shard = file.name.starts_with("model") &&
                       (file.name.ends_with(".safetensors") || file.name.ends_with(".safetensors.index.json"));
    weights = weights || (shard && file.name.find('/') == std::string::npos);
    constexpr std::string_view kBeside[] = {"config.json",           "generation_config.json", "tokenizer.json",
                                            "tokenizer_config.json", "chat_template.jinja",    "chat_template.json"};
    const bool beside = std::find(std::begin(kBeside), std::end(kBeside), file.name) != std::end(kBeside);
    if (beside || (shard && file.name.find('/') == std::string::npos)) folder.push_back(file);
  }
  if (name.file.empty() && weights) return folder;
  std::sort(gguf.begin(), gguf.end(), [](const HubFile& a, const HubFile& b) { return a.name < b.name; });
  std::vector<std::vector<HubFile>> models;  // each with its parts
  for (const HubFile& file : gguf) {
    const std::optional<GgufPart> part = PartOfSplitGguf(file.name);
    if (part && part->number > 1) {
      if (!models.empty()) models.back().push_back(file);
    } else {
      models.push_back({file});
    }
  }
  std::vector<std::string> names;
  std::vector<std::vector<HubFile>> matching;
  for (const std::vector<HubFile>& model : models) {
    names.push_back(model.front().name);
    if (model.front().name == name.file) return model;
    if (model.front().name.find(name.file) != std::string::npos) matching.push_back(model);
  }
  if (matching.size() == 1) return matching.front();
  if (names.empty()) {
    Throw(PHSA_INVALID_ARGUMENT, "{}: has neither model.safetensors nor a .gguf file", name.repository);
  }
  ThrowInvalid("{}: {}; name one: phsa models fetch {}:FILE with one of {}", name.repository,
               matching.empty() ? fmt::format("has no .gguf file {}", Quoted(name.file))
                                : fmt::format("has {} such .gguf files", matching.size()),
               name.repository, fmt::join(names, ", "));
}

fs::path FetchFromHub(const HubName& name, const std::function<void(const FetchProgress&)>& progress,
                      const std::function<bool()>& stop) {
  return HubFetcher(name, progress, stop).Run();
}

}  // namespace phsa
