#include "server/messages_api.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/errors.h"
#include "server/answers.h"
#include "server/chat_input.h"
#include "server/fields.h"

namespace phsa::server {
namespace {

std::string JoinedText(const Fields& fields, const char* key) {
  const Json* const value = fields.Find(key);
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>();
  if (!value->is_array()) fields.RefuseValue(key, *value, "a text, or a list of blocks of the type text");
  std::string text;
  for (const Json& block : *value) {
    const bool is_text = block.is_object() && block.contains("type") && block["type"] == "text" &&
                         block.contains("text") && block["text"].is_string();
    if (!is_text) fields.Refuse(key, R"( has a block that is no text; allowed: {"type": "text", "text": "…"})");
    if (!text.empty()) text += "\n";
    text += block["text"].get_ref<const std::string&>();
  }
  return text;
}

// One message may be several of ours: results of tools are turns of their own.
void ReadBlocks(const Fields& message, int32_t index, const std::string& role, const jinja::Value& ordered,
                ChatInput* input) {
  static constexpr const char* kKey = "content";
  const Json& blocks = *message.Find(kKey);
  ChatMessage own{role, ""};
  bool has_own = false;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const std::string place = message.Name(fmt::format("content[{}]", i).c_str());
    if (!blocks[i].is_object())
      message.Refuse(kKey, fmt::format("[{}] is {}; allowed: an object", i, JsonText(blocks[i])));
    const Fields block(blocks[i], place);
    const std::string type = block.String("type").value_or("");
    if (type == "text") {
      const std::optional<std::string> text = block.String("text");
      if (!text) block.Refuse("text", " is missing");
      if (!own.content.empty()) own.content += "\n";
      own.content += *text;
      has_own = true;
    } else if (type == "thinking" && role == "assistant") {
      own.reasoning += block.String("thinking").value_or("");
      has_own = true;
    } else if (type == "redacted_thinking" && role == "assistant") {
      // Nobody can read it.
    } else if (type == "tool_use" && role == "assistant") {
      const std::optional<std::string> name = block.String("name");
      if (!name) block.Refuse("name", " is missing");
      if (!block.Object("input")) block.Refuse("input", " is missing; give the arguments, an object");
      const jinja::Value& arguments =
          *ordered.dict().Find(std::string_view(kKey))->list().items[i].dict().Find("input");
      own.tool_calls.push_back({*name, OrderedText(arguments), block.String("id").value_or("")});
      has_own = true;
    } else if (type == "tool_result" && role == "user") {
      ChatMessage result{"tool", JoinedText(block, "content")};
      result.tool_call_id = block.String("tool_use_id").value_or("");
      for (const ChatMessage& before : input->messages) {
        for (const ChatToolCall& call : before.tool_calls) {
          if (call.id == result.tool_call_id) result.name = call.name;
        }
      }
      if (block.Bool("is_error", false)) result.content = "Error: " + result.content;
      input->Add(std::move(result), block.Name("content"), index);
    } else {
      block.Refuse("type", fmt::format(" is {}; allowed: text, tool_use, tool_result, thinking", Quoted(type)));
    }
  }
  if (has_own) input->Add(std::move(own), message.Name(kKey), index);
}

void ReadMessagesTools(const Fields& fields, std::string_view body, ToolUse* use) {
  const auto read = [](const Fields& tool, const jinja::Value& ordered) {
    if (const auto type = tool.String("type"); type && *type != "custom") {
      tool.Refuse("type", fmt::format(" is {}; allowed: custom", Quoted(*type)));
    }
    Tool own = ReadTool(tool, ordered, "input_schema");
    if (own.parameters.empty()) tool.Refuse("input_schema", " is missing; give a JSON schema");
    return own;
  };
  ReadTools(fields, body, read, use);
  const std::optional<Fields> choice = fields.Object("tool_choice");
  if (!choice) return;
  const std::string type = choice->String("type").value_or("");
  const std::string name = choice->String("name").value_or("");
  use->parallel = !choice->Bool("disable_parallel_tool_use", false);
  if (type == "any" || type == "tool") {
    RequireCall(*choice, "type", use);
  } else if (type == "none") {
    use->choice = ToolUse::Choice::kNone;
  } else if (type != "auto") {
    choice->Refuse("type", fmt::format(" is {}; allowed: auto, any, tool, none", Quoted(type)));
  }
  if (type == "tool") {
    AllowTool(*choice, "name", name, use);
    use->parallel = false;
  }
}

ChatInput ReadInput(const Fields& fields, std::string_view body, const ServedModel& model) {
  static constexpr const char* kKey = "messages";
  const ChatTemplate& chat = TemplateOf(model);
  ChatInput input;
  input.variables = ReadVariables(fields, body);
  input.tools.format = CallFormatOf(chat.text(), chat.has_tools());
  const jinja::Value ordered = OrderedBody(body);
  if (const std::string system = JoinedText(fields, "system"); !system.empty()) {
    input.Add({"system", system}, "system", std::nullopt);
  }
  const Json* const list = fields.Find(kKey);
  if (list == nullptr) fields.Refuse(kKey, " is missing; give a list of messages");
  if (!list->is_array() || list->empty()) fields.RefuseValue(kKey, *list, "a list with at least one message");
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& one = (*list)[i];
    if (!one.is_object()) fields.Refuse(kKey, fmt::format("[{}] is {}; allowed: an object", i, JsonText(one)));
    const Fields message(one, fmt::format("messages[{}]", i));
    const std::string role = message.String("role").value_or("");
    if (role != "user" && role != "assistant") {
      message.Refuse("role", fmt::format(" is {}; allowed: user, assistant", Quoted(role)));
    }
    const Json* const content = message.Find("content");
    if (content == nullptr) message.Refuse("content", " is missing");
    if (content->is_string()) {
      input.Add({role, content->get<std::string>()}, message.Name("content"), static_cast<int32_t>(i));
    } else if (content->is_array() && !content->empty()) {
      const jinja::Value& own = ordered.dict().Find(std::string_view(kKey))->list().items[i];
      ReadBlocks(message, static_cast<int32_t>(i), role, own, &input);
    } else {
      message.RefuseValue("content", *content, "a text or a list of at least one block");
    }
  }
  if (const std::optional<Fields> thinking = fields.Object("thinking")) {
    const std::string type = thinking->String("type").value_or("");
    if (type != "enabled" && type != "disabled" && type != "adaptive") {
      thinking->Refuse("type", fmt::format(" is {}; allowed: enabled, disabled, adaptive", Quoted(type)));
    }
    if (type != "adaptive") input.variables.enable_thinking = type == "enabled";
  }
  ReadMessagesTools(fields, body, &input.tools);
  if (input.tools.active()) input.variables.tools = ToolsText(input.tools.tools);
  return input;
}

