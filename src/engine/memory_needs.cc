#include "engine/memory_needs.h"

#include "base/errors.h"

namespace phsa {
namespace {

std::string Gigabytes(uint64_t bytes) { return fmt::format("{:.2f} GB", static_cast<double>(bytes) / 1e9); }

}  // namespace

std::string MemoryNeeds::Text() const {
  const std::string texts = cache_tokens > context ? fmt::format(" in texts of up to {}", context) : "";
  const std::string where = gpu.empty() ? "memory" : fmt::format("memory of {}", gpu);
  std::string text = fmt::format("{}: weights {} ({}), KV cache {} for {} tokens{} ({})", where, Gigabytes(weights),
                                 weight_types, Gigabytes(key_values), cache_tokens, texts, kv_type);
  if (representatives > 0) text += fmt::format(", representatives {}", Gigabytes(representatives));
  text +=
      fmt::format(", workspace {}: {} of {} available", Gigabytes(workspace), Gigabytes(total()), Gigabytes(available));
  return text;
}

bool Fits(const MemoryNeeds& needs) { return needs.total() <= needs.available; }

void CheckFits(const MemoryNeeds& needs) {
  if (Fits(needs)) return;
  const Option context{"context"}, weights{"weights", "int8"};
  ThrowInvalid("{}: it does not fit; {} needs less", needs.Text(),
               needs.gpu.empty() ? fmt::format("a smaller {}, {} or {}", context, Option{"kv_type", "int8"}, weights)
                                 : fmt::format("a smaller {} or {}, {} or {}", context, Option{"chunk"}, weights,
                                               Option{"device", "cpu"}));
}

}  // namespace phsa
