// The table of policies: that it is the one place, and that the kernels do what it says.
#include "attention/policies.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "attention/reference.h"
#include "phsa/attention.h"

namespace phsa {
namespace {

// Nobody else knows a policy by its name: what differs between them is a column of the table.
TEST(Policies, NoFileNamesOneButTheTableAndTheReference) {
  const std::set<std::string> allowed = {"attention/policies.h", "attention/reference.cc"};
  const std::regex named(R"-(Policy::k[A-Z]|PHSA_POLICY_|"(infllm2|infllm2-64|streaming|quest|sepllm)")-");
  // InfLLM v2's own settings, in a model's config.json, as those of the policy that is meant: data of a file.
  const std::set<std::string> files_of_models = {"io/hf_config.cc"};
  const std::filesystem::path root = PHSA_SOURCES;
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    const std::string extension = entry.path().extension().string();
    if (extension != ".cc" && extension != ".h" && extension != ".cu" && extension != ".cuh") continue;
    const std::string name = entry.path().lexically_relative(root).string();
    ++files;
    if (allowed.contains(name) || files_of_models.contains(name)) continue;
    std::ifstream file(entry.path());
    std::stringstream text;
    text << file.rdbuf();
    const std::string content = text.str();
    std::smatch match;
    EXPECT_FALSE(std::regex_search(content, match, named))
        << "src/" << name << " names " << match.str() << "; ask attention/policies.h what is meant";
  }
  EXPECT_GT(files, 100) << root;
}

TEST(Policies, AreCalledApart) {
  std::set<std::string> names, labels;
  std::set<int32_t> ranks;
  for (const PolicyRow& row : kPolicies) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_TRUE(labels.insert(row.label).second) << row.label;
    EXPECT_TRUE(ranks.insert(row.rank).second) << row.name;
    EXPECT_EQ(PolicyFromName(row.name), row.policy);
    EXPECT_EQ(FindPolicy(row.name), &RowOf(row.policy));
    EXPECT_STREQ(Name(row.policy), row.name);
  }
  EXPECT_EQ(FindPolicy("best"), nullptr);
}

TEST(Policies, ListsOfNamesSayWhichOfThemRun) {
  EXPECT_EQ(PolicyNames(), "dense, phsa, infllm2, infllm2-64, streaming, quest");
  EXPECT_EQ(PolicyNames(Chooses, " or "), "phsa, infllm2, infllm2-64 or quest");
  EXPECT_EQ(PolicyNames(HasMeans, " or "), "phsa or infllm2");
  EXPECT_EQ(PolicyNames(Weighs, " or "), "phsa");
  EXPECT_EQ(PolicyNames(RunsOnCuda, " and "), "dense, phsa, infllm2 and streaming");
  EXPECT_EQ(PolicyNames([](Policy) { return false; }), "");
}

TEST(Policies, TheReferenceAgreesWithTheTable) {
  for (const PolicyRow& row : kPolicies) {
    Settings settings;
    settings.policy = row.policy;
    settings.block_size = BlockSizeOf(row.policy);
    settings.parts = 4;
    settings.lambda = 0.25f;
    const reference::Method method = reference::MethodOf(settings, 0, 64, PHSA_F32);
    EXPECT_EQ(method.representation, row.representation) << row.name;
    EXPECT_EQ(method.dense, row.dense) << row.name;
    EXPECT_EQ(method.top_k, RulesOf(settings).top_k) << row.name;
    EXPECT_EQ(method.parts, HasMeans(row.policy) ? 4 : 1) << row.name;
    if (HasMeans(row.policy)) {
      EXPECT_EQ(method.lambda, HasPlainMeans(row.policy) ? 1 : 0.25) << row.name;
    }
  }
}

TEST(Policies, APlanIsMadeOfThoseThatRunAndRefusesTheOthers) {
  for (const PolicyRow& row : kPolicies) {
    PlanDesc desc;
    desc.settings.policy = row.policy;
    desc.settings.block_size = BlockSizeOf(row.policy);
    desc.num_q_heads = desc.num_kv_heads = 1;
    desc.head_dim = 64;
    const int32_t tokens = 640;
    desc.num_seqs = 1;
    desc.q_lens = desc.kv_lens = &tokens;
    if (!Runs(row.policy)) {
      EXPECT_THROW(Plan{desc}, std::exception) << row.name;
      continue;
    }
    const Plan plan(desc);
    EXPECT_EQ(plan.SelectionSlots() > 0, Chooses(row.policy)) << row.name;
    EXPECT_EQ(plan.RepStride(), RepRulesOf(desc.settings).rep_stride) << row.name;
    EXPECT_EQ(plan.NumReps(), Chooses(row.policy) ? RepRulesOf(desc.settings).NumRepRows(tokens) : 0) << row.name;
    desc.settings.parts = 4;
    EXPECT_EQ(Plan(desc).RepStride() < plan.RepStride(), HasMeans(row.policy)) << row.name;
  }
}

TEST(Policies, TheCAbiTellsThemAll) {
  int32_t number = 0;
  auto info = Init<phsa_policy_info>();
  for (; phsa_policy_describe(number, &info) == PHSA_OK; ++number) {
    const auto policy = static_cast<Policy>(number);
    EXPECT_STREQ(info.name, Name(policy));
    EXPECT_STREQ(info.label, RowOf(policy).label);
    EXPECT_EQ(info.plans != 0, Runs(policy));
    EXPECT_EQ(info.cuda != 0, RunsOnCuda(policy));
    EXPECT_EQ(info.dense != 0, IsDense(policy));
    EXPECT_EQ(info.chooses != 0, Chooses(policy));
    EXPECT_EQ(info.parts != 0, HasMeans(policy));
    EXPECT_EQ(info.weighs != 0, Weighs(policy));
    EXPECT_EQ(info.plain_means != 0, HasPlainMeans(policy));
    EXPECT_EQ(info.block_size, RowOf(policy).own_block);
  }
  EXPECT_EQ(number, static_cast<int32_t>(std::size(kPolicies)));
  EXPECT_EQ(std::string(phsa_last_error()).find("policy: there is no policy "), 0U) << phsa_last_error();
  EXPECT_EQ(phsa_policy_describe(-1, &info), PHSA_INVALID_ARGUMENT);
  EXPECT_EQ(phsa_policy_describe(0, nullptr), PHSA_INVALID_ARGUMENT);
  info.struct_size = 8;
  EXPECT_EQ(phsa_policy_describe(0, &info), PHSA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace phsa
