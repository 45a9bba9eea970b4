// The C ABI over the C++ one: no exception leaves it, and every failure leaves a message.
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "attention/c_structs.h"
#include "attention/cuda/backend.h"
#include "attention/policies.h"
#include "attention/setting_list.h"
#include "base/errors.h"
#include "base/plain_names.h"
#include "base/simd.h"
#include "phsa/attention.h"
#include "phsa/punctuation.h"
#include "phsa/threads.h"

struct phsa_plan {
  phsa::Plan plan;
};

struct phsa_threads {
  phsa::ThreadPool pool;
};

namespace phsa {
namespace {

thread_local std::string g_last_error;

// A setting as the field of phsa_settings.
std::string FieldOfC(std::string_view name, std::string_view value) {
  if (name.starts_with(kSettingSign)) name.remove_prefix(1);
  std::string field(name);
  WithSetting(name, [&](const SettingInfo& row) {
    if (*row.c_name != 0) field = row.c_name;
  });
  return value.empty() ? field : fmt::format("{} {}", field, value);
}

template <class Fn>
phsa_status Guarded(Fn&& fn) noexcept {
  try {
    fn();
    return PHSA_OK;
  } catch (const Error& e) {
    g_last_error = e.Spelt(FieldOfC);
    return e.status();
  } catch (const std::bad_alloc&) {
    g_last_error = "out of memory";
    return PHSA_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    g_last_error = e.what();
    return PHSA_INTERNAL;
  }
}

template <class T>
const T& Given(const T* pointer, const char* name) {
  if (pointer == nullptr) ThrowInvalid("{} is null", name);
  return *pointer;
}

template <class T>
T& Given(T* pointer, const char* name) {
  if (pointer == nullptr) ThrowInvalid("{} is null", name);
  return *pointer;
}

phsa_settings ToC(const Settings& settings) {
  phsa_settings c = Init<phsa_settings>();
  ForEachSetting([&](const auto& row) {
    if constexpr (!std::is_same_v<std::decay_t<decltype(row)>, TextSetting>) {
      c.*row.c = static_cast<std::decay_t<decltype(c.*row.c)>>(settings.*row.value);
    }
  });
  return c;
}

// Into a struct that may be an older header's, which ends before `parts`.
void Write(const Settings& settings, phsa_settings* out) {
  phsa_settings c = ToC(settings);
  constexpr size_t kFirst = offsetof(phsa_settings, parts);
  const size_t size = out->struct_size == kFirst ? kFirst : sizeof(c);
  c.struct_size = static_cast<uint32_t>(size);
  std::memcpy(out, &c, size);
}

// The parameters of a stage, whose structs grew.
phsa_forward_params WidenedParams(const phsa_forward_params* params, const char* where) {
  if (params == nullptr) ThrowInvalid("{}: params is null", where);
  return Widened(*params,
                 {offsetof(phsa_forward_params, stream), offsetof(phsa_forward_params, sinks),
                  offsetof(phsa_forward_params, kv_lens), offsetof(phsa_forward_params, kv_scales)},
                 where);
}
phsa_backward_params WidenedParams(const phsa_backward_params* params, const char* where) {
  if (params == nullptr) ThrowInvalid("{}: params is null", where);
  return Widened(*params, {offsetof(phsa_backward_params, stream)}, where);
}

PlanDesc FromC(const phsa_plan_desc& given) {
  const phsa_plan_desc c =
      Widened(given, {offsetof(phsa_plan_desc, device), offsetof(phsa_plan_desc, kv_dtype)}, "plan");
  PlanDesc desc;
  const phsa_settings& settings = Given(c.settings, "plan: settings");
  desc.settings = Settings::FromC(settings);
  if (settings.head_lambda != nullptr && c.num_kv_heads > 0 && c.num_kv_heads <= kMaxHeads) {
    desc.settings.head_lambda.assign(settings.head_lambda, settings.head_lambda + c.num_kv_heads);
  }
  desc.dtype = c.dtype;
  desc.num_q_heads = c.num_q_heads;
  desc.num_kv_heads = c.num_kv_heads;
  desc.head_dim = c.head_dim;
  desc.num_seqs = c.num_seqs;
  desc.q_lens = c.q_lens;
  desc.kv_lens = c.kv_lens;
  desc.kv_starts = c.kv_starts;
  desc.rep_starts = c.rep_starts;
  desc.page_size = c.page_size;
  desc.scale = c.scale;
  desc.max_threads = c.max_threads;
  desc.device = c.device;
  desc.kv_dtype = c.kv_dtype;
  return desc;
}

}  // namespace
}  // namespace phsa

