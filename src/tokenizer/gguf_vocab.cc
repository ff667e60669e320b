#include "tokenizer/gguf_vocab.h"

#include <cmath>

#include "tokenizer/bpe.h"
#include "tokenizer/sentencepiece.h"
#include "tokenizer/tokenizer_parts.h"
#include "tokenizer/unicode.h"
#include "tokenizer/wordpiece.h"

namespace freshet::tokenizer {
namespace {

using Type = SentencePiece::Type;

Type type_of(const GgufVocab& vocab, size_t id) {
  if (id >= vocab.types.size()) return Type::kNormal;
  const int32_t type = vocab.types[id];
  return type >= 1 && type <= 6 ? static_cast<Type>(type) : Type::kNormal;
}

void fill_vocab(const GgufVocab& vocab, TokenizerParts& parts) {
  parts.vocab.reserve(vocab.tokens.size());
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    const Type type = type_of(vocab, i);
    if (type != Type::kUnused || vocab.tokens[i] != filler_token(i))
      parts.vocab.set(static_cast<int32_t>(i), vocab.tokens[i]);
    parts.special.push_back(type == Type::kControl || type == Type::kUnknown);
  }
}

// The bytes of the tokens: names for special tokens, else bytes with the spaces restored.
void fill_bytes(const GgufVocab& vocab, bool printable, TokenizerParts& parts) {
  std::string bytes;
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    const std::string_view text = parts.vocab.text(static_cast<int32_t>(i));
    const Type type = type_of(vocab, i);
    const int byte = type == Type::kByte || !printable ? byte_of_token(text) : -1;
    if (parts.special[i] || type == Type::kUserDefined) {
      bytes = text;
    } else if (byte >= 0) {
      bytes.assign(1, static_cast<char>(byte));
    } else if (!printable) {
      bytes = spaces_for_marks(text);
    } else if (!printable_to_bytes(text, bytes)) {
      bytes = text;
    }
    parts.bytes.push_back(parts.vocab.arena().add(bytes));
  }
}

PairRanks read_merges(const GgufVocab& vocab, const TokenizerParts& parts) {
  PairRanks pairs;
  pairs.reserve(vocab.merges.size());
  std::string joined;
  for (size_t i = 0; i < vocab.merges.size(); ++i) {
    const std::string_view text = vocab.merges[i];
    const size_t space = text.find(' ', 1);
    if (space == text.npos) continue;
    joined = text.substr(0, space);
    joined += text.substr(space + 1);
    const int32_t left = parts.vocab.find(text.substr(0, space));
    const int32_t right = parts.vocab.find(text.substr(space + 1));
    const int32_t both = parts.vocab.find(joined);
    // Converters keep merges whose tokens were pruned; these can never apply.
    if (left < 0 || right < 0 || both < 0) continue;
    pairs.add(left, right, {static_cast<int32_t>(i), both});
  }
  return pairs;
}

Status build_bpe(const GgufVocab& vocab, const GgufPre& pre, TokenizerParts& parts) {
  if (vocab.merges.empty()) return invalid_argument("tokenizer.ggml.merges is missing");
  fill_vocab(vocab, parts);
  for (const std::string& pattern : pre.patterns) {
    FRESHET_ASSIGN_OR_RETURN(auto step, make_split(pattern, RegexDialect::kOniguruma));
    parts.pre_tokenizer.add(std::move(step));
  }
  BpeOptions options;
  options.bytes = !pre.marked_spaces;
  options.whole_words = pre.ignore_merges;
  options.whole_newlines = pre.whole_newlines;
  options.byte_fallback = pre.marked_spaces;
  parts.byte_keys.reserve(parts.vocab.count());
  std::string bytes;
  for (int32_t id = 0; id < parts.vocab.size(); ++id) {
    const std::string_view text = parts.vocab.text(id);
    if (pre.marked_spaces) {
      parts.byte_keys.insert(text, id);
    } else if (printable_to_bytes(text, bytes) && !bytes.empty()) {
      parts.byte_keys.insert(parts.vocab.arena().add(bytes), id);
    }
  }
  auto bpe = std::make_unique<BpeModel>(options, parts.byte_keys, parts.vocab.size());
  bpe->set_pairs(read_merges(vocab, parts));
  parts.model = std::move(bpe);
  if (pre.marked_spaces) {
    parts.normalizer.add(
        {.kind = NormalizerStep::Kind::kReplace, .text = " ", .content = std::string(kSpaceMark)});
  }
  parts.decode_mode = DecodeMode::kBytes;
  return {};
}

