#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8_scan.h"

namespace phsa {

std::string StreamDecoder::Next(int32_t id) {
  if (tokenizer_->IsSpecial(id)) return "";
  pending_ += tokenizer_->TokenBytes(id);
  std::string out;
  const size_t cut = AppendValidUtf8(pending_, &out);
  pending_.erase(0, pending_.size() - cut);
  return out;
}

std::string StreamDecoder::Finish() {
  const bool cut = !pending_.empty();
  pending_.clear();
  return std::string(cut ? kReplacementCharacter : "");
}

}  // namespace phsa
