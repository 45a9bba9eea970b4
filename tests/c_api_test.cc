// The C ABI: what is wrong is refused with a message that names the allowed values; nothing throws or crashes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention_cases.h"
#include "phsa/c.h"

namespace phsa {
namespace {

// A small problem that works: two sequences, four query heads on two KV heads.
struct Problem {
  std::vector<int32_t> q_lens = {100, 7}, kv_lens = {100, 7};
  std::vector<float> q, k, v, out, lse, d_out, d_q, d_k, d_v;
  std::vector<uint8_t> flags;
  std::vector<int32_t> selection;
  phsa_settings settings = Init<phsa_settings>();
  phsa_plan_desc desc = Init<phsa_plan_desc>();
  phsa_plan* plan = nullptr;
  phsa_forward_params forward = Init<phsa_forward_params>();
  phsa_backward_params backward = Init<phsa_backward_params>();
  cases::Buffer workspace, backward_workspace;

  Problem() {
    EXPECT_EQ(phsa_settings_preset(4096, &settings), PHSA_OK);
    settings.local_tokens = 16;
    settings.top_k = 1;
    desc.settings = &settings;
    desc.num_q_heads = 4;
    desc.num_kv_heads = 2;
    desc.head_dim = 64;
    desc.num_seqs = 2;
    desc.q_lens = q_lens.data();
    desc.kv_lens = kv_lens.data();
    cases::Random random(1);
    q = cases::Normal(&random, 107 * 4 * 64, 1, PHSA_F32);
    k = cases::Normal(&random, 107 * 2 * 64, 1, PHSA_F32);
    v = cases::Normal(&random, 107 * 2 * 64, 1, PHSA_F32);
    d_out = cases::Normal(&random, 107 * 4 * 64, 1, PHSA_F32);
    out.resize(q.size());
    d_q.resize(q.size());
    d_k.resize(k.size());
    d_v.resize(v.size());
    lse.resize(107 * 4);
    flags.assign(107, 0);
    flags[20] = 1;
    selection.assign(107 * 2, -1);
  }
  ~Problem() { phsa_plan_destroy(plan); }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  phsa_status Create() {
    phsa_plan_destroy(plan);
    plan = nullptr;
    return phsa_plan_create(&desc, &plan);
  }

