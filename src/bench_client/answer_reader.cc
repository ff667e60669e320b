#include "bench_client/answer_reader.h"

#include <algorithm>

#include "base/json.h"

namespace freshet::bench_client {
namespace {

int count_of(const json::Value& usage, std::string_view key) {
  return static_cast<int>(std::clamp<int64_t>(usage.get_int(key, 0), 0, 1 << 30));
}

// For a chat delta or a choice of completions.
bool carries_text(const json::Value& v) {
  for (const char* name : {"content", "text", "reasoning", "reasoning_content"}) {
    if (!v.get_string(name, "").empty()) return true;
  }
  const json::Value* calls = v.find("tool_calls");
  return calls != nullptr && calls->is_array() && !calls->as_array().empty();
}

}  // namespace

void AnswerReader::push(std::string_view bytes, double now) {
  if (!parser_.push(bytes, [&](std::string_view data) { event(data, now); }) &&
      outcome_.error.empty()) {
    outcome_.error = "the server sent an event that is too long";
  }
}

void AnswerReader::event(std::string_view data, double now) {
  if (data == "[DONE]" || data.empty()) return;
  const auto parsed = json::parse(data);
  if (!parsed.ok() || !parsed->is_object()) {
    if (outcome_.error.empty())
      outcome_.error = "the server sent an event that is not a JSON object";
    return;
  }
  if (const json::Value* error = parsed->find("error"); error != nullptr && !error->is_null()) {
    outcome_.error = error->get_string("message", "the server reported an error without a message");
    return;
  }
  if (const json::Value* usage = parsed->find("usage"); usage != nullptr && usage->is_object()) {
    usage_seen_ = true;
    outcome_.output_tokens = count_of(*usage, "completion_tokens");
    if (usage->find("prompt_tokens") != nullptr)
      outcome_.input_tokens = count_of(*usage, "prompt_tokens");
  }
  const json::Value* choices = parsed->find("choices");
  if (choices == nullptr || !choices->is_array() || choices->as_array().empty()) return;
  const json::Value& choice = choices->as_array().front();
  const json::Value* delta = chat_ ? choice.find("delta") : &choice;
  const bool token = delta != nullptr && carries_text(*delta);
  events_.push_back({now, token});
  if (delta != nullptr) outcome_.text += delta->get_string(chat_ ? "content" : "text", "");
}

void AnswerReader::finish() {
  const auto has_text = [](const Event& e) { return e.text; };
  const auto texts = std::ranges::count_if(events_, has_text);
  const bool silent_tokens = usage_seen_ && outcome_.output_tokens > texts;
  std::vector<double> times;
  for (const Event& e : events_) {
    if (e.text || texts == 0 || (silent_tokens && !times.empty())) times.push_back(e.at);
  }
  if (times.empty() && outcome_.error.empty()) outcome_.error = "the answer has no tokens";
  if (!times.empty()) {
    outcome_.ttft = times.front() - outcome_.start;
    outcome_.latency = times.back() - outcome_.start;
    for (size_t i = 1; i < times.size(); ++i) outcome_.itl.push_back(times[i] - times[i - 1]);
    // The server sends no usage: count events instead.
    if (!usage_seen_) outcome_.output_tokens = static_cast<int>(times.size());
  }
  outcome_.success = outcome_.error.empty();
}

}  // namespace freshet::bench_client
