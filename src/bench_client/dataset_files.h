// Readers of workload files. Pure functions: text in, rows out, or an error that names the line (or
// the entry) and the mistake. Safe on any bytes; no allocation is sized by a number in the file.
//
//   azure     AzurePublicDataset's LLM inference traces, CSV with the columns
//             TIMESTAMP,ContextTokens,GeneratedTokens
//   mooncake  Mooncake's traces, JSON lines with timestamp (ms), input_length, output_length and
//             hash_ids; each id stands for 512 tokens that requests share
//   sharegpt  a JSON array of {"conversations": [{"from", "value"}, ...]}
//   custom    JSON lines of {"prompt": "...", "output_tokens": N}, the second optional
//   sonnet    lines of a poem
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace freshet::bench_client {

constexpr int kMaxRowTokens = 1 << 22;
constexpr int kMooncakeBlock = 512;  // tokens per hash id

struct TraceRow {
  double time = 0.0;  // seconds since the first row
  int input_tokens = 0;
  int output_tokens = 0;
  std::vector<int64_t> blocks;  // mooncake: hash ids
};
Result<std::vector<TraceRow>> parse_azure(std::string_view text);
Result<std::vector<TraceRow>> parse_mooncake(std::string_view text);

struct TextRow {
  std::string prompt;
  std::string completion;  // sharegpt: the answer; its length is used
  int output_tokens = 0;   // custom: 0 if not given
};
Result<std::vector<TextRow>> parse_sharegpt(std::string_view text);
Result<std::vector<TextRow>> parse_custom(std::string_view text);

Result<std::vector<std::string>> parse_lines(std::string_view text);

}  // namespace freshet::bench_client
