#include "freshet/engine.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <filesystem>
#include <future>
#include <mutex>
#include <random>

#include "base/log.h"
#include "base/units.h"
#include "engine/engine_plan.h"
#include "engine/picture_text.h"
#include "engine/prefix_files.h"
#include "engine/step_loop.h"
#include "engine/tiers.h"
#include "layers/vision_tower.h"
#include "models/pooled_heads.h"
#include "runtime/loaded_model.h"
#include "runtime/picture_settings.h"
#include "speculative/draft_runner.h"
#include "speculative/length_controller.h"
#include "speculative/registry.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/tokenizer_parts.h"

namespace freshet {

// In order of construction: each member may use those above it.
struct Engine::Impl {
  std::unique_ptr<runtime::LoadedModel> loaded;
  std::optional<Tokenizer> tokenizer;
  bool has_tokenizer = false;
  engine::MemoryPlan plan;
  CacheInfo cache;
  PooledHeads heads;
  std::optional<PictureReading> reading;  // of pictures, if the model has a tower
  std::optional<speculative::Config> speculation;
  std::unique_ptr<speculative::Drafter> drafter;
  std::unique_ptr<speculative::LengthController> lengths;
  kv_cache::TierConfig tier_config;
  std::unique_ptr<kv_cache::TierStore> tiers;
  std::string model_path;
  std::vector<int32_t> decoder_start;
  std::string identity;   // of cached blocks
  std::string salt_end;   // of requests that choose no sparse attention
  Status keeps_prefixes;  // an error: why they cannot be kept outside of the cache
  std::unique_ptr<engine::StepLoop> loop;

