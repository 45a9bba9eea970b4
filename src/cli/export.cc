// `phsa export`: a model and its adapter as one model that others read too.
#include "engine/export.h"

#include "base/errors.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"

namespace phsa::cli {
namespace {

struct ExportFlags {
  std::string model, adapter, out, format, type, config_file;
  int32_t threads = 0;
  bool force = false;
};

std::optional<TensorType> TypeFromName(const std::string& name) {
  for (const TensorType type : {TensorType::kF32, TensorType::kF16, TensorType::kBf16, TensorType::kQ8_0}) {
    if (name == TensorTypeName(type)) return type;
  }
  return std::nullopt;
}

void Export(const ExportFlags& flags) {
  const std::unique_ptr<ModelSource> source = OpenModel(flags.model, flags.adapter);
  const bool named_gguf = std::filesystem::path(flags.out).extension() == ".gguf";
  ExportOptions options;
  options.format =
      flags.format == "gguf" || (flags.format.empty() && named_gguf) ? ExportFormat::kGguf : ExportFormat::kSafetensors;
  options.type = TypeFromName(flags.type);
  options.replace = flags.force;
  if (!flags.config_file.empty()) options.settings = ReadSettingsFile(flags.config_file);
  ProgressBar bar("writing");
  options.progress = [&](double share) {
    bar.Update(share, BytesInWords(source->file_bytes()));
    return !WasInterrupted();
  };
  ThreadPool threads(flags.threads);
  const bool done = ExportModel(*source, flags.out, options, threads);
  bar.Clear();
  if (!done) throw Interrupted{};
  Note("{}{} is in {}", source->config().name, source->adapter() != nullptr ? " with its adapter" : "", flags.out);
}

}  // namespace

void AddExportCommand(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("export", "writes a model, with its adapter merged into it, for other programs");
  auto flags = std::make_shared<ExportFlags>();
  command
      ->add_option("-m,--model", flags->model,
                   "a .gguf file, a Hugging Face folder, or a name that `phsa models` lists")
      ->required();
  AddAdapterFlag(*command, flags->adapter);
  command->add_option("--out", flags->out, "the folder or the .gguf file to write")->required();
  command->add_option("--format", flags->format, "safetensors (a Hugging Face folder) or gguf; by the name of --out")
      ->check(CLI::IsMember({"safetensors", "gguf"}));
  command
      ->add_option("--type", flags->type,
                   "of the weights: f32, f16, bf16, for gguf also q8_0; the model's own, or f16 where that is another")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8_0"}));
  command->add_option("--phsa-config", flags->config_file,
                      "a JSON file with settings of the attention that the output carries, as `phsa tune` writes them");
  command->add_option("-t,--threads", flags->threads, "threads; 0: one per core");
  command->add_flag("--force", flags->force, "replaces what is there");
  command->callback([flags] { Export(*flags); });
}

}  // namespace phsa::cli
