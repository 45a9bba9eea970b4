#include "eval/niah_export.h"

#include <algorithm>

#include "base/new_file.h"
#include "eval/query_blocks.h"

namespace phsa {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "phsa niah samples 1";

int64_t TokensReadInLayer(const Settings& settings, int32_t tokens) {
  const int64_t top_k = Chooses(settings.policy) ? settings.top_k : 0;
  int64_t read = 0;
  for (int32_t position = 0; position < tokens; ++position) {
    const QueryBlocks blocks = BlocksOf(settings, position);
    read += blocks.reads_all ? int64_t{position} + 1 : blocks.TokensRead(top_k);
  }
  return read;
}

// What the decoder counts as it reads `tokens` tokens: all layers and query heads.
TokensRead CountTokensRead(const ModelConfig& config, const LayerSettings& attention, int32_t tokens) {
  const int64_t base = TokensReadInLayer(attention.base, tokens);
  TokensRead count;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const auto own = attention.layers.find(layer);
    count.read += own == attention.layers.end() ? base : TokensReadInLayer(own->second, tokens);
  }
  count.read *= config.num_q_heads;
  count.dense = int64_t{tokens} * (tokens + 1) / 2 * config.num_layers * config.num_q_heads;
  return count;
}

Json PunctuationIds(const Engine& engine, const NiahPlan& plan) {
  Json sets = Json::object();
  for (const NiahConfiguration& one : plan.configurations) {
    const std::string& name = one.attention.base.punctuation;
    if (one.attention.base.policy == Policy::kDense || sets.contains(name)) continue;
    sets[name] = PunctuationOf(engine.tokenizer(), name).Ids();
  }
  return sets;
}

}  // namespace

void ExportNiah(const Engine& engine, const NiahPrompts& prompts, const NiahPlan& plan, const NiahHeader& header,
                const std::filesystem::path& path) {
  NewFile file(path);
  Json first = {{"format", kFormat}};
  first.update(header);
  first["vocabulary"] = std::min(engine.config().vocab_size, engine.tokenizer().vocab_size());
  first["punctuation"] = PunctuationIds(engine, plan);
  file.Write(NiahLine(first));

  ForEachNiahSample(plan, NiahRecords{}, [&](const NiahPlace& place, const auto& attentions) {
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
    const int32_t free = plan.scoring == NiahScoring::kForced ? LeadingSpaces(engine.tokenizer(), answer) : 0;
    file.Write(NiahLine({{"tokens", sample.tokens},
                         {"answer_tokens", answer},
                         {"free_tokens", free},
                         {"records", std::move(records)}}));
    return true;
  });
  file.Keep();
}

}  // namespace phsa
