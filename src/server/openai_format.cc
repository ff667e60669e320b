#include "server/openai_format.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "base/utf8.h"
#include "server/text_offsets.h"

namespace freshet::server {
namespace {

// JSON has no infinities: a token that cannot be sampled gets a very low finite value, as in vLLM.
double finite(float logprob) {
  return std::max(static_cast<double>(logprob), -9999.0);
}

std::string shown_token(int32_t id, const TokenBytes& bytes, bool as_id) {
  return as_id ? fmt::format("token_id:{}", id) : bytes(id);
}

json::Array byte_array(const std::string& s) {
  json::Array out;
  for (char c : s) out.emplace_back(static_cast<int64_t>(static_cast<unsigned char>(c)));
  return out;
}

json::Array id_array(const std::vector<int32_t>& ids) {
  json::Array out;
  out.reserve(ids.size());
  for (int32_t id : ids) out.emplace_back(static_cast<int64_t>(id));
  return out;
}

std::string valid_utf8(std::string_view bytes) {
  std::string out;
  while (!bytes.empty()) {
    const Utf8Char c = decode_utf8(bytes);
    append_utf8(out, c.code);
    bytes.remove_prefix(c.size);
  }
  return out;
}

// The number of characters in valid UTF-8.
int64_t characters(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; });
}

json::Object logprob_entry(const TokenLogprob& t, const TokenBytes& bytes, bool tokens_as_ids) {
  json::Object o;
  o["token"] = shown_token(t.id, bytes, tokens_as_ids);
  o["logprob"] = finite(t.logprob);
  o["bytes"] = byte_array(bytes(t.id));
  return o;
}

// vLLM's prompt_logprobs: null for the first token (it has no prediction), then {"id": {"logprob",
// "decoded_token"}}.
json::Value prompt_logprobs_json(const std::vector<std::vector<TokenLogprob>>& all,
                                 const TokenBytes& bytes) {
  json::Array out;
  for (const auto& position : all) {
    if (position.empty()) {
      out.emplace_back();
      continue;
    }
    json::Object o;
    for (const TokenLogprob& t : position) {
      json::Object entry;
      entry["logprob"] = finite(t.logprob);
      entry["decoded_token"] = bytes(t.id);
      o[std::to_string(t.id)] = std::move(entry);
    }
    out.emplace_back(std::move(o));
  }
  return out;
}

// {"content": [{"token", "logprob", "bytes", "top_logprobs"}]}
json::Value chat_logprobs(const std::vector<std::vector<TokenLogprob>>& logprobs,
                          const TokenBytes& bytes, bool tokens_as_ids) {
  json::Object o;
  o["content"] = logprob_entries(logprobs, bytes, tokens_as_ids);
  return o;
}

// Fields common to both formats.
class OpenAiFormat : public AnswerFormat {
 public:
  OpenAiFormat(FormatContext context, const CommonRequest& request, const char* whole_object,
               const char* chunk_object)
      : context_(std::move(context)),
        include_usage_(request.include_usage),
        continuous_usage_(request.continuous_usage),
        return_token_ids_(request.return_token_ids),
        tokens_as_ids_(request.tokens_as_ids),
        stop_token_ids_(request.params.stop_token_ids),
        wants_logprobs_(request.params.logprobs >= 0),
        whole_object_(whole_object),
        chunk_object_(chunk_object) {}

  void stream_end(const AnswerState& state, std::string& out) override {
    if (include_usage_) {
      json::Object o = head(chunk_object_);
      o["choices"] = json::Array();
      o["usage"] = usage_json(final_usage(state));
      add_metrics(state, o);
      append_event(std::move(o), out);
    }
    out += "data: [DONE]\n\n";
  }

