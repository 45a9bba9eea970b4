#include "eval/niah/export.h"

#include <algorithm>

#include "attention/policies.h"
#include "base/new_file.h"
#include "eval/tokens_read.h"

namespace phsa {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "phsa niah samples 1";

Json PunctuationIds(const Engine& engine, const NiahRuns& runs) {
  Json sets = Json::object();
  for (const NiahConfiguration& one : runs.configurations) {
    const std::string& name = one.attention.base.punctuation;
    if (IsDense(one.attention.base) || sets.contains(name)) continue;
    sets[name] = PunctuationOf(engine.tokenizer(), name).Ids();
  }
  return sets;
}

}  // namespace

void ExportNiah(const Engine& engine, const NiahPrompts& prompts, const NiahRuns& runs, const NiahHeader& header,
                const std::filesystem::path& path) {
  NewFile file(path);
  Json first = {{"format", kFormat}};
  first.update(header);
  first["vocabulary"] = std::min(engine.config().vocab_size, engine.tokenizer().vocab_size());
  first["punctuation"] = PunctuationIds(engine, runs);
  file.Write(NiahLine(first));

  const auto one_by_one = [](int32_t) { return 1; };
  ForEachNiahBatch(runs, NiahRecords{}, one_by_one, [&](std::span<const NiahMissing> samples) {
    const auto& [place, attentions] = samples.front();
    const NiahSample sample = prompts.Build(place.task, place.length, place.sample);
    const std::vector<int32_t> answer = engine.tokenizer().Encode(sample.answer, SpecialTokens::kAsText);
    Json records = Json::array();
    for (const LayerSettings* attention : attentions) {
      NiahRecord record = EmptyNiahRecord(place, sample, *attention);
      const auto tokens = static_cast<int32_t>(sample.tokens.size() + answer.size() - 1);
      const TokensRead count = CountTokensRead(engine.config(), *attention, tokens);
      record.read = count.read;
      record.dense = count.dense;
      records.push_back(NiahRecordToJson(record));
    }
    const int32_t free = runs.scoring == NiahScoring::kForced ? LeadingSpaces(engine.tokenizer(), answer) : 0;
    file.Write(NiahLine({{"tokens", sample.tokens},
                         {"answer_tokens", answer},
                         {"free_tokens", free},
                         {"records", std::move(records)}}));
    return true;
  });
  file.Keep();
}

}  // namespace phsa
