// `phsa serve`: the OpenAI API over HTTP, with a page.
#include "server/server.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/mapped_file.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/spelling.h"
#include "cli/terminal.h"
#include "engine/answer.h"
#include "engine/attention_choice.h"
#include "engine/sampling_choice.h"
#include "engine/speculation.h"
#include "server/answers.h"
#include "server/model_pool.h"
#include "server/service.h"
#include "server/worker.h"

namespace phsa::cli {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxKeyBytes = 4096;
constexpr double kKeepAliveSeconds = 300;
constexpr uint64_t kGigabyte = uint64_t{1} << 30;
// Prompts in JSON: a token is about four bytes of text, and as an id in a list about seven.
constexpr uint64_t kBodyBytesPerToken = 64, kLeastBodyBytes = 4 << 20;

struct ServeFlags {
  ModelFlags model;
  AttentionFlags attention;
  server::ServerOptions server;
  server::WorkerOptions worker;
  server::ServiceOptions service;
  std::string speculate = "none";
  std::vector<std::string> models, aliases, loras;
  std::optional<double> keep_alive;
  std::string cache_folder;
  double cache_gigabytes = 8;
  std::string chat_template, api_key_file, log_file = "-", tls_cert, tls_key;
  int32_t max_tokens = 1024;
  double header_timeout = 10, body_timeout = 30, idle_timeout = 75, write_timeout = 30, grace = 10;
};

std::string ApiKey(const ServeFlags& flags) {
  if (flags.api_key_file.empty()) return flags.service.api_key;
  if (!flags.service.api_key.empty()) ThrowInvalid("--api-key and --api-key-file: give one of them");
  std::string key = ReadTextFile(flags.api_key_file, kMaxKeyBytes);
  while (!key.empty() && (key.back() == '\n' || key.back() == '\r')) key.pop_back();
  if (key.empty()) ThrowInvalid("{}: there is no key in it", flags.api_key_file);
  return key;
}

// None: plain HTTP.
std::shared_ptr<server::TlsFiles> Tls(const ServeFlags& flags) {
  if (flags.tls_cert.empty() && flags.tls_key.empty()) return nullptr;
  if (flags.tls_cert.empty() || flags.tls_key.empty()) {
    ThrowInvalid("--tls-cert and --tls-key: give both; where one file has certificate and key, name it twice");
  }
  auto tls = std::make_shared<server::TlsFiles>(flags.tls_cert, flags.tls_key);
  if (const std::string warning = tls->warning(); !warning.empty()) Note("warning: {}", warning);
  return tls;
}

// A model as it is served: how it is opened, and by what names clients call it and its adapters.
struct Served {
  ModelFlags model;
  std::string alias, id;
  struct Lora {
    std::string name, folder;
  };
  std::vector<Lora> loras;
};

// By what clients call a model: the file's or folder's name, unless told.
std::string ModelId(const Served& served, const ModelSource& source) {
  if (!served.alias.empty()) return served.alias;
  const std::filesystem::path given(served.model.model);
  if (!std::filesystem::exists(given)) return served.model.model;  // a name
  const std::filesystem::path path = std::filesystem::path(source.path()).lexically_normal();
  const std::string name = (path.has_filename() ? path : path.parent_path()).stem().string();
  return name.empty() ? source.config().name : name;
}

// --model and --alias, in their order. Adapters come to them when their names are known.
std::vector<Served> ModelsToServe(const ServeFlags& flags) {
  if (flags.aliases.size() > flags.models.size()) {
    ThrowInvalid("there are {} times --alias and {} times --model; give one alias for each model, in their order",
                 flags.aliases.size(), flags.models.size());
  }
  if (flags.models.size() > 1 && !flags.model.adapter.empty()) {
    ThrowInvalid("--adapter is for one model; with several give --lora MODEL:NAME=FOLDER, and ask for NAME");
  }
  std::vector<Served> all;
  for (size_t i = 0; i < flags.models.size(); ++i) {
    Served& one = all.emplace_back();
    one.model = flags.model;
    one.model.model = flags.models[i];
    if (i < flags.aliases.size()) one.alias = flags.aliases[i];
  }
  return all;
}

// [MODEL:]NAME=FOLDER
void AddLora(const std::string& flag, std::vector<Served>& models) {
  const size_t equals = flag.find('=');
  std::string name = flag.substr(0, equals);
  Served* model = &models.front();
  if (const size_t colon = name.find(':'); colon != std::string::npos && equals != std::string::npos) {
    const std::string base = name.substr(0, colon);
    const auto found = std::find_if(models.begin(), models.end(), [&](const Served& one) { return one.id == base; });
    if (found == models.end()) ThrowInvalid("--lora {}: no model is served as {}", Quoted(flag), Quoted(base));
    model = &*found;
    name = name.substr(colon + 1);
  }
  if (equals == std::string::npos || name.empty() || equals + 1 == flag.size()) {
    ThrowInvalid("--lora is {}; it takes NAME=FOLDER, or MODEL:NAME=FOLDER where several models are served",
                 Quoted(flag));
  }
  model->loras.push_back({name, flag.substr(equals + 1)});
}

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

std::unique_ptr<Engine> OpenServed(const ServeFlags& flags, const Served& served) {
  std::unique_ptr<ModelSource> source = OpenModel(served.model.model, served.model.adapter);
  Tokenizer tokenizer = LoadTokenizer(*source);
  const int32_t context = served.model.context > 0 ? served.model.context : source->config().context;
  const std::vector<LayerSettings> attention = AttentionSettings(flags.attention, source->config(), context);
  if (attention.size() != 1) ThrowInvalid("serve: one --attention and one -K; requests may ask for others");
  std::unique_ptr<Engine> engine = OpenEngine(std::move(source), std::move(tokenizer), served.model, attention.front());
  for (const Served::Lora& lora : served.loras) engine->AddAdapter(lora.folder);
  return engine;
}

std::optional<ChatTemplate> TemplateFor(const ServeFlags& flags, const Engine& engine) {
  try {
    return ChooseChatTemplate(flags.chat_template, engine.source().chat_template());
  } catch (const Error& error) {
    if (!flags.chat_template.empty()) throw;
    Note("chat: {}", error.message());
    return std::nullopt;
  }
}

// The model under its name, then under those of its adapters.
std::vector<server::ServedModel> NamesOf(const ServeFlags& flags, const Served& served,
                                         const std::optional<ChatTemplate>& chat, const Engine& engine) {
  std::vector<server::ServedModel> names;
  names.push_back({engine, served.id, chat, ChoiceOf(flags.attention), flags.max_tokens});
  for (const Served::Lora& lora : served.loras) {
    server::ServedModel one = names.front();  // with the same grammars: they depend on the tokenizer alone
    one.id = lora.name;
    one.adapter = static_cast<int32_t>(names.size());
    names.push_back(std::move(one));
  }
  return names;
}

server::ModelSpec SpecOf(const ServeFlags& flags, Served served, std::unique_ptr<Engine> opened, bool first,
                         const server::WorkerOptions& worker, server::Metrics& metrics) {
  const MemoryNeeds& memory = opened->memory();
  server::ModelSpec spec;
  spec.memory = memory.total();
  spec.metrics = &metrics;
  const std::optional<ChatTemplate> chat = TemplateFor(flags, *opened);
  for (const server::ServedModel& name : NamesOf(flags, served, chat, *opened)) {
    const ModelConfig config = opened->ConfigOf(name.adapter);
    const std::optional<int32_t> tested = TestedTokens(config);
    const LayerSettings settings =
        name.adapter == 0 ? opened->options().attention : ResolveAttention(name.attention, config, memory.context);
    const SamplerSettings sampling = ResolveSampling({}, config);
    Json& one = spec.descriptions.emplace_back();
    one = {{"id", name.id},
           {"object", "model"},
           {"owned_by", "phsa"},
           {"max_model_len", memory.context},
           {"phsa",
            {{"attention", Name(settings.base.policy)},
             {"settings", Json::parse(SettingsToJson(settings))},
             {"device", memory.gpu.empty() ? "cpu" : memory.gpu},
             {"weights", memory.weight_types},
             {"kv_type", memory.kv_type},
             {"cache_tokens", memory.cache_tokens},
             {"sampling",
              {{"temperature", server::Rounded(sampling.temperature)},
               {"top_k", sampling.top_k},
               {"top_p", server::Rounded(sampling.top_p)},
               {"min_p", server::Rounded(sampling.min_p)},
               {"repetition_penalty", server::Rounded(sampling.repetition_penalty)}}},
             {"chat_tokens", name.chat_tokens},
             {"tested_tokens", tested ? Json(*tested) : Json()},
             {"chat_template", name.chat_template ? Json(name.chat_template->name()) : Json()}}}};
    if (name.adapter > 0) one["parent"] = served.id;
  }
  // The room that was counted now is what it takes later, whoever else is there then.
  served.model.context = memory.context;
  served.model.cache_tokens = memory.cache_tokens;
  if (!first) opened.reset();
  spec.load = [&flags, served = std::move(served), chat, worker, &metrics,
               ready = std::make_shared<std::unique_ptr<Engine>>(std::move(opened))] {
    std::unique_ptr<Engine> engine = std::move(*ready);
    if (engine == nullptr) engine = OpenServed(flags, served);
    LoadEngine(*engine);
    std::vector<server::ServedModel> names = NamesOf(flags, served, chat, *engine);
    return std::make_shared<server::LoadedModel>(std::move(engine), std::move(names), worker, metrics);
  };
  return spec;
}

void RunServe(const ServeFlags& flags) {
  const std::string key = ApiKey(flags);
  if (!server::IsLoopback(flags.server.host) && key.empty()) {
    ThrowInvalid(
        "--host {} is open to other machines; give --api-key or --api-key-file so that not everybody can use it, or "
        "--host 127.0.0.1",
        Quoted(flags.server.host));
  }
  // What is wrong in these is said before a model is loaded.
  (void)server::AllowedHosts{flags.service.hosts};
  const std::shared_ptr<server::TlsFiles> tls = Tls(flags);
  const bool no_log = flags.log_file == "none" || (flags.log_file == "-" && IsQuiet());
  server::AccessLog log(no_log ? "" : flags.log_file);

  std::vector<Served> models = ModelsToServe(flags);
  for (Served& one : models) one.id = ModelId(one, *OpenModel(one.model.model));
  for (const std::string& lora : flags.loras) AddLora(lora, models);
  server::WorkerOptions worker = flags.worker;
  if (!flags.cache_folder.empty()) {
    worker.texts = std::make_shared<TextCache>(
        flags.cache_folder, static_cast<uint64_t>(flags.cache_gigabytes * static_cast<double>(kGigabyte)),
        [&log](const std::string& text) { log.Note(WithFlags("--cache-dir: " + text)); });
  }
  if (models.size() > 1) worker.turns = std::make_shared<server::StepTurns>();
  std::deque<server::Metrics> metrics;
  std::vector<server::ModelSpec> specs;
  server::PoolOptions pool;
  int32_t context = 0;
  for (Served& one : models) {
    std::unique_ptr<Engine> engine = OpenServed(flags, one);
    CheckSpeculation(*engine, flags.worker.speculation);
    if (pool.memory == 0) pool.memory = engine->memory().available;
    context = std::max(context, engine->memory().context);
    specs.push_back(SpecOf(flags, one, std::move(engine), specs.empty(), worker, metrics.emplace_back(one.id)));
  }
  if (flags.keep_alive || models.size() > 1) {
    pool.keep_alive = Milliseconds(flags.keep_alive.value_or(kKeepAliveSeconds));
  }
  pool.max_waiting = static_cast<size_t>(flags.worker.max_waiting);
  pool.note = [&log](const std::string& text) { log.Note(WithFlags(text)); };

  server::ServerOptions options = flags.server;
  options.header_timeout = Milliseconds(flags.header_timeout);
  options.body_timeout = Milliseconds(flags.body_timeout);
  options.idle_timeout = Milliseconds(flags.idle_timeout);
  options.write_timeout = Milliseconds(flags.write_timeout);
  options.grace = Milliseconds(flags.grace);
  options.tls = tls;
  if (options.max_body_bytes == 0) {
    options.max_body_bytes = std::max(kLeastBodyBytes, kBodyBytesPerToken * static_cast<uint64_t>(context));
  }
  server::ServiceOptions service_options = flags.service;
  service_options.api_key = key;
  service_options.version = PHSA_VERSION;
  service_options.note = [&log](const std::string& text) { log.Note(WithFlags("warning: " + text)); };

  server::ModelPool loaded(std::move(specs), pool);
  server::Service service(loaded, service_options, metrics.front());
  server::Server http(options, service, loaded, metrics.front(), log);
  const bool v6 = options.host.find(':') != std::string::npos;
  std::vector<std::string> ids;
  for (const Served& one : models) ids.push_back(one.id);
  Note("serving {} at {}://{}{}{}:{}", fmt::join(ids, ", "), tls != nullptr ? "https" : "http", v6 ? "[" : "",
       options.host, v6 ? "]" : "", http.port());
  ThrowIfInterrupted();  // from here on the server has the signals
  http.Run();
}

void AddLimitFlags(CLI::App& command, ServeFlags& flags) {
  const std::string limits = "Limits";
  command.add_option("--parallel", flags.worker.max_running, "answers that are decoded at the same time")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str()
      ->group(limits);
  command.add_option("--queue", flags.worker.max_waiting, "answers that may wait; more are refused (429)")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str()
      ->group(limits);
  command
      .add_option("--cache-tokens", flags.model.cache_tokens,
                  "tokens that the KV cache holds, of all texts together; 0: four contexts, or what fits into memory")
      ->group(limits);
  command
      .add_option("--cache-dir", flags.cache_folder,
                  "a folder that keeps the KV cache of long texts (1,024 tokens and more), so that they need no "
                  "prefill after a restart")
      ->group(limits);
  command.add_option("--cache-size", flags.cache_gigabytes, "GiB that the folder may take; what is oldest goes first")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str()
      ->group(limits);
  command.add_option("--max-connections", flags.server.max_connections, "open connections")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str()
      ->group(limits);
  command
      .add_option("--max-body", flags.server.max_body_bytes,
                  "bytes of a request's body; 0: 64 for each token of context, at least 4 MiB")
      ->group(limits);
  command.add_option("--max-header", flags.server.max_header_bytes, "bytes of a request's header")
      ->check(CLI::Range(1024, 1 << 20))
      ->capture_default_str()
      ->group(limits);
  command.add_option("--http-threads", flags.server.threads, "threads for HTTP, JSON and chat templates")
      ->check(CLI::Range(1, 64))
      ->capture_default_str()
      ->group(limits);
  const auto seconds = [&](const char* name, double& value, const char* help) {
    command.add_option(name, value, help)->check(CLI::Range(0.01, 86400.0))->capture_default_str()->group(limits);
  };
  seconds("--header-timeout", flags.header_timeout,
          "seconds until a request's header, and a TLS handshake, must be there");
  seconds("--body-timeout", flags.body_timeout, "seconds until its body must be there");
  seconds("--idle-timeout", flags.idle_timeout, "seconds that a connection may wait between requests");
  seconds("--write-timeout", flags.write_timeout, "seconds that a client may take to read what it is sent");
  command
      .add_option("--keep-alive", flags.keep_alive,
                  "seconds after which a model that nobody asks for leaves memory (300 where several are served, else "
                  "never)")
      ->check(CLI::Range(0.1, 1e7))
      ->group(limits);
  seconds("--grace", flags.grace, "seconds that answers have to end when the server is to stop");
}

void AddAccessFlags(CLI::App& command, ServeFlags& flags) {
  const std::string access = "Access";
  command.add_option("--api-key", flags.service.api_key, "the key that clients must send")->group(access);
  command.add_option("--api-key-file", flags.api_key_file, "a file with that key, which other users cannot see")
      ->group(access);
  command
      .add_option("--allow-host", flags.service.hosts,
                  "another name under which a server without a key answers; may be given several times")
      ->allow_extra_args(false)
      ->delimiter(',')
      ->group(access);
  command
      .add_option("--tls-cert", flags.tls_cert, "the server's certificate in PEM, with its chain: HTTPS, and no HTTP")
      ->group(access);
  command.add_option("--tls-key", flags.tls_key, "the certificate's private key in PEM, without a pass phrase")
      ->group(access);
  command.add_option("--cors", flags.service.cors_origin, "an origin whose pages may use the server, or *")
      ->group(access);
  command.add_option("--log-file", flags.log_file, "a file for the access log; -: standard error; none: no log")
      ->group(access);
}

}  // namespace

