#include "cli/options.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <limits>

#include "cli/help.h"
#include "cli/model_path.h"
#include "cli/output.h"
#include "hub/catalogue.h"
#include "sampling/params.h"
#include "server/sampling_defaults.h"

namespace freshet::cli {

void add_compute_options(CLI::App& c, RunOptions& o) {
  const std::string group = "How it runs";
  c.add_option("-t,--threads", o.threads, "Worker threads (default: one per physical core)")
      ->check(CLI::Range(1, 4096))
      ->group(group);
  c.add_option("--device", o.device, "auto (a GPU if one is found), cpu, cuda or cuda:N (GPU N)")
      ->capture_default_str()
      ->group(group);
  c.add_flag("-v,--verbose", o.verbose, "Print the memory plan and the chosen device and kernels")
      ->group(group);
  c.add_option("--log-level", o.log_level,
               "Print messages of this level and above: debug, info (the same as -v), warning, "
               "error, off (default: warning)")
      ->check(CLI::IsMember({"debug", "info", "warning", "error", "off"}))
      ->group(kRareGroup);
  c.add_option("--cpu-isa", o.cpu_isa,
               "Highest instruction set to use: scalar, avx2, avxvnni, avx512, avx512vnni, amx; "
               "on 64-bit ARM: scalar, neon, neondot")
      ->group(kRareGroup);
  c.add_flag("--reference", o.reference, "Compute in plain F32, without tuned kernels")
      ->group(kRareGroup);
  c.add_option("--force-kernel", o.force_kernels,
               "Use this kernel wherever it applies, e.g. matmul=q4_0.avx2 or, on a GPU, "
               "matmul=q_sm90_m1_8 (may be repeated)")
      ->group(kRareGroup);
  c.add_option(
       "--kv-cache-dtype", o.kv_cache_dtype,
       "Type of keys and values: auto, f32, f16, bf16, fp8, int8, int4 (rotated), k8v4 (keys "
       "in int8, values in int4)")
      ->capture_default_str()
      ->group(kRareGroup);
  c.add_option("--kv-cache-dtype-skip-layers", o.kv_cache_skip_layers,
               "Layers (0,1,...) whose keys and values stay in the type of auto")
      ->delimiter(',')
      ->group(kRareGroup);
  c.add_option("--weight-cache-dir", o.weight_cache_dir,
               "Folder for packed weights, which later starts map into memory (default: none)")
      ->group(kRareGroup);
}

void add_mmproj_option(CLI::App& c, RunOptions& o) {
  c.add_option("--mmproj", o.mmproj,
               "The tower for pictures of a GGUF model: the mmproj .gguf file that belongs to it")
      ->group("Pictures");
}

void add_overrides_option(CLI::App& c, RunOptions& o) {
  c.add_option("--hf-overrides", o.hf_overrides,
               "JSON object whose members replace those of the model's config.json (default: none)")
      ->group(kRareGroup);
}

namespace {

void add_tier_options(CLI::App& c, RunOptions& o) {
  c.add_option("--kv-cache-dir", o.kv_cache_dir,
               "Folder that keeps cached prefixes over restarts (default: none)")
      ->group(kRareGroup);
  c.add_option("--kv-cache-dir-size", o.kv_cache_dir_size,
               "Limit of the files in --kv-cache-dir, e.g. 50G (default: 10G)")
      ->group(kRareGroup);
  c.add_option("--kv-offloading-size", o.kv_offloading_gib,
               "Host memory in GiB for blocks that leave the KV cache (default: none)")
      ->check(above_zero())
      ->group(kRareGroup);
  c.add_option("--kv-offloading-backend", o.kv_offloading_backend,
               "How --kv-offloading-size is done: native")
      ->check(CLI::IsMember({"native"}))
      ->group(kRareGroup);
  c.add_option("--kv-transfer-config", o.kv_transfer_config,
               "Tiers of the KV cache as JSON, in vLLM's form for the OffloadingConnector")
      ->group(kRareGroup);
}

}  // namespace

void add_engine_options(CLI::App& c, RunOptions& o) {
  add_compute_options(c, o);
  const std::string group = "How it runs";
  c.add_option("--gpu-memory-utilization", o.gpu_memory_utilization,
               "Fraction of a GPU's memory to use")
      ->check(CLI::Range(0.05, 1.0))
      ->capture_default_str()
      ->group(group);
  c.add_option("--kv-cache-memory,--kv-cache-memory-bytes", o.kv_cache_memory,
               "Memory for the KV cache, e.g. 512M (default: from the memory plan)")
      ->group(group);
  c.add_option("--kv-eviction", o.kv_eviction,
               "Keep only some keys and values of long texts: a JSON object such as "
               "'{\"policy\": \"snapkv\", \"budget\": 1024}'; policies: streaming, snapkv, "
               "pyramidkv, h2o, tova, rkv, keydiff, mikv. Changes the text (docs/kv-eviction.md)")
      ->type_name("JSON")
      ->group(group);
  c.add_option("--sparse-attention", o.sparse_attention,
               "Read only a part of the keys and values: a JSON object such as '{\"policy\": "
               "\"quest\", \"budget\": 1024}'; policies: quest and sparq (generated tokens read "
               "those that promise the highest scores), static (a fixed pattern, for prompts too). "
               "Changes the text (docs/sparse-attention.md)")
      ->type_name("JSON")
      ->group(group);
  c.add_option("--max-model-len", o.max_model_len,
               "Longest sequence in tokens (default: what the model allows and memory can hold)")
      ->check(CLI::Range(1, 1 << 30))
      ->group(group);
  add_tier_options(c, o);
  add_speculative_options(c, o.speculation);
}

CLI::Validator above_zero() {
  const auto check = [](const std::string& text) -> std::string {
    double number = 0.0;
    if (CLI::detail::lexical_cast(text, number) && number > 0.0) return "";
    return fmt::format("must be a number above 0, not {}", text);
  };
  return {[check](std::string& text) { return check(text); }, "ABOVE 0"};
}

CLI::Validator not_negative() {
  const auto check = [](const std::string& text) -> std::string {
    double number = 0.0;
    if (CLI::detail::lexical_cast(text, number) && number >= 0.0) return "";
    return fmt::format("must be a number of at least 0, not {}", text);
  };
  return {[check](std::string& text) { return check(text); }, "FROM 0"};
}

CLI::Validator from_minus_one() {
  const auto check = [](const std::string& text) -> std::string {
    int number = 0;
    // What is not a number gets the message of all conversions.
    if (!CLI::detail::lexical_cast(text, number) || number >= -1) return "";
    return fmt::format("must be at least 0, or -1 for no limit, not {}", text);
  };
  return {[check](std::string& text) { return check(text); }, "FROM -1"};
}

Result<size_t> parse_bytes(const std::string& text) {
  uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  std::string unit(rest, end);
  for (char& c : unit) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  int shift = -1;
  if (unit.empty() || unit == "B") shift = 0;
  if (unit == "K" || unit == "KB" || unit == "KIB") shift = 10;
  if (unit == "M" || unit == "MB" || unit == "MIB") shift = 20;
  if (unit == "G" || unit == "GB" || unit == "GIB") shift = 30;
  if (unit == "T" || unit == "TB" || unit == "TIB") shift = 40;
  if (error != std::errc() || shift < 0 || number == 0 || number > (UINT64_MAX >> 1 >> shift))
    return invalid_argument("'{}' is not an amount of memory such as 512M or 2G", text);
  return static_cast<size_t>(number << shift);
}

namespace {

// The embedded model is a file in memory: no later process can find it by its path.
std::string weight_cache_of(const RunOptions& o, const std::string& path) {
  return path.starts_with("/proc/self/fd/") ? std::string() : o.weight_cache_dir;
}

void print_remarks(const RunOptions& o) {
  log_to_stderr(log_level_of(o));
}

}  // namespace

LogLevel log_level_of(const RunOptions& o) {
  for (const LogLevel level :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError, LogLevel::kOff}) {
    if (o.log_level == freshet::name_of(level)) return level;
  }
  return o.verbose ? LogLevel::kInfo : LogLevel::kWarning;
}

