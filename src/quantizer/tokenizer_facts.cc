#include "quantizer/tokenizer_facts.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>

#include "tokenizer/gguf_vocab.h"
#include "tokenizer/scanner.h"
#include "tokenizer/unicode.h"

namespace freshet::quantizer {
namespace {

constexpr std::string_view kMark = "\xE2\x96\x81";  // SentencePiece's space

using Steps = std::vector<const json::Value*>;

// The steps of a possibly nested Sequence, in order.
void flatten(const json::Value* value, const char* list, Steps& out) {
  if (value == nullptr || !value->is_object()) return;
  if (value->get_string("type", "") != "Sequence") {
    out.push_back(value);
    return;
  }
  const json::Value* inner = value->find(list);
  if (inner == nullptr || !inner->is_array()) return;
  for (const json::Value& step : inner->as_array()) flatten(&step, list, out);
}

Steps steps_of(const json::Value& root, const char* key, const char* list) {
  Steps steps;
  flatten(root.find(key), list, steps);
  return steps;
}

std::string type_of(const json::Value& step) {
  return step.get_string("type", "");
}

// The pattern of a Split or Replace, if it is of that kind.
std::optional<std::string> pattern_of(const json::Value& step, const char* kind) {
  const json::Value* pattern = step.find("pattern");
  const json::Value* text = pattern == nullptr ? nullptr : pattern->find(kind);
  if (text == nullptr || !text->is_string()) return std::nullopt;
  return text->as_string();
}

// A canonical spelling of equivalent expressions.
std::string canonical(const std::string& pattern) {
  const auto rules = tokenizer::rules_for_pattern(pattern);
  return rules ? tokenizer::pattern_for_rules(*rules) : pattern;
}

// How a byte-level tokenizer splits words.
struct Splitting {
  std::vector<std::string> patterns;
  bool prefix_space = false;
};

Status foreign(const std::string& what) {
  return unsupported("GGUF has no name for the way this tokenizer splits words: pre_tokenizer {}",
                     what);
}

Result<Splitting> read_splitting(const Steps& steps) {
  Splitting s;
  bool byte_level = false;
  for (const json::Value* step : steps) {
    const std::string type = type_of(*step);
    if (byte_level) return foreign(type + " after ByteLevel");
    if (type == "Split") {
      const auto pattern = pattern_of(*step, "Regex");
      const std::string behavior = step->get_string("behavior", "");
      const bool invert = step->get_bool("invert", false);
      // If an expression covers the whole text, there is nothing between its matches.
      const bool covers = pattern && tokenizer::rules_for_pattern(*pattern).has_value();
      const bool isolated = behavior == "Isolated" && !invert;
      if (!pattern || !(isolated || (covers && behavior == "Removed" && invert)))
        return foreign(fmt::format("Split ({})", pattern ? behavior : "by a string"));
      s.patterns.push_back(canonical(*pattern));
    } else if (type == "Digits") {
      if (!step->get_bool("individual_digits", false)) return foreign("Digits");
      s.patterns.emplace_back("\\p{N}");
    } else if (type == "ByteLevel") {
      byte_level = true;
      s.prefix_space = step->get_bool("add_prefix_space", true);
      if (step->get_bool("use_regex", true)) s.patterns.push_back(tokenizer::pattern_for_rules({}));
    } else {
      return foreign(type);
    }
  }
  if (!byte_level) return foreign("without ByteLevel");
  return s;
}

// The tokenizer.ggml.pre name that makes GGUF readers split in the same way: among the names with
// these expressions, preferably one that also treats whole words the same.
Result<std::string> pre_name(const Splitting& s, bool ignore_merges, bool& same_words) {
  std::string found;
  for (const char* name : {"gpt-2",
                           "smollm",
                           "qwen2",
                           "llama-bpe",
                           "smaug-bpe",
                           "gpt-4o",
                           "granite-embed-multi-97m",
                           "tekken",
                           "qwen35",
                           "ufakzeka",
                           "deepseek-v3",
                           "deepseek-llm",
                           "deepseek-coder",
                           "falcon",
                           "bloom",
                           "viking",
                           "kimi-k2",
                           "seed-coder",
                           "bailingmoe",
                           "exaone-moe",
                           "tiny_aya",
                           "minicpm5",
                           "youtu"}) {
    const auto pre = tokenizer::find_gguf_pre(name);
    std::vector<std::string> patterns;
    for (const std::string& pattern : pre->patterns) patterns.push_back(canonical(pattern));
    if (patterns != s.patterns) continue;
    if (found.empty()) found = name;
    same_words = pre->ignore_merges == ignore_merges;
    if (same_words) return std::string(name);
  }
  if (!found.empty()) return found;
  std::string shown;
  for (const std::string& p : s.patterns) shown += (shown.empty() ? "" : ", ") + p;
  return foreign(shown.size() > 200 ? shown.substr(0, 200) + "..." : shown);
}

void add_added_token_rules(const json::Value& root, bool normalizes,
                           std::vector<std::string>& unsaid) {
  const json::Value* added = root.find("added_tokens");
  if (added == nullptr || !added->is_array()) return;
  bool raw = false, normalized = false;
  for (const char* rule : {"lstrip", "rstrip", "single_word"}) {
    for (const json::Value& token : added->as_array()) {
      if (!token.get_bool(rule, false)) continue;
      unsaid.push_back(
          fmt::format("{} of the added token {}", rule, token.get_string("content", "")));
      break;  // one warning per rule is enough
    }
  }
  for (const json::Value& token : added->as_array()) {
    const bool later = token.get_bool("normalized", !token.get_bool("special", false));
    (later ? normalized : raw) = true;
  }
  if (normalized && (raw || normalizes)) unsaid.emplace_back("added tokens that are normalized");
}

void add_steps(const Steps& steps, const char* what, std::vector<std::string>& unsaid) {
  for (const json::Value* step : steps)
    unsaid.push_back(fmt::format("{} {}", what, type_of(*step)));
}

void add_model_rules(const json::Value& model, std::vector<std::string>& unsaid) {
  for (const char* rule : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!model.get_string(rule, "").empty()) unsaid.push_back(fmt::format("model.{}", rule));
  }
}

// Both sides of a merge, "a b" or ["a", "b"].
std::pair<std::string, std::string> sides_of(const json::Value& merge) {
  if (merge.is_array() && merge.as_array().size() == 2 && merge.as_array()[0].is_string() &&
      merge.as_array()[1].is_string())
    return {merge.as_array()[0].as_string(), merge.as_array()[1].as_string()};
  const std::string text = merge.is_string() ? merge.as_string() : "";
  const size_t space = std::min(text.find(' '), text.size());
  return {text.substr(0, space), text.substr(std::min(space + 1, text.size()))};
}

// GGUF writes merges as "a b" (the first of two equal ones counts) and assumes that every byte has
// a token.
void add_byte_rules(const json::Value& model, std::vector<std::string>& unsaid) {
  bool spaces = false, twice = false;
  std::unordered_set<std::string> seen;
  if (const json::Value* merges = model.find("merges"); merges != nullptr && merges->is_array()) {
    for (const json::Value& merge : merges->as_array()) {
      const auto [left, right] = sides_of(merge);
      spaces |= left.find(' ') != left.npos || right.find(' ') != right.npos;
      twice |= !seen.insert(left + " " + right).second;
    }
  }
  if (spaces) unsaid.emplace_back("merges of tokens with spaces");
  if (twice) unsaid.emplace_back("merges that are listed twice");
  const json::Value& vocab = *model.find("vocab");
  for (int b = 0; b < 256; ++b) {
    if (vocab.find(tokenizer::byte_to_printable(static_cast<uint8_t>(b))) != nullptr) continue;
    unsaid.emplace_back("bytes without a token");
    break;
  }
}

Status read_byte_level(const json::Value& root, const json::Value& model, TokenizerFacts& facts) {
  FRESHET_ASSIGN_OR_RETURN(const Splitting splitting,
                           read_splitting(steps_of(root, "pre_tokenizer", "pretokenizers")));
  bool same_words = true;
  FRESHET_ASSIGN_OR_RETURN(facts.pre,
                           pre_name(splitting, model.get_bool("ignore_merges", false), same_words));
  const Steps normalizers = steps_of(root, "normalizer", "normalizers");
  add_steps(normalizers, "normalizer", facts.unsaid);
  if (splitting.prefix_space) facts.unsaid.emplace_back("add_prefix_space");
  if (!same_words) facts.unsaid.emplace_back("model.ignore_merges");
  add_byte_rules(model, facts.unsaid);
  add_added_token_rules(root, !normalizers.empty(), facts.unsaid);
  const Steps decoders = steps_of(root, "decoder", "decoders");
  if (decoders.size() != 1 || type_of(*decoders[0]) != "ByteLevel") {
    if (decoders.empty()) facts.unsaid.emplace_back("a missing decoder");
    add_steps(decoders, "decoder", facts.unsaid);
  }
  return {};
}

// Readers of "llama" vocabularies merge any two neighbours that form a token, the best token first.
// Checks whether the list of merges is equivalent to that.
bool merges_by_token(const json::Value& model) {
  const json::Value* vocab = model.find("vocab");
  const json::Value* merges = model.find("merges");
  if (vocab == nullptr || !vocab->is_object() || merges == nullptr || !merges->is_array())
    return false;
  std::unordered_set<std::string> listed;
  std::unordered_map<std::string, size_t> rank;
  size_t last = 0;
  for (const json::Value& merge : merges->as_array()) {
    const auto [left, right] = sides_of(merge);
    const size_t r = rank.emplace(left + right, rank.size()).first->second;
    if (r < last) return false;  // merges into different tokens are interleaved
    last = r;
    listed.insert(left + " " + right);
  }
  for (const auto& [token, id] : vocab->as_object()) {
    for (size_t i = 1; i < token.size(); ++i) {
      if (vocab->find(token.substr(0, i)) == nullptr || vocab->find(token.substr(i)) == nullptr)
        continue;
      if (!listed.contains(token.substr(0, i) + " " + token.substr(i))) return false;
    }
  }
  return true;
}

bool marks_spaces(const json::Value& step) {
  return type_of(step) == "Replace" && pattern_of(step, "String") == " " &&
         step.get_string("content", "") == kMark;
}

Status read_sentencepiece(const json::Value& root, const json::Value& model,
                          TokenizerFacts& facts) {
  const Steps normalizers = steps_of(root, "normalizer", "normalizers");
  bool marked = false;
  for (const json::Value* step : normalizers) {
    const bool first = step == normalizers.front();
    if (first && type_of(*step) == "Prepend" && step->get_string("prepend", "") == kMark) {
      facts.space_prefix = true;
    } else if (marks_spaces(*step) && !marked) {
      marked = true;
    } else {
      facts.unsaid.push_back("normalizer " + type_of(*step));
    }
  }
  for (const json::Value* step : steps_of(root, "pre_tokenizer", "pretokenizers")) {
    const std::string type = type_of(*step);
    const std::string scheme = step->get_string("prepend_scheme", "always");
    if (type == "Metaspace" && !marked && step->get_string("replacement", kMark) == kMark) {
      marked = true;
      facts.space_prefix = step->get_bool("add_prefix_space", true) && scheme != "never";
      if (facts.space_prefix && scheme == "first")
        facts.unsaid.emplace_back("prepend_scheme first");
      if (step->get_bool("split", true))
        facts.unsaid.emplace_back("pre_tokenizer Metaspace's split");
    } else if (!(type == "Split" && marked && pattern_of(*step, "String") == " ")) {
      facts.unsaid.push_back("pre_tokenizer " + type);
    }
  }
  if (!marked) facts.unsaid.emplace_back("spaces that are not marked");
  add_added_token_rules(root, false, facts.unsaid);
  if (model.get_bool("ignore_merges", false)) facts.unsaid.emplace_back("model.ignore_merges");
  if (!merges_by_token(model)) facts.unsaid.emplace_back("the order of the merges");
  std::string decoders;
  for (const json::Value* step : steps_of(root, "decoder", "decoders"))
    decoders += (decoders.empty() ? "" : " ") + type_of(*step);
  const char* usual =
      facts.space_prefix ? "Replace ByteFallback Fuse Strip" : "Replace ByteFallback Fuse";
  const bool metaspace = decoders == "Metaspace" && facts.space_prefix;
  if (decoders != usual && !metaspace) facts.unsaid.push_back("decoder " + decoders);
  return {};
}

}  // namespace

Result<TokenizerFacts> read_tokenizer_facts(const json::Value& root) {
  const json::Value* model = root.find("model");
  const json::Value* vocab = model != nullptr ? model->find("vocab") : nullptr;
  if (vocab == nullptr || !vocab->is_object() || model->get_string("type", "BPE") != "BPE") {
    return unsupported("only BPE vocabularies can be written to GGUF, this one is {}",
                       model == nullptr ? "none" : model->get_string("type", "none"));
  }
  TokenizerFacts facts;
  const Steps pre = steps_of(root, "pre_tokenizer", "pretokenizers");
  const bool byte_level = std::any_of(pre.begin(), pre.end(), [](const json::Value* step) {
    return type_of(*step) == "ByteLevel";
  });
  facts.sentencepiece = model->get_bool("byte_fallback", false) && !byte_level;
  if (facts.sentencepiece) {
    FRESHET_RETURN_IF_ERROR(read_sentencepiece(root, *model, facts));
  } else {
    FRESHET_RETURN_IF_ERROR(read_byte_level(root, *model, facts));
  }
  add_model_rules(*model, facts.unsaid);
  return facts;
}

}  // namespace freshet::quantizer
