#include "eval/niah/records.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "attention/policies.h"
#include "base/errors.h"
#include "base/mapped_file.h"
#include "base/new_file.h"

namespace phsa {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "phsa niah 1";
constexpr size_t kMaxFileBytes = size_t{4} << 30;
// Settings with layers have depth 3; deeper is not ours, and printing it would recurse as deep.
constexpr int kMaxDepth = 8;
constexpr uint64_t kMaxLayers = 4096;  // as in settings

std::string Dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string Key(NiahTask task, int32_t length, const LayerSettings& attention, int32_t sample) {
  return fmt::format("{} {} {} {}", Name(task), length, sample, SettingsToJson(attention));
}

std::string ProseKey(int32_t length, const LayerSettings& attention, int32_t window) {
  return fmt::format("{} {} {}", length, window, SettingsToJson(attention));
}

Json ParseLine(std::string_view line, const std::string& place) {
  const auto check_depth = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kMaxDepth) ThrowInvalid("{}: the JSON is nested deeper than samples are", place);
    return true;
  };
  Json json = Json::parse(line, check_depth, false);
  if (!json.is_object()) ThrowInvalid("{}: not a line that `phsa niah` wrote", place);
  return json;
}

int64_t Integer(const Json& json, const char* key, int64_t low, int64_t high) {
  const Json& value = json.at(key);
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX)) {
    ThrowInvalid("{} is not a whole number", key);
  }
  const int64_t number = value.get<int64_t>();
  if (number < low || number > high) ThrowInvalid("{} is {}; allowed: {} to {}", key, number, low, high);
  return number;
}

double Finite(const Json& value, const char* key) {
  const double number = value.get<double>();
  if (!std::isfinite(number)) ThrowInvalid("{} is not a finite number", key);
  return number;
}

NiahProse ProseFromJson(const Json& json) {
  NiahProse prose;
  prose.length = static_cast<int32_t>(Integer(json, "length", 1, INT32_MAX));
  prose.window = static_cast<int32_t>(Integer(json, "prose", 0, INT32_MAX));
  prose.attention = Canonical(SettingsFromJson(json.at("attention").dump()));
  prose.loss = Finite(json.at("loss"), "loss");
  return prose;
}

NiahRecord FromJson(const Json& json) {
  NiahRecord record;
  record.task = NiahTaskFromName(json.at("task").get_ref<const std::string&>());
  record.length = static_cast<int32_t>(Integer(json, "length", 1, INT32_MAX));
  record.sample = static_cast<int32_t>(Integer(json, "sample", 0, INT32_MAX));
  record.attention = Canonical(SettingsFromJson(json.at("attention").dump()));
  record.references = json.at("references").get<std::vector<std::string>>();
  record.depths = json.at("depths").get<std::vector<double>>();
  record.found = json.at("found").get<std::vector<bool>>();
  record.answer = json.at("answer").get<std::string>();
  record.tokens = static_cast<int32_t>(Integer(json, "tokens", 0, INT32_MAX));
  record.read = Integer(json, "read", 0, INT64_MAX);
  record.dense = Integer(json, "dense", 0, INT64_MAX);
  record.seconds = json.at("seconds").get<double>();
  if (json.contains("nll")) record.nll = Finite(json["nll"], "nll");
  const size_t references = static_cast<size_t>(Shape(record.task).references());
  if (record.references.size() != references || record.found.size() != references ||
      record.depths.size() != references) {
    ThrowInvalid("a sample of {} has {} references, depths and found", Name(record.task), references);
  }
  for (const double depth : record.depths) {
    if (!(depth >= 0 && depth <= 100)) ThrowInvalid("depths has {}; allowed: 0 to 100", depth);
  }
  return record;
}

// What reports take from it.
void CheckHeader(const Json& header, const std::string& place) {
  const bool good = header.contains("model") && header["model"].is_string() && header.contains("scoring") &&
                    header["scoring"].is_string() && header.contains("layers") &&
                    header["layers"].is_number_unsigned() && header["layers"].get<uint64_t>() <= kMaxLayers;
  if (good) NiahScoringFromName(header["scoring"].get_ref<const std::string&>());
  if (!good) ThrowInvalid("{}: model, scoring or layers is missing or not what `phsa niah` writes", place);
}

}  // namespace

double NiahRecord::score() const {
  return static_cast<double>(std::count(found.begin(), found.end(), true)) / static_cast<double>(found.size());
}

nlohmann::ordered_json NiahRecordToJson(const NiahRecord& record) {
  Json json = {{"task", Name(record.task)}, {"length", record.length},
               {"sample", record.sample},   {"attention", Json::parse(SettingsToJson(record.attention))},
               {"score", record.score()},   {"references", record.references},
               {"depths", record.depths},   {"found", record.found},
               {"answer", record.answer},   {"tokens", record.tokens},
               {"read", record.read},       {"dense", record.dense},
               {"seconds", record.seconds}};
  if (record.nll) json["nll"] = *record.nll;
  return json;
}

std::string NiahLine(const nlohmann::ordered_json& json) { return Dump(json) + '\n'; }

LayerSettings Canonical(const LayerSettings& settings) {
  LayerSettings all = SettingsFromJson(SettingsToJson(settings));
  if (all.layers.empty() && IsDense(all.base)) all.base = DenseSettings();
  return all;
}

bool NiahRecords::Contains(NiahTask task, int32_t length, const LayerSettings& attention, int32_t sample) const {
  return index_.count(Key(task, length, attention, sample)) > 0;
}

