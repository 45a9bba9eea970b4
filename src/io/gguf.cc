#include "io/gguf.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "base/errors.h"

namespace phsa {
namespace {

constexpr char kMagic[] = {'G', 'G', 'U', 'F'};
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kLargestAlignment = 1 << 20;
constexpr uint32_t kMaxDimensions = 4;
// The fewest bytes that an entry and a tensor can take, to judge their counts before anything is allocated: an empty
// key, a type and one byte; an empty name, the number of dimensions, one of them, a type and an offset.
constexpr uint64_t kSmallestEntry = 8 + 4 + 1;
constexpr uint64_t kSmallestTensor = 8 + 4 + 8 + 4 + 8;
// Far above every known model. What we keep of one is several times what the file needs for it.
constexpr uint64_t kMostEntries = 1 << 20;
constexpr uint64_t kMostTensors = 1 << 20;

constexpr const char* kSupportedTypes =
    "f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4";

// GGML's numbers of the types that exist; those without a TensorType are named in the refusal.
struct FileType {
  const char* name;
  uint32_t number;
  std::optional<TensorType> type;
};
constexpr FileType kFileTypes[] = {
    {"f32", 0, TensorType::kF32},       {"f16", 1, TensorType::kF16},      {"q4_0", 2, TensorType::kQ4_0},
    {"q4_1", 3, TensorType::kQ4_1},     {"q5_0", 6, TensorType::kQ5_0},    {"q5_1", 7, TensorType::kQ5_1},
    {"q8_0", 8, TensorType::kQ8_0},     {"q8_1", 9, std::nullopt},         {"q2_k", 10, TensorType::kQ2_K},
    {"q3_k", 11, TensorType::kQ3_K},    {"q4_k", 12, TensorType::kQ4_K},   {"q5_k", 13, TensorType::kQ5_K},
    {"q6_k", 14, TensorType::kQ6_K},    {"q8_k", 15, std::nullopt},        {"iq2_xxs", 16, std::nullopt},
    {"iq2_xs", 17, std::nullopt},       {"iq3_xxs", 18, std::nullopt},     {"iq1_s", 19, std::nullopt},
    {"iq4_nl", 20, TensorType::kIq4Nl}, {"iq3_s", 21, std::nullopt},       {"iq2_s", 22, std::nullopt},
    {"iq4_xs", 23, TensorType::kIq4Xs}, {"i8", 24, std::nullopt},          {"i16", 25, std::nullopt},
    {"i32", 26, std::nullopt},          {"i64", 27, std::nullopt},         {"f64", 28, std::nullopt},
    {"iq1_m", 29, std::nullopt},        {"bf16", 30, TensorType::kBf16},   {"tq1_0", 34, std::nullopt},
    {"tq2_0", 35, std::nullopt},        {"mxfp4", 39, TensorType::kMxfp4}, {"nvfp4", 40, std::nullopt},
};

// Bytes of a scalar, the smallest that a string can have (its length), 0 for arrays and what is no type.
uint64_t ElementBytes(GgufType type) {
  switch (type) {
    case GgufType::kUint8:
    case GgufType::kInt8:
    case GgufType::kBool: return 1;
    case GgufType::kUint16:
    case GgufType::kInt16: return 2;
    case GgufType::kUint32:
    case GgufType::kInt32:
    case GgufType::kFloat32: return 4;
    case GgufType::kUint64:
    case GgufType::kInt64:
    case GgufType::kFloat64:
    case GgufType::kString: return 8;
    case GgufType::kArray: break;
  }
  return 0;
}

const char* TypeName(GgufType type) {
  switch (type) {
    case GgufType::kUint8: return "uint8";
    case GgufType::kInt8: return "int8";
    case GgufType::kUint16: return "uint16";
    case GgufType::kInt16: return "int16";
    case GgufType::kUint32: return "uint32";
    case GgufType::kInt32: return "int32";
    case GgufType::kFloat32: return "float32";
    case GgufType::kBool: return "bool";
    case GgufType::kString: return "string";
    case GgufType::kArray: return "array";
    case GgufType::kUint64: return "uint64";
    case GgufType::kInt64: return "int64";
    case GgufType::kFloat64: return "float64";
  }
  return "unknown";
}

template <class T>
T Load(const uint8_t* data) {
  T value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

std::string_view Text(const uint8_t* data, uint64_t bytes) {
  return {reinterpret_cast<const char*>(data), static_cast<size_t>(bytes)};
}

// Of a scalar of an integer type; nothing for other types and what int64 cannot hold.
std::optional<int64_t> ScalarInteger(GgufType type, const uint8_t* data) {
  switch (type) {
    case GgufType::kUint8: return Load<uint8_t>(data);
    case GgufType::kInt8: return Load<int8_t>(data);
    case GgufType::kUint16: return Load<uint16_t>(data);
    case GgufType::kInt16: return Load<int16_t>(data);
    case GgufType::kUint32: return Load<uint32_t>(data);
    case GgufType::kInt32: return Load<int32_t>(data);
    case GgufType::kInt64: return Load<int64_t>(data);
    case GgufType::kUint64: {
      const auto value = Load<uint64_t>(data);
      if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return static_cast<int64_t>(value);
      return std::nullopt;
    }
    default: return std::nullopt;
  }
}

std::string ScalarText(GgufType type, const uint8_t* data) {
  if (const auto integer = ScalarInteger(type, data)) return fmt::format("{}", *integer);
  if (type == GgufType::kUint64) return fmt::format("{}", Load<uint64_t>(data));
  if (type == GgufType::kFloat32) return fmt::format("{}", Load<float>(data));
  if (type == GgufType::kFloat64) return fmt::format("{}", Load<double>(data));
  PHSA_CHECK(type == GgufType::kBool);
  return Load<uint8_t>(data) != 0 ? "true" : "false";
}

[[noreturn]] void ThrowNotGguf(const MappedFile& file) {
  const std::string_view text = Text(file.data(), file.size());
  const std::string start = Quoted(text.substr(0, sizeof(kMagic)));
  if (text.starts_with("version https://git-lfs")) {
    ThrowInvalid("{}: is a Git LFS pointer, not the model itself: run `git lfs pull` in its repository", file.path());
  }
  if (text.starts_with("<!DOCTYPE") || text.starts_with("<!doctype") || text.starts_with("<html")) {
    ThrowInvalid("{}: is a web page, not a model: the download was answered with HTML; fetch the file again",
                 file.path());
  }
  ThrowInvalid("{}: begins with {}, a GGUF file with \"GGUF\": give a .gguf file or a Hugging Face folder", file.path(),
               start);
}

}  // namespace

// Walks the header. Nothing is read, and nothing allocated, before it is known to be there.
class GgufFile::Reader {
 public:
  explicit Reader(const MappedFile& file) : file_(file) {}

