// A folder that keeps what was read of long texts, each in a file of its own (model/kv_file.h), for later processes.
#ifndef PHSA_ENGINE_TEXT_CACHE_H_
#define PHSA_ENGINE_TEXT_CACHE_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "engine/session.h"

namespace phsa {

// A file's name is a fingerprint of the text's tokens and of all that its keys depend on (Engine::cache_identity), so
// that another model, precision, adapter or attention has files of its own. Several processes may use a folder at once.
class TextCache {
 public:
  // `limit`: bytes of all files; the ones that were not used for the longest time go first. `note` is told what went
  // wrong with a file: the cache saves time, and that it cannot is no reason to stop.
  TextCache(std::filesystem::path folder, uint64_t limit, std::function<void(const std::string& text)> note);

  // What the folder has of this text, into the session's sequence; 0: nothing. A damaged file is removed.
  int32_t Restore(Engine& engine, Session& session, std::span<const int32_t> text) const;
  // Keeps the session's sequence, which begins `text` or is all of it. False: it was not kept, and `note` said why.
  bool Save(Engine& engine, Session& session, std::span<const int32_t> text) const;

 private:
  std::filesystem::path FileOf(Engine& engine, std::span<const int32_t> text) const;
  void MakeRoom(uint64_t bytes, const std::filesystem::path& keep) const;

  std::filesystem::path folder_;
  uint64_t limit_;
  std::function<void(const std::string& text)> note_;
};

}  // namespace phsa

#endif  // PHSA_ENGINE_TEXT_CACHE_H_
