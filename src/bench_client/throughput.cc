#include "bench_client/throughput.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace freshet::bench_client {
namespace {

// Shared with the engine's callbacks, which may outlive an aborted run.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  size_t done = 0;
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;
  Usage::Speculation drafting;
  Status error;
};

Request make_request(const Sample& sample, Ids prompt, const ThroughputOptions& o,
                     const std::shared_ptr<Progress>& progress) {
  Request request;
  request.prompt = std::move(prompt);
  request.params = o.params;
  request.params.n = o.samples;
  request.params.max_tokens = sample.output_tokens;
  request.on_delta = [progress](const Delta& delta) {
    if (delta.finish != FinishReason::kError) return;
    const std::lock_guard lock(progress->mutex);
    progress->error = delta.error;
  };
  request.on_done = [progress](const Usage& usage) {
    const std::lock_guard lock(progress->mutex);
    ++progress->done;
    progress->prompt_tokens += usage.prompt_tokens;
    progress->output_tokens += usage.completion_tokens;
    progress->drafting.add(usage.speculation);
    progress->changed.notify_one();
  };
  return request;
}

}  // namespace

Result<Ids> LocalVocabulary::encode(const std::string& text) {
  tokenizer::EncodeOptions options;
  options.add_special = false;
  options.parse_special = false;
  return tokenizer_.encode(text, options);
}

Result<std::string> LocalVocabulary::decode(const Ids& ids) {
  return tokenizer_.decode(ids);
}

Result<Ids> LocalVocabulary::usable_ids() {
  Ids ids;
  // Random weights may come without a vocabulary. The first ids are often special.
  if (tokenizer_.vocab_size() == 0) {
    for (int32_t id = std::min(256, ids_ / 2); id < ids_; ++id) ids.push_back(id);
  }
  for (int32_t id = 0; id < tokenizer_.vocab_size(); ++id) {
    if (!tokenizer_.is_special(id) && !tokenizer_.token_bytes(id).empty()) ids.push_back(id);
  }
  if (ids.empty()) return unsupported("the model has no vocabulary to generate prompts from");
  return ids;
}

Result<ThroughputResult> bench_throughput(Engine& engine, const ThroughputOptions& options) {
  ThroughputOptions o = options;
  if (o.samples < 1) return invalid_argument("--n {}: must be at least 1", o.samples);
  if (o.dataset.max_model_len == 0) o.dataset.max_model_len = engine.max_model_len();
  LocalVocabulary vocabulary(engine.tokenizer(), o.ids);
  FRESHET_ASSIGN_OR_RETURN(Dataset dataset, make_dataset(o.dataset, vocabulary));
  std::vector<Ids> prompts;
  for (const Sample& s : dataset.samples) {
    const auto* text = std::get_if<std::string>(&s.prompt);
    prompts.push_back(text != nullptr ? engine.tokenizer().encode(*text) : std::get<Ids>(s.prompt));
  }
  const auto progress = std::make_shared<Progress>();
  const size_t total = dataset.samples.size();
  std::vector<uint64_t> running;
  const auto cancel_all = [&] {
    for (const uint64_t id : running) engine.cancel(id);
    std::unique_lock lock(progress->mutex);
    progress->changed.wait(lock, [&] { return progress->done == running.size(); });
  };
  const auto begin = std::chrono::steady_clock::now();
  for (size_t i = 0; i < total; ++i) {
    auto id = engine.submit(make_request(dataset.samples[i], std::move(prompts[i]), o, progress));
    if (!id.ok()) {
      cancel_all();
      return id.status().with_context(fmt::format("prompt {}", i));
    }
    running.push_back(*id);
  }
  std::unique_lock lock(progress->mutex);
  while (progress->done < total) {
    progress->changed.wait_for(lock, std::chrono::milliseconds(100));
    const size_t done = progress->done;
    lock.unlock();
    o.progress(done, total);
    if (o.stop != nullptr && *o.stop) {
      cancel_all();
      return cancelled("interrupted");
    }
    lock.lock();
  }
  if (!progress->error.ok()) return progress->error;
  ThroughputResult result;
  result.elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  result.requests = static_cast<int>(total);
  result.prompt_tokens = progress->prompt_tokens;
  result.output_tokens = progress->output_tokens;
  result.spec_decode = spec_decode_of(progress->drafting);
  return result;
}

std::string throughput_text(const ThroughputResult& r) {
  const double seconds = std::max(r.elapsed, 1e-9);
  std::string text = fmt::format(
      "Throughput: {:.2f} requests/s, {:.2f} total tokens/s, {:.2f} output tokens/s\n"
      "Total num prompt tokens:  {}\n"
      "Total num output tokens:  {}\n",
      r.requests / seconds, static_cast<double>(r.prompt_tokens + r.output_tokens) / seconds,
      static_cast<double>(r.output_tokens) / seconds, r.prompt_tokens, r.output_tokens);
  if (const auto& s = r.spec_decode; s && s->draft_tokens > 0.0) {
    text += fmt::format("Speculation: {:.2f} tokens per step with drafts, {:.1f} % accepted\n",
                        1.0 + s->accepted_tokens / s->drafts,
                        100.0 * s->accepted_tokens / s->draft_tokens);
  }
  return text;
}

json::Object throughput_json(const ThroughputResult& r) {
  const double seconds = std::max(r.elapsed, 1e-9);
  const double tokens = static_cast<double>(r.prompt_tokens + r.output_tokens);
  json::Object o;
  o["elapsed_time"] = r.elapsed;
  o["num_requests"] = r.requests;
  o["total_num_tokens"] = r.prompt_tokens + r.output_tokens;
  o["requests_per_second"] = r.requests / seconds;
  o["tokens_per_second"] = tokens / seconds;
  o["output_tokens_per_second"] = static_cast<double>(r.output_tokens) / seconds;
  if (r.spec_decode) add_spec_decode(*r.spec_decode, o);
  return o;
}

}  // namespace freshet::bench_client
