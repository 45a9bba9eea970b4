#include "io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/errors.h"

namespace phsa {
namespace {

using Json = nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kMaxDimensions = 8;

// Reads the header as it is parsed, so that no more is kept of it than the tensors it describes:
//   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …, "__metadata__": {"format": "pt"}}
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(const MappedFile& file, size_t data_start, bool bytes)
      : file_(file), data_start_(data_start), bytes_(bytes) {}

  std::vector<Tensor> Take() { return std::move(tensors_); }

  bool start_object(size_t) override {
    if (depth_ == 2) Unexpected("an object");
    if (depth_ == 1) {
      dtype_.reset();
      has_shape_ = false;
      shape_.clear();
      offsets_.clear();
    }
    ++depth_;
    return true;
  }

  bool key(std::string& text) override {
    if (depth_ == 2) {
      field_ = std::move(text);
      return true;
    }
    name_ = std::move(text);
    metadata_ = name_ == "__metadata__";
    if (!names_.insert(name_).second) {
      ThrowInvalid("{}: the tensor {} is there twice", file_.path(), Quoted(name_));
    }
    return true;
  }

  bool end_object() override {
    --depth_;
    if (depth_ == 1 && !metadata_) AddTensor();
    return true;
  }

  bool start_array(size_t) override {
    if (depth_ != 2 || metadata_ || in_list_ || (field_ != "shape" && field_ != "data_offsets")) Unexpected("a list");
    in_list_ = true;
    if (field_ == "shape") {
      has_shape_ = true;
      shape_.clear();
    } else {
      offsets_.clear();
    }
    return true;
  }

  bool end_array() override {
    in_list_ = false;
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (!in_list_) Unexpected("a number");
    std::vector<uint64_t>& list = field_ == "shape" ? shape_ : offsets_;
    if (list.size() == kMaxDimensions) {
      ThrowInvalid("{}: the tensor {} has a list {} of more than {} numbers", file_.path(), Quoted(name_),
                   Quoted(field_), kMaxDimensions);
    }
    list.push_back(value);
    return true;
  }

  bool string(std::string& value) override {
    if (depth_ == 2 && metadata_) return true;
    if (depth_ != 2 || in_list_ || field_ != "dtype") Unexpected("a string");
    if (value == "F32") {
      dtype_ = TensorType::kF32;
    } else if (value == "F16") {
      dtype_ = TensorType::kF16;
    } else if (value == "BF16") {
      dtype_ = TensorType::kBf16;
    } else if (value == "U8" && bytes_) {
      dtype_ = TensorType::kU8;
    } else {
      ThrowInvalid("{}: the tensor {} has the dtype {}; allowed: F32, F16, BF16", file_.path(), Quoted(name_),
                   Quoted(value));
    }
    return true;
  }

  bool null() override { Unexpected("null"); }
  bool boolean(bool) override { Unexpected("a truth value"); }
  bool number_integer(int64_t) override { Unexpected("a negative number"); }
  bool number_float(double, const std::string&) override { Unexpected("a fraction"); }
  bool binary(Json::binary_t&) override { Unexpected("binary data"); }

  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    ThrowInvalid("{}: the header is not valid JSON at offset {}: the file is damaged; fetch it again", file_.path(),
                 kLengthBytes + position);
  }

 private:
  [[noreturn]] void Unexpected(const char* what) const {
    ThrowInvalid("{}: the header has {} at {} of the tensor {}: the file is damaged; fetch it again", file_.path(),
                 what, Quoted(field_), Quoted(name_));
  }

  void AddTensor() {
    const std::string& path = file_.path();
    if (!dtype_ || !has_shape_ || offsets_.size() != 2) {
      ThrowInvalid("{}: the tensor {} needs dtype, shape and two data_offsets", path, Quoted(name_));
    }
    Tensor tensor;
    tensor.type = *dtype_;
    tensor.file = path.c_str();
    const auto most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / TensorTypeBlockBytes(tensor.type);
    uint64_t elements = 1;
    for (const uint64_t size : shape_) {
      if (size == 0 || size > most / elements) {
        ThrowInvalid("{}: the tensor {} has a dimension of {}: the file is damaged; fetch it again", path,
                     Quoted(name_), size);
      }
      elements *= size;
      tensor.shape.push_back(static_cast<int64_t>(size));
    }
    tensor.bytes = elements * TensorTypeBlockBytes(tensor.type);
    const uint64_t begin = offsets_[0], end = offsets_[1];
    const uint64_t data_bytes = file_.size() - data_start_;
    if (begin > end || end - begin != tensor.bytes) {
      ThrowInvalid("{}: the tensor {} has the data_offsets {} to {}, its shape needs {} bytes", path, Quoted(name_),
                   begin, end, tensor.bytes);
    }
    if (end > data_bytes) {
      ThrowInvalid(
          "{}: the tensor {} at {} of the data needs {} bytes, the file ends at {}: the file is cut or damaged; "
          "fetch it again",
          path, Quoted(name_), begin, tensor.bytes, data_bytes);
    }
    tensor.file_offset = data_start_ + begin;
    tensor.data = file_.data() + tensor.file_offset;
    tensor.name = name_;
    tensors_.push_back(std::move(tensor));
  }

  const MappedFile& file_;
  const size_t data_start_;
  const bool bytes_;
  int depth_ = 0;  // 1: among the tensors, 2: among one's fields
  bool metadata_ = false, in_list_ = false, has_shape_ = false;
  std::string name_, field_;
  std::optional<TensorType> dtype_;
  std::vector<uint64_t> shape_, offsets_;
  std::set<std::string> names_;
  std::vector<Tensor> tensors_;
};

}  // namespace

std::vector<Tensor> ReadSafetensors(const MappedFile& file, bool bytes) {
  const std::string& path = file.path();
  if (file.size() == 0) ThrowInvalid("{}: is empty (0 bytes): fetch it again", path);
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  if (text.starts_with("version https://git-lfs")) {
    ThrowInvalid("{}: is a Git LFS pointer, not the weights: run `git lfs pull` in its repository", path);
  }
  if (file.size() < kLengthBytes) {
    ThrowInvalid("{}: has {} bytes, a safetensors file at least {}: the file is cut; fetch it again", path, file.size(),
                 kLengthBytes);
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes || header_bytes > file.size() - kLengthBytes) {
    ThrowInvalid(
        "{}: the header at offset {} needs {} bytes, the file ends at {}: not a safetensors file, or cut; fetch "
        "it again",
        path, kLengthBytes, header_bytes, file.size());
  }
  const std::string_view header = text.substr(kLengthBytes, header_bytes);
  if (!header.starts_with('{')) {
    ThrowInvalid("{}: the header at offset {} begins with {} and not with \"{{\": not a safetensors file", path,
                 kLengthBytes, Quoted(header.substr(0, 4)));
  }

  HeaderReader reader(file, kLengthBytes + header_bytes, bytes);
  Json::sax_parse(header.begin(), header.end(), &reader);
  std::vector<Tensor> tensors = reader.Take();
  std::sort(tensors.begin(), tensors.end(),
            [](const Tensor& a, const Tensor& b) { return a.file_offset < b.file_offset; });
  for (size_t i = 1; i < tensors.size(); ++i) {
    const Tensor& before = tensors[i - 1];
    const Tensor& after = tensors[i];
    if (before.file_offset + before.bytes > after.file_offset) {
      ThrowInvalid("{}: the tensors {} and {} overlap at offset {}: the file is damaged; fetch it again", path,
                   Quoted(before.name), Quoted(after.name), after.file_offset);
    }
  }
  return tensors;
}

}  // namespace phsa
