// Options that several subcommands have: which model, how it runs, how tokens are chosen.
//
// add_*() declares them; the struct holds what was given once parsing is over. One thread.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "cli/output.h"
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
  std::string kv_cache_memory;  // "512M"
  int max_model_len = 0;
  bool verbose = false;
};
// Threads, instruction set, kernels, type of the cache; --verbose.
void add_compute_options(CLI::App& command, RunOptions& options);
// Those, and what the cache may take.
void add_engine_options(CLI::App& command, RunOptions& options);

// "1536", "512M", "2GiB" -> bytes.
Result<size_t> parse_bytes(const std::string& text);

// `path`: as resolve_model() gave it. With --verbose the library's remarks are printed from here
// on.
Result<EngineOptions> engine_options(const RunOptions& options, const std::string& path);
eval::SessionOptions session_options(const RunOptions& options, const std::string& path);

// A line on standard error where --device auto chose a GPU, or did not because of `why`; with
// --verbose, always.
void say_device(const RunOptions& options, const std::string& device, const std::string& why);
// What open(settings) gives: an engine or a session. With --device auto, what a GPU there cannot
// take (a format, a shape) runs on the processor. Clears `progress` and tells of the device.
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
// Loads with progress on a terminal; with --verbose prints the memory plan to standard error.
Result<std::unique_ptr<Engine>> load_engine(const RunOptions& options, const std::string& model);

// Checks of numbers, in words: CLI11's own name the largest double.
CLI::Validator above_zero();
CLI::Validator not_negative();

// Where sampling parameters that nobody gives come from: see server/sampling_defaults.h.
CLI::Option* add_generation_config_option(CLI::App& command, std::string& choice);

struct SamplingOptions {
  const CLI::App* command = nullptr;  // tells what was given
  SamplingParams params;
  std::string generation_config = "auto";
  bool max_tokens_given = false;
  std::vector<std::string> logit_bias;  // "id=value"
  int64_t seed = -1;
};
// `max_tokens`: the default of -n.
void add_sampling_options(CLI::App& command, SamplingOptions& options, int max_tokens);
// `model_path`: as resolve_model() gave it.
Result<SamplingParams> sampling_params(const SamplingOptions& options,
                                       const std::string& model_path);

}  // namespace freshet::cli