void NiahRecords::Add(NiahRecord record, const std::string& place) {
  const auto [at, is_new] =
      index_.try_emplace(Key(record.task, record.length, record.attention, record.sample), records_.size());
  if (is_new) {
    records_.push_back(std::move(record));
    return;
  }
  const NiahRecord& known = records_[at->second];
  if (known.references != record.references || known.found != record.found) {
    ThrowInvalid(
        "{}: sample {} of {} at {} tokens with {} is there twice with different results; merge files of one run", place,
        record.sample, Name(record.task), record.length, Name(record.attention.base.policy));
  }
}

const NiahRecord* NiahRecords::Find(NiahTask task, int32_t length, const LayerSettings& attention,
                                    int32_t sample) const {
  const auto at = index_.find(Key(task, length, attention, sample));
  return at == index_.end() ? nullptr : &records_[at->second];
}

void NiahRecords::AddProse(const NiahProse& prose) {
  prose_.try_emplace(ProseKey(prose.length, prose.attention, prose.window), prose.loss);
}

std::optional<double> NiahRecords::ProseLoss(int32_t length, const LayerSettings& attention, int32_t window) const {
  const auto at = prose_.find(ProseKey(length, attention, window));
  return at == prose_.end() ? std::nullopt : std::optional(at->second);
}

NiahFile ReadNiahFile(const std::filesystem::path& path) {
  const std::string text = ReadTextFile(path, kMaxFileBytes);
  NiahFile file;
  // The beginning of our first line may be all that a killed process wrote; other text is somebody's and stays.
  const std::string first = Dump({{"format", kFormat}});
  const std::string_view begin = std::string_view(first).substr(0, first.size() - 1);
  const size_t common = std::min(begin.size(), text.size());
  if (text.compare(0, common, begin, 0, common) != 0) {
    ThrowInvalid("{}: not a file that `phsa niah` wrote; give another name", path.string());
  }
  int64_t line_number = 0;
  for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
    const std::string place = fmt::format("{}:{}", path.string(), ++line_number);
    Json json = ParseLine(std::string_view(text).substr(at, end - at), place);
    file.whole_bytes = end + 1;
    if (line_number == 1) {
      CheckHeader(json, place);
      file.header = std::move(json);
      continue;
    }
    try {
      if (json.contains("prose")) {
        file.prose.push_back(ProseFromJson(json));
      } else {
        file.records.push_back(FromJson(json));
      }
    } catch (const Error& error) {
      ThrowInvalid("{}: {}", place, error.what());
    } catch (const nlohmann::json::exception&) {
      ThrowInvalid("{}: a field of the sample is missing or has another type", place);
    }
  }
  return file;
}

void CheckSameHeader(const NiahHeader& one, const std::string& one_place, const NiahHeader& other,
                     const std::string& other_place) {
  const auto text = [](const NiahHeader& header, const std::string& key) {
    return header.contains(key) ? Quoted(Dump(header[key])) : std::string("nothing");
  };
  const auto compare = [&](const NiahHeader& keys) {
    for (const auto& [key, value] : keys.items()) {
      if (one.contains(key) && other.contains(key) && one[key] == other[key]) continue;
      ThrowInvalid(
          "niah: {} has {} {}, {} has {}; such samples do not belong into one table; give another {}, or the same "
          "settings",
          one_place, key, text(one, key), other_place, text(other, key), Option{"out"});
    }
  };
  compare(one);
  compare(other);
}

NiahWriter::NiahWriter(const std::filesystem::path& path, const NiahHeader& header, NiahRecords& records)
    : path_(path.string()) {
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0) {
    ThrowInvalid("niah: cannot write to {}: {}; name a file in a folder that you may write to",
                 Option{"out", Quoted(path_, kQuotedPath)}, std::strerror(errno));
  }
  struct stat status {};
  if (fstat(file_, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(file_);
    ThrowInvalid("niah: {} is not a plain file", Option{"out", Quoted(path_, kQuotedPath)});
  }
  try {
    if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
      ThrowInvalid("niah: another run writes to {}; wait for it, or give another {}", path_, Option{"out"});
    }
    NiahHeader ours = {{"format", kFormat}};
    ours.update(header);
    NiahFile known = ReadNiahFile(path);
    if (known.header) CheckSameHeader(*known.header, path_, ours, "this run");
    for (NiahRecord& record : known.records) records.Add(std::move(record), path_);
    for (const NiahProse& prose : known.prose) records.AddProse(prose);
    if (ftruncate(file_, static_cast<off_t>(known.whole_bytes)) != 0) {
      Throw(PHSA_IO, "{}: {}", path_, std::strerror(errno));
    }
    if (!known.header) Write(NiahLine(ours));
  } catch (...) {
    close(file_);
    throw;
  }
}

NiahWriter::~NiahWriter() { close(file_); }

void NiahWriter::Write(const std::string& line) {
  if (!WriteAll(file_, line.data(), line.size())) Throw(PHSA_IO, "{}: {}", path_, std::strerror(errno));
}

void NiahWriter::Append(const NiahRecord& record) { Write(NiahLine(NiahRecordToJson(record))); }

void NiahWriter::Append(const NiahProse& prose) {
  Write(NiahLine({{"prose", prose.window},
                  {"length", prose.length},
                  {"attention", Json::parse(SettingsToJson(prose.attention))},
                  {"loss", prose.loss}}));
}

}  // namespace phsa
