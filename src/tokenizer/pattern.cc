#include "tokenizer/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <time.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "tokenizer/pre_tokenization.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {
namespace {

constexpr size_t kLongestPattern = 65536;
// How many steps of a watched pattern lie between two looks at the clock: a step looks at no more than the text once.
constexpr uint32_t kStepsPerLook = 1024;
// A match of any real tokenizer's pattern takes a handful of counted steps; this ends (a+)+b on a long line of a's.
constexpr uint32_t kMatchLimit = 5'000'000;
constexpr uint32_t kHeapLimitKib = 64 * 1024;
// Grows as needed. Patterns that repeat groups need room for each repetition.
constexpr size_t kJitStackFirst = 32 * 1024;
constexpr size_t kJitStackMost = 16 * 1024 * 1024;

std::string Pcre2Message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

template <auto free_function>
struct Free {
  template <class T>
  void operator()(T* pointer) const {
    free_function(pointer);
  }
};
template <class T, auto free_function>
using Handle = std::unique_ptr<T, Free<free_function>>;

}  // namespace

struct Pattern::Compiled {
  Handle<pcre2_code, pcre2_code_free> code;
  bool jit = false;  // compiled to machine code; not every system allows that
  std::string name;  // for messages
};

struct Pattern::Scratch::Impl {
  // Called before every item of a watched pattern. The limit on steps does not see how far a step looks: a*+b|a on a's
  // alone looks at the whole rest of the text for each of them.
  static int Watch(pcre2_callout_block*, void* impl) {
    auto& self = *static_cast<Impl*>(impl);
    if (++self.steps % kStepsPerLook != 0) return 0;
    return ThreadSeconds() > self.deadline ? PCRE2_ERROR_CALLOUT : 0;
  }
  // Processor time: a busy or suspended machine makes no pattern fail.
  static double ThreadSeconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }

  uint32_t steps = 0;
  double deadline = 0;
  Handle<pcre2_match_data, pcre2_match_data_free> match{pcre2_match_data_create(1, nullptr)};
  Handle<pcre2_match_context, pcre2_match_context_free> context{pcre2_match_context_create(nullptr)};
  Handle<pcre2_jit_stack, pcre2_jit_stack_free> stack{pcre2_jit_stack_create(kJitStackFirst, kJitStackMost, nullptr)};
};

Pattern::Scratch::Scratch() : impl_(std::make_unique<Impl>()) {
  if (!impl_->match || !impl_->context) Throw(PHSA_OUT_OF_MEMORY, "tokenizer: no memory left to match a pattern");
  pcre2_set_match_limit(impl_->context.get(), kMatchLimit);
  pcre2_set_heap_limit(impl_->context.get(), kHeapLimitKib);
  pcre2_jit_stack_assign(impl_->context.get(), nullptr, impl_->stack.get());
  pcre2_set_callout(impl_->context.get(), Impl::Watch, impl_.get());
  Restart(0);
}
void Pattern::Scratch::Restart(size_t text_bytes) {
  constexpr double kSeconds = 1, kSecondsPerMib = 5;
  impl_->deadline = Impl::ThreadSeconds() + kSeconds + kSecondsPerMib * static_cast<double>(text_bytes) / (1 << 20);
}
Pattern::Scratch::~Scratch() = default;
Pattern::Scratch::Scratch(Scratch&&) noexcept = default;
Pattern::Scratch& Pattern::Scratch::operator=(Scratch&&) noexcept = default;

namespace {

bool IsOurs(std::string_view pattern) {
  const auto known = KnownPreTokenizations();
  return std::any_of(known.begin(), known.end(), [&](const PreTokenization& one) {
    return std::find(one.patterns.begin(), one.patterns.end(), pattern) != one.patterns.end();
  });
}

// `pattern` is PCRE2's.
Handle<pcre2_code, pcre2_code_free> Compile(const std::string& pattern, bool watched, int* error, size_t* error_at) {
  Handle<pcre2_compile_context, pcre2_compile_context_free> context{pcre2_compile_context_create(nullptr)};
  if (!context) Throw(PHSA_OUT_OF_MEMORY, "tokenizer: no memory left to compile a pattern");
  // ^ and $ are those of lines in Oniguruma, and a line ends with \n alone.
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NO_AUTO_CAPTURE | PCRE2_NEVER_BACKSLASH_C |
                           (watched ? PCRE2_AUTO_CALLOUT : 0);
  return Handle<pcre2_code, pcre2_code_free>(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                                           options, error, error_at, context.get()));
}

}  // namespace

Pattern::Pattern(std::string_view pattern, const std::string& where) {
  if (pattern.size() > kLongestPattern) {
    ThrowInvalid("{}: the pattern has {} bytes; allowed: {}", where, pattern.size(), kLongestPattern);
  }
  auto compiled = std::make_unique<Compiled>();
  int error = 0;
  size_t error_at = 0;
  compiled->name = Quoted(pattern);
  compiled->code = Compile(TranslatePattern(pattern, where), !IsOurs(pattern), &error, &error_at);
  if (!compiled->code) ThrowInvalid("{}: the pattern {} is wrong: {}", where, Quoted(pattern), Pcre2Message(error));
  compiled->jit = pcre2_jit_compile(compiled->code.get(), PCRE2_JIT_COMPLETE) == 0;
  compiled_ = std::move(compiled);
}

Pattern Pattern::OneOf(const std::string& set) {
  auto compiled = std::make_unique<Compiled>();
  int error = 0;
  size_t error_at = 0;
  compiled->name = "of one set";
  compiled->code = Compile("[" + set + "]", false, &error, &error_at);
  PHSA_CHECK(compiled->code != nullptr);
  compiled->jit = pcre2_jit_compile(compiled->code.get(), PCRE2_JIT_COMPLETE) == 0;
  return Pattern(std::move(compiled));
}

Pattern::Pattern(std::unique_ptr<const Compiled> compiled) : compiled_(std::move(compiled)) {}
Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;
Pattern& Pattern::operator=(Pattern&&) noexcept = default;

void Pattern::FindAll(std::string_view text, Scratch* scratch, std::vector<TextRange>* matches) const {
  const pcre2_code* code = compiled_->code.get();
  pcre2_match_data* data = scratch->impl_->match.get();
  pcre2_match_context* context = scratch->impl_->context.get();
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const size_t* found = pcre2_get_ovector_pointer(data);
  bool any = false;
  size_t last_end = 0;
  for (size_t start = 0; start <= text.size();) {
    int result = compiled_->jit ? pcre2_jit_match(code, subject, text.size(), start, 0, data, context)
                                : pcre2_match(code, subject, text.size(), start, PCRE2_NO_UTF_CHECK, data, context);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) {
      result = pcre2_match(code, subject, text.size(), start, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data, context);
    }
    if (result == PCRE2_ERROR_NOMATCH) return;
    if (result == PCRE2_ERROR_CALLOUT) {
      ThrowInvalid(
          "tokenizer: the pattern {} takes too long on the text at byte {}; a tokenizer.json with such a pattern "
          "cannot be used for texts like this one",
          compiled_->name, start);
    }
    if (result < 0) {
      ThrowInvalid("tokenizer: the pattern {} gives up on the text at byte {}: {}", compiled_->name, start,
                   Pcre2Message(result));
    }
    if (found[0] == found[1] && any && found[1] == last_end) {
      // An empty match right after a match is none: go on behind the next character.
      start += start < text.size() ? ScanUtf8(text, start).size : 1;
      continue;
    }
    any = true;
    last_end = found[1];
    start = last_end;
    matches->push_back({found[0], found[1]});
  }
}

}  // namespace phsa
