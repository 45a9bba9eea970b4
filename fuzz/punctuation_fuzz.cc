// Any bytes may be a token, and the named sets contain each other as they should.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "phsa/punctuation.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view token(reinterpret_cast<const char*>(data), size);
  const bool en = phsa::InPunctuationSet("en", token);
  const bool zh = phsa::InPunctuationSet("zh", token);
  const bool both = phsa::InPunctuationSet("en+zh", token);
  const bool pure = phsa::InPunctuationSet("pure", token);
  const bool sentence = phsa::InPunctuationSet("sentence", token);
  if (both != (en || zh)) std::abort();
  if (both && !pure) std::abort();
  if (en && zh) std::abort();
  if (en && size != 1) std::abort();
  if (sentence && size > 4) std::abort();  // a space and one character of at most three bytes
  if (phsa::InPunctuationSet("none", token)) std::abort();
  return 0;
}