Status build_spm(const GgufVocab& vocab, bool unigram, TokenizerParts& parts) {
  if (vocab.scores.size() != vocab.tokens.size()) {
    return invalid_argument("tokenizer.ggml.scores has {} values for {} tokens",
                            vocab.scores.size(), vocab.tokens.size());
  }
  SentencePieceModel model;
  model.unigram = unigram;
  model.by_scores_in_double = true;
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    // User-defined tokens are cut out of the text beforehand.
    Type type = type_of(vocab, i);
    if (type == Type::kUserDefined && !unigram) type = Type::kNormal;
    if (!std::isfinite(vocab.scores[i])) {
      return invalid_argument("tokenizer.ggml.scores: value {} is not finite", i);
    }
    model.byte_fallback |= type == Type::kByte;
    model.pieces.push_back({vocab.tokens[i], vocab.scores[i], type});
  }
  const bool space_prefix = vocab.add_space_prefix.value_or(!unigram);
  model.rules.add_dummy_prefix = unigram && space_prefix;
  model.rules.remove_extra_whitespaces = unigram && vocab.remove_extra_whitespaces.value_or(false);
  if (!vocab.charsmap.empty()) {
    FRESHET_ASSIGN_OR_RETURN(Charsmap charsmap, Charsmap::parse(vocab.charsmap));
    model.rules.charsmap = std::make_shared<const Charsmap>(std::move(charsmap));
  }
  if (space_prefix && !unigram) {
    parts.normalizer.add({.kind = NormalizerStep::Kind::kSpacePrefix, .content = " "});
  }
  FRESHET_RETURN_IF_ERROR(build_sentencepiece(std::move(model), parts));
  parts.hide_control = false;
  parts.strip_first_space = space_prefix;
  parts.strip_all_leading = false;
  return {};
}

Status build_bert(const GgufVocab& vocab, TokenizerParts& parts) {
  fill_vocab(vocab, parts);
  const bool lowercase = vocab.lowercase.value_or(true);
  parts.normalizer.add({.kind = NormalizerStep::Kind::kBert,
                        .strip_accents = vocab.strip_accents.value_or(lowercase),
                        .lowercase = lowercase});
  parts.pre_tokenizer.add({.kind = PreTokenizerStep::Kind::kClass,
                           .behavior = SplitBehavior::kRemoved,
                           .bits = kSpace});
  parts.pre_tokenizer.add(
      {.kind = PreTokenizerStep::Kind::kClass, .bits = kPunctuation, .ascii_punctuation = true});
  // Here the tokens that start words are marked, not the continuations.
  TokenMap starts, rest;
  for (int32_t id = 0; id < parts.vocab.size(); ++id) {
    const std::string_view text = parts.vocab.text(id);
    if (text.starts_with(kSpaceMark)) {
      starts.insert(text.substr(kSpaceMark.size()), id);
    } else if (!parts.special[static_cast<size_t>(id)]) {
      rest.insert(text, id);
    }
  }
  parts.model = std::make_unique<WordPieceModel>(std::move(starts), std::move(rest),
                                                 static_cast<int32_t>(vocab.unk.value_or(100)),
                                                 size_t{1} << 30);
  parts.decode_mode = DecodeMode::kBytes;
  parts.strip_first_space = true;
  return {};
}

