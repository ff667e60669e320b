#include "server/answer.h"

#include <algorithm>
#include <utility>

#include "base/json.h"

namespace freshet::server {

void append_event(const json::Value& value, std::string& out) {
  out += "data: ";
  out += json::write(value);
  out += "\n\n";
}

void AnswerFormat::stream_error(const ApiError& error, std::string& out) {
  append_event(to_json(error), out);
  out += "data: [DONE]\n\n";
}

Answer::Answer(std::shared_ptr<Exchange> exchange, Engine& engine, Metrics& metrics, Post post,
               std::unique_ptr<AnswerFormat> format, Options options)
    : exchange_(std::move(exchange)),
      engine_(engine),
      metrics_(metrics),
      post_(std::move(post)),
      format_(std::move(format)),
      options_(std::move(options)) {}

void Answer::run(std::vector<std::vector<int32_t>> prompts, const SamplingParams& params,
                 std::vector<engine::Picture> pictures,
                 std::vector<std::vector<int32_t>> encoder_ids) {
  const auto now = Clock::now();
  state_.prompts = std::move(prompts);
  state_.prompt_logprobs.resize(state_.prompts.size());
  state_.choices.resize(state_.prompts.size() * static_cast<size_t>(options_.n));
  records_.resize(state_.prompts.size());
  {
    // Hold events until every request is submitted: if one is refused, the whole answer is.
    std::lock_guard lock(mutex_);
    draining_ = true;
  }
  exchange_->on_gone([weak = weak_from_this()] {
    if (auto self = weak.lock()) self->cancel_all();
  });
  for (size_t p = 0; p < state_.prompts.size(); ++p) {
    const std::vector<int32_t>& read = encoder_ids.empty() ? state_.prompts[p] : encoder_ids[p];
    state_.so_far.prompt_tokens += static_cast<int>(read.size());
    for (int i = 0; i < options_.n; ++i)
      state_.choices[p * static_cast<size_t>(options_.n) + static_cast<size_t>(i)].prompt =
          static_cast<int>(p);
    records_[p].arrival = now;
    records_[p].max_tokens = params.max_tokens;
    records_[p].n = options_.n;
    Request request;
    request.id = options_.request_id;
    request.prompt = state_.prompts[p];
    request.pictures = std::move(pictures);
    if (!encoder_ids.empty()) request.encoder_ids = std::move(encoder_ids[p]);
    request.params = params;
    request.priority = options_.priority;
    request.tenant = options_.tenant;
    request.cache_salt = options_.cache_salt;
    request.kv_eviction = options_.kv_eviction;
    request.sparse_attention = options_.sparse_attention;
    request.deadline_s = options_.timeout_s;
    request.on_delta = [self = shared_from_this(), p](const Delta& d) {
      self->push({Event::Kind::kDelta, p, d, {}, {}, Clock::now()});
    };
    request.on_done = [self = shared_from_this(), p](const Usage& u) {
      self->push({Event::Kind::kDone, p, {}, u, {}, Clock::now()});
    };
    if (params.prompt_logprobs >= 0) {
      request.on_prompt_logprobs = [self = shared_from_this(),
                                    p](const std::vector<std::vector<TokenLogprob>>& l) {
        self->push({Event::Kind::kPromptLogprobs, p, {}, {}, l, Clock::now()});
      };
    }
    auto submitted = engine_.submit(std::move(request));
    if (!submitted.ok()) {
      if (submitted.status().code() == StatusCode::kResourceExhausted) metrics_.refused();
      failed_ = true;
      exchange_->send(to_response(from_status(submitted.status())));
      cancel_all();
      break;
    }
    std::lock_guard lock(mutex_);
    requests_.push_back(*submitted);
    if (cancelled_) engine_.cancel(*submitted);
  }
  drain();
}

void Answer::cancel_all() {
  std::vector<uint64_t> requests;
  {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    requests = requests_;
  }
  for (uint64_t r : requests) engine_.cancel(r);
}

void Answer::push(Event event) {
  {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    if (draining_) return;
    draining_ = true;
  }
  post_([self = shared_from_this()] { self->drain(); });
}

void Answer::drain() {
  std::string out;
  for (;;) {
    std::deque<Event> events;
    {
      std::lock_guard lock(mutex_);
      if (events_.empty()) {
        draining_ = false;
        return;
      }
      std::swap(events, events_);
    }
    out.clear();
    for (Event& e : events) handle(e, out);
    if (!out.empty() && started_) exchange_->write(std::move(out));
    if (started_ && done_ == state_.prompts.size()) exchange_->finish();
  }
}

void Answer::handle(Event& event, std::string& out) {
  switch (event.kind) {
    case Event::Kind::kDelta:
      return handle_delta(event, out);
    case Event::Kind::kPromptLogprobs:
      state_.prompt_logprobs[event.prompt] = std::move(event.prompt_logprobs);
      return;
    case Event::Kind::kDone:
      handle_done(event);
      if (++done_ == state_.prompts.size() && !failed_) complete(out);
      return;
  }
}

void Answer::handle_delta(Event& event, std::string& out) {
  RequestRecord& record = records_[event.prompt];
  const Delta& delta = event.delta;
  // Before the delta is added to the state: the opening events must not contain it.
  if (options_.stream && !failed_ && delta.finish != FinishReason::kError) start_stream(out);
  if (!delta.ids.empty()) {
    if (record.generation_tokens == 0) {
      record.first_token = event.at;
      if (!state_.first_token) state_.first_token = event.at;
      metrics_.time_to_first_token(seconds_between(record.arrival, event.at));
    } else if (options_.n == 1) {
      metrics_.inter_token_latency(seconds_between(record.last_token, event.at),
                                   static_cast<int>(delta.ids.size()));
    }
    record.last_token = event.at;
    record.generation_tokens += static_cast<int>(delta.ids.size());
  }
  const size_t index =
      event.prompt * static_cast<size_t>(options_.n) + static_cast<size_t>(delta.index);
  Choice& choice = state_.choices[index];
  choice.text += delta.text;
  state_.so_far.completion_tokens += static_cast<int>(delta.ids.size());
  choice.ids.insert(choice.ids.end(), delta.ids.begin(), delta.ids.end());
  choice.logprobs.insert(choice.logprobs.end(), delta.logprobs.begin(), delta.logprobs.end());
  if (delta.finish != FinishReason::kNone) {
    choice.finish = record.finish = delta.finish;
    choice.stop_reason = delta.stop_reason;
  }
  stop_when_late(event);
  if (delta.finish == FinishReason::kError && !failed_) return fail(from_status(delta.error), out);
  if (!options_.stream || failed_) return;
  format_->stream_delta(state_, index, delta, out);
}

void Answer::stop_when_late(const Event& event) {
  if (options_.max_predict_s <= 0) return;
  line_seen_ = line_seen_ || event.delta.text.find('\n') != std::string::npos;
  const RequestRecord& record = records_[event.prompt];
  if (line_seen_ && record.generation_tokens > 0 &&
      seconds_between(record.first_token, event.at) > options_.max_predict_s)
    cancel_all();
}

void Answer::handle_done(const Event& event) {
  RequestRecord& record = records_[event.prompt];
  record.end = event.at;
  record.prompt_tokens = event.usage.prompt_tokens;
  record.cached_tokens = event.usage.cached_tokens;
  record.preemptions = event.usage.preemptions;
  record.generation_tokens = event.usage.completion_tokens;
  const size_t n = static_cast<size_t>(options_.n);
  for (size_t i = event.prompt * n; i < (event.prompt + 1) * n; ++i) {
    record.longest_sample =
        std::max(record.longest_sample, static_cast<int>(state_.choices[i].ids.size()));
  }
  if (options_.ended && n == 1) {
    std::vector<int32_t> tokens = state_.prompts[event.prompt];
    const std::vector<int32_t>& answer = state_.choices[event.prompt].ids;
    tokens.insert(tokens.end(), answer.begin(), answer.end());
    options_.ended(std::move(tokens));
  }
  for (const auto& [reason, seconds] : event.usage.waited) record.queue_s += seconds;
  state_.usage.prompt_tokens += event.usage.prompt_tokens;
  state_.usage.cached_tokens += event.usage.cached_tokens;
  state_.usage.completion_tokens += event.usage.completion_tokens;
  state_.usage.speculation.add(event.usage.speculation);
  metrics_.finished(record);
}

void Answer::start_stream(std::string& out) {
  if (started_) return;
  started_ = true;
  HttpResponse response;
  response.content_type = "text/event-stream; charset=utf-8";  // else some clients assume Latin-1
  response.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  exchange_->start(std::move(response));
  format_->stream_begin(state_, out);
}

void Answer::complete(std::string& out) {
  if (options_.stream) {
    start_stream(out);
    format_->stream_end(state_, out);
    return;
  }
  HttpResponse response;
  response.body = json::write(format_->whole(state_));
  exchange_->send(std::move(response));
}

void Answer::fail(const ApiError& error, std::string& out) {
  failed_ = true;
  if (started_) {
    format_->stream_error(error, out);
  } else {
    exchange_->send(to_response(error));
  }
  cancel_all();
}

}  // namespace freshet::server
