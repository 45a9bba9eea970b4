// phsa._engine: the engine as python/phsa/llm.py uses it. What callers see, with its defaults and explanations, is
// there.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/option.h"
#include "eval/inspect_html.h"
#include "eval/inspect_report.h"
#include "io/model_store.h"
#include "model.h"
#include "phsa/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace phsa::python {
namespace {

using IdArray = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
using LogitsArray = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using Messages = std::vector<std::pair<std::string, std::string>>;  // role, content

std::span<const int32_t> View(const IdArray& ids) { return {ids.data(), ids.size()}; }
Ids Copy(const IdArray& ids) { return {ids.data(), ids.data() + ids.size()}; }

template <class T>
Vector<T> ToNumpy(std::vector<T> values) {
  auto* const kept = new std::vector<T>(std::move(values));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Vector<T>(kept->data(), {kept->size()}, owner);
}

// Ids or log probabilities of the likeliest tokens, token after token.
template <class T, size_t kIndex>
Vector<T> Likeliest(const GenerateResult& result) {
  std::vector<T> values;
  for (const TokenLogProbability& one : result.log_probabilities) {
    for (const auto& top : one.top) values.push_back(std::get<kIndex>(top));
  }
  return ToNumpy(std::move(values));
}

std::vector<ChatMessage> ToChat(const Messages& messages) {
  std::vector<ChatMessage> chat;
  for (const auto& [role, content] : messages) chat.push_back({role, content});
  return chat;
}

const char* ReasonName(StopReason reason) {
  switch (reason) {
    case StopReason::kEndOfText: return "end_of_text";
    case StopReason::kStopString: return "stop_string";
    case StopReason::kStopToken: return "stop_token";
    case StopReason::kMaxTokens: return "max_tokens";
    case StopReason::kContextFull: return "context_full";
    case StopReason::kInterrupted: return "interrupted";
    case StopReason::kLoop: return "loop";
  }
  return "";
}

// An option as an argument: context, kv_type="bf16". `lambda` is a word of Python's own.
std::string Argument(std::string_view name, std::string_view value) {
  if (name.starts_with(kSettingSign)) name.remove_prefix(1);
  if (name == "lambda") name = "lam";
  return value.empty() ? std::string(name) : fmt::format("{}=\"{}\"", name, value);
}

PyObject* ExceptionFor(phsa_status status) {
  switch (status) {
    case PHSA_INVALID_ARGUMENT:
    case PHSA_UNSUPPORTED: return PyExc_ValueError;
    case PHSA_IO: return PyExc_OSError;
    case PHSA_OUT_OF_MEMORY: return PyExc_MemoryError;
    default: return PyExc_RuntimeError;
  }
}

void Translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    PyErr_SetString(ExceptionFor(error.status()), error.Spelt(Argument).c_str());
  }
}

Model::Progress ToProgress(const nb::object& callable) {
  if (callable.is_none()) return {};
  return [callable](const char* what, double share) { callable(what, share); };
}

nb::typed<nb::dict, nb::str, nb::int_> MemoryBytes(const Model& model) {
  const MemoryNeeds memory = model.memory();
  nb::typed<nb::dict, nb::str, nb::int_> bytes;
  bytes["weights"] = memory.weights;
  bytes["key_values"] = memory.key_values;
  bytes["representatives"] = memory.representatives;
  bytes["workspace"] = memory.workspace;
  bytes["total"] = memory.total();
  return bytes;
}

// The same text is compiled once, and what was worked out for one call is there for the next.
std::shared_ptr<const Grammar> AskedGrammar(const std::optional<std::string>& grammar,
                                            const std::optional<std::string>& schema) {
  static GrammarCache cache;
  if (grammar && schema) ThrowInvalid("grammar and json_schema are both there; give one");
  if (grammar) return cache.Get("gbnf " + *grammar, [&] { return CompileGbnf(*grammar, "grammar"); });
  if (schema) return cache.Get("schema " + *schema, [&] { return CompileJsonSchemaText(*schema, "json_schema"); });
  return nullptr;
}

