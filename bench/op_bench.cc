// Measures single ops of the CPU backend against the machine's limits, which are measured in the
// same run.
//
// usage: freshet_op_bench [-t THREADS] [--cpu-isa ISA] [--rounds N] [--tokens N,..]
//                         [--types T,..] [--shape ROWSxCOLS] |
//                         [--context N] [--kv-cache-dtype T,..] [--heads N] [--head-dim N]
//                         [--turns N [--budget N]] |
//                         [--vocab N]
//
// GEMM: multiplies by copies of a matrix in turn, as layers do; the copies together do not fit any
// cache. With --context, attention instead: the last N of that many tokens of one sequence, 32
// heads (or --heads) on 8 KV heads of 64 (or --head-dim). With --vocab, sampling a token from that
// many logits, on one thread, as a step of the engine does for each of its sequences.
//
// Prints one line per test: median time of a call, bytes per second and their share of the read
// ceiling, operations per second and their share of the arithmetic that limits the GEMM's kernel.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "backend/cpu/backend.h"
#include "backend/cpu/ceilings.h"
#include "ops/ops.h"
#include "quant/format.h"
#include "sampling/sampler.h"

namespace freshet {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kBeyondCaches = size_t{256} << 20;
constexpr double kLeastSeconds = 0.15;  // per test
constexpr int64_t kRandomRows = 64;     // random rows, repeated to fill a matrix
constexpr int kKvHeads = 8;

struct Options {
  int threads = 0;
  std::string isa;
  std::vector<std::string> types = {"q4_0", "q8_0", "q4_k", "q6_k", "bf16"};
  std::string shape = "8192x2048";
  std::vector<int64_t> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 512};
  int64_t context = 0;
  std::vector<std::string> kv_types = {"f16"};
  int heads = 32;
  int head_dim = 64;
  int64_t vocab = 0;
  int rounds = 5;
  int turns = 0;
  int budget = 0;  // tokens
  std::string policy = "quest";
};

struct Bench {
  ThreadPool pool;
  std::unique_ptr<ops::Ops> ops;
  double read = 0.0;
  int rounds = 0;

  explicit Bench(int threads) : pool(threads) {}
};

std::vector<float> random_floats(size_t n) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (float& x : v) x = normal(rng);
  return v;
}

// Median seconds per call, over rounds of enough calls to take long enough.
template <class Call>
double seconds_of(const Bench& b, const Call& call) {
  call(0);
  std::vector<double> seconds;
  int next = 1;
  while (static_cast<int>(seconds.size()) < b.rounds ||
         std::accumulate(seconds.begin(), seconds.end(), 0.0) < kLeastSeconds) {
    const Clock::time_point start = Clock::now();
    call(next++);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::nth_element(seconds.begin(),
                   seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2),
                   seconds.end());
  return seconds[seconds.size() / 2];
}

void print_row(const Bench& b, const std::string& name, int64_t tokens, double seconds,
               double bytes, double operations, double ceiling) {
  std::printf("%-20s %6lld %10.1f us %7.1f GB/s %3.0f %% %8.1f GOP/s", name.c_str(),
              static_cast<long long>(tokens), seconds * 1e6, bytes / seconds / 1e9,
              100.0 * bytes / seconds / b.read, operations / seconds / 1e9);
  if (ceiling > 0.0) std::printf(" %3.0f %%", 100.0 * operations / seconds / ceiling);
  std::printf("\n");
  std::fflush(stdout);
}

// All formats that can be written: "f32, f16, ...".
std::string type_names() {
  std::string names;
  for (const quant::FormatInfo& f : quant::all_formats()) {
    if (f.encode == nullptr) continue;
    if (!names.empty()) names += ", ";
    names += f.name;
  }
  return names;
}

