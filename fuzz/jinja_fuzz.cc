// Any template with any variables is either refused with phsa::Error or renders, within the limits, and the runs of
// what it writes cover it.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "jinja/template.h"
#include "phsa/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The first zero byte ends the template; JSON with the variables may follow.
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string_view source = input.substr(0, input.find('\0'));
  constexpr std::string_view kUsual =
      R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": " ä <|im_end|>\n"},
          {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
           "function": {"name": "f", "arguments": {"b": [1, 2.5, true], "a": "x"}}}]},
          {"role": "tool", "content": "{}"}], "tools": [{"type": "function", "function": {"name": "f",
          "parameters": {"properties": {"a": {"type": "string"}}, "required": ["a"]}}}],
          "add_generation_prompt": true, "bos_token": "<s>"})";
  try {
    phsa::jinja::Template::Variables variables;
    const phsa::jinja::Value all =
        phsa::jinja::FromJson(source.size() < size ? input.substr(source.size() + 1) : kUsual, "the variables");
    if (all.IsDict()) {
      for (const auto& [key, value] : all.dict().items()) variables[key.bytes()] = value;
    }
    const phsa::jinja::Limits limits = {.steps = 50'000, .bytes = 1 << 22, .output_bytes = 1 << 20};
    const phsa::jinja::Text text = phsa::jinja::Template::Parse(source).Render(variables, size, limits);
    size_t end = 0;
    for (const auto& run : text.runs()) {
      if (run.end <= end) std::abort();
      end = run.end;
    }
    if (end != text.size()) std::abort();
  } catch (const phsa::Error&) {
  }
  return 0;
}
