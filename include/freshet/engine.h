// Freshet's public API: load a model, submit requests, receive tokens.
//
// Engine owns the model, the KV cache and one step thread. submit(), cancel() and stats() may be
// called from any thread; callbacks run on the step thread and must return quickly. The tokens of a
// request depend only on its prompt, parameters and seed: they are bit-identical whether the
// request runs alone, in a batch, with a cached prefix, with a chunked prompt or after a
// preemption. Errors are values (freshet::Status); the library never prints.
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
struct CrossWeights;
struct PooledHeads;
struct PictureReading;
namespace media {
struct ImageInput;
}
namespace tokenizer {
class Tokenizer;
}
using tokenizer::Tokenizer;
namespace grammar {
class Grammar;
class ThoughtTokens;
}  // namespace grammar

// How drafted tokens are accepted (docs/speculation.md).
enum class Acceptance {
  kMatch,      // keep a draft where it equals the sequence's own draw: the tokens never change
  kRejection,  // rejection sampling (arXiv:2211.17192): same distribution, other tokens
  kBlock,      // block verification (arXiv:2403.10444): the same, and more drafts are accepted
  kTypical,    // typical acceptance (arXiv:2401.10774): lossy
  kSynthetic,  // a given share of the drafts, for measurements: the text is meaningless
};

// Forbids tokens: a model's own rules about what may follow what, as Whisper's about timestamps.
class TokenRules {
 public:
  virtual ~TokenRules() = default;
  // Sets the logits of forbidden tokens to minus infinity, before all else. `output`: the sample's
  // tokens so far. Called once for each token, from one thread at a time for each sample.
  virtual void apply(const std::vector<int32_t>& output, float* logits, int64_t vocab) = 0;
};

// How the next token is chosen. The defaults are vLLM's. Order: penalties, logit bias, temperature,
// then min-p, top-k, top-p, typical-p. Random numbers are a function of (seed,
// sample, position, token id): docs/sampling.md.
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
  int logprobs = -1;  // >= 0: return the chosen token's and this many best logprobs
  int prompt_logprobs = -1;
  int n = 1;           // samples of one prompt; sample i draws from stream i
  int beam_width = 0;  // > 0: beam search (temperature etc. ignored)
  float length_penalty = 1.0f;
  bool skip_special_tokens = true;
  // If set, the language that the output must match (src/grammar). The output ends when it is a
  // complete sentence and the model ends it, or when nothing may follow. Not allowed with beam
  // search.
  std::shared_ptr<const grammar::Grammar> grammar;
  // With a grammar and a model that thinks: the tags of the thought that may open the output. The
  // grammar applies after the thought. `in_thought`: the prompt already opened the thought.
  std::shared_ptr<const grammar::ThoughtTokens> thought;
  bool in_thought = false;
  // Absent: the engine's rule. May be given only if the engine has a drafter; never kSynthetic.
  std::optional<Acceptance> rejection_sample_method;
  // Shared by the samples of a request. Not allowed with beam search.
  std::shared_ptr<TokenRules> rules;
  // The only tokens that may be put out; empty: all. Not allowed with beam search.
  std::vector<int32_t> allowed_token_ids;
  // Sequences of tokens that the output never contains; the second ones may not begin in the
  // prompt, either.
  std::vector<std::vector<int32_t>> bad_words, bad_words_ids;
  std::vector<int32_t> begin_suppress_tokens;  // the output does not begin with one of these
  int no_repeat_ngram_size = 0;  // > 0: no n-gram of this size occurs twice in prompt and output
  // Beam search: it ends with `beam_width` finished texts, even if better ones might follow; and
  // the tokens that are not banned share all of the probability.
  bool early_stopping = false;
  bool renormalize_logits = false;
};

enum class FinishReason { kNone, kStop, kLength, kCancelled, kError };

struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0.0f;
};

// The output that one step added to one sample of a request.
struct Delta {
  int index = 0;  // which of the n samples
  std::vector<int32_t> ids;
  std::string text;  // never splits a UTF-8 character; holds back a possible stop string
  // One list per token: the chosen token, then the best ones.
  std::vector<std::vector<TokenLogprob>> logprobs;
  FinishReason finish = FinishReason::kNone;
  std::string stop_reason;  // the stop string or token id that ended the sample
  Status error;             // with kError
};