Status bench_products(Bench& b, const Options& o, const std::string& type, int64_t rows,
                      int64_t cols) {
  const std::optional<quant::Format> known = quant::format_by_name(type);
  if (!known || quant::info(*known).encode == nullptr) {
    return invalid_argument("--types {}: no such format; there are {}", type, type_names());
  }
  const quant::Format format = *known;
  if (cols % quant::info(format).block_size != 0) {
    return invalid_argument("--shape {}: rows of {} come in blocks of {}", o.shape, type,
                            quant::info(format).block_size);
  }
  const size_t row_bytes = quant::row_bytes(format, cols);
  const std::vector<float> numbers = random_floats(static_cast<size_t>(kRandomRows * cols));
  std::vector<uint8_t> encoded(row_bytes * kRandomRows);
  for (int64_t r = 0; r < kRandomRows; ++r) {
    quant::info(format).encode(numbers.data() + r * cols,
                               encoded.data() + static_cast<size_t>(r) * row_bytes, cols, nullptr);
  }
  std::vector<const uint8_t*> row_at(static_cast<size_t>(rows));
  for (size_t r = 0; r < row_at.size(); ++r)
    row_at[r] = encoded.data() + r % kRandomRows * row_bytes;
  const size_t copies =
      std::max<size_t>(2, kBeyondCaches / (row_bytes * static_cast<size_t>(rows)) + 1);
  std::vector<ops::Weight> weights;
  for (size_t i = 0; i < copies; ++i) {
    FRESHET_ASSIGN_OR_RETURN(ops::Weight w, b.ops->pack(format, row_at, cols));
    weights.push_back(std::move(w));
  }
  const auto ceiling = cpu::measure_arithmetic(b.pool, *weights[0].kernel);
  std::printf("%s, %lldx%lld, of %s %.0f GOP/s:\n", weights[0].kernel->name,
              static_cast<long long>(rows), static_cast<long long>(cols),
              std::string(ceiling.name).c_str(), ceiling.rate / 1e9);
  for (const int64_t tokens : o.tokens) {
    std::vector<float> x = random_floats(static_cast<size_t>(tokens * cols));
    std::vector<float> out(static_cast<size_t>(tokens * rows));
    const Matrix in{x.data(), tokens, cols, cols};
    const double seconds = seconds_of(b, [&](int i) {
      const ops::Product product{&weights[static_cast<size_t>(i) % copies],
                                 {out.data(), tokens, rows, rows}};
      b.ops->matmul(in, {&product, 1});
    });
    const double work = 2.0 * static_cast<double>(rows * cols * tokens);
    print_row(b, weights[0].kernel->name, tokens, seconds,
              static_cast<double>(weights[0].packed.size()), work, ceiling.rate);
  }
  return {};
}

// Attention of one layer for one type of keys and values. The layers of a model follow each other,
// so that no cache holds them all.
struct AttentionCase {
  ops::KvShape shape;
  std::string type;
  Buffer cache;
  size_t layer_bytes = 0, layers = 0;
  ops::BlockSelection selection;

  ops::KvView view(size_t i) {
    return {shape, cache.data() + i % layers * layer_bytes,
            static_cast<int32_t>(layer_bytes / shape.block_bytes())};
  }
};

// What all types share: one sequence with its keys, and queries of its last tokens.
struct AttentionInput {
  AttentionInput(const Options& o, int64_t most_tokens) : context{static_cast<int32_t>(o.context)} {
    kv_cols = int64_t{kKvHeads} * o.head_dim;
    cols = int64_t{o.heads} * o.head_dim;
    blocks = (o.context + ops::kBlockTokens - 1) / ops::kBlockTokens;
    table.resize(static_cast<size_t>(blocks));
    std::iota(table.begin(), table.end(), 0);
    kv = random_floats(static_cast<size_t>(o.context * kv_cols));
    q = random_floats(static_cast<size_t>(most_tokens * cols));
    out.resize(q.size());
  }
  ops::AttentionBatch batch(const std::vector<int32_t>& starts) const {
    return {.query_start = starts,
            .context_len = context,
            .block_tables = table.data(),
            .table_stride = blocks};
  }

  std::vector<int32_t> context, table;
  std::vector<float> kv, q, out;
  int64_t kv_cols = 0, cols = 0, blocks = 0;
};

Result<AttentionCase> make_case(Bench& b, const Options& o, AttentionInput& in,
                                const std::string& type, int budget = 0) {
  AttentionCase c;
  c.type = budget > 0 ? fmt::format("{}, {} read", type, budget) : type;
  const bool tokens = o.policy == "sparq", fixed = o.policy == "static";
  (fixed ? c.selection.window : c.selection.blocks) = budget / ops::kBlockTokens;
  if (tokens) c.selection.components = 16;
  FRESHET_ASSIGN_OR_RETURN(const ops::KvType kv_type, ops::kv_type_by_name(type));
  c.shape = {kv_type, kKvHeads, o.head_dim, o.head_dim, false};
  c.shape.bounded = budget > 0 && !tokens && !fixed;
  c.shape.summed = budget > 0 && tokens;
  c.layer_bytes = static_cast<size_t>(in.blocks) * c.shape.block_bytes();
  c.layers = std::max<size_t>(2, kBeyondCaches / c.layer_bytes + 1);
  FRESHET_ASSIGN_OR_RETURN(c.cache, Buffer::allocate(c.layers * c.layer_bytes));
  const std::vector<int32_t> whole = {0, static_cast<int32_t>(o.context)};
  const Matrix keys{in.kv.data(), o.context, in.kv_cols, in.kv_cols};
  for (size_t i = 0; i < c.layers; ++i) b.ops->store_kv(c.view(i), keys, keys, in.batch(whole));
  return c;
}

