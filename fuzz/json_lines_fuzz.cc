// Any file is either refused with phsa::Error or read into documents, and the text of a JSON line is what a parser of
// whole values finds in it.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

#include "data/document_reader.h"
#include "data/json_line.h"
#include "model_file.h"
#include "phsa/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const phsa::MemoryFile file(data, size);
  try {
    phsa::DocumentReader reader({file.path()}, phsa::TextFormat::kAuto);
    for (phsa::DocumentBatch batch; reader.Next(&batch);) {
      for (const phsa::DocumentBatch::Document& document : batch.documents) {
        const std::string_view line = std::string_view(batch.text).substr(document.begin, document.size);
        if (document.line == 0) continue;
        const std::string text = phsa::TextOfJsonLine(line, "text", reader.Where(document));
        if (nlohmann::json::parse(line).at("text").get<std::string>() != text) std::abort();
      }
    }
  } catch (const phsa::Error&) {
    return 0;
  }
  return 0;
}
