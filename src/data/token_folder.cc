#include "data/token_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/errors.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBufferBytes = 1 << 20;
constexpr const char* kIndex = "index.json";
constexpr const char* kTokens = ".tokens";
constexpr const char* kOffsets = ".offsets";

static_assert(std::endian::native == std::endian::little, "the files are little-endian and written as they are");

std::string ShardName(size_t number) { return fmt::format("shard-{:05}", number); }

bool IsShardFile(const std::string& name) {
  const fs::path path(name);
  const std::string stem = path.stem().string();
  return (path.extension() == ".tokens" || path.extension() == ".offsets") && stem.starts_with("shard-") &&
         stem.size() >= ShardName(0).size() && stem.find_first_not_of("0123456789", 6) == std::string::npos;
}

[[noreturn]] void Fail(const fs::path& path, const char* what, int error) {
  Throw(PHSA_IO, "{}: {}: {}", path.string(), what, std::strerror(error));
}

void Rename(const fs::path& from, const fs::path& to) {
  if (rename(from.c_str(), to.c_str()) != 0) Fail(to, "cannot be written", errno);
}

// Few large writes, and a digest of all that went by.
class BufferedFile {
 public:
  explicit BufferedFile(const fs::path& path) : file_(path) { buffer_.reserve(kBufferBytes); }

  void Write(const void* data, size_t size) {
    const char* const bytes = static_cast<const char*>(data);
    if (buffer_.size() + size > kBufferBytes) Flush();
    if (size > kBufferBytes) {
      WriteOut(bytes, size);
    } else {
      buffer_.insert(buffer_.end(), bytes, bytes + size);
    }
  }
  void Keep() {
    Flush();
    file_.Keep();
  }
  std::string Hex() const { return sum_.Hex(); }

 private:
  void Flush() {
    WriteOut(buffer_.data(), buffer_.size());
    buffer_.clear();
  }
  void WriteOut(const char* bytes, size_t size) {
    file_.Write(bytes, size);
    sum_.Update(bytes, size);
  }

  NewFile file_;
  Sha256 sum_;
  std::vector<char> buffer_;
};

}  // namespace

struct TokenFolder::OpenShard {
  explicit OpenShard(const fs::path& path) : tokens(path.string() + kTokens), offsets(path.string() + kOffsets) {
    offsets.Write(&counts.tokens, sizeof(counts.tokens));
  }
  template <class T>
  void Add(std::span<const int32_t> ids, int32_t end) {
    std::vector<T> narrow(ids.begin(), ids.end());
    if (end >= 0) narrow.push_back(static_cast<T>(end));
    tokens.Write(narrow.data(), narrow.size() * sizeof(T));
    counts.tokens += narrow.size();
    ++counts.documents;
    offsets.Write(&counts.tokens, sizeof(counts.tokens));
  }
  Shard counts;
  BufferedFile tokens, offsets;
};

TokenFolder::TokenFolder(const fs::path& folder, TokenFolderInfo info, bool replace)
    : folder_(folder), work_(folder / ".part"), info_(std::move(info)), by_source_(info_.sources.size()) {
  std::error_code error;
  created_ = fs::create_directories(folder_, error);
  if (error) Fail(folder_, "cannot be created", error.value());
  lock_ = open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0) Fail(folder_, "cannot be opened", errno);
  try {
    if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) Fail(folder_, "cannot be locked", errno);
      created_ = false;
      ThrowInvalid("{}: another phsa prepare writes there; wait for it, or give another folder", folder_.string());
    }
    if (fs::exists(folder_ / kIndex) && !replace) {
      ThrowInvalid("{}: there are finished tokens in it; give another folder, or {} to replace them", folder_.string(),
                   Option{"force"});
    }
    RemoveWork();  // of a process that was killed: we hold the lock
    fs::create_directory(work_, error);
    if (error) Fail(work_, "cannot be created", error.value());
  } catch (...) {
    close(lock_);
    throw;
  }
}

