#include "server/responses_format.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

namespace freshet::server {
namespace {

constexpr const char* kCompleted = "completed";

// The status of a response with this finish reason.
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
  enum class Open { kNothing, kReasoning, kMessage };

 public:
  ResponseFormat(FormatContext context, const ResponseRequest& request, ToolDialect dialect)
      : context_(std::move(context)),
        repeated_(request.repeated),
        parse_tools_(!request.chat.tools.is_null() &&
                     request.chat.tool_choice != ChatRequest::ToolChoice::kNone),
        parallel_(request.chat.parallel_tool_calls),
        include_reasoning_(request.chat.include_reasoning),
        reasoning_(context_.reasoning),
        parser_(dialect, context_.id) {}

  json::Value whole(const AnswerState& state) override {
    const Choice& choice = state.choices.front();
    std::string events;  // discarded
    take(choice.text, choice.logprobs, choice.finish, events);
    return response(status_of(choice.finish), &state);
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
    append(type, with_response(status, &state), out);
  }

  void stream_error(const ApiError& error, std::string& out) override {
    json::Object what;
    what["code"] = error.status < 500 ? "invalid_prompt" : "server_error";
    what["message"] = error.message;
    json::Object failed = response("failed", nullptr);
    failed["error"] = std::move(what);
    json::Object event;
    event["response"] = std::move(failed);
    append("response.failed", event, out);
  }

 private:
  // Turns generated text into output items and their events.
  void take(const std::string& text, const std::vector<std::vector<TokenLogprob>>& logprobs,
            FinishReason finish, std::string& out) {
    const bool last = finish != FinishReason::kNone;
    const std::string content = take_thought(text, last, out);
    ToolParser::Step step{content, {}};
    if (parse_tools_) {
      step = parser_.feed(content);
      if (last) {
        ToolParser::Step rest = parser_.finish();
        step.content += rest.content;
        std::move(rest.calls.begin(), rest.calls.end(), std::back_inserter(step.calls));
      }
    }
    if (!reasoning_ || !reasoning_->inside()) {
      json::Array entries = logprob_entries(logprobs, context_.token_bytes);
      std::move(entries.begin(), entries.end(), std::back_inserter(held_logprobs_));
    }
    add_text(step.content, out);
    for (const ToolCall& call : step.calls) {
      close_item(kCompleted, out);
      held_logprobs_.clear();
      if (parallel_ || calls_++ == 0) add_call(call, out);
    }
    if (!last) return;
    if (output_.empty() && open_ == Open::kNothing) {  // an empty answer
      open_item(Open::kMessage, out);
      add_text("", out);
    }
    close_item(finish == FinishReason::kStop ? kCompleted : "incomplete", out);
  }

  // Takes the reasoning out of the text and returns the rest.
  std::string take_thought(const std::string& text, bool last, std::string& out) {
    if (!reasoning_) return text;
    ReasoningParser::Step step = reasoning_->feed(text);
    if (last) {
      ReasoningParser::Step rest = reasoning_->finish();
      step.reasoning += rest.reasoning;
      step.content += rest.content;
    }
    if (!step.reasoning.empty() && include_reasoning_) {
      if (open_ == Open::kNothing) open_item(Open::kReasoning, out);
      json::Object event = place();
      event["content_index"] = 0;
      event["delta"] = step.reasoning;
      append("response.reasoning_text.delta", event, out);
      text_ += step.reasoning;
    }
    if (open_ == Open::kReasoning && !reasoning_->inside()) close_item(kCompleted, out);
    return step.content;
  }

  // White space around calls does not make a message.
  void add_text(std::string_view piece, std::string& out) {
    held_text_ += piece;
    const bool open = open_ == Open::kMessage;
    if (held_text_.empty() || (!open && parse_tools_ && is_blank(held_text_))) return;
    if (!open) open_item(Open::kMessage, out);
    json::Object event = place();
    event["content_index"] = 0;
    event["delta"] = held_text_;
    event["logprobs"] = held_logprobs_;
    append("response.output_text.delta", event, out);
    text_ += held_text_;
    std::move(held_logprobs_.begin(), held_logprobs_.end(), std::back_inserter(logprobs_));
    held_text_.clear();
    held_logprobs_.clear();
  }

  void open_item(Open what, std::string& out) {
    open_ = what;
    text_.clear();
    logprobs_.clear();
    item_id_ =
        fmt::format("{}_{}_{}", what == Open::kMessage ? "msg" : "rs", context_.id, output_.size());
    add_item(open_item_json("in_progress", {}), out);
    json::Object event = place();
    event["content_index"] = 0;
    event["part"] = part();
    append("response.content_part.added", event, out);
  }

