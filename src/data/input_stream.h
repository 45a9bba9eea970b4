// A file's bytes in order, decompressed where the file is compressed.
#ifndef PHSA_DATA_INPUT_STREAM_H_
#define PHSA_DATA_INPUT_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace phsa {

// xz, gzip and zstd are known by their first bytes, whatever the file is called; anything else is taken as it is.
// Memory does not grow with the file. All throw phsa::Error naming the file and, where it is cut or corrupt, the place.
class InputStream {
 public:
  explicit InputStream(const std::string& path);  // "-": standard input
  ~InputStream();
  InputStream(const InputStream&) = delete;
  InputStream& operator=(const InputStream&) = delete;

  size_t Read(char* out, size_t size);               // how many bytes; 0: the end
  const std::string& name() const { return name_; }  // as messages say it
  uint64_t position() const { return position_; }    // bytes of the file itself that were read so far

  class Decoder;

 private:
  bool Fill();  // more of the file behind what is there; false: there is no more

  std::string name_;
  int descriptor_;
  uint64_t position_ = 0;
  std::vector<uint8_t> buffer_;
  size_t begin_ = 0, end_ = 0;  // of what is in the buffer and was not decoded yet
  std::unique_ptr<Decoder> decoder_;
};

}  // namespace phsa

#endif  // PHSA_DATA_INPUT_STREAM_H_