  uint64_t offset() const { return offset_; }
  uint64_t left() const { return file_.size() - offset_; }

  // What is being read, for messages.
  void Describe(std::string what) { what_ = std::move(what); }

  template <class T>
  T Read() {
    return Load<T>(Skip(sizeof(T)));
  }

  std::string_view ReadString() {
    const auto bytes = Read<uint64_t>();
    return Text(Skip(bytes), bytes);
  }

  const uint8_t* Skip(uint64_t bytes) {
    if (bytes > left()) {
      ThrowInvalid(
          "{}: {} at offset {} needs {} bytes, the file ends at {}: the file is cut or damaged; fetch it again",
          file_.path(), what_, offset_, bytes, file_.size());
    }
    const uint8_t* data = file_.data() + offset_;
    offset_ += bytes;
    return data;
  }

  // A number of things that take at least `smallest` bytes each.
  uint64_t ReadCount(uint64_t smallest, uint64_t most = std::numeric_limits<uint64_t>::max()) {
    const uint64_t at = offset_;
    const auto count = Read<uint64_t>();
    if (count > left() / smallest) {
      ThrowInvalid(
          "{}: {} at offset {} is {}, too many for the {} bytes left: the file is cut or damaged; fetch it again",
          file_.path(), what_, at, count, left());
    }
    if (count > most) {
      ThrowInvalid("{}: {} at offset {} is {}; allowed: at most {}", file_.path(), what_, at, count, most);
    }
    return count;
  }

  GgufType ReadType() {
    const uint64_t at = offset_;
    const auto number = Read<uint32_t>();
    if (number > static_cast<uint32_t>(GgufType::kFloat64)) {
      ThrowInvalid("{}: {} at offset {} has the type {}; allowed: 0 to 12: the file is damaged; fetch it again",
                   file_.path(), what_, at, number);
    }
    return static_cast<GgufType>(number);
  }

  GgufValue ReadValue() {
    GgufValue value;
    value.type = ReadType();
    if (value.type == GgufType::kString) {
      value.count = Read<uint64_t>();
      value.offset = offset_;
      value.data = Skip(value.count);
    } else if (value.type == GgufType::kArray) {
      const uint64_t at = offset_;
      value.element = ReadType();
      const uint64_t element_bytes = ElementBytes(value.element);
      if (element_bytes == 0) {
        ThrowInvalid("{}: {} at offset {} is an array of arrays, which no known key has", file_.path(), what_, at);
      }
      value.count = ReadCount(element_bytes);
      value.offset = offset_;
      value.data = file_.data() + offset_;
      if (value.element == GgufType::kString) {
        for (uint64_t i = 0; i < value.count; ++i) ReadString();
      } else {
        Skip(value.count * element_bytes);
      }
    } else {
      value.offset = offset_;
      value.data = Skip(ElementBytes(value.type));
    }
    return value;
  }