eval::SessionOptions session_options(const RunOptions& o, const std::string& path) {
  print_remarks(o);
  eval::SessionOptions s;
  s.model = path;
  s.threads = o.threads;
  s.device = o.device;
  s.cpu_isa = o.cpu_isa;
  s.reference = o.reference;
  s.force_kernels = o.force_kernels;
  s.weight_cache_dir = weight_cache_of(o, path);
  s.mmproj = o.mmproj;
  s.hf_overrides = o.hf_overrides;
  s.kv_cache_dtype = o.kv_cache_dtype;
  s.kv_cache_skip_layers = o.kv_cache_skip_layers;
  return s;
}

Result<EngineOptions> engine_options(const RunOptions& o, const std::string& path) {
  print_remarks(o);
  EngineOptions e;
  e.model = path;
  e.threads = o.threads;
  e.device = o.device;
  e.gpu_memory_utilization = o.gpu_memory_utilization;
  e.cpu_isa = o.cpu_isa;
  e.reference = o.reference;
  e.force_kernels = o.force_kernels;
  e.weight_cache_dir = weight_cache_of(o, path);
  e.mmproj = o.mmproj;
  e.hf_overrides = o.hf_overrides;
  e.kv_cache_dtype = o.kv_cache_dtype;
  e.kv_cache_skip_layers = o.kv_cache_skip_layers;
  e.kv_eviction = o.kv_eviction;
  e.sparse_attention = o.sparse_attention;
  e.max_model_len = o.max_model_len;
  if (!o.kv_cache_memory.empty()) {
    FRESHET_ASSIGN_OR_RETURN(e.kv_cache_memory, parse_bytes(o.kv_cache_memory));
  }
  // More than any machine has would not fit the number of bytes.
  e.kv_offloading_bytes = static_cast<size_t>(std::min(o.kv_offloading_gib, 1e9) * 0x1p30);
  e.kv_transfer_config = o.kv_transfer_config;
  e.kv_cache_dir = o.kv_cache_dir;
  if (!o.kv_cache_dir_size.empty()) {
    FRESHET_ASSIGN_OR_RETURN(e.kv_cache_dir_bytes, parse_bytes(o.kv_cache_dir_size));
  }
  FRESHET_ASSIGN_OR_RETURN(e.speculative_config, speculative_config(o.speculation));
  return e;
}

