#include "cli/generation.h"

#include <chrono>
#include <utility>

namespace freshet::cli {

Result<std::unique_ptr<Generation>> Generation::start(Engine& engine, Request request) {
  using Clock = std::chrono::steady_clock;
  std::unique_ptr<Generation> g(new Generation(engine));
  const auto begin = Clock::now();
  request.on_delta = [state = g->state_, begin](const Delta& delta) {
    const std::lock_guard lock(state->mutex);
    if (!delta.ids.empty()) {
      state->last_s = std::chrono::duration<double>(Clock::now() - begin).count();
      if (state->first_s == 0.0) state->first_s = state->last_s;
    }
    state->deltas.push_back(delta);
    state->changed.notify_one();
  };
  request.on_done = [state = g->state_](const Usage& usage) {
    const std::lock_guard lock(state->mutex);
    state->usage = usage;
    state->done = true;
    state->changed.notify_one();
  };
  FRESHET_ASSIGN_OR_RETURN(g->id_, engine.submit(std::move(request)));
  return g;
}

Generation::~Generation() {
  if (!id_) return;
  std::unique_lock lock(state_->mutex);
  if (state_->done) return;
  lock.unlock();
  engine_.cancel(*id_);
  lock.lock();
  state_->changed.wait(lock, [&] { return state_->done; });
}

std::optional<Delta> Generation::next() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done || !state_->deltas.empty(); });
  if (state_->deltas.empty()) return std::nullopt;
  Delta delta = std::move(state_->deltas.front());
  state_->deltas.pop_front();
  if (delta.finish == FinishReason::kError && error_.ok()) error_ = delta.error;
  return delta;
}

void Generation::cancel() {
  engine_.cancel(*id_);
}

std::string speed_line(const Generation& g) {
  const Usage& u = g.usage();
  const int prompt = u.prompt_tokens - u.cached_tokens;
  const double first = g.first_token_s(), rest = g.last_token_s() - first;
  std::string line = fmt::format("{} tokens of prompt in {:.2f} s", u.prompt_tokens, first);
  if (first > 0.0) line += fmt::format(" ({:.1f}/s)", prompt / first);
  line += fmt::format(", {} tokens written in {:.2f} s", u.completion_tokens, rest);
  // The first token comes with the prompt.
  if (rest > 0.0 && u.completion_tokens > 1)
    line += fmt::format(" ({:.1f}/s)", (u.completion_tokens - 1) / rest);
  return line;
}

}  // namespace freshet::cli
