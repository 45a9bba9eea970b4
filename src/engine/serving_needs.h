// What serving a model on several GPUs takes of each: shares of weights, keys, values and representatives, and what a
// token of a long text has to read. For programs that split models by heads (tensor parallelism) and by layers
// (pipeline parallelism), with bf16 pages of PageLayout's sizes.
#ifndef PHSA_ENGINE_SERVING_NEEDS_H_
#define PHSA_ENGINE_SERVING_NEEDS_H_

#include <cstdint>

#include "io/model_source.h"
#include "phsa/settings.h"

namespace phsa {

struct ServingOptions {
  int32_t context = 0;               // tokens of a text; 0: the model's
  int32_t tensor = 1, pipeline = 1;  // GPUs that share a layer's heads, and groups of them that share the layers
  uint64_t memory = 0;               // bytes of a GPU that may be used
  uint64_t reserved = 0;             // of them, for activations and graphs
  int32_t weight_dtype = PHSA_BF16;
  int32_t kv_dtype = PHSA_BF16;
};

// Of the GPU that holds most; bytes.
struct ServingNeeds {
  int32_t context = 0;
  uint64_t weights = 0;
  uint64_t key_values = 0, representatives = 0;  // of one text of that many tokens
  uint64_t read_key_values = 0,
           read_representatives = 0;  // for the text's next token; beside them all weights are read
  int64_t texts = 0;                  // that fit at once
};

// Throws phsa::Error where heads or layers cannot be shared out so, saying what is allowed.
ServingNeeds NeedsOfServing(const ModelSource& source, const LayerSettings& attention, const ServingOptions& options);

}  // namespace phsa

#endif  // PHSA_ENGINE_SERVING_NEEDS_H_