 protected:
  virtual Usage final_usage(const AnswerState& state) const { return state.usage; }
  // vLLM's field: null where several samples were drafted for.
  static void add_metrics(const AnswerState& state, json::Object& o) {
    const Usage::Speculation& s = state.usage.speculation;
    if (s.steps == 0) return;
    json::Object metrics;
    metrics["speculative_decoding"] =
        state.choices.size() == 1 ? speculation_json(s) : json::Value();
    o["metrics"] = std::move(metrics);
  }
  json::Object head(const char* object) const {
    json::Object o;
    o["id"] = context_.id;
    o["object"] = object;
    o["created"] = context_.created;
    o["model"] = context_.model;
    return o;
  }
  void append_choice(json::Object choice, const AnswerState& state, std::string& out) const {
    json::Object o = head(chunk_object_);
    json::Array choices;
    choices.emplace_back(std::move(choice));
    o["choices"] = std::move(choices);
    if (continuous_usage_) {
      o["usage"] = usage_json(state.so_far);
    } else if (include_usage_) {
      o["usage"] = nullptr;  // as in OpenAI's API: only the last chunk has numbers
    }
    append_event(std::move(o), out);
  }
  void add_finish(json::Object& choice, FinishReason finish, const std::string& stop_reason) const {
    choice["finish_reason"] = finish_reason_json(finish);
    choice["stop_reason"] = stop_reason.empty() ? json::Value() : json::Value(stop_reason);
    for (const int32_t id : stop_token_ids_) {  // vLLM returns these as numbers
      if (stop_reason == std::to_string(id)) choice["stop_reason"] = static_cast<int64_t>(id);
    }
  }

  const FormatContext context_;
  const bool include_usage_;
  const bool continuous_usage_;
  const bool return_token_ids_;
  const bool tokens_as_ids_;
  const std::vector<int32_t> stop_token_ids_;
  const bool wants_logprobs_;
  const char* const whole_object_;
  const char* const chunk_object_;
};

class CompletionFormat final : public OpenAiFormat {
 public:
  CompletionFormat(FormatContext context, const CompletionRequest& request,
                   std::vector<std::string> prompt_texts)
      : OpenAiFormat(std::move(context), request, "text_completion", "text_completion"),
        echo_(request.echo),
        prompt_only_(request.prompt_only),
        prompt_texts_(std::move(prompt_texts)) {}

  json::Value whole(const AnswerState& state) override {
    json::Object o = head(whole_object_);
    json::Array choices;
    for (size_t i = 0; i < state.choices.size(); ++i) choices.emplace_back(whole_choice(state, i));
    o["choices"] = std::move(choices);
    o["usage"] = usage_json(final_usage(state));
    add_metrics(state, o);
    return o;
  }

  void stream_begin(const AnswerState& state, std::string&) override {
    offsets_.resize(state.choices.size());
  }

  void stream_delta(const AnswerState& state, size_t index, const Delta& delta,
                    std::string& out) override {
    if (prompt_only_) return end_without_text(state, index, delta, out);
    json::Object c;
    c["index"] = static_cast<int64_t>(index);
    c["text"] = delta.text;
    c["logprobs"] =
        wants_logprobs_ ? logprobs_json(delta.logprobs, offsets_[index], 0) : json::Value();
    add_finish(c, delta.finish, delta.stop_reason);
    if (return_token_ids_) {
      const Choice& choice = state.choices[index];
      const bool first = choice.ids.size() == delta.ids.size();
      c["prompt_token_ids"] =
          first ? json::Value(id_array(state.prompts[static_cast<size_t>(choice.prompt)]))
                : json::Value();
      c["token_ids"] = id_array(delta.ids);
    }
    append_choice(std::move(c), state, out);
  }

 private:
  Usage final_usage(const AnswerState& state) const override {
    Usage usage = state.usage;
    if (prompt_only_) usage.completion_tokens = 0;
    return usage;
  }

  // The only chunk of a choice without generated text.
  void end_without_text(const AnswerState& state, size_t index, const Delta& delta,
                        std::string& out) const {
    if (delta.finish == FinishReason::kNone) return;
    json::Object c;
    c["index"] = static_cast<int64_t>(index);
    c["text"] = "";
    c["logprobs"] = nullptr;
    add_finish(c, FinishReason::kLength, {});
    append_choice(std::move(c), state, out);
  }

  // With echo, a character may begin in the prompt and end in the answer.
  std::string whole_text(const AnswerState& state, const Choice& choice) const {
    const std::string text = prompt_only_ ? "" : choice.text;
    if (!echo_) return text;
    const size_t prompt = static_cast<size_t>(choice.prompt);
    TextOffsets end;
    for (const int32_t id : state.prompts[prompt]) end.add(context_.token_bytes(id));
    std::string bytes;
    for (size_t i = 0; i < choice.ids.size() && bytes.size() < 4 && !prompt_only_; ++i)
      bytes += context_.text_bytes(choice.ids[i]);
    return joined_text(prompt_texts_[prompt], end.pending(), text, bytes);
  }

