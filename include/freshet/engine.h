// Freshet's public API: load a model, submit requests, receive tokens.
//
// Engine owns the model, the cache and one step thread. submit(), cancel() and stats() may be
// called from any thread; callbacks run on the step thread and must return quickly. A request's
// tokens depend on its prompt, parameters and seed alone: bit for bit the same alone, in a batch,
// with a cached prefix, chunked or preempted. Errors are values (freshet::Status); the library
// never prints.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace freshet {

class Model;
namespace tokenizer {
class Tokenizer;
}
using tokenizer::Tokenizer;
namespace grammar {
class Grammar;
class ThoughtTokens;
}  // namespace grammar

// How the next token is chosen. Defaults are vLLM's. Order: penalties, logit bias, temperature,
// then min-p, top-k, top-p, typical; drawn by a Philox counter keyed by (seed, position).
struct SamplingParams {
  float temperature = 1.0f;         // 0: greedy
  int top_k = 0;                    // 0: all
  float top_p = 1.0f;               // (0, 1]
  float min_p = 0.0f;               // [0, 1]
  float typical_p = 1.0f;           // (0, 1]
  float repetition_penalty = 1.0f;  // > 0; over prompt and output
  float presence_penalty = 0.0f;    // [-2, 2]; over output
  float frequency_penalty = 0.0f;   // [-2, 2]; over output
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::optional<uint64_t> seed;  // absent: drawn by the engine and reported
  int max_tokens = 16;
  int min_tokens = 0;
  std::vector<std::string> stop;  // strings; the output ends before them
  bool include_stop_str_in_output = false;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  int logprobs = -1;  // >= 0: of the chosen token and so many best
  int prompt_logprobs = -1;
  int n = 1;           // samples of one prompt; sample i draws from stream i
  int beam_width = 0;  // > 0: beam search (temperature etc. ignored)
  float length_penalty = 1.0f;
  bool skip_special_tokens = true;
  // Absent, or the language that the output must be in (src/grammar); the output ends when it is
  // a whole sentence and the model says so, or nothing may follow. Not with beams.
  std::shared_ptr<const grammar::Grammar> grammar;
  // With a grammar, of a model that thinks: the tags of the thought that the output may begin with,
  // and behind which the grammar holds. `in_thought`: the prompt has opened it.
  std::shared_ptr<const grammar::ThoughtTokens> thought;
  bool in_thought = false;
};

enum class FinishReason { kNone, kStop, kLength, kCancelled, kError };

struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0.0f;
};

// What a step added to one sample of a request.
struct Delta {
  int index = 0;  // which of the n samples
  std::vector<int32_t> ids;
  std::string text;  // never splits a UTF-8 character; holds back a possible stop string
  std::vector<std::vector<TokenLogprob>> logprobs;  // a list a token: the chosen one, then the best
  FinishReason finish = FinishReason::kNone;
  std::string stop_reason;  // the stop string or token id that ended it
  Status error;             // with kError
};

struct Usage {
  int prompt_tokens = 0;
  int cached_tokens = 0;  // of the prompt, found in the cache
  int completion_tokens = 0;
  int preemptions = 0;
  uint64_t seed = 0;  // the request's, or the one that was drawn for it
  // Seconds spent waiting, by reason: "queued", "seats", "blocks", "token budget", "batch policy",
  // "preempted". Reasons without any time are left out.
  std::vector<std::pair<std::string, double>> waited;
};

// What an embedding is made of: the states after the final norm, of the last token or of all.
enum class Pooling { kNone, kLast, kMean };

struct Request {
  std::string id;               // for logs; made up when empty
  std::vector<int32_t> prompt;  // token ids, special tokens included
  SamplingParams params;
  int priority = 0;         // lower goes first
  std::string tenant;       // tenants get equal shares of the machine
  std::string cache_salt;   // requests with different salts never share cached prefixes
  int pin_tokens = 0;       // so many first tokens of the prompt stay cached while they can
  double deadline_s = 0.0;  // > 0: cancelled this long after submission
  // Not kNone: nothing is generated; on_embedding gets the pooled states, as they are.
  Pooling pooling = Pooling::kNone;
  std::function<void(const Delta&)> on_delta;  // called for each sample, in order
  std::function<void(const Usage&)> on_done;   // last call
  std::function<void(const std::vector<std::vector<TokenLogprob>>&)> on_prompt_logprobs;
  std::function<void(const std::vector<float>&)> on_embedding;
};

// What cannot be done of a request: the field of Request or SamplingParams, and why.
struct RequestError {
  std::string field;
  std::string message;
};

