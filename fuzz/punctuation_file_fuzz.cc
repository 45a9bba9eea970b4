// Any file is either refused with phsa::Error or makes a table that flags at least one token, and no special one.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "phsa/error.h"
#include "phsa/punctuation.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A file in memory: the path is what the library takes.
  const int file = memfd_create("punctuation", 0);
  if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) std::abort();
  const std::string path = "/proc/self/fd/" + std::to_string(file);

  const std::vector<std::string> tokens = {"<s>", ".", ",", " the", "12", "\xe3\x80\x82", "\xff", " ", "\n", "\"", "#"};
  std::vector<uint8_t> special(tokens.size());
  special[0] = 1;
  try {
    const phsa::PunctuationTable table(path, tokens, special);
    if (table.table().size() != tokens.size() || table.table()[0] != 0 || table.Ids().empty()) std::abort();
  } catch (const phsa::Error&) {
  }
  close(file);
  return 0;
}
