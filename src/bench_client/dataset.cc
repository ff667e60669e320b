#include "bench_client/dataset.h"

#include <algorithm>
#include <cmath>

#include "base/mapped_file.h"
#include "bench_client/dataset_files.h"
#include "bench_client/random.h"

namespace freshet::bench_client {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 28;  // of the whole workload: 1 GiB

// vLLM's filter for conversations.
constexpr int kLeastTokens = 4;
constexpr int kMostPromptTokens = 1024;
constexpr int kMostTokens = 2048;

Ids random_ids(Random& random, const Ids& usable, int count) {
  Ids ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = usable[random.below(usable.size())];
  return ids;
}

Status too_many_tokens() {
  return resource_exhausted("the workload has more than {} tokens: use fewer or shorter prompts",
                            kMaxTokens);
}

class Maker {
 public:
  Maker(const DatasetOptions& options, Vocabulary& vocabulary)
      : o_(options), vocabulary_(vocabulary) {}

  Result<Dataset> make(std::string_view file);

 private:
  Status random();
  Status sonnet(std::string_view file);
  Status sharegpt(std::string_view file);
  Status custom(std::string_view file);
  Status trace(std::vector<TraceRow> rows);
  Ids block(int64_t hash, const Ids& usable) const;
  Status add(Sample sample);
  Status add_ids(Ids ids, int output_tokens, double time, const Ids& usable);
  bool fits(int input, int output) const {
    return o_.max_model_len <= 0 || int64_t{input} + output <= o_.max_model_len;
  }
  bool full() const { return dataset_.samples.size() >= static_cast<size_t>(o_.num_prompts); }
  // The order in which the rows of a file are used.
  std::vector<size_t> order(size_t count) const;
  // If a file has fewer rows than prompts, its rows are reused.
  Status repeat();

