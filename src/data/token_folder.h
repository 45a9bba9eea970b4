// The folder of tokens that training reads: shards of whole documents, and an index (docs/prepare.md).
#ifndef PHSA_DATA_TOKEN_FOLDER_H_
#define PHSA_DATA_TOKEN_FOLDER_H_

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/new_file.h"
#include "io/sha256.h"

namespace phsa {

// What an index says besides what was counted.
struct TokenFolderInfo {
  int32_t vocab_size = 0;
  int32_t end = -1;  // the token behind each document; -1: none
  std::string tokenizer_name, tokenizer_sha256;
  std::map<std::string, std::vector<int32_t>> punctuation;
  std::vector<std::string> sources;  // names of files
  uint64_t shard_tokens = 0;         // a shard has no more, but for a single document that is longer
};

// Everything is written beside what is there and takes its place at the end, the index last: until Publish() an older
// output in the folder stays as it was, and a folder without an index is not finished. All throw phsa::Error.
class TokenFolder {
 public:
  // Creates the folder. Refuses one that has an index, without `replace`, and one that another process writes to.
  TokenFolder(const std::filesystem::path& folder, TokenFolderInfo info, bool replace);
  ~TokenFolder();  // without Publish() nothing of this is left
  TokenFolder(const TokenFolder&) = delete;
  TokenFolder& operator=(const TokenFolder&) = delete;

  void Add(std::span<const int32_t> ids, size_t source);  // a document, without its end
  void Complete();                                        // all of it, with the index, on the disk
  void Publish();                                         // after Complete(), which is what may fail

  uint64_t documents() const { return documents_; }
  uint64_t tokens() const { return tokens_; }
  size_t shards() const { return shards_.size(); }
  bool wide() const { return info_.vocab_size > 1 << 16; }  // 4 bytes a token instead of 2

 private:
  struct Shard {
    uint64_t documents = 0, tokens = 0;
    std::string sha256;
  };
  struct OpenShard;
  void CloseShard();
  void WriteIndex();
  void RemoveWork();

  std::filesystem::path folder_, work_;
  TokenFolderInfo info_;
  bool created_ = false;
  int lock_ = -1;
  uint64_t documents_ = 0, tokens_ = 0;
  std::vector<Shard> shards_;
  std::vector<Shard> by_source_;  // without digests
  std::unique_ptr<OpenShard> open_;
};

}  // namespace phsa

#endif  // PHSA_DATA_TOKEN_FOLDER_H_
