#include "tokenizer/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

constexpr int kNone = -1;
constexpr size_t kCodes = 0x100 + 68;

constexpr bool StandsForItself(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

// Code point to byte.
constexpr std::array<int16_t, kCodes> MakeTable() {
  std::array<int16_t, kCodes> table{};
  size_t next = 0x100;
  for (int byte = 0; byte < 0x100; ++byte) {
    table[static_cast<size_t>(byte)] = kNone;
    if (StandsForItself(byte)) {
      table[static_cast<size_t>(byte)] = static_cast<int16_t>(byte);
    } else {
      table[next++] = static_cast<int16_t>(byte);
    }
  }
  return table;
}

constexpr std::array<int16_t, kCodes> kTable = MakeTable();

}  // namespace

std::optional<std::string> BytesOfAlphabet(std::string_view printable) {
  std::string out;
  out.reserve(printable.size());
  for (size_t at = 0; at < printable.size();) {
    const Utf8Step step = ScanUtf8(printable, at);
    if (step.kind != Utf8Step::Kind::kCharacter || step.code >= kCodes || kTable[step.code] == kNone)
      return std::nullopt;
    out += static_cast<char>(kTable[step.code]);
    at += step.size;
  }
  return out;
}

}  // namespace phsa