struct Usage {
  int prompt_tokens = 0;
  int cached_tokens = 0;  // prompt tokens found in the prefix cache, or loaded from a tier below it
  int completion_tokens = 0;
  int preemptions = 0;
  uint64_t seed = 0;  // the request's seed, or the one the engine drew
  // Of speculation, all samples together.
  struct Speculation {
    int steps = 0;  // of a sample, with drafts
    int drafted_tokens = 0;
    int accepted_tokens = 0;
    std::vector<int> accepted;  // [i]: how many of the steps accepted i drafts
    void add(int drafted, int accepted_drafts, int count = 1);
    void add(const Speculation& other);
  };
  Speculation speculation;
  // Seconds spent waiting, by reason: "queued", "running slots", "blocks", "token budget", "batch
  // policy", "preempted", "kv load". Reasons with no waiting time are left out.
  std::vector<std::pair<std::string, double>> waited;
};

// How a vector is made from the hidden states after the final norm.
enum class Pooling {
  kNone,      // none: text is generated
  kLast,      // the state of the last token ...
  kMean,      // ... the mean over all tokens ...
  kFirst,     // ... the state of the first token ([CLS]) ...
  kMax,       // ... the largest of each feature; not normalised
  kModel,     // pooling and further layers as the model's files say; not normalised
  kClassify,  // the scores of the model's classification head, before sigmoid or softmax
};

struct Request {
  std::string id;                       // for logs; generated if empty
  std::vector<int32_t> prompt;          // token ids, special tokens included
  std::vector<int32_t> token_type_ids;  // of encoders: the segment of each token; empty: all 0
  // Encoder-decoders: what the encoder reads, a text or log-mel features [mel_bins, frames]. Then
  // `prompt` is what the decoder begins with. If both are empty, the encoder reads `prompt`.
  std::vector<int32_t> encoder_ids;
  std::vector<float> features;
  int64_t frames = 0;
  SamplingParams params;
  int priority = 0;         // lower runs first
  std::string tenant;       // tenants get equal shares of the machine
  std::string cache_salt;   // requests with different salts never share cached prefixes
  int pin_tokens = 0;       // this many first prompt tokens stay cached if possible
  double deadline_s = 0.0;  // > 0: cancelled this many seconds after submission
  // Which keys and values are evicted (docs/kv-eviction.md): a JSON object as in
  // EngineOptions::kv_eviction, {"policy": "none"} for none; "": the engine's.
  std::string kv_eviction;
  // Which keys and values tokens read (docs/sparse-attention.md): a JSON object as in
  // EngineOptions::sparse_attention, {"policy": "none"} for all; "": the engine's. Needs an engine
  // that has one.
  std::string sparse_attention;
  // If not kNone, nothing is generated; on_embedding gets the vector.
  Pooling pooling = Pooling::kNone;
  std::function<void(const Delta&)> on_delta;  // called for each sample, in order
  std::function<void(const Usage&)> on_done;   // last call
  std::function<void(const std::vector<std::vector<TokenLogprob>>&)> on_prompt_logprobs;
  std::function<void(const std::vector<float>&)> on_embedding;
  // Pictures, made ready for the model's vision tower (src/media/image_input.h). Their rows stand
  // where the prompt has image tokens, in order.
  std::vector<std::shared_ptr<const media::ImageInput>> pictures;
  // Encoder-decoders, on the CPU: gets the weights of cross-attention of all tokens that the
  // decoder reads (src/layers/cross_weights.h). One sample only; read it after on_done.
  std::shared_ptr<CrossWeights> cross_weights;
};

// Why a request is refused: the field of Request or SamplingParams, and the reason.
struct RequestError {
  std::string field;
  std::string message;
};

