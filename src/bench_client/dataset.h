// Workloads: prompts, output lengths and, for traces, arrival times.
//
// Everything drawn comes from Philox under `seed`: the same options give the same requests on every
// machine. Text is turned into tokens by a Vocabulary, which is a tokenizer here or the server's
// own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"

namespace freshet::bench_client {

using Ids = std::vector<int32_t>;

// What turns text into token ids and back. One thread.
class Vocabulary {
 public:
  virtual ~Vocabulary() = default;
  virtual Result<Ids> encode(const std::string& text) = 0;  // without special tokens
  virtual Result<std::string> decode(const Ids& ids) = 0;
  // Ids that random prompts may be made of: no special tokens where they are known.
  virtual Result<Ids> usable_ids() = 0;
};

struct Sample {
  std::variant<std::string, Ids> prompt;
  int input_tokens = 0;  // 0: not known before the server tells
  int output_tokens = 0;
  double time = 0.0;  // traces: seconds after the start
};

enum class DatasetKind { kRandom, kSonnet, kShareGpt, kAzure, kMooncake, kCustom };

// Field names follow vLLM's flags, --random-input-len and so on.
struct DatasetOptions {
  DatasetKind kind = DatasetKind::kRandom;
  std::string path;
  int num_prompts = 1000;
  uint64_t seed = 0;
  bool as_text = false;      // made-up prompts as text, for servers or routes that take no ids
  bool shuffle = true;       // sharegpt and custom: in random order
  int max_model_len = 0;     // > 0: requests of files that cannot fit are left out
  double trace_speed = 1.0;  // traces run so many times faster
  int random_input_len = 1024;
  int random_output_len = 128;
  double random_range_ratio = 0.0;  // lengths lie in [len * (1 - r), len * (1 + r)]
  int random_prefix_len = 0;        // tokens that all prompts begin with, besides input_len
  int sonnet_input_len = 550;
  int sonnet_output_len = 150;
  int sonnet_prefix_len = 200;
  int sharegpt_output_len = 0;  // 0: the answer's length
  int custom_output_len = 256;  // for rows that do not say
};

struct Dataset {
  std::vector<Sample> samples;
  bool timed = false;   // samples carry times
  size_t left_out = 0;  // rows that were too long or too short
};

Status check(const DatasetOptions& options);
// Errors name the file and the line.
Result<Dataset> make_dataset(const DatasetOptions& options, Vocabulary& vocabulary);

}  // namespace freshet::bench_client