using phsa::Given;
using phsa::Guarded;

extern "C" {

phsa_status phsa_policy_describe(int32_t policy, phsa_policy_info* out) {
  return Guarded([&] {
    if (Given(out, "out").struct_size != sizeof(*out)) {
      phsa::ThrowInvalid("policy: struct_size is {}; allowed: {} (use PHSA_INIT)", out->struct_size, sizeof(*out));
    }
    if (!phsa::IsPolicy(policy)) {
      phsa::ThrowInvalid("policy: there is no policy {}; allowed: 0 to {}", policy, std::size(phsa::kPolicies) - 1);
    }
    const auto p = static_cast<phsa::Policy>(policy);
    const phsa::PolicyRow& row = phsa::RowOf(p);
    *out = {out->struct_size,  phsa::Runs(p),   phsa::RunsOnCuda(p),    phsa::IsDense(p), phsa::Chooses(p),
            phsa::HasMeans(p), phsa::Weighs(p), phsa::HasPlainMeans(p), row.own_block,    row.name,
            row.label};
  });
}

phsa_status phsa_settings_preset(int64_t context_tokens, phsa_settings* out) {
  return Guarded([&] { phsa::Write(phsa::Settings::Preset(context_tokens), &Given(out, "out")); });
}

phsa_status phsa_settings_from_json(const char* json, int32_t layer, phsa_settings* out) {
  return Guarded([&] {
    const phsa::LayerSettings settings =
        phsa::WithPlainNames([&] { return phsa::SettingsFromJson(&Given(json, "json")); });
    const phsa::Settings& chosen = settings.ForLayer(layer);
    if (!chosen.head_lambda.empty()) {
      phsa::Throw(PHSA_UNSUPPORTED,
                  "settings: lambda is a list, which phsa_settings cannot hold; "
                  "set head_lambda yourself");
    }
    phsa::Write(chosen, &Given(out, "out"));
  });
}

phsa_status phsa_settings_to_json(const phsa_settings* settings, char* out, size_t size, size_t* needed) {
  return Guarded([&] {
    const phsa::Settings cpp = phsa::Settings::FromC(Given(settings, "settings"));
    phsa::Validate(cpp);
    const std::string json = phsa::SettingsToJson(cpp);
    if (needed != nullptr) *needed = json.size() + 1;
    if (size == 0) return;
    const size_t n = std::min(size - 1, json.size());
    std::memcpy(&Given(out, "out"), json.data(), n);
    out[n] = '\0';
  });
}

phsa_status phsa_threads_create(int32_t num_threads, phsa_threads** out) {
  return Guarded([&] {
    if (num_threads < 0 || num_threads > phsa::kMaxThreads) {
      phsa::ThrowInvalid("threads: num_threads is {}; allowed: 0 (one per core) to {}", num_threads, phsa::kMaxThreads);
    }
    Given(out, "out");
    *out = new phsa_threads{phsa::ThreadPool(num_threads)};
  });
}

void phsa_threads_destroy(phsa_threads* threads) { delete threads; }

phsa_executor phsa_threads_executor(phsa_threads* threads) {
  if (threads == nullptr) return phsa::Init<phsa_executor>();  // the calling thread
  return threads->pool.executor();
}

phsa_status phsa_plan_create(const phsa_plan_desc* desc, phsa_plan** out) {
  return Guarded([&] {
    Given(out, "out");
    *out = new phsa_plan{phsa::Plan(phsa::FromC(Given(desc, "desc")))};
  });
}

void phsa_plan_destroy(phsa_plan* plan) { delete plan; }

size_t phsa_plan_workspace_size(const phsa_plan* plan) { return plan ? plan->plan.WorkspaceSize() : 0; }
size_t phsa_plan_backward_workspace_size(const phsa_plan* plan) {
  return plan ? plan->plan.BackwardWorkspaceSize() : 0;
}
int64_t phsa_plan_num_reps(const phsa_plan* plan) { return plan ? plan->plan.NumReps() : 0; }
int32_t phsa_plan_rep_width(const phsa_plan* plan) { return plan ? plan->plan.RepWidth() : 0; }
int32_t phsa_plan_rep_stride(const phsa_plan* plan) { return plan ? plan->plan.RepStride() : 0; }
int32_t phsa_plan_selection_heads(const phsa_plan* plan) { return plan ? plan->plan.SelectionHeads() : 0; }
int32_t phsa_plan_selection_slots(const phsa_plan* plan) { return plan ? plan->plan.SelectionSlots() : 0; }

phsa_status phsa_represent(const phsa_plan* plan, const phsa_kv* kv, const phsa_executor* executor) {
  return Guarded([&] {
    const phsa_executor own = phsa::Init<phsa_executor>();
    Given(plan, "represent: plan").plan.Represent(Given(kv, "represent: kv"), executor ? *executor : own);
  });
}

phsa_status phsa_represent_with(const phsa_plan* plan, const phsa_forward_params* params) {
  return Guarded([&] { Given(plan, "represent: plan").plan.Represent(phsa::WidenedParams(params, "represent")); });
}

phsa_status phsa_select(const phsa_plan* plan, const phsa_forward_params* params) {
  return Guarded([&] { Given(plan, "select: plan").plan.Select(phsa::WidenedParams(params, "select")); });
}

phsa_status phsa_attend(const phsa_plan* plan, const phsa_forward_params* params) {
  return Guarded([&] { Given(plan, "attend: plan").plan.Attend(phsa::WidenedParams(params, "attend")); });
}

phsa_status phsa_forward(const phsa_plan* plan, const phsa_forward_params* params) {
  return Guarded([&] { Given(plan, "forward: plan").plan.Forward(phsa::WidenedParams(params, "forward")); });
}

phsa_status phsa_backward(const phsa_plan* plan, const phsa_backward_params* params) {
  return Guarded([&] { Given(plan, "backward: plan").plan.Backward(phsa::WidenedParams(params, "backward")); });
}

phsa_status phsa_tokens_read(const phsa_plan* plan, const int32_t* selection, int64_t* read, int64_t* dense) {
  return Guarded([&] { Given(plan, "tokens_read: plan").plan.TokensRead(selection, read, dense); });
}

phsa_status phsa_punctuation_table(const char* set, const char* const* tokens, const size_t* sizes,
                                   const uint8_t* special, int64_t vocabulary, uint8_t* table) {
  return Guarded([&] {
    if (set == nullptr || tokens == nullptr || sizes == nullptr || table == nullptr) {
      phsa::ThrowInvalid("punctuation_table: set, tokens, sizes or table is null");
    }
    if (vocabulary < 0 || vocabulary > phsa::kMaxTokens) {
      phsa::ThrowInvalid("punctuation_table: vocabulary is {}; allowed: 0 to {}", vocabulary, phsa::kMaxTokens);
    }
    std::vector<std::string> strings;
    strings.reserve(static_cast<size_t>(vocabulary));
    for (int64_t i = 0; i < vocabulary; ++i)
      strings.emplace_back(&Given(tokens[i], "punctuation_table: a token"), sizes[i]);
    std::span<const uint8_t> marks;
    if (special != nullptr) marks = {special, static_cast<size_t>(vocabulary)};
    const phsa::PunctuationTable result(set, strings, marks);
    std::copy(result.table().begin(), result.table().end(), table);
  });
}

const char* phsa_last_error(void) { return phsa::g_last_error.c_str(); }
const char* phsa_version(void) { return PHSA_VERSION; }
int32_t phsa_abi_version(void) { return PHSA_ABI_VERSION; }
int32_t phsa_has_device(int32_t device) {
  return device == PHSA_DEVICE_CPU || (device == PHSA_DEVICE_CUDA && phsa::cuda::Compiled());
}

const char* phsa_targets(void) {
  static const std::string names = phsa::SimdNames();
  return names.c_str();
}

const char* phsa_target(void) {
  thread_local std::string name;
  // The analyzer takes it for a variable that ends with the function.
  return Guarded([&] { name = phsa::Name(phsa::ActiveSimd()); }) == PHSA_OK ? name.c_str()
                                                                            : "";  // NOLINT(clang-analyzer-*)
}

phsa_status phsa_set_target(const char* name) {
  return Guarded([&] { phsa::SetSimd(&Given(name, "name")); });
}

}  // extern "C"