struct EngineOptions {
  std::string model;  // directory, .gguf file, or a known name
  // A JSON object whose members replace those of the same name in the model's config.json; "":
  // none.
  std::string hf_overrides;
  int threads = 0;             // 0: one per physical core
  std::string device = "cpu";  // cpu, cuda, cuda:N, or auto: a GPU if there is one
  // Share of the GPU's memory that the engine may use; the KV cache gets the part of it that the
  // weights leave free.
  double gpu_memory_utilization = 0.9;
  std::string cpu_isa;     // highest instruction set to use; "": the best of this CPU
  bool reference = false;  // the plain F32 path
  std::vector<std::string> force_kernels;
  // Directory that keeps packed weights for the next start; "": none.
  std::string weight_cache_dir;
  // "dummy:FORMAT": random weights in the shape of `model`, a folder with config.json, and the
  // same for the drafter. For measurements only.
  std::string load_format = "auto";
  std::string kv_cache_dtype = "auto";    // auto, f32, f16, bf16, fp8, int8, int4, k8v4
  std::vector<int> kv_cache_skip_layers;  // layers that keep what auto means
  int max_model_len = 0;                  // 0: the model's limit, as far as memory allows
  size_t kv_cache_memory = 0;             // bytes; 0: from the memory plan
  // Evicts keys and values of long sequences, which changes their texts (docs/kv-eviction.md). A
  // JSON object such as {"policy": "snapkv", "budget": 1024}; "": all are kept. On the CPU only.
  std::string kv_eviction;
  // Tokens of long sequences read a selection of keys and values: generated ones, and with the
  // policy "static" those of prompts, too. That changes texts (docs/sparse-attention.md). A JSON
  // object such as {"policy": "quest", "budget": 1024}; "": all are read. On the CPU only.
  std::string sparse_attention;
  // Maximum sequences per step, and the token budget of a step (chunked prefill). 0: 256 and 2,048
  // (512 with up to 4 threads); on a GPU 1,024 and 8,192 if the workspace of such steps takes at
  // most an eighth of the memory that the weights leave free.
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  bool enable_prefix_caching = true;
  // Tiers below the KV cache (docs/kv-tiers.md): bytes of host memory, vLLM's --kv-transfer-config
  // as JSON, and a folder that keeps blocks over restarts, with a limit in bytes (0: 10 GiB).
  size_t kv_offloading_bytes = 0;
  std::string kv_transfer_config;
  std::string kv_cache_dir;
  size_t kv_cache_dir_bytes = 0;
  // Models with states (Mamba, linear attention): a prefix is cached up to a checkpoint of the
  // state. One is kept at this distance in tokens, besides those where prompts end or part;
  // checkpoints have this share of the cache (docs/state-models.md).
  int state_checkpoint_interval = 512;
  double state_checkpoint_share = 0.25;
  double kv_cache_metrics_sample = 0.0;  // share of the cache blocks whose lifetimes are timed
  int max_num_queued_reqs = 0;           // 0: no limit
  int64_t max_num_queued_tokens = 0;
  int max_prefill_chunk = 0;           // max prompt tokens of one request per step; 0: the budget
  int64_t priority_ageing_ms = 30000;  // waiting this long gains one priority level; 0: never
  bool fair_share = true;              // between tenants of equal priority
  // When new requests may join: "continuous" (at once), "static" (full batches that run to their
  // end) or "dynamic" (batches formed as in Triton). The options below apply to the last two only.
  std::string batching = "continuous";
  int max_batch_size = 32;
  int max_wait_time_ms = 50;
  int64_t max_tokens_per_batch = 4096;
  std::vector<int> preferred_batch_sizes;
  int instances = 1;
  // Speculative decoding: a JSON object with the keys of vLLM's --speculative-config; "": off. It
  // changes no token of any request (docs/speculation.md lists the opt-in exceptions).
  std::string speculative_config;
  // Fills in the rejections of EngineStats::Speculation. Costs a pass over each draft's logits.
  bool count_rejections = false;
  // Host memory for what the vision tower made of pictures, so that they are not computed again.
  size_t picture_cache_bytes = size_t{512} << 20;
  std::function<void(const std::string& stage, double fraction)> on_progress;
  // The tower of a GGUF model that reads pictures, as llama.cpp splits it off; "": text alone.
  std::string mmproj;
};

