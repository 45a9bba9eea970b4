// represent, score and select on the CPU.
#ifndef PHSA_ATTENTION_CPU_SELECT_H_
#define PHSA_ATTENTION_CPU_SELECT_H_

#include "attention/cpu/kernels.h"
#include "attention/cpu/tiles.h"
#include "attention/cpu/workspace.h"

namespace phsa::cpu {

// Where the representatives are: where the caller keeps them, or packed in the workspace.
class RepView {
 public:
  RepView(const PlanImpl& plan, const KeyValues& kv) : plan_(&plan), kv_(&kv), base_(kv.reps) {}
  RepView(const PlanImpl& plan, void* packed) : plan_(&plan), base_(packed) {}

  bool packed() const { return kv_ == nullptr; }
  int64_t row_stride() const {
    return packed() ? int64_t{plan_->num_kv_heads} * plan_->rep_width : kv_->rep_row_stride;
  }
  void* Row(int32_t seq, int32_t row, int32_t kv_head) const {
    const int64_t offset =
        packed() ? (plan_->seqs[seq].packed_rep_start + row) * row_stride() + int64_t{kv_head} * plan_->rep_width
                 : RepOffset(*plan_, *kv_, seq, row, kv_head);
    return At(base_, plan_->dtype, offset);
  }

 private:
  const PlanImpl* plan_;
  const KeyValues* kv_ = nullptr;
  void* base_;
};

// What the stages of one call share.
struct Call {
  const PlanImpl& plan;
  const TileShape shape;
  const Kernels& kernels;
  const Products& products;
  const ForwardParams& params;
  SharedScratch shared;
  RepView reps;
  int32_t words;      // of a row of head_dim elements
  int32_t rep_words;  // of a row of reps
};

// Writes the representatives of the blocks that the batch's queries complete; of all blocks where they are packed.
void RepresentRows(const PlanImpl& plan, const Kernels& kernels, const ForwardParams& params, const RepView& reps);

// Packs the representatives of the sequences that have many queries.
void PackReps(const Call& call);

// The same for the parts, where the plan has them.
void PackAllParts(const Call& call);

// Chooses for the tile's queries: scratch.lists_of_tile and list_counts, and the caller's selection where it is wanted.
// `scored`: all pieces of the scores are there.
void SelectTile(const Call& call, const Tile& tile, const TileScratch& scratch, bool scored);

// In how many pieces the scores of a tile's queries may be made, each by another worker into the same memory; 0: not in
// pieces.
int32_t ScorePieces(const Call& call, const Tile& tile);
void ScorePiece(const Call& call, const Tile& tile, const TileScratch& scratch, int32_t piece);

}  // namespace phsa::cpu

#endif  // PHSA_ATTENTION_CPU_SELECT_H_
