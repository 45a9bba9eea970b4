#include "server/responses_api.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "server/answers.h"
#include "server/chat_input.h"
#include "server/fields.h"

namespace phsa::server {
namespace {

constexpr int32_t kDefaultTokens = 1024;

// A text, or parts that have one.
std::string PartsText(const Fields& fields, const char* key) {
  static constexpr std::array<std::string_view, 5> kTypes = {"input_text", "output_text", "text", "reasoning_text",
                                                             "summary_text"};
  const Json* const value = fields.Find(key);
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>();
  if (!value->is_array()) fields.RefuseValue(key, *value, "a text, or a list of parts with a text");
  std::string text;
  for (const Json& part : *value) {
    const bool typed = part.is_object() && part.contains("type") && part["type"].is_string();
    const bool is_text =
        typed && part.contains("text") && part["text"].is_string() &&
        std::find(kTypes.begin(), kTypes.end(), part["type"].get_ref<const std::string&>()) != kTypes.end();
    if (!is_text) fields.Refuse(key, R"( has a part that is no text; allowed: {"type": "input_text", "text": "…"})");
    text += part["text"].get_ref<const std::string&>();
  }
  return text;
}

// Thoughts, words and calls of one turn are items of their own here.
class InputItems {
 public:
  explicit InputItems(ChatInput* input) : input_(input) {}

  void Read(const Fields& item, int32_t index) {
    static constexpr std::array<std::string_view, 4> kRoles = {"system", "developer", "user", "assistant"};
    const std::optional<std::string> role = item.String("role");
    const std::string type = item.String("type").value_or(role ? "message" : "");
    if (type == "message") {
      if (!role || std::find(kRoles.begin(), kRoles.end(), *role) == kRoles.end()) {
        item.Refuse("role",
                    fmt::format(" is {}; allowed: {}", role ? Quoted(*role) : "missing", fmt::join(kRoles, ", ")));
      }
      const std::string text = PartsText(item, "content");
      if (*role == "assistant") {
        ChatMessage& turn = Assistant(true, item, index);
        turn.content += text;
        said_ = true;
      } else {
        input_->Add({*role == "developer" ? "system" : *role, text}, item.Name("content"), index);
        open_ = false;
      }
    } else if (type == "function_call") {
      ChatToolCall call;
      call.name = Needed(item, "name");
      call.id = Needed(item, "call_id");
      call.arguments = CallArguments(item.String("arguments").value_or(""));
      Assistant(false, item, index).tool_calls.push_back(std::move(call));
    } else if (type == "function_call_output") {
      ChatMessage result{"tool", PartsText(item, "output")};
      result.tool_call_id = Needed(item, "call_id");
      for (const ChatMessage& message : input_->messages) {
        for (const ChatToolCall& call : message.tool_calls) {
          if (call.id == result.tool_call_id) result.name = call.name;
        }
      }
      input_->Add(std::move(result), item.Name("output"), index);
      open_ = false;
    } else if (type == "reasoning") {
      const std::string thought = PartsText(item, "content");
      Assistant(false, item, index).reasoning += thought;
    } else {
      item.Refuse("type", fmt::format(" is {}; allowed: message, function_call, function_call_output, reasoning",
                                      Quoted(type)));
    }
  }

 private:
  static std::string Needed(const Fields& item, const char* key) {
    const std::optional<std::string> value = item.String(key);
    if (!value) item.Refuse(key, " is missing");
    return *value;
  }
  // The assistant's turn that is open, or a new one. Two texts are two turns.
  ChatMessage& Assistant(bool text, const Fields& item, int32_t index) {
    if (!open_ || (text && said_)) {
      input_->Add({"assistant", ""}, item.Name("content"), index);
      said_ = false;
    }
    open_ = true;
    return input_->messages.back();
  }

  ChatInput* const input_;
  bool open_ = false, said_ = false;
};

ChatInput ReadInput(const Fields& fields, std::string_view body, const ServedModel& model) {
  static constexpr const char* kKey = "input";
  const ChatTemplate& chat = TemplateOf(model);
  ChatInput input;
  input.variables = ReadVariables(fields, body);
  input.tools.format = CallFormatOf(chat.text(), chat.has_tools());
  if (const auto instructions = fields.String("instructions"); instructions && !instructions->empty()) {
    input.Add({"system", *instructions}, "instructions", std::nullopt);
  }
  const Json* const value = fields.Find(kKey);
  if (value == nullptr) fields.Refuse(kKey, " is missing; give a text or a list of items");
  if (value->is_string()) {
    input.Add({"user", value->get<std::string>()}, kKey, std::nullopt);
  } else if (value->is_array() && !value->empty()) {
    InputItems items(&input);
    for (size_t i = 0; i < value->size(); ++i) {
      const Json& one = (*value)[i];
      if (!one.is_object()) fields.Refuse(kKey, fmt::format("[{}] is {}; allowed: an object", i, JsonText(one)));
      items.Read(Fields(one, fmt::format("input[{}]", i)), static_cast<int32_t>(i));
    }
  } else {
    fields.RefuseValue(kKey, *value, "a text or a list of items");
  }
  const auto read = [](const Fields& tool, const jinja::Value& ordered) {
    const std::string type = tool.String("type").value_or("");
    if (type != "function") tool.Refuse("type", fmt::format(" is {}; allowed: function", Quoted(type)));
    return ReadTool(tool, ordered, "parameters");
  };
  ReadTools(fields, body, read, &input.tools);
  ReadToolChoice(fields, &input.tools);
  if (input.tools.active()) input.variables.tools = ToolsText(input.tools.tools);
  return input;
}

class ResponsesReply : public SingleReply {
 public:
  ResponsesReply(std::shared_ptr<const ServedModel> model, ResponsesRequest request, std::shared_ptr<Exchange> exchange,
                 std::shared_ptr<std::atomic<bool>> cancelled)
      : SingleReply(std::move(model), std::move(request.generation), std::move(exchange), std::move(cancelled)),
        id_(NewId("resp_")),
        echo_(std::move(request.echo)) {}