 private:
  const MappedFile& file_;
  uint64_t offset_ = 0;
  std::string what_ = "the header";
};

uint32_t GgufTypeNumber(TensorType type) {
  const auto* const found = std::find_if(std::begin(kFileTypes), std::end(kFileTypes),
                                         [&](const FileType& known) { return known.type == type; });
  PHSA_CHECK(found != std::end(kFileTypes));
  return found->number;
}

bool HasGgufMagic(const MappedFile& file) {
  return file.size() >= sizeof(kMagic) && std::memcmp(file.data(), kMagic, sizeof(kMagic)) == 0;
}

GgufFile::GgufFile(MappedFile file) : file_(std::move(file)) {
  const std::string& path = file_.path();
  if (file_.size() == 0) ThrowInvalid("{}: is empty (0 bytes): fetch it again", path);
  if (!HasGgufMagic(file_)) ThrowNotGguf(file_);

  Reader reader(file_);
  reader.Skip(sizeof(kMagic));
  version_ = reader.Read<uint32_t>();
  if (version_ != 0 && (version_ & 0xffffu) == 0) {
    ThrowInvalid("{}: is a big-endian GGUF file; allowed: little-endian ones", path);
  }
  if (version_ == 1) ThrowInvalid("{}: is GGUF version 1; allowed: 2 and 3: convert it with a newer tool", path);
  if (version_ != 2 && version_ != 3) ThrowInvalid("{}: is GGUF version {}; allowed: 2 and 3", path, version_);

  reader.Describe("the number of tensors");
  const uint64_t tensor_count = reader.ReadCount(kSmallestTensor, kMostTensors);
  reader.Describe("the number of metadata entries");
  const uint64_t entry_count = reader.ReadCount(kSmallestEntry, kMostEntries);

  entries_.reserve(entry_count);
  for (uint64_t i = 0; i < entry_count; ++i) {
    reader.Describe(fmt::format("metadata key {} of {}", i + 1, entry_count));
    const uint64_t at = reader.offset();
    const std::string_view key = reader.ReadString();
    if (!entry_by_key_.emplace(key, entries_.size()).second) {
      ThrowInvalid("{}: the metadata key {} at offset {} is there twice", path, Quoted(key), at);
    }
    reader.Describe("the value of " + Quoted(key));
    entries_.push_back({key, reader.ReadValue()});
  }
  ReadTensors(&reader, tensor_count);
}

void GgufFile::ReadTensors(Reader* reader, uint64_t count) {
  const std::string& path = file_.path();
  tensors_.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    reader->Describe(fmt::format("tensor {} of {}", i + 1, count));
    const uint64_t at = reader->offset();
    const std::string_view name = reader->ReadString();
    if (!tensor_by_name_.emplace(name, tensors_.size()).second) {
      ThrowInvalid("{}: the tensor {} at offset {} is there twice", path, Quoted(name), at);
    }
    reader->Describe("the tensor " + Quoted(name));

    Tensor tensor;
    tensor.name = std::string(name);
    tensor.file = path.c_str();
    const auto dimensions = reader->Read<uint32_t>();
    if (dimensions < 1 || dimensions > kMaxDimensions) {
      ThrowInvalid("{}: the tensor {} at offset {} has {} dimensions; allowed: 1 to {}", path, Quoted(name), at,
                   dimensions, kMaxDimensions);
    }
    uint64_t elements = 1;
    for (uint32_t d = 0; d < dimensions; ++d) {
      const auto size = reader->Read<uint64_t>();
      if (size == 0 || size > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / elements) {
        ThrowInvalid("{}: the tensor {} at offset {} has a dimension of {}: the file is damaged; fetch it again", path,
                     Quoted(name), at, size);
      }
      elements *= size;
      tensor.shape.push_back(static_cast<int64_t>(size));
    }
    const int64_t columns = tensor.shape.front();
    std::reverse(tensor.shape.begin(), tensor.shape.end());

    const auto number = reader->Read<uint32_t>();
    const auto* known = std::find_if(std::begin(kFileTypes), std::end(kFileTypes),
                                     [&](const FileType& type) { return type.number == number; });
    if (known == std::end(kFileTypes) || !known->type) {
      ThrowInvalid("{}: the tensor {} at offset {} has the type {}; allowed: {}", path, Quoted(name), at,
                   known == std::end(kFileTypes) ? std::to_string(number) : known->name, kSupportedTypes);
    }
    tensor.type = *known->type;
    const int32_t block = TensorTypeBlockElements(tensor.type);
    if (columns % block != 0) {
      ThrowInvalid("{}: the tensor {} at offset {} has rows of {} elements; allowed for {}: multiples of {}", path,
                   Quoted(name), at, columns, known->name, block);
    }
    const uint64_t blocks = elements / static_cast<uint64_t>(block);
    if (blocks > file_.size() / TensorTypeBlockBytes(tensor.type)) {
      ThrowInvalid(
          "{}: the tensor {} at offset {} has {} elements, more than the file's {} bytes can hold: the file is "
          "cut or damaged; fetch it again",
          path, Quoted(name), at, elements, file_.size());
    }
    tensor.bytes = blocks * TensorTypeBlockBytes(tensor.type);
    tensor.file_offset = reader->Read<uint64_t>();  // from the start of the data, until PlaceTensors
    tensors_.push_back(std::move(tensor));
  }

