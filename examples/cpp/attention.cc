// PHSA attention from C++: flags from a vocabulary, a plan, one layer's forward pass, and what it read.
//
// With CMake:       cmake -S . -B build && cmake --build build && build/attention
// With pkg-config:  c++ -std=c++20 attention.cc -o attention $(pkg-config --cflags --libs phsa) && ./attention
#include <phsa/attention.h>
#include <phsa/punctuation.h>
#include <phsa/threads.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int32_t kTokens = 4096, kQueryHeads = 8, kKvHeads = 2, kHeadDim = 64;

std::vector<float> Normal(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// The workspace must be aligned to 64 bytes.
struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
std::unique_ptr<void, Free> AllocateWorkspace(size_t bytes) {
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (memory == nullptr) throw std::bad_alloc();
  return std::unique_ptr<void, Free>(memory);
}

void Run() {
  std::mt19937 random(1);

  // 1. One flag byte per token of the vocabulary, made once; then one per token of the text, by look-up.
  const std::vector<std::string> words = {" the", " cat", " sat", ",", " on", " a", " mat", ".", " and", " slept"};
  const phsa::PunctuationTable table("en", words);
  std::vector<int32_t> ids(kTokens);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % words.size());
  std::vector<uint8_t> flags(kTokens);
  table.Flags(ids, flags.data());

  // 2. A plan: it checks settings and shapes once, for all layers.
  phsa::ThreadPool threads;
  const int32_t length = kTokens;
  phsa::PlanDesc desc;
  desc.settings = phsa::Settings::Preset(kTokens);
  desc.settings.top_k = 8;
  desc.num_q_heads = kQueryHeads;
  desc.num_kv_heads = kKvHeads;
  desc.head_dim = kHeadDim;
  desc.num_seqs = 1;
  desc.q_lens = &length;
  desc.kv_lens = &length;
  desc.max_threads = threads.num_threads();
  const phsa::Plan plan(desc);

  // 3. One layer. All memory is the caller's.
  const std::vector<float> q = Normal(size_t{kTokens} * kQueryHeads * kHeadDim, random);
  const std::vector<float> k = Normal(size_t{kTokens} * kKvHeads * kHeadDim, random);
  const std::vector<float> v = Normal(size_t{kTokens} * kKvHeads * kHeadDim, random);
  std::vector<float> out(q.size());
  std::vector<int32_t> selection(size_t{kTokens} * plan.SelectionHeads() * plan.SelectionSlots());
  const auto workspace = AllocateWorkspace(plan.WorkspaceSize());

  auto params = phsa::Init<phsa::ForwardParams>();
  params.q = q.data();
  params.q_token_stride = kQueryHeads * kHeadDim;
  params.q_head_stride = kHeadDim;
  params.kv = phsa::Init<phsa::KeyValues>();
  params.kv.k = k.data();
  params.kv.k_token_stride = kKvHeads * kHeadDim;
  params.kv.k_head_stride = kHeadDim;
  params.kv.v = v.data();
  params.kv.v_token_stride = kKvHeads * kHeadDim;
  params.kv.v_head_stride = kHeadDim;
  params.kv.flags = flags.data();
  params.out = out.data();
  params.out_token_stride = kQueryHeads * kHeadDim;
  params.out_head_stride = kHeadDim;
  params.selection = selection.data();
  params.workspace = workspace.get();
  params.workspace_size = plan.WorkspaceSize();
  params.executor = threads.executor();
  plan.Forward(params);

  // 4. What it read, and what came out.
  int64_t read = 0, dense = 0;
  plan.TokensRead(selection.data(), &read, &dense);
  std::printf("phsa %s on %s\n", phsa_version(), phsa_target());
  std::printf("tokens read: %lld of %lld (%.1f %%)\n", static_cast<long long>(read), static_cast<long long>(dense),
              100.0 * static_cast<double>(read) / static_cast<double>(dense));
  const float* last = out.data() + out.size() - size_t{kQueryHeads} * kHeadDim;
  std::printf("last query, head 0: %.6f %.6f %.6f %.6f\n", last[0], last[1], last[2], last[3]);
}

}  // namespace

int main() {
  try {
    Run();
  } catch (const phsa::Error& error) {
    std::fprintf(stderr, "attention: %s\n", error.what());
    return 1;
  }
}
