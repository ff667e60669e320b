// tiktoken files: one line per token, with its bytes in Base64 and its rank, which is also its id.
// The files do not say how to split words or which special tokens exist; well-known vocabularies
// are recognised by their size.
#include <charconv>

#include "tokenizer/base64.h"
#include "tokenizer/bpe.h"
#include "tokenizer/tokenizer_parts.h"

namespace freshet::tokenizer {
namespace {

using Words = ScanRules::Words;
using Contractions = ScanRules::Contractions;
constexpr ScanRules kGpt2Rules;
constexpr ScanRules kLlama3Rules{Words::kCl100k, Contractions::kAnyCase, 3};
constexpr ScanRules kQwenRules{Words::kCl100k, Contractions::kAnyCase, 1};
constexpr ScanRules kO200kRules{Words::kO200k, Contractions::kAnyCase, 3, false, true};
// cl100k_base's own expression treats line ends within white space differently from the scanner's.
constexpr std::string_view kCl100kPattern =
    "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}+| "
    "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*+"
    "|\\s++$|\\s*[\\r\\n]|\\s+(?!\\S)|\\s";

using NamedIds = std::vector<std::pair<std::string, int32_t>>;

NamedIds llama3_specials() {
  NamedIds ids;
  int32_t id = 128000;
  for (const char* name : {"<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
                           "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
                           "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
                           "<|eot_id|>", "<|python_tag|>", "<|image|>"}) {
    ids.emplace_back(name, id++);
  }
  for (int i = 2; id < 128256; ++i) {
    ids.emplace_back(fmt::format("<|reserved_special_token_{}|>", i), id++);
  }
  return ids;
}

NamedIds qwen_specials() {
  NamedIds ids = {{"<|endoftext|>", 151643}, {"<|im_start|>", 151644}, {"<|im_end|>", 151645}};
  for (int i = 0; i < 205; ++i) ids.emplace_back(fmt::format("<|extra_{}|>", i), 151646 + i);
  return ids;
}

Status choose_known(int32_t size, TokenizerParts& parts, NamedIds& specials) {
  const auto scan = [&](const ScanRules& rules) {
    parts.pre_tokenizer.add({.kind = PreTokenizerStep::Kind::kScan, .rules = rules});
  };
  switch (size) {
    case 50256:  // r50k_base, GPT-2
      scan(kGpt2Rules);
      specials = {{"<|endoftext|>", 50256}};
      break;
    case 50281:  // p50k_base
      scan(kGpt2Rules);
      specials = {{"<|endoftext|>", 50256}};
      break;
    case 128000:
      scan(kLlama3Rules);
      specials = llama3_specials();
      break;
    case 151643:
      scan(kQwenRules);
      specials = qwen_specials();
      break;
    case 199998:
      scan(kO200kRules);
      specials = {{"<|endoftext|>", 199999}, {"<|endofprompt|>", 200018}};
      break;
    case 100256:  // cl100k_base
      specials = {{"<|endoftext|>", 100257},
                  {"<|fim_prefix|>", 100258},
                  {"<|fim_middle|>", 100259},
                  {"<|fim_suffix|>", 100260},
                  {"<|endofprompt|>", 100276}};
      [[fallthrough]];
    default: {
      FRESHET_ASSIGN_OR_RETURN(auto step, make_split(kCl100kPattern, RegexDialect::kRust));
      parts.pre_tokenizer.add(std::move(step));
    }
  }
  return {};
}

Status parse_line(std::string_view line, size_t number, size_t max_count, TokenizerParts& parts) {
  const size_t space = line.find(' ');
  const auto bytes = decode_base64(line.substr(0, space));
  int64_t rank = -1;
  const bool split = space != line.npos && bytes && !bytes->empty();
  if (split) {
    const std::string_view digits = line.substr(space + 1);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
    if (error != std::errc() || end != digits.data() + digits.size()) rank = -1;
  }
  if (rank < 0 || rank > largest_id(max_count)) {
    return invalid_argument("line {} is not a Base64 token followed by its rank", number);
  }
  if (parts.vocab.has(static_cast<int32_t>(rank)) || parts.vocab.find(*bytes) >= 0) {
    return invalid_argument("line {} repeats a token or the rank {}", number, rank);
  }
  parts.vocab.set(static_cast<int32_t>(rank), *bytes);
  return {};
}

Status parse_ranks(std::string_view text, TokenizerParts& parts) {
  const size_t max_count = text.size() / 4;  // a token takes at least "YQ 1"
  size_t number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    while (line.ends_with('\r') || line.ends_with(' ')) line.remove_suffix(1);
    if (!line.empty()) FRESHET_RETURN_IF_ERROR(parse_line(line, number, max_count, parts));
  }
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    if (parts.vocab.find({&byte, 1}) < 0) {
      return invalid_argument("there is no token for the byte 0x{:02X}", b);
    }
  }
  return {};
}

Status build(std::string_view text, TokenizerParts& parts) {
  FRESHET_RETURN_IF_ERROR(parse_ranks(text, parts));
  NamedIds specials;
  FRESHET_RETURN_IF_ERROR(choose_known(parts.vocab.size(), parts, specials));
  std::vector<int32_t> ranks;
  for (int32_t id = 0; id < parts.vocab.size(); ++id) {
    ranks.push_back(parts.vocab.has(id) ? id : Merge::kNone);
    if (parts.vocab.has(id)) parts.byte_keys.insert(parts.vocab.text(id), id);
  }
  BpeOptions options;
  options.bytes = true;
  options.whole_words = true;
  auto bpe = std::make_unique<BpeModel>(options, parts.byte_keys, parts.vocab.size());
  bpe->set_token_ranks(std::move(ranks));
  parts.model = std::move(bpe);
  for (const auto& [name, id] : specials) {
    if (!parts.vocab.has(id)) parts.vocab.set(id, name);
  }
  parts.special.resize(static_cast<size_t>(parts.vocab.size()));
  for (int32_t id = 0; id < parts.vocab.size(); ++id) parts.bytes.push_back(parts.vocab.text(id));
  for (const auto& [name, id] : specials) parts.special[static_cast<size_t>(id)] = true;
  parts.decode_mode = DecodeMode::kBytes;
  return {};
}

}  // namespace

PartsResult parse_tiktoken(std::string_view text, const std::string& name) {
  auto parts = std::make_shared<TokenizerParts>();
  if (Status status = build(text, *parts); !status.ok()) return status.with_context(name);
  return parts;
}

}  // namespace freshet::tokenizer