// `output_config.format`, or `output_format` as the API had it first.
std::optional<AnswerForm> ReadForm(const Fields& fields, std::string_view body, const ServedModel& model) {
  const std::optional<Fields> config = fields.Object("output_config"), first = fields.Object("output_format");
  const std::optional<Fields> format = config ? config->Object("format") : std::nullopt;
  if (format && first) fields.Refuse("output_format", " and output_config.format are both there; give one");
  if (format) return ReadFormat(*format, *format, {"output_config", "format"}, body, model);
  return first ? ReadFormat(*first, *first, {"output_format"}, body, model) : std::nullopt;
}

class MessagesReply : public SingleReply {
 public:
  MessagesReply(std::shared_ptr<const ServedModel> model, GenerationRequest request, std::shared_ptr<Exchange> exchange,
                std::shared_ptr<std::atomic<bool>> cancelled)
      : SingleReply(std::move(model), std::move(request), std::move(exchange), std::move(cancelled)),
        id_(NewId("msg_")) {}

 protected:
  void BeginStream() override {
    Json message = Frame();
    message["content"] = Json::array();
    message["usage"] = {{"input_tokens", request().prompts.front().tokens.size()}, {"output_tokens", 0}};
    SendEvent("message_start", {{"type", "message_start"}, {"message", std::move(message)}});
  }

