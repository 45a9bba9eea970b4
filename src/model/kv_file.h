// A sequence in a file: its tokens and pages, so that the next process needs no prefill of a long text.
//
//   PHSA KV cache 1\n
//   NAME: VALUE\n …       what the pages depend on, the number of tokens, the sha256 of what follows
//   \n
//   tokens (int32), pages as they lie in the cache; numbers as this machine has them
#ifndef PHSA_MODEL_KV_FILE_H_
#define PHSA_MODEL_KV_FILE_H_

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "model/kv_cache.h"

namespace phsa {

// What keys and values depend on besides the tokens, in words: a file is only read where all of it is the same.
using KvIdentity = std::vector<std::pair<std::string, std::string>>;  // no line breaks, no colon in a name

// What a model computes with, and how it reads text: a fingerprint of its weights (names, types, sizes and parts from
// all over each tensor: all of it would take as long as the prefill), its numbers, the whole of its adapter and
// tokenizer.
// `adapter`: the one that is added to the weights; null: none.
KvIdentity ModelIdentity(const ModelSource& source, const Adapter* adapter);
inline KvIdentity ModelIdentity(const ModelSource& source) { return ModelIdentity(source, source.adapter()); }

// The file appears whole or not at all.
void SaveSequence(const Sequence& sequence, const KvIdentity& identity, const std::filesystem::path& path);
// The tokens of a file's text, as the file says: that all of it is as it was written is seen where it is restored.
// Throws phsa::Error where it is no such file.
std::vector<int32_t> SavedTokens(const std::filesystem::path& path);
// Into an empty sequence: what the file's text and `wanted` have in common from their beginnings. Throws phsa::Error,
// and leaves the sequence empty, where the file is cut or changed, where it belongs to something else (naming what), or
// where it does not fit into the cache.
void RestoreSequence(Sequence& sequence, const KvIdentity& identity, std::span<const int32_t> wanted,
                     const std::filesystem::path& path);

}  // namespace phsa

#endif  // PHSA_MODEL_KV_FILE_H_
