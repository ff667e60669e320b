#include "server/responses_format.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <iterator>
#include <string>
#include <utility>

#include <fmt/format.h>

namespace freshet::server {
namespace {

constexpr const char* kCompleted = "completed";

// How a response ends, by the reason for which its text does.
const char* status_of(FinishReason finish) {
  switch (finish) {
    case FinishReason::kStop:
      return kCompleted;
    case FinishReason::kLength:
      return "incomplete";
    case FinishReason::kCancelled:
      return "cancelled";
    default:
      return "in_progress";
  }
}

int64_t seconds_since_1970() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

bool is_blank(std::string_view text) {
  return std::ranges::all_of(text, [](unsigned char c) { return std::isspace(c) != 0; });
}

class ResponseFormat final : public AnswerFormat {
 public:
  ResponseFormat(FormatContext context, const ResponseRequest& request, ToolDialect dialect)
      : context_(std::move(context)),
        repeated_(request.repeated),
        parse_tools_(!request.chat.tools.is_null() &&
                     request.chat.tool_choice != ChatRequest::ToolChoice::kNone),
        parallel_(request.chat.parallel_tool_calls),
        parser_(dialect, context_.id) {}

  json::Value whole(const AnswerState& state) override {
    const Choice& choice = state.choices.front();
    std::string events;  // of a stream that nobody gets
    take(choice.text, choice.logprobs, choice.finish, events);
    return response(status_of(choice.finish), &state.usage);
  }

  void stream_begin(const AnswerState&, std::string& out) override {
    append("response.created", with_response("in_progress", nullptr), out);
    append("response.in_progress", with_response("in_progress", nullptr), out);
  }

  void stream_delta(const AnswerState&, size_t, const Delta& delta, std::string& out) override {
    take(delta.text, delta.logprobs, delta.finish, out);
  }

  void stream_end(const AnswerState& state, std::string& out) override {
    const char* const status = status_of(state.choices.front().finish);
    const char* const type = status == kCompleted ? "response.completed" : "response.incomplete";
    append(type, with_response(status, &state.usage), out);
  }

  void stream_error(const ApiError& error, std::string& out) override {
    json::Object what;
    what["code"] = error.status < 500 ? "invalid_prompt" : "server_error";
    what["message"] = error.message;
    json::Object failed = response("failed", nullptr);
    failed["error"] = std::move(what);
    json::Object event;
    event["response"] = std::move(failed);
    append("response.failed", std::move(event), out);
  }

 private:
  // Generated text becomes items of the output, and events about them.
  void take(const std::string& text, const std::vector<std::vector<TokenLogprob>>& logprobs,
            FinishReason finish, std::string& out) {
    const bool last = finish != FinishReason::kNone;
    ToolParser::Step step{text, {}};
    if (parse_tools_) {
      step = parser_.feed(text);
      if (last) {
        ToolParser::Step rest = parser_.finish();
        step.content += rest.content;
        std::move(rest.calls.begin(), rest.calls.end(), std::back_inserter(step.calls));
      }
    }
    json::Array entries = logprob_entries(logprobs, context_.token_bytes);
    std::move(entries.begin(), entries.end(), std::back_inserter(held_logprobs_));
    add_text(step.content, out);
    for (const ToolCall& call : step.calls) {
      close_message(kCompleted, out);
      held_logprobs_.clear();
      if (parallel_ || calls_++ == 0) add_call(call, out);
    }
    if (!last) return;
    if (output_.empty() && !open_) {  // an answer without a word
      open_message(out);
      add_text("", out);
    }
    close_message(finish == FinishReason::kStop ? kCompleted : "incomplete", out);
  }

  // White space around calls is no message.
  void add_text(std::string_view piece, std::string& out) {
    held_text_ += piece;
    if (held_text_.empty() || (!open_ && parse_tools_ && is_blank(held_text_))) return;
    if (!open_) open_message(out);
    json::Object event = place();
    event["content_index"] = 0;
    event["delta"] = held_text_;
    event["logprobs"] = held_logprobs_;
    append("response.output_text.delta", std::move(event), out);
    text_ += held_text_;
    std::move(held_logprobs_.begin(), held_logprobs_.end(), std::back_inserter(logprobs_));
    held_text_.clear();
    held_logprobs_.clear();
  }

  void open_message(std::string& out) {
    open_ = true;
    text_.clear();
    logprobs_.clear();
    item_id_ = fmt::format("msg_{}_{}", context_.id, output_.size());
    add_item(message("in_progress", {}), out);
    json::Object event = place();
    event["content_index"] = 0;
    event["part"] = text_part();
    append("response.content_part.added", std::move(event), out);
  }

