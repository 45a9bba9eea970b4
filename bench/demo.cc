// What PHSA does, in a minute, without a model: attention over a long random context and over a real text, dense
// against sparse, with the time, the share of tokens read, and how often attention finds what it looks for.
//
//   phsa-demo [--text FILE] [--tokens N] [--threads N]
//
// The real text is searched as an induction head of a language model does it: "what came after this word?". Every word
// has a random key and a random value vector per head; at position i lie the key of word i and the value of word i + 1,
// so a query with a word's key brings back the word that followed. Words that occur once, far back, are asked for:
// whoever reads their block answers right, whoever does not cannot.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "phsa/attention.h"
#include "phsa/punctuation.h"
#include "phsa/threads.h"

namespace {

constexpr int kQueryHeads = 16, kKvHeads = 8, kDim = 128, kGroup = kQueryHeads / kKvHeads;

struct Method {
  const char* label;
  const char* policy;
  int top_k;
};
constexpr Method kMethods[] = {
    {"dense", "dense", 16},     {"streaming", "streaming", 16},       {"InfLLM v2, K = 1", "infllm2", 1},
    {"PHSA, K = 1", "phsa", 1}, {"InfLLM v2, K = 16", "infllm2", 16}, {"PHSA, K = 16", "phsa", 16}};

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// [token][head][dim]
using Rows = std::vector<float>;

struct Context {
  int tokens = 0;
  Rows q, k, v;
  std::vector<uint8_t> flags;
};

struct Result {
  double ms = 0;
  double read_share = 0;
  Rows out;
};

// Attention of the last q_len positions over the whole context, timed; `repeat` runs, the best counts.
Result Attend(const Context& context, const Rows& q, int q_len, const Method& method, phsa::ThreadPool& pool,
              int repeat) {
  phsa::PlanDesc desc;
  desc.settings.policy = phsa::PolicyFromName(method.policy);
  desc.settings.top_k = method.top_k;
  desc.num_q_heads = kQueryHeads;
  desc.num_kv_heads = kKvHeads;
  desc.head_dim = kDim;
  desc.num_seqs = 1;
  desc.q_lens = &q_len;
  desc.kv_lens = &context.tokens;
  desc.max_threads = pool.num_threads();
  const phsa::Plan plan(desc);

  Result result;
  result.out.resize(q.size());
  std::vector<std::byte> workspace(plan.WorkspaceSize() + 64);
  std::vector<int32_t> selection(static_cast<size_t>(q_len) * plan.SelectionHeads() * plan.SelectionSlots());
  // As in generation, what earlier steps have represented is kept; a prefill computes it as it goes.
  Rows reps(static_cast<size_t>(plan.NumReps()) * kKvHeads * plan.RepWidth());
  auto params = phsa::Init<phsa::ForwardParams>();
  params.q = q.data();
  params.q_token_stride = params.out_token_stride = kQueryHeads * kDim;
  params.q_head_stride = params.out_head_stride = kDim;
  params.kv = phsa::Init<phsa::KeyValues>();
  params.kv.k = context.k.data();
  params.kv.v = context.v.data();
  params.kv.k_token_stride = params.kv.v_token_stride = kKvHeads * kDim;
  params.kv.k_head_stride = params.kv.v_head_stride = kDim;
  params.kv.flags = context.flags.data();
  params.out = result.out.data();
  params.selection = selection.empty() ? nullptr : selection.data();
  params.workspace = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  params.workspace_size = plan.WorkspaceSize();
  params.executor = pool.executor();
  if (q_len < context.tokens && !reps.empty()) {
    phsa::PlanDesc all = desc;
    all.q_lens = &context.tokens;
    params.kv.reps = reps.data();
    params.kv.rep_row_stride = int64_t{kKvHeads} * plan.RepWidth();
    params.kv.rep_head_stride = plan.RepWidth();
    phsa::Plan(all).Represent(params.kv, params.executor);
  }
  result.ms = 1e30;
  for (int i = 0; i < repeat; ++i) {
    const double start = Now();
    plan.Forward(params);
    result.ms = std::min(result.ms, (Now() - start) * 1e3);
  }
  int64_t read = 0, dense = 0;
  plan.TokensRead(params.selection, &read, &dense);
  result.read_share = static_cast<double>(read) / static_cast<double>(dense);
  return result;
}

Rows Random(int tokens, int heads, uint32_t seed, float memory, float size) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const float fresh = std::sqrt(1 - memory * memory);
  Rows rows(static_cast<size_t>(tokens) * heads * kDim), state(static_cast<size_t>(heads) * kDim);
  for (size_t i = 0; i < rows.size(); ++i) {
    float& x = state[i % state.size()];
    x = memory * x + fresh * normal(random);
    rows[i] = size * x;
  }
  return rows;
}

