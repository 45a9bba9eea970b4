// `phsa prepare`: texts to token shards, which `python -m phsa.train` reads.
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "base/errors.h"
#include "cli/commands.h"
#include "cli/load_tokenizer.h"
#include "cli/terminal.h"
#include "data/prepare.h"
#include "engine/engine.h"

namespace phsa::cli {
namespace {

namespace fs = std::filesystem;

struct PrepareFlags {
  std::string model, out, held_out, format = "auto";
  PrepareOptions options{.threads = 0, .held_out_share = 0.01};
  uint64_t shard_tokens = 100'000'000;
  std::vector<std::string> files;
  bool force = false, json = false;
};

TokenFolderInfo InfoOf(const PrepareFlags& flags, const Tokenizer& tokenizer, const DocumentReader& reader) {
  TokenFolderInfo info;
  info.vocab_size = tokenizer.vocab_size();
  info.end = EndOfText(tokenizer);
  info.tokenizer_name = fs::path(flags.model).filename().string();
  info.tokenizer_sha256 = TokenizerSha256(tokenizer);
  for (const char* set : {"en", "en+zh"}) info.punctuation[set] = PunctuationOf(tokenizer, set).Ids();
  info.sources = reader.files();
  info.shard_tokens = flags.shard_tokens;
  return info;
}

nlohmann::ordered_json Summary(const std::string& path, const TokenFolder& folder) {
  return {
      {"folder", path}, {"documents", folder.documents()}, {"tokens", folder.tokens()}, {"shards", folder.shards()}};
}

void RunPrepare(const PrepareFlags& flags) {
  PrepareOptions options = flags.options;
  if (options.threads == 0) options.threads = static_cast<int32_t>(std::max(1U, std::thread::hardware_concurrency()));
  if (flags.held_out.empty()) options.held_out_share = 0;
  if (!flags.held_out.empty() &&
      fs::absolute(flags.held_out).lexically_normal() == fs::absolute(flags.out).lexically_normal()) {
    ThrowInvalid("prepare: --held-out and --out are the same folder");
  }
  const Tokenizer tokenizer = LoadTokenizerAt(flags.model).tokenizer;
  const TextFormat format = flags.format == "text"    ? TextFormat::kText
                            : flags.format == "jsonl" ? TextFormat::kJsonLines
                                                      : TextFormat::kAuto;
  DocumentReader reader(flags.files, format);
  const TokenFolderInfo info = InfoOf(flags, tokenizer, reader);

  const auto start = std::chrono::steady_clock::now();
  TokenFolder train(flags.out, info, flags.force);
  std::optional<TokenFolder> held_out;
  if (!flags.held_out.empty()) held_out.emplace(flags.held_out, info, flags.force);
  ProgressBar bar("tokenizing");
  const PrepareResult result = PrepareTokens(
      tokenizer, reader, options, train, held_out ? &*held_out : nullptr, [&](const PrepareProgress& now) {
        ThrowIfInterrupted();
        const double share =
            now.total_bytes == 0 ? 0 : static_cast<double>(now.bytes) / static_cast<double>(now.total_bytes);
        bar.Update(share, fmt::format("{:.1f} million tokens", static_cast<double>(now.tokens) / 1e6));
      });
  if (train.documents() == 0) {
    ThrowInvalid("prepare: there is no document {}; nothing was written",
                 result.documents > 0 ? "left beside those held out" : "with text in these files");
  }
  if (held_out && held_out->documents() == 0) {
    ThrowInvalid("prepare: of {} documents none is held out with --held-out-share {}; a larger share holds out some",
                 result.documents, options.held_out_share);
  }
  train.Complete();
  if (held_out) held_out->Complete();
  train.Publish();
  if (held_out) held_out->Publish();
  bar.Clear();

  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (flags.json) {
    nlohmann::ordered_json summary = Summary(flags.out, train);
    if (held_out) summary["held_out"] = Summary(flags.held_out, *held_out);
    summary["empty_documents"] = result.empty;
    summary["overlapping_documents"] = result.overlapping;
    summary["text_bytes"] = result.text_bytes;
    summary["seconds"] = seconds;
    WriteOut(summary.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::ordered_json::error_handler_t::replace) + "\n");
    return;
  }
  const auto line = [](const std::string& path, const TokenFolder& folder) {
    return fmt::format("{}: {} documents, {} tokens in {} shards\n", path, folder.documents(), folder.tokens(),
                       folder.shards());
  };
  WriteOut(line(flags.out, train) + (held_out ? line(flags.held_out, *held_out) : ""));
  if (result.empty > 0) Note("{} documents have no text and were left out", result.empty);
  if (!options.without.empty()) Note("{} documents hold text of --without", result.overlapping);
  Note("{} of text in {} ({:.1f} MB/s) on {} threads", BytesInWords(result.text_bytes), DurationInWords(seconds),
       static_cast<double>(result.text_bytes) / 1e6 / seconds, options.threads);
}

}  // namespace

void AddPrepareCommand(CLI::App& app) {
  const auto flags = std::make_shared<PrepareFlags>();
  CLI::App* const command = app.add_subcommand("prepare", "texts to token shards for training");
  command->footer(
      "A file is JSON lines (an object a line, the text in one field) or one text, plain or packed with xz, gzip or\n"
      "zstd. Documents stay whole and in order; the result is the same for every number of threads. Nothing that was\n"
      "in a folder is touched before all of the new tokens are on the disk.\n\n"
      "  phsa prepare -m smollm2-135m --out tokens --held-out held-out books.jsonl.xz articles.jsonl.zst\n"
      "  zcat crawl.gz | phsa prepare -m tokenizer.json --out tokens --format jsonl --field content -");
  command->add_option("-m,--model", flags->model, "a model (.gguf file, Hugging Face folder, name) or a tokenizer.json")
      ->required();
  command->add_option("--out", flags->out, "the folder that is written")->required();
  command->add_option("files", flags->files, "files, folders of files, or - for standard input")->required();
  command->add_option("--field", flags->options.field, "the field of a JSON line with the text")->capture_default_str();
  command
      ->add_option("--format", flags->format,
                   "auto, jsonl, text. auto: by the name (.jsonl, .ndjson, .txt, .md), else by the first bytes")
      ->check(CLI::IsMember({"auto", "jsonl", "text"}));
  command
      ->add_option(
          "--without", flags->options.without,
          "leave out documents that hold text of this file, such as what the model is tested on: more than 1 in "
          "100 of their runs of 13 words; may be given several times")
      ->allow_extra_args(false);
  CLI::Option* const held_out = command->add_option(
      "--held-out", flags->held_out, "a second folder, for documents that are kept out of the first one");
  command
      ->add_option("--held-out-share", flags->options.held_out_share,
                   "their share. A digest of the text decides: the same documents each time, whatever is beside them")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str()
      ->needs(held_out);
  command
      ->add_option("--shard-tokens", flags->shard_tokens,
                   "at most this many tokens in a shard, such as 500k, 100M (the default) or 2G")
      ->transform(
          CLI::AsNumberWithUnit(std::map<std::string, uint64_t>{{"k", 1'000}, {"m", 1'000'000}, {"g", 1'000'000'000}}))
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 40));
  command->add_option("-t,--threads", flags->options.threads, "threads; 0: one per core")->check(CLI::Range(0, 1024));
  command->add_flag("--force", flags->force, "replace finished tokens in the folders");
  command->add_flag("--json", flags->json, "print one JSON object when done");
  command->callback([flags] { RunPrepare(*flags); });
}

}  // namespace phsa::cli