TokenFolder::~TokenFolder() {
  open_.reset();
  std::error_code ignored;
  try {
    RemoveWork();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the next run removes it
  }
  if (created_) fs::remove(folder_, ignored);  // where it is empty
  close(lock_);
}

// Only what we write ourselves: whatever else somebody put there stays, and stops us.
void TokenFolder::RemoveWork() {
  std::error_code error;
  if (!fs::exists(work_, error)) return;
  for (const fs::directory_entry& entry : fs::directory_iterator(work_, error)) fs::remove(entry.path(), error);
  if (!fs::remove(work_, error)) Fail(work_, "cannot be removed", error.value());
}

void TokenFolder::Add(std::span<const int32_t> ids, size_t source) {
  const uint64_t size = ids.size() + (info_.end >= 0 ? 1 : 0);
  if (open_ && open_->counts.tokens + size > info_.shard_tokens) CloseShard();
  if (!open_) open_ = std::make_unique<OpenShard>(work_ / ShardName(shards_.size()));
  wide() ? open_->Add<uint32_t>(ids, info_.end) : open_->Add<uint16_t>(ids, info_.end);
  ++documents_;
  tokens_ += size;
  ++by_source_[source].documents;
  by_source_[source].tokens += size;
}

void TokenFolder::CloseShard() {
  open_->tokens.Keep();
  open_->offsets.Keep();
  open_->counts.sha256 = open_->tokens.Hex();
  shards_.push_back(open_->counts);
  open_.reset();
}

void TokenFolder::WriteIndex() {
  using Json = nlohmann::ordered_json;
  Json sources = Json::array(), shards = Json::array();
  for (size_t i = 0; i < by_source_.size(); ++i) {
    sources.push_back({{"file", fs::path(info_.sources[i]).filename().string()},
                       {"documents", by_source_[i].documents},
                       {"tokens", by_source_[i].tokens}});
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    shards.push_back({{"file", ShardName(i)},
                      {"documents", shards_[i].documents},
                      {"tokens", shards_[i].tokens},
                      {"sha256", shards_[i].sha256}});
  }
  const Json index = {{"format", "phsa tokens 1"},
                      {"dtype", wide() ? "uint32" : "uint16"},
                      {"vocab_size", info_.vocab_size},
                      {"end", info_.end < 0 ? Json(nullptr) : Json(info_.end)},
                      {"tokenizer", {{"name", info_.tokenizer_name}, {"sha256", info_.tokenizer_sha256}}},
                      {"punctuation", info_.punctuation},
                      {"documents", documents_},
                      {"tokens", tokens_},
                      {"sources", sources},
                      {"shards", shards}};
  NewFile file(work_ / kIndex);
  // A file's name may be any bytes.
  file.Write(index.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace) + "\n");
  file.Keep();
}

void TokenFolder::Complete() {
  if (open_) CloseShard();
  WriteIndex();
}

void TokenFolder::Publish() {
  std::error_code error;
  fs::remove(folder_ / kIndex, error);
  if (error) Fail(folder_ / kIndex, "cannot be replaced", error.value());
  std::vector<fs::path> old;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
    if (IsShardFile(entry.path().filename().string())) old.push_back(entry.path());
  }
  for (const fs::path& path : old) fs::remove(path, error);
  for (size_t i = 0; i < shards_.size(); ++i) {
    for (const char* kind : {kTokens, kOffsets}) {
      const std::string name = ShardName(i) + kind;
      Rename(work_ / name, folder_ / name);
    }
  }
  // Before the index says that they are there.
  if (fsync(lock_) != 0) Fail(folder_, "cannot be written", errno);
  Rename(work_ / kIndex, folder_ / kIndex);
  if (fsync(lock_) != 0) Fail(folder_, "cannot be written", errno);
}

}  // namespace phsa
