#include "eval/bench.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <string_view>

#include "layers/branch_kinds.h"

namespace freshet::eval {
namespace {

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// The layer in a weight's name: the first part that is a number; -1: none.
int layer_of(std::string_view name) {
  while (!name.empty()) {
    const std::string_view part = name.substr(0, name.find('.'));
    int layer = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), layer);
    if (error == std::errc() && end == part.data() + part.size()) return layer;
    name.remove_prefix(std::min(name.size(), part.size() + 1));
  }
  return -1;
}

class Runner {
 public:
  Runner(Session& session, const BenchTest& test)
      : session_(session),
        test_(test),
        ids_(some_tokens(std::max<int64_t>(1, test.context()), session.model().spec().vocab_size)) {
  }

  // Appends `tokens` tokens to every sequence, in steps of at most the batch; logits of the last.
  void prefill(int64_t tokens) {
    const int64_t batch = session_.options().batch;
    for (int s = 0; s < test_.sequences; ++s) {
      for (int64_t first = 0; first < tokens; first += batch) {
        const int64_t n = std::min(batch, tokens - first);
        const bool last = first + n == tokens;
        const Session::Piece piece{s, std::span(ids_).first(static_cast<size_t>(n)),
                                   last ? n - 1 : -1};
        (void)session_.run({&piece, 1});
      }
    }
  }
  void generate(int64_t tokens) {
    std::vector<Session::Piece> pieces;
    for (int64_t t = 0; t < tokens; ++t) {
      pieces.clear();
      for (int s = 0; s < test_.sequences; ++s)
        pieces.push_back({s, std::span(ids_).subspan(static_cast<size_t>(t), 1), 0});
      (void)session_.run(pieces);
    }
  }
  void rewind() {
    for (int s = 0; s < test_.sequences; ++s) session_.set_length(s, test_.depth);
  }

 private:
  Session& session_;
  BenchTest test_;
  std::vector<int32_t> ids_;
};

}  // namespace

std::vector<int32_t> some_tokens(int64_t n, int64_t vocab, uint64_t seed) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  uint64_t state = seed;
  for (int32_t& id : ids) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    id = static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(vocab));
  }
  return ids;
}

std::string BenchTest::name() const {
  std::string text;
  if (prompt > 0) text += fmt::format("pp{}", prompt);
  if (generate > 0) text += fmt::format("{}tg{}", prompt > 0 ? "+" : "", generate);
  if (depth > 0) text += fmt::format(" @ d{}", depth);
  if (sequences > 1) text += fmt::format(" x {}", sequences);
  return text;
}

double BenchResult::median_s() const {
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  const size_t n = sorted.size();
  return n % 2 == 1 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0;
}

double BenchResult::tokens_per_s() const {
  return static_cast<double>(test.tokens()) / median_s();
}

double BenchResult::spread() const {
  if (seconds.size() < 2) return 0.0;
  const auto tokens = static_cast<double>(test.tokens());
  double mean = 0.0, sum = 0.0;
  for (const double s : seconds) mean += tokens / s / static_cast<double>(seconds.size());
  for (const double s : seconds) sum += (tokens / s - mean) * (tokens / s - mean);
  return std::sqrt(sum / static_cast<double>(seconds.size() - 1));
}