struct EngineOptions {
  std::string model;           // directory, .gguf file, or a known name
  int threads = 0;             // 0: one a physical core
  std::string device = "cpu";  // cpu, cuda, cuda:N, or auto: a GPU if there is one
  // Share of the GPU's memory that may be taken; keys and values get what weights leave of it.
  double gpu_memory_utilization = 0.9;
  std::string cpu_isa;     // highest instruction set to use; "": what the processor has
  bool reference = false;  // the plain F32 path
  std::vector<std::string> force_kernels;
  std::string weight_cache_dir;         // keeps packed weights for the next start; "": nowhere
  std::string kv_cache_dtype = "auto";  // auto, f32, f16, bf16, fp8, int8
  int max_model_len = 0;                // 0: what the model allows and memory holds
  size_t kv_cache_memory = 0;           // bytes; 0: from the plan
  // Sequences in a step, and its token budget (chunked prefill). 0: 256 and 2,048 (up to 4 threads:
  // 512); on a GPU 1,024 and 8,192 if the workspace of such steps takes an eighth of what weights
  // leave, or less.
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  bool enable_prefix_caching = true;
  double kv_cache_metrics_sample = 0.0;  // share of the cache's blocks whose lives are timed
  int max_num_queued_reqs = 0;           // 0: no limit
  int64_t max_num_queued_tokens = 0;
  int max_prefill_chunk = 0;           // most prompt tokens of one request in a step; 0: the budget
  int64_t priority_ageing_ms = 30000;  // so much waiting is worth one level of priority; 0: never
  bool fair_share = true;              // between tenants of equal priority
  // When new requests may join: "continuous" (at once), "static" (full batches, run to their end)
  // or "dynamic" (batches as Triton forms them). The rest is for the last two.
  std::string batching = "continuous";
  int max_batch_size = 32;
  int max_wait_time_ms = 50;
  int64_t max_tokens_per_batch = 4096;
  std::vector<int> preferred_batch_sizes;
  int instances = 1;
  std::function<void(const std::string& stage, double fraction)> on_progress;
};

struct EngineStats {
  // Upper bounds of steps_by_tokens; its last entry counts what is larger.
  static constexpr std::array<int, 13> kStepTokens = {1,   8,    16,   32,   64,   128,  256,
                                                      512, 1024, 2048, 4096, 8192, 16384};
  // Upper bounds in seconds of Durations; its last entry counts what is longer.
  static constexpr std::array<double, 21> kDurations = {
      0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,  1,   2,
      5,     10,    20,    30,   60,   120,  300, 600, 1200, 1800};
  struct Durations {
    std::array<int64_t, kDurations.size() + 1> counts{};
    double sum = 0.0;
    void add(double seconds);
  };

  int64_t steps = 0;
  // Steps by what they did: tokens of prompts that were computed, and tokens generated.
  std::array<int64_t, kStepTokens.size() + 1> steps_by_tokens{};
  double device_wait_seconds = 0.0;  // the step thread has waited for a GPU
  int64_t step_tokens = 0;           // their sum
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t recomputed_tokens = 0;  // cached, but a prompt's last token must run all the same
  int64_t generated_tokens = 0;
  int64_t preemptions = 0;
  int running = 0;
  int waiting = 0;
  int deferred = 0;             // of those, kept out by the batching policy, not for want of room
  double kv_cache_usage = 0.0;  // 0..1
  // Of the cache's blocks that are timed, when they are evicted: since they were taken, since they
  // were last found by a prompt, and between such finds.
  Durations block_lifetime, block_idle, block_reuse_gap;
};

// How the cache of keys and values was laid out.
struct CacheInfo {
  int block_tokens = 0;
  int64_t blocks = 0;  // of the layers with full attention, where there are such
  int64_t tokens = 0;  // that these hold
  size_t bytes = 0;    // of all layers
  std::string type;    // of an element
  bool prefix_caching = false;
  int sliding_window = 0;  // of layers that have one; 0: none
  double gpu_memory_utilization = 0.0;
  bool timed = false;  // lives of blocks are in EngineStats
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> load(const EngineOptions& options);
  ~Engine();  // cancels what runs

  // Queues a request and returns its number. Errors: kInvalidArgument (too long, impossible
  // parameters), kResourceExhausted (queue full). Where it returns a number, on_done will be
  // called.
  Result<uint64_t> submit(Request request);
  // Whether submit() would refuse it as kInvalidArgument.
  std::optional<RequestError> check(const Request& request) const;
  void cancel(uint64_t request);  // nothing happens when it has ended

  // Convenience: submits and waits. One string a sample.
  // Not from a callback.
  Result<std::vector<std::string>> generate(const std::string& prompt,
                                            const SamplingParams& params);

  // Of a model that comes without a vocabulary: an empty one. Such a model takes and gives ids
  // only.
  const Tokenizer& tokenizer() const;
  bool has_tokenizer() const;
  const Model& model() const;
  int max_model_len() const;
  CacheInfo cache_info() const;
  std::string device() const;       // "cpu", or the GPU's name
  std::string memory_plan() const;  // for people: what takes how many bytes
  EngineStats stats() const;

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace freshet
