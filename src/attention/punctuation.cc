// The punctuation sets, and the table that turns token ids into flags.
#include "phsa/punctuation.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>

#include "base/errors.h"
#include "base/utf8.h"

namespace phsa {
namespace {

constexpr std::u32string_view kZh = U"，。！？；：、“”‘’（）《》〈〉【】「」『』—…·～";
// The full stop has two wide forms: the ideographic 。 that Chinese writes, and the full-width ． of Unicode. Both
// count.
constexpr std::u32string_view kSentence = U",.;:!?，。．；：！？";
constexpr const char* kSetNames = "en, zh, en+zh, sentence, pure, none";
constexpr uintmax_t kMaxFileSize = 64 << 20;  // a whole vocabulary is some megabytes

bool IsEn(char32_t c) {
  return (c >= U'!' && c <= U'/') || (c >= U':' && c <= U'@') || (c >= U'[' && c <= U'`') || (c >= U'{' && c <= U'~');
}

bool IsZh(char32_t c) { return kZh.find(c) != std::u32string_view::npos; }

// Unicode's White_Space property.
bool IsSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool IsSentence(std::u32string_view token) {
  if (token.size() == 2 && token[0] == U' ') token.remove_prefix(1);
  return token.size() == 1 && kSentence.find(token[0]) != std::u32string_view::npos;
}

bool IsPure(std::u32string_view token) {
  while (!token.empty() && IsSpace(token.front())) token.remove_prefix(1);
  while (!token.empty() && IsSpace(token.back())) token.remove_suffix(1);
  return !token.empty() && std::all_of(token.begin(), token.end(), [](char32_t c) { return IsEn(c) || IsZh(c); });
}

using Predicate = bool (*)(std::u32string_view token);

Predicate FindSet(std::string_view name) {
  if (name == "en") return [](std::u32string_view t) { return t.size() == 1 && IsEn(t[0]); };
  if (name == "zh") return [](std::u32string_view t) { return t.size() == 1 && IsZh(t[0]); };
  if (name == "en+zh") return [](std::u32string_view t) { return t.size() == 1 && (IsEn(t[0]) || IsZh(t[0])); };
  if (name == "sentence") return IsSentence;
  if (name == "pure") return IsPure;
  if (name == "none") return [](std::u32string_view) { return false; };
  return nullptr;
}

bool Matches(Predicate set, std::string_view token) {
  const std::optional<std::u32string> decoded = DecodeUtf8(token);
  return decoded && set(*decoded);
}

std::string ReadFile(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    ThrowInvalid("punctuation: {} is neither a set nor a file; allowed: {}, or a file of ids or strings", Quoted(path),
                 kSetNames);
  }
  if (status.type() == fs::file_type::directory) {
    ThrowInvalid("punctuation: {} is a directory; give a file of ids or strings", Quoted(path));
  }
  if (!fs::is_regular_file(status)) {
    ThrowInvalid("punctuation: {} is not a regular file{}{}", Quoted(path), error ? ": " : "", error.message());
  }
  const uintmax_t size = fs::file_size(path, error);
  if (!error && size > kMaxFileSize) {
    ThrowInvalid("punctuation: {} has {} bytes; allowed: at most {}", Quoted(path), size, kMaxFileSize);
  }
  std::ifstream in(path, std::ios::binary);
  std::string text(error ? 0 : size, '\0');
  if (in) in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (error || !in) ThrowInvalid("punctuation: {} cannot be read; check its permissions", Quoted(path));
  return text;
}

struct Entries {
  std::vector<uint64_t> ids;
  std::unordered_set<std::string> strings;
};

// One id or string a line; docs/settings.md describes the format.
Entries ReadEntries(const std::string& path, size_t vocabulary, std::span<const uint8_t> special) {
  const std::string text = ReadFile(path);
  if (!IsUtf8(text) || text.find('\0') != std::string::npos) {
    ThrowInvalid("punctuation: {} is not a text file in UTF-8", Quoted(path));
  }
  Entries out;
  std::string_view rest = text;
  if (rest.starts_with("\xef\xbb\xbf")) rest.remove_prefix(3);
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t newline = rest.find('\n');
    std::string_view line = rest.substr(0, newline);
    rest = newline == std::string_view::npos ? std::string_view() : rest.substr(newline + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    const std::u32string decoded = *DecodeUtf8(line);
    if (std::all_of(decoded.begin(), decoded.end(), IsSpace) || line.starts_with("# ")) continue;

    if (line.find_first_not_of("0123456789") == std::string_view::npos) {
      uint64_t id = 0;
      const auto result = std::from_chars(line.data(), line.data() + line.size(), id);
      if (result.ec != std::errc() || id >= vocabulary) {
        ThrowInvalid(
            "punctuation: {}, line {}: id {} is not in the vocabulary; allowed: 0 to {} (a token that is a "
            "number is written in double quotes)",
            Quoted(path), number, line.substr(0, 24), static_cast<int64_t>(vocabulary) - 1);
      }
      if (!special.empty() && special[id] != 0) {
        ThrowInvalid("punctuation: {}, line {}: id {} is a special token, which is never punctuation", Quoted(path),
                     number, id);
      }
      out.ids.push_back(id);
    } else if (line.size() >= 2 && line.starts_with('"') && line.ends_with('"')) {
      const nlohmann::json value = nlohmann::json::parse(line.begin(), line.end(), nullptr, false);
      if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
        ThrowInvalid("punctuation: {}, line {}: {} is not a JSON string with something in it", Quoted(path), number,
                     Quoted(line));
      }
      out.strings.insert(value.get<std::string>());
    } else {
      out.strings.emplace(line);
    }
  }
  return out;
}

}  // namespace

