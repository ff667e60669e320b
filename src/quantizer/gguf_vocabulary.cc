#include "quantizer/gguf_vocabulary.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "tokenizer/scanner.h"
#include "tokenizer/tokenizer.h"

namespace freshet::quantizer {
namespace {

using tokenizer::ScanRules;

enum TokenType : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

struct Vocabulary {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<std::string> merges;  // "a b"
};

// The regular expressions of a Split, or of ByteLevel's own; digits apart count as one.
struct Splitting {
  std::vector<std::string> patterns;
  bool single_digits = false;
  bool byte_level = false;
};

void read_step(const json::Value& step, Splitting& out) {
  const std::string type = step.get_string("type", "");
  if (type == "Sequence") {
    if (const json::Value* list = step.find("pretokenizers"); list != nullptr && list->is_array()) {
      for (const json::Value& s : list->as_array()) read_step(s, out);
    }
  } else if (type == "Split") {
    if (const json::Value* p = step.find("pattern"))
      out.patterns.push_back(p->get_string("Regex", ""));
  } else if (type == "Digits") {
    out.single_digits = step.get_bool("individual_digits", false);
  } else if (type == "ByteLevel") {
    out.byte_level = true;
    if (step.get_bool("use_regex", true))
      out.patterns.push_back(tokenizer::pattern_for_rules(ScanRules{}));
  }
}

// tokenizer.ggml.pre for what GGUF's readers know how to repeat.
Result<std::string> pre_name(const Splitting& s, bool ignore_merges) {
  const auto rules =
      s.patterns.size() == 1 ? tokenizer::rules_for_pattern(s.patterns.front()) : std::nullopt;
  if (!s.byte_level || !rules || rules->marks)
    return unsupported("GGUF has no name for the way this tokenizer splits words");
  if (rules->words == ScanRules::Words::kGpt2)
    return std::string(s.single_digits ? "smollm" : "gpt-2");
  if (rules->words == ScanRules::Words::kCl100k && !s.single_digits) {
    if (rules->max_digits == 1) return std::string("qwen2");
    if (rules->max_digits == 3) return std::string(ignore_merges ? "llama-bpe" : "smaug-bpe");
  }
  if (rules->words == ScanRules::Words::kO200k && rules->max_digits == 3)
    return std::string("gpt-4o");
  if (rules->words == ScanRules::Words::kO200k && rules->max_digits == 1)
    return std::string("tekken");
  return unsupported("GGUF has no name for the way this tokenizer splits words");
}

Result<Vocabulary> read_tokens(const json::Value& root, int vocab_size) {
  const json::Value* model = root.find("model");
  const json::Value* vocab = model != nullptr ? model->find("vocab") : nullptr;
  if (vocab == nullptr || !vocab->is_object() || model->get_string("type", "BPE") != "BPE")
    return unsupported("only BPE vocabularies can be written to GGUF");
  Vocabulary v;
  v.tokens.resize(static_cast<size_t>(vocab_size));
  v.types.assign(static_cast<size_t>(vocab_size), kUnused);
  const auto put = [&](const std::string& token, int64_t id, int32_t type) -> Status {
    if (id < 0 || id >= vocab_size)
      return invalid_argument("token '{}' has id {}; the model has {}", token, id, vocab_size);
    v.tokens[static_cast<size_t>(id)] = token;
    v.types[static_cast<size_t>(id)] = type;
    return {};
  };
  for (const auto& [token, id] : vocab->as_object()) {
    const bool byte = token.size() == 6 && token.starts_with("<0x") && token.ends_with(">") &&
                      model->get_bool("byte_fallback", false);
    FRESHET_RETURN_IF_ERROR(
        put(token, id.is_number() ? id.as_int64().value_or(-1) : -1, byte ? kByte : kNormal));
  }
  if (const json::Value* added = root.find("added_tokens"); added != nullptr && added->is_array()) {
    for (const json::Value& t : added->as_array())
      FRESHET_RETURN_IF_ERROR(put(t.get_string("content", ""), t.get_int("id", -1),
                                  t.get_bool("special", false) ? kControl : kUserDefined));
  }
  for (size_t i = 0; i < v.tokens.size(); ++i) {
    if (v.types[i] == kUnused) v.tokens[i] = fmt::format("[PAD{}]", i);
  }
  if (const json::Value* merges = model->find("merges"); merges != nullptr && merges->is_array()) {
    for (const json::Value& m : merges->as_array()) {
      if (m.is_string()) v.merges.push_back(m.as_string());
      if (m.is_array() && m.as_array().size() == 2 && m.as_array()[0].is_string() &&
          m.as_array()[1].is_string())
        v.merges.push_back(m.as_array()[0].as_string() + " " + m.as_array()[1].as_string());
    }
  }
  return v;
}

// SentencePiece's readers merge by score: the earlier a merge, the better its result.
std::vector<float> scores_of(const Vocabulary& v) {
  std::unordered_map<std::string, size_t> rank;
  for (size_t i = 0; i < v.merges.size(); ++i) {
    std::string whole = v.merges[i];
    whole.erase(whole.find(' '), 1);
    rank.emplace(std::move(whole), i);
  }
  std::vector<float> scores;
  for (size_t i = 0; i < v.tokens.size(); ++i) {
    const auto found = rank.find(v.tokens[i]);
    const size_t r = found != rank.end() ? found->second : v.merges.size() + i;
    scores.push_back(v.types[i] == kNormal ? -static_cast<float>(r) : 0.0f);
  }
  return scores;
}

void add_special_ids(const tokenizer::Tokenizer& t, loader::GgufWriter& out) {
  const auto add = [&](const char* key, std::optional<int32_t> id) {
    if (id) out.add_u32(key, static_cast<uint32_t>(*id));
  };
  add("tokenizer.ggml.bos_token_id", t.bos());
  add("tokenizer.ggml.eos_token_id", t.eos());
  add("tokenizer.ggml.unknown_token_id", t.unk());
  add("tokenizer.ggml.padding_token_id", t.pad());
  out.add_bool("tokenizer.ggml.add_bos_token", t.adds_bos());
  out.add_bool("tokenizer.ggml.add_eos_token", false);
  if (t.chat_template()) out.add_string("tokenizer.chat_template", *t.chat_template());
}

}  // namespace

Status add_vocabulary(const std::string& folder, int vocab_size, loader::GgufWriter& out) {
  const std::string path = folder + "/tokenizer.json";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    out.add_string("tokenizer.ggml.model", "none");
    return {};
  }
  FRESHET_ASSIGN_OR_RETURN(const json::Value root, json::parse_file(path));
  auto vocabulary = read_tokens(root, vocab_size);
  if (!vocabulary.ok()) return vocabulary.status().with_context(path);
  const json::Value& model = *root.find("model");
  if (model.get_bool("byte_fallback", false)) {
    const std::string unknown = model.get_string("unk_token", "<unk>");
    for (size_t i = 0; i < vocabulary->tokens.size(); ++i) {
      if (vocabulary->tokens[i] == unknown) vocabulary->types[i] = kUnknown;
    }
    out.add_string("tokenizer.ggml.model", "llama");
    out.add_f32s("tokenizer.ggml.scores", scores_of(*vocabulary));
  } else {
    Splitting splitting;
    if (const json::Value* pre = root.find("pre_tokenizer")) read_step(*pre, splitting);
    const auto name = pre_name(splitting, model.get_bool("ignore_merges", false));
    if (!name.ok()) return name.status().with_context(path);
    out.add_string("tokenizer.ggml.model", "gpt2");
    out.add_string("tokenizer.ggml.pre", *name);
    out.add_strings("tokenizer.ggml.merges", vocabulary->merges);
  }
  out.add_strings("tokenizer.ggml.tokens", vocabulary->tokens);
  out.add_i32s("tokenizer.ggml.token_type", vocabulary->types);
  FRESHET_ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::load(folder));
  add_special_ids(tokenizer, out);
  return {};
}

}  // namespace freshet::quantizer
