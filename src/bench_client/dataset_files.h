// Readers of the files that workloads come from. Pure: text in, rows or an error out that names the
// line (or the entry) and what is wrong with it. Safe on any bytes; nothing is allocated from a
// number in the file.
//
//   azure     AzurePublicDataset's LLM inference traces, CSV:
//   TIMESTAMP,ContextTokens,GeneratedTokens mooncake  Mooncake's traces, JSON lines: timestamp
//   (ms), input_length, output_length, hash_ids,
//             each id naming 512 tokens that requests share
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
constexpr int kMooncakeBlock = 512;  // tokens that one hash id stands for

struct TraceRow {
  double time = 0.0;  // seconds since the first row's
  int input_tokens = 0;
  int output_tokens = 0;
  std::vector<int64_t> blocks;  // mooncake: hash ids
};
Result<std::vector<TraceRow>> parse_azure(std::string_view text);
Result<std::vector<TraceRow>> parse_mooncake(std::string_view text);

struct TextRow {
  std::string prompt;
  std::string completion;  // sharegpt: the answer, whose length is wanted
  int output_tokens = 0;   // custom: 0 when not given
};
Result<std::vector<TextRow>> parse_sharegpt(std::string_view text);
Result<std::vector<TextRow>> parse_custom(std::string_view text);

Result<std::vector<std::string>> parse_lines(std::string_view text);

}  // namespace freshet::bench_client