PunctuationTable::PunctuationTable(std::string_view set, std::span<const std::string> tokens,
                                   std::span<const uint8_t> special) {
  if (!special.empty() && special.size() != tokens.size()) {
    ThrowInvalid("punctuation: special has {} entries; allowed: none, or {}, one per token", special.size(),
                 tokens.size());
  }
  table_.assign(tokens.size(), 0);
  const auto is_special = [&](size_t id) { return !special.empty() && special[id] != 0; };

  if (const Predicate predicate = FindSet(set)) {
    for (size_t id = 0; id < tokens.size(); ++id) table_[id] = !is_special(id) && Matches(predicate, tokens[id]);
    return;
  }
  if (constexpr std::string_view kIds = "ids:"; set.starts_with(kIds)) {
    const nlohmann::json ids = nlohmann::json::parse(fmt::format("[{}]", set.substr(kIds.size())), nullptr, false);
    for (const nlohmann::json& id : ids) {
      if (!id.is_number_unsigned() || id.get<uint64_t>() >= tokens.size() || is_special(id.get<size_t>())) {
        ThrowInvalid("punctuation: the list of ids has {}; allowed: 0 to {}, no special tokens", id.dump(),
                     static_cast<int64_t>(tokens.size()) - 1);
      }
      table_[id.get<size_t>()] = 1;
    }
    return;
  }
  const std::string path(set);
  if (path.empty() || path.find('\0') != std::string::npos) {
    ThrowInvalid("punctuation: {} is neither a set nor a file; allowed: {}, or a file of ids or strings", Quoted(set),
                 kSetNames);
  }
  const Entries entries = ReadEntries(path, tokens.size(), special);
  for (const uint64_t id : entries.ids) table_[id] = 1;
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (!is_special(id) && entries.strings.contains(tokens[id])) table_[id] = 1;
  }
  if (std::find(table_.begin(), table_.end(), 1) == table_.end()) {
    ThrowInvalid("punctuation: nothing in {} is a token of this vocabulary; \"none\" is the empty set", Quoted(path));
  }
}

void PunctuationTable::Flags(std::span<const int32_t> ids, uint8_t* flags) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || static_cast<size_t>(ids[i]) >= table_.size()) {
      ThrowInvalid("punctuation: token {} has id {}; allowed: 0 to {}", i, ids[i],
                   static_cast<int64_t>(table_.size()) - 1);
    }
    flags[i] = table_[static_cast<size_t>(ids[i])];
  }
}

std::vector<int32_t> PunctuationTable::Ids() const {
  std::vector<int32_t> out;
  for (size_t id = 0; id < table_.size(); ++id) {
    if (table_[id] != 0) out.push_back(static_cast<int32_t>(id));
  }
  return out;
}

std::vector<std::string> PunctuationSetNames() { return {"en", "zh", "en+zh", "sentence", "pure", "none"}; }

bool InPunctuationSet(std::string_view set, std::string_view token) {
  const Predicate predicate = FindSet(set);
  if (predicate == nullptr) ThrowInvalid("punctuation: {} is not a set; allowed: {}", Quoted(set), kSetNames);
  return Matches(predicate, token);
}

}  // namespace phsa
