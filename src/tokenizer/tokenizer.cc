#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/errors.h"
#include "tokenizer/tokenizer_parts.h"
#include "tokenizer/utf8_scan.h"
#include "tokenizer/word_cache.h"

namespace phsa {
namespace {

constexpr size_t kLongestText = std::numeric_limits<int32_t>::max();

// Everything that encoding writes to.
struct Scratch {
  PreTokenizer::Scratch pre_tokenizer;
  Bpe::Scratch bpe;
  Unigram::Scratch unigram;
  WordCache cache;
  std::vector<AddedTokenFinder::Piece> pieces, normalized_pieces;
  Normalization::Scratch normalized;
  std::vector<TextRange> cut;
};

// What a finished call keeps for the next one. Texts much longer than usual give their memory back.
constexpr size_t kKeptBytes = 1 << 20;

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(TokenizerParts the_parts);

  std::vector<int32_t> Encode(std::string_view text, const SpecialPlaces& special) const;
  // `first`: the piece is where the text begins.
  void EncodePiece(std::string_view text, bool first, bool recognise_special, Scratch* scratch,
                   std::vector<int32_t>* ids) const;
  void EncodeWords(std::string_view text, bool first, bool recognise_special, Scratch* scratch,
                   std::vector<int32_t>* ids) const;
  void EncodeWord(std::string_view word, const std::vector<uint8_t>* forbidden, Scratch* scratch,
                  std::vector<int32_t>* ids) const;
  std::unique_ptr<Scratch> Borrow() const;
  void Return(std::unique_ptr<Scratch> scratch) const;
  void CheckId(int32_t id) const;

  TokenizerParts parts;
  Bpe bpe;
  std::optional<Unigram> unigram;  // in its place
  AddedTokenFinder raw_tokens, normalized_tokens;
  std::vector<uint8_t> special;      // by id
  std::vector<uint8_t> single_byte;  // likewise: SentencePiece's <0x41>
  bool words_can_be_special = false;
  std::unordered_map<std::string, int32_t> added_ids;

  // One for each thread that ever encoded at the same time as others.
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<Scratch>> idle;
};

Tokenizer::Impl::Impl(TokenizerParts the_parts) : parts(std::move(the_parts)), bpe(std::move(parts.model)) {
  special.resize(parts.token_bytes.size());
  for (const AddedToken& token : parts.added) {
    if (token.special) special[static_cast<size_t>(token.id)] = 1;
    added_ids.try_emplace(token.text, token.id);
    if (token.normalized) {
      Scratch scratch;
      const std::string_view text =
          parts.normalization.Apply(token.text, &scratch.pre_tokenizer.pattern, &scratch.normalized);
      normalized_tokens.Add(token, text);
    } else {
      raw_tokens.Add(token, token.text);
    }
  }
  single_byte.resize(special.size());
  const std::array<int32_t, 256>& bytes = parts.unigram ? parts.unigram->byte_ids : parts.model.byte_ids;
  for (const int32_t id : bytes) {
    if (parts.sentencepiece && id >= 0) single_byte[static_cast<size_t>(id)] = 1;
  }
  if (parts.unigram) unigram.emplace(std::move(*parts.unigram));
  words_can_be_special = unigram ? unigram->CanGive(special) : bpe.CanGive(special);
}

std::unique_ptr<Scratch> Tokenizer::Impl::Borrow() const {
  {
    const std::lock_guard lock(mutex);
    if (!idle.empty()) {
      std::unique_ptr<Scratch> scratch = std::move(idle.back());
      idle.pop_back();
      return scratch;
    }
  }
  return std::make_unique<Scratch>();
}

void Tokenizer::Impl::Return(std::unique_ptr<Scratch> scratch) const {
  if (scratch->normalized.texts[0].capacity() + scratch->normalized.texts[1].capacity() > kKeptBytes) {
    scratch->normalized = {};
  }
  if (scratch->unigram.best.capacity() * sizeof(Unigram::Scratch::Best) > kKeptBytes) scratch->unigram = {};
  if (scratch->bpe.symbols.capacity() > kKeptBytes) scratch->bpe = {};
  if (scratch->pre_tokenizer.words.capacity() * sizeof(TextRange) > kKeptBytes) scratch->pre_tokenizer = {};
  const std::lock_guard lock(mutex);
  idle.push_back(std::move(scratch));
}

void Tokenizer::Impl::CheckId(int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= parts.token_bytes.size()) {
    ThrowInvalid("tokenizer: there is no token {}; allowed: 0 to {}", id,
                 static_cast<int64_t>(parts.token_bytes.size()) - 1);
  }
}