  json::Object whole_choice(const AnswerState& state, size_t i) const {
    const Choice& choice = state.choices[i];
    const size_t prompt = static_cast<size_t>(choice.prompt);
    json::Object c;
    c["index"] = static_cast<int64_t>(i);
    c["text"] = whole_text(state, choice);
    c["logprobs"] = wants_logprobs_ ? whole_logprobs(state, choice) : json::Value();
    add_finish(c, prompt_only_ ? FinishReason::kLength : choice.finish, choice.stop_reason);
    if (!state.prompt_logprobs[prompt].empty()) {
      c["prompt_logprobs"] =
          prompt_logprobs_json(state.prompt_logprobs[prompt], context_.token_bytes);
    }
    if (return_token_ids_) {
      c["prompt_token_ids"] = id_array(state.prompts[prompt]);
      c["token_ids"] = prompt_only_ ? json::Array() : id_array(choice.ids);
    }
    return c;
  }

  // With echo, the prompt's tokens come first; the first one has no prediction.
  json::Value whole_logprobs(const AnswerState& state, const Choice& choice) const {
    std::vector<std::vector<TokenLogprob>> all;
    TextOffsets offsets;
    int64_t before = 0;
    if (echo_) {
      const size_t prompt = static_cast<size_t>(choice.prompt);
      all = state.prompt_logprobs[prompt];
      if (!all.empty()) all[0] = {{state.prompts[prompt][0], std::nanf("")}};
      // Count from the prompt's end: its tokens may begin with one (BOS) or a space that is not in
      // its text.
      TextOffsets counted;
      for (const int32_t id : state.prompts[prompt]) counted.add(context_.token_bytes(id));
      before = characters(prompt_texts_[prompt]) - counted.complete() -
               (counted.pending().empty() ? 0 : 1);
    }
    const size_t of_prompt = all.size();
    if (!prompt_only_) all.insert(all.end(), choice.logprobs.begin(), choice.logprobs.end());
    return logprobs_json(all, offsets, before, of_prompt);
  }

  // {"text_offset", "token_logprobs", "tokens", "top_logprobs"}; Advances `offsets`;
  // `before` is added to each offset. A NaN logprob means a token without a prediction: null. The
  // first `of_prompt` tokens are in the text even if they are special.
  json::Object logprobs_json(const std::vector<std::vector<TokenLogprob>>& logprobs,
                             TextOffsets& offsets, int64_t before, size_t of_prompt = 0) const {
    size_t position_number = 0;
    const auto shown = [&](const TokenLogprob& t) {
      return shown_token(t.id, context_.token_bytes, tokens_as_ids_);
    };
    json::Array places;
    json::Array values;
    json::Array tokens;
    json::Array tops;
    for (const auto& position : logprobs) {
      if (position.empty()) continue;
      const TokenLogprob& chosen = position.front();
      places.emplace_back(std::max<int64_t>(before + offsets.complete(), 0));
      offsets.add(position_number++ < of_prompt ? context_.token_bytes(chosen.id)
                                                : context_.text_bytes(chosen.id));
      tokens.emplace_back(shown(chosen));
      if (std::isnan(chosen.logprob)) {
        values.emplace_back();
        tops.emplace_back();
        continue;
      }
      values.emplace_back(finite(chosen.logprob));
      json::Object top;
      // Tokens with partial characters may look the same: the most likely one is kept.
      for (const TokenLogprob& t : position) {
        const std::string name = valid_utf8(shown(t));
        if (top.find(name) == nullptr) top[name] = finite(t.logprob);
      }
      tops.emplace_back(std::move(top));
    }
    json::Object o;
    o["text_offset"] = std::move(places);
    o["token_logprobs"] = std::move(values);
    o["tokens"] = std::move(tokens);
    o["top_logprobs"] = std::move(tops);
    return o;
  }

  const bool echo_;
  const bool prompt_only_;
  const std::vector<std::string> prompt_texts_;
  std::vector<TextOffsets> offsets_;  // of the tokens sent, one per choice
};

json::Value tool_calls_json(const std::vector<ToolCall>& calls, int first_index) {
  json::Array out;
  for (size_t i = 0; i < calls.size(); ++i) {
    json::Object function;
    function["name"] = calls[i].name;
    function["arguments"] = calls[i].arguments;
    json::Object call;
    if (first_index >= 0) call["index"] = first_index + static_cast<int>(i);
    call["id"] = calls[i].id;
    call["type"] = "function";
    call["function"] = std::move(function);
    out.emplace_back(std::move(call));
  }
  return out;
}

