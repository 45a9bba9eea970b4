// The container GGUF, versions 2 and 3: metadata entries and tensors. What they mean is gguf_source.cc's business.
#ifndef PHSA_IO_GGUF_H_
#define PHSA_IO_GGUF_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "io/tensor.h"

namespace phsa {

// The numbers are the file's.
enum class GgufType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// A metadata value, still in the file.
struct GgufValue {
  GgufType type = GgufType::kUint8;
  GgufType element = GgufType::kUint8;  // of an array
  uint64_t count = 0;                   // elements of an array, bytes of a string
  const uint8_t* data = nullptr;        // the value, the string's bytes or the first element
  uint64_t offset = 0;                  // of `data` in the file
};

class GgufFile {
 public:
  struct Entry {
    std::string_view key;
    GgufValue value;
  };

  // Reads and checks the whole header: every count, length and offset, and that each tensor lies in the file, alone.
  explicit GgufFile(MappedFile file);

  const MappedFile& file() const { return file_; }
  uint32_t version() const { return version_; }
  const std::vector<Entry>& entries() const { return entries_; }  // in the file's order
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const Tensor* FindTensor(std::string_view name) const;

  // Typed values; nothing where the key is not there. They throw, naming file, key and offset, where the value has
  // another type. An integer may have any width.
  std::optional<int64_t> Integer(std::string_view key) const;
  std::optional<double> Number(std::string_view key) const;
  std::optional<bool> Bool(std::string_view key) const;
  std::optional<std::string_view> String(std::string_view key) const;
  std::optional<std::vector<int64_t>> Integers(std::string_view key) const;
  std::optional<std::vector<float>> Floats(std::string_view key) const;
  std::optional<std::vector<std::string>> Strings(std::string_view key) const;
  const GgufValue* Find(std::string_view key) const;

  // The header with this text among the metadata, in place of what the key had, up to where the tensors' data begin:
  // with the file's bytes from data_start() on behind it, it is the same model.
  std::string HeaderWithText(std::string_view key, std::string_view text) const;
  uint64_t data_start() const { return data_start_; }

  // "{path}: {key} at offset {n}", for messages about a value.
  std::string Where(std::string_view key) const;

 private:
  class Reader;
  void ReadTensors(Reader* reader, uint64_t count);
  void PlaceTensors(uint64_t data_start, uint64_t alignment);
  [[noreturn]] void WrongType(std::string_view key, const GgufValue& value, const char* wanted) const;

  MappedFile file_;
  uint32_t version_ = 0;
  uint64_t header_end_ = 0, data_start_ = 0, alignment_ = 0;
  std::vector<Entry> entries_;
  std::vector<Tensor> tensors_;
  // Trees, not hash tables: nobody can choose names that make them slow.
  std::map<std::string_view, size_t> entry_by_key_;
  std::map<std::string_view, size_t> tensor_by_name_;
};

// GGML's number of a type.
uint32_t GgufTypeNumber(TensorType type);

bool HasGgufMagic(const MappedFile& file);

// The value as one short line of printable ASCII.
std::string GgufValueText(const GgufValue& value);

}  // namespace phsa

#endif  // PHSA_IO_GGUF_H_
