/* PHSA attention from C: flags from a vocabulary, a plan, one layer's forward pass, and what it read.
 *
 * With CMake:       cmake -S . -B build && cmake --build build && build/attention
 * With pkg-config:  cc attention.c -o attention $(pkg-config --cflags --libs phsa) -lm && ./attention
 */
#include <math.h>
#include <phsa/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kTokens = 4096, kQueryHeads = 8, kKvHeads = 2, kHeadDim = 64 };

static void Check(phsa_status status) {
  if (status == PHSA_OK) return;
  fprintf(stderr, "attention: %s\n", phsa_last_error());
  exit(1);
}

/* aligned_alloc wants a multiple of the alignment. */
static void* Allocate(size_t bytes) {
  void* memory = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (memory == NULL) {
    fprintf(stderr, "attention: out of memory (%zu bytes)\n", bytes);
    exit(1);
  }
  return memory;
}

static uint32_t Random(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

/* A sum of four uniform numbers: near enough to a normal distribution with variance 1. */
static void FillRandom(float* out, size_t count, uint32_t* state) {
  for (size_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int j = 0; j < 4; ++j) sum += (float)Random(state) / 16777216.0f - 0.5f;
    out[i] = sum * sqrtf(3.0f);
  }
}

int main(void) {
  uint32_t random = 1;

  /* 1. One flag byte per token of the vocabulary, made once; then one per token of the text, by look-up. */
  static const char* const words[] = {" the", " cat", " sat", ",", " on", " a", " mat", ".", " and", " slept"};
  enum { kVocabulary = sizeof(words) / sizeof(words[0]) };
  size_t sizes[kVocabulary];
  for (int i = 0; i < kVocabulary; ++i) sizes[i] = strlen(words[i]);
  uint8_t table[kVocabulary];
  Check(phsa_punctuation_table("en", words, sizes, NULL, kVocabulary, table));

  uint8_t* flags = Allocate(kTokens);
  for (int i = 0; i < kTokens; ++i) flags[i] = table[Random(&random) % kVocabulary];

  /* 2. A plan: it checks settings and shapes once, for all layers. */
  phsa_settings settings = PHSA_INIT(phsa_settings);
  Check(phsa_settings_preset(kTokens, &settings));
  settings.top_k = 8;

  phsa_threads* threads = NULL;
  Check(phsa_threads_create(0, &threads));
  const phsa_executor executor = phsa_threads_executor(threads);

  const int32_t lengths[] = {kTokens};
  phsa_plan_desc desc = PHSA_INIT(phsa_plan_desc);
  desc.settings = &settings;
  desc.dtype = PHSA_F32;
  desc.num_q_heads = kQueryHeads;
  desc.num_kv_heads = kKvHeads;
  desc.head_dim = kHeadDim;
  desc.num_seqs = 1;
  desc.q_lens = lengths;
  desc.kv_lens = lengths;
  desc.max_threads = executor.num_threads;
  phsa_plan* plan = NULL;
  Check(phsa_plan_create(&desc, &plan));

  /* 3. One layer. All memory is the caller's. */
  const size_t q_count = (size_t)kTokens * kQueryHeads * kHeadDim;
  const size_t kv_count = (size_t)kTokens * kKvHeads * kHeadDim;
  const size_t selection_count =
      (size_t)kTokens * (size_t)phsa_plan_selection_heads(plan) * (size_t)phsa_plan_selection_slots(plan);
  float* q = Allocate(q_count * sizeof(float));
  float* k = Allocate(kv_count * sizeof(float));
  float* v = Allocate(kv_count * sizeof(float));
  float* out = Allocate(q_count * sizeof(float));
  int32_t* selection = Allocate(selection_count * sizeof(int32_t));
  FillRandom(q, q_count, &random);
  FillRandom(k, kv_count, &random);
  FillRandom(v, kv_count, &random);

  phsa_forward_params params = PHSA_INIT(phsa_forward_params);
  params.q = q;
  params.q_token_stride = kQueryHeads * kHeadDim;
  params.q_head_stride = kHeadDim;
  params.kv.struct_size = sizeof(params.kv);
  params.kv.k = k;
  params.kv.k_token_stride = kKvHeads * kHeadDim;
  params.kv.k_head_stride = kHeadDim;
  params.kv.v = v;
  params.kv.v_token_stride = kKvHeads * kHeadDim;
  params.kv.v_head_stride = kHeadDim;
  params.kv.flags = flags;
  params.out = out;
  params.out_token_stride = kQueryHeads * kHeadDim;
  params.out_head_stride = kHeadDim;
  params.selection = selection;
  params.workspace_size = phsa_plan_workspace_size(plan);
  params.workspace = Allocate(params.workspace_size);
  params.executor = executor;
  Check(phsa_forward(plan, &params));

  /* 4. What it read, and what came out. */
  int64_t read = 0, dense = 0;
  Check(phsa_tokens_read(plan, selection, &read, &dense));
  printf("phsa %s on %s\n", phsa_version(), phsa_target());
  printf("tokens read: %lld of %lld (%.1f %%)\n", (long long)read, (long long)dense,
         100.0 * (double)read / (double)dense);
  const float* last = out + q_count - (size_t)kQueryHeads * kHeadDim;
  printf("last query, head 0: %.6f %.6f %.6f %.6f\n", last[0], last[1], last[2], last[3]);

  free(params.workspace);
  free(selection);
  free(out);
  free(v);
  free(k);
  free(q);
  free(flags);
  phsa_plan_destroy(plan);
  phsa_threads_destroy(threads);
  return 0;
}