void Tokenizer::Impl::EncodePiece(std::string_view text, bool first, bool recognise_special, Scratch* scratch,
                                  std::vector<int32_t>* ids) const {
  text = parts.normalization.Apply(text, &scratch->pre_tokenizer.pattern, &scratch->normalized);
  first = first && !scratch->normalized.dropped_first;
  scratch->normalized_pieces.clear();
  normalized_tokens.Split(text, {recognise_special}, &scratch->pre_tokenizer.pattern, &scratch->normalized_pieces);
  for (const AddedTokenFinder::Piece& piece : scratch->normalized_pieces) {
    if (piece.id >= 0) {
      ids->push_back(piece.id);
    } else {
      EncodeWords(piece.text, first && piece.text.data() == text.data(), recognise_special, scratch, ids);
    }
  }
}

void Tokenizer::Impl::EncodeWord(std::string_view word, const std::vector<uint8_t>* forbidden, Scratch* scratch,
                                 std::vector<int32_t>* ids) const {
  if (unigram) {
    unigram->Encode(word, forbidden, &scratch->unigram, ids);
  } else {
    bpe.Encode(word, forbidden, &scratch->bpe, ids);
  }
}

void Tokenizer::Impl::EncodeWords(std::string_view text, bool first, bool recognise_special, Scratch* scratch,
                                  std::vector<int32_t>* ids) const {
  text = parts.pre_tokenizer.Split(text, first, &scratch->pre_tokenizer);
  std::vector<TextRange>* words = &scratch->pre_tokenizer.words;
  if (bpe.of_characters()) {
    scratch->cut.clear();
    for (const TextRange& range : *words) bpe.Cut(text, range, &scratch->cut);
    words = &scratch->cut;
  }
  for (const TextRange& range : *words) {
    const std::string_view word = text.substr(range.begin, range.end - range.begin);
    const size_t before = ids->size();
    const std::span<const int32_t> known = scratch->cache.Find(word);
    if (!known.empty()) {
      ids->insert(ids->end(), known.begin(), known.end());
    } else {
      EncodeWord(word, nullptr, scratch, ids);
      scratch->cache.Put(word, std::span(*ids).subspan(before));
    }
    // A vocabulary whose merges spell out a control token must not give it to a user's text either.
    if (words_can_be_special && !recognise_special &&
        std::any_of(ids->begin() + static_cast<std::ptrdiff_t>(before), ids->end(),
                    [&](int32_t id) { return special[static_cast<size_t>(id)] != 0; })) {
      ids->resize(before);
      EncodeWord(word, &special, scratch, ids);
    }
  }
}

Tokenizer Tokenizer::FromJson(std::string_view json, std::string_view tokenizer_config_json, const std::string& file) {
  return Tokenizer(std::make_unique<const Impl>(PartsFromJson(json, tokenizer_config_json, file)));
}

Tokenizer Tokenizer::FromVocabulary(const BpeVocabulary& vocabulary, const std::string& file) {
  return Tokenizer(std::make_unique<const Impl>(PartsFromVocabulary(vocabulary, file)));
}

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

std::vector<int32_t> Tokenizer::Encode(std::string_view text, SpecialTokens special) const {
  return impl_->Encode(text, {special == SpecialTokens::kRecognise});
}

std::vector<int32_t> Tokenizer::Encode(std::string_view text, std::span<const TextRange> special) const {
  return impl_->Encode(text, {false, special});
}

