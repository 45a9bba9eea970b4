#include "engine/text_cache.h"

#include <algorithm>
#include <system_error>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "io/sha256.h"

namespace phsa {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSuffix = ".kv";
// What a process that was killed left behind of a file it was writing; one that still writes needs no hour.
constexpr auto kAbandoned = std::chrono::hours(1);

struct Entry {
  fs::path path;
  uint64_t bytes;
  fs::file_time_type used;
};

}  // namespace

TextCache::TextCache(fs::path folder, uint64_t limit, std::function<void(const std::string& text)> note)
    : folder_(std::move(folder)), limit_(limit), note_(std::move(note)) {}

fs::path TextCache::FileOf(Engine& engine, std::span<const int32_t> text) const {
  Sha256 hash;
  const auto add = [&](const std::string& part) { hash.Update(part.c_str(), part.size() + 1); };
  for (const auto& [name, value] : engine.cache_identity()) {
    add(name);
    add(value);
  }
  // Session::Restore judges it too; here it keeps two precisions from taking each other's place.
  const PageLayout& layout = engine.cache().layout();
  add(fmt::format("{} {}", layout.dtype, layout.page_bytes));
  hash.Update(text.data(), text.size_bytes());
  return folder_ / (hash.Hex().substr(0, 40) + kSuffix);
}

int32_t TextCache::Restore(Engine& engine, Session& session, std::span<const int32_t> text) const {
  const fs::path path = FileOf(engine, text);
  std::error_code error;
  if (!fs::exists(path, error)) return 0;
  try {
    const int32_t tokens = session.Restore(path, text);
    fs::last_write_time(path, fs::file_time_type::clock::now(), error);  // used: it stays longer than others
    return tokens;
  } catch (const Error& failed) {
    note_(fmt::format("{}; it is removed, and the text is read again", failed.what()));
    fs::remove(path, error);
    return 0;
  }
}

bool TextCache::Save(Engine& engine, Session& session, std::span<const int32_t> text) const {
  try {
    // What texts say is nobody else's business.
    if (fs::create_directories(folder_)) fs::permissions(folder_, fs::perms::owner_all);
    const fs::path path = FileOf(engine, text);
    const KvCache& cache = engine.cache();
    const auto length = std::min(text.size(), static_cast<size_t>(session.sequence().length()));
    const uint64_t bytes = PagesFor(length) * cache.layout().page_bytes + length * sizeof(int32_t);
    if (bytes > limit_) {
      note_(fmt::format("not kept for the next time: it takes {} MB, and the cache may have {} MB", bytes >> 20,
                        limit_ >> 20));
      return false;
    }
    MakeRoom(bytes, path);
    session.Save(path);
    return true;
  } catch (const Error& failed) {
    note_(fmt::format("not kept for the next time: {}", failed.what()));
  } catch (const fs::filesystem_error& failed) {
    note_(fmt::format("not kept for the next time: {}: {}", folder_.string(), failed.code().message()));
  }
  return false;
}

void TextCache::MakeRoom(uint64_t bytes, const fs::path& keep) const {
  std::vector<Entry> entries;
  std::error_code error;
  const auto now = fs::file_time_type::clock::now();
  for (fs::directory_iterator file(folder_, error), end; !error && file != end; file.increment(error)) {
    std::error_code gone;  // another process makes room as well
    const fs::path& path = file->path();
    const uint64_t size = file->file_size(gone);
    const auto used = gone ? now : file->last_write_time(gone);
    if (gone || path == keep) continue;
    if (path.extension() == kSuffix) {
      entries.push_back({path, size, used});
    } else if (path.extension() == ".part" && path.string().find(kSuffix) != std::string::npos &&
               now - used > kAbandoned) {
      fs::remove(path, gone);
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.used < b.used; });
  uint64_t sum = bytes;
  for (const Entry& entry : entries) sum += entry.bytes;
  for (const Entry& entry : entries) {
    if (sum <= limit_) return;
    if (fs::remove(entry.path, error)) sum -= entry.bytes;
  }
}

}  // namespace phsa