class ChatFormat final : public OpenAiFormat {
 public:
  ChatFormat(FormatContext context, const ChatRequest& request, ToolDialect dialect)
      : OpenAiFormat(std::move(context), request, "chat.completion", "chat.completion.chunk"),
        dialect_(dialect),
        parse_tools_(!request.tools.is_null() &&
                     request.tool_choice != ChatRequest::ToolChoice::kNone),
        parallel_(request.parallel_tool_calls),
        include_reasoning_(request.include_reasoning) {}

  json::Value whole(const AnswerState& state) override {
    json::Object o = head(whole_object_);
    json::Array choices;
    for (size_t i = 0; i < state.choices.size(); ++i)
      choices.emplace_back(whole_choice(state.choices[i], i));
    o["choices"] = std::move(choices);
    o["usage"] = usage_json(state.usage);
    add_metrics(state, o);
    if (!state.prompt_logprobs[0].empty()) {
      o["prompt_logprobs"] = prompt_logprobs_json(state.prompt_logprobs[0], context_.token_bytes);
    }
    if (return_token_ids_) o["prompt_token_ids"] = id_array(state.prompts[0]);
    return o;
  }

  void stream_begin(const AnswerState& state, std::string& out) override {
    for (size_t i = 0; i < state.choices.size(); ++i) {
      parsers_.push_back(parsers(i));
      json::Object delta;
      delta["role"] = "assistant";
      delta["content"] = "";
      json::Object c = chunk_choice(i, std::move(delta));
      add_finish(c, FinishReason::kNone, {});
      if (return_token_ids_) c["prompt_token_ids"] = id_array(state.prompts[0]);
      append_choice(std::move(c), state, out);
    }
  }

  void stream_delta(const AnswerState& state, size_t index, const Delta& delta,
                    std::string& out) override {
    const bool last = delta.finish != FinishReason::kNone;
    const int calls_before = parsers_[index].tools.calls_found();
    Parts step = parse(parsers_[index], delta.text, last);
    const bool silent = step.content.empty() && step.calls.empty() && step.reasoning.empty() &&
                        delta.logprobs.empty() && !return_token_ids_;
    if (silent && !last) return;
    json::Object d;
    add_reasoning(step, d);
    const bool nothing_else = step.calls.empty() && step.reasoning.empty();
    if (!step.content.empty() || (nothing_else && !last)) d["content"] = step.content;
    if (!step.calls.empty()) d["tool_calls"] = tool_calls_json(step.calls, calls_before);
    json::Object c = chunk_choice(index, std::move(d));
    c["logprobs"] = wants_logprobs_
                        ? chat_logprobs(delta.logprobs, context_.token_bytes, tokens_as_ids_)
                        : json::Value();
    add_finish(c, delta.finish, delta.stop_reason);
    if (last && delta.finish == FinishReason::kStop && parsers_[index].tools.calls_found() > 0)
      c["finish_reason"] = "tool_calls";
    if (return_token_ids_) c["token_ids"] = id_array(delta.ids);
    append_choice(std::move(c), state, out);
  }

 private:
  struct Parsers {
    std::optional<ReasoningParser> reasoning;
    ToolParser tools;
  };
  struct Parts {
    std::string reasoning;
    std::string content;
    std::vector<ToolCall> calls;
  };

  Parsers parsers(size_t choice) const {
    return {context_.reasoning, ToolParser(dialect_, fmt::format("{}/{}", context_.id, choice))};
  }

  // Parses more text. Tool calls are only found in the answer, never in the reasoning.
  Parts parse(Parsers& p, const std::string& text, bool last) const {
    Parts parts;
    parts.content = text;
    const int calls_before = p.tools.calls_found();
    if (p.reasoning) {
      ReasoningParser::Step step = p.reasoning->feed(text);
      if (last) {
        ReasoningParser::Step rest = p.reasoning->finish();
        step.reasoning += rest.reasoning;
        step.content += rest.content;
      }
      if (include_reasoning_) parts.reasoning = std::move(step.reasoning);
      parts.content = std::move(step.content);
    }
    if (!parse_tools_) return parts;
    ToolParser::Step step = p.tools.feed(parts.content);
    if (last) {
      ToolParser::Step rest = p.tools.finish();
      step.content += rest.content;
      std::move(rest.calls.begin(), rest.calls.end(), std::back_inserter(step.calls));
    }
    parts.content = std::move(step.content);
    parts.calls = std::move(step.calls);
    keep_allowed(parts.calls, calls_before);
    return parts;
  }