ModelWork model_work(const Model& model) {
  const ModelSpec& spec = model.spec();
  const double share = expert_share(spec);
  BranchPlace last = last_stored(spec);
  if (last.layer >= 0) {  // a branch with a state runs for all tokens to its end
    const LayerSpec& layer = spec.layers[static_cast<size_t>(last.layer)];
    if (kind_of(layer.branches[static_cast<size_t>(last.branch)]).store == nullptr) ++last.branch;
  }
  ModelWork work;
  // The first matrix with a row for each token is the embedding, and also the head if tied.
  bool embedding = true;
  for (const Model::WeightInfo& w : model.weights()) {
    const double count = static_cast<double>(w.rows) * static_cast<double>(w.cols);
    const double bytes =
        static_cast<double>(w.rows) * static_cast<double>(quant::row_bytes(w.format, w.cols));
    work.parameters += w.rows * w.cols;
    if (w.rows == spec.vocab_size) {
      if (!embedding || spec.tied_embeddings) {
        work.head_weights = count;
        work.head_bytes = bytes;
      }
      embedding = false;
      continue;
    }
    const bool expert =
        (contains(w.name, "experts") || contains(w.name, "exps")) && !contains(w.name, "shared");
    work.layer_weights += expert ? share * count : count;
    work.layer_bytes += expert ? share * bytes : bytes;
    // Branches in front of the last one that stores run for all tokens.
    const int first = last.branch == 0 ? last.layer : last.layer + 1;
    if (last.layer < 0 || layer_of(w.name) < first) continue;
    work.last_weights += expert ? share * count : count;
    work.last_bytes += expert ? share * bytes : bytes;
  }
  double stored = 0.0;  // weights of the projections to keys and values
  if (last.branch == 0) {
    const BranchSpec& branch = spec.layers[static_cast<size_t>(last.layer)].branches.front();
    stored = static_cast<double>(kind_of(branch).stored_outputs(branch)) * spec.hidden_size;
  }
  const double left = work.last_weights > stored ? 1.0 - stored / work.last_weights : 0.0;
  work.last_weights *= left;
  work.last_bytes *= left;
  return work;
}

BenchWork work_of(const Session& session, const BenchTest& test) {
  const ModelSpec& spec = session.model().spec();
  const ModelWork m = model_work(session.model());
  const KvCacheSpec cache = kv_cache_spec(spec, session.kv_types());
  const auto kv_bytes = static_cast<double>(cache.bytes_per_token());         // in full layers
  const double state_bytes = 2.0 * static_cast<double>(cache.state_bytes());  // read and written
  const auto batch = static_cast<double>(session.options().batch);
  const double depth = test.depth, prompt = test.prompt, generate = test.generate;
  const double n = test.sequences;
  const double steps = n * std::ceil(prompt / batch);
  BenchWork work;
  const double ends = prompt > 0 ? n : 0.0;  // steps in which a prompt ends
  work.bytes = steps * m.layer_bytes - (steps - ends) * m.last_bytes + ends * m.head_bytes +
               generate * (m.layer_bytes + m.head_bytes) + (steps + n * generate) * state_bytes +
               n * kv_bytes *
                   (prompt * (depth + prompt / 2.0) / std::max(1.0, std::min(batch, prompt)) +
                    generate * (depth + prompt + generate / 2.0));
  work.operations =
      2.0 * n *
      ((prompt + generate) * m.layer_weights - std::max(0.0, prompt - 1.0) * m.last_weights +
       ((prompt > 0 ? 1.0 : 0.0) + generate) * m.head_weights);
  return work;
}

Result<BenchResult> run_bench(Session& session, const BenchTest& test, int repetitions,
                              const std::function<bool()>& goes_on) {
  using Clock = std::chrono::steady_clock;
  FRESHET_CHECK(test.tokens() > 0 && test.sequences <= session.options().sequences);
  Runner runner(session, test);
  for (int s = 0; s < test.sequences; ++s) session.reset(s);
  runner.prefill(test.depth);
  // Once untimed: page faults, clock frequencies.
  runner.prefill(std::min(test.prompt, 64));
  runner.generate(std::min(test.generate, 2));
  BenchResult result{test, work_of(session, test), {}};
  for (int i = 0; i < repetitions; ++i) {
    if (!goes_on()) return cancelled("interrupted");
    runner.rewind();
    const auto begin = Clock::now();
    runner.prefill(test.prompt);
    runner.generate(test.generate);
    result.seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return result;
}

}  // namespace freshet::eval