  constexpr std::string_view kAlignmentKey = "general.alignment";
  const auto alignment = static_cast<uint64_t>(Integer(kAlignmentKey).value_or(kDefaultAlignment));
  if (alignment < 8 || alignment > kLargestAlignment || (alignment & (alignment - 1)) != 0) {
    ThrowInvalid("{} is {}; allowed: powers of 2 from 8 to {}", Where(kAlignmentKey), alignment, kLargestAlignment);
  }
  alignment_ = alignment;
  header_end_ = reader->offset();
  data_start_ = (header_end_ + alignment - 1) / alignment * alignment;
  PlaceTensors(data_start_, alignment);
}

void GgufFile::PlaceTensors(uint64_t data_start, uint64_t alignment) {
  const std::string& path = file_.path();
  for (Tensor& tensor : tensors_) {
    const uint64_t relative = tensor.file_offset;
    if (relative % alignment != 0) {
      ThrowInvalid(
          "{}: the tensor {} lies at {} of the data; allowed: multiples of {}: the file is damaged; fetch it again",
          path, Quoted(tensor.name), relative, alignment);
    }
    constexpr uint64_t kFar = std::numeric_limits<uint64_t>::max();
    const uint64_t begin = relative > kFar - data_start ? kFar : data_start + relative;
    if (begin > file_.size() || tensor.bytes > file_.size() - begin) {
      ThrowInvalid(
          "{}: the tensor {} at offset {} needs {} bytes, the file ends at {}: the file is cut or damaged; "
          "fetch it again",
          path, Quoted(tensor.name), begin, tensor.bytes, file_.size());
    }
    tensor.file_offset = begin;
    tensor.data = file_.data() + tensor.file_offset;
  }

  std::vector<size_t> order(tensors_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return tensors_[a].file_offset < tensors_[b].file_offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    const Tensor& before = tensors_[order[i - 1]];
    const Tensor& after = tensors_[order[i]];
    if (before.file_offset + before.bytes > after.file_offset) {
      ThrowInvalid("{}: the tensors {} and {} overlap at offset {}: the file is damaged; fetch it again", path,
                   Quoted(before.name), Quoted(after.name), after.file_offset);
    }
  }
}

std::string GgufFile::HeaderWithText(std::string_view key, std::string_view text) const {
  constexpr size_t kCounts = sizeof(kMagic) + sizeof(uint32_t), kEntries = kCounts + 2 * sizeof(uint64_t);
  const auto bytes = [](auto value) { return std::string(reinterpret_cast<const char*>(&value), sizeof(value)); };
  const auto counted = [&](std::string_view one) { return bytes(uint64_t{one.size()}) + std::string(one); };
  const std::string_view old = Text(file_.data(), header_end_);
  // The bytes of the entry that goes: from its key's length to the next entry, which begins with its own.
  size_t gone_begin = kEntries, gone_end = kEntries;
  const auto known = entry_by_key_.find(key);
  if (known != entry_by_key_.end()) {
    const auto begin_of = [&](const Entry& entry) {
      return static_cast<size_t>(reinterpret_cast<const uint8_t*>(entry.key.data()) - file_.data()) - sizeof(uint64_t);
    };
    const Entry& entry = entries_[known->second];
    if (entry.value.type != GgufType::kString) WrongType(key, entry.value, "string");
    gone_begin = begin_of(entry);
    gone_end = static_cast<size_t>(entry.value.offset + entry.value.count);
  }
  const uint64_t entries = entries_.size() + (known == entry_by_key_.end() ? 1 : 0);
  std::string header(old.substr(0, kCounts));
  header += bytes(uint64_t{tensors_.size()}) + bytes(entries);
  header += counted(key) + bytes(static_cast<uint32_t>(GgufType::kString)) + counted(text);
  header += old.substr(kEntries, gone_begin - kEntries);
  header += old.substr(gone_end);
  header.resize((header.size() + alignment_ - 1) / alignment_ * alignment_);
  return header;
}

const Tensor* GgufFile::FindTensor(std::string_view name) const {
  const auto found = tensor_by_name_.find(name);
  return found == tensor_by_name_.end() ? nullptr : &tensors_[found->second];
}

const GgufValue* GgufFile::Find(std::string_view key) const {
  const auto found = entry_by_key_.find(key);
  return found == entry_by_key_.end() ? nullptr : &entries_[found->second].value;
}

std::string GgufFile::Where(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return fmt::format("{}: {}", file_.path(), key);
  return fmt::format("{}: {} at offset {}", file_.path(), key, value->offset);
}

void GgufFile::WrongType(std::string_view key, const GgufValue& value, const char* wanted) const {
  const bool array = value.type == GgufType::kArray;
  ThrowInvalid("{} has the type {}{}; allowed: {}", Where(key), array ? "array of " : "",
               TypeName(array ? value.element : value.type), wanted);
}

std::optional<int64_t> GgufFile::Integer(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> integer = ScalarInteger(value->type, value->data);
  if (!integer && value->type == GgufType::kUint64) {
    ThrowInvalid("{} is {}; allowed: at most {}", Where(key), ScalarText(value->type, value->data),
                 std::numeric_limits<int64_t>::max());
  }
  if (!integer) WrongType(key, *value, "an integer");
  return integer;
}

std::optional<double> GgufFile::Number(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type == GgufType::kFloat32) return Load<float>(value->data);
  if (value->type == GgufType::kFloat64) return Load<double>(value->data);
  if (const auto integer = ScalarInteger(value->type, value->data)) return static_cast<double>(*integer);
  WrongType(key, *value, "a number");
}

