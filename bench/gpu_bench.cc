// Measures a GPU's forward pass on a shape with random weights, against its memory bandwidth.
//
// usage: freshet_gpu_bench CONFIG.json FORMAT[+TYPE] TEST...
//   FORMAT of weights, or a type of GGUF files (q4_k_m); TYPE of keys and values (f16): fp8+fp8
//   TEST  d8@512   decoding of 8 sequences that hold 512 tokens each
//         p4x1024  prompts of 4 sequences of 1,024 tokens, in one step
//         e8@512   greedy decoding through the engine; l8@512: with a bias, so that the host
//                  receives all logits; s8@512: with temperature and top-p
//         m8@512+2x128  a mixed step: decoding of 8, prompts of 2
//         o64x128+128@32/2048  64 requests of 128 tokens that ask for 128, 32 running at once, in
//                  steps of at most 2,048 tokens, greedy; O: sampled at temperature 1
//         a8@512   decode attention only, one cache per layer
//         A4x1024  prefill attention only
//         S8       tokens sampled from 8 rows of logits
//         w8       GEMMs of 8 rows with matrices of the shape's sizes, one by one
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <future>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>

#include "base/json.h"
#include "engine/step_loop.h"
#include "layers/branch_kinds.h"
#include "layers/model.h"
#include "models/dummy.h"
#include "models/registry.h"
#include "quantizer/recipe.h"
#include "runtime/loaded_model.h"

namespace freshet {
namespace {

using Clock = std::chrono::steady_clock;

// The formats that a recipe gives the matrices of a decoder, by role and layer.
using RoleFormats = std::map<std::pair<models::Role, int>, quant::Format>;

struct Bench {
  std::shared_ptr<runtime::Compute> compute;
  ops::Ops* ops = nullptr;  // belongs to `compute`
  ModelSpec spec;
  quant::Format format = quant::Format::kBF16;
  std::optional<quantizer::Recipe> recipe;  // if it mixes several formats
  RoleFormats recipe_formats;
  ops::KvType kv_type = ops::KvType::kF16;
  std::unique_ptr<runtime::LoadedModel> model;
  double read_rate = 0.0;
  double layer_bytes = 0.0, head_bytes = 0.0, layer_weights = 0.0;

