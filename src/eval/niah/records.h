// Results of single samples, in memory and as a file of JSON lines that a run appends to, goes on from, and shares.
#ifndef PHSA_EVAL_NIAH_RECORDS_H_
#define PHSA_EVAL_NIAH_RECORDS_H_

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "eval/niah/task.h"
#include "phsa/settings.h"

namespace phsa {

// What must be the same for samples to be comparable: model, seed, haystack, scoring, … as one JSON object, the first
// line of a file. Not in it: tasks, lengths, policies and the number of samples; a file may hold many.
using NiahHeader = nlohmann::ordered_json;

struct NiahRecord {
  NiahTask task = NiahTask::kSingle1;
  int32_t length = 0, sample = 0;
  LayerSettings attention;  // as Canonical() gives it
  std::vector<std::string> references;
  std::vector<double> depths;   // of each reference, in percent
  std::vector<bool> found;      // each reference
  std::string answer;           // what the model wrote
  int32_t tokens = 0;           // of the prompt
  int64_t read = 0, dense = 0;  // tokens that queries read, and what dense attention reads
  double seconds = 0;
  // Mean negative log-likelihood of the references' tokens, where the answer was prefilled and not decoded.
  std::optional<double> nll;

  double score() const;  // share of the references that were found
};

// How well a window of prose was predicted, which `phsa tune` measures beside the needles.
struct NiahProse {
  int32_t length = 0, window = 0;
  LayerSettings attention;  // as Canonical() gives it
  double loss = 0;          // natural logarithm, a token
};

// A line of the file.
nlohmann::ordered_json NiahRecordToJson(const NiahRecord& record);
std::string NiahLine(const nlohmann::ordered_json& json);  // with its end

// Settings as records hold them: equal where the attention is. Dense attention has no K, and a float is the one that
// its JSON gives.
LayerSettings Canonical(const LayerSettings& settings);

class NiahRecords {
 public:
  bool Contains(NiahTask task, int32_t length, const LayerSettings& attention, int32_t sample) const;
  // Throws phsa::Error where the sample is there with another result; `place` is for the message.
  void Add(NiahRecord record, const std::string& place);
  const std::vector<NiahRecord>& all() const { return records_; }
  // Null: it is not there.
  const NiahRecord* Find(NiahTask task, int32_t length, const LayerSettings& attention, int32_t sample) const;
  void AddProse(const NiahProse& prose);
  std::optional<double> ProseLoss(int32_t length, const LayerSettings& attention, int32_t window) const;

 private:
  std::vector<NiahRecord> records_;
  std::map<std::string, size_t> index_;  // into records_
  std::map<std::string, double> prose_;
};

struct NiahFile {
  std::optional<NiahHeader> header;  // none: its line is not whole yet
  std::vector<NiahRecord> records;
  std::vector<NiahProse> prose;
  size_t whole_bytes = 0;  // up to the end of the last whole line
};
// A last line without its end, as a killed process leaves it, is dropped.
NiahFile ReadNiahFile(const std::filesystem::path& path);

// Throws phsa::Error naming the first difference and both places.
void CheckSameHeader(const NiahHeader& one, const std::string& one_place, const NiahHeader& other,
                     const std::string& other_place);

// A file that grows by one line a sample. One process at a time.
class NiahWriter {
 public:
  // Makes the file, or reads what is in it into `records`. Refuses a file of another run, and one that is not ours.
  NiahWriter(const std::filesystem::path& path, const NiahHeader& header, NiahRecords& records);
  ~NiahWriter();
  NiahWriter(const NiahWriter&) = delete;
  NiahWriter& operator=(const NiahWriter&) = delete;
  void Append(const NiahRecord& record);  // the line is with the system when this returns
  void Append(const NiahProse& prose);

 private:
  void Write(const std::string& line);
  std::string path_;
  int file_ = -1;
};

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_RECORDS_H_
