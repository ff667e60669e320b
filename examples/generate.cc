// Loads a model and continues a text.
//
//   example_generate MODEL [PROMPT]
#include <cstdio>
#include <string>

#include "freshet/engine.h"

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: example_generate MODEL [PROMPT]\n");
    return 2;
  }
  const std::string prompt = argc > 2 ? argv[2] : "Once upon a time";

  freshet::EngineOptions options;
  options.model = argv[1];
  auto engine = freshet::Engine::load(options);
  if (!engine.ok()) {
    std::fprintf(stderr, "%s\n", engine.status().message().c_str());
    return 1;
  }

  freshet::SamplingParams params;
  params.temperature = 0.0f;  // greedy: the same text every time
  params.max_tokens = 32;
  auto texts = (*engine)->generate(prompt, params);
  if (!texts.ok()) {
    std::fprintf(stderr, "%s\n", texts.status().message().c_str());
    return 1;
  }
  std::printf("%s%s\n", prompt.c_str(), texts->front().c_str());
  return 0;
}