void AddServeCommand(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("serve", "answers over HTTP: the OpenAI API, and a page");
  auto flags = std::make_shared<ServeFlags>();
  flags->server.max_body_bytes = 0;
  flags->model.cache_texts = 4;
  flags->model.other_attention = true;
  command
      ->add_option("-m,--model", flags->models,
                   "a .gguf file, a Hugging Face folder, or a name that `phsa models` lists; given several times, all "
                   "are served, the first one from the start and the others when they are asked for")
      ->allow_extra_args(false)
      ->required();
  AddRunFlags(*command, flags->model);
  command
      ->add_option("--lora", flags->loras,
                   "[MODEL:]NAME=FOLDER: a LoRA adapter that requests name as their model; may be given several times")
      ->allow_extra_args(false);
  command->add_option("--host", flags->server.host, "the address to listen on; another than this machine's needs a key")
      ->capture_default_str();
  command->add_option("--port", flags->server.port, "the port; 0: any that is free")->capture_default_str();
  command
      ->add_option("--alias", flags->aliases,
                   "what clients call the model; the file's name unless given. One for each --model, in their order")
      ->allow_extra_args(false);
  command->add_option("--chat-template", flags->chat_template,
                      "the chat template by name, where the model's is unknown");
  command->add_option("-n,--predict", flags->max_tokens, "tokens of an answer in a chat, where a request does not say")
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();
  AddSpeculateFlag(*command, flags->speculate);
  AddLimitFlags(*command, *flags);
  AddAccessFlags(*command, *flags);
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] {
    flags->worker.speculation = SpeculationFromName(flags->speculate);
    RunServe(*flags);
  });
}

}  // namespace phsa::cli
