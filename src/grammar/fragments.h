// Pieces that grammars are put together from: each goes from a state to the one that it returns.
#ifndef PHSA_GRAMMAR_FRAGMENTS_H_
#define PHSA_GRAMMAR_FRAGMENTS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/grammar.h"
#include "grammar/nfa.h"

namespace phsa {

// gbnf.cc: the rules of a GBNF text; returns the rule `root`.
int32_t AddGbnf(Builder& builder, std::string_view text);

// json_fragments.cc: JSON as it is written by this program's grammars. Space between tokens is none, one blank, or a
// new line with an indentation: enough for every usual layout, and a model cannot lose itself in it.
int32_t AddSpace(Builder& builder, int32_t from);
int32_t AddJsonCharacter(Builder& builder, int32_t from);  // one of a string, as it is or escaped
int32_t AddJsonString(Builder& builder, int32_t from, int32_t min_length, int32_t max_length);  // max < 0: any
// A string's inside and closing quote, where it is none of `names`, whose characters are as they are.
int32_t AddOtherName(Builder& builder, int32_t from, const std::vector<std::string>& names);
int32_t AddJsonInteger(Builder& builder, int32_t from);
int32_t AddJsonNumber(Builder& builder, int32_t from);
int32_t AddJsonValue(Builder& builder, int32_t from);   // any
int32_t AddJsonObject(Builder& builder, int32_t from);  // any
// One of the characters as it stands in a JSON string: escaped where JSON asks for it, and only there.
int32_t AddJsonClass(Builder& builder, int32_t from, const std::vector<CodeRange>& ranges);
// The text of a JSON string with its quotes, in the form that JSON writers give it.
std::string JsonLiteral(std::string_view text);

// number_range.cc: JSON numbers within bounds, written without exponent; none: no bound.
struct Decimal {
  bool negative = false;
  std::string whole = "0", fraction;  // no zeros in front of the one, nor behind the other
};
struct Bound {
  Decimal value;
  bool strict = false;  // it is itself not within
};
int32_t AddIntegerBetween(Builder& builder, int32_t from, const std::optional<Bound>& low,
                          const std::optional<Bound>& high);
int32_t AddNumberBetween(Builder& builder, int32_t from, const std::optional<Bound>& low,
                         const std::optional<Bound>& high);

// pattern.cc: the inside of a JSON string whose text a regular expression matches somewhere, or as a whole where it has
// ^ and $. `place` is for messages.
int32_t AddPattern(Builder& builder, int32_t from, std::string_view pattern, const std::string& place);

// json_schema.cc
int32_t AddSchema(Builder& builder, int32_t from, const OrderedJson& schema, const std::string& place);

}  // namespace phsa

#endif  // PHSA_GRAMMAR_FRAGMENTS_H_
