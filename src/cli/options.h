// Options shared by several subcommands: the model, how it runs, sampling.
//
// add_*() declares them; after parsing, the struct holds the given values. Single-threaded.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "cli/output.h"
#include "cli/speculative_options.h"
#include "eval/session.h"
#include "freshet/engine.h"

namespace freshet::cli {

struct RunOptions {
  int threads = 0;
  std::string device = "auto";
  double gpu_memory_utilization = 0.9;
  std::string cpu_isa;
  bool reference = false;
  std::vector<std::string> force_kernels;
  std::string weight_cache_dir;
  std::string kv_cache_dtype = "auto";
  std::vector<int> kv_cache_skip_layers;
  std::string kv_eviction;
  std::string sparse_attention;
  std::string kv_cache_memory;  // "512M"
  double kv_offloading_gib = 0.0;
  std::string kv_offloading_backend = "native";
  std::string kv_transfer_config;
  std::string kv_cache_dir;
  std::string kv_cache_dir_size;  // "10G"
  int max_model_len = 0;
  SpeculativeOptions speculation;
  std::string mmproj;
  std::string hf_overrides;
  bool verbose = false;
  std::string log_level;  // of log_level_of(); "": not given
};
// --mmproj, of commands that read pictures.
void add_mmproj_option(CLI::App& command, RunOptions& options);
// --hf-overrides, of commands that run one model.
void add_overrides_option(CLI::App& command, RunOptions& options);
// Threads, device, instruction set, kernels, KV cache type; --verbose, --log-level.
void add_compute_options(CLI::App& command, RunOptions& options);
// The same, the limits of the KV cache, and speculation.
void add_engine_options(CLI::App& command, RunOptions& options);

// "1536", "512M", "2GiB" -> bytes. Every unit is a power of 1,024.
Result<size_t> parse_bytes(const std::string& text);

// The least severe messages to print: --log-level, or with --verbose info, otherwise warnings.
LogLevel log_level_of(const RunOptions& options);

// `path`: as returned by resolve_model(). From here on, messages of log_level_of() are
// printed.
Result<EngineOptions> engine_options(const RunOptions& options, const std::string& path);
eval::SessionOptions session_options(const RunOptions& options, const std::string& path);

// Prints the device to standard error if --device auto chose a GPU, or could not because of `why`;
// with --verbose, always.
void say_device(const RunOptions& options, const std::string& device, const std::string& why);
// Calls open(settings), which returns an engine or a session. With --device auto, a model that the
// GPU does not support (a format, a shape) is opened on the CPU. Clears `progress` and prints the
// device.
template <class Settings, class Open>
auto open_on_device(const RunOptions& options, ProgressLine& progress, Settings settings,
                    const Open& open) -> decltype(open(settings)) {
  auto opened = open(settings);
  std::string why;
  if (settings.device == "auto" && opened.status().code() == StatusCode::kUnsupported) {
    why = opened.status().message();
    settings.device = "cpu";
    opened = open(settings);
  }
  progress.clear();
  if (opened.ok()) say_device(options, (*opened)->device(), why);
  return opened;
}
// Loads a model, with progress on a terminal; with --verbose prints the memory plan to standard
// error.
Result<std::unique_ptr<Engine>> load_engine(const RunOptions& options, const std::string& model);

// Checks of numbers with short messages: those of CLI11 include the largest double.
CLI::Validator above_zero();
CLI::Validator not_negative();
CLI::Validator from_minus_one();

// --generation-config, the source of sampling parameters that are not given: see
// server/sampling_defaults.h.
CLI::Option* add_generation_config_option(CLI::App& command, std::string& choice);

struct SamplingOptions {
  const CLI::App* command = nullptr;  // knows which options were given
  SamplingParams params;
  std::string generation_config = "auto";
  bool max_tokens_given = false;
  std::vector<std::string> logit_bias;  // "id=value"
  int64_t seed = -1;
};
// `max_tokens`: the default of -n.
void add_sampling_options(CLI::App& command, SamplingOptions& options, int max_tokens);
// What is wrong with the values that were given, by the names of their options.
Status check_sampling(const SamplingOptions& options);
// What --generation-config `choice` selects. With "auto", models of the catalogue whose files
// recommend nothing get what their publisher's model card uses. `model_path`: as returned by
// resolve_model().
Result<json::Object> default_sampling(const std::string& choice, const std::string& model_path);
Result<SamplingParams> sampling_params(const SamplingOptions& options,
                                       const std::string& model_path);

}  // namespace freshet::cli