  Status open_tiers(const EngineOptions& options, const loader::Checkpoint& checkpoint,
                    const KvStorage& storage, engine::StepLoopOptions& l);
  Status load_drafter(const runtime::LoadOptions& loading, const loader::Checkpoint& checkpoint,
                      ops::KvType type);
  Status reserve_tower() const;
};

Status Engine::Impl::load_drafter(const runtime::LoadOptions& loading,
                                  const loader::Checkpoint& checkpoint, ops::KvType type) {
  FRESHET_ASSIGN_OR_RETURN(
      drafter, speculative::make_drafter({*speculation, loading, checkpoint, *loaded,
                                          loaded->shared_compute(), type, plan.max_model_len,
                                          plan.max_num_seqs, plan.max_num_batched_tokens,
                                          plan.cache_tokens()}));
  return loaded->model().capture(drafter->needs().boundaries);
}

// The tower's memory on a device, before its first step.
Status Engine::Impl::reserve_tower() const {
  if (!reading || loaded->compute().device() == nullptr) return {};
  VisionTower& tower = *loaded->model().vision();
  return tower.reserve(
      runtime::planned_positions(reading->settings, tower.spec(), plan.max_model_len));
}

// Opens the tiers over the cache, if any are wanted, and tells the loop's options.
Status Engine::Impl::open_tiers(const EngineOptions& options, const loader::Checkpoint& checkpoint,
                                const KvStorage& storage, engine::StepLoopOptions& l) {
  identity = engine::cache_identity(options, checkpoint, loaded->ops(), storage.spec());
  if (!salt_end.empty()) identity += "sparse" + salt_end + "\n";
  if (!tier_config.wanted()) return {};
  if (options.on_progress) options.on_progress("opening the tiers of the cache", 0.0);
  FRESHET_ASSIGN_OR_RETURN(
      tiers, engine::open_tiers(tier_config, identity, storage, loaded->ops().device()));
  cache.tiers = true;
  l.tiers = tiers.get();
  l.save_prompts_only = tier_config.prompt_only;
  return {};
}

namespace {

using engine::CacheLayout;
using engine::MemoryPlan;
using loader::Checkpoint;

struct Vocabulary {
  Tokenizer tokenizer;
  bool real = false;
};

// A model may come without a vocabulary; a vocabulary that cannot be read is an error.
Result<Vocabulary> load_vocabulary(const std::string& path) {
  auto loaded = Tokenizer::load(path);
  if (loaded.ok()) return Vocabulary{std::move(*loaded), true};
  if (loaded.status().code() != StatusCode::kNotFound) return loaded.status();
  return Vocabulary{Tokenizer(std::make_shared<const tokenizer::TokenizerParts>()), false};
}

void add_ids(const json::Value* ids, std::vector<int32_t>& out) {
  if (ids == nullptr) return;
  const auto add = [&](const json::Value& id) {
    if (!id.is_number()) return;
    if (const auto number = id.as_int64(); number && *number >= 0 && *number <= INT32_MAX) {
      out.push_back(static_cast<int32_t>(*number));
    }
  };
  if (!ids->is_array()) return add(*ids);
  for (const json::Value& id : ids->as_array()) add(id);
}

// The end-of-text ids: of the vocabulary, and of the configurations, which may list more.
std::vector<int32_t> end_ids(const Checkpoint& checkpoint, const Vocabulary& vocabulary,
                             int vocab_size) {
  std::vector<int32_t> ids;
  if (vocabulary.real) ids = vocabulary.tokenizer.end_of_generation();
  const json::Value& generation = checkpoint.generation_config();
  const json::Value* specific = generation.is_object() ? generation.find("eos_token_id") : nullptr;
  add_ids(specific != nullptr ? specific : checkpoint.config().find("eos_token_id"), ids);
  std::erase_if(ids, [&](int32_t id) { return id >= vocab_size; });
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

// What the decoder of an encoder-decoder begins with.
std::vector<int32_t> read_decoder_start(const Checkpoint& checkpoint) {
  std::vector<int32_t> ids;
  for (const char* key : {"decoder_start_token_id", "forced_bos_token_id"}) {
    const json::Value& generation = checkpoint.generation_config();
    const json::Value* id = generation.is_object() ? generation.find(key) : nullptr;
    if (id == nullptr) id = checkpoint.config().find(key);
    const auto value = id != nullptr && id->is_number() ? id->as_int64() : std::nullopt;
    if (value && *value >= 0 && *value <= INT32_MAX) ids.push_back(static_cast<int32_t>(*value));
  }
  if (ids.empty()) ids.push_back(0);
  return ids;
}

// How pictures are taken; nothing if the model has no tower, or not on this device.
Result<std::optional<PictureReading>> picture_reading(std::optional<media::ImageSettings> settings,
                                                      Model& model) {
  const std::shared_ptr<const VisionSpec>& vision = model.spec().vision;
  if (vision == nullptr || !settings || model.vision() == nullptr)
    return std::optional<PictureReading>();
  return std::optional(PictureReading{std::move(*settings), vision->image_token});
}

Result<std::optional<speculative::Config>> read_speculation(const EngineOptions& options,
                                                            const ModelSpec& spec) {
  if (options.speculative_config.empty()) return std::optional<speculative::Config>();
  if (spec.encoder != nullptr) {
    return invalid_argument("--speculative-config is for decoders: {} is an encoder-decoder",
                            spec.architecture);
  }
  if (!spec.generates) {
    return invalid_argument("--speculative-config is for models that write text: {} does not",
                            spec.architecture);
  }
  FRESHET_ASSIGN_OR_RETURN(
      speculative::Config config,
      speculative::parse_config(options.speculative_config, options.load_format != "auto"));
  if (spec.vision != nullptr && speculative::find_method(config.method)->cost != nullptr) {
    return unsupported("{} reads pictures, which drafters with weights do not: draft with ngram",
                       spec.architecture);
  }
  if (config.tree.wanted() && kv_cache_spec(spec, ops::KvType::kF16).state_group() >= 0) {
    return unsupported(
        "draft trees need a model without states: {} has state-space or "
        "linear-attention layers; ask for a chain of drafts",
        spec.architecture);
  }
  return std::optional(std::move(config));
}

runtime::LoadOptions load_options(const EngineOptions& options) {
  runtime::LoadOptions o;
  o.threads = options.threads;
  o.device = options.device;
  o.cpu_isa = options.cpu_isa;
  o.reference = options.reference;
  o.force_kernels = options.force_kernels;
  o.model = options.model;
  o.weight_cache_dir = options.weight_cache_dir;
  o.mmproj = options.mmproj;
  o.hf_overrides = options.hf_overrides;
  o.load_format = options.load_format;
  o.on_progress = options.on_progress;
  return o;
}

// `whole`: a prompt is one step, and its keys and values are of no use to another.
Result<engine::StepLoopOptions> loop_options(const EngineOptions& o, const MemoryPlan& plan,
                                             const CacheLayout& layout, bool whole) {
  engine::StepLoopOptions l;
  l.retention = layout.retention.policy;
  l.scheduler.max_slots = layout.retention.max_slots;
  l.sparse = layout.sparse;
  l.scheduler.max_num_seqs = plan.max_num_seqs;
  l.scheduler.max_num_batched_tokens = plan.max_num_batched_tokens;
  l.scheduler.max_chunk = whole ? 0 : o.max_prefill_chunk;
  l.scheduler.max_logit_rows = plan.max_logit_rows;
  l.scheduler.max_model_len = plan.max_model_len;
  l.scheduler.ageing_us = o.priority_ageing_ms * 1000;
  l.scheduler.fair_share = o.fair_share;
  l.scheduler.look_ahead = true;
  FRESHET_ASSIGN_OR_RETURN(l.scheduler.batching.kind, scheduler::batching_by_name(o.batching));
  l.scheduler.batching.max_batch_size = o.max_batch_size;
  l.scheduler.batching.max_wait_us = int64_t{o.max_wait_time_ms} * 1000;
  l.scheduler.batching.max_tokens_per_batch = o.max_tokens_per_batch;
  l.scheduler.batching.preferred_batch_sizes.assign(o.preferred_batch_sizes.begin(),
                                                    o.preferred_batch_sizes.end());
  l.scheduler.batching.instances = o.instances;
  FRESHET_RETURN_IF_ERROR(scheduler::make_batching_policy(l.scheduler.batching).status());
  if (o.state_checkpoint_interval < ops::kBlockTokens) {
    return invalid_argument("state_checkpoint_interval is {}: must be {} or more",
                            o.state_checkpoint_interval, ops::kBlockTokens);
  }
  if (!(o.state_checkpoint_share >= 0.0 && o.state_checkpoint_share <= 0.9)) {
    return invalid_argument("state_checkpoint_share is {}: must be between 0 and 0.9",
                            o.state_checkpoint_share);
  }
  l.scheduler.checkpoint_interval = o.state_checkpoint_interval;
  l.scheduler.kept_checkpoints = plan.checkpoints;
  l.blocks = plan.blocks;
  l.share_prefixes = o.enable_prefix_caching && !whole;
  l.timed_share = o.kv_cache_metrics_sample;
  l.max_queued_requests = o.max_num_queued_reqs;
  l.max_queued_tokens = o.max_num_queued_tokens;
  std::random_device random;
  l.seed = (uint64_t{random()} << 32) | random();
  return l;
}

void set_drafting(const speculative::Config& config, const EngineOptions& options,
                  engine::StepLoopOptions& l) {
  l.max_drafts = config.limit();
  l.acceptance = config.acceptance;
  l.acceptance.count_rejections = options.count_rejections;
  if (config.tree.wanted()) l.tree_max_batch = config.tree.max_batch;
}

// The controller of draft lengths, which measures the model's steps and tells the drafter of them.
Result<std::unique_ptr<speculative::LengthController>> make_lengths(
    const speculative::Config& config, const MemoryPlan& plan, const runtime::LoadedModel& loaded,
    const KvStorage& cache, speculative::Drafter& drafter) {
  constexpr int kMeasuredRows = 128;
  speculative::MeasuredSteps steps;
  steps.max_rows = std::min({plan.max_logit_rows, plan.max_num_batched_tokens, kMeasuredRows});
  steps.max_context = plan.max_model_len;
  steps.budget = 0.7;
  FRESHET_ASSIGN_OR_RETURN(
      speculative::StepCosts costs,
      speculative::measure_steps(loaded.model(), cache, steps, loaded.ops().host_memory()));
  const speculative::LengthOptions options{
      .max_drafts = config.limit(),
      .fixed = config.num_speculative_tokens > 0,
      .lookups = !config.lookups.empty() && !speculative::find_method(config.method)->looks_up,
      .max_rows = std::min(plan.max_logit_rows, plan.max_num_batched_tokens),
      .runs_ahead = loaded.model().samples()};
  auto lengths = std::make_unique<speculative::LengthController>(std::move(costs), options);
  drafter.use_costs(lengths->costs());
  return lengths;
}

CacheInfo describe_cache(const EngineOptions& o, const MemoryPlan& plan, bool shared) {
  CacheInfo info;
  info.block_tokens = ops::kBlockTokens;
  // Groups with a window hold fewer blocks per sequence, so they say little about capacity.
  size_t told = 0;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    if (plan.groups[g].kind != KvKind::kTokens) continue;
    info.sliding_window = std::max(info.sliding_window, plan.groups[g].window);
    if (plan.groups[g].window == 0) told = g;
  }
  info.blocks = plan.blocks.empty() ? 0 : plan.blocks[told];
  info.tokens = info.blocks * ops::kBlockTokens;
  info.bytes = plan.kv_bytes();
  info.type = plan.kv_types.empty() ? "" : plan.kv_types[told];
  info.prefix_caching = shared;
  info.timed = o.kv_cache_metrics_sample > 0.0;
  info.gpu_memory_utilization = o.gpu_memory_utilization;
  return info;
}

}  // namespace

void EngineStats::Durations::add(double seconds) {
  const auto bucket = std::ranges::lower_bound(kDurations, seconds) - kDurations.begin();
  ++counts[static_cast<size_t>(bucket)];
  sum += seconds;
}

double EngineStats::Speculation::rejection_z() const {
  if (rejection_variance <= 0.0) return 0.0;
  return (static_cast<double>(rejections) - expected_rejections) / std::sqrt(rejection_variance);
}

void Usage::Speculation::add(int drafted, int accepted_drafts, int count) {
  steps += count;
  drafted_tokens += drafted;
  accepted_tokens += accepted_drafts * count;
  const auto bin = static_cast<size_t>(accepted_drafts);
  if (accepted.size() <= bin) accepted.resize(bin + 1);
  accepted[bin] += count;
}

void Usage::Speculation::add(const Speculation& other) {
  for (size_t i = 0; i < other.accepted.size(); ++i) {
    if (other.accepted[i] > 0) add(0, static_cast<int>(i), other.accepted[i]);
  }
  drafted_tokens += other.drafted_tokens;
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::load(const EngineOptions& options) {
  const auto progress = [&](const char* stage, double fraction) {
    if (options.on_progress) options.on_progress(stage, fraction);
  };
  progress("reading the configuration", 0.0);
  auto impl = std::make_unique<Impl>();
  impl->model_path = options.model;
  const runtime::LoadOptions loading = load_options(options);
  FRESHET_ASSIGN_OR_RETURN(const Checkpoint checkpoint, runtime::open_checkpoint(loading));
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, runtime::read_spec(checkpoint, loading));
  FRESHET_ASSIGN_OR_RETURN(const auto compute, runtime::Compute::open(loading));
  FRESHET_ASSIGN_OR_RETURN(const CacheLayout layout, engine::cache_layout(options, *compute, spec));
  FRESHET_ASSIGN_OR_RETURN(impl->speculation, read_speculation(options, spec));
  const speculative::Config* const speculation = impl->speculation ? &*impl->speculation : nullptr;
  FRESHET_ASSIGN_OR_RETURN(impl->tier_config, engine::tier_config(options));
  FRESHET_ASSIGN_OR_RETURN(const auto pictures, runtime::tower_settings(checkpoint, spec));
  FRESHET_ASSIGN_OR_RETURN(
      impl->plan, engine::plan_memory(options, loading, checkpoint, spec, speculation,
                                      impl->tier_config.host_bytes, layout, pictures, *compute));
  const MemoryPlan& plan = impl->plan;
  FRESHET_ASSIGN_OR_RETURN(engine::StepLoopOptions l,
                           loop_options(options, plan, layout, reads_both_ways(spec)));
  if (spec.encoder != nullptr) {
    l.decoder_start = impl->decoder_start = read_decoder_start(checkpoint);
  }
  impl->cache = describe_cache(options, plan, l.share_prefixes);
  impl->keeps_prefixes = engine::keeps_prefixes(spec, plan.groups, l.share_prefixes);
  if (impl->tier_config.wanted()) FRESHET_RETURN_IF_ERROR(impl->keeps_prefixes);
  auto vocabulary = std::async(std::launch::async, [&] { return load_vocabulary(options.model); });
  FRESHET_ASSIGN_OR_RETURN(impl->loaded, runtime::LoadedModel::load(compute, checkpoint, loading));
  if (speculation != nullptr) {
    progress("loading the drafter", 0.0);
    FRESHET_RETURN_IF_ERROR(impl->load_drafter(loading, checkpoint, layout.types.type));
    l.drafter = impl->drafter.get();
    set_drafting(*speculation, options, l);
  }
  FRESHET_RETURN_IF_ERROR(impl->loaded->reserve(
      {plan.max_num_batched_tokens, plan.max_logit_rows, plan.max_model_len}));
  FRESHET_ASSIGN_OR_RETURN(impl->reading, picture_reading(pictures, impl->loaded->model()));
  FRESHET_RETURN_IF_ERROR(impl->reserve_tower());
  FRESHET_ASSIGN_OR_RETURN(KvStorage cache, impl->loaded->make_cache(layout.kv, plan.blocks));
  if (speculation != nullptr) {
    progress("measuring the model's steps", 0.0);
    FRESHET_ASSIGN_OR_RETURN(
        impl->lengths, make_lengths(*speculation, plan, *impl->loaded, cache, *impl->drafter));
    l.lengths = impl->lengths.get();
  }
  impl->salt_end = layout.sparse.salt();
  FRESHET_RETURN_IF_ERROR(impl->open_tiers(options, checkpoint, cache, l));
  progress("loading the vocabulary", 0.0);
  FRESHET_ASSIGN_OR_RETURN(Vocabulary words, vocabulary.get());

  l.eos = end_ids(checkpoint, words, spec.vocab_size);
  const auto token_id = [&](std::string_view token) { return words.tokenizer.token_to_id(token); };
  FRESHET_ASSIGN_OR_RETURN(l.heads, models::read_pooled_heads(checkpoint, spec, token_id));
  impl->heads = l.heads;
  l.picture_cache_bytes = options.picture_cache_bytes;
  impl->tokenizer.emplace(std::move(words.tokenizer));
  impl->has_tokenizer = words.real;
  FRESHET_ASSIGN_OR_RETURN(
      impl->loop, engine::StepLoop::start(l, impl->loaded->model(), std::move(cache),
                                          words.real ? &*impl->tokenizer : nullptr, compute->pool(),
                                          compute->ops().host_memory()));
  progress("ready", 1.0);
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Result<uint64_t> Engine::submit(Request request) {
  return impl_->loop->submit(std::move(request));
}
std::optional<RequestError> Engine::check(const Request& request) const {
  return impl_->loop->check(request);
}
void Engine::cancel(uint64_t request) {
  impl_->loop->cancel(request);
}

Result<std::vector<std::string>> Engine::generate(const std::string& prompt,
                                                  const SamplingParams& params) {
  std::mutex mutex;
  std::condition_variable over;
  bool done = false;
  Status error;
  std::vector<std::string> texts(static_cast<size_t>(std::max(1, params.n)));
  Request request;
  request.prompt = tokenizer().encode(prompt);
  request.params = params;
  request.on_delta = [&](const Delta& delta) {
    texts[static_cast<size_t>(delta.index)] += delta.text;
    if (!delta.error.ok()) error = delta.error;
  };
  request.on_done = [&](const Usage&) {
    const std::lock_guard lock(mutex);
    done = true;
    over.notify_one();
  };
  FRESHET_RETURN_IF_ERROR(submit(std::move(request)).status());
  std::unique_lock lock(mutex);
  over.wait(lock, [&] { return done; });
  if (!error.ok()) return error;
  return texts;
}

const Tokenizer& Engine::tokenizer() const {
  return *impl_->tokenizer;
}
bool Engine::has_tokenizer() const {
  return impl_->has_tokenizer;
}
const Model& Engine::model() const {
  return impl_->loaded->model();
}
const PictureReading* Engine::pictures() const {
  return impl_->reading ? &*impl_->reading : nullptr;
}

const PooledHeads& Engine::heads() const {
  return impl_->heads;
}
const std::string& Engine::model_path() const {
  return impl_->model_path;
}
const std::vector<int32_t>& Engine::decoder_start() const {
  return impl_->decoder_start;
}
int Engine::max_model_len() const {
  return impl_->plan.max_model_len;
}
int Engine::max_drafts() const {
  return impl_->speculation ? impl_->speculation->limit() : 0;
}
CacheInfo Engine::cache_info() const {
  return impl_->cache;
}
std::string Engine::device() const {
  return impl_->loaded->device();
}
std::string Engine::memory_plan() const {
  std::string text = impl_->plan.describe();
  if (impl_->tiers != nullptr) text += engine::describe_tiers(impl_->tier_config, *impl_->tiers);
  return text;
}
Result<PrefixFile> Engine::save_prefix(const std::vector<int32_t>& tokens, const std::string& salt,
                                       const std::string& path) {
  FRESHET_RETURN_IF_ERROR(impl_->keeps_prefixes);
  return engine::save_prefix(*impl_->loop, impl_->identity, tokens, salt + impl_->salt_end, path);
}
Result<PrefixFile> Engine::restore_prefix(const std::string& path, const std::string& salt) {
  FRESHET_RETURN_IF_ERROR(impl_->keeps_prefixes);
  return engine::restore_prefix(*impl_->loop, impl_->identity, path, salt + impl_->salt_end);
}
int Engine::erase_prefix(const std::vector<int32_t>& tokens, const std::string& salt) {
  return engine::erase_prefix(*impl_->loop, tokens, salt + impl_->salt_end);
}
std::string Engine::cache_secret() const {
  if (impl_->tiers == nullptr || impl_->tier_config.folder.empty()) return {};
  const kv_cache::BlockKey key = impl_->tiers->root("secret of salts");
  return fmt::format("{:016x}{:016x}", key.high, key.low);
}
EngineStats Engine::stats() const {
  return impl_->loop->stats();
}

}  // namespace freshet