void say_device(const RunOptions& o, const std::string& device, const std::string& why) {
  const bool chosen = o.device == "auto" && device != "cpu";
  if (!why.empty()) {
    say(fmt::format("freshet: runs on {} ({})", device, why));
  } else if (chosen || o.verbose) {
    say(fmt::format("freshet: runs on {}", device));
  }
}

Result<std::unique_ptr<Engine>> load_engine(const RunOptions& o, const std::string& model) {
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(model));
  FRESHET_ASSIGN_OR_RETURN(EngineOptions e, engine_options(o, path));
  e.max_num_seqs = 256;  // one request at a time: more would only take memory
  ProgressLine progress;
  e.on_progress = [&progress](const std::string& stage, double fraction) {
    progress.update(stage, fraction);
  };
  FRESHET_ASSIGN_OR_RETURN(auto engine, open_on_device(o, progress, e, Engine::load));
  if (o.verbose) say(engine->memory_plan());
  return engine;
}

CLI::Option* add_generation_config_option(CLI::App& c, std::string& choice) {
  return c
      .add_option("--generation-config", choice,
                  "Source of sampling parameters that are not given: auto (the model's "
                  "generation_config.json or GGUF file), none, or a folder with a "
                  "generation_config.json")
      ->capture_default_str();
}

Result<json::Object> default_sampling(const std::string& choice, const std::string& model_path) {
  FRESHET_ASSIGN_OR_RETURN(json::Object defaults,
                           server::read_sampling_defaults(choice, model_path));
  const std::string_view card = hub::sampling_of_cached(model_path);
  if (server::recommend_sampling(defaults) || choice != "auto" || card.empty()) return defaults;
  FRESHET_ASSIGN_OR_RETURN(json::Value parsed, json::parse(card));
  for (const auto& [name, value] : parsed.as_object()) defaults[name] = value;
  return defaults;
}

namespace {

// Sets parameters that were not given to the values that the model's authors recommend.
Status take_recommended(const SamplingOptions& o, const std::string& model_path,
                        SamplingParams& p) {
  FRESHET_ASSIGN_OR_RETURN(const json::Object defaults,
                           default_sampling(o.generation_config, model_path));
  if (defaults.empty()) return {};
  const SamplingParams recommended = server::chat_params_of(defaults);
  // No option has these.
  p.bad_words_ids = recommended.bad_words_ids;
  p.begin_suppress_tokens = recommended.begin_suppress_tokens;
  p.no_repeat_ngram_size = recommended.no_repeat_ngram_size;
  p.early_stopping = recommended.early_stopping;
  p.renormalize_logits = recommended.renormalize_logits;
  if (o.command->count("--length-penalty") == 0) p.length_penalty = recommended.length_penalty;
  if (p.beam_width > 0 || !server::recommend_sampling(defaults)) return {};
  const auto take = [&](const char* option, auto member) {
    if (o.command->count(option) == 0) p.*member = recommended.*member;
  };
  take("--temperature", &SamplingParams::temperature);
  take("--top-k", &SamplingParams::top_k);
  take("--top-p", &SamplingParams::top_p);
  take("--min-p", &SamplingParams::min_p);
  take("--typical-p", &SamplingParams::typical_p);
  take("--repetition-penalty", &SamplingParams::repetition_penalty);
  return {};
}

}  // namespace

