// What the CUDA kernels take, asked where no GPU and no CUDA need be: the limits themselves, and what plans say of
// them.
#include <gtest/gtest.h>

#include <string>

#include "attention/cuda/backend.h"
#include "attention/cuda/limits.h"
#include "phsa/attention.h"

namespace phsa::cuda {
namespace {

Shape Taken() {
  Shape shape{};
  shape.dtype = Dtype::kBf16;
  shape.num_q_heads = 16;
  shape.num_kv_heads = 8;
  shape.head_dim = 128;
  shape.selection_heads = 8;
  shape.top_k = 16;
  shape.parts = 1;
  shape.scale = 0.1f;
  return shape;
}

std::string Why(const Shape& shape, int32_t max_kv_len = 4096) {
  const char* const reason = Unsupported(shape, max_kv_len);
  return reason == nullptr ? "" : reason;
}

TEST(CudaLimits, TakeEveryHeadSizeOfThePlanAndNoOther) {
  for (const int32_t head_dim : {64, 80, 96, 128, 256}) {
    Shape shape = Taken();
    shape.head_dim = head_dim;
    EXPECT_EQ(Why(shape), "") << head_dim;
  }
  for (const int32_t head_dim : {0, 32, 72, 112, 160, 192, 512}) {
    Shape shape = Taken();
    shape.head_dim = head_dim;
    EXPECT_EQ(Why(shape), "head_dim: the CUDA kernels take 64, 80, 96, 128 and 256") << head_dim;
  }
}

TEST(CudaLimits, TakeGroupsOf1To16) {
  Shape shape = Taken();
  shape.num_kv_heads = 1;
  for (int32_t group = 1; group <= 17; ++group) {
    shape.num_q_heads = group;
    EXPECT_EQ(Why(shape) == "", group <= 16) << group;
  }
  shape.num_q_heads = 17;
  EXPECT_EQ(Why(shape), "group: the CUDA kernels take up to 16 query heads a KV head");
}

TEST(CudaLimits, NameWhatTheyDoNotTake) {
  Shape shape = Taken();
  shape.dtype = static_cast<Dtype>(PHSA_F32);
  EXPECT_EQ(Why(shape), "dtype: the CUDA kernels take bf16 and fp16");
  shape = Taken();
  shape.top_k = 65;
  EXPECT_EQ(Why(shape), "top_k: the CUDA kernels take 0 to 64");
  shape = Taken();
  shape.parts = 3;
  EXPECT_EQ(Why(shape), "parts: the CUDA kernels take 1, 2, 4 and 8");
  EXPECT_EQ(Why(Taken(), 1 << 20), "");
  EXPECT_EQ(Why(Taken(), (1 << 20) + 1), "kv_len: the CUDA kernels take up to 1048576 tokens");
}

// Plans for CUDA are made and measured on the host: with CUDA in the build, and no GPU in the machine.
class CudaPlan : public testing::Test {
 protected:
  void SetUp() override {
    if (!Compiled()) GTEST_SKIP() << "this build has no CUDA";
    desc_.dtype = PHSA_BF16;
    desc_.num_q_heads = 4;
    desc_.num_kv_heads = 2;
    desc_.head_dim = 128;
    desc_.num_seqs = 1;
    desc_.q_lens = desc_.kv_lens = &length_;
    desc_.device = PHSA_DEVICE_CUDA;
    desc_.settings.block_size = 16;
  }
  std::string Refusal() const {
    try {
      const Plan plan(desc_);
      EXPECT_GT(plan.WorkspaceSize(), 0u);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), PHSA_UNSUPPORTED);
      return error.what();
    }
  }

  int32_t length_ = 3000;
  PlanDesc desc_;
};

TEST_F(CudaPlan, TakesEveryHeadSizeDenseAndSparseForwardAndBackward) {
  for (const int32_t head_dim : {64, 80, 96, 128, 256}) {
    for (const Policy policy : {Policy::kDense, Policy::kPhsa, Policy::kInfllm2, Policy::kStreaming}) {
      for (const GroupReduce reduce : {GroupReduce::kSum, GroupReduce::kMax, GroupReduce::kNone}) {
        desc_.head_dim = head_dim;
        desc_.settings.policy = policy;
        desc_.settings.group_reduce = reduce;
        EXPECT_EQ(Refusal(), "") << head_dim;
        EXPECT_GT(Plan(desc_).BackwardWorkspaceSize(), 0u) << head_dim;
      }
    }
  }
}

TEST_F(CudaPlan, ListsOfEachHeadTakeMoreRoomInTheBackward) {
  desc_.settings.policy = Policy::kPhsa;
  const size_t groups = Plan(desc_).BackwardWorkspaceSize();
  desc_.settings.group_reduce = GroupReduce::kNone;
  EXPECT_GT(Plan(desc_).BackwardWorkspaceSize(), groups);
  // Where nothing is chosen, heads have no lists of their own.
  desc_.settings.policy = Policy::kStreaming;
  const size_t none = Plan(desc_).BackwardWorkspaceSize();
  desc_.settings.group_reduce = GroupReduce::kSum;
  EXPECT_EQ(Plan(desc_).BackwardWorkspaceSize(), none);
}

TEST_F(CudaPlan, TakesWindowsOfDenseAttention) {
  desc_.settings.policy = Policy::kDense;
  for (const int32_t window : {1, 17, 128, 4096}) {
    desc_.window = window;
    EXPECT_EQ(Refusal(), "") << window;
  }
  desc_.settings.policy = Policy::kPhsa;
  EXPECT_EQ(Refusal(), "plan: window is 4096 with the policy phsa; a window takes dense");
}

TEST_F(CudaPlan, RefusesWhatTheKernelsDoNotTake) {
  desc_.dtype = PHSA_F32;
  EXPECT_EQ(Refusal(), "plan: dtype: the CUDA kernels take bf16 and fp16");
  desc_.dtype = PHSA_F16;
  desc_.settings.policy = Policy::kPhsa;
  desc_.settings.top_k = 65;
  EXPECT_EQ(Refusal(), "plan: top_k: the CUDA kernels take 0 to 64");
  desc_.settings.top_k = 16;
  desc_.num_q_heads = 34;
  EXPECT_EQ(Refusal(), "plan: group: the CUDA kernels take up to 16 query heads a KV head");
  desc_.num_q_heads = 4;
  length_ = (1 << 20) + 1;
  EXPECT_EQ(Refusal(), "plan: kv_len: the CUDA kernels take up to 1048576 tokens");
}

}  // namespace
}  // namespace phsa::cuda
