// `phsa serve`: the OpenAI API over HTTP, with a page.
#include "server/server.h"

#include <cstdio>
#include <filesystem>

#include "base/errors.h"
#include "base/mapped_file.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "engine/attention_choice.h"
#include "engine/speculation.h"
#include "server/service.h"
#include "server/worker.h"

namespace phsa::cli {
namespace {

constexpr size_t kMaxKeyBytes = 4096;
// Prompts in JSON: a token is about four bytes of text, and as an id in a list about seven.
constexpr uint64_t kBodyBytesPerToken = 64, kLeastBodyBytes = 4 << 20;

struct ServeFlags {
  ModelFlags model;
  AttentionFlags attention;
  server::ServerOptions server;
  server::WorkerOptions worker;
  server::ServiceOptions service;
  std::string speculate = "none";
  std::string alias, chat_template, api_key_file, log_file = "-", tls_cert, tls_key;
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

// By what clients call the model: the file's or folder's name, unless told.
std::string ModelId(const ServeFlags& flags, const ModelSource& source) {
  if (!flags.alias.empty()) return flags.alias;
  const std::filesystem::path given(flags.model.model);
  if (!std::filesystem::exists(given)) return flags.model.model;  // a name
  const std::filesystem::path path = std::filesystem::path(source.path()).lexically_normal();
  const std::string name = (path.has_filename() ? path : path.parent_path()).stem().string();
  return name.empty() ? source.config().name : name;
}

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
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
  std::unique_ptr<ModelSource> source = OpenModel(flags.model.model, flags.model.adapter);
  Tokenizer tokenizer = LoadTokenizer(*source);
  const int32_t context = flags.model.context > 0 ? flags.model.context : source->config().context;
  const std::vector<LayerSettings> attention = AttentionSettings(flags.attention, source->config(), context);
  if (attention.size() != 1) ThrowInvalid("serve: one --attention and one -K; requests may ask for others");
  const std::string id = ModelId(flags, *source);
  const std::unique_ptr<Engine> engine =
      OpenEngine(std::move(source), std::move(tokenizer), flags.model, attention.front());

  CheckSpeculation(*engine, flags.worker.speculation);
  server::ServedModel model{*engine, id, std::nullopt, ChoiceOf(flags.attention), flags.max_tokens};
  try {
    model.chat_template = ChooseChatTemplate(flags.chat_template, engine->source().chat_template());
  } catch (const Error& error) {
    if (!flags.chat_template.empty()) throw;
    Note("chat: {}", error.what());
  }
  server::ServerOptions options = flags.server;
  options.header_timeout = Milliseconds(flags.header_timeout);
  options.body_timeout = Milliseconds(flags.body_timeout);
  options.idle_timeout = Milliseconds(flags.idle_timeout);
  options.write_timeout = Milliseconds(flags.write_timeout);
  options.grace = Milliseconds(flags.grace);
  options.tls = tls;
  if (options.max_body_bytes == 0) {
    options.max_body_bytes =
        std::max(kLeastBodyBytes, kBodyBytesPerToken * static_cast<uint64_t>(engine->plan().context));
  }
  server::ServiceOptions service_options = flags.service;
  service_options.api_key = key;
  service_options.version = PHSA_VERSION;
  service_options.note = [&log](const std::string& text) { log.Note("warning: " + text); };

