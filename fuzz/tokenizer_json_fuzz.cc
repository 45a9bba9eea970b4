// Any text is either refused with phsa::Error or makes a tokenizer that encodes and decodes, if slowly for a pattern
// that gives up, and never gives a control token to a user's text.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "phsa/error.h"
#include "tokenizer/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The first zero byte ends the tokenizer.json; tokenizer_config.json follows.
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string_view json = input.substr(0, input.find('\0'));
  const std::string_view config = json.size() < size ? input.substr(json.size() + 1) : "";
  constexpr std::string_view kText = "a b 1 \n\r\n'S é e\u0301 中  <|x|>!";
  try {
    const phsa::Tokenizer tokenizer = phsa::Tokenizer::FromJson(json, config, "fuzz");
    for (const auto special : {phsa::SpecialTokens::kRecognise, phsa::SpecialTokens::kAsText}) {
      const std::vector<int32_t> ids = tokenizer.Encode(kText, special);
      for (const int32_t id : ids) {
        if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
        // A file may call the token of a single byte special; nothing else can stand for that byte.
        const bool control = tokenizer.IsSpecial(id) && tokenizer.TokenBytes(id).starts_with("<|");
        if (special == phsa::SpecialTokens::kAsText && control) std::abort();
      }
      phsa::StreamDecoder stream(tokenizer);
      std::string text;
      for (const int32_t id : ids) text += stream.Next(id);
      text += stream.Finish();
      // A stream goes on behind other text: it keeps the first spaces, which some decoders leave out, and bytes that
      // are no text may become another number of replacement characters.
      const std::string whole = tokenizer.Decode(ids, true);
      const auto words = [](std::string of) {
        std::erase(of, ' ');
        return of;
      };
      if (whole.find("\uFFFD") == std::string::npos && words(text) != words(whole)) std::abort();
    }
  } catch (const phsa::Error&) {
  }
  return 0;
}