// Control and user-defined tokens are found in the unmodified text.
void add_tokens(const GgufVocab& vocab, TokenizerParts& parts) {
  const bool phi3 =
      vocab.name.find("hi-3") != vocab.name.npos || vocab.name.find("hi3") != vocab.name.npos;
  std::vector<AddedToken> tokens;
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    const Type type = type_of(vocab, i);
    if (!parts.special[i] && type != Type::kUserDefined) continue;
    const std::string_view text = vocab.tokens[i];
    AddedToken token{.id = static_cast<int32_t>(i), .content = std::string(text)};
    token.special = parts.special[i];
    token.rstrip = phi3 && text != "<unk>" && text != "<s>" && text != "<|endoftext|>";
    tokens.push_back(std::move(token));
  }
  parts.raw_tokens = AddedTokens(std::move(tokens));
}

Status set_special_ids(const GgufVocab& vocab, bool add_bos, bool add_eos, TokenizerParts& parts) {
  const auto known = [&](std::optional<int64_t> id, int64_t fallback) -> std::optional<int32_t> {
    const int64_t value = id.value_or(fallback);
    if (value < 0 || value >= parts.vocab.size()) return std::nullopt;
    return static_cast<int32_t>(value);
  };
  const bool llama = vocab.model == "llama", bert = vocab.model == "bert";
  const bool t5 = vocab.model == "t5";
  parts.bos = known(vocab.bos, bert ? vocab.cls.value_or(101) : llama ? 1 : -1);
  parts.eos = known(vocab.eos, llama ? 2 : t5 ? 1 : -1);
  parts.unk = known(vocab.unk, llama ? 0 : bert ? 100 : t5 ? 2 : -1);
  parts.pad = known(vocab.pad, bert || t5 ? 0 : -1);
  const auto sep = known(vocab.sep, bert ? 102 : -1);
  if (add_bos && parts.bos) parts.prefix = {*parts.bos};
  if (bert && sep) parts.suffix = {*sep};
  if (!bert && add_eos && parts.eos) parts.suffix = {*parts.eos};
  if ((add_bos && !parts.bos) || (!bert && add_eos && !parts.eos)) {
    return invalid_argument("the vocabulary needs a {} token but does not name one",
                            parts.bos ? "final" : "first");
  }
  if (!parts.prefix.empty() && !parts.suffix.empty())
    parts.pair = joined_pair(parts.prefix, parts.suffix, !t5 && !llama);
  parts.sep = sep;
  parts.cls = known(vocab.cls, bert ? 101 : -1);
  parts.mask = known(vocab.mask, -1);
  if (vocab.ends) return {};
  for (const auto& id : {vocab.eot, vocab.eom}) {
    if (const auto end = known(id, -1)) parts.end_of_generation.push_back(*end);
  }
  add_named_ends(parts);
  for (const int32_t id : parts.end_of_generation) parts.special[static_cast<size_t>(id)] = true;
  return {};
}

Status read_ids(const std::optional<std::vector<int64_t>>& from, std::string_view key,
                const TokenizerParts& parts, std::vector<int32_t>& ids) {
  if (!from) return {};
  ids.clear();
  for (const int64_t id : *from) {
    if (id < 0 || id >= parts.vocab.size() || ids.size() >= 4096)
      return invalid_argument("freshet.tokenizer.{}: id {} is not in the vocabulary", key, id);
    ids.push_back(static_cast<int32_t>(id));
  }
  return {};
}

// freshet.tokenizer.*
Status apply_own_keys(const GgufVocab& vocab, TokenizerParts& parts) {
  FRESHET_RETURN_IF_ERROR(read_ids(vocab.prefix, "prefix", parts, parts.prefix));
  FRESHET_RETURN_IF_ERROR(read_ids(vocab.suffix, "suffix", parts, parts.suffix));
  FRESHET_RETURN_IF_ERROR(read_ids(vocab.ends, "ends", parts, parts.end_of_generation));
  if (!vocab.special_tokens) return {};
  auto map = json::parse(*vocab.special_tokens);
  if (!map.ok()) return map.status().with_context("freshet.tokenizer.special_tokens");
  if (!map->is_object())
    return invalid_argument("freshet.tokenizer.special_tokens is not a JSON object");
  parts.special_tokens = std::move(map->as_object());
  return {};
}