std::optional<bool> GgufFile::Bool(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kBool) WrongType(key, *value, "bool");
  return Load<uint8_t>(value->data) != 0;
}

std::optional<std::string_view> GgufFile::String(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kString) WrongType(key, *value, "string");
  return Text(value->data, value->count);
}

std::optional<std::vector<int64_t>> GgufFile::Integers(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kArray) WrongType(key, *value, "array of integers");
  std::vector<int64_t> out;
  out.reserve(value->count);
  const uint64_t bytes = ElementBytes(value->element);
  for (uint64_t i = 0; i < value->count; ++i) {
    const std::optional<int64_t> integer = ScalarInteger(value->element, value->data + i * bytes);
    if (!integer) WrongType(key, *value, "array of integers");
    out.push_back(*integer);
  }
  return out;
}

std::optional<std::vector<float>> GgufFile::Floats(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kArray || value->element != GgufType::kFloat32) {
    WrongType(key, *value, "array of 32-bit numbers");
  }
  std::vector<float> out(value->count);
  std::memcpy(out.data(), value->data, value->count * sizeof(float));
  return out;
}

std::optional<std::vector<std::string>> GgufFile::Strings(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kArray || value->element != GgufType::kString) {
    WrongType(key, *value, "array of strings");
  }
  std::vector<std::string> out;
  out.reserve(value->count);
  const uint8_t* next = value->data;
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto bytes = Load<uint64_t>(next);
    out.emplace_back(Text(next + 8, bytes));
    next += 8 + bytes;
  }
  return out;
}

std::string GgufValueText(const GgufValue& value) {
  if (value.type == GgufType::kString) return Quoted(Text(value.data, value.count));
  if (value.type != GgufType::kArray) return ScalarText(value.type, value.data);
  constexpr uint64_t kShown = 4;
  std::string out = fmt::format("{} × {} [", value.count, TypeName(value.element));
  const uint8_t* next = value.data;
  for (uint64_t i = 0; i < std::min(value.count, kShown); ++i) {
    if (i > 0) out += ", ";
    if (value.element == GgufType::kString) {
      const auto bytes = Load<uint64_t>(next);
      out += Quoted(Text(next + 8, bytes));
      next += 8 + bytes;
    } else {
      out += ScalarText(value.element, next);
      next += ElementBytes(value.element);
    }
  }
  return out + (value.count > kShown ? ", …]" : "]");
}

}  // namespace phsa
