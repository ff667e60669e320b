#include "cli/workload_options.h"

#include <utility>

namespace freshet::cli {
namespace {

using bench_client::DatasetKind;

constexpr std::pair<const char*, DatasetKind> kKinds[] = {
    {"random", DatasetKind::kRandom},     {"sonnet", DatasetKind::kSonnet},
    {"sharegpt", DatasetKind::kShareGpt}, {"azure", DatasetKind::kAzure},
    {"mooncake", DatasetKind::kMooncake}, {"custom", DatasetKind::kCustom}};

std::string trimmed(const std::string& s) {
  const size_t first = s.find_first_not_of(" \t");
  return first == std::string::npos ? "" : s.substr(first, s.find_last_not_of(" \t") - first + 1);
}

}  // namespace

void add_workload_options(CLI::App& c, WorkloadOptions& o) {
  const std::string group = "Workload";
  const auto add = [&](const char* name, auto& value, const char* about) {
    return c.add_option(name, value, about)->capture_default_str()->group(group);
  };
  add("--dataset-name", o.dataset_name,
      "random, sonnet, sharegpt, custom (JSON lines with \"prompt\"), or a trace: azure, mooncake")
      ->check(CLI::IsMember({"random", "sonnet", "sharegpt", "azure", "mooncake", "custom"}));
  c.add_option("--dataset-path", o.dataset.path, "Dataset file (not needed for random)")
      ->group(group);
  add("--num-prompts", o.dataset.num_prompts, "Number of requests (for a trace: the maximum)");
  add("--seed", o.dataset.seed, "The same seed gives the same prompts, lengths and arrival times");
  c.add_option("--input-len", o.input_len, "Tokens per prompt, for random and sonnet")
      ->group(group);
  c.add_option("--output-len", o.output_len, "Tokens per answer, for all datasets but traces")
      ->group(group);
  add("--random-input-len", o.dataset.random_input_len, "random: tokens per prompt");
  add("--random-output-len", o.dataset.random_output_len, "random: tokens per answer");
  add("--random-range-ratio", o.dataset.random_range_ratio,
      "random: lengths vary by a factor between (1 - ratio) and (1 + ratio)");
  add("--random-prefix-len", o.dataset.random_prefix_len,
      "random: additional tokens that all prompts begin with");
  add("--sonnet-input-len", o.dataset.sonnet_input_len, "sonnet: tokens per prompt");
  add("--sonnet-output-len", o.dataset.sonnet_output_len, "sonnet: tokens per answer");
  add("--sonnet-prefix-len", o.dataset.sonnet_prefix_len,
      "sonnet: tokens that all prompts begin with");
  c.add_option("--sharegpt-output-len", o.dataset.sharegpt_output_len,
               "sharegpt: tokens per answer (default: as in the conversation)")
      ->group(group);
  add("--custom-output-len", o.dataset.custom_output_len,
      "custom: tokens per answer if the row does not say");
  add("--trace-speed", o.dataset.trace_speed, "azure, mooncake: replay this many times faster");
  c.add_flag("--disable-shuffle", o.no_shuffle, "sharegpt, custom: keep the order of the rows")
      ->group(group);
}

Result<bench_client::DatasetOptions> workload(const WorkloadOptions& o) {
  bench_client::DatasetOptions d = o.dataset;
  for (const auto& [name, kind] : kKinds) {
    if (o.dataset_name == name) d.kind = kind;
  }
  if (o.input_len < 0 || o.output_len < 0)
    return invalid_argument("--input-len and --output-len must not be negative");
  if (o.input_len > 0) d.random_input_len = d.sonnet_input_len = o.input_len;
  if (o.output_len > 0) {
    d.random_output_len = d.sonnet_output_len = o.output_len;
    d.sharegpt_output_len = d.custom_output_len = o.output_len;
  }
  d.shuffle = !o.no_shuffle;
  FRESHET_RETURN_IF_ERROR(bench_client::check(d));
  return d;
}

Result<std::pair<std::string, std::string>> key_value(const char* flag, const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || trimmed(text.substr(0, equals)).empty())
    return invalid_argument("{} {}: write KEY=VALUE", flag, text);
  return std::pair(trimmed(text.substr(0, equals)), trimmed(text.substr(equals + 1)));
}

}  // namespace freshet::cli