// Special tokens next to a tokenizer.huggingface.json.
void set_hugging_face_ids(const GgufVocab& vocab, TokenizerParts& parts) {
  for (const auto& [from, to] : {std::pair(vocab.bos, &parts.bos),
                                 {vocab.eos, &parts.eos},
                                 {vocab.unk, &parts.unk},
                                 {vocab.sep, &parts.sep},
                                 {vocab.pad, &parts.pad},
                                 {vocab.cls, &parts.cls},
                                 {vocab.mask, &parts.mask}}) {
    if (from && *from >= 0 && *from < parts.vocab.size()) *to = static_cast<int32_t>(*from);
  }
  if (vocab.ends) return;
  for (const auto& id : {vocab.eot, vocab.eom}) {
    if (id && *id >= 0 && *id < parts.vocab.size())
      parts.end_of_generation.push_back(static_cast<int32_t>(*id));
  }
  if (!parts.eos) guess_special_ids(parts);
  add_named_ends(parts);
}

Status build(const GgufVocab& vocab, TokenizerParts& parts) {
  if (vocab.tokens.empty()) return invalid_argument("tokenizer.ggml.tokens is empty");
  for (const auto* list : {&vocab.tokens, &vocab.merges}) {
    for (const std::string_view text : *list) {
      if (find_invalid_utf8(text) != text.npos) {
        return invalid_argument("a token or merge is not valid UTF-8");
      }
    }
  }
  bool add_bos = false, add_eos = false, printable = false;
  if (vocab.model == "llama") {
    add_bos = true;
    FRESHET_RETURN_IF_ERROR(build_spm(vocab, false, parts));
  } else if (vocab.model == "t5") {
    add_eos = true;
    FRESHET_RETURN_IF_ERROR(build_spm(vocab, true, parts));
  } else if (vocab.model == "bert") {
    add_bos = true;
    FRESHET_RETURN_IF_ERROR(build_bert(vocab, parts));
  } else if (vocab.model == "gpt2" || vocab.model == "gemma4") {
    const std::string_view name = vocab.model == "gemma4" ? "gemma4" : std::string_view(vocab.pre);
    const auto pre = find_gguf_pre(name);
    if (!pre) return unsupported("tokenizer.ggml.pre \"{}\" is not known", name);
    add_bos = pre->add_bos;
    printable = !pre->marked_spaces;
    FRESHET_RETURN_IF_ERROR(build_bpe(vocab, *pre, parts));
  } else {
    return unsupported("tokenizer.ggml.model \"{}\" is not known", vocab.model);
  }
  // Gemma 4 files turn off the BOS token, although the model was trained with it.
  const bool gemma = vocab.model == "gemma4" || vocab.pre == "gemma4";
  const bool first =
      vocab.model == "bert" || (gemma && vocab.bos) || vocab.add_bos.value_or(add_bos);
  FRESHET_RETURN_IF_ERROR(set_special_ids(vocab, first, vocab.add_eos.value_or(add_eos), parts));
  add_tokens(vocab, parts);
  if (parts.bytes.empty()) fill_bytes(vocab, printable, parts);
  return {};
}

void read_templates(const loader::GgufFile& file, GgufVocab& vocab) {
  if (const auto text = file.get_string("tokenizer.chat_template")) {
    vocab.chat_template = std::string(*text);
  }
  const auto* names = file.get_strings("tokenizer.chat_templates");
  if (names == nullptr) return;
  for (const std::string_view name : *names) {
    if (const auto text = file.get_string(fmt::format("tokenizer.chat_template.{}", name))) {
      vocab.named_templates.emplace_back(name, *text);
    }
  }
}

}  // namespace

