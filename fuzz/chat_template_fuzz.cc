// Any template is either refused with phsa::Error or renders a conversation; in one that asks nothing about what is
// said, the messages open no turn.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "phsa/error.h"
#include "tokenizer/chat_template.h"

namespace {

phsa::Tokenizer MakeTokenizer() {
  phsa::BpeVocabulary vocabulary;
  vocabulary.model = "gpt2";
  vocabulary.pre = "qwen2";
  for (char c = '!'; c <= '~'; ++c) vocabulary.tokens.emplace_back(1, c);
  vocabulary.token_types.assign(vocabulary.tokens.size(), 1);
  for (const char* control :
       {"<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}) {
    vocabulary.tokens.emplace_back(control);
    vocabulary.token_types.push_back(3);
  }
  return phsa::Tokenizer::FromVocabulary(vocabulary, "fuzz");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const phsa::Tokenizer kTokenizer = MakeTokenizer();
  // The first zero byte ends the template; what a user says follows.
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string_view text = input.substr(0, input.find('\0'));
  const std::string content(text.size() < size ? input.substr(text.size() + 1) : "");
  try {
    // This one may write what it likes for what it reads, so its turns are not counted.
    const std::vector<phsa::ChatMessage> messages = {{"user", content}, {"assistant", "y"}, {"user", content}};
    phsa::ChatTemplate::Recognise(text).Encode(messages, true, kTokenizer);
  } catch (const phsa::Error&) {
  }
  try {
    static const std::vector<std::string> kNames = phsa::ChatTemplate::Names();
    const phsa::ChatTemplate chat = phsa::ChatTemplate::ByName(kNames[size % kNames.size()]);
    const auto controls = [&](const std::string& said) {
      const std::vector<phsa::ChatMessage> messages = {{"user", said}, {"assistant", "y"}, {"user", said}};
      chat.Render(messages, true, kTokenizer);
      const std::vector<int32_t> ids = chat.Encode(messages, true, kTokenizer);
      return std::count_if(ids.begin(), ids.end(), [](int32_t id) { return kTokenizer.IsSpecial(id); });
    };
    if (controls(content) != controls("x")) std::abort();
  } catch (const phsa::Error&) {
  }
  return 0;
}
