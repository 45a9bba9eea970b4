// What computes the steps of a decoder: the CPU (cpu/) or a GPU (cuda/). A backend holds the weights and the
// activations and gives the memory of the cache's pages; the decoder packs the batches, plans the attention and knows
// no device.
//
// The calls of a step, always from one thread and for one step at a time:
//   Begin(rows)
//   RunLayers(rows), and where it says no, for each layer:
//     QueriesKeysValues(layer); Attend(layer, group, …) for each of rows.groups; OutputAndMlp(layer)
//   Logits(…)
// A call may only queue its work, as long as the order is kept. `rows` and the plans given to Attend stay where they
// are until Logits returns, which is called in every step, also where no logits are wanted. A step that is left with an
// exception is over: the next call is the next step's Begin.
#ifndef PHSA_MODEL_BACKEND_H_
#define PHSA_MODEL_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/errors.h"
#include "model/kv_cache.h"
#include "model/logits_row.h"
#include "model/page_memory.h"
#include "model/weights.h"
#include "phsa/attention.h"

namespace phsa {

// What a backend is made with.
struct BackendOptions {
  WeightsMode weights = WeightsMode::kAuto;
  int32_t kv_dtype = PHSA_F32;   // phsa_dtype of the cache's keys and values
  int32_t max_rows = 1;          // the most tokens of a step
  int32_t device_index = 0;      // which of several devices of a kind
  bool experts_in_file = false;  // on the CPU: SizeOfWeights
};

// What it will take, without making one.
struct BackendSizes {
  uint64_t weights = 0, workspace = 0;  // bytes
  std::string weight_types;             // in words: "int4, int8"
  uint64_t available = 0;               // bytes that the device can give now
};

// Items of a step, one behind the other, that are read in the same way.
struct StepGroup {
  const LayerSettings* settings = nullptr;
  const PageLayout* layout = nullptr;  // of their texts, with the same offsets as the cache's
  int32_t adapter = 0;                 // TextAttention::adapter
  size_t first_item = 0, num_items = 0;
  int32_t first_row = 0, num_rows = 0;
};

// The batch of a step, packed: the new tokens of all items (sequences), one item behind the other. In host memory.
struct StepRows {
  int32_t count = 0;
  std::vector<int32_t> tokens, positions;  // [row]
  std::vector<uint8_t> flags;              // [row]: whether the token is punctuation; they go into the cache's pages
  std::vector<int64_t> cache_rows;         // [row]: where its keys lie, in elements from KvCache::View(layer).k
  std::vector<int32_t> q_lens, kv_lens;    // [item]: its rows; all its tokens, the new ones included
  std::vector<int32_t> page_table;         // [item][page_table_stride], 0 beyond an item's last page
  int64_t page_table_stride = 0;
  std::vector<StepGroup> groups;  // all items, in order

  // Rows whose logits are wanted, ascending.
  struct Wanted {
    int32_t row = 0;
    int32_t next = -1;  // the token of the item's next row, whose logit is likely to be asked for; -1: none
  };
  std::vector<Wanted> wanted;
  KvCache* cache = nullptr;  // its memory is this backend's
};

// What the attention of a layer read and gave for the rows of a group, in host memory.
struct AttentionTrace {
  const void* queries = nullptr;        // [row][q head][head_dim] in the layout's dtype; valid until the next call
  std::vector<float> lse;               // [row][q head]
  std::vector<int32_t> selection;       // [row][selection heads][selection slots] of the plan; empty: nothing is chosen
  std::vector<float> selection_scores;  // as selection
};

// Seconds spent in the parts of a step, summed over steps.
struct StepTimes {
  double products = 0, attention = 0, other = 0;
  double selection = 0;  // representatives, scores and top-K; part of `attention` unless the stages are timed apart
};

class ModelBackend {
 public:
  virtual ~ModelBackend() = default;

  virtual int32_t device() const = 0;           // phsa_device that plans are made for
  virtual std::string device_name() const = 0;  // "cpu", or what the GPU calls itself
  virtual int32_t max_rows() const = 0;
  // Exchanges what an adapter adds to the weights for what the adapter of `source`, the model that it was made with,
  // does; between steps. False: its weights hold the sum, and it has to be made anew; nothing has happened.
  virtual bool SetAdapter(const ModelSource& /*source*/) { return false; }
  // Reads another adapter for the same weights, which texts may name instead (TextAttention::adapter): by 1 the first
  // time, then by 2, … Between steps. Throws phsa::Error where it would have to be added to the weights.
  virtual void AddAdapter(const Adapter& adapter) {
    Throw(PHSA_UNSUPPORTED, "{}: this device adds an adapter to its weights, so that there can be one", adapter.path());
  }
  // Throws phsa::Error where the device has not as much. There is one at a time; what was kept of an earlier one, its
  // address included, means nothing any more.
  virtual std::unique_ptr<PageMemory> MakePages(size_t page_bytes, int32_t num_pages) = 0;

  // Takes the step's data, embeds the tokens and writes their flags into the cache's pages (byte `offset of the token`
  // of its page; KvCache::FlagByte).
  virtual void Begin(const StepRows& rows) = 0;
  // Runs all layers, where a backend has a quicker way for such a step as a whole. False: it has none, and nothing
  // has happened.
  virtual bool RunLayers(const StepRows& rows) = 0;
  // The queries of all rows, and their keys and values in the cache: products, head norms, RoPE.
  virtual void QueriesKeysValues(int32_t layer) = 0;
  // The attention of a group's rows. `plan` is for device() and the group's items. `trace`: null, or to be filled.
  virtual void Attend(int32_t layer, const StepGroup& group, const Plan& plan, AttentionTrace* trace) = 0;
  // The attention's output and the MLP into the residual stream.
  virtual void OutputAndMlp(int32_t layer) = 0;
  // use(i, logits) for each of rows.wanted, in order; a row of logits is valid during its call. Returns, or throws what
  // went wrong on the device, when all of the step's work has ended; where no logits are wanted, it may still be under
  // way, and a later call throws. `use` may throw: that ends the step.
  virtual void Logits(const std::function<void(size_t wanted, const LogitsRow& logits)>& use) = 0;
  // Of the step that Logits has ended: what the model's last norm gave for each row, [row][hidden], in host memory;
  // valid until the next Begin. Throws phsa::Error where it stays on the device.
  virtual std::span<const float> Hidden() const {
    Throw(PHSA_UNSUPPORTED, "this device keeps no hidden states of all tokens; {} does", Option{"device", "cpu"});
  }

  // Takes the time of the parts of each step, the selection apart, stage by stage (RunLayers then says no): the same
  // results, a little later. Without it `times` may count the whole as `other` or not at all.
  virtual void TimeStages(bool apart) = 0;
  virtual const StepTimes& times() const = 0;
};

}  // namespace phsa

#endif  // PHSA_MODEL_BACKEND_H_