Result<GgufVocab> read_gguf_vocab(const loader::GgufFile& file) {
  const auto key = [](std::string_view name) { return fmt::format("tokenizer.ggml.{}", name); };
  const auto integer = [&](std::string_view name) { return file.get_int(key(name)); };
  const auto flag = [&](std::string_view name) { return file.get_bool(key(name)); };
  GgufVocab vocab;
  const auto model = file.get_string(key("model"));
  const auto* tokens = file.get_strings(key("tokens"));
  if (!model || tokens == nullptr) {
    return not_found("the file has no vocabulary (tokenizer.ggml.model and .tokens)");
  }
  vocab.model = std::string(*model);
  vocab.name = std::string(file.get_string("general.name").value_or(""));
  vocab.pre = std::string(file.get_string(key("pre")).value_or(""));
  vocab.tokens = *tokens;
  if (auto scores = file.get_floats(key("scores"))) vocab.scores = std::move(*scores);
  if (const auto types = file.get_ints(key("token_type"))) {
    for (const int64_t type : *types)
      vocab.types.push_back(type >= 1 && type <= 6 ? static_cast<int32_t>(type) : 0);
  }
  if (const auto* merges = file.get_strings(key("merges"))) vocab.merges = *merges;
  vocab.bos = integer("bos_token_id");
  vocab.eos = integer("eos_token_id");
  vocab.eot = integer("eot_token_id");
  vocab.eom = integer("eom_token_id");
  vocab.unk = integer("unknown_token_id");
  vocab.sep = integer("seperator_token_id");  // spelled this way in the format
  vocab.pad = integer("padding_token_id");
  vocab.cls = integer("cls_token_id");
  vocab.mask = integer("mask_token_id");
  vocab.add_bos = flag("add_bos_token");
  vocab.add_eos = flag("add_eos_token");
  vocab.add_sep = flag("add_sep_token");
  vocab.add_space_prefix = flag("add_space_prefix");
  vocab.remove_extra_whitespaces = flag("remove_extra_whitespaces");
  vocab.lowercase = flag("normalizer.lowercase");
  vocab.strip_accents = flag("normalizer.strip_accents");
  if (const auto* map = file.find(key("precompiled_charsmap"))) {
    vocab.charsmap.assign(reinterpret_cast<const char*>(map->raw.data()), map->raw.size());
  }
  read_templates(file, vocab);
  vocab.hugging_face = file.get_string("tokenizer.huggingface.json");
  vocab.prefix = file.get_ints("freshet.tokenizer.prefix");
  vocab.suffix = file.get_ints("freshet.tokenizer.suffix");
  vocab.ends = file.get_ints("freshet.tokenizer.ends");
  vocab.special_tokens = file.get_string("freshet.tokenizer.special_tokens");
  return vocab;
}

std::string filler_token(size_t id) {
  return fmt::format("[PAD{}]", id);
}

Result<Tokenizer> tokenizer_from_gguf(const GgufVocab& vocab) {
  auto parts = std::make_shared<TokenizerParts>();
  if (vocab.hugging_face) {
    FRESHET_ASSIGN_OR_RETURN(
        parts, parse_tokenizer_json(*vocab.hugging_face, "tokenizer.huggingface.json"));
    set_hugging_face_ids(vocab, *parts);
  } else {
    FRESHET_RETURN_IF_ERROR(build(vocab, *parts));
  }
  FRESHET_RETURN_IF_ERROR(apply_own_keys(vocab, *parts));
  parts->chat_template = vocab.chat_template;
  parts->named_templates = vocab.named_templates;
  FRESHET_RETURN_IF_ERROR(finish_parts(*parts));
  return Tokenizer(std::move(parts));
}

}  // namespace freshet::tokenizer
