// Normalisers, pre-tokenizers, decoders and post-processors of tokenizer.json.
#include <algorithm>
#include <array>
#include <span>

#include "tokenizer/base64.h"
#include "tokenizer/hf_json.h"

namespace freshet::tokenizer {
namespace {

constexpr size_t kMaxSteps = 64;

std::string_view type_of(const json::Value& value) {
  const json::Value* type = value.find("type");
  return type != nullptr && type->is_string() ? std::string_view(type->as_string())
                                              : std::string_view();
}

// {"String": "x"} or {"Regex": "x"}, or a bare string.
struct Pattern {
  std::string text;
  bool regex = false;
};
Result<Pattern> parse_pattern(const json::Value& step) {
  const json::Value* pattern = step.find("pattern");
  if (pattern != nullptr && pattern->is_string()) return Pattern{pattern->as_string(), false};
  for (const bool regex : {false, true}) {
    const json::Value* text =
        pattern == nullptr ? nullptr : pattern->find(regex ? "Regex" : "String");
    if (text != nullptr && text->is_string()) return Pattern{text->as_string(), regex};
  }
  return invalid_argument("{}: \"pattern\" must hold a \"String\" or a \"Regex\"", type_of(step));
}

// Calls f with each step of a possibly nested Sequence.
template <class F>
Status for_each_step(const json::Value& value, std::string_view list, F&& f) {
  std::vector<const json::Value*> open{&value};
  size_t count = 0;
  while (!open.empty()) {
    const json::Value& step = *open.back();
    open.pop_back();
    if (step.is_null()) continue;
    if (!step.is_object()) return invalid_argument("\"{}\": expected an object", list);
    if (++count > kMaxSteps) {
      return invalid_argument("\"{}\" has more than {} steps", list, kMaxSteps);
    }
    if (type_of(step) != "Sequence") {
      FRESHET_RETURN_IF_ERROR(f(step));
      continue;
    }
    const json::Value* inner = step.find(list);
    if (inner == nullptr || !inner->is_array()) {
      return invalid_argument("a Sequence without its list \"{}\"", list);
    }
    const json::Array& steps = inner->as_array();
    for (size_t i = steps.size(); i-- > 0;) open.push_back(&steps[i]);
  }
  return {};
}

Status parse_replace(const json::Value& value, std::string& text, std::string& content,
                     std::shared_ptr<const Regex>& regex) {
  FRESHET_ASSIGN_OR_RETURN(Pattern pattern, parse_pattern(value));
  content = value.get_string("content", "");
  if (pattern.regex) {
    FRESHET_ASSIGN_OR_RETURN(regex, Regex::compile(pattern.text, RegexDialect::kOniguruma));
  } else {
    text = std::move(pattern.text);
  }
  return {};
}

Status add_normalizer(const json::Value& value, TokenizerParts& parts) {
  using Kind = NormalizerStep::Kind;
  const std::string_view type = type_of(value);
  NormalizerStep step{.kind = Kind::kForm};
  constexpr std::array<std::pair<std::string_view, NormalForm>, 4> kForms = {
      {{"NFC", NormalForm::kNfc},
       {"NFD", NormalForm::kNfd},
       {"NFKC", NormalForm::kNfkc},
       {"NFKD", NormalForm::kNfkd}}};
  for (const auto& [name, form] : kForms) {
    if (type != name) continue;
    step.form = form;
    parts.normalizer.add(step);
    return {};
  }
  if (type == "Lowercase") {
    step.kind = Kind::kLowercase;
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    step.left = value.get_bool("strip_left", true);
    step.right = value.get_bool("strip_right", true);
  } else if (type == "StripAccents") {
    step.kind = Kind::kStripAccents;
  } else if (type == "Nmt") {
    step.kind = Kind::kNmt;
  } else if (type == "ByteLevel") {
    step.kind = Kind::kByteLevel;
  } else if (type == "Prepend") {
    step.kind = Kind::kPrepend;
    step.content = value.get_string("prepend", "");
  } else if (type == "Replace") {
    step.kind = Kind::kReplace;
    FRESHET_RETURN_IF_ERROR(parse_replace(value, step.text, step.content, step.regex));
  } else if (type == "BertNormalizer") {
    step.kind = Kind::kBert;
    step.clean = value.get_bool("clean_text", true);
    step.cjk = value.get_bool("handle_chinese_chars", true);
    step.lowercase = value.get_bool("lowercase", true);
    step.strip_accents = value.get_bool("strip_accents", step.lowercase);
  } else if (type == "Precompiled") {
    const auto bytes = decode_base64(value.get_string("precompiled_charsmap", ""));
    if (!bytes) return invalid_argument("Precompiled: \"precompiled_charsmap\" is not Base64");
    if (bytes->empty()) return {};
    FRESHET_ASSIGN_OR_RETURN(auto charsmap, Charsmap::parse(*bytes));
    step.kind = Kind::kPrecompiled;
    step.charsmap = std::make_shared<const Charsmap>(std::move(charsmap));
  } else {
    return unsupported("normalizer \"{}\" is not known", type);
  }
  parts.normalizer.add(std::move(step));
  return {};
}

Result<SplitBehavior> parse_behavior(const json::Value& value, std::string_view fallback) {
  const std::string name = value.get_string("behavior", fallback);
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  return invalid_argument("{}: behavior \"{}\" is not known", type_of(value), name);
}

PrependScheme parse_scheme(const json::Value& value) {
  const std::string name = value.get_string("prepend_scheme", "always");
  if (!value.get_bool("add_prefix_space", true) || name == "never") return PrependScheme::kNever;
  return name == "first" ? PrependScheme::kFirst : PrependScheme::kAlways;
}

Status add_split(const json::Value& value, PreTokenizer& out) {
  FRESHET_ASSIGN_OR_RETURN(Pattern pattern, parse_pattern(value));
  FRESHET_ASSIGN_OR_RETURN(const SplitBehavior behavior, parse_behavior(value, ""));
  const bool invert = value.get_bool("invert", false);
  if (pattern.regex) {
    FRESHET_ASSIGN_OR_RETURN(auto step,
                             make_split(pattern.text, RegexDialect::kOniguruma, behavior, invert));
    out.add(std::move(step));
  } else {
    out.add({.kind = PreTokenizerStep::Kind::kLiteral,
             .behavior = behavior,
             .invert = invert,
             .text = std::move(pattern.text)});
  }
  return {};
}

Status add_byte_level(const json::Value& value, PreTokenizer& out) {
  using Kind = PreTokenizerStep::Kind;
  if (value.get_bool("add_prefix_space", true)) out.add({.kind = Kind::kPrefixSpace});
  if (value.get_bool("use_regex", true)) out.add({.kind = Kind::kScan});
  out.add({.kind = Kind::kByteLevel});
  return {};
}

Status add_pre_tokenizer(const json::Value& value, PreTokenizer& out) {
  using Kind = PreTokenizerStep::Kind;
  const std::string_view type = type_of(value);
  const PreTokenizerStep spaces{
      .kind = Kind::kClass, .behavior = SplitBehavior::kRemoved, .bits = kSpace};
  PreTokenizerStep punctuation{
      .kind = Kind::kClass, .bits = kPunctuation, .ascii_punctuation = true};
  if (type == "ByteLevel") return add_byte_level(value, out);
  if (type == "Split") return add_split(value, out);
  if (type == "Metaspace") {
    const std::string mark = value.get_string("replacement", "\xE2\x96\x81");
    if (mark.empty()) return invalid_argument("Metaspace: \"replacement\" is empty");
    out.add({.kind = Kind::kMetaspace,
             .text = mark,
             .scheme = parse_scheme(value),
             .split = value.get_bool("split", true)});
  } else if (type == "Whitespace") {
    out.add({.kind = Kind::kWhitespace});
  } else if (type == "WhitespaceSplit") {
    out.add(spaces);
  } else if (type == "Digits") {
    const bool single = value.get_bool("individual_digits", false);
    out.add({.kind = Kind::kClass,
             .behavior = single ? SplitBehavior::kIsolated : SplitBehavior::kContiguous,
             .bits = kNumber});
  } else if (type == "Punctuation") {
    FRESHET_ASSIGN_OR_RETURN(punctuation.behavior, parse_behavior(value, "Isolated"));
    out.add(punctuation);
  } else if (type == "BertPreTokenizer") {
    out.add(spaces);
    out.add(punctuation);
  } else if (type == "CharDelimiterSplit") {
    out.add({.kind = Kind::kLiteral,
             .behavior = SplitBehavior::kRemoved,
             .text = value.get_string("delimiter", "")});
  } else if (type == "FixedLength") {
    const int64_t length = value.get_int("length", 5);
    if (length < 1) return invalid_argument("FixedLength: \"length\" is {}", length);
    out.add({.kind = Kind::kFixedLength, .length = static_cast<size_t>(length)});
  } else if (type == "UnicodeScripts") {
    FRESHET_ASSIGN_OR_RETURN(auto step, make_script_split());
    out.add(std::move(step));
  } else {
    return unsupported("pre_tokenizer \"{}\" is not known", type);
  }
  return {};
}

Status add_decoder(const json::Value& value, DecoderPlan& out) {
  using Kind = DecoderStep::Kind;
  const std::string_view type = type_of(value);
  DecoderStep step{.kind = Kind::kFuse};
  if (type == "ByteLevel") {
    step.kind = Kind::kByteLevel;
  } else if (type == "Metaspace") {
    step.kind = Kind::kMetaspace;
    step.text = value.get_string("replacement", "\xE2\x96\x81");
    step.flag = parse_scheme(value) != PrependScheme::kNever;
  } else if (type == "WordPiece") {
    step.kind = Kind::kWordPiece;
    step.text = value.get_string("prefix", "##");
    step.flag = value.get_bool("cleanup", true);
  } else if (type == "BPEDecoder") {
    step.kind = Kind::kBpe;
    step.text = value.get_string("suffix", "</w>");
  } else if (type == "ByteFallback") {
    step.kind = Kind::kByteFallback;
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    step.text = value.get_string("content", " ");
    step.left = static_cast<size_t>(std::max<int64_t>(0, value.get_int("start", 0)));
    step.right = static_cast<size_t>(std::max<int64_t>(0, value.get_int("stop", 0)));
  } else if (type == "Replace") {
    step.kind = Kind::kReplace;
    FRESHET_RETURN_IF_ERROR(parse_replace(value, step.text, step.content, step.regex));
  } else if (type == "CTC") {
    step.kind = Kind::kCtc;
    step.text = value.get_string("pad_token", "<pad>");
    step.content = value.get_string("word_delimiter_token", "|");
    step.flag = value.get_bool("cleanup", true);
  } else if (type != "Fuse") {
    return unsupported("decoder \"{}\" is not known", type);
  }
  out.add(std::move(step));
  return {};
}

Result<int32_t> parse_id(const json::Value* value, std::string_view where) {
  const auto id = value != nullptr && value->is_number() ? value->as_int64() : std::nullopt;
  if (!id || *id < 0 || *id > INT32_MAX) {
    return invalid_argument("{}: a token id is missing or out of range", where);
  }
  return static_cast<int32_t>(*id);
}

}  // namespace

std::vector<PairPiece> joined_pair(std::span<const int32_t> prefix, std::span<const int32_t> suffix,
                                   bool segments) {
  std::vector<PairPiece> out;
  const auto add = [&](std::span<const int32_t> ids, int32_t type) {
    for (const int32_t id : ids) out.push_back({id, type});
  };
  add(prefix, 0);
  out.push_back({PairPiece::kFirstText, 0});
  add(suffix, 0);
  if (!segments) add(suffix, 0);
  out.push_back({PairPiece::kSecondText, segments ? 1 : 0});
  add(suffix, segments ? 1 : 0);
  return out;
}

namespace {

// Ids that a template adds before or after the text.
Status add_template(const json::Value& value, std::vector<int32_t>& before,
                    std::vector<int32_t>& after) {
  const json::Value* pieces = value.find("single");
  const json::Value* specials = value.find("special_tokens");
  if (pieces == nullptr || !pieces->is_array()) {
    return invalid_argument("TemplateProcessing: the list \"single\" is missing");
  }
  std::vector<int32_t>* target = &before;
  for (const json::Value& piece : pieces->as_array()) {
    if (piece.find("Sequence") != nullptr) target = &after;
    const json::Value* special = piece.find("SpecialToken");
    if (special == nullptr) continue;
    const std::string name = special->get_string("id", "");
    const json::Value* entry = specials == nullptr ? nullptr : specials->find(name);
    const json::Value* ids = entry == nullptr ? nullptr : entry->find("ids");
    if (ids == nullptr || !ids->is_array()) {
      return invalid_argument("TemplateProcessing: \"{}\" has no ids in \"special_tokens\"", name);
    }
    for (const json::Value& id : ids->as_array()) {
      FRESHET_ASSIGN_OR_RETURN(const int32_t number, parse_id(&id, "TemplateProcessing"));
      target->push_back(number);
    }
  }
  return {};
}

int32_t type_id_of(const json::Value& piece) {
  const json::Value* id = piece.find("type_id");
  const auto number = id != nullptr && id->is_number() ? id->as_int64() : std::nullopt;
  return number ? static_cast<int32_t>(std::clamp<int64_t>(*number, 0, 255)) : 0;
}

// A template for two texts; one without "pair" joins them without tokens.
Status add_pair_template(const json::Value& value, std::vector<PairPiece>& out) {
  const json::Value* pieces = value.find("pair");
  const json::Value* specials = value.find("special_tokens");
  if (pieces == nullptr || !pieces->is_array()) return {};
  out.clear();
  for (const json::Value& piece : pieces->as_array()) {
    if (const json::Value* text = piece.find("Sequence")) {
      const bool second = text->get_string("id", "A") == "B";
      out.push_back({second ? PairPiece::kSecondText : PairPiece::kFirstText, type_id_of(*text)});
      continue;
    }
    const json::Value* special = piece.find("SpecialToken");
    if (special == nullptr) continue;
    const json::Value* entry =
        specials == nullptr ? nullptr : specials->find(special->get_string("id", ""));
    const json::Value* ids = entry == nullptr ? nullptr : entry->find("ids");
    if (ids == nullptr || !ids->is_array())
      return invalid_argument("TemplateProcessing: a token of \"pair\" has no ids");
    for (const json::Value& id : ids->as_array()) {
      FRESHET_ASSIGN_OR_RETURN(const int32_t number, parse_id(&id, "TemplateProcessing"));
      out.push_back({number, type_id_of(*special)});
    }
  }
  if (out.size() > 4096) return invalid_argument("post_processor adds more than 4096 tokens");
  return {};
}

Status add_post_processor(const json::Value& value, TokenizerParts& parts) {
  const std::string_view type = type_of(value);
  std::vector<int32_t> before, after;
  if (type == "TemplateProcessing") {
    FRESHET_RETURN_IF_ERROR(add_template(value, before, after));
    FRESHET_RETURN_IF_ERROR(add_pair_template(value, parts.pair));
  } else if (type == "BertProcessing" || type == "RobertaProcessing") {
    for (const std::string_view key : {"cls", "sep"}) {
      const json::Value* pair = value.find(key);
      const bool ok = pair != nullptr && pair->is_array() && pair->as_array().size() == 2;
      FRESHET_ASSIGN_OR_RETURN(const int32_t id,
                               parse_id(ok ? &pair->as_array()[1] : nullptr, type));
      (key == "cls" ? before : after).push_back(id);
    }
    parts.pair = joined_pair(before, after, type == "BertProcessing");
  } else if (type != "ByteLevel") {
    return unsupported("post_processor \"{}\" is not known", type);
  }
  parts.prefix.insert(parts.prefix.begin(), before.begin(), before.end());
  parts.suffix.insert(parts.suffix.end(), after.begin(), after.end());
  if (parts.prefix.size() + parts.suffix.size() > 4096) {
    return invalid_argument("post_processor adds more than 4096 tokens");
  }
  return {};
}

}  // namespace

Status parse_hf_normalizer(const json::Value& value, TokenizerParts& parts) {
  return for_each_step(value, "normalizers",
                       [&](const json::Value& step) { return add_normalizer(step, parts); });
}

Status parse_hf_pre_tokenizer(const json::Value& value, TokenizerParts& parts) {
  return for_each_step(value, "pretokenizers", [&](const json::Value& step) {
    return add_pre_tokenizer(step, parts.pre_tokenizer);
  });
}

Status parse_hf_decoder(const json::Value& value, TokenizerParts& parts) {
  if (value.is_null()) parts.decoder.add({.kind = DecoderStep::Kind::kJoin});
  return for_each_step(value, "decoders",
                       [&](const json::Value& step) { return add_decoder(step, parts.decoder); });
}

Status parse_hf_post_processor(const json::Value& value, TokenizerParts& parts) {
  return for_each_step(value, "processors",
                       [&](const json::Value& step) { return add_post_processor(step, parts); });
}

}  // namespace freshet::tokenizer
