// Workloads: prompts, output lengths and, for traces, arrival times.
//
// All random draws come from Philox with `seed`: the same options give the same requests on every
// machine. A Vocabulary tokenizes text: a local tokenizer or the server's.
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

// Converts text to token ids and back. Not synchronised.
class Vocabulary {
 public:
  virtual ~Vocabulary() = default;
  virtual Result<Ids> encode(const std::string& text) = 0;  // without special tokens
  virtual Result<std::string> decode(const Ids& ids) = 0;
  // Ids for random prompts: without special tokens if they are known.
  virtual Result<Ids> usable_ids() = 0;
};

struct Sample {
  std::variant<std::string, Ids> prompt;
  int input_tokens = 0;  // 0: unknown until the server reports it
  int output_tokens = 0;
  double time = 0.0;  // traces: seconds since the start
};

enum class DatasetKind { kRandom, kSonnet, kShareGpt, kAzure, kMooncake, kCustom };

// Fields are named after vLLM's flags, such as --random-input-len.
struct DatasetOptions {
  DatasetKind kind = DatasetKind::kRandom;
  std::string path;
  int num_prompts = 1000;
  uint64_t seed = 0;
  bool as_text = false;      // synthetic prompts as text, for servers or routes that take no ids
  bool shuffle = true;       // sharegpt and custom: in random order
  int max_model_len = 0;     // > 0: rows of files that do not fit are left out
  double trace_speed = 1.0;  // replay traces this many times faster
  int random_input_len = 1024;
  int random_output_len = 128;
  double random_range_ratio = 0.0;  // lengths lie in [len * (1 - r), len * (1 + r)]
  int random_prefix_len = 0;        // tokens that all prompts begin with, in addition to input_len
  int sonnet_input_len = 550;
  int sonnet_output_len = 150;
  int sonnet_prefix_len = 200;
  int sharegpt_output_len = 0;  // 0: the length of the answer in the dataset
  int custom_output_len = 256;  // for rows without a length
};

struct Dataset {
  std::vector<Sample> samples;
  bool timed = false;   // samples have times
  size_t left_out = 0;  // rows that were too long or too short
};

Status check(const DatasetOptions& options);
// Errors name the file and the line.
Result<Dataset> make_dataset(const DatasetOptions& options, Vocabulary& vocabulary);

}  // namespace freshet::bench_client