  LoadEngine(*engine);
  server::Metrics metrics(id);
  server::Worker worker(*engine, flags.worker, metrics);
  server::Service service(std::move(model), service_options, worker, metrics);
  server::Server http(options, service, worker, metrics, log);
  const bool v6 = options.host.find(':') != std::string::npos;
  Note("serving {} at {}://{}{}{}:{}", id, tls != nullptr ? "https" : "http", v6 ? "[" : "", options.host,
       v6 ? "]" : "", http.port());
  ThrowIfInterrupted();  // from here on the server has the signals
  http.Run();
}

}  // namespace

void AddServeCommand(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("serve", "answers over HTTP: the OpenAI API, and a page");
  auto flags = std::make_shared<ServeFlags>();
  flags->server.max_body_bytes = 0;
  flags->model.cache_texts = 4;
  flags->model.other_attention = true;
  AddModelFlags(*command, flags->model);
  command->add_option("--host", flags->server.host, "the address to listen on; another than this machine's needs a key")
      ->capture_default_str();
  command->add_option("--port", flags->server.port, "the port; 0: any that is free")->capture_default_str();
  command->add_option("--alias", flags->alias, "what clients call the model; the file's name unless given");
  command->add_option("--chat-template", flags->chat_template,
                      "the chat template by name, where the model's is unknown");
  command->add_option("-n,--predict", flags->max_tokens, "tokens of an answer in a chat, where a request does not say")
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();
  AddSpeculateFlag(*command, flags->speculate);
  const std::string limits = "Limits";
  command->add_option("--parallel", flags->worker.max_running, "answers that are written at the same time")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str()
      ->group(limits);
  command->add_option("--queue", flags->worker.max_waiting, "answers that may wait; more are refused (429)")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str()
      ->group(limits);
  command
      ->add_option("--cache-tokens", flags->model.cache_tokens,
                   "tokens that the KV cache holds, of all texts together; 0: four contexts, or what fits into memory")
      ->group(limits);
  command->add_option("--max-connections", flags->server.max_connections, "open connections")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str()
      ->group(limits);
  command
      ->add_option("--max-body", flags->server.max_body_bytes,
                   "bytes of a request's body; 0: 64 for each token of context, at least 4 MiB")
      ->group(limits);
  command->add_option("--max-header", flags->server.max_header_bytes, "bytes of a request's header")
      ->check(CLI::Range(1024, 1 << 20))
      ->capture_default_str()
      ->group(limits);
  command->add_option("--http-threads", flags->server.threads, "threads for HTTP, JSON and chat templates")
      ->check(CLI::Range(1, 64))
      ->capture_default_str()
      ->group(limits);
  const auto seconds = [&](const char* name, double& value, const char* help) {
    command->add_option(name, value, help)->check(CLI::Range(0.01, 86400.0))->capture_default_str()->group(limits);
  };
  seconds("--header-timeout", flags->header_timeout,
          "seconds until a request's header, and a TLS handshake, must be there");
  seconds("--body-timeout", flags->body_timeout, "seconds until its body must be there");
  seconds("--idle-timeout", flags->idle_timeout, "seconds that a connection may wait between requests");
  seconds("--write-timeout", flags->write_timeout, "seconds that a client may take to read what it is sent");
  seconds("--grace", flags->grace, "seconds that answers have to end when the server is to stop");
  const std::string access = "Access";
  command->add_option("--api-key", flags->service.api_key, "the key that clients must send")->group(access);
  command->add_option("--api-key-file", flags->api_key_file, "a file with that key, which other users cannot see")
      ->group(access);
  command
      ->add_option("--allow-host", flags->service.hosts,
                   "another name under which a server without a key answers; may be given several times")
      ->allow_extra_args(false)
      ->delimiter(',')
      ->group(access);
  command
      ->add_option("--tls-cert", flags->tls_cert, "the server's certificate in PEM, with its chain: HTTPS, and no HTTP")
      ->group(access);
  command->add_option("--tls-key", flags->tls_key, "the certificate's private key in PEM, without a pass phrase")
      ->group(access);
  command->add_option("--cors", flags->service.cors_origin, "an origin whose pages may use the server, or *")
      ->group(access);
  command->add_option("--log-file", flags->log_file, "a file for the access log; -: standard error; none: no log")
      ->group(access);
  AddAttentionFlags(*command, flags->attention);
  command->callback([flags] {
    flags->worker.speculation = SpeculationFromName(flags->speculate);
    RunServe(*flags);
  });
}

}  // namespace phsa::cli