struct EngineStats {
  // Upper bounds of steps_by_tokens; its last entry counts larger steps.
  static constexpr std::array<int, 13> kStepTokens = {1,   8,    16,   32,   64,   128,  256,
                                                      512, 1024, 2048, 4096, 8192, 16384};
  // Upper bounds of Durations, in seconds; its last entry counts longer ones.
  static constexpr std::array<double, 21> kDurations = {
      0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,  1,   2,
      5,     10,    20,    30,   60,   120,  300, 600, 1200, 1800};
  struct Durations {
    std::array<int64_t, kDurations.size() + 1> counts{};
    double sum = 0.0;
    void add(double seconds);
  };

  int64_t steps = 0;
  // Steps by their number of tokens: prompt tokens computed plus tokens generated.
  std::array<int64_t, kStepTokens.size() + 1> steps_by_tokens{};
  double device_wait_seconds = 0.0;  // time the step thread waited for the GPU
  int64_t step_tokens = 0;           // sum of the tokens of all steps
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t recomputed_tokens = 0;  // cached, but the last prompt token must always be computed
  int64_t generated_tokens = 0;
  int64_t preemptions = 0;
  int64_t kv_evictions = 0;  // of keys and values of live sequences
  // Speculative decoding.
  struct Speculation {
    int64_t drafts = 0;  // steps of a sequence with drafts
    int64_t draft_tokens = 0;
    int64_t accepted_tokens = 0;
    std::vector<int64_t> accepted_per_position;
    double draft_seconds = 0.0;  // that the drafter took
    // Decode steps while a drafter is loaded: what they took, drafting included, and what plain
    // steps would have taken for the tokens that they gave, from steps that were run plain.
    double step_seconds = 0.0;
    double plain_seconds = 0.0;
    // The same as the cost model expected it before each step.
    double predicted_step_seconds = 0.0;
    double predicted_plain_seconds = 0.0;
    int64_t control_steps = 0;  // steps run plain to measure this, although drafts would have paid
    // What the cost model knows, in seconds: a step of one sequence by its rows, and a round of
    // drafting, which gives one sequence a draft more.
    static constexpr std::array<int, 16> kRows = {1,  2,  3,  4,  5,  6,  7,   8,
                                                  12, 16, 24, 32, 64, 96, 128, 384};
    std::array<double, kRows.size()> seconds_by_rows{};
    double round_seconds = 0.0;

    // Speed compared with plain steps; 0: not known yet.
    double gain() const { return step_seconds > 0.0 ? plain_seconds / step_seconds : 0.0; }
    double predicted_gain() const {
      return predicted_step_seconds > 0.0 ? predicted_plain_seconds / predicted_step_seconds : 0.0;
    }
    // If EngineOptions::count_rejections is set, of requests with kRejection: drafts rejected, the
    // number expected (the sum of the total variation distance of the model's and the drafter's
    // distributions over all drafts that were decided on), and its variance.
    int64_t rejections = 0;
    double expected_rejections = 0.0;
    double rejection_variance = 0.0;
    // Deviation of `rejections` in standard deviations: normally distributed if all is right.
    double rejection_z() const;
  };
  Speculation speculation;
  int running = 0;
  int waiting = 0;
  // Waiting requests held back by the batching policy, not by lack of room.
  int deferred = 0;
  double kv_cache_usage = 0.0;  // 0..1
  // Times of the timed cache blocks, taken at eviction: since allocation, since the last prefix
  // hit, and between prefix hits.
  Durations block_lifetime, block_idle, block_reuse_gap;
  // The tiers below the cache.
  struct Tiers {
    int64_t queries = 0;  // prompt tokens that were looked for, because the cache lacked them
    int64_t hits = 0;     // of those, loaded; not part of cached_tokens
    int64_t loading = 0;  // sequences that wait for a load now
    int64_t store_bytes = 0, load_bytes = 0;
    double store_seconds = 0.0, load_seconds = 0.0;
    int64_t stores = 0, loads = 0;  // blocks
    int64_t stores_skipped = 0;     // blocks: for lack of room or bandwidth
    int64_t load_failures = 0;      // blocks that were there and not intact
    int64_t swapped = 0;            // blocks stored because their sequence was preempted
    double host_usage = 0.0;        // 0..1
    int64_t disk_bytes = 0, disk_blocks = 0;
  };
  Tiers tiers;
  // Pictures that a step needed: computed by the vision tower, or found in its cache.
  struct Pictures {
    int64_t computed = 0;
    int64_t cached = 0;
    double seconds = 0.0;     // that the tower took
    int64_t cache_bytes = 0;  // that the cache holds now
  };
  Pictures pictures;
  // Encoders' outputs in the cache: requests that started with an input for the encoder, and of
  // those, the ones whose output was there already.
  struct Encoder {
    int64_t queries = 0;
    int64_t hits = 0;
    int64_t sounds = 0;  // of these, with sound
    int64_t sounds_cached = 0;
    int64_t steps_between = 0;  // steps of other requests while a tower or an encoder ran
  };
  Encoder encoder;
};