  double all_bytes() const { return layer_bytes + head_bytes; }  // read by a step of one token
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Pools in which each of `sequences` has `stride` blocks of tokens, and one state.
std::vector<int32_t> pools_of(const Bench& b, int64_t sequences, int64_t stride) {
  return kv_cache_spec(b.spec, b.kv_type).pools(sequences, sequences * stride);
}
// The first block of a sequence, or its state.
int32_t first_block(const Bench& b, size_t group, int64_t sequence, int64_t stride) {
  const bool state = static_cast<int>(group) == kv_cache_spec(b.spec, b.kv_type).state_group();
  return static_cast<int32_t>(state ? sequence : sequence * stride);
}

// A batch of `sequences` with `queries` new tokens each after `before` cached ones.
ForwardBatch batch_of(const Bench& b, int sequences, int before, int queries, int64_t stride,
                      bool logits) {
  ForwardBatch batch;
  batch.query_start.push_back(0);
  const size_t groups = kv_cache_spec(b.spec, b.kv_type).groups.size();
  batch.tables.resize(groups);
  for (int s = 0; s < sequences; ++s) {
    for (int q = 0; q < queries; ++q) {
      batch.token_ids.push_back((s * 7919 + (before + q) * 104729) % b.spec.vocab_size);
      batch.positions.push_back(before + q);
    }
    batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
    batch.context_len.push_back(before + queries);
    if (logits) batch.logit_rows.push_back(batch.query_start.back() - 1);
    for (size_t g = 0; g < groups; ++g) {
      BlockTables& t = batch.tables[g];
      t.stride = stride;
      for (int32_t i = 0; i < stride; ++i) t.ids.push_back(first_block(b, g, s, stride) + i);
    }
  }
  return batch;
}

// Appends sequences to the batch, with their blocks after the existing ones.
void append(const Bench& b, ForwardBatch& to, const ForwardBatch& more, int sequences) {
  const auto tokens = static_cast<int32_t>(to.token_ids.size());
  to.token_ids.insert(to.token_ids.end(), more.token_ids.begin(), more.token_ids.end());
  to.positions.insert(to.positions.end(), more.positions.begin(), more.positions.end());
  for (size_t s = 1; s < more.query_start.size(); ++s)
    to.query_start.push_back(tokens + more.query_start[s]);
  to.context_len.insert(to.context_len.end(), more.context_len.begin(), more.context_len.end());
  for (const int32_t row : more.logit_rows) to.logit_rows.push_back(tokens + row);
  for (size_t g = 0; g < to.tables.size(); ++g) {
    const int32_t first = first_block(b, g, sequences, to.tables[g].stride);
    for (const int32_t id : more.tables[g].ids) to.tables[g].ids.push_back(first + id);
  }
}

// With `prompts` prompts of `length` tokens each in the same step.
Status run_model(Bench& b, const std::string& name, int sequences, int context, bool prompt,
                 int prompts = 0, int length = 0) {
  const int64_t stride = (context + 1 + ops::kBlockTokens - 1) / ops::kBlockTokens + 1;
  const KvCacheSpec kv = kv_cache_spec(b.spec, b.kv_type);
  FRESHET_ASSIGN_OR_RETURN(
      const KvStorage cache,
      b.model->make_cache(b.kv_type, pools_of(b, sequences + prompts, stride)));
  const int64_t tokens =
      prompt ? int64_t{sequences} * context : std::max(2048, sequences + prompts * length);
  FRESHET_RETURN_IF_ERROR(b.model->reserve({tokens, sequences + prompts, context + 1}));
  FRESHET_ASSIGN_OR_RETURN(Buffer logits, b.model->make_logits(sequences + prompts));
  std::vector<double> seconds;
  const auto timed = [&](const ForwardBatch& batch) {
    const auto begin = Clock::now();
    b.model->model().forward(batch, cache, {logits.as<float>()});
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  if (prompt) {
    const ForwardBatch batch = batch_of(b, sequences, 0, context, stride, true);
    for (int i = 0; i < 4; ++i) seconds.push_back(timed(batch));
    seconds.erase(seconds.begin());
    const double s = median(seconds);
    std::printf("%-10s %9.3f ms  %9.0f tok/s  products %6.1f TFLOP/s\n", name.c_str(), s * 1e3,
                static_cast<double>(tokens) / s,
                2.0 * b.layer_weights * static_cast<double>(tokens) / s / 1e12);
    return {};
  }
  const int together = std::max(1, 2048 / context);
  for (int s = 0; s < sequences; s += together) {  // real keys and values
    for (int first = 0; first < context; first += 2048) {
      ForwardBatch some = batch_of(b, std::min(together, sequences - s), first,
                                   std::min(2048, context - first), stride, false);
      for (size_t g = 0; g < some.tables.size(); ++g)
        for (int32_t& id : some.tables[g].ids) id += first_block(b, g, s, stride);
      (void)timed(some);
    }
  }
  ForwardBatch batch = batch_of(b, sequences, context, 1, stride, true);
  if (prompts > 0) append(b, batch, batch_of(b, prompts, 0, length, stride, true), sequences);
  for (int i = 0; i < 40; ++i) seconds.push_back(timed(batch));
  seconds.erase(seconds.begin(), seconds.begin() + 5);
  const double s = median(seconds);
  double kv_bytes = 0.0;
  for (const KvLayer& layer : kv.layers) {  // states are read and written
    const double each = layer.state_bytes > 0 ? 2.0 * static_cast<double>(layer.state_bytes)
                                              : static_cast<double>(layer.block_bytes()) /
                                                    ops::kBlockTokens * context;
    kv_bytes += each * sequences;
  }
  std::printf("%-10s %9.3f ms  %9.1f tok/s  read %5.2f TB/s, %4.1f %% of the ceiling\n",
              name.c_str(), s * 1e3, (sequences + prompts * length) / s,
              (b.all_bytes() + kv_bytes) / s / 1e12,
              (b.all_bytes() + kv_bytes) / s / b.read_rate * 100.0);
  return {};
}

// The same through the engine, from one token of a sequence to the next: includes scheduling,
// sampling and delivery.
Status run_engine(Bench& b, const std::string& name, int sequences, int context, char how) {
  constexpr int kTokens = 96, kChunk = 2048;
  const int longest = context + kTokens + 1;
  const KvCacheSpec kv = kv_cache_spec(b.spec, b.kv_type);
  engine::StepLoopOptions options;
  options.scheduler.max_num_seqs = sequences;
  options.scheduler.max_num_batched_tokens = kChunk;
  options.scheduler.max_model_len = longest;
  options.blocks.assign(kv.groups.size(), (longest / ops::kBlockTokens + 2) * sequences);
  FRESHET_ASSIGN_OR_RETURN(KvStorage cache, b.model->make_cache(b.kv_type, options.blocks));
  FRESHET_RETURN_IF_ERROR(b.model->reserve({kChunk, options.scheduler.max_logit_rows, longest}));
  FRESHET_ASSIGN_OR_RETURN(
      const auto loop, engine::StepLoop::start(options, b.model->model(), std::move(cache), nullptr,
                                               b.compute->pool(), b.ops->host_memory()));
  std::vector<Clock::time_point> times;  // of the last sequence's tokens: then all decode
  std::vector<std::promise<void>> done(static_cast<size_t>(sequences));
  for (int s = 0; s < sequences; ++s) {
    Request r;
    for (int i = 0; i < context; ++i)
      r.prompt.push_back((s * 7919 + i * 104729) % static_cast<int32_t>(b.spec.vocab_size));
    r.params.max_tokens = kTokens;
    r.params.ignore_eos = true;
    r.params.temperature = how == 's' ? 0.8f : 0.0f;
    r.params.top_p = how == 's' ? 0.95f : 1.0f;
    if (how == 'l') r.params.logit_bias = {{0, 0.0f}};
    r.params.seed = 1;
    if (s + 1 == sequences) r.on_delta = [&](const Delta&) { times.push_back(Clock::now()); };
    r.on_done = [&done, s](const Usage&) { done[static_cast<size_t>(s)].set_value(); };
    FRESHET_RETURN_IF_ERROR(loop->submit(std::move(r)).status());
  }
  for (auto& d : done) d.get_future().wait();
  std::vector<double> seconds;
  for (size_t i = 9; i < times.size() / 2; ++i)
    seconds.push_back(std::chrono::duration<double>(times[i] - times[i - 1]).count());
  const double s = median(seconds);
  std::printf("%-10s %9.3f ms  %9.1f tok/s\n", name.c_str(), s * 1e3, sequences / s);
  return {};
}

// Many requests at once, timed from the first to the last token.
Status run_offline(Bench& b, const std::string& name, int requests, int input, int output,
                   int sequences, int step_tokens, bool drawn) {
  const int longest = input + output + 1;
  const KvCacheSpec kv = kv_cache_spec(b.spec, b.kv_type);
  engine::StepLoopOptions options;
  options.scheduler.max_num_seqs = sequences;
  options.scheduler.max_logit_rows = std::max(256, sequences);
  options.scheduler.max_num_batched_tokens = step_tokens;
  options.scheduler.max_model_len = longest;
  options.share_prefixes = false;
  options.blocks.assign(kv.groups.size(), (longest / ops::kBlockTokens + 2) * sequences);
  FRESHET_ASSIGN_OR_RETURN(KvStorage cache, b.model->make_cache(b.kv_type, options.blocks));
  FRESHET_RETURN_IF_ERROR(
      b.model->reserve({step_tokens, options.scheduler.max_logit_rows, longest}));
  FRESHET_ASSIGN_OR_RETURN(
      const auto loop, engine::StepLoop::start(options, b.model->model(), std::move(cache), nullptr,
                                               b.compute->pool(), b.ops->host_memory()));
  std::vector<std::promise<void>> done(static_cast<size_t>(requests));
  const auto begin = Clock::now();
  for (int s = 0; s < requests; ++s) {
    Request r;
    for (int i = 0; i < input; ++i)
      r.prompt.push_back((s * 7919 + i * 104729) % static_cast<int32_t>(b.spec.vocab_size));
    r.params.max_tokens = output;
    r.params.ignore_eos = true;
    r.params.temperature = drawn ? 1.0f : 0.0f;
    r.params.seed = 1;
    r.on_done = [&done, s](const Usage&) { done[static_cast<size_t>(s)].set_value(); };
    FRESHET_RETURN_IF_ERROR(loop->submit(std::move(r)).status());
  }
  for (auto& d : done) d.get_future().wait();
  const double s = std::chrono::duration<double>(Clock::now() - begin).count();
  const double outputs = static_cast<double>(requests) * output;
  const EngineStats stats = loop->stats();
  std::printf("%-10s %9.3f s  %9.1f output tok/s, %lld steps of %.0f tokens, waited %.1f %%\n",
              name.c_str(), s, outputs / s, static_cast<long long>(stats.steps),
              static_cast<double>(stats.step_tokens) / static_cast<double>(stats.steps),
              stats.device_wait_seconds / s * 100.0);
  return {};
}

// Random bytes that are small values in F16 and BF16.
std::vector<uint8_t> noise_bytes(bool both_signs = false) {
  std::vector<uint8_t> v(1 << 22);
  uint64_t state = 7;
  const int high = both_signs ? 0xbb : 0x3b;  // no huge values
  for (size_t i = 0; i < v.size(); ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    v[i] = static_cast<uint8_t>(state >> 56) & (i % 2 != 0 ? high : 0xbf);  // no E4M3 NaN
  }
  return v;
}

// Attention only, for the last `queries` tokens of each sequence; each layer has its own cache.
Status run_attention(Bench& b, const std::string& name, int sequences, int context, int queries) {
  const int64_t stride = (context + ops::kBlockTokens - 1) / ops::kBlockTokens;
  const KvCacheSpec kv = kv_cache_spec(b.spec, b.kv_type);
  FRESHET_ASSIGN_OR_RETURN(
      const KvStorage cache,
      KvStorage::allocate(
          kv, std::vector<int32_t>(kv.groups.size(), static_cast<int32_t>(stride * sequences)),
          b.ops->memory()));
  const std::vector<uint8_t> noise = noise_bytes(true);
  const auto layers = static_cast<int>(b.spec.layers.size());
  const auto fill = [&](uint8_t* to, size_t bytes, const uint8_t* from, size_t size) -> Status {
    size_t filled = std::min(bytes, size);
    FRESHET_RETURN_IF_ERROR(b.ops->device()->write(to, from, filled));
    for (; filled < bytes; filled *= 2) {
      b.ops->memory()->copy(to + filled, to, std::min(filled, bytes - filled));
    }
    return {};
  };
  for (int l = 0; l < layers; ++l) {
    FRESHET_RETURN_IF_ERROR(fill(cache.layer(l).data, cache.bytes() / static_cast<size_t>(layers),
                                 noise.data(), noise.size()));
  }
  const int heads = b.spec.layers[0].attention().heads;
  const ops::KvShape& shape = kv.layers[0].shape;
  const int64_t q_cols = int64_t{heads} * shape.key_dim, cols = int64_t{heads} * shape.value_dim;
  const int64_t tokens = int64_t{sequences} * queries;
  std::vector<float> some(size_t{1} << 20);
  for (size_t i = 0; i < some.size(); ++i) {
    some[i] = static_cast<float>(static_cast<int8_t>(noise[2 * i])) / 64.0f;
  }
  FRESHET_ASSIGN_OR_RETURN(
      Buffer q,
      Buffer::allocate(static_cast<size_t>(tokens * q_cols) * sizeof(float), b.ops->memory()));
  FRESHET_RETURN_IF_ERROR(fill(q.data(), static_cast<size_t>(tokens * q_cols) * sizeof(float),
                               reinterpret_cast<const uint8_t*>(some.data()),
                               some.size() * sizeof(float)));
  FRESHET_ASSIGN_OR_RETURN(
      Buffer out,
      Buffer::allocate(static_cast<size_t>(tokens * cols) * sizeof(float), b.ops->memory()));
  FRESHET_RETURN_IF_ERROR(b.ops->set_scratch(size_t{1} << 30));
  const ForwardBatch batch = batch_of(b, sequences, context - queries, queries, stride, false);
  const ops::AttentionBatch places{batch.query_start, batch.context_len, batch.tables[0].ids.data(),
                                   stride};
  const std::span<const int32_t> arrays[] = {batch.query_start, batch.context_len,
                                             batch.tables[0].ids};
  ops::StepInputs inputs;
  inputs.arrays = arrays;
  std::vector<double> seconds;
  for (int i = 0; i < 8; ++i) {
    seconds.push_back(b.ops->device()->time([&] {
      b.ops->device()->step(inputs, [&] {
        for (int l = 0; l < layers; ++l) {
          b.ops->attention({out.as<float>(), tokens, cols, cols},
                           {q.as<float>(), tokens, q_cols, q_cols}, cache.layer(l), places,
                           {heads, 0.1f});
        }
      });
    }));
  }
  const double s = median(seconds) / layers;
  if (queries > 1) {
    const double seen = static_cast<double>(tokens) * (context - 0.5 * (queries - 1));
    std::printf("%-10s %9.2f us a layer  %6.1f TFLOP/s\n", name.c_str(), s * 1e6,
                2.0 * heads * (shape.key_dim + shape.value_dim) * seen / s / 1e12);
    return {};
  }
  const double bytes =
      static_cast<double>(shape.block_bytes()) / ops::kBlockTokens * context * sequences;
  std::printf("%-10s %9.2f us a layer  read %5.2f TB/s, %4.1f %% of the ceiling\n", name.c_str(),
              s * 1e6, bytes / s / 1e12, bytes / s / b.read_rate * 100.0);
  return {};
}

// GEMMs only, over so many matrices that none is in a cache.
Status run_products(Bench& b, const std::string& name, int64_t rows) {
  const LayerSpec& l = b.spec.layers[0];
  const MoeSpec* const moe = l.find<MoeSpec>();
  const int64_t hidden = b.spec.hidden_size, ff = moe != nullptr ? moe->expert_ff : l.mlp().ff;
  const int64_t q = int64_t{l.attention().heads} * l.attention().head_dim;
  const std::pair<int64_t, int64_t> shapes[] = {
      {q, hidden}, {hidden, q}, {ff, hidden}, {hidden, ff}, {b.spec.vocab_size, hidden}};
  const std::vector<uint8_t> noise = noise_bytes();
  FRESHET_RETURN_IF_ERROR(b.ops->set_scratch(size_t{1} << 30));
  for (const auto& [n, k] : shapes) {
    const size_t bytes = quant::row_bytes(b.format, k);
    std::vector<const uint8_t*> pointers(static_cast<size_t>(n));
    for (size_t i = 0; i < pointers.size(); ++i)
      pointers[i] = noise.data() + i * 4160 % (noise.size() - bytes) / 16 * 16;
    const auto copies = static_cast<int>(
        std::max<size_t>(2, (size_t{600} << 20) / (static_cast<size_t>(n) * bytes)));
    std::vector<ops::Weight> weights(static_cast<size_t>(copies));
    for (ops::Weight& w : weights) {
      FRESHET_ASSIGN_OR_RETURN(w, b.ops->pack(b.format, pointers, k));
    }
    FRESHET_ASSIGN_OR_RETURN(
        const Buffer x, b.ops->upload(std::vector<float>(static_cast<size_t>(rows * k), 0.37f)));
    FRESHET_ASSIGN_OR_RETURN(
        const Buffer out,
        Buffer::allocate(static_cast<size_t>(rows * n) * sizeof(float), b.ops->memory()));
    const Matrix in{const_cast<float*>(x.as<float>()), rows, k, k};
    std::vector<double> seconds;
    for (int i = 0; i < 6; ++i) {
      seconds.push_back(b.ops->device()->time([&] {
        for (const ops::Weight& w : weights) {
          const ops::Product p{&w, {const_cast<float*>(out.as<float>()), rows, n, n}};
          b.ops->matmul(in, {&p, 1});
        }
      }));
    }
    const double s = median(seconds) / copies;
    std::printf(
        "%-10s %6lld x %-6lld %8.2f us  %5.2f TB/s  %4.1f %% of the ceiling  %6.1f TFLOP/s\n",
        name.c_str(), static_cast<long long>(n), static_cast<long long>(k), s * 1e6,
        static_cast<double>(n) * static_cast<double>(bytes) / s / 1e12,
        static_cast<double>(n) * static_cast<double>(bytes) / s / b.read_rate * 100.0,
        2.0 * static_cast<double>(rows * n * k) / s / 1e12);
  }
  return {};
}

// Sampling only, from logits like a model's: most within a few units, a few far above.
Status run_samples(Bench& b, const std::string& name, int64_t rows) {
  const int64_t vocab = b.spec.vocab_size;
  std::vector<float> logits(static_cast<size_t>(rows * vocab));
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 2.5f);
  for (float& v : logits) v = normal(random);
  for (size_t i = 0; i < logits.size(); i += 4001) logits[i] += 9.0f;
  FRESHET_ASSIGN_OR_RETURN(const Buffer x, b.ops->upload(logits));
  FRESHET_ASSIGN_OR_RETURN(
      Buffer ids, Buffer::allocate(static_cast<size_t>(rows) * sizeof(int32_t), b.ops->memory()));
  const Matrix m{const_cast<float*>(x.as<float>()), rows, vocab, vocab};
  const auto time = [&](const FunctionRef<void()>& body) {
    std::vector<double> seconds;
    for (int i = 0; i < 8; ++i) seconds.push_back(b.ops->device()->time(body));
    return median(seconds) * 1e6;
  };
  std::printf("%-10s argmax %.1f us", name.c_str(),
              time([&] { b.ops->argmax(m, ids.as<int32_t>()); }));
  const std::tuple<const char*, float, int, float> cases[] = {{"best", 0.0f, 0, 1.0f},
                                                              {"drawn", 1.0f, 0, 1.0f},
                                                              {"top-k 20", 1.0f, 20, 1.0f},
                                                              {"top-p 0.95", 0.8f, 0, 0.95f},
                                                              {"both", 0.6f, 20, 0.95f}};
  for (const auto& [what, temperature, top_k, top_p] : cases) {
    const Sampler sampler({.temperature = temperature, .top_k = top_k, .top_p = top_p}, vocab, 1, 0,
                          {}, 1, {});
    std::vector<int32_t> words(static_cast<size_t>(rows) * ops::kSampleRowWords);
    for (int64_t r = 0; r < rows; ++r) {
      ops::SampleRow row;
      sampler.describe(r, {}, false, row, words);
      std::memcpy(words.data() + static_cast<size_t>(r) * ops::kSampleRowWords, &row, sizeof row);
    }
    const std::span<const int32_t> arrays[] = {words};
    const ops::StepInputs inputs{arrays, {}, false};
    std::printf("  %s %.1f", what, time([&] {
                  b.ops->device()->step(inputs,
                                        [&] { b.ops->sample(m, words, {}, ids.as<int32_t>()); });
                }));
  }
  std::printf("\n");
  return {};
}

Result<RoleFormats> formats_of_recipe(const quantizer::Recipe& recipe, const ModelSpec& spec) {
  using models::Role;
  const models::WeightNames names = models::WeightNames::gguf({});
  std::vector<quantizer::RecipeTensor> tensors;
  std::vector<std::pair<Role, int>> places;
  const auto add = [&](Role role, Role named, int layer, int64_t cols) {
    tensors.push_back({names.stem(named, layer) + ".weight", {cols, cols}});
    places.emplace_back(role, layer);
  };
  quantizer::RecipeModel model;
  model.layers = static_cast<int>(spec.layers.size());
  model.tied = spec.tied_embeddings;
  for (int l = 0; l < model.layers; ++l) {
    const LayerSpec& layer = spec.layers[static_cast<size_t>(l)];
    const int64_t hidden = spec.hidden_size;
    for (const Role role : {Role::kQuery, Role::kKey, Role::kValue, Role::kGate, Role::kUp})
      add(role, role, l, hidden);
    if (const auto* a = layer.find<AttentionSpec>()) {
      model.heads_per_kv_head = a->heads / a->kv_heads;
      add(Role::kOutput, Role::kOutput, l, int64_t{a->heads} * a->value_dim);
    }
    if (const auto* mlp = layer.find<MlpSpec>()) add(Role::kDown, Role::kDown, l, mlp->ff);
    if (const auto* moe = layer.find<MoeSpec>()) {
      model.experts = moe->routing.experts;
      add(Role::kExpertsGateUp, Role::kExpertsGate, l, hidden);
      add(Role::kExpertsDown, Role::kExpertsDown, l, moe->expert_ff);
    }
  }
  add(Role::kEmbedding, Role::kEmbedding, -1, spec.hidden_size);
  add(Role::kHead, spec.tied_embeddings ? Role::kEmbedding : Role::kHead, -1, spec.hidden_size);
  FRESHET_ASSIGN_OR_RETURN(const auto formats, recipe.formats(model, tensors));
  RoleFormats out;
  for (size_t i = 0; i < formats.size(); ++i) out[places[i]] = formats[i];
  return out;
}

Status load(Bench& b, const char* config, const char* format) {
  std::ifstream file(config);
  std::ostringstream text;
  text << file.rdbuf();
  FRESHET_ASSIGN_OR_RETURN(const json::Value parsed, json::parse(text.str()));
  FRESHET_ASSIGN_OR_RETURN(b.spec, models::read_spec(parsed));
  const std::string_view types = format;
  const size_t plus = types.find('+');
  const std::string_view type = types.substr(0, plus);
  if (const auto known = quant::format_by_name(type)) {
    b.format = *known;
  } else if (auto recipe = quantizer::Recipe::by_name(type); recipe.ok()) {
    b.recipe = std::move(*recipe);
    FRESHET_ASSIGN_OR_RETURN(b.recipe_formats, formats_of_recipe(*b.recipe, b.spec));
    b.format = b.recipe_formats.at({models::Role::kUp, 0});
  } else {
    return invalid_argument(
        "unknown format {}: write one of weights, e.g. bf16, fp8 or int4_g128, or of GGUF files: "
        "{}",
        type, quantizer::Recipe::names());
  }
  if (plus != types.npos) {
    FRESHET_ASSIGN_OR_RETURN(b.kv_type, ops::kv_type_by_name(types.substr(plus + 1)));
  }
  FRESHET_ASSIGN_OR_RETURN(b.compute, runtime::Compute::open({.device = "cuda"}));
  b.ops = &b.compute->ops();
  FRESHET_ASSIGN_OR_RETURN(b.read_rate, b.ops->device()->read_rate());
  std::printf("%s, reads %.2f TB/s\n", b.ops->device()->name().c_str(), b.read_rate / 1e12);
  return {};
}

Status load_model(Bench& b) {
  if (b.model != nullptr) return {};
  const auto begin = Clock::now();
  const auto format = [&](models::Role role, int layer, int64_t /*cols*/, bool head) {
    const auto of_head = models::Role::kHead;
    const auto found = b.recipe_formats.find({head ? of_head : role, head ? -1 : layer});
    return found == b.recipe_formats.end() ? b.format : found->second;
  };
  FRESHET_ASSIGN_OR_RETURN(auto model, models::dummy_model(b.spec, format, *b.ops));
  b.model = std::make_unique<runtime::LoadedModel>(b.compute, std::move(model));
  const double share = expert_share(b.spec);
  for (const Model::WeightInfo& w : b.model->model().weights()) {
    const auto bytes =
        static_cast<double>(w.rows) * static_cast<double>(quant::row_bytes(w.format, w.cols));
    if (w.name == "embedding") {
      if (b.spec.tied_embeddings) b.head_bytes += bytes;
    } else if (w.name == "head") {
      b.head_bytes += bytes;
    } else {
      const double part = w.name.starts_with("experts") ? share : 1.0;
      b.layer_bytes += part * bytes;
      b.layer_weights += part * static_cast<double>(w.rows) * static_cast<double>(w.cols);
    }
  }
  std::printf("packed in %.1f s; a step reads %.3f GB of weights, at least %.3f ms\n",
              std::chrono::duration<double>(Clock::now() - begin).count(), b.all_bytes() / 1e9,
              b.all_bytes() / b.read_rate * 1e3);
  return {};
}

Status run_test(Bench& b, const std::string& test) {
  int first = 0, second = 0;
  if (std::sscanf(test.c_str(), "d%d@%d", &first, &second) == 2) {
    FRESHET_RETURN_IF_ERROR(load_model(b));
    return run_model(b, test, first, second, false);
  }
  if (char how[2] = {}; std::sscanf(test.c_str(), "%1[els]%d@%d", how, &first, &second) == 3) {
    FRESHET_RETURN_IF_ERROR(load_model(b));
    return run_engine(b, test, first, second, how[0]);
  }
  int count = 0, sequences = 0, tokens = 2048;
  if (char how[2] = {}; std::sscanf(test.c_str(), "%1[oO]%dx%d+%d@%d/%d", how, &count, &first,
                                    &second, &sequences, &tokens) >= 5) {
    FRESHET_RETURN_IF_ERROR(load_model(b));
    return run_offline(b, test, count, first, second, sequences, tokens, how[0] == 'O');
  }
  if (int length = 0;
      std::sscanf(test.c_str(), "m%d@%d+%dx%d", &first, &second, &count, &length) == 4) {
    FRESHET_RETURN_IF_ERROR(load_model(b));
    return run_model(b, test, first, second, false, count, length);
  }
  if (std::sscanf(test.c_str(), "a%d@%d", &first, &second) == 2) {
    return run_attention(b, test, first, second, 1);
  }
  if (std::sscanf(test.c_str(), "A%dx%d", &first, &second) == 2) {
    return run_attention(b, test, first, second, second);
  }
  if (std::sscanf(test.c_str(), "p%dx%d", &first, &second) == 2) {
    FRESHET_RETURN_IF_ERROR(load_model(b));
    return run_model(b, test, first, second, true);
  }
  if (std::sscanf(test.c_str(), "S%d", &first) == 1) return run_samples(b, test, first);
  if (std::sscanf(test.c_str(), "w%d", &first) == 1) return run_products(b, test, first);
  return invalid_argument("unknown test {}", test);
}

Status run(int argc, char** argv) {
  if (argc < 4)
    return invalid_argument("usage: freshet_gpu_bench CONFIG.json FORMAT[+TYPE] TEST...");
  Bench b;
  FRESHET_RETURN_IF_ERROR(load(b, argv[1], argv[2]));
  for (int i = 3; i < argc; ++i) {
    FRESHET_RETURN_IF_ERROR(run_test(b, argv[i]));
    std::fflush(stdout);
  }
  return {};
}

}  // namespace
}  // namespace freshet

int main(int argc, char** argv) {
  const freshet::Status status = freshet::run(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "freshet_gpu_bench: %s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