void attend(Bench& b, const Options& o, AttentionInput& in, AttentionCase& c, int64_t tokens,
            int layer) {
  const std::vector<int32_t> starts = {0, static_cast<int32_t>(tokens)};
  const ops::AttentionParams params{.heads = o.heads, .scale = 0.125f};
  const Matrix out{in.out.data(), tokens, in.cols, in.cols};
  const Matrix q{in.q.data(), tokens, in.cols, in.cols};
  const ops::KvView view = c.view(static_cast<size_t>(layer));
  if (!c.selection.selects()) return b.ops->attention(out, q, view, in.batch(starts), params);
  b.ops->selected_attention(out, q, view, in.batch(starts), params, {&c.selection, 1});
}

Status bench_attention(Bench& b, const Options& o, const std::string& type) {
  AttentionInput in(o, *std::max_element(o.tokens.begin(), o.tokens.end()));
  FRESHET_ASSIGN_OR_RETURN(AttentionCase c, make_case(b, o, in, type));
  std::printf("%s, %s, of context %lld:\n", std::string(b.ops->attention_row(c.shape)).c_str(),
              type.c_str(), static_cast<long long>(o.context));
  for (const int64_t tokens : o.tokens) {
    if (tokens > o.context) continue;
    const double seconds = seconds_of(b, [&](int i) { attend(b, o, in, c, tokens, i); });
    const double pairs =
        static_cast<double>(tokens) * static_cast<double>(2 * o.context - tokens + 1) / 2;
    print_row(b, "attention", tokens, seconds, static_cast<double>(c.layer_bytes),
              pairs * static_cast<double>(in.cols) * 4.0, 0.0);
  }
  return {};
}

// The types in turns, call by call, so that what else the machine does meets all of them. On one
// thread it is processor time that counts.
Status bench_turns(Bench& b, const Options& o) {
  const auto now = [&] {
    if (b.pool.size() == 1) return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
    return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  };
  AttentionInput in(o, *std::max_element(o.tokens.begin(), o.tokens.end()));
  std::vector<AttentionCase> cases;
  for (const std::string& type : o.kv_types) {
    FRESHET_ASSIGN_OR_RETURN(AttentionCase c, make_case(b, o, in, type));
    cases.push_back(std::move(c));
    if (o.budget == 0) continue;
    FRESHET_ASSIGN_OR_RETURN(AttentionCase selects, make_case(b, o, in, type, o.budget));
    cases.push_back(std::move(selects));
  }
  const auto median = [](std::vector<double> v) {
    std::ranges::sort(v);
    return v[v.size() / 2];
  };
  for (const int64_t tokens : o.tokens) {
    if (tokens > o.context) continue;
    constexpr int kCalls = 4;  // of a type, one after the other
    std::vector<std::vector<double>> seconds(cases.size()), gains(cases.size());
    for (int turn = -1; turn < o.turns; ++turn) {
      for (size_t i = 0; i < cases.size(); ++i) {
        const double start = now();
        for (int call = 0; call < kCalls; ++call) {
          attend(b, o, in, cases[i], tokens, kCalls * (turn + 1) + call);
        }
        if (turn < 0) continue;  // warms up
        seconds[i].push_back((now() - start) / kCalls);
        gains[i].push_back(seconds.front().back() / seconds[i].back());
      }
    }
    for (size_t i = 0; i < cases.size(); ++i) {
      const std::string row(b.ops->attention_row(cases[i].shape));
      std::printf("%-22s %-15s %6lld of %6lld %10.1f us %5.1f GB/s, %.3f times as fast as %s\n",
                  row.c_str(), cases[i].type.c_str(), static_cast<long long>(tokens),
                  static_cast<long long>(o.context), median(seconds[i]) * 1e6,
                  static_cast<double>(cases[i].layer_bytes) / median(seconds[i]) / 1e9,
                  median(gains[i]), cases.front().type.c_str());
    }
  }
  return {};
}

