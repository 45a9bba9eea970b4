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

std::string TextCache::NameOf(const Engine& engine, const TextAttention* attention) const {
  Sha256 hash;
  const auto add = [&](const std::string& part) { hash.Update(part.c_str(), part.size() + 1); };
  for (const auto& [name, value] : engine.cache_identity(attention)) {
    add(name);
    add(value);
  }
  // RestoreSequence judges it too; here it keeps two precisions from taking each other's place.
  const PageLayout& layout = engine.cache().layout();
  add(fmt::format("{} {}", layout.kv_type, layout.page_bytes));
  return hash.Hex().substr(0, 16) + "-";
}

fs::path TextCache::FileOf(const Engine& engine, const TextAttention* attention, std::span<const int32_t> text) const {
  Sha256 hash;
  hash.Update(text.data(), text.size_bytes());
  return folder_ / (NameOf(engine, attention) + hash.Hex().substr(0, 32) + kSuffix);
}

void TextCache::Discard(const fs::path& path, const char* why) const {
  std::error_code error;
  note_(fmt::format("{}; it is removed, and the text is prefilled again", why));
  fs::remove(path, error);
}

int32_t TextCache::Restore(Engine& engine, Session& session, std::span<const int32_t> text) const {
  const fs::path path = FileOf(engine, session.sequence().attention(), text);
  std::error_code error;
  if (!fs::exists(path, error)) return 0;
  Restore(engine, session.sequence(), text, {path, text.size()});
  return session.sequence().length();
}

void TextCache::Restore(const Engine& engine, Sequence& sequence, std::span<const int32_t> text,
                        const Beginning& from) const {
  try {
    sequence.Truncate(0);
    RestoreSequence(sequence, engine.cache_identity(sequence.attention()), text, from.file);
    std::error_code error;
    fs::last_write_time(from.file, fs::file_time_type::clock::now(), error);  // used: it stays longer than others
  } catch (const Error& failed) {
    Discard(from.file, failed.what());
  }
}

bool TextCache::Save(Engine& engine, Session& session, std::span<const int32_t> text) const {
  return Write(engine, session.sequence(), FileOf(engine, session.sequence().attention(), text));
}

bool TextCache::Write(const Engine& engine, const Sequence& sequence, const fs::path& path) const {
  try {
    // What texts say is nobody else's business.
    if (fs::create_directories(folder_)) fs::permissions(folder_, fs::perms::owner_all);
    const auto length = static_cast<size_t>(sequence.length());
    const uint64_t bytes = PagesFor(length) * engine.cache().layout().page_bytes + length * sizeof(int32_t);
    if (bytes > limit_) {
      note_(fmt::format("not kept for the next time: it takes {} MB, and the cache may have {} MB", bytes >> 20,
                        limit_ >> 20));
      return false;
    }
    MakeRoom(bytes, path);
    SaveSequence(sequence, engine.cache_identity(sequence.attention()), path);
    return true;
  } catch (const Error& failed) {
    note_(fmt::format("not kept for the next time: {}", failed.what()));
  } catch (const fs::filesystem_error& failed) {
    note_(fmt::format("not kept for the next time: {}: {}", folder_.string(), failed.code().message()));
  }
  return false;
}

std::vector<std::pair<fs::path, std::vector<int32_t>>> TextCache::Texts(const std::string& name) const {
  std::vector<std::pair<fs::path, std::vector<int32_t>>> texts;
  const std::lock_guard lock(mutex_);
  std::error_code error;
  std::erase_if(tokens_, [&](const auto& known) { return !fs::exists(known.first, error); });
  for (fs::directory_iterator file(folder_, error), end; !error && file != end; file.increment(error)) {
    const fs::path& path = file->path();
    if (path.extension() != kSuffix || !path.filename().string().starts_with(name)) continue;
    auto known = tokens_.find(path);
    if (known == tokens_.end()) {
      try {
        known = tokens_.emplace(path, SavedTokens(path)).first;
      } catch (const Error& failed) {
        Discard(path, failed.what());
        continue;
      }
    }
    texts.emplace_back(*known);
  }
  return texts;
}

std::optional<TextCache::Beginning> TextCache::Find(const Engine& engine, const TextAttention* attention,
                                                    std::span<const int32_t> text) const {
  std::optional<Beginning> best;
  if (text.size() < kWorthKeeping) return best;
  for (const auto& [path, tokens] : Texts(NameOf(engine, attention))) {
    const size_t shared = CommonPrefix(tokens, text);
    if (shared >= kWorthKeeping && (!best || shared > best->tokens)) best = {path, shared};
  }
  return best;
}

bool TextCache::Keep(const Engine& engine, const Sequence& sequence) const {
  const auto length = static_cast<size_t>(sequence.length());
  if (length < kWorthKeeping) return false;
  const fs::path path = FileOf(engine, sequence.attention(), sequence.tokens());
  {
    const std::lock_guard lock(mutex_);
    if (!judged_.insert(fs::hash_value(path)).second) return false;
  }
  const std::optional<Beginning> known = Find(engine, sequence.attention(), sequence.tokens());
  if (known && known->tokens + kWorthKeeping > length) return false;
  if (!Write(engine, sequence, path)) return false;
  for (const auto& [other, tokens] : Texts(NameOf(engine, sequence.attention()))) {
    std::error_code error;
    const bool begins = CommonPrefix(tokens, sequence.tokens()) == tokens.size();
    if (begins && other != path) fs::remove(other, error);
  }
  return true;
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
