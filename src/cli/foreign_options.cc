#include "cli/foreign_options.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "base/nearest.h"
#include "cli/usage_error.h"
#include "ops/kv_type.h"

namespace freshet::cli {
namespace {

constexpr auto kSame = ForeignKind::kSame;
constexpr auto kFlag = ForeignKind::kFlag;
constexpr auto kText = ForeignKind::kText;
constexpr auto kAlways = ForeignKind::kAlways;
constexpr auto kCache = ForeignKind::kCache;
constexpr auto kHint = ForeignKind::kHint;

// Names with underscores are not listed: vLLM and we read them as names with dashes.
constexpr ForeignOption kForeign[] = {
    // The model and where it runs
    {"-c,--ctx-size", kSame, "--max-model-len", ""},
    {"-dev", kHint, "", "--device cpu, cuda or cuda:N"},
    {"-mg,--main-gpu", kHint, "", "--device cuda:N"},
    {"-sm,--split-mode,-ts,--tensor-split", kHint, "",
     "a model runs on one device: --device cuda:N"},
    {"-tp,--tensor-parallel-size,-pp,--pipeline-parallel-size,-dp,--data-parallel-size", kAlways,
     "1", "a model runs on one device: --device cuda:N"},
    {"-fa,--flash-attn", kAlways, "on,auto,1,true", "attention is always fused"},
    {"-tb,--threads-batch", kHint, "", "-t sets the threads of prompts and of generation"},
    {"-ctk,--cache-type-k", kCache, "--kv-cache-dtype", ""},
    {"-ctv,--cache-type-v", kCache, "--kv-cache-dtype", ""},
    {"--dtype", kAlways, "auto",
     "the weights keep the format of their file; freshet convert --type writes another, and "
     "--reference computes in F32"},
    {"-q,--quantization", kHint, "",
     "the format is read from the model; freshet convert --type writes another"},
    {"--load-format", kAlways, "auto,safetensors,gguf", "the format is read from the model"},
    {"--mmap", kAlways, "", ""},
    {"--no-mmap,-nommap", kHint, "", "files are always mapped; leave it out"},
    {"--mlock", kHint, "", "leave it out: memory is never locked"},
    {"--numa", kHint, "", "start the program under numactl"},
    {"--cpu-mask,-C,--cpu-range,-Cr", kHint, "", "start the program under taskset"},
    {"--trust-remote-code", kHint, "", "leave it out: code that comes with a model is never run"},
    {"--enforce-eager,--block-size,--swap-space,--cpu-offload-gb", kHint, "",
     "leave it out: there is no such choice here"},
    {"--tokenizer", kHint, "",
     "the tokenizer is the model's; put its files into the model's folder"},
    // Sampling
    {"-s", kSame, "--seed", ""},
    {"--predict,--n-predict", kSame, "--max-tokens", ""},
    {"--repeat-penalty", kSame, "--repetition-penalty", ""},
    {"--typical", kSame, "--typical-p", ""},
    {"-l", kSame, "--logit-bias", ""},
    {"-r,--reverse-prompt", kSame, "--stop", ""},
    {"--repeat-last-n", kAlways, "-1", "penalties look at the whole text"},
    {"--mirostat,--dynatemp-range,--xtc-probability,--dry-multiplier,--top-nsigma", kHint, "",
     "not supported; --min-p and --typical-p are the closest"},
    {"--samplers,--sampling-seq", kHint, "", "the order of samplers is fixed: leave it out"},
    {"-p,--prompt", kText, "", ""},
    {"-sys,--system-prompt", kSame, "--system", ""},
    {"-cnv,--conversation,-i,--interactive", kHint, "", "use freshet chat"},
    {"-e,--escape", kHint, "", "write the text in your shell's quotes, e.g. $'one\\ntwo'"},
    {"--simple-io,--color,-co", kAlways, "", ""},
    // The server
    {"-np", kSame, "--parallel,--max-num-seqs", ""},
    {"--parallel", kSame, "--max-num-seqs", ""},
    {"-b,--batch-size", kSame, "--max-num-batched-tokens", ""},
    {"-ub,--ubatch-size", kHint, "",
     "there is one size of a step: -b in bench, --max-num-batched-tokens in serve"},
    {"-a,--alias", kSame, "--served-model-name", ""},
    {"-cb,--cont-batching,--enable-chunked-prefill", kAlways, "", ""},
    {"-nocb,--no-cont-batching", kFlag, "--batching=static", ""},
    {"--no-enable-chunked-prefill", kHint, "",
     "long prompts are always cut: --max-num-batched-tokens sets the size"},
    {"--cache-prompt", kFlag, "--enable-prefix-caching", ""},
    {"--no-cache-prompt", kFlag, "--no-enable-prefix-caching", ""},
    {"--jinja,--enable-auto-tool-choice,--metrics,--slots,--props,--webui,--embeddings,--embedding",
     kAlways, "", ""},
    {"--chat-template-file", kSame, "--chat-template", ""},
    {"--reasoning-format", kHint, "", "--reasoning-parser"},
    {"--ssl-key-file", kSame, "--ssl-keyfile", ""},
    {"--ssl-cert-file", kSame, "--ssl-certfile", ""},
    {"-to,--timeout", kHint, "", "--write-timeout, --header-timeout and --body-timeout"},
    {"--uvicorn-log-level", kSame, "--log-level", ""},
    {"--disable-uvicorn-access-log,--disable-log-requests,--no-enable-log-requests", kFlag,
     "--disable-access-log", ""},
    {"--disable-log-stats", kFlag, "--log-stats-interval=0", ""},
    {"--log-disable", kFlag, "--log-level=off", ""},
    {"-lv,--verbosity,--log-verbosity", kHint, "", "--log-level or -v"},
    // Speculative decoding
    {"-md,--draft-model-path,--speculative-model", kSame, "--spec-draft-model", ""},
    {"--draft,--num-speculative-tokens", kSame, "--spec-draft-n-max", ""},
    {"-hfd,-hfrd,--hf-repo-draft,--spec-draft-hf", kHint, "",
     "--spec-draft-model hf:ORG/REPO[:QUANT]"},
    {"--spec-type", kAlways, "none",
     "--speculative-config '{\"method\": \"ngram\"}'; docs/speculation.md lists the methods"},
    {"--draft-min,--draft-n-min,--spec-draft-n-min", kAlways, "0,1",
     "leave it out: drafts of any length are verified"},
    {"--draft-p-min,--spec-draft-p-min", kAlways, "0,0.0",
     "leave it out: drafts of any probability are verified"},
    {"-ngld,--gpu-layers-draft,--n-gpu-layers-draft,--spec-draft-ngl", kAlways, "99,-1,all,auto",
     "leave it out: the draft model runs on the device of the model"},
    {"-devd,--device-draft,--spec-draft-device", kHint, "",
     "leave it out: the draft model runs on the device of the model"},
    {"-cd,--ctx-size-draft,--spec-draft-ctx-size,-td,--threads-draft,-tbd,--threads-batch-draft,"
     "-ctkd,--cache-type-k-draft,-ctvd,--cache-type-v-draft",
     kHint, "", "leave it out: the draft model has the context, threads and cache of the model"},
    // Benchmarks: CLI11 reads a single dash as a one-letter option
    {"-pg", kSame, "--pg", ""},
};

// Options of a GPU's layers, whose value decides: all of them or none.
constexpr const char* kGpuLayers = "-ngl,--gpu-layers,--n-gpu-layers";

bool in_list(std::string_view list, std::string_view name) {
  for (size_t at = 0; at <= list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    if (list.substr(at, comma - at) == name) return true;
    at = comma + 1;
  }
  return false;
}

std::vector<std::string> split_list(std::string_view list) {
  std::vector<std::string> parts;
  for (size_t at = 0; at < list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    parts.emplace_back(list.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

const ForeignOption* find_foreign(std::string_view name) {
  for (const ForeignOption& f : kForeign) {
    if (in_list(f.names, name)) return &f;
  }
  return nullptr;
}

// How many positional arguments the command takes.
int word_count(const CLI::App& command) {
  int words = 0;
  for (const CLI::Option* o : command.get_options({})) {
    if (o->get_positional() && o->nonpositional() == false) words += o->get_items_expected_max();
  }
  return words;
}

bool looks_numeric(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789.-+,e") == std::string_view::npos;
}

// Reads the arguments from left to right.
class Translator {
 public:
  Translator(const CLI::App& program, const std::vector<std::string>& arguments)
      : command_(&program), in_(arguments) {}
  Result<std::vector<std::string>> run();

 private:
  Status option(std::string argument);
  Status foreign(const std::string& name, const ForeignOption& f, std::optional<std::string> value);
  Status gpu_layers(const std::string& name, std::optional<std::string> value);
  Status cache_type();
  Status unknown(const std::string& name) const;
  bool short_options(const std::string& argument);
  bool has(const std::string& name) const { return command_->get_option_no_throw(name) != nullptr; }
  // The next argument, as the value of `name`.
  Status take(const std::string& name, std::optional<std::string>& value);
  bool enter(const std::string& word);

  const CLI::App* command_;
  const std::vector<std::string>& in_;
  size_t at_ = 0;
  bool words_ = false;  // a positional argument was seen: no subcommand may follow
  std::vector<std::string> out_;
  // Behind the last positional argument (or the command) in out_: options that take several values
  // would swallow a text at the end.
  size_t last_word_ = 0;
  std::vector<std::string> texts_;
  std::optional<std::string> keys_, values_;  // llama.cpp's types of the cache
};

bool Translator::enter(const std::string& word) {
  if (words_) return false;
  for (const CLI::App* sub : command_->get_subcommands({})) {
    if (!sub->check_name(word)) continue;
    command_ = sub;
    return true;
  }
  return false;
}

Status Translator::take(const std::string& name, std::optional<std::string>& value) {
  if (value) return {};
  if (at_ >= in_.size()) return invalid_argument("{} needs a value", name);
  value = in_[at_++];
  return {};
}

Status Translator::gpu_layers(const std::string& name, std::optional<std::string> value) {
  FRESHET_RETURN_IF_ERROR(take(name, value));
  constexpr std::string_view kAll = "99,100,999,1000,9999,-1,all,auto";
  if (!has("--device")) return unknown(name);
  if (*value == "0") {
    out_.emplace_back("--device=cpu");
    return {};
  }
  if (in_list(kAll, *value)) return {};  // a GPU is used if there is one
  return invalid_argument(
      "{} {}: a model runs on one device: {} 99 (a GPU, if one is found) or {} 0 (the CPU); here: "
      "--device auto, cpu or cuda:N",
      name, *value, name, name);
}

// What was not given is f16, as in llama.cpp.
Status Translator::cache_type() {
  if (!keys_ && !values_) return {};
  FRESHET_ASSIGN_OR_RETURN(
      const ops::KvType type,
      ops::kv_type_by_llama_names(keys_.value_or("f16"), values_.value_or("f16")));
  out_.insert(out_.begin() + static_cast<std::ptrdiff_t>(last_word_),
              fmt::format("--kv-cache-dtype={}", ops::name_of(type)));
  ++last_word_;
  return {};
}

Status Translator::foreign(const std::string& name, const ForeignOption& f,
                           std::optional<std::string> value) {
  switch (f.kind) {
    case kSame:
    case kFlag:
      for (const std::string& ours : split_list(f.ours)) {
        if (!has(ours.substr(0, ours.find('=')))) continue;
        out_.push_back(ours);
        if (f.kind == kFlag) return {};
        FRESHET_RETURN_IF_ERROR(take(name, value));
        out_.push_back(std::move(*value));
        return {};
      }
      return unknown(name);
    case kText:
      if (word_count(*command_) < 2) return unknown(name);  // a model alone
      FRESHET_RETURN_IF_ERROR(take(name, value));
      if (value->starts_with('-'))
        return invalid_argument("{}: a text that begins with - goes through standard input", name);
      texts_.push_back(std::move(*value));
      return {};
    case kAlways:
      if (*f.ours == '\0') return {};
      // -fa stood alone before llama.cpp gave it a value.
      if (!value && in_list(f.ours, "on") && (at_ >= in_.size() || in_[at_].starts_with('-')))
        return {};
      FRESHET_RETURN_IF_ERROR(take(name, value));
      if (in_list(f.ours, *value)) return {};
      return invalid_argument("{} {}: {}", name, *value, f.says);
    case kCache:
      if (!has(f.ours)) return unknown(name);
      FRESHET_RETURN_IF_ERROR(take(name, value));
      (in_list(f.names, "-ctk") ? keys_ : values_) = std::move(*value);
      return {};
    case kHint:
      return invalid_argument("unknown option {}: {}", name, f.says);
  }
  return {};
}

Status Translator::unknown(const std::string& name) const {
  const std::string of = command_->get_parent() == nullptr
                             ? std::string("freshet")
                             : fmt::format("freshet {}", path_of(*command_));
  std::vector<std::string> names;
  for (const CLI::Option* o : command_->get_options({})) {
    for (const std::string& n : o->get_lnames()) names.push_back("--" + n);
    for (const std::string& n : o->get_snames()) names.push_back("-" + n);
  }
  std::string wanted = name;
  if (!name.starts_with("--") && name.size() > 2) wanted = "-" + name;  // -temp: --temp
  if (const ForeignOption* f = find_foreign(name); f != nullptr && f->kind == kSame)
    return invalid_argument("{} has no option {} ({})", of, name, f->ours);
  std::string best = wanted.size() > 2 ? nearest(wanted, names) : "";
  // --ngl: -ngl
  if (const std::string one_dash = name.substr(1);
      best.empty() && name.starts_with("--") &&
      (find_foreign(one_dash) != nullptr || in_list(kGpuLayers, one_dash)))
    best = one_dash;
  if (best.empty()) return invalid_argument("unknown option {} of {}", name, of);
  return invalid_argument("unknown option {} of {}: did you mean {}?", name, of, best);
}

// Whether "-xyz" is an option with its value (-n5) or flags (-vj) of this command. Takes the next
// argument if that is the value.
bool Translator::short_options(const std::string& argument) {
  for (size_t i = 1; i < argument.size(); ++i) {
    const CLI::Option* o = command_->get_option_no_throw(std::string("-") + argument[i]);
    if (o == nullptr) return false;
    if (o->get_items_expected_max() == 0) continue;
    const std::string_view rest = std::string_view(argument).substr(i + 1);
    const std::string type = o->get_type_name();
    const bool wants_number =
        type.starts_with("INT") || type.starts_with("UINT") || type.starts_with("FLOAT");
    if (rest.empty() && at_ < in_.size()) {
      out_.push_back(argument);
      out_.push_back(in_[at_++]);
      return true;
    }
    if (!rest.empty() && wants_number && !looks_numeric(rest)) return false;
    break;
  }
  out_.push_back(argument);
  return true;
}

Status Translator::option(std::string argument) {
  std::optional<std::string> value;
  std::string name = argument;
  if (const size_t equals = argument.find('='); equals != std::string::npos) {
    name = argument.substr(0, equals);
    value = argument.substr(equals + 1);
  }
  const bool is_long = name.starts_with("--");
  if (is_long && !has(name)) {
    std::string dashed = name;
    std::replace(dashed.begin(), dashed.end(), '_', '-');
    if (has(dashed)) {
      name = dashed;
      argument = value ? fmt::format("{}={}", name, *value) : name;
    }
  }
  const bool known = (is_long || name.size() == 2) && has(name);
  if (known) {
    const CLI::Option* o = command_->get_option_no_throw(name);
    out_.push_back(argument);
    if (!value && o->get_items_expected_max() > 0 && at_ < in_.size() &&
        o->get_items_expected_min() > 0)
      out_.push_back(in_[at_++]);
    return {};
  }
  if (in_list(kGpuLayers, name)) return gpu_layers(name, std::move(value));
  std::string dashed = name;
  std::replace(dashed.begin(), dashed.end(), '_', '-');
  if (const ForeignOption* f = find_foreign(dashed)) return foreign(name, *f, std::move(value));
  const bool one_dash_word = !is_long && has("-" + name);  // -temp
  if (!is_long && !one_dash_word && short_options(argument)) return {};
  return unknown(name);
}

Result<std::vector<std::string>> Translator::run() {
  while (at_ < in_.size()) {
    const std::string argument = in_[at_++];
    if (argument == "--") {
      out_.push_back(argument);
      out_.insert(out_.end(), in_.begin() + static_cast<std::ptrdiff_t>(at_), in_.end());
      break;
    }
    if (argument.size() > 1 && argument[0] == '-') {
      FRESHET_RETURN_IF_ERROR(option(argument));
      continue;
    }
    if (!enter(argument)) words_ = true;
    out_.push_back(argument);
    last_word_ = out_.size();
  }
  FRESHET_RETURN_IF_ERROR(cache_type());
  out_.insert(out_.begin() + static_cast<std::ptrdiff_t>(last_word_), texts_.begin(), texts_.end());
  return std::move(out_);
}

}  // namespace

std::span<const ForeignOption> foreign_options() {
  return kForeign;
}

Result<std::vector<std::string>> translate_options(const CLI::App& program,
                                                   const std::vector<std::string>& arguments) {
  return Translator(program, arguments).run();
}

}  // namespace freshet::cli
