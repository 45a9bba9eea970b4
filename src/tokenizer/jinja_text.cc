#include "tokenizer/jinja_text.h"

#include <cctype>
#include <utility>

namespace phsa {
namespace {

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

std::string_view Trim(std::string_view text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return text;
}

std::string Quote(std::string_view text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
    } else {
      if (c == '\'' || c == '\\') out += '\\';
      out += c;
    }
  }
  return out + "'";
}

// Reads the string that begins at code[at] with a quote; at is behind it afterwards.
std::optional<std::string> TakeString(std::string_view code, size_t* at) {
  const char quote = code[(*at)++];
  std::string out;
  for (; *at < code.size(); ++*at) {
    const char c = code[*at];
    if (c == quote) {
      ++*at;
      return out;
    }
    if (c != '\\') {
      out += c;
      continue;
    }
    if (++*at == code.size()) return std::nullopt;
    const char escaped = code[*at];
    out += escaped == 'n' ? '\n' : escaped == 't' ? '\t' : escaped == 'r' ? '\r' : escaped;
  }
  return std::nullopt;
}

// One form for one meaning; see JinjaText.
std::optional<std::string> Canonical(std::string_view code) {
  std::string out;
  for (size_t at = 0; at < code.size();) {
    const char c = code[at];
    if (c == '\'' || c == '"') {
      const std::optional<std::string> text = TakeString(code, &at);
      if (!text) return std::nullopt;
      const std::string quoted = Quote(*text);
      if (out.ends_with("'+")) {
        out.resize(out.size() - 2);
        out += quoted.substr(1);
      } else {
        out += quoted;
      }
    } else if (IsSpace(c)) {
      const auto is_word = [](char x) { return std::isalnum(static_cast<unsigned char>(x)) != 0 || x == '_'; };
      while (at < code.size() && IsSpace(code[at])) ++at;
      // Words stay apart.
      if (!out.empty() && at < code.size() && is_word(out.back()) && is_word(code[at])) out += ' ';
    } else {
      out += c;
      ++at;
    }
  }
  for (const auto& [attribute, item] : {std::pair{".role", "['role']"}, {".content", "['content']"}}) {
    const std::string_view name = attribute;
    for (size_t at = 0; (at = out.find(name, at)) != std::string::npos;) {
      const size_t end = at + name.size();
      const bool whole =
          end == out.size() || (std::isalnum(static_cast<unsigned char>(out[end])) == 0 && out[end] != '_');
      if (whole) out.replace(at, name.size(), item);
      ++at;
    }
  }
  return out;
}

}  // namespace

std::optional<std::string> StringLiteral(std::string_view expression) {
  if (expression.size() < 2 || expression.front() != '\'') return std::nullopt;
  size_t at = 0;
  std::optional<std::string> text = TakeString(expression, &at);
  return at == expression.size() ? text : std::nullopt;
}

std::optional<JinjaText> ReadJinja(std::string_view text) {
  JinjaText out;
  // Jinja drops one line end at the end of a template.
  if (text.ends_with('\n')) text.remove_suffix(1);
  bool strip_left = false, after_block = false;  // what the tag before says of the text that follows
  for (size_t at = 0; at <= text.size();) {
    size_t open = at;
    while (open < text.size() && !(text[open] == '{' && open + 1 < text.size() &&
                                   (text[open + 1] == '{' || text[open + 1] == '%' || text[open + 1] == '#'))) {
      ++open;
    }
    std::string_view outside = text.substr(at, open - at);
    const bool at_end = open == text.size();
    const char kind = at_end ? '\0' : text[open + 1];
    const bool minus = !at_end && open + 2 < text.size() && text[open + 2] == '-';
    // transformers renders with trim_blocks and lstrip_blocks.
    if (strip_left) {
      while (!outside.empty() && IsSpace(outside.front())) outside.remove_prefix(1);
    } else if (after_block && outside.starts_with('\n')) {
      outside.remove_prefix(1);
    }
    if (minus) {
      while (!outside.empty() && IsSpace(outside.back())) outside.remove_suffix(1);
    } else if (kind == '%' || kind == '#') {
      std::string_view line = outside;
      while (!line.empty() && (line.back() == ' ' || line.back() == '\t')) line.remove_suffix(1);
      const bool line_start = line.empty() ? (at == 0 || after_block) : line.back() == '\n';
      if (line_start) outside = line;
    }
    out.text_outside |= !outside.empty();
    if (at_end) break;

    // The tag's end, strings passed over.
    const std::string_view close = kind == '{' ? "}}" : kind == '%' ? "%}" : "#}";
    const size_t begin = open + (minus ? 3 : 2);
    size_t end = begin;
    while (end < text.size() && text.substr(end, 2) != close) {
      if (kind != '#' && (text[end] == '\'' || text[end] == '"')) {
        if (!TakeString(text, &end)) return std::nullopt;
      } else {
        ++end;
      }
    }
    if (end >= text.size()) return std::nullopt;
    strip_left = end > begin && text[end - 1] == '-';
    after_block = kind != '{';
    const std::string_view inside = Trim(text.substr(begin, end - begin - (strip_left ? 1 : 0)));
    at = end + 2;
    if (kind == '#') continue;
    std::optional<std::string> code = Canonical(inside);
    if (!code) return std::nullopt;
    if (kind == '{') {
      out.printed.push_back(std::move(*code));
    } else if (code->starts_with("set ")) {
      out.set.push_back(code->substr(4));
    } else {
      out.statements.push_back(std::move(*code));
    }
  }
  return out;
}

}  // namespace phsa
