// What a grammar costs per token, on a real model: the model reads a text that the grammar allows, token by token, and
// at each one a token is chosen from its logits without the grammar and with it. The difference, and what it takes to
// follow the text, is the cost; processor time of this thread, so that what else the machine does matters little.
// Beside it the quickest step of the decoder in the same run.
//
//   bench_grammar MODEL
#include <ctime>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "engine/sampler.h"
#include "engine/session.h"
#include "grammar/matcher.h"
#include "io/model_store.h"

namespace {

using phsa::GrammarMatcher;

double ThreadSeconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class Filter final : public phsa::TokenFilter {
 public:
  explicit Filter(GrammarMatcher& matcher) : matcher_(matcher) {}
  bool Allows(int32_t token) override { return matcher_.Allows(token); }
  std::span<const uint64_t> Mask() override { return matcher_.Mask(); }

 private:
  GrammarMatcher& matcher_;
};

struct Case {
  const char* name;
  std::function<std::shared_ptr<const phsa::Grammar>()> compile;
  std::string text;
};

std::vector<Case> Cases() {
  static constexpr std::string_view kSchema = R"({"type": "object", "properties": {
      "title": {"type": "string"}, "year": {"type": "integer", "minimum": 1800, "maximum": 2100},
      "summary": {"type": "string", "maxLength": 600}, "authors": {"type": "array", "items": {"type": "object",
        "properties": {"name": {"type": "string"}, "email": {"type": ["string", "null"]}}, "required": ["name", "email"],
        "additionalProperties": false}}, "genre": {"enum": ["novel", "poem", "essay", "play"]},
      "published": {"type": "string", "format": "date"}, "score": {"type": "number", "minimum": 0, "maximum": 10}},
      "required": ["title", "year", "summary", "authors", "genre", "published", "score"], "additionalProperties": false})";
  const std::string record =
      R"({"title": "The Lighthouse Keeper's Notebook", "year": 1927, "summary": "A keeper on a small island writes down )"
      R"(every ship that passes, until one night a ship comes that does not pass. What he writes then, nobody believed, )"
      R"(and the book tells why it was true all the same; it is also a book about the sea, about patience and weather.", )"
      R"("authors": [{"name": "Clara Bennett", "email": "clara@example.org"}, {"name": "T. O. Wells", "email": null}], )"
      R"("genre": "novel", "published": "1927-10-03", "score": 8.75})";
  static constexpr std::string_view kGbnf = R"GBNF(
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
)GBNF";
  return {{"json_schema", [] { return phsa::CompileJsonSchemaText(kSchema, "schema"); }, record},
          {"json_object", [] { return phsa::CompileJsonObject(); }, record},
          {"GBNF of JSON", [] { return phsa::CompileGbnf(kGbnf, "grammar"); }, record}};
}

void Run(const std::string& name) {
  std::unique_ptr<phsa::ModelSource> source = phsa::ModelSource::Open(phsa::ResolveModel(name));
  phsa::Tokenizer tokenizer = phsa::LoadTokenizer(*source);
  phsa::EngineOptions options;
  options.context = 1024;
  phsa::Engine engine(std::move(source), std::move(tokenizer), options);
  engine.Load([](double) { return true; });
  const double begin = ThreadSeconds();
  const auto trie = engine.token_trie();
  std::printf("%s: %d tokens, %zu nodes of their tree, made in %.0f ms\n", name.c_str(), trie->vocab_size(),
              trie->nodes().size(), 1e3 * (ThreadSeconds() - begin));
  std::printf("%-13s %-20s %6s %11s %9s %9s %9s %9s\n", "grammar", "sampling", "tokens", "compiled/ms", "first/us",
              "worst/us", "again/us", "share");

  const struct {
    const char* name;
    float temperature;
    int32_t top_k;
  } samplings[] = {{"greedy", 0, 40}, {"temperature 0.8", 0.8f, 40}, {"0.8, of all tokens", 0.8f, 0}};
  for (const Case& one : Cases()) {
    const std::vector<int32_t> prompt = engine.tokenizer().Encode("JSON:\n", phsa::SpecialTokens::kAsText);
    const std::vector<int32_t> text = engine.tokenizer().Encode(one.text, phsa::SpecialTokens::kAsText);
    for (const auto& sampling : samplings) {
      const double before = ThreadSeconds();
      const std::shared_ptr<const phsa::Grammar> grammar = one.compile();
      const double compiled = ThreadSeconds() - before;
      double cost[2] = {0, 0}, worst = 0, step_seconds = std::numeric_limits<double>::infinity();
      for (int round = 0; round < 2; ++round) {
        phsa::SamplerSettings settings;
        settings.temperature = sampling.temperature;
        settings.top_k = sampling.top_k;
        phsa::Sampler plain(settings), filtered(settings);
        GrammarMatcher matcher(grammar, trie);
        Filter filter(matcher);
        phsa::Session session(engine);
        std::vector<int32_t> all = prompt;
        for (const int32_t token : text) {
          const auto choose = [&](int32_t, int32_t, const phsa::LogitsRow& logits) {
            const int32_t known = trie->vocab_size();
            const double start = ThreadSeconds();
            plain.Next(logits, known, {});
            const double middle = ThreadSeconds();
            filtered.Next(logits, known, {}, {}, &filter);
            if (!matcher.Accept(token)) std::abort();
            const double own = (ThreadSeconds() - middle) - (middle - start);
            cost[round] += own;
            if (round == 0) worst = std::max(worst, own);
          };
          // The last token is read again, alone: a step as in writing.
          const auto wall = std::chrono::steady_clock::now();
          const bool first = all.size() == prompt.size();
          session.Prefill(all, {}, choose, phsa::BatchItem::Logits::kLast);
          const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - wall;
          if (!first) step_seconds = std::min(step_seconds, taken.count());
          all.push_back(token);
        }
        if (!matcher.MayEnd()) std::abort();
      }
      const double per = 1e6 / static_cast<double>(text.size());
      std::printf("%-13s %-20s %6zu %11.2f %9.1f %9.1f %9.1f %8.2f%%\n", one.name, sampling.name, text.size(),
                  1e3 * compiled, per * cost[0], 1e6 * worst, per * cost[1],
                  100 * cost[0] / static_cast<double>(text.size()) / step_seconds);
    }
  }
  std::printf(
      "first: the mean over a text with a new grammar; worst: of its tokens; again: the same text once more; share: of "
      "the quickest step of the decoder, choosing included, first text\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: bench_grammar MODEL\n");
    return 2;
  }
  try {
    Run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_grammar: %s\n", error.what());
    return 1;
  }
  return 0;
}