  void close_item(const char* status, std::string& out) {
    if (open_ == Open::kNothing) return;
    const bool is_message = open_ == Open::kMessage;
    json::Object done = place();
    done["content_index"] = 0;
    json::Object part_done = done;
    done["text"] = text_;
    if (is_message) {
      std::move(held_logprobs_.begin(), held_logprobs_.end(), std::back_inserter(logprobs_));
      held_logprobs_.clear();
      done["logprobs"] = logprobs_;
    }
    append(is_message ? "response.output_text.done" : "response.reasoning_text.done", done, out);
    part_done["part"] = part();
    append("response.content_part.done", part_done, out);
    json::Array content;
    content.emplace_back(part());
    finish_item(open_item_json(status, std::move(content)), out);
    open_ = Open::kNothing;
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
    append("response.function_call_arguments.delta", delta, out);
    json::Object done = place();
    done["name"] = call.name;
    done["arguments"] = call.arguments;
    append("response.function_call_arguments.done", done, out);
    item["status"] = kCompleted;
    item["arguments"] = call.arguments;
    finish_item(std::move(item), out);
  }

  void add_item(json::Object item, std::string& out) {
    json::Object event;
    event["output_index"] = output_.size();
    event["item"] = std::move(item);
    append("response.output_item.added", event, out);
  }

  void finish_item(json::Object item, std::string& out) {
    json::Object event;
    event["output_index"] = output_.size();
    event["item"] = item;
    append("response.output_item.done", event, out);
    output_.emplace_back(std::move(item));
  }

  json::Object place() const {
    json::Object event;
    event["item_id"] = item_id_;
    event["output_index"] = output_.size();
    return event;
  }

  json::Object open_item_json(const char* status, json::Array content) const {
    json::Object item;
    item["id"] = item_id_;
    item["type"] = open_ == Open::kMessage ? "message" : "reasoning";
    item["status"] = status;
    if (open_ == Open::kMessage) item["role"] = "assistant";
    if (open_ == Open::kReasoning) item["summary"] = json::Array();
    item["content"] = std::move(content);
    return item;
  }

  json::Object part() const {
    json::Object part;
    part["type"] = open_ == Open::kMessage ? "output_text" : "reasoning_text";
    part["text"] = text_;
    if (open_ != Open::kMessage) return part;
    part["annotations"] = json::Array();
    part["logprobs"] = logprobs_;
    return part;
  }

  json::Object response(const char* status, const AnswerState* state) const {
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
    o["usage"] = state != nullptr ? usage_of(*state) : json::Value();
    return o;
  }

  json::Object with_response(const char* status, const AnswerState* state) const {
    json::Object event;
    event["response"] = response(status, state);
    return event;
  }

  // The number of generated tokens up to the closing tag of the reasoning.
  int64_t reasoning_tokens(const std::vector<int32_t>& ids) const {
    if (!context_.reasoning) return 0;
    ReasoningParser parser = *context_.reasoning;
    int64_t tokens = 0;
    int64_t of_thought = 0;
    for (const int32_t id : ids) {
      if (parser.answers()) break;
      const bool thinks = parser.inside();
      parser.feed(context_.token_bytes(id));
      ++tokens;
      if (thinks || parser.inside()) of_thought = tokens;
    }
    return of_thought;
  }

  json::Value usage_of(const AnswerState& state) const {
    const Usage& usage = state.usage;
    json::Object read;
    read["cached_tokens"] = usage.cached_tokens;
    json::Object written;
    written["reasoning_tokens"] = reasoning_tokens(state.choices.front().ids);
    json::Object o;
    o["input_tokens"] = usage.prompt_tokens;
    o["input_tokens_details"] = std::move(read);
    o["output_tokens"] = usage.completion_tokens;
    o["output_tokens_details"] = std::move(written);
    o["total_tokens"] = usage.prompt_tokens + usage.completion_tokens;
    return o;
  }

  void append(const char* type, const json::Object& fields, std::string& out) {
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
  const bool include_reasoning_;
  std::optional<ReasoningParser> reasoning_;
  ToolParser parser_;
  int64_t events_ = 0;
  int calls_ = 0;
  json::Array output_;  // finished items
  // The item in progress.
  Open open_ = Open::kNothing;
  std::string item_id_;
  std::string text_;
  json::Array logprobs_;
  std::string held_text_;  // not sent in an event yet
  json::Array held_logprobs_;
};

}  // namespace

std::unique_ptr<AnswerFormat> make_response_format(FormatContext context,
                                                   const ResponseRequest& request,
                                                   ToolDialect dialect) {
  return std::make_unique<ResponseFormat>(std::move(context), request, dialect);
}

}  // namespace freshet::server