void BindChoices(nb::module_& m) {
  nb::class_<AttentionChoice>(m, "AttentionChoice")
      .def(
          "__init__",
          [](AttentionChoice* self, std::string policy, std::string preset, std::map<std::string, SettingValue> given,
             std::string settings) {
            new (self) AttentionChoice{
                std::move(policy), std::move(preset), {given.begin(), given.end()}, std::move(settings)};
          },
          nb::kw_only(), "policy"_a, "preset"_a, "given"_a, "settings"_a);
  nb::class_<GenerateChoice>(m, "GenerateChoice")
      .def(
          "__init__",
          [](GenerateChoice* self, int32_t max_tokens, std::optional<float> temperature, std::optional<int32_t> top_k,
             std::optional<float> top_p, std::optional<float> min_p, std::optional<float> repetition_penalty,
             float frequency_penalty, float presence_penalty, std::vector<std::pair<int32_t, float>> logit_bias,
             std::optional<uint64_t> seed, std::vector<std::string> stop, std::vector<int32_t> stop_tokens,
             bool ignore_eos, std::optional<int32_t> logprobs, std::optional<std::string> adapter,
             const std::optional<std::string>& grammar, const std::optional<std::string>& json_schema) {
            SamplingChoice sampling{temperature, top_p, min_p, repetition_penalty, top_k, seed};
            sampling.frequency_penalty = frequency_penalty;
            sampling.presence_penalty = presence_penalty;
            sampling.logit_bias = std::move(logit_bias);
            new (self)
                GenerateChoice{std::move(sampling), max_tokens, std::move(stop),    std::move(stop_tokens),
                               ignore_eos,          logprobs,   std::move(adapter), AskedGrammar(grammar, json_schema)};
          },
          nb::kw_only(), "max_tokens"_a, "temperature"_a.none(), "top_k"_a.none(), "top_p"_a.none(), "min_p"_a.none(),
          "repetition_penalty"_a.none(), "frequency_penalty"_a, "presence_penalty"_a, "logit_bias"_a, "seed"_a.none(),
          "stop"_a, "stop_tokens"_a, "ignore_eos"_a, "logprobs"_a.none(), "adapter"_a.none(), "grammar"_a.none(),
          "json_schema"_a.none());
}

void BindResults(nb::module_& m) {
  nb::class_<GenerateResult>(m, "Result")
      .def_ro("text", &GenerateResult::text)
      .def_prop_ro(
          "tokens", [](const GenerateResult& result) { return ToNumpy(result.tokens); }, nb::rv_policy::move)
      .def_prop_ro(
          "logprobs",
          [](const GenerateResult& result) {
            std::vector<float> values;
            for (const TokenLogProbability& one : result.log_probabilities) values.push_back(one.value);
            return ToNumpy(std::move(values));
          },
          nb::rv_policy::move)
      .def_prop_ro(
          "top_ids", [](const GenerateResult& result) { return Likeliest<int32_t, 0>(result); }, nb::rv_policy::move)
      .def_prop_ro(
          "top_logprobs", [](const GenerateResult& result) { return Likeliest<float, 1>(result); }, nb::rv_policy::move)
      .def_prop_ro("reason", [](const GenerateResult& result) { return ReasonName(result.reason); })
      .def_ro("prompt_tokens", &GenerateResult::prompt_tokens)
      .def_ro("reused_tokens", &GenerateResult::reused_tokens)
      .def_ro("prefill_seconds", &GenerateResult::prefill_seconds)
      .def_ro("decode_seconds", &GenerateResult::decode_seconds)
      .def_prop_ro("read_share", [](const GenerateResult& result) { return result.tokens_read.share(); });
  nb::class_<Score>(m, "Score")
      .def_ro("total", &Score::log_likelihood)
      .def_ro("greedy", &Score::greedy)
      .def_prop_ro(
          "tokens", [](const Score& score) { return ToNumpy(score.token_log_probabilities); }, nb::rv_policy::move);
  nb::class_<Inspection>(m, "Inspection")
      .def("json", &InspectionJson)
      .def("html", &InspectionHtml)
      .def("text", &InspectionText);
}

void BindState(nb::class_<Model>& engine) {
  engine.def_prop_ro("name", [](const Model& model) { return model.config().name; })
      .def_prop_ro("device", [](const Model& model) { return model.device_name(); })
      .def_prop_ro("device_note", [](const Model& model) { return SpellOptions(model.device_note(), Argument); })
      .def_prop_ro("context", [](const Model& model) { return model.memory().context; })
      .def_prop_ro("cache_tokens", [](const Model& model) { return model.memory().cache_tokens; })
      .def_prop_ro("model_context", [](const Model& model) { return model.config().context; })
      .def_prop_ro("vocab_size", [](const Model& model) { return model.config().vocab_size; })
      .def_prop_ro("eos_ids", [](const Model& model) { return model.config().eos_ids; })
      .def_prop_ro("bos_id", [](const Model& model) { return model.tokenizer().bos(); })
      .def_prop_ro("add_bos", [](const Model& model) { return model.tokenizer().add_bos(); })
      .def_prop_ro("attention", [](const Model& model) { return SettingsToJson(model.attention()); })
      .def_prop_ro("tested_tokens", [](const Model& model) { return TestedTokens(model.config()); })
      .def_prop_ro("memory", &MemoryBytes)
      .def_prop_ro("chat_template",
                   [](const Model& model) -> std::optional<std::string> {
                     if (!model.chat_template()) return std::nullopt;
                     return model.chat_template()->name();
                   })
      .def("set_attention", &Model::SetAttention, "attention"_a)
      .def("set_adapter", &Model::SetAdapter, "folder"_a);
}

