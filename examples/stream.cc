// Submits two requests at once and prints what each adds as it comes. Both run in the same batch;
// the tokens of a request do not depend on the other one.
//
//   example_stream MODEL
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "freshet/engine.h"
#include "tokenizer/tokenizer.h"

namespace {

// Counts what callbacks report; main() waits for the last request.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;
  int tokens = 0;
};

freshet::Request make_request(const freshet::Engine& engine, const std::string& prompt,
                              Progress& progress) {
  freshet::Request request;
  request.prompt = engine.tokenizer().encode(prompt);
  request.params.seed = 1;
  request.params.temperature = 0.8f;
  request.params.max_tokens = 24;
  // Callbacks run on the engine's thread: they must return quickly.
  request.on_delta = [prompt](const freshet::Delta& delta) {
    std::printf("[%s] %s\n", prompt.c_str(), delta.text.c_str());
  };
  request.on_done = [&progress](const freshet::Usage& usage) {
    std::lock_guard lock(progress.mutex);
    progress.tokens += usage.completion_tokens;
    --progress.running;
    progress.changed.notify_all();
  };
  return request;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: example_stream MODEL\n");
    return 2;
  }
  Progress progress;  // outlives the engine, whose callbacks use it
  freshet::EngineOptions options;
  options.model = argv[1];
  auto engine = freshet::Engine::load(options);
  if (!engine.ok()) {
    std::fprintf(stderr, "%s\n", engine.status().message().c_str());
    return 1;
  }

  const std::vector<std::string> prompts = {"The old man", "In the morning"};
  for (const std::string& prompt : prompts) {
    {
      std::lock_guard lock(progress.mutex);
      ++progress.running;
    }
    const auto number = (*engine)->submit(make_request(**engine, prompt, progress));
    if (!number.ok()) {
      std::fprintf(stderr, "%s\n", number.status().message().c_str());
      return 1;
    }
  }
  std::unique_lock lock(progress.mutex);
  progress.changed.wait(lock, [&] { return progress.running == 0; });
  std::printf("%zu requests, %d tokens\n", prompts.size(), progress.tokens);
  return 0;
}
