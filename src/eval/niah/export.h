// Needle samples as a file, for a model that runs elsewhere: `python -m phsa.hf.niah` reads it.
#ifndef PHSA_EVAL_NIAH_EXPORT_H_
#define PHSA_EVAL_NIAH_EXPORT_H_

#include <filesystem>

#include "engine/engine.h"
#include "eval/niah/prompt.h"
#include "eval/niah/run.h"

namespace phsa {

// JSON lines, whole or not at all. The first is `header` with "vocabulary" (ids from there on are no text) and
// "punctuation" (for each set that the policies of these runs use, its token ids). Then one for each sample: "tokens",
// "answer_tokens", "free_tokens" (how many of them need not be right), and "records", the lines that `phsa niah --out`
// would write for its configurations, with nothing found. Throws phsa::Error where the file cannot be written.
void ExportNiah(const Engine& engine, const NiahPrompts& prompts, const NiahRuns& runs, const NiahHeader& header,
                const std::filesystem::path& path);

}  // namespace phsa

#endif  // PHSA_EVAL_NIAH_EXPORT_H_