// Words and punctuation marks, each a token of its own.
std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> tokens;
  std::string word;
  const auto flush = [&] {
    if (!word.empty()) tokens.push_back(word);
    word.clear();
  };
  for (const char c : text) {
    if (std::isspace(static_cast<unsigned char>(c))) {
      flush();
    } else if (phsa::InPunctuationSet("en", std::string(1, c))) {
      flush();
      tokens.push_back(std::string(1, c));
    } else {
      word += c;
    }
  }
  flush();
  return tokens;
}

void PrintHeader(const char* title, bool recall) {
  std::printf("\n%s\n  %-18s %12s %9s %12s %9s%s\n", title, "", "prefill", "", "one token", "read",
              recall ? "   found" : "");
}

void RandomExample(int tokens, phsa::ThreadPool& pool) {
  Context context;
  context.tokens = tokens;
  context.q = Random(tokens, kQueryHeads, 1, 0.95f, 1.5f);
  context.k = Random(tokens, kKvHeads, 2, 0.95f, 1);
  context.v = Random(tokens, kKvHeads, 3, 0, 1);
  context.flags.resize(static_cast<size_t>(tokens));
  for (size_t i = 0; i < context.flags.size(); ++i) context.flags[i] = i % 9 == 0;
  const Rows last(context.q.end() - kQueryHeads * kDim, context.q.end());
  char title[160];
  std::snprintf(title, sizeof title,
                "A random context of %d tokens (%d query, %d KV heads of %d; init 128, local 512):", tokens,
                kQueryHeads, kKvHeads, kDim);
  PrintHeader(title, false);
  double dense = 0;
  for (const Method& method : kMethods) {
    const Result prefill = Attend(context, context.q, tokens, method, pool, 1);
    const Result token = Attend(context, last, 1, method, pool, 20);
    if (dense == 0) dense = prefill.ms;
    std::printf("  %-18s %9.0f ms %8.1fx %9.3f ms %7.1f %%\n", method.label, prefill.ms, dense / prefill.ms, token.ms,
                100 * prefill.read_share);
    std::fflush(stdout);
  }
}