  // Everything that phsa_forward and phsa_backward want.
  void Fill() {
    ASSERT_EQ(Create(), PHSA_OK) << phsa_last_error();
    workspace = cases::Buffer(phsa_plan_workspace_size(plan));
    backward_workspace = cases::Buffer(phsa_plan_backward_workspace_size(plan));
    forward.q = q.data();
    forward.q_token_stride = 4 * 64;
    forward.q_head_stride = 64;
    forward.kv = Init<phsa_kv>();
    forward.kv.k = k.data();
    forward.kv.v = v.data();
    forward.kv.k_token_stride = forward.kv.v_token_stride = 2 * 64;
    forward.kv.k_head_stride = forward.kv.v_head_stride = 64;
    forward.kv.flags = flags.data();
    forward.out = out.data();
    forward.out_token_stride = 4 * 64;
    forward.out_head_stride = 64;
    forward.lse = lse.data();
    forward.selection = selection.data();
    forward.workspace = workspace.data();
    forward.workspace_size = workspace.size();
    forward.executor = Init<phsa_executor>();
    backward.q = q.data();
    backward.kv = forward.kv;
    backward.out = out.data();
    backward.lse = lse.data();
    backward.selection = selection.data();
    backward.d_out = d_out.data();
    backward.d_q = d_q.data();
    backward.d_k = d_k.data();
    backward.d_v = d_v.data();
    backward.q_token_stride = backward.out_token_stride = backward.d_out_token_stride = backward.d_q_token_stride =
        4 * 64;
    backward.d_k_token_stride = backward.d_v_token_stride = 2 * 64;
    backward.q_head_stride = backward.out_head_stride = backward.d_out_head_stride = backward.d_q_head_stride =
        backward.d_k_head_stride = backward.d_v_head_stride = 64;
    backward.workspace = backward_workspace.data();
    backward.workspace_size = backward_workspace.size();
    backward.executor = Init<phsa_executor>();
  }
};

// The call failed with that status and said that.
void ExpectRefused(phsa_status status, phsa_status expected, const std::string& part, const char* what) {
  EXPECT_EQ(status, expected) << what;
  EXPECT_NE(std::string(phsa_last_error()).find(part), std::string::npos)
      << what << ": \"" << phsa_last_error() << "\" does not say \"" << part << "\"";
}

TEST(CApi, EverySettingOutOfRangeIsRefusedWithTheAllowedValues) {
  const struct {
    const char* what;
    void (*change)(phsa_settings*);
    phsa_status status;
    const char* message;
  } cases[] = {
      {"struct_size 0", [](phsa_settings* s) { s->struct_size = 0; }, PHSA_INVALID_ARGUMENT,
       "struct_size is 0; allowed: "},
      {"struct_size too large", [](phsa_settings* s) { s->struct_size += 8; }, PHSA_INVALID_ARGUMENT,
       "struct_size is "},
      {"policy 99", [](phsa_settings* s) { s->policy = 99; }, PHSA_INVALID_ARGUMENT, "policy is 99; allowed: 0 to "},
      {"policy -1", [](phsa_settings* s) { s->policy = -1; }, PHSA_INVALID_ARGUMENT, "policy is -1; allowed: 0 to "},
      {"sepllm", [](phsa_settings* s) { s->policy = PHSA_POLICY_SEPLLM; }, PHSA_UNSUPPORTED, "allowed: dense, phsa, "},
      {"block_size 8", [](phsa_settings* s) { s->block_size = 8; }, PHSA_INVALID_ARGUMENT,
       "block_size is 8; allowed: 16, 32, 64"},
      {"infllm2-64 by 16", [](phsa_settings* s) { s->policy = PHSA_POLICY_INFLLM2_64; }, PHSA_INVALID_ARGUMENT,
       "block_size is 16; allowed with infllm2-64: 64"},
      {"init_tokens 8", [](phsa_settings* s) { s->init_tokens = 8; }, PHSA_INVALID_ARGUMENT,
       "init_tokens is 8; allowed: multiples of 16 from 0 to "},
      {"local_tokens -16", [](phsa_settings* s) { s->local_tokens = -16; }, PHSA_INVALID_ARGUMENT,
       "local_tokens is -16; allowed: multiples of 16 from 0 to "},
      {"dense_below 1", [](phsa_settings* s) { s->dense_below = 1; }, PHSA_INVALID_ARGUMENT,
       "dense_below is 1; allowed: multiples of 16 from 0 to "},
      {"top_k -1", [](phsa_settings* s) { s->top_k = -1; }, PHSA_INVALID_ARGUMENT, "top_k is -1; allowed: 0 to 65536"},
      {"top_k large", [](phsa_settings* s) { s->top_k = INT32_MAX; }, PHSA_INVALID_ARGUMENT,
       "top_k is 2147483647; allowed: 0 to 65536"},
      {"parts 3", [](phsa_settings* s) { s->parts = 3; }, PHSA_INVALID_ARGUMENT, "parts is 3; allowed: 1, 2, 4, 8"},
      {"survivors -1", [](phsa_settings* s) { s->survivors = -1; }, PHSA_INVALID_ARGUMENT,
       "survivors is -1; allowed: 0 to 1073741824"},
      {"lambda 2", [](phsa_settings* s) { s->lambda = 2; }, PHSA_INVALID_ARGUMENT, "lambda is 2; allowed: 0 to 1"},
      {"lambda nan", [](phsa_settings* s) { s->lambda = std::nanf(""); }, PHSA_INVALID_ARGUMENT,
       "lambda is nan; allowed: 0 to 1"},
      {"group_reduce 3", [](phsa_settings* s) { s->group_reduce = 3; }, PHSA_INVALID_ARGUMENT,
       "group_reduce is 3; allowed: 0 to 2 (sum, max, none)"},
      {"head_lambda",
       [](phsa_settings* s) {
         static constexpr float kLambda[] = {0.5f, 3.0f};
         s->head_lambda = kLambda;
       },
       PHSA_INVALID_ARGUMENT, "head_lambda[1] is 3; allowed: 0 to 1"},
  };
  for (const auto& c : cases) {
    Problem problem;
    c.change(&problem.settings);
    ExpectRefused(problem.Create(), c.status, c.message, c.what);
    EXPECT_EQ(problem.plan, nullptr);
  }
}

TEST(CApi, EveryShapeOutOfRangeIsRefusedWithTheAllowedValues) {
  const struct {
    const char* what;
    void (*change)(Problem*);
    const char* message;
  } cases[] = {
      {"struct_size", [](Problem* p) { p->desc.struct_size = 4; }, "struct_size is 4; allowed: "},
      {"settings null", [](Problem* p) { p->desc.settings = nullptr; }, "settings is null"},
      {"dtype 3", [](Problem* p) { p->desc.dtype = 3; }, "dtype is 3; allowed: 0 (f32), 1 (f16), 2 (bf16)"},
      {"num_q_heads 0", [](Problem* p) { p->desc.num_q_heads = 0; },
       "num_q_heads is 0; allowed: a multiple of num_kv_heads (2)"},
      {"num_q_heads 3", [](Problem* p) { p->desc.num_q_heads = 3; },
       "num_q_heads is 3; allowed: a multiple of num_kv_heads (2)"},
      {"num_kv_heads 0", [](Problem* p) { p->desc.num_kv_heads = 0; }, "num_kv_heads is 0; allowed: 1 to "},
      {"num_kv_heads -2", [](Problem* p) { p->desc.num_kv_heads = -2; }, "num_kv_heads is -2; allowed: 1 to "},
      {"head_dim 72", [](Problem* p) { p->desc.head_dim = 72; }, "head_dim is 72; allowed: 64, 80, 96, 128, 256"},
      {"num_seqs 0", [](Problem* p) { p->desc.num_seqs = 0; }, "num_seqs is 0; allowed: 1 and up"},
      {"q_lens null", [](Problem* p) { p->desc.q_lens = nullptr; }, "q_lens and kv_lens"},
      {"kv_lens null", [](Problem* p) { p->desc.kv_lens = nullptr; }, "q_lens and kv_lens"},
      {"q_len -1", [](Problem* p) { p->q_lens[1] = -1; }, "sequence 1 has q_len -1 and kv_len 7; allowed: 0 <= q_len"},
      {"q_len > kv_len", [](Problem* p) { p->q_lens[0] = 101; }, "sequence 0 has q_len 101 and kv_len 100; allowed: "},
      {"kv_len huge", [](Problem* p) { p->kv_lens[0] = INT32_MAX; }, "kv_len 2147483647; allowed: "},
      {"page_size 24", [](Problem* p) { p->desc.page_size = 24; },
       "page_size is 24; allowed: 0 (contiguous) or a multiple of block_size (16)"},
      {"page_size -16", [](Problem* p) { p->desc.page_size = -16; }, "page_size is -16; allowed: "},
      {"kv_starts -1",
       [](Problem* p) {
         static constexpr int64_t kStarts[] = {0, -1};
         p->desc.kv_starts = kStarts;
       },
       "allowed: 0 and up"},
      {"scale nan", [](Problem* p) { p->desc.scale = std::nanf(""); }, "scale is nan; allowed: "},
      {"scale -1", [](Problem* p) { p->desc.scale = -1; }, "scale is -1; allowed: "},
      {"max_threads -1", [](Problem* p) { p->desc.max_threads = -1; }, "max_threads is -1; allowed: 0 (one) to "},
  };
  for (const auto& c : cases) {
    Problem problem;
    c.change(&problem);
    ExpectRefused(problem.Create(), PHSA_INVALID_ARGUMENT, c.message, c.what);
  }
}

TEST(CApi, ForwardRefusesWhatItCannotUse) {
  const struct {
    const char* what;
    void (*change)(Problem*);
    const char* message;
  } cases[] = {
      {"struct_size", [](Problem* p) { p->forward.struct_size = 0; }, "struct_size is 0; allowed: "},
      {"kv.struct_size", [](Problem* p) { p->forward.kv.struct_size = 1; }, "kv.struct_size is 1; allowed: "},
      {"q", [](Problem* p) { p->forward.q = nullptr; }, "q is null"},
      {"k", [](Problem* p) { p->forward.kv.k = nullptr; }, "is null"},
      {"v", [](Problem* p) { p->forward.kv.v = nullptr; }, "is null"},
      {"out", [](Problem* p) { p->forward.out = nullptr; }, "out is null"},
      {"executor",
       [](Problem* p) {
         p->forward.executor.num_threads = 2;
         p->forward.executor.run = [](void*, int32_t, void (*)(void*, int32_t, int32_t), void*) {};
       },
       "2 threads; allowed: 1 to the plan's max_threads (1)"},
  };
  for (const auto& c : cases) {
    Problem problem;
    problem.Fill();
    c.change(&problem);
    ExpectRefused(phsa_forward(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, c.message, c.what);
  }
}

TEST(CApi, AWorkspaceThatIsTooSmallMissingOrMisalignedIsRefusedWithTheSizeItNeeds) {
  Problem problem;
  problem.Fill();
  const size_t size = phsa_plan_workspace_size(problem.plan);
  ASSERT_GT(size, 64u);
  const std::string needed = fmt::format("needs {} bytes aligned to 64", size);
  problem.forward.workspace_size = size - 1;
  ExpectRefused(phsa_forward(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, needed, "forward");
  ExpectRefused(phsa_select(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, needed, "select");
  ExpectRefused(phsa_attend(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, needed, "attend");
  problem.forward.workspace_size = size;
  problem.forward.workspace = nullptr;
  ExpectRefused(phsa_forward(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, needed, "null");
  cases::Buffer larger(size + 64);
  problem.forward.workspace = static_cast<char*>(larger.data()) + 4;
  ExpectRefused(phsa_forward(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, needed, "misaligned");

  problem.forward.workspace = problem.workspace.data();
  ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
  const size_t backward_size = phsa_plan_backward_workspace_size(problem.plan);
  if (backward_size > 0) {
    problem.backward.workspace_size = backward_size - 1;
    ExpectRefused(phsa_backward(problem.plan, &problem.backward), PHSA_INVALID_ARGUMENT,
                  fmt::format("needs {} bytes aligned to 64", backward_size), "backward");
  }
}

TEST(CApi, ListsThatLeaveTheCandidatesOrAreTooShortAreRefused) {
  Problem problem;
  problem.Fill();
  ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
  const std::vector<int32_t> good = problem.selection;
  // Position 90 is in block 5: init is block 0, local 4, so that 1 … 3 may be listed.
  for (const int32_t bad : {0, 4, 5, 1000, -1, -2, INT32_MIN, INT32_MAX}) {
    problem.selection = good;
    problem.selection[90 * 2] = bad;
    const std::string message = fmt::format("selection of query 90, head 0, slot 0 is {}; allowed: ", bad);
    ExpectRefused(phsa_attend(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, message, "attend");
    ExpectRefused(phsa_backward(problem.plan, &problem.backward), PHSA_INVALID_ARGUMENT, message, "backward");
  }
  problem.selection = good;
  EXPECT_EQ(phsa_attend(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
  EXPECT_EQ(phsa_backward(problem.plan, &problem.backward), PHSA_OK) << phsa_last_error();
}

TEST(CApi, ListsThatDoNotAscendAreRefused) {
  Problem problem;
  problem.settings.top_k = 2;
  problem.selection.assign(107 * 2 * 2, -1);
  problem.Fill();
  ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
  int32_t* const list = &problem.selection[90 * 2 * 2];
  for (const auto& [first, second] : {std::pair(3, 1), std::pair(2, 2), std::pair(-1, 2), std::pair(2, -1)}) {
    list[0] = first;
    list[1] = second;
    ExpectRefused(phsa_attend(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, "selection of query 90, head 0",
                  "attend");
    ExpectRefused(phsa_backward(problem.plan, &problem.backward), PHSA_INVALID_ARGUMENT,
                  "selection of query 90, head 0", "backward");
  }
  list[0] = 1;
  list[1] = 3;
  EXPECT_EQ(phsa_attend(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
}

TEST(CApi, StagesAskForWhatTheyWrite) {
  Problem problem;
  problem.Fill();
  problem.forward.selection = nullptr;
  ExpectRefused(phsa_select(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, "selection is null", "select");
  ExpectRefused(phsa_attend(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, "selection is null", "attend");
  ExpectRefused(phsa_represent(problem.plan, &problem.forward.kv, nullptr), PHSA_INVALID_ARGUMENT, "reps is null",
                "represent");
  EXPECT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
}

TEST(CApi, BackwardRefusesWhatItCannotUse) {
  const struct {
    const char* what;
    void (*change)(Problem*);
    const char* message;
  } cases[] = {
      {"struct_size", [](Problem* p) { p->backward.struct_size = 0; }, "struct_size is 0; allowed: "},
      {"kv.struct_size", [](Problem* p) { p->backward.kv.struct_size = 0; }, "kv.struct_size is 0; allowed: "},
      {"q", [](Problem* p) { p->backward.q = nullptr; }, "is null"},
      {"k", [](Problem* p) { p->backward.kv.k = nullptr; }, "is null"},
      {"out", [](Problem* p) { p->backward.out = nullptr; }, "is null"},
      {"lse", [](Problem* p) { p->backward.lse = nullptr; }, "is null"},
      {"d_out", [](Problem* p) { p->backward.d_out = nullptr; }, "is null"},
      {"d_q", [](Problem* p) { p->backward.d_q = nullptr; }, "is null"},
      {"d_k", [](Problem* p) { p->backward.d_k = nullptr; }, "is null"},
      {"d_v", [](Problem* p) { p->backward.d_v = nullptr; }, "is null"},
      {"selection", [](Problem* p) { p->backward.selection = nullptr; }, "selection is null"},
  };
  for (const auto& c : cases) {
    Problem problem;
    problem.Fill();
    ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
    c.change(&problem);
    ExpectRefused(phsa_backward(problem.plan, &problem.backward), PHSA_INVALID_ARGUMENT, c.message, c.what);
  }
}

TEST(CApi, BackwardOfAChunkOrOfPagesIsNotSupported) {
  Problem chunk;
  chunk.q_lens[0] = 50;
  chunk.Fill();
  ExpectRefused(phsa_backward(chunk.plan, &chunk.backward), PHSA_UNSUPPORTED, "q_len = kv_len", "chunk");
  Problem paged;
  const std::vector<int32_t> table = {0, 1, 2, 3};
  paged.desc.page_size = 64;
  paged.Fill();
  paged.backward.kv.page_table = table.data();
  paged.backward.kv.page_table_stride = 2;
  ExpectRefused(phsa_backward(paged.plan, &paged.backward), PHSA_UNSUPPORTED, "page_size 0", "pages");
  ExpectRefused(phsa_forward(paged.plan, &paged.forward), PHSA_INVALID_ARGUMENT, "page_table is null", "no table");
}

TEST(CApi, NullIsAnAnswerNotACrash) {
  Problem problem;
  problem.Fill();
  phsa_plan* plan = nullptr;
  int64_t count = 0;
  const auto expect_null = [](phsa_status status, const char* what) {
    ExpectRefused(status, PHSA_INVALID_ARGUMENT, "null", what);
  };
  expect_null(phsa_plan_create(nullptr, &plan), "plan_create desc");
  expect_null(phsa_plan_create(&problem.desc, nullptr), "plan_create out");
  expect_null(phsa_forward(nullptr, &problem.forward), "forward plan");
  expect_null(phsa_forward(problem.plan, nullptr), "forward params");
  expect_null(phsa_select(nullptr, &problem.forward), "select plan");
  expect_null(phsa_select(problem.plan, nullptr), "select params");
  expect_null(phsa_attend(nullptr, &problem.forward), "attend plan");
  expect_null(phsa_attend(problem.plan, nullptr), "attend params");
  expect_null(phsa_backward(nullptr, &problem.backward), "backward plan");
  expect_null(phsa_backward(problem.plan, nullptr), "backward params");
  expect_null(phsa_represent(nullptr, &problem.forward.kv, nullptr), "represent plan");
  expect_null(phsa_represent(problem.plan, nullptr, nullptr), "represent kv");
  expect_null(phsa_tokens_read(nullptr, nullptr, &count, &count), "tokens_read plan");
  expect_null(phsa_tokens_read(problem.plan, problem.selection.data(), nullptr, &count), "tokens_read read");
  expect_null(phsa_settings_preset(1, nullptr), "preset out");
  expect_null(phsa_settings_from_json(nullptr, 0, &problem.settings), "from_json json");
  expect_null(phsa_settings_from_json("{}", 0, nullptr), "from_json out");
  expect_null(phsa_settings_to_json(nullptr, nullptr, 0, nullptr), "to_json settings");
  expect_null(phsa_settings_to_json(&problem.settings, nullptr, 10, nullptr), "to_json out");
  expect_null(phsa_threads_create(1, nullptr), "threads_create out");
  expect_null(phsa_set_target(nullptr), "set_target");
  expect_null(phsa_punctuation_table(nullptr, nullptr, nullptr, nullptr, 0, nullptr), "punctuation_table");
  phsa_plan_destroy(nullptr);
  phsa_threads_destroy(nullptr);
  EXPECT_EQ(phsa_plan_workspace_size(nullptr), 0u);
  EXPECT_EQ(phsa_plan_num_reps(nullptr), 0);
  EXPECT_EQ(phsa_threads_executor(nullptr).run, nullptr);
}

TEST(CApi, ThePlanTellsTheSizesOfItsTensors) {
  Problem problem;
  ASSERT_EQ(problem.Create(), PHSA_OK);
  EXPECT_EQ(phsa_plan_num_reps(problem.plan), 6);  // 100 tokens hold 6 blocks, 7 tokens none
  EXPECT_EQ(phsa_plan_rep_width(problem.plan), 64);
  EXPECT_EQ(phsa_plan_rep_stride(problem.plan), 16);
  EXPECT_EQ(phsa_plan_selection_heads(problem.plan), 2);
  EXPECT_EQ(phsa_plan_selection_slots(problem.plan), 1);
  problem.settings.group_reduce = PHSA_GROUP_NONE;
  problem.settings.policy = PHSA_POLICY_QUEST;
  problem.settings.top_k = 5;
  ASSERT_EQ(problem.Create(), PHSA_OK);
  EXPECT_EQ(phsa_plan_rep_width(problem.plan), 128);
  EXPECT_EQ(phsa_plan_selection_heads(problem.plan), 4);
  EXPECT_EQ(phsa_plan_selection_slots(problem.plan), 5);
  problem.settings.policy = PHSA_POLICY_INFLLM2_64;
  problem.settings.block_size = 64;
  ASSERT_EQ(problem.Create(), PHSA_OK) << phsa_last_error();
  EXPECT_EQ(phsa_plan_num_reps(problem.plan), 5);  // entries end at 32, 48, 64, 80, 96
  EXPECT_EQ(phsa_plan_rep_stride(problem.plan), 16);
  for (const int32_t policy : {PHSA_POLICY_DENSE, PHSA_POLICY_STREAMING}) {
    problem.settings.policy = policy;
    problem.settings.block_size = 16;
    ASSERT_EQ(problem.Create(), PHSA_OK);
    EXPECT_EQ(phsa_plan_selection_slots(problem.plan), 0);
    EXPECT_EQ(phsa_plan_num_reps(problem.plan), 0);
  }
}

TEST(CApi, ThePlanKeepsItsOwnCopyOfWhatItWasGiven) {
  Problem problem;
  std::vector<float> lambda = {0.25f, 0.75f};
  problem.settings.head_lambda = lambda.data();
  problem.Fill();
  ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
  const std::vector<float> first = problem.out;
  lambda = {1, 1};
  problem.settings.top_k = 0;
  problem.q_lens = problem.kv_lens = {1, 1};
  std::fill(problem.out.begin(), problem.out.end(), 0.0f);
  ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
  EXPECT_EQ(problem.out, first);
}

TEST(CApi, OnePlanServesSeveralThreadsEachWithItsWorkspace) {
  Problem problem;
  problem.Fill();
  ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK);
  std::vector<std::vector<float>> outs(4, std::vector<float>(problem.out.size()));
  std::vector<std::thread> threads;
  for (auto& out : outs) {
    threads.emplace_back([&] {
      cases::Buffer workspace(problem.workspace.size());
      phsa_forward_params params = problem.forward;
      params.out = out.data();
      params.lse = nullptr;
      params.selection = nullptr;
      params.workspace = workspace.data();
      for (int n = 0; n < 5; ++n) EXPECT_EQ(phsa_forward(problem.plan, &params), PHSA_OK);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& out : outs) EXPECT_EQ(out, problem.out);
}

TEST(CApi, ThreadsOfTheLibraryChangeNoBit) {
  Problem problem;
  problem.desc.max_threads = 3;
  problem.Fill();
  ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK);
  const std::vector<float> expected = problem.out;
  phsa_threads* threads = nullptr;
  ASSERT_EQ(phsa_threads_create(3, &threads), PHSA_OK);
  problem.forward.executor = phsa_threads_executor(threads);
  EXPECT_EQ(problem.forward.executor.num_threads, 3);
  std::fill(problem.out.begin(), problem.out.end(), 0.0f);
  EXPECT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
  EXPECT_EQ(problem.out, expected);
  phsa_threads_destroy(threads);
  ExpectRefused(phsa_threads_create(-1, &threads), PHSA_INVALID_ARGUMENT, "allowed: 0 (one per core) to 1024", "-1");
}

TEST(CApi, SettingsOfAnOlderHeaderHaveOnePartAndAreNotWrittenBeyondTheirEnd) {
  constexpr size_t kOld = offsetof(phsa_settings, parts);
  struct {
    phsa_settings settings;
    char guard[16];
  } old;
  std::memset(&old, 'x', sizeof(old));
  old.settings.struct_size = kOld;
  ASSERT_EQ(phsa_settings_preset(4096, &old.settings), PHSA_OK);
  EXPECT_EQ(old.settings.struct_size, kOld);
  EXPECT_EQ(old.settings.top_k, 16);
  EXPECT_EQ(old.settings.parts, 0x78787878) << "not its own";
  size_t needed = 0;
  std::string text(400, ' ');
  ASSERT_EQ(phsa_settings_to_json(&old.settings, text.data(), text.size(), &needed), PHSA_OK) << phsa_last_error();
  EXPECT_NE(text.find("\"parts\":1"), std::string::npos) << text;
  // A new caller that leaves parts at zero means the same.
  phsa_settings settings = Init<phsa_settings>();
  settings.block_size = 16;
  ASSERT_EQ(phsa_settings_to_json(&settings, text.data(), text.size(), &needed), PHSA_OK) << phsa_last_error();
  EXPECT_NE(text.find("\"parts\":1"), std::string::npos) << text;
}

TEST(CApi, ParametersOfAnOlderHeaderHaveNoSinks) {
  Problem problem;
  problem.Fill();
  ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
  const std::vector<float> out = problem.out, lse = problem.lse;
  const float sinks[] = {0.5f, -1, 2, 0};
  problem.forward.sinks = sinks;
  for (const size_t older : {offsetof(phsa_forward_params, stream), offsetof(phsa_forward_params, sinks)}) {
    problem.forward.struct_size = static_cast<uint32_t>(older);
    ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
    EXPECT_EQ(problem.out, out);
  }
  problem.forward.struct_size = sizeof(problem.forward);
  ASSERT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t row = i / 64;
    const float share = 1 / (1 + std::exp(sinks[row % 4] - lse[row]));
    ASSERT_NEAR(problem.out[i], out[i] * share, 1e-5) << i;
    ASSERT_NEAR(problem.lse[row], lse[row] - std::log(share), 1e-5) << i;
  }
}

TEST(CApi, LengthsInDeviceMemoryAreRefusedOnTheCpuAndUnknownToOlderHeaders) {
  Problem problem;
  problem.Fill();
  const int32_t lens[] = {1, 1};
  problem.forward.kv_lens = lens;
  EXPECT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_UNSUPPORTED);
  EXPECT_NE(std::string(phsa_last_error()).find("kv_lens is given"), std::string::npos) << phsa_last_error();
  problem.forward.struct_size = offsetof(phsa_forward_params, kv_lens);
  EXPECT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
}

TEST(CApi, CodesNeedTheirScalesAndGoForwardOnTheCpuOnly) {
  Problem problem;
  problem.desc.kv_dtype = 7;
  ExpectRefused(problem.Create(), PHSA_INVALID_ARGUMENT, "kv_dtype is 7; allowed: 0 (as dtype)", "7");
  problem.desc.kv_dtype = PHSA_BF16;  // beside queries in f32
  ExpectRefused(problem.Create(), PHSA_INVALID_ARGUMENT, "kv_dtype is 2; allowed: 0 (as dtype)", "bf16");
  problem.desc.kv_dtype = PHSA_INT8;
  problem.desc.device = PHSA_DEVICE_CUDA;
  ExpectRefused(problem.Create(), PHSA_UNSUPPORTED, "kv_dtype is 3 (8-bit codes) on device 1", "CUDA");
  problem.desc.device = PHSA_DEVICE_CPU;
  problem.Fill();
  ExpectRefused(phsa_forward(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, "kv_scales.k", "forward");
  ExpectRefused(phsa_select(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, "kv_scales.k", "select");
  ExpectRefused(phsa_represent_with(problem.plan, &problem.forward), PHSA_INVALID_ARGUMENT, "kv_scales.k", "represent");
  ExpectRefused(phsa_represent(problem.plan, &problem.forward.kv, nullptr), PHSA_UNSUPPORTED, "phsa_represent_with",
                "represent without parameters");
  ExpectRefused(phsa_backward(problem.plan, &problem.backward), PHSA_UNSUPPORTED, "kv_dtype is 3", "backward");
}

TEST(CApi, PlansOfAnOlderHeaderHaveNoCodes) {
  Problem problem;
  problem.desc.kv_dtype = PHSA_INT8;
  problem.desc.struct_size = offsetof(phsa_plan_desc, kv_dtype);
  problem.Fill();
  EXPECT_EQ(phsa_forward(problem.plan, &problem.forward), PHSA_OK) << phsa_last_error();
}

TEST(CApi, SettingsGoThroughJsonAndBack) {
  phsa_settings settings = Init<phsa_settings>();
  const char* json = R"({"top_k": 4, "layers": {"3": {"attention": "dense"}}})";
  ASSERT_EQ(phsa_settings_from_json(json, 0, &settings), PHSA_OK) << phsa_last_error();
  EXPECT_EQ(settings.struct_size, sizeof(settings));
  EXPECT_EQ(settings.policy, PHSA_POLICY_PHSA);
  EXPECT_EQ(settings.top_k, 4);
  EXPECT_EQ(settings.head_lambda, nullptr);
  ASSERT_EQ(phsa_settings_from_json(json, 3, &settings), PHSA_OK);
  EXPECT_EQ(settings.policy, PHSA_POLICY_DENSE);

  size_t needed = 0;
  ASSERT_EQ(phsa_settings_to_json(&settings, nullptr, 0, &needed), PHSA_OK) << phsa_last_error();
  std::string text(needed, 'x');
  ASSERT_EQ(phsa_settings_to_json(&settings, text.data(), needed, nullptr), PHSA_OK);
  EXPECT_EQ(text.back(), '\0');
  EXPECT_EQ(std::strlen(text.c_str()) + 1, needed);
  phsa_settings again = Init<phsa_settings>();
  ASSERT_EQ(phsa_settings_from_json(text.c_str(), 0, &again), PHSA_OK) << phsa_last_error();
  EXPECT_EQ(again.policy, settings.policy);
  EXPECT_EQ(again.top_k, settings.top_k);
  EXPECT_EQ(again.lambda, settings.lambda);

  char small[8];
  std::memset(small, 'x', sizeof(small));
  EXPECT_EQ(phsa_settings_to_json(&settings, small, sizeof(small), &needed), PHSA_OK);
  EXPECT_EQ(std::string(small), text.substr(0, 7)) << "cut, and terminated";
  EXPECT_EQ(needed, text.size());

  ExpectRefused(phsa_settings_from_json("{\"top_k\": -1}", 0, &settings), PHSA_INVALID_ARGUMENT,
                "top_k is -1; allowed: 0 to 65536", "json");
  ExpectRefused(phsa_settings_from_json("{", 0, &settings), PHSA_INVALID_ARGUMENT, "not valid JSON", "garbage");
}

TEST(CApi, PunctuationIsLookedUpByBytes) {
  const char* tokens[] = {",", "a", ".", "x\0y"};
  const size_t sizes[] = {1, 1, 1, 3};
  const uint8_t special[] = {0, 0, 1, 0};
  uint8_t table[4] = {9, 9, 9, 9};
  ASSERT_EQ(phsa_punctuation_table("en", tokens, sizes, special, 4, table), PHSA_OK) << phsa_last_error();
  EXPECT_EQ(std::vector<uint8_t>(table, table + 4), (std::vector<uint8_t>{1, 0, 0, 0}));
  ASSERT_EQ(phsa_punctuation_table("en", tokens, sizes, nullptr, 4, table), PHSA_OK);
  EXPECT_EQ(std::vector<uint8_t>(table, table + 4), (std::vector<uint8_t>{1, 0, 1, 0}));
  ExpectRefused(phsa_punctuation_table("french", tokens, sizes, nullptr, 4, table), PHSA_INVALID_ARGUMENT,
                "allowed: en, zh, en+zh, sentence, pure, none", "french");
  ExpectRefused(phsa_punctuation_table("en", tokens, sizes, nullptr, -1, table), PHSA_INVALID_ARGUMENT,
                "vocabulary is -1; allowed: 0 to ", "-1");
}

TEST(CApi, TargetsAreListedAndChosenByName) {
  const std::string names = phsa_targets(), before = phsa_target();
  EXPECT_NE((" " + names + " ").find(" reference "), std::string::npos) << names;
  EXPECT_NE((" " + names + " ").find(" " + before + " "), std::string::npos) << names;
  EXPECT_EQ(phsa_set_target("reference"), PHSA_OK);
  EXPECT_STREQ(phsa_target(), "reference");
  ExpectRefused(phsa_set_target("avx9"), PHSA_INVALID_ARGUMENT, "allowed: " + names, "avx9");
  EXPECT_STREQ(phsa_target(), "reference") << "a wrong name changes nothing";
  EXPECT_EQ(phsa_set_target(before.c_str()), PHSA_OK);
}

TEST(CApi, TheLastErrorBelongsToTheThread) {
  phsa_set_target("nonsense");
  EXPECT_STRNE(phsa_last_error(), "");
  std::string elsewhere = "not read";
  std::thread([&] { elsewhere = phsa_last_error(); }).join();
  EXPECT_EQ(elsewhere, "");
}

TEST(CApi, TheVersionIsTold) {
  EXPECT_EQ(phsa_abi_version(), PHSA_ABI_VERSION);
  EXPECT_STRNE(phsa_version(), "");
}

}  // namespace
}  // namespace phsa
