// Any text that is UTF-8 comes back from its ids, with and without special tokens, in every kind of pre-tokenizer that
// loses nothing; other text is refused. Cutting the ids anywhere gives text that is UTF-8.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"
#include "phsa/error.h"
#include "tokenizer/tokenizer.h"

namespace {

// Every byte has a token; merges make pairs of common characters, and runs of them.
phsa::BpeVocabulary Vocabulary(const char* pre) {
  phsa::BpeVocabulary out;
  out.model = "gpt2";
  out.pre = pre;
  const auto printable = [](int byte) {
    const bool itself = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    int code = byte;
    if (!itself) {
      code = 0x100;
      for (int b = 0; b < byte; ++b) {
        code += !((b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae);
      }
    }
    if (code < 0x80) return std::string(1, static_cast<char>(code));
    return std::string{static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
  };
  for (int byte = 0; byte < 256; ++byte) out.tokens.push_back(printable(byte));
  out.token_types.assign(256, 1);
  const auto merge = [&](const std::string& left, const std::string& right) {
    out.merges.push_back(left + " " + right);
    out.tokens.push_back(left + right);
    out.token_types.push_back(1);
  };
  const std::string space = printable(' '), line = printable('\n');
  merge("t", "h");
  merge("th", "e");
  merge(space, "the");
  merge("a", "a");
  merge("aa", "aa");
  merge(space, space);
  merge(line, line);
  merge("1", "2");
  merge(printable(0xe4), printable(0xb8));
  for (const char* control : {"<|im_start|>", "<|im_end|>"}) {
    out.tokens.emplace_back(control);
    out.token_types.push_back(3);
  }
  out.tokens.emplace_back("<tool>");
  out.token_types.push_back(4);
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const phsa::Tokenizer kTokenizers[] = {
      phsa::Tokenizer::FromVocabulary(Vocabulary("gpt-2"), "fuzz"),
      phsa::Tokenizer::FromVocabulary(Vocabulary("smollm"), "fuzz"),
      phsa::Tokenizer::FromVocabulary(Vocabulary("llama-bpe"), "fuzz"),
      phsa::Tokenizer::FromVocabulary(Vocabulary("deepseek-v3"), "fuzz"),
      phsa::Tokenizer::FromVocabulary(Vocabulary("qwen2"), "fuzz"),  // the last: NFC changes the text
  };
  const std::string text(reinterpret_cast<const char*>(data), size);
  const bool valid = phsa::IsUtf8(text);
  for (const phsa::Tokenizer& tokenizer : kTokenizers) {
    const bool changes = &tokenizer == std::end(kTokenizers) - 1;
    for (const auto special : {phsa::SpecialTokens::kRecognise, phsa::SpecialTokens::kAsText}) {
      std::vector<int32_t> ids;
      try {
        ids = tokenizer.Encode(text, special);
      } catch (const phsa::Error&) {
        if (valid) std::abort();
        continue;
      }
      if (!valid) std::abort();
      const std::string decoded = tokenizer.Decode(ids, false);
      if (!changes && decoded != text) std::abort();
      // Normalised text is in normal form: once more changes nothing.
      if (changes && tokenizer.Decode(tokenizer.Encode(decoded, special), false) != decoded) std::abort();
      for (const int32_t id : ids) {
        if (special == phsa::SpecialTokens::kAsText && tokenizer.IsSpecial(id)) std::abort();
      }
      ids.resize(ids.size() / 2);
      if (!phsa::IsUtf8(tokenizer.Decode(ids, false))) std::abort();
    }
  }
  return 0;
}