  // Under both names: vLLM's, and the older one that more clients know.
  static void add_reasoning(const Parts& parts, json::Object& message) {
    if (parts.reasoning.empty()) return;
    message["reasoning"] = parts.reasoning;
    message["reasoning_content"] = parts.reasoning;
  }

  static json::Object chunk_choice(size_t index, json::Object delta) {
    json::Object c;
    c["index"] = static_cast<int64_t>(index);
    c["delta"] = std::move(delta);
    c["logprobs"] = nullptr;
    return c;
  }

  // parallel_tool_calls: false keeps the first call of an answer.
  void keep_allowed(std::vector<ToolCall>& calls, int calls_before) const {
    if (parallel_ || calls.empty()) return;
    calls.resize(calls_before > 0 ? 0 : 1);
  }

  json::Object whole_choice(const Choice& choice, size_t i) const {
    Parsers fresh = parsers(i);
    const Parts parsed = parse(fresh, choice.text, /*last=*/true);
    const bool other = !parsed.calls.empty() || !parsed.reasoning.empty();
    json::Object message;
    message["role"] = "assistant";
    message["content"] =
        parsed.content.empty() && other ? json::Value() : json::Value(parsed.content);
    message["refusal"] = nullptr;
    add_reasoning(parsed, message);
    if (!parsed.calls.empty()) message["tool_calls"] = tool_calls_json(parsed.calls, -1);
    json::Object c;
    c["index"] = static_cast<int64_t>(i);
    c["message"] = std::move(message);
    c["logprobs"] = wants_logprobs_
                        ? chat_logprobs(choice.logprobs, context_.token_bytes, tokens_as_ids_)
                        : json::Value();
    add_finish(c, choice.finish, choice.stop_reason);
    if (choice.finish == FinishReason::kStop && !parsed.calls.empty())
      c["finish_reason"] = "tool_calls";
    if (return_token_ids_) c["token_ids"] = id_array(choice.ids);
    return c;
  }

  const ToolDialect dialect_;
  const bool parse_tools_;
  const bool parallel_;
  const bool include_reasoning_;
  std::vector<Parsers> parsers_;  // one per choice; streams only
};

}  // namespace

json::Array logprob_entries(const std::vector<std::vector<TokenLogprob>>& logprobs,
                            const TokenBytes& bytes, bool tokens_as_ids) {
  json::Array entries;
  for (const auto& position : logprobs) {
    if (position.empty()) continue;
    json::Object o = logprob_entry(position.front(), bytes, tokens_as_ids);
    json::Array top;
    for (size_t i = 1; i < position.size(); ++i)
      top.emplace_back(logprob_entry(position[i], bytes, tokens_as_ids));
    o["top_logprobs"] = std::move(top);
    entries.emplace_back(std::move(o));
  }
  return entries;
}

json::Value usage_json(const Usage& usage) {
  json::Object o;
  o["prompt_tokens"] = usage.prompt_tokens;
  o["total_tokens"] = usage.prompt_tokens + usage.completion_tokens;
  o["completion_tokens"] = usage.completion_tokens;
  json::Object details;
  details["cached_tokens"] = usage.cached_tokens;
  o["prompt_tokens_details"] = std::move(details);
  return o;
}

json::Value speculation_json(const Usage::Speculation& s) {
  json::Object o;
  o["mean_acceptance_length"] = 1.0 + static_cast<double>(s.accepted_tokens) / s.steps;
  o["draft_acceptance_rate"] =
      s.drafted_tokens > 0 ? static_cast<double>(s.accepted_tokens) / s.drafted_tokens : 0.0;
  json::Array histogram;
  for (const int count : s.accepted) histogram.emplace_back(count);
  o["acceptance_histogram"] = std::move(histogram);
  o["num_spec_steps"] = s.steps;
  o["num_accepted_draft_tokens"] = s.accepted_tokens;
  o["num_draft_tokens"] = s.drafted_tokens;
  return o;
}

json::Value finish_reason_json(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return nullptr;
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "abort";
    case FinishReason::kError:
      return "error";
  }
  return nullptr;
}

std::unique_ptr<AnswerFormat> make_completion_format(FormatContext context,
                                                     const CompletionRequest& request,
                                                     std::vector<std::string> prompt_texts) {
  return std::make_unique<CompletionFormat>(std::move(context), request, std::move(prompt_texts));
}

std::unique_ptr<AnswerFormat> make_chat_format(FormatContext context, const ChatRequest& request,
                                               ToolDialect dialect) {
  return std::make_unique<ChatFormat>(std::move(context), request, dialect);
}

}  // namespace freshet::server