  const DatasetOptions& o_;
  Vocabulary& vocabulary_;
  Dataset dataset_;
  int64_t tokens_ = 0;
};

Status Maker::add(Sample sample) {
  tokens_ += sample.input_tokens;
  if (tokens_ > kMaxTokens) return too_many_tokens();
  dataset_.samples.push_back(std::move(sample));
  return {};
}

// Ids sent as text may be tokenized to more or fewer tokens. Cuts or extends the text until the
// counts agree, or nearly so.
Status Maker::add_ids(Ids ids, int output_tokens, double time, const Ids& usable) {
  const int wanted = static_cast<int>(ids.size());
  if (!o_.as_text) return add({std::move(ids), wanted, output_tokens, time});
  Random filler(o_.seed + dataset_.samples.size(), Stream::kTokens);
  std::string text;
  int got = 0;
  for (int attempt = 0; attempt < 8; ++attempt) {
    FRESHET_ASSIGN_OR_RETURN(text, vocabulary_.decode(ids));
    FRESHET_ASSIGN_OR_RETURN(ids, vocabulary_.encode(text));
    got = static_cast<int>(ids.size());
    if (got == wanted) break;
    if (got < wanted) {
      const Ids more = random_ids(filler, usable, wanted - got);
      ids.insert(ids.end(), more.begin(), more.end());
    } else {
      ids.resize(static_cast<size_t>(wanted));
    }
  }
  return add({std::move(text), got, output_tokens, time});
}

Status Maker::random() {
  FRESHET_ASSIGN_OR_RETURN(const Ids usable, vocabulary_.usable_ids());
  Random lengths(o_.seed, Stream::kLengths);
  Random tokens(o_.seed, Stream::kTokens);
  Random prefix_tokens(o_.seed, Stream::kPrefix);
  const Ids prefix = random_ids(prefix_tokens, usable, o_.random_prefix_len);
  const auto draw = [&](int length) {
    const int64_t low = static_cast<int64_t>(std::floor(length * (1.0 - o_.random_range_ratio)));
    const int64_t high = static_cast<int64_t>(std::ceil(length * (1.0 + o_.random_range_ratio)));
    return static_cast<int>(std::max<int64_t>(1, lengths.between(low, high)));
  };
  while (!full()) {
    const int input = draw(o_.random_input_len);
    const int output = draw(o_.random_output_len);
    Ids ids = prefix;
    const Ids own = random_ids(tokens, usable, input);
    ids.insert(ids.end(), own.begin(), own.end());
    FRESHET_RETURN_IF_ERROR(add_ids(std::move(ids), output, 0.0, usable));
  }
  return {};
}

// vLLM's prompt: a question, lines that all prompts share, then random lines.
Status Maker::sonnet(std::string_view file) {
  FRESHET_ASSIGN_OR_RETURN(const std::vector<std::string> lines, parse_lines(file));
  const std::string question = "Pick as many lines as you can from these poem lines:\n";
  std::string poem;
  for (const std::string& line : lines) poem += line + "\n";
  FRESHET_ASSIGN_OR_RETURN(const Ids question_ids, vocabulary_.encode(question));
  FRESHET_ASSIGN_OR_RETURN(const Ids poem_ids, vocabulary_.encode(poem));
  const double line_tokens =
      static_cast<double>(poem_ids.size()) / static_cast<double>(lines.size());
  const double offset = static_cast<double>(question_ids.size());
  if (line_tokens <= 0.0 || offset >= o_.sonnet_input_len) {
    return invalid_argument("--sonnet-input-len {}: must be greater than {}, the question's tokens",
                            o_.sonnet_input_len, question_ids.size());
  }
  const auto lines_of = [&](int length) {
    return static_cast<size_t>(std::max(0.0, std::round((length - offset) / line_tokens)));
  };
  const size_t shared = std::min(lines_of(o_.sonnet_prefix_len), lines.size());
  const size_t all = std::max(lines_of(o_.sonnet_input_len), shared);
  Random random(o_.seed, Stream::kTokens);
  std::string prefix = question;
  for (size_t i = 0; i < shared; ++i) prefix += lines[i] + "\n";
  while (!full()) {
    std::string prompt = prefix;
    for (size_t i = shared; i < all; ++i) prompt += lines[random.below(lines.size())] + "\n";
    FRESHET_ASSIGN_OR_RETURN(const Ids ids, vocabulary_.encode(prompt));
    FRESHET_RETURN_IF_ERROR(
        add({std::move(prompt), static_cast<int>(ids.size()), o_.sonnet_output_len, 0.0}));
  }
  return {};
}

std::vector<size_t> Maker::order(size_t count) const {
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; ++i) order[i] = i;
  if (!o_.shuffle) return order;
  Random random(o_.seed, Stream::kOrder);
  for (size_t i = count; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

Status Maker::repeat() {
  const size_t found = dataset_.samples.size();
  if (found == 0) return invalid_argument("no usable row: all are too long or too short");
  for (size_t i = 0; !full(); ++i)
    FRESHET_RETURN_IF_ERROR(add(Sample(dataset_.samples[i % found])));
  return {};
}

Status Maker::sharegpt(std::string_view file) {
  FRESHET_ASSIGN_OR_RETURN(std::vector<TextRow> rows, parse_sharegpt(file));
  for (const size_t i : order(rows.size())) {
    if (full()) return {};
    FRESHET_ASSIGN_OR_RETURN(const Ids prompt, vocabulary_.encode(rows[i].prompt));
    int output = o_.sharegpt_output_len;
    if (output <= 0) {
      FRESHET_ASSIGN_OR_RETURN(const Ids answer, vocabulary_.encode(rows[i].completion));
      output = static_cast<int>(answer.size());
    }
    const int input = static_cast<int>(prompt.size());
    const bool short_answer = o_.sharegpt_output_len <= 0 && output < kLeastTokens;
    if (input < kLeastTokens || short_answer || input > kMostPromptTokens ||
        input + output > kMostTokens || !fits(input, output)) {
      ++dataset_.left_out;
      continue;
    }
    FRESHET_RETURN_IF_ERROR(add({std::move(rows[i].prompt), input, output, 0.0}));
  }
  return repeat();
}

Status Maker::custom(std::string_view file) {
  FRESHET_ASSIGN_OR_RETURN(std::vector<TextRow> rows, parse_custom(file));
  for (const size_t i : order(rows.size())) {
    if (full()) return {};
    const int output = rows[i].output_tokens > 0 ? rows[i].output_tokens : o_.custom_output_len;
    FRESHET_RETURN_IF_ERROR(add({std::move(rows[i].prompt), 0, output, 0.0}));
  }
  return repeat();
}

// The tokens of a hash id: the same wherever the id occurs.
Ids Maker::block(int64_t hash, const Ids& usable) const {
  const uint64_t key = o_.seed ^ (static_cast<uint64_t>(hash) * 0x9E3779B97F4A7C15u);
  Random random(key, Stream::kBlocks);
  return random_ids(random, usable, kMooncakeBlock);
}

Status Maker::trace(std::vector<TraceRow> rows) {
  FRESHET_ASSIGN_OR_RETURN(const Ids usable, vocabulary_.usable_ids());
  Random tokens(o_.seed, Stream::kTokens);
  for (const TraceRow& row : rows) {
    if (full()) break;
    if (!fits(row.input_tokens, row.output_tokens)) {
      ++dataset_.left_out;
      continue;
    }
    const size_t wanted = static_cast<size_t>(row.input_tokens);
    Ids ids;
    for (const int64_t hash : row.blocks) {
      if (ids.size() >= wanted) break;
      const Ids shared = block(hash, usable);
      ids.insert(ids.end(), shared.begin(), shared.end());
    }
    ids.resize(std::min(ids.size(), wanted));
    const Ids own = random_ids(tokens, usable, static_cast<int>(wanted - ids.size()));
    ids.insert(ids.end(), own.begin(), own.end());
    FRESHET_RETURN_IF_ERROR(
        add_ids(std::move(ids), row.output_tokens, row.time / o_.trace_speed, usable));
  }
  if (dataset_.samples.empty()) return invalid_argument("no row fits into the model's context");
  dataset_.timed = true;
  return {};
}

Result<Dataset> Maker::make(std::string_view file) {
  Status status;
  switch (o_.kind) {
    case DatasetKind::kRandom:
      status = random();
      break;
    case DatasetKind::kSonnet:
      status = sonnet(file);
      break;
    case DatasetKind::kShareGpt:
      status = sharegpt(file);
      break;
    case DatasetKind::kCustom:
      status = custom(file);
      break;
    case DatasetKind::kAzure: {
      FRESHET_ASSIGN_OR_RETURN(auto rows, parse_azure(file));
      status = trace(std::move(rows));
      break;
    }
    case DatasetKind::kMooncake: {
      FRESHET_ASSIGN_OR_RETURN(auto rows, parse_mooncake(file));
      status = trace(std::move(rows));
      break;
    }
  }
  if (!status.ok()) return status;
  return std::move(dataset_);
}

}  // namespace

Status check(const DatasetOptions& o) {
  if (o.num_prompts < 1)
    return invalid_argument("--num-prompts {}: must be at least 1", o.num_prompts);
  const bool made_up = o.kind == DatasetKind::kRandom;
  if (made_up && !o.path.empty())
    return invalid_argument("the random dataset reads no file: leave out --dataset-path");
  if (!made_up && o.path.empty()) return invalid_argument("this dataset needs --dataset-path FILE");
  if (!(o.random_range_ratio >= 0.0 && o.random_range_ratio < 1.0))
    return invalid_argument("--random-range-ratio {}: must be at least 0 and less than 1",
                            o.random_range_ratio);
  for (const int length : {o.random_input_len, o.random_output_len, o.sonnet_input_len,
                           o.sonnet_output_len, o.custom_output_len}) {
    if (length < 1 || length > kMaxRowTokens)
      return invalid_argument("lengths must be from 1 to {} tokens, not {}", kMaxRowTokens, length);
  }
  for (const int length : {o.random_prefix_len, o.sonnet_prefix_len, o.sharegpt_output_len}) {
    if (length < 0 || length > kMaxRowTokens)
      return invalid_argument("lengths must be from 0 to {} tokens, not {}", kMaxRowTokens, length);
  }
  const int64_t each = int64_t{o.random_prefix_len} + o.random_input_len;
  if (made_up && each > kMaxTokens / o.num_prompts) return too_many_tokens();
  if (!(o.trace_speed > 0.0) || std::isinf(o.trace_speed))
    return invalid_argument("--trace-speed {}: must be greater than 0", o.trace_speed);
  return {};
}

Result<Dataset> make_dataset(const DatasetOptions& options, Vocabulary& vocabulary) {
  FRESHET_RETURN_IF_ERROR(check(options));
  if (options.path.empty()) return Maker(options, vocabulary).make({});
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(options.path));
  auto made = Maker(options, vocabulary)
                  .make({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()});
  if (!made.ok()) return made.status().with_context(options.path);
  return made;
}

}  // namespace freshet::bench_client
