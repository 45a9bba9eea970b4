// What a model chooses and predicts, however its text comes into the cache:
//   cache_check MODEL WEIGHTS KV_TYPE THREADS SETTINGS_JSON SCRATCH_FILE <ids
// The text is read in one piece, in chunks of 1, 7 and 512, from a fork whose other half goes elsewhere, and from a
// cache that was saved and restored. Each way prints one line of JSON: choices that differ from those of the first way,
// the loss, and whether all logits have the same bits. "hash" serves to compare runs with other thread counts.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "io/model_source.h"
#include "io/sha256.h"
#include "model/decoder.h"
#include "model/kv_file.h"
#include "phsa/error.h"
#include "test_backend.h"

namespace phsa {
namespace {

struct Reading {
  std::vector<int32_t> choices;   // [layer][position][slots of all heads]
  double loss = 0;                // sum
  std::vector<std::string> hash;  // of each position's logits
};

class Reader {
 public:
  Reader(Decoder& decoder, const ModelConfig& config, std::vector<int32_t> ids)
      : decoder_(decoder), config_(config), ids_(std::move(ids)) {
    decoder_.Observe([this](const LayerAttention& attention) { Note(attention); });
  }

  // Reads the text from where the sequence ends, as far as `end`.
  void Read(Sequence& sequence, size_t chunk, size_t end, Reading& reading) {
    reading_ = &reading;
    reading.hash.resize(ids_.size());
    for (size_t first; (first = static_cast<size_t>(sequence.length())) < end;) {
      const size_t count = std::min(chunk, end - first);
      const BatchItem item{&sequence, std::span<const int32_t>(ids_).subspan(first, count), BatchItem::Logits::kAll};
      decoder_.Step({&item, 1}, [&](int32_t, int32_t row, const LogitsRow& logits) {
        const size_t at = first + static_cast<size_t>(row);
        Sha256 hash;
        hash.Update(logits.All().data(), logits.All().size_bytes());
        reading.hash[at] = hash.Hex();
        if (at + 1 == ids_.size()) return;
        reading.loss += logits.LogSumExp() - static_cast<double>(logits[ids_[at + 1]]);
      });
    }
  }
  const std::vector<int32_t>& ids() const { return ids_; }

 private:
  void Note(const LayerAttention& attention) {
    const auto slots =
        static_cast<size_t>(attention.plan.SelectionHeads()) * static_cast<size_t>(attention.plan.SelectionSlots());
    const size_t count = static_cast<size_t>(attention.q_lens[0]) * slots;
    reading_->choices.resize(static_cast<size_t>(config_.num_layers) * ids_.size() * slots, -2);
    const size_t first = static_cast<size_t>(attention.kv_lens[0] - attention.q_lens[0]);
    std::copy_n(attention.params.selection, count,
                reading_->choices.begin() +
                    static_cast<int64_t>((static_cast<size_t>(attention.layer) * ids_.size() + first) * slots));
  }

  Decoder& decoder_;
  const ModelConfig& config_;
  std::vector<int32_t> ids_;
  Reading* reading_ = nullptr;
};

void Print(const char* way, const Reading& reading, const Reading& first) {
  size_t differ = 0;
  for (size_t i = 0; i < first.choices.size(); ++i) differ += reading.choices[i] != first.choices[i] ? 1 : 0;
  Sha256 all;
  for (const std::string& hash : reading.hash) all.Update(hash.data(), hash.size());
  const double positions = static_cast<double>(first.hash.size() - 1);
  std::printf(
      "{\"way\":\"%s\",\"choices\":%zu,\"differ\":%zu,\"loss\":%.9f,\"loss_difference\":%.3e,"
      "\"same_bits\":%s,\"hash\":\"%s\"}\n",
      way, first.choices.size(), differ, reading.loss / positions, std::fabs(reading.loss - first.loss) / positions,
      reading.hash == first.hash ? "true" : "false", all.Hex().c_str());
  std::fflush(stdout);
}

int Main(char** argv) {
  std::vector<int32_t> ids;
  for (int32_t id = 0; std::cin >> id;) ids.push_back(id);
  if (ids.size() < 16) throw Error(PHSA_INVALID_ARGUMENT, "at least 16 ids are needed");
  const size_t length = ids.size(), half = length / 2 + 5;  // within a page and within a block
  const auto source = ModelSource::Open(argv[1]);
  const ModelConfig& config = source->config();
  const int32_t kv_type = KvTypeFromName(argv[3]);
  const LayerSettings settings = SettingsFromJson(argv[5]);
  const KvIdentity identity = ModelIdentity(*source);
  ThreadPool threads(std::stoi(argv[4]));
  const auto backend =
      TestBackend(*source, WeightsModeFromName(argv[2]), kv_type, static_cast<int32_t>(length), threads);
  KvCache cache =
      TestCache(*backend, PageLayout(config, settings, kv_type), static_cast<int32_t>(2 * length / kPageTokens + 4));
  Decoder decoder(config, *backend, settings, threads);
  // Any flags will do, as long as they are the same each time.
  std::vector<uint8_t> flags(static_cast<size_t>(config.vocab_size));
  for (size_t i = 0; i < flags.size(); ++i) flags[i] = i < 40 ? 1 : 0;
  decoder.SetPunctuation(flags);
  Reader reader(decoder, config, ids);

  Reading whole;
  {
    Sequence sequence(cache);
    reader.Read(sequence, length, length, whole);
    Print("whole", whole, whole);
  }
  for (const size_t chunk : {1, 7, 512}) {
    Sequence sequence(cache);
    Reading reading;
    reader.Read(sequence, chunk, length, reading);
    Print(("chunks of " + std::to_string(chunk)).c_str(), reading, whole);
  }
  {
    Sequence sequence(cache);
    Reading reading;
    reader.Read(sequence, 512, half, reading);
    Sequence fork = sequence.Fork();
    // The other half goes on with another text, in the page that both had.
    const size_t further = half + kPageTokens;
    Reading elsewhere;
    Reader other(decoder, config, std::vector<int32_t>(further, ids.front()));
    other.Read(sequence, 512, further, elsewhere);
    Reader again(decoder, config, ids);
    again.Read(fork, 512, length, reading);
    Print("forked", reading, whole);
  }
  {
    Reader again(decoder, config, ids);
    Reading reading;
    {
      Sequence sequence(cache);
      again.Read(sequence, 512, half, reading);
      SaveSequence(sequence, identity, argv[6]);
    }
    Sequence restored(cache);
    RestoreSequence(restored, identity, ids, argv[6]);
    again.Read(restored, 512, length, reading);
    Print("restored", reading, whole);
  }
  return 0;
}

}  // namespace
}  // namespace phsa

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: cache_check MODEL WEIGHTS KV_TYPE THREADS SETTINGS_JSON SCRATCH_FILE <ids\n");
    return 2;
  }
  try {
    return phsa::Main(argv);
  } catch (const phsa::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
