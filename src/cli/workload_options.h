// The workload options of `bench serve` and `bench throughput`, with vLLM's names and defaults.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "bench_client/dataset.h"

namespace freshet::cli {

struct WorkloadOptions {
  std::string dataset_name = "random";
  bench_client::DatasetOptions dataset;
  int input_len = 0;  // 0: the default of the dataset
  int output_len = 0;
  bool no_shuffle = false;
};

void add_workload_options(CLI::App& command, WorkloadOptions& options);
Result<bench_client::DatasetOptions> workload(const WorkloadOptions& options);

// "a=b" -> ("a", "b"), trimmed; `flag` is for the error message.
Result<std::pair<std::string, std::string>> key_value(const char* flag, const std::string& text);

}  // namespace freshet::cli