 protected:
  void BeginStream() override {
    const Json response = Frame("in_progress", Json::array());
    Event("response.created", {{"response", response}});
    Event("response.in_progress", {{"response", response}});
  }

  void StreamPiece(const ReplyPiece& piece) override {
    const bool begins = piece.kind == ReplyPiece::Kind::kCall ||
                        (piece.kind != ReplyPiece::Kind::kArguments && (!open_ || kind_ != piece.kind));
    if (begins) {
      CloseItem("completed");
      OpenItem(piece);
    }
    if (piece.kind == ReplyPiece::Kind::kCall) return;
    text_ += piece.text;
    Json delta = {{"item_id", item_["id"]}, {"output_index", output_.size()}, {"delta", piece.text}};
    if (piece.kind == ReplyPiece::Kind::kArguments) {
      Event("response.function_call_arguments.delta", std::move(delta));
      return;
    }
    delta["content_index"] = 0;
    if (piece.kind == ReplyPiece::Kind::kContent) delta["logprobs"] = Json::array();
    Event(piece.kind == ReplyPiece::Kind::kContent ? "response.output_text.delta" : "response.reasoning_text.delta",
          std::move(delta));
  }

  void EndStream(const GenerateResult& result) override {
    const bool whole = IsWhole(result);
    CloseItem(whole ? "completed" : "incomplete");
    Event(whole ? "response.completed" : "response.incomplete", {{"response", Ended(result, output_)}});
  }

  void StreamError(const HttpError& error) override {
    const Json own = ErrorJson(error)["error"];
    Event("error", {{"code", own["code"].is_null() ? own["type"] : own["code"]},
                    {"message", own["message"]},
                    {"param", own["param"]}});
  }

  Json Body(const Reply& reply, const GenerateResult& result) override {
    Json output = Json::array();
    if (!reply.reasoning.empty()) output.push_back(Reasoning(reply.reasoning, "completed"));
    if (!reply.content.empty()) output.push_back(Message(reply.content, "completed"));
    for (const ToolCall& call : reply.calls) output.push_back(Call(call.id, call.name, call.arguments, "completed"));
    if (!IsWhole(result) && !output.empty()) output.back()["status"] = "incomplete";
    return Ended(result, std::move(output));
  }

  HttpResponse Refusal(const HttpError& error) const override { return ErrorResponse(error); }

 private:
  static bool IsWhole(const GenerateResult& result) {
    return result.reason != StopReason::kMaxTokens && result.reason != StopReason::kContextFull;
  }
  static Json Reasoning(const std::string& text, const char* status) {
    return {{"type", "reasoning"},
            {"id", NewId("rs_")},
            {"summary", Json::array()},
            {"content", Json::array({{{"type", "reasoning_text"}, {"text", text}}})},
            {"status", status}};
  }
  static Json TextPart(const std::string& text) {
    return {{"type", "output_text"}, {"text", text}, {"annotations", Json::array()}, {"logprobs", Json::array()}};
  }
  static Json Message(const std::string& text, const char* status) {
    return {{"type", "message"},
            {"id", NewId("msg_")},
            {"role", "assistant"},
            {"content", Json::array({TextPart(text)})},
            {"status", status}};
  }
  static Json Call(const std::string& call_id, const std::string& name, const std::string& arguments,
                   const char* status) {
    return {{"type", "function_call"}, {"id", NewId("fc_")}, {"call_id", call_id}, {"name", name},
            {"arguments", arguments},  {"status", status}};
  }

  Json Frame(const char* status, Json output) const {
    Json response = echo_;
    response.update({{"id", id_},
                     {"object", "response"},
                     {"created_at", created()},
                     {"model", model().id},
                     {"status", status},
                     {"error", nullptr},
                     {"incomplete_details", nullptr},
                     {"output", std::move(output)},
                     {"usage", nullptr}});
    return response;
  }
  Json Ended(const GenerateResult& result, Json output) const {
    const bool whole = IsWhole(result);
    Json response = Frame(whole ? "completed" : "incomplete", std::move(output));
    if (!whole) response["incomplete_details"] = {{"reason", "max_output_tokens"}};
    response["usage"] = {{"input_tokens", result.prompt_tokens},
                         {"input_tokens_details", {{"cached_tokens", result.reused_tokens}}},
                         {"output_tokens", result.tokens.size()},
                         {"output_tokens_details", {{"reasoning_tokens", 0}}},
                         {"total_tokens", static_cast<size_t>(result.prompt_tokens) + result.tokens.size()}};
    response["phsa"] = Measurements();
    return response;
  }