// Logits like a model's: most within a few units of each other, a few far above.
void bench_sampling(const Options& o) {
  std::vector<float> logits = random_floats(static_cast<size_t>(o.vocab));
  for (float& x : logits) x *= 2.5f;
  for (size_t i = 0; i < logits.size(); i += 4001) logits[i] += 9.0f;
  const std::pair<const char*, SamplingParams> cases[] = {
      {"greedy", {.temperature = 0.0f}},
      {"drawn", {}},
      {"drawn, T 0.3", {.temperature = 0.3f}},  // most shares round to zero
      {"drawn, T 5", {.temperature = 5.0f}},
      {"top-k 20", {.top_k = 20}},
      {"top-k 20000", {.top_k = 20000}},
      {"top-p 0.95", {.temperature = 0.8f, .top_p = 0.95f}},
      {"top-k 20, top-p 0.95", {.temperature = 0.6f, .top_k = 20, .top_p = 0.95f}},
      {"min-p 0.05", {.min_p = 0.05f}},
      {"penalties", {.temperature = 0.0f, .repetition_penalty = 1.1f, .presence_penalty = 0.5f}},
      {"5 logprobs", {.temperature = 0.0f, .logprobs = 5}},
  };
  const std::vector<int32_t> prompt(512, 7);
  SamplerScratch scratch(o.vocab);
  for (const auto& [name, params] : cases) {
    Sampler sampler(params, o.vocab, 1, 0, prompt, 1, {});
    std::vector<double> seconds;
    std::vector<TokenLogprob> logprobs;
    for (int i = 0; i < std::max(100, o.rounds); ++i) {
      std::vector<float> row = logits;  // sampling changes it
      const Clock::time_point start = Clock::now();
      sampler.sample(row, i, scratch, {}, params.logprobs >= 0 ? &logprobs : nullptr);
      seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    std::ranges::sort(seconds);
    std::printf("%-22s %8.1f us, at most %8.1f us\n", name, seconds[seconds.size() / 2] * 1e6,
                seconds.back() * 1e6);
  }
}

Status run(const Options& o) {
  if (o.vocab > 0) {
    bench_sampling(o);
    return {};
  }
  ops::CpuIsa isa = ops::kAnyIsa;
  if (!o.isa.empty()) {
    FRESHET_ASSIGN_OR_RETURN(isa, ops::isa_by_name(o.isa));
  }
  long long rows = 0, cols = 0;
  if (std::sscanf(o.shape.c_str(), "%lldx%lld", &rows, &cols) != 2 || rows <= 0 || cols <= 0) {
    return invalid_argument("--shape {}: expected ROWSxCOLS", o.shape);
  }
  Bench b(o.threads);
  b.rounds = o.rounds;
  FRESHET_ASSIGN_OR_RETURN(b.ops, ops::Ops::create(b.pool, cpu::kernels(), cpu::detect(isa), {}));
  const ops::Ops::ShapeLimits limits = {
      .tokens = *std::max_element(o.tokens.begin(), o.tokens.end()),
      .max_cols = cols,
      .max_rows = rows,
      .heads = o.heads,
      .max_head_dim = o.head_dim,
      .max_context = o.context};
  FRESHET_RETURN_IF_ERROR(b.ops->set_scratch(b.ops->scratch_bytes(limits)));
  b.read = cpu::measure_read(b.pool);
  std::printf("%d threads, read %.1f GB/s\n", b.pool.size(), b.read / 1e9);
  if (o.context > 0 && o.turns > 0) return bench_turns(b, o);
  for (const std::string& type : o.kv_types) {
    if (o.context > 0) FRESHET_RETURN_IF_ERROR(bench_attention(b, o, type));
  }
  if (o.context > 0) return {};
  for (const std::string& type : o.types)
    FRESHET_RETURN_IF_ERROR(bench_products(b, o, type, rows, cols));
  return {};
}

}  // namespace
}  // namespace freshet

int main(int argc, char** argv) try {
  CLI::App app("Speed of single ops of the CPU backend");
  freshet::Options o;
  app.add_option("-t,--threads", o.threads, "threads (0: all cores)");
  app.add_option("--cpu-isa", o.isa, "highest instruction set to use");
  app.add_option("--types", o.types, "formats of weights: " + freshet::type_names())
      ->delimiter(',');
  app.add_option("--shape", o.shape, "ROWSxCOLS of the weights");
  app.add_option("--tokens", o.tokens, "rows of activations")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 24));
  app.add_option("--context", o.context, "measure attention over so many tokens")
      ->check(CLI::Range(1, 1 << 24));
  app.add_option("--kv-cache-dtype", o.kv_types, "types of keys and values")->delimiter(',');
  app.add_option("--heads", o.heads, "query heads of attention, a multiple of 8")
      ->check(CLI::Range(8, 1024));
  app.add_option("--head-dim", o.head_dim, "their size, a multiple of 8")
      ->check(CLI::Range(8, 512));
  app.add_option("--vocab", o.vocab, "measure sampling from so many logits")
      ->check(CLI::Range(int64_t{1}, freshet::kMostVocab));
  app.add_option("--turns", o.turns,
                 "with --context: compare the types, each in turn, this many times; with -t 1 by "
                 "processor time")
      ->check(CLI::Range(1, 10000));
  app.add_option("--budget", o.budget,
                 "with --turns: each type also with so many tokens read selectively")
      ->check(CLI::Range(64, 1 << 24));
  app.add_option("--policy", o.policy, "How it is chosen: quest, sparq or static")
      ->check(CLI::IsMember({"quest", "sparq", "static"}));
  app.add_option("--rounds", o.rounds, "least number of timed calls")
      ->check(CLI::Range(1, 1 << 24));
  CLI11_PARSE(app, argc, argv);
  const freshet::Status status = freshet::run(o);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