namespace {

std::string seed_error(std::string& text) {
  int64_t number = 0;
  if (CLI::detail::lexical_cast(text, number) && number >= -1) return {};
  return fmt::format("must be a number of at least 0, or -1 for a random one, not {}", text);
}

}  // namespace

void add_sampling_options(CLI::App& c, SamplingOptions& o, int max_tokens) {
  o.command = &c;
  SamplingParams& p = o.params;
  p.max_tokens = max_tokens;
  p.temperature = server::kChatTemperature;
  p.top_p = server::kChatTopP;
  p.min_p = server::kChatMinP;
  const std::string group = "Sampling";
  c.add_option_function<int>(
       "-n,--max-tokens",
       [&o](const int& n) {
         // Whatever is left of the context is less than this.
         o.params.max_tokens = n == -1 ? std::numeric_limits<int>::max() : n;
         o.max_tokens_given = true;
       },
       fmt::format("Maximum number of tokens to generate; -1: no limit, 0: only compute the prompt "
                   "(default: {})",
                   max_tokens))
      ->check(from_minus_one())
      ->group(group);
  const auto add = [&](const char* name, auto& value, const char* about) {
    return c.add_option(name, value, about)->capture_default_str()->group(group);
  };
  add("--temp,--temperature", p.temperature, "Sampling temperature; 0: greedy");
  add("--top-k", p.top_k, "Sample from the k most likely tokens; 0: all");
  add("--top-p", p.top_p, "Sample from the most likely tokens that together have this probability");
  add("--min-p", p.min_p, "Drop tokens less likely than this fraction of the most likely token");
  add("--typical-p", p.typical_p,
      "Sample from the most typical tokens that together have this probability");
  add("--repetition-penalty", p.repetition_penalty,
      "Divides the logits of tokens that have occurred; 1: off");
  add("--presence-penalty", p.presence_penalty,
      "Subtracted from the logits of tokens already generated");
  add("--frequency-penalty", p.frequency_penalty,
      "Subtracted once for each time a token was generated");
  add_generation_config_option(c, o.generation_config)->group(group);
  c.add_option("--logit-bias", o.logit_bias, "ID=VALUE, added to a token's logit (may be repeated)")
      ->group(group);
  c.add_option("--seed", o.seed, "Makes the output repeatable (default: random)")
      ->check(CLI::Validator(seed_error, ""))
      ->group(group);
  c.add_option("--stop", p.stop, "Stop before this text (may be repeated)")
      ->allow_extra_args(false)
      ->group(group);
  c.add_option("--stop-token", p.stop_token_ids, "Stop at this token id (may be repeated)")
      ->allow_extra_args(false)
      ->group(group);
  c.add_flag("--ignore-eos", p.ignore_eos, "Do not stop at an end-of-text token")->group(group);
  add("--min-tokens", p.min_tokens, "Do not stop at an end-of-text token before this many tokens");
  add("--beams", p.beam_width, "Beam search with this width; 0: off");
  add("--length-penalty", p.length_penalty, "Beam search: above 1 prefers longer texts");
}

Status check_sampling(const SamplingOptions& o) {
  SamplingParams p = o.params;
  p.max_tokens = std::max(p.max_tokens, 1);  // 0: only the prompt is computed
  const auto wrong = find_error(p, std::numeric_limits<int32_t>::max());
  if (!wrong) return {};
  std::string option = "--" + (wrong->field == "beam_width"       ? "beams"
                               : wrong->field == "stop_token_ids" ? "stop-token"
                                                                  : wrong->field);
  std::replace(option.begin(), option.end(), '_', '-');
  if (!wrong->message.starts_with(wrong->field))
    return invalid_argument("{}: {}", option, wrong->message);
  return invalid_argument("{}{}", option, wrong->message.substr(wrong->field.size()));
}

Result<SamplingParams> sampling_params(const SamplingOptions& o, const std::string& model_path) {
  SamplingParams p = o.params;
  FRESHET_RETURN_IF_ERROR(take_recommended(o, model_path, p));
  if (o.seed >= 0) p.seed = static_cast<uint64_t>(o.seed);
  for (const std::string& entry : o.logit_bias) {
    const size_t equals = entry.find('=');
    int32_t id = 0;
    float bias = 0.0f;
    const char* const begin = entry.data();
    const char* const end = begin + entry.size();
    const char* const middle = begin + std::min(equals, entry.size());
    const bool good = equals != std::string::npos &&
                      std::from_chars(begin, middle, id).ptr == middle &&
                      std::from_chars(middle + 1, end, bias).ptr == end;
    if (!good) return invalid_argument("--logit-bias {}: write ID=VALUE, e.g. 13=-100", entry);
    p.logit_bias.emplace_back(id, bias);
  }
  return p;
}

}  // namespace freshet::cli