void BindTexts(nb::class_<Model>& engine) {
  engine
      .def(
          "tokenize",
          [](const Model& model, const std::string& text, bool special) {
            return ToNumpy(model.Encode(text, special ? SpecialTokens::kRecognise : SpecialTokens::kAsText));
          },
          "text"_a, "special"_a)
      .def(
          "detokenize",
          [](const Model& model, const IdArray& ids, bool special) { return model.Decode(View(ids), !special); },
          "ids"_a, "special"_a)
      .def(
          "render_chat",
          [](const Model& model, const Messages& messages, bool add_generation_prompt) {
            return model.RenderChat(ToChat(messages), add_generation_prompt);
          },
          "messages"_a, "add_generation_prompt"_a)
      .def(
          "encode_chat",
          [](const Model& model, const Messages& messages, bool add_generation_prompt) {
            return ToNumpy(model.EncodeChat(ToChat(messages), add_generation_prompt));
          },
          "messages"_a, "add_generation_prompt"_a);
}

void BindRuns(nb::class_<Model>& engine) {
  engine
      .def(
          "generate",
          [](Model& model, const std::vector<IdArray>& prompts, const std::vector<uint64_t>& seeds,
             const GenerateChoice& choice, int32_t n, int32_t max_batch) {
            std::vector<Ids> copies;
            for (const IdArray& prompt : prompts) copies.push_back(Copy(prompt));
            return model.Generate(copies, seeds, choice, n, max_batch);
          },
          "prompts"_a, "seeds"_a, "choice"_a, "n"_a, "max_batch"_a)
      .def(
          "loglikelihoods",
          [](Model& model, const std::vector<std::pair<IdArray, IdArray>>& pairs) {
            std::vector<ScoreRequest> requests;
            for (const auto& [context, continuation] : pairs) requests.push_back({Copy(context), Copy(continuation)});
            return model.LogLikelihoods(requests);
          },
          "pairs"_a)
      .def(
          "logits",
          [](Model& model, const IdArray& ids) {
            std::unique_ptr<float[]> values = model.Logits(View(ids));
            const nb::capsule owner(values.get(), [](void* p) noexcept { delete[] static_cast<float*>(p); });
            float* const data = values.release();
            return LogitsArray(data, {ids.size(), static_cast<size_t>(model.config().vocab_size)}, owner);
          },
          "ids"_a)
      .def(
          "inspect",
          [](Model& model, const IdArray& ids, int32_t last, int32_t max_tokens) {
            return model.Inspect(View(ids), last, max_tokens);
          },
          "ids"_a, "last"_a, "max_tokens"_a);
}

void BindStream(nb::module_& m) {
  nb::class_<Stream>(m, "Stream")
      .def(
          "__init__",
          [](Stream* self, Model& engine, const IdArray& prompt, const GenerateChoice& choice, int32_t max_batch) {
            new (self) Stream(engine, Copy(prompt), choice, max_batch);
          },
          "engine"_a, "prompt"_a, "choice"_a, "max_batch"_a, nb::keep_alive<1, 2>())
      .def("next", &Stream::Next)
      .def("close", &Stream::Close)
      .def_prop_ro("result", &Stream::result);
}

void BindEngine(nb::module_& m) {
  nb::class_<Model> engine(m, "Engine");
  engine.def(
      "__init__",
      [](Model* self, const std::string& model, const AttentionChoice& attention, const std::string& adapter,
         const std::vector<std::string>& other_adapters, const std::string& device, int32_t context,
         int32_t cache_tokens, int32_t threads, const std::string& weights, const std::string& kv_type, int32_t chunk,
         const std::string& chat_template, const nb::object& progress) {
        EngineOptions options;
        options.device = device;
        options.weights = WeightsModeFromName(weights);
        if (kv_type != "auto") options.kv_dtype = KvTypeFromName(kv_type);
        options.context = context;
        options.cache_tokens = cache_tokens;
        options.threads = threads;
        options.chunk = chunk;
        new (self) Model(model, adapter, other_adapters, attention, options, chat_template, ToProgress(progress));
      },
      "model"_a, "attention"_a, nb::kw_only(), "adapter"_a, "other_adapters"_a, "device"_a, "context"_a,
      "cache_tokens"_a, "threads"_a, "weights"_a, "kv_type"_a, "chunk"_a, "chat_template"_a, "progress"_a.none());
  BindState(engine);
  BindTexts(engine);
  BindRuns(engine);
}

}  // namespace
}  // namespace phsa::python

NB_MODULE(_engine, m) {
  using namespace phsa::python;
  // A model that a daemon thread still holds when Python ends is not worth a page of warnings.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(&Translate);
  ForgetThreadsInForkedChild();
  m.def("wait_for_all_inside", &WaitForAllInside);
  // The file of a model that `phsa models` lists; None where no such model has that name.
  m.def(
      "packaged_model",
      [](const std::string& name) -> std::optional<std::string> {
        if (phsa::FindPackagedModel(name) == nullptr) return std::nullopt;
        return phsa::ResolveModel(name).string();
      },
      "name"_a);
  nb::module_::import_("atexit").attr("register")(m.attr("wait_for_all_inside"));
  BindChoices(m);
  BindResults(m);
  BindEngine(m);
  BindStream(m);
}
