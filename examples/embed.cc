// Compares two texts by their embeddings: the mean of the final hidden states.
//
//   example_embed MODEL [TEXT TEXT]
#include <cmath>
#include <cstdio>
#include <future>
#include <string>
#include <vector>

#include "freshet/engine.h"
#include "tokenizer/tokenizer.h"

namespace {

using Embedding = std::vector<float>;

freshet::Result<Embedding> embed(freshet::Engine& engine, const std::string& text) {
  Embedding embedding;
  std::promise<void> done;
  freshet::Request request;
  request.prompt = engine.tokenizer().encode(text);
  request.pooling = freshet::Pooling::kMean;
  request.on_embedding = [&](const Embedding& states) { embedding = states; };
  request.on_done = [&](const freshet::Usage&) { done.set_value(); };
  const auto number = engine.submit(std::move(request));
  if (!number.ok()) return number.status();
  done.get_future().wait();
  return embedding;
}

double cosine(const Embedding& a, const Embedding& b) {
  double ab = 0.0, aa = 0.0, bb = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += double{a[i]} * b[i];
    aa += double{a[i]} * a[i];
    bb += double{b[i]} * b[i];
  }
  return ab / std::sqrt(aa * bb);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 4) {
    std::fprintf(stderr, "usage: example_embed MODEL [TEXT TEXT]\n");
    return 2;
  }
  freshet::EngineOptions options;
  options.model = argv[1];
  auto engine = freshet::Engine::load(options);
  if (!engine.ok()) {
    std::fprintf(stderr, "%s\n", engine.status().message().c_str());
    return 1;
  }

  const std::string first = argc == 4 ? argv[2] : "A dog barked in the garden.";
  const std::string second = argc == 4 ? argv[3] : "He signed the contract.";
  for (const std::string& other : {first, second}) {
    const auto a = embed(**engine, first);
    const auto b = embed(**engine, other);
    if (!a.ok() || !b.ok()) {
      std::fprintf(stderr, "%s\n", (a.ok() ? b : a).status().message().c_str());
      return 1;
    }
    std::printf("%s | %s: cosine similarity %.3f\n", first.c_str(), other.c_str(), cosine(*a, *b));
  }
  return 0;
}
