// A folder that keeps the KV cache of long texts, each in a file of its own (model/kv_file.h), for later processes.
#ifndef PHSA_ENGINE_TEXT_CACHE_H_
#define PHSA_ENGINE_TEXT_CACHE_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/session.h"

namespace phsa {

// A file's name is a fingerprint of all that its keys depend on (Engine::cache_identity), so that another model,
// precision, adapter or attention has files of its own, and one of the text's tokens. Several processes and threads may
// use a folder at once, each its own engine.
class TextCache {
 public:
  // Tokens that are prefilled again sooner than a file is written or restored for them.
  static constexpr size_t kWorthKeeping = 1024;

  // `limit`: bytes of all files; the ones that were not used for the longest time go first. `note` is told what went
  // wrong with a file: the cache saves time, and that it cannot is no reason to stop.
  TextCache(std::filesystem::path folder, uint64_t limit, std::function<void(const std::string& text)> note);

  // What the folder has of just this text, into the session's sequence; 0: nothing. A damaged file is removed.
  int32_t Restore(Engine& engine, Session& session, std::span<const int32_t> text) const;
  // Keeps the session's sequence, which begins `text` or is all of it. False: it was not kept, and `note` said why.
  bool Save(Engine& engine, Session& session, std::span<const int32_t> text) const;

  // The file whose text, with this attention, has the most of this one's beginning.
  struct Beginning {
    std::filesystem::path file;
    size_t tokens = 0;  // that they share
  };
  std::optional<Beginning> Find(const Engine& engine, const TextAttention* attention,
                                std::span<const int32_t> text) const;
  // Into an empty sequence, as far as they are the same. A damaged file is removed, and the sequence stays empty.
  void Restore(const Engine& engine, Sequence& sequence, std::span<const int32_t> text, const Beginning& from) const;
  // Keeps a sequence, in place of those that it begins with, where it is long and most of it is in no file yet. A text
  // is judged once: what had no room, or lost it to others since, is not written again. True: it was written.
  bool Keep(const Engine& engine, const Sequence& sequence) const;

 private:
  std::string NameOf(const Engine& engine, const TextAttention* attention) const;
  std::filesystem::path FileOf(const Engine& engine, const TextAttention* attention,
                               std::span<const int32_t> text) const;
  bool Write(const Engine& engine, const Sequence& sequence, const std::filesystem::path& path) const;
  void Discard(const std::filesystem::path& path, const char* why) const;
  // Of the files whose names begin so.
  std::vector<std::pair<std::filesystem::path, std::vector<int32_t>>> Texts(const std::string& name) const;
  void MakeRoom(uint64_t bytes, const std::filesystem::path& keep) const;

  std::filesystem::path folder_;
  uint64_t limit_;
  std::function<void(const std::string& text)> note_;
  mutable std::mutex mutex_;
  mutable std::map<std::filesystem::path, std::vector<int32_t>> tokens_;  // of files that were seen
  mutable std::unordered_set<size_t> judged_;                             // hashes of names
};

}  // namespace phsa

#endif  // PHSA_ENGINE_TEXT_CACHE_H_