  void close_message(const char* status, std::string& out) {
    if (!open_) return;
    std::move(held_logprobs_.begin(), held_logprobs_.end(), std::back_inserter(logprobs_));
    held_logprobs_.clear();
    json::Object done = place();
    done["content_index"] = 0;
    json::Object part_done = done;
    done["text"] = text_;
    done["logprobs"] = logprobs_;
    append("response.output_text.done", std::move(done), out);
    part_done["part"] = text_part();
    append("response.content_part.done", std::move(part_done), out);
    json::Array content;
    content.emplace_back(text_part());
    finish_item(message(status, std::move(content)), out);
    open_ = false;
  }

  void add_call(const ToolCall& call, std::string& out) {
    item_id_ = fmt::format("fc_{}_{}", context_.id, output_.size());
    json::Object item;
    item["id"] = item_id_;
    item["type"] = "function_call";
    item["status"] = "in_progress";
    item["call_id"] = call.id;
    item["name"] = call.name;
    item["arguments"] = "";
    add_item(item, out);
    json::Object delta = place();
    delta["delta"] = call.arguments;
    append("response.function_call_arguments.delta", std::move(delta), out);
    json::Object done = place();
    done["name"] = call.name;
    done["arguments"] = call.arguments;
    append("response.function_call_arguments.done", std::move(done), out);
    item["status"] = kCompleted;
    item["arguments"] = call.arguments;
    finish_item(std::move(item), out);
  }

  void add_item(json::Object item, std::string& out) {
    json::Object event;
    event["output_index"] = output_.size();
    event["item"] = std::move(item);
    append("response.output_item.added", std::move(event), out);
  }

  void finish_item(json::Object item, std::string& out) {
    json::Object event;
    event["output_index"] = output_.size();
    event["item"] = item;
    append("response.output_item.done", std::move(event), out);
    output_.emplace_back(std::move(item));
  }

  json::Object place() const {
    json::Object event;
    event["item_id"] = item_id_;
    event["output_index"] = output_.size();
    return event;
  }

  json::Object message(const char* status, json::Array content) const {
    json::Object item;
    item["id"] = item_id_;
    item["type"] = "message";
    item["status"] = status;
    item["role"] = "assistant";
    item["content"] = std::move(content);
    return item;
  }

  json::Object text_part() const {
    json::Object part;
    part["type"] = "output_text";
    part["text"] = text_;
    part["annotations"] = json::Array();
    part["logprobs"] = logprobs_;
    return part;
  }

  json::Object response(const char* status, const Usage* usage) const {
    json::Object o;
    o["id"] = context_.id;
    o["object"] = "response";
    o["created_at"] = context_.created;
    o["completed_at"] = status == kCompleted ? json::Value(seconds_since_1970()) : json::Value();
    o["status"] = status;
    o["model"] = context_.model;
    o["output"] = output_;
    o["error"] = nullptr;
    o["incomplete_details"] = nullptr;
    if (status == std::string_view("incomplete")) {
      json::Object details;
      details["reason"] = "max_output_tokens";
      o["incomplete_details"] = std::move(details);
    }
    for (const auto& [name, value] : repeated_) o[name] = value;
    o["usage"] = usage != nullptr ? response_usage(*usage) : json::Value();
    return o;
  }

  json::Object with_response(const char* status, const Usage* usage) const {
    json::Object event;
    event["response"] = response(status, usage);
    return event;
  }

  static json::Value response_usage(const Usage& usage) {
    json::Object read;
    read["cached_tokens"] = usage.cached_tokens;
    json::Object written;
    written["reasoning_tokens"] = 0;
    json::Object o;
    o["input_tokens"] = usage.prompt_tokens;
    o["input_tokens_details"] = std::move(read);
    o["output_tokens"] = usage.completion_tokens;
    o["output_tokens_details"] = std::move(written);
    o["total_tokens"] = usage.prompt_tokens + usage.completion_tokens;
    return o;
  }

  void append(const char* type, json::Object fields, std::string& out) {
    json::Object event;
    event["type"] = type;
    event["sequence_number"] = events_++;
    for (const auto& [name, value] : fields) event[name] = value;
    out += fmt::format("event: {}\n", type);
    append_event(json::Value(std::move(event)), out);
  }

  const FormatContext context_;
  const json::Object repeated_;
  const bool parse_tools_;
  const bool parallel_;
  ToolParser parser_;
  int64_t events_ = 0;
  int calls_ = 0;
  json::Array output_;  // finished items
  // The item that is being written.
  std::string item_id_;
  bool open_ = false;  // and is a message, of this text
  std::string text_;
  json::Array logprobs_;
  std::string held_text_;  // what no event has told of yet
  json::Array held_logprobs_;
};

}  // namespace

std::unique_ptr<AnswerFormat> make_response_format(FormatContext context,
                                                   const ResponseRequest& request,
                                                   ToolDialect dialect) {
  return std::make_unique<ResponseFormat>(std::move(context), request, dialect);
}

}  // namespace freshet::server