  void StreamPiece(const ReplyPiece& piece) override {
    if (piece.kind != ReplyPiece::Kind::kArguments &&
        (!open_ || kind_ != piece.kind || piece.kind == ReplyPiece::Kind::kCall)) {
      CloseBlock();
      Json block;
      switch (piece.kind) {
        case ReplyPiece::Kind::kReasoning: block = {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}}; break;
        case ReplyPiece::Kind::kCall:
          block = {{"type", "tool_use"}, {"id", piece.call_id}, {"name", piece.text}, {"input", Json::object()}};
          break;
        default: block = {{"type", "text"}, {"text", ""}};
      }
      SendEvent("content_block_start",
                {{"type", "content_block_start"}, {"index", index_}, {"content_block", std::move(block)}});
      open_ = true;
      kind_ = piece.kind;
    }
    switch (piece.kind) {
      case ReplyPiece::Kind::kReasoning: Delta({{"type", "thinking_delta"}, {"thinking", piece.text}}); break;
      case ReplyPiece::Kind::kContent: Delta({{"type", "text_delta"}, {"text", piece.text}}); break;
      case ReplyPiece::Kind::kArguments: Delta({{"type", "input_json_delta"}, {"partial_json", piece.text}}); break;
      case ReplyPiece::Kind::kCall: break;
    }
  }

  void EndStream(const GenerateResult& result) override {
    CloseBlock();
    SendEvent("message_delta", {{"type", "message_delta"},
                                {"delta", StopJson(result, calls() > 0)},
                                {"usage", {{"output_tokens", result.tokens.size()}}},
                                {"phsa", Measurements()}});
    SendEvent("message_stop", {{"type", "message_stop"}});
  }

  void StreamError(const HttpError& error) override { SendEvent("error", Json::parse(MessagesError(error).body)); }

  Json Body(const Reply& reply, const GenerateResult& result) override {
    Json body = Frame();
    Json& content = body["content"] = Json::array();
    if (!reply.reasoning.empty()) {
      content.push_back({{"type", "thinking"}, {"thinking", reply.reasoning}, {"signature", ""}});
    }
    if (!reply.content.empty()) content.push_back({{"type", "text"}, {"text", reply.content}});
    for (const ToolCall& call : reply.calls) {
      // One that was cut short has no object.
      Json input = Json::parse(call.arguments, nullptr, false);
      if (!input.is_object()) input = Json::object();
      content.push_back({{"type", "tool_use"}, {"id", call.id}, {"name", call.name}, {"input", std::move(input)}});
    }
    body.update(StopJson(result, !reply.calls.empty()));
    body["usage"] = {{"input_tokens", result.prompt_tokens - result.reused_tokens},
                     {"cache_read_input_tokens", result.reused_tokens},
                     {"cache_creation_input_tokens", 0},
                     {"output_tokens", result.tokens.size()}};
    body["phsa"] = Measurements();
    return body;
  }

  HttpResponse Refusal(const HttpError& error) const override { return MessagesError(error); }

 private:
  Json Frame() const {
    return {{"id", id_},           {"type", "message"},      {"role", "assistant"},
            {"model", model().id}, {"stop_reason", nullptr}, {"stop_sequence", nullptr}};
  }
  void Delta(Json delta) {
    SendEvent("content_block_delta", {{"type", "content_block_delta"}, {"index", index_}, {"delta", std::move(delta)}});
  }
  void CloseBlock() {
    if (!open_) return;
    SendEvent("content_block_stop", {{"type", "content_block_stop"}, {"index", index_}});
    ++index_;
    open_ = false;
  }
  Json StopJson(const GenerateResult& result, bool called) const {
    const std::vector<std::string>& stops = request().options.stops;
    const bool stopped = result.reason == StopReason::kStopString;
    const bool is_long = result.reason == StopReason::kMaxTokens || result.reason == StopReason::kContextFull;
    // Which of several it was is not known.
    return {{"stop_reason", is_long   ? "max_tokens"
                            : called  ? "tool_use"
                            : stopped ? "stop_sequence"
                                      : "end_turn"},
            {"stop_sequence", stopped && stops.size() == 1 ? Json(stops.front()) : Json()}};
  }

  const std::string id_;
  int32_t index_ = 0;
  bool open_ = false;
  ReplyPiece::Kind kind_ = ReplyPiece::Kind::kContent;
};

}  // namespace

GenerationRequest ParseMessages(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  GenerationRequest request = ReadCommon(fields, model, "stop_sequences");
  request.n = 1;
  const std::optional<int32_t> tokens = fields.Int("max_tokens", 1, kMaxTokens);
  if (!tokens) fields.Refuse("max_tokens", " is missing");
  request.options.max_tokens = *tokens;
  SetChat(fields, "messages", ReadInput(fields, body, model), ReadForm(fields, body, model), model, &request);
  return request;
}

size_t CountMessages(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  return ChatTokens(fields, ReadInput(fields, body, model), model, true).size();
}

std::shared_ptr<SingleReply> MakeMessagesReply(std::shared_ptr<const ServedModel> model, GenerationRequest request,
                                               std::shared_ptr<Exchange> exchange,
                                               std::shared_ptr<std::atomic<bool>> cancelled) {
  return std::make_shared<MessagesReply>(std::move(model), std::move(request), std::move(exchange),
                                         std::move(cancelled));
}

}  // namespace phsa::server