  void Event(const char* name, Json data) {
    data["type"] = name;
    data["sequence_number"] = sequence_++;
    SendEvent(name, data);
  }

  void OpenItem(const ReplyPiece& piece) {
    kind_ = piece.kind;
    open_ = true;
    text_.clear();
    if (kind_ == ReplyPiece::Kind::kCall) {
      item_ = Call(piece.call_id, piece.text, "", "in_progress");
    } else {
      item_ = kind_ == ReplyPiece::Kind::kContent ? Message("", "in_progress") : Reasoning("", "in_progress");
      item_["content"] = Json::array();
    }
    Event("response.output_item.added", {{"output_index", output_.size()}, {"item", item_}});
    if (kind_ == ReplyPiece::Kind::kContent) {
      Event("response.content_part.added",
            {{"item_id", item_["id"]}, {"output_index", output_.size()}, {"content_index", 0}, {"part", TextPart("")}});
    }
  }

  void CloseItem(const char* status) {
    if (!open_) return;
    open_ = false;
    item_["status"] = status;
    Json done = {{"item_id", item_["id"]}, {"output_index", output_.size()}};
    if (kind_ == ReplyPiece::Kind::kCall) {
      item_["arguments"] = text_;
      done["arguments"] = text_;
      done["name"] = item_["name"];
      Event("response.function_call_arguments.done", std::move(done));
    } else {
      done["content_index"] = 0;
      Json part_done = done;
      done["text"] = text_;
      if (kind_ == ReplyPiece::Kind::kContent) {
        done["logprobs"] = Json::array();
        Event("response.output_text.done", std::move(done));
        item_["content"].push_back(TextPart(text_));
        part_done["part"] = TextPart(text_);
        Event("response.content_part.done", std::move(part_done));
      } else {
        Event("response.reasoning_text.done", std::move(done));
        item_["content"].push_back({{"type", "reasoning_text"}, {"text", text_}});
      }
    }
    Event("response.output_item.done", {{"output_index", output_.size()}, {"item", item_}});
    output_.push_back(std::move(item_));
  }

  const std::string id_;
  const Json echo_;
  Json output_ = Json::array();
  Json item_;
  std::string text_;
  bool open_ = false;
  ReplyPiece::Kind kind_ = ReplyPiece::Kind::kContent;
  int64_t sequence_ = 0;
};

}  // namespace

ResponsesRequest ParseResponses(std::string_view body, const ServedModel& model) {
  const Json json = ParseBody(body);
  const Fields fields(json, "");
  ResponsesRequest request{ReadCommon(fields, model), {}};
  request.generation.n = 1;
  request.generation.options.max_tokens =
      fields.Int("max_output_tokens", 1, kMaxTokens).value_or(std::max(model.chat_tokens, kDefaultTokens));
  if (fields.Find("previous_response_id") != nullptr) {
    fields.Refuse("previous_response_id", " is given, and nothing is stored here; send the conversation as input");
  }
  const std::optional<Fields> text = fields.Object("text");
  const std::optional<Fields> format = text ? text->Object("format") : std::nullopt;
  const std::optional<AnswerForm> form =
      format ? ReadFormat(*format, *format, {"text", "format"}, body, model) : std::nullopt;
  SetChat(fields, "input", ReadInput(fields, body, model), form, model, &request.generation);
  const auto told = [&](const char* key, Json otherwise) {
    const Json* const value = fields.Find(key);
    request.echo[key] = value != nullptr ? *value : std::move(otherwise);
  };
  const SamplerSettings& sampler = request.generation.options.sampler;
  told("instructions", nullptr);
  told("max_output_tokens", nullptr);
  told("metadata", Json::object());
  told("parallel_tool_calls", true);
  told("temperature", sampler.temperature);
  told("text", {{"format", {{"type", "text"}}}});
  told("tool_choice", "auto");
  told("tools", Json::array());
  told("top_p", sampler.top_p);
  told("reasoning", {{"effort", nullptr}, {"summary", nullptr}});
  told("truncation", "disabled");
  request.echo["previous_response_id"] = nullptr;
  request.echo["store"] = false;
  return request;
}

std::shared_ptr<SingleReply> MakeResponsesReply(std::shared_ptr<const ServedModel> model, ResponsesRequest request,
                                                std::shared_ptr<Exchange> exchange,
                                                std::shared_ptr<std::atomic<bool>> cancelled) {
  return std::make_shared<ResponsesReply>(std::move(model), std::move(request), std::move(exchange),
                                          std::move(cancelled));
}

}  // namespace phsa::server