// The layout of the KV cache.
struct CacheInfo {
  int block_tokens = 0;
  int64_t blocks = 0;  // of the full-attention layers, if there are any
  int64_t tokens = 0;  // capacity of these blocks
  size_t bytes = 0;    // of all layers
  std::string type;    // element type
  bool prefix_caching = false;
  int sliding_window = 0;  // of the layers that have one; 0: none
  double gpu_memory_utilization = 0.0;
  bool timed = false;  // EngineStats has block lifetimes
  bool tiers = false;  // there are tiers below it
};

// A cached prefix in a file of its own.
struct PrefixFile {
  std::vector<int32_t> tokens;
  int64_t bytes = 0;  // of the file
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> load(const EngineOptions& options);
  ~Engine();  // cancels running requests

  // Queues a request and returns its number. Errors: kInvalidArgument (too long, impossible
  // parameters), kResourceExhausted (queue full). If a number is returned, on_done will be called.
  Result<uint64_t> submit(Request request);
  // Returns the error if submit() would refuse the request with kInvalidArgument.
  std::optional<RequestError> check(const Request& request) const;
  void cancel(uint64_t request);  // no effect if the request has ended

  // Convenience: submits and waits. Returns one string per sample. Must not be called from a
  // callback.
  Result<std::vector<std::string>> generate(const std::string& prompt,
                                            const SamplingParams& params);

  // Empty if the model comes without a vocabulary. Such a model takes and returns ids only.
  const Tokenizer& tokenizer() const;
  bool has_tokenizer() const;
  const Model& model() const;
  const PooledHeads& heads() const;  // what the model gives besides text
  // How the model takes pictures (src/engine/picture_text.h); nullptr: it reads text only.
  const PictureReading* pictures() const;
  const std::string& model_path() const;  // EngineOptions::model
  // Encoder-decoders: what the decoder begins with if a request does not say so.
  const std::vector<int32_t>& decoder_start() const;
  int max_model_len() const;
  int max_drafts() const;  // most drafted tokens of a sequence in a step; 0: no speculation
  CacheInfo cache_info() const;
  std::string device() const;       // "cpu", or the GPU's name
  std::string memory_plan() const;  // human-readable: bytes per use
  EngineStats stats() const;

  // Writes the cached part of a prefix, in whole blocks, to a file. Errors: kNotFound (nothing is
  // cached), kIo. Like the next two, waits for the step thread: not for callbacks.
  Result<PrefixFile> save_prefix(const std::vector<int32_t>& tokens, const std::string& cache_salt,
                                 const std::string& path);
  // Puts the prefix of a file into the cache. Errors: kInvalidArgument (damaged, or written for
  // another model or setting), kResourceExhausted (no room), kNotFound.
  Result<PrefixFile> restore_prefix(const std::string& path, const std::string& cache_salt);
  // Drops what only the cache holds of a prefix; returns its tokens.
  int erase_prefix(const std::vector<int32_t>& tokens, const std::string& cache_salt);
  // A secret that lasts as long as the folder of kv_cache_dir; "" without one.
  std::string cache_secret() const;

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace freshet
