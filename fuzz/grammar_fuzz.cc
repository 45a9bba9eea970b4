// Any text is either refused with phsa::Error or becomes a grammar: GBNF, a JSON schema or a regular expression within
// one, by the first byte. Its masks agree with each token tried alone, some token or the end is always allowed, and
// what ends under a schema is JSON.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/grammar.h"
#include "grammar/matcher.h"
#include "phsa/error.h"

namespace {

constexpr int kSteps = 40;

std::shared_ptr<const phsa::TokenTrie> MakeTrie() {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  tokens.back() = "";
  for (const char* token : {"{\"", "\": ", "\",", "\"}", "[]", "true", "null", "12", ".5", "  ", "aaaa", "\xe4\xb8"}) {
    tokens.emplace_back(token);
  }
  return std::make_shared<const phsa::TokenTrie>(tokens);
}

std::shared_ptr<const phsa::Grammar> Compile(char kind, std::string_view text) {
  if (kind % 3 == 0) return phsa::CompileGbnf(text, "grammar");
  if (kind % 3 == 1) return phsa::CompileJsonSchemaText(text, "schema");
  const std::string pattern(text);
  return phsa::CompileJsonSchema(phsa::OrderedJson{{"type", "string"}, {"pattern", pattern}}, "schema");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::shared_ptr<const phsa::TokenTrie> kTrie = MakeTrie();
  if (size < 1) return 0;
  const auto kind = static_cast<char>(data[0] & 0x7f);
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    phsa::GrammarMatcher matcher(Compile(kind, text), kTrie);
    std::string written;
    uint32_t random = 2463534242;
    for (int step = 0; step < kSteps && !matcher.MustEnd(); ++step) {
      const std::span<const uint64_t> bits = matcher.Mask();
      const std::vector<uint64_t> mask(bits.begin(), bits.end());
      std::vector<int32_t> allowed;
      for (int32_t token = 0; token < kTrie->vocab_size(); ++token) {
        phsa::GrammarMatcher copy = matcher;
        const bool in_mask = (mask[static_cast<size_t>(token) / 64] >> (token % 64) & 1) != 0;
        if (copy.Accept(token) != in_mask) std::abort();
        if (in_mask) allowed.push_back(token);
      }
      // Bytes are tokens here, so that there is always a way on.
      if (allowed.empty()) std::abort();
      random ^= random << 13;
      random ^= random >> 17;
      random ^= random << 5;
      // Rather what ends things than another letter.
      int32_t token = allowed[random % allowed.size()];
      if (step > kSteps / 2) token = allowed.front();
      if (!matcher.Accept(token)) std::abort();
      written += kTrie->Bytes(token);
    }
    if (kind % 3 != 0 && matcher.MayEnd() && !nlohmann::json::accept(written)) std::abort();
  } catch (const phsa::Error&) {
  }
  return 0;
}