std::vector<int32_t> Tokenizer::Impl::Encode(std::string_view text, const SpecialPlaces& places) const {
  if (text.size() > kLongestText) {
    ThrowInvalid("tokenizer: the text has {} bytes; allowed at once: {}", text.size(), kLongestText);
  }
  if (const size_t bad = FirstInvalidUtf8(text); bad < text.size()) {
    ThrowInvalid("tokenizer: the text is not UTF-8: byte {} is 0x{:02x}; convert it first", bad,
                 static_cast<uint8_t>(text[bad]));
  }
  std::vector<int32_t> ids;
  // A call that throws does not give it back: what it left there is not known.
  std::unique_ptr<Scratch> scratch = Borrow();
  scratch->pre_tokenizer.pattern.Restart(text.size());
  scratch->pieces.clear();
  raw_tokens.Split(text, places, &scratch->pre_tokenizer.pattern, &scratch->pieces);
  for (const AddedTokenFinder::Piece& piece : scratch->pieces) {
    if (piece.id >= 0) {
      ids.push_back(piece.id);
    } else {
      const auto begin = static_cast<size_t>(piece.text.data() - text.data());
      EncodePiece(piece.text, begin == 0, places.Hold(begin, begin + piece.text.size()), scratch.get(), &ids);
    }
  }
  Return(std::move(scratch));
  return ids;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes, out;
  size_t single = 0;  // bytes that are tokens of their own, at the end of `bytes`
  // As tokenizers does: several of them that are no text become one U+FFFD each.
  const auto end_single = [&] {
    const std::string_view run = std::string_view(bytes).substr(bytes.size() - single);
    if (FirstInvalidUtf8(run) < run.size()) {
      bytes.resize(bytes.size() - single);
      for (size_t i = 0; i < single; ++i) bytes += kReplacementCharacter;
    }
    single = 0;
  };
  bool first = true;
  for (const int32_t id : ids) {
    impl_->CheckId(id);
    if (skip_special && IsSpecial(id)) continue;
    const std::string& token = impl_->parts.token_bytes[static_cast<size_t>(id)];
    const bool is_single = impl_->single_byte[static_cast<size_t>(id)] != 0;
    if (!is_single) end_single();
    if (first && impl_->parts.dropped == TokenizerParts::Dropped::kSpacesOfFirst && !is_single) {
      std::copy_if(token.begin(), token.end(), std::back_inserter(bytes), [](char c) { return c != ' '; });
    } else {
      bytes += token;
    }
    first = false;
    single += is_single;
  }
  end_single();
  out.reserve(bytes.size());
  if (AppendValidUtf8(bytes, &out) > 0) out += kReplacementCharacter;
  if (impl_->parts.dropped == TokenizerParts::Dropped::kFirstSpace && out.starts_with(' ')) out.erase(0, 1);
  return out;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->parts.token_bytes.size()); }

std::string_view Tokenizer::TokenBytes(int32_t id) const {
  impl_->CheckId(id);
  return impl_->parts.token_bytes[static_cast<size_t>(id)];
}

bool Tokenizer::IsSpecial(int32_t id) const {
  impl_->CheckId(id);
  return impl_->special[static_cast<size_t>(id)] != 0;
}

int32_t Tokenizer::TokenId(std::string_view added_token) const {
  const auto found = impl_->added_ids.find(std::string(added_token));
  return found == impl_->added_ids.end() ? -1 : found->second;
}

int32_t Tokenizer::bos() const { return impl_->parts.bos; }
int32_t Tokenizer::eos() const { return impl_->parts.eos; }
bool Tokenizer::add_bos() const { return impl_->parts.add_bos; }
const std::vector<BpeMerge>& Tokenizer::merges() const { return impl_->bpe.merges(); }
std::span<const double> Tokenizer::scores() const {
  return impl_->unigram ? std::span<const double>(impl_->unigram->scores()) : std::span<const double>();
}

}  // namespace phsa