void TextExample(const std::string& path, int limit, phsa::ThreadPool& pool) {
  std::ifstream file(path);
  if (!file) {
    throw phsa::Error(PHSA_INVALID_ARGUMENT,
                      "cannot read " + path + "; run from the project's folder, or give --text FILE");
  }
  std::stringstream buffer;
  buffer << file.rdbuf();
  std::vector<std::string> tokens = Split(buffer.str());
  if (static_cast<int>(tokens.size()) > limit) tokens.resize(static_cast<size_t>(limit));
  const int n = static_cast<int>(tokens.size());
  if (n < 4096) {
    throw phsa::Error(PHSA_INVALID_ARGUMENT,
                      path + " has " + std::to_string(n) + " words and marks; at least 4096 are needed");
  }

  std::unordered_map<std::string, int> ids;
  std::vector<std::string> vocabulary;
  std::vector<int> sequence, count, where;
  for (int i = 0; i < n; ++i) {
    const auto [it, fresh] = ids.try_emplace(tokens[static_cast<size_t>(i)], static_cast<int>(ids.size()));
    if (fresh) {
      vocabulary.push_back(it->first);
      count.push_back(0);
      where.push_back(0);
    }
    sequence.push_back(it->second);
    ++count[static_cast<size_t>(it->second)];
    where[static_cast<size_t>(it->second)] = i;
  }
  const int words = static_cast<int>(vocabulary.size());
  const Rows key_of = Random(words, kKvHeads, 11, 0, 1), value_of = Random(words, kKvHeads, 12, 0, 1);

  Context context;
  context.tokens = n;
  context.flags.resize(static_cast<size_t>(n));
  const phsa::PunctuationTable punctuation("en", vocabulary);
  punctuation.Flags(sequence, context.flags.data());
  const size_t row = kKvHeads * kDim;
  const auto copy_row = [&](const Rows& table, int word, Rows& to) {
    to.insert(to.end(), table.begin() + static_cast<int64_t>(static_cast<size_t>(word) * row),
              table.begin() + static_cast<int64_t>(static_cast<size_t>(word + 1) * row));
  };
  const auto query_row = [&](int word, Rows& to) {
    for (int h = 0; h < kQueryHeads; ++h) {
      const float* key = key_of.data() + static_cast<size_t>(word) * row + static_cast<size_t>(h / kGroup) * kDim;
      for (int c = 0; c < kDim; ++c) to.push_back(2 * key[c]);
    }
  };
  for (int i = 0; i < n; ++i) {
    copy_row(key_of, sequence[static_cast<size_t>(i)], context.k);
    copy_row(value_of, sequence[static_cast<size_t>(std::min(i + 1, n - 1))], context.v);
    query_row(sequence[static_cast<size_t>(i)], context.q);
  }

  // Words that occur once, before the local window of the questions.
  std::vector<int> asked;
  for (int w = 0; w < words; ++w) {
    const int at = where[static_cast<size_t>(w)];
    if (count[static_cast<size_t>(w)] == 1 && at > 256 && at < n - 2048 &&
        vocabulary[static_cast<size_t>(w)].size() > 4) {
      asked.push_back(w);
    }
  }
  std::shuffle(asked.begin(), asked.end(), std::mt19937(5));
  if (asked.size() > 200) asked.resize(200);
  Rows questions;
  for (const int w : asked) query_row(w, questions);
  Rows one(questions.begin(), questions.begin() + kQueryHeads * kDim);

  char title[240];
  std::snprintf(
      title, sizeof title,
      "%s, %d words and marks. \"What came after ...?\", asked for %zu words that occur once (\"%s\", \"%s\", ...):",
      path.substr(path.rfind('/') + 1).c_str(), n, asked.size(), vocabulary[static_cast<size_t>(asked[0])].c_str(),
      vocabulary[static_cast<size_t>(asked[1])].c_str());
  PrintHeader(title, true);
  double dense = 0;
  for (const Method& method : kMethods) {
    const Result prefill = Attend(context, context.q, n, method, pool, 1);
    const Result token = Attend(context, one, 1, method, pool, 20);
    const Result answers = Attend(context, questions, static_cast<int>(asked.size()), method, pool, 1);
    int right = 0;
    for (size_t a = 0; a < asked.size(); ++a) {
      const float* out = answers.out.data() + a * kQueryHeads * kDim;
      int best = 0;
      float best_score = -1e30f;
      for (int w = 0; w < words; ++w) {
        float score = 0;
        for (int h = 0; h < kQueryHeads; ++h) {
          const float* value = value_of.data() + static_cast<size_t>(w) * row + static_cast<size_t>(h / kGroup) * kDim;
          for (int c = 0; c < kDim; ++c) score += out[h * kDim + c] * value[c];
        }
        if (score > best_score) {
          best_score = score;
          best = w;
        }
      }
      right += best == sequence[static_cast<size_t>(where[static_cast<size_t>(asked[a])] + 1)];
    }
    if (dense == 0) dense = prefill.ms;
    std::printf("  %-18s %9.0f ms %8.1fx %9.3f ms %7.1f %% %5d/%zu\n", method.label, prefill.ms, dense / prefill.ms,
                token.ms, 100 * prefill.read_share, right, asked.size());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string text = "bench/data/from_sand_hill_to_pine.txt";
  int tokens = 16384, threads = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (i + 1 < argc && flag == "--text") {
      text = argv[++i];
    } else if (i + 1 < argc && flag == "--tokens") {
      tokens = std::atoi(argv[++i]);
    } else if (i + 1 < argc && flag == "--threads") {
      threads = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: phsa-demo [--text FILE] [--tokens N (4096 to 262144)] [--threads N]\n");
      return 2;
    }
  }
  if (tokens < 4096 || tokens > 262144 || threads < 0 || threads > 1024) {
    std::fprintf(stderr, "phsa-demo: --tokens takes 4096 to 262144, --threads 0 (one per core) to 1024\n");
    return 2;
  }
  try {
    phsa::ThreadPool pool(threads);
    std::printf("phsa %s on %d threads, SIMD target %s, f32. Times are of the attention of one layer.\n",
                phsa_version(), pool.num_threads(), phsa_target());
    RandomExample(tokens, pool);
    TextExample(text, tokens, pool);
    std::printf(
        "\nread: tokens that the queries of the prefill attended to, of those that dense attention reads.\n"
        "found: answers right. Random vectors carry no meaning, so weight on punctuation can only dilute the words "
        "here;\n"
        "what it does to real models takes a real model to tell.\n");
    return 0;
  } catch (const phsa::Error& e) {
    std::fprintf(stderr, "phsa-demo: %s\n", e.what());
    return e.status() == PHSA_INVALID_ARGUMENT ? 2 : 1;
  }
}
