// What vocabularies of SentencePiece have that byte-level ones do not: marks for spaces, characters and single bytes as
// tokens, and, in GGUF, scores in place of merges. Their merging itself is that of Bpe; those of the unigram kind have
// unigram.h.
#ifndef PHSA_TOKENIZER_SENTENCEPIECE_H_
#define PHSA_TOKENIZER_SENTENCEPIECE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/bpe.h"

namespace phsa {

// The text with a space for each mark.
std::string UnmarkSpaces(std::string_view text);

// The byte that "<0x41>" stands for; -1: it is no such token.
int ByteOfToken(std::string_view token);

// Characters, bytes and what spaces may be joined to, from the tokens that merging may give; merges are there already.
// False: some byte has no token.
bool FillCharacters(const std::unordered_map<std::string, int32_t>& ids, std::span<const std::string> tokens,
                    BpeModel* model);

// The merges of a vocabulary that has scores: all pairs of tokens that make a token, the best one first.
std::vector<BpeMerge> MergesFromScores(const std::unordered_map<std::string, int32_t>& ids,
                                       std::span<const float> scores);

}  // namespace phsa

#endif  // PHSA_TOKENIZER_SENTENCEPIECE_H_
