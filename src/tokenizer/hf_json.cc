// The models and added tokens of tokenizer.json, and the file as a whole.
#include "tokenizer/hf_json.h"

#include <algorithm>
#include <map>

#include "tokenizer/bpe.h"
#include "tokenizer/unicode.h"
#include "tokenizer/unigram.h"
#include "tokenizer/wordpiece.h"

namespace freshet::tokenizer {
namespace {

// {"token": id, ...}
Status parse_vocab(const json::Value& model, TokenizerParts& parts, size_t& count) {
  const json::Value* vocab = model.find("vocab");
  if (vocab == nullptr || !vocab->is_object()) {
    return invalid_argument("model: the object \"vocab\" is missing");
  }
  count = vocab->as_object().size();
  parts.vocab.reserve(count);
  for (const auto& [text, value] : vocab->as_object()) {
    const auto id = value.is_number() ? value.as_int64() : std::nullopt;
    if (!id || *id < 0 || *id > largest_id(count)) {
      return invalid_argument("model: the id of token \"{}\" is not an integer from 0 to {}", text,
                              largest_id(count));
    }
    parts.vocab.set(static_cast<int32_t>(*id), text);
  }
  return {};
}

Result<int32_t> find_unknown(const json::Value& model, const TokenizerParts& parts) {
  const json::Value* name = model.find("unk_token");
  if (name == nullptr || !name->is_string()) return -1;
  const int32_t id = parts.vocab.find(name->as_string());
  if (id < 0) {
    return invalid_argument("model: unk_token \"{}\" is not in the vocabulary", name->as_string());
  }
  return id;
}

// One merge, "a b" or ["a", "b"].
Result<std::pair<std::string_view, std::string_view>> parse_merge(const json::Value& value) {
  if (value.is_array() && value.as_array().size() == 2 && value.as_array()[0].is_string() &&
      value.as_array()[1].is_string()) {
    return std::pair<std::string_view, std::string_view>(value.as_array()[0].as_string(),
                                                         value.as_array()[1].as_string());
  }
  if (value.is_string()) {
    const std::string_view text = value.as_string();
    const size_t space = text.find(' ');
    if (space != text.npos && text.find(' ', space + 1) == text.npos) {
      return std::pair(text.substr(0, space), text.substr(space + 1));
    }
  }
  return invalid_argument("a merge must be two tokens, \"a b\" or [\"a\", \"b\"]");
}

Result<PairRanks> parse_merges(const json::Value& model, const TokenizerParts& parts,
                               const std::string& prefix) {
  const json::Value* merges = model.find("merges");
  if (merges == nullptr || !merges->is_array()) {
    return invalid_argument("model: the list \"merges\" is missing");
  }
  const json::Array& list = merges->as_array();
  PairRanks pairs;
  pairs.reserve(list.size());
  std::string joined;
  for (size_t i = list.size(); i-- > 0;) {  // the last of several equal pairs in the file counts
    const auto sides = parse_merge(list[i]);
    if (!sides.ok()) return sides.status().with_context(fmt::format("model.merges[{}]", i));
    const auto [left, right] = *sides;
    joined = left;
    joined += right.starts_with(prefix) ? right.substr(prefix.size()) : right;
    int32_t ids[3];
    const std::string_view names[3] = {left, right, joined};
    for (int k = 0; k < 3; ++k) {
      ids[k] = parts.vocab.find(names[k]);
      if (ids[k] < 0) {
        return invalid_argument("model: merge {} names \"{}\", which is not in the vocabulary", i,
                                names[k]);
      }
    }
    pairs.add(ids[0], ids[1], {static_cast<int32_t>(i), ids[2]});
  }
  return pairs;
}

// Whether the model can take raw bytes instead of their printable forms: nothing comes between the
// byte-level step and the model, and each byte has its token.
bool takes_bytes(const TokenizerParts& parts, const BpeOptions& options) {
  const auto& steps = parts.pre_tokenizer.steps();
  if (steps.empty() || steps.back().kind != PreTokenizerStep::Kind::kByteLevel) return false;
  if (!options.prefix.empty() || !options.suffix.empty()) return false;
  for (int b = 0; b < 256; ++b) {
    if (parts.vocab.find(byte_to_printable(static_cast<uint8_t>(b))) < 0) return false;
  }
  return true;
}

void fill_byte_keys(TokenizerParts& parts) {
  parts.byte_keys.reserve(parts.vocab.count());
  std::string bytes;
  for (int32_t id = 0; id < parts.vocab.size(); ++id) {
    if (parts.vocab.has(id) && printable_to_bytes(parts.vocab.text(id), bytes) && !bytes.empty()) {
      parts.byte_keys.insert(parts.vocab.arena().add(bytes), id);
    }
  }
}

using tokenizer::marks_only_lead;
bool marks_only_lead(const Vocab& vocab) {
  for (int32_t id = 0; id < vocab.size(); ++id) {
    if (!marks_only_lead(vocab.text(id))) return false;
  }
  return true;
}

Status parse_bpe(const json::Value& model, TokenizerParts& parts, size_t& count) {
  FRESHET_RETURN_IF_ERROR(parse_vocab(model, parts, count));
  BpeOptions options;
  options.prefix = model.get_string("continuing_subword_prefix", "");
  options.suffix = model.get_string("end_of_word_suffix", "");
  options.whole_words = model.get_bool("ignore_merges", false);
  options.byte_fallback = model.get_bool("byte_fallback", false);
  options.fuse_unknown = model.get_bool("fuse_unk", false);
  FRESHET_ASSIGN_OR_RETURN(options.unknown, find_unknown(model, parts));
  FRESHET_ASSIGN_OR_RETURN(PairRanks pairs, parse_merges(model, parts, options.prefix));
  parts.unk = options.unknown < 0 ? std::nullopt : std::optional(options.unknown);
  options.bytes = takes_bytes(parts, options);
  if (options.bytes) {
    parts.pre_tokenizer.remove_last();
  }
  // The keys live in parts; no strings that the model would miss are added to its vocabulary later.
  parts.byte_keys.reserve(count);
  if (options.bytes) {
    fill_byte_keys(parts);
  } else {
    for (int32_t id = 0; id < parts.vocab.size(); ++id) {
      if (parts.vocab.has(id)) parts.byte_keys.insert(parts.vocab.text(id), id);
    }
  }
  const bool byte_fallback = options.byte_fallback;
  auto bpe = std::make_unique<BpeModel>(std::move(options), parts.byte_keys, parts.vocab.size());
  bpe->set_pairs(std::move(pairs));
  if (byte_fallback && bpe->has_all_byte_tokens() && marks_only_lead(parts.vocab)) {
    bpe->cut_before_spaces();
  }
  parts.model = std::move(bpe);
  return {};
}

Status parse_unigram(const json::Value& model, TokenizerParts& parts, size_t& count) {
  const json::Value* vocab = model.find("vocab");
  if (vocab == nullptr || !vocab->is_array()) {
    return invalid_argument("model: the list \"vocab\" is missing");
  }
  count = vocab->as_array().size();
  parts.vocab.reserve(count);
  std::vector<UnigramModel::Token> tokens;
  for (const json::Value& entry : vocab->as_array()) {
    const bool pair = entry.is_array() && entry.as_array().size() == 2 &&
                      entry.as_array()[0].is_string() && entry.as_array()[1].is_number();
    const auto id = static_cast<int32_t>(tokens.size());
    if (!pair) return invalid_argument("model: vocab entry {} is not [token, score]", id);
    parts.vocab.set(id, entry.as_array()[0].as_string());
    tokens.push_back({parts.vocab.text(id), id, entry.as_array()[1].as_double()});
  }
  UnigramOptions options;
  options.byte_fallback = model.get_bool("byte_fallback", false);
  const int64_t unknown = model.get_int("unk_id", -1);
  if (unknown < -1 || unknown >= static_cast<int64_t>(count)) {
    return invalid_argument("model: unk_id {} is not in the vocabulary of {}", unknown, count);
  }
  options.unknown = static_cast<int32_t>(unknown);
  if (unknown >= 0) parts.unk = options.unknown;
  for (int32_t id = 0; id < parts.vocab.size(); ++id) {
    parts.byte_keys.insert(parts.vocab.text(id), id);
  }
  parts.model = std::make_unique<UnigramModel>(options, tokens, parts.byte_keys);
  return {};
}

Status parse_wordpiece(const json::Value& model, TokenizerParts& parts, size_t& count) {
  FRESHET_RETURN_IF_ERROR(parse_vocab(model, parts, count));
  const std::string prefix = model.get_string("continuing_subword_prefix", "##");
  const int64_t max_chars = model.get_int("max_input_chars_per_word", 100);
  FRESHET_ASSIGN_OR_RETURN(const int32_t unknown, find_unknown(model, parts));
  if (unknown >= 0) parts.unk = unknown;
  TokenMap starts, rest;
  starts.reserve(count);
  rest.reserve(count);
  for (int32_t id = 0; id < parts.vocab.size(); ++id) {
    const std::string_view text = parts.vocab.text(id);
    if (text.empty()) continue;
    starts.insert(text, id);
    if (text.starts_with(prefix)) rest.insert(text.substr(prefix.size()), id);
  }
  parts.model = std::make_unique<WordPieceModel>(
      std::move(starts), std::move(rest), unknown,
      static_cast<size_t>(std::clamp<int64_t>(max_chars, 0, 1 << 20)));
  return {};
}

Status parse_wordlevel(const json::Value& model, TokenizerParts& parts, size_t& count) {
  FRESHET_RETURN_IF_ERROR(parse_vocab(model, parts, count));
  FRESHET_ASSIGN_OR_RETURN(const int32_t unknown, find_unknown(model, parts));
  if (unknown >= 0) parts.unk = unknown;
  for (int32_t id = 0; id < parts.vocab.size(); ++id) {
    if (parts.vocab.has(id)) parts.byte_keys.insert(parts.vocab.text(id), id);
  }
  parts.model = std::make_unique<WordLevelModel>(parts.byte_keys, unknown);
  return {};
}

// A null or missing member counts as null.
const json::Value& member(const json::Value& root, std::string_view key) {
  static const json::Value kNull;
  const json::Value* value = root.find(key);
  return value == nullptr ? kNull : *value;
}

Status parse_root(const json::Value& root, TokenizerParts& parts) {
  if (!root.is_object()) return invalid_argument("expected an object");
  const json::Value& model = member(root, "model");
  if (!model.is_object()) return invalid_argument("the object \"model\" is missing");
  FRESHET_RETURN_IF_ERROR(parse_hf_normalizer(member(root, "normalizer"), parts));
  FRESHET_RETURN_IF_ERROR(parse_hf_pre_tokenizer(member(root, "pre_tokenizer"), parts));
  FRESHET_RETURN_IF_ERROR(parse_hf_decoder(member(root, "decoder"), parts));
  FRESHET_RETURN_IF_ERROR(parse_hf_post_processor(member(root, "post_processor"), parts));
  size_t model_count = 0;
  FRESHET_RETURN_IF_ERROR(parse_hf_model(model, parts, model_count));
  return parse_hf_added_tokens(member(root, "added_tokens"), model_count, parts);
}

}  // namespace

Status parse_hf_model(const json::Value& model, TokenizerParts& parts, size_t& model_count) {
  std::string type = model.get_string("type", "");
  if (type.empty()) {  // files older than this key
    const json::Value& vocab = member(model, "vocab");
    type = model.find("merges") != nullptr                      ? "BPE"
           : vocab.is_array()                                   ? "Unigram"
           : model.find("continuing_subword_prefix") != nullptr ? "WordPiece"
                                                                : "WordLevel";
  }
  if (type == "BPE") return parse_bpe(model, parts, model_count);
  if (type == "Unigram") return parse_unigram(model, parts, model_count);
  if (type == "WordPiece") return parse_wordpiece(model, parts, model_count);
  if (type == "WordLevel") return parse_wordlevel(model, parts, model_count);
  return unsupported("model type \"{}\" is not known", type);
}

Status parse_hf_added_tokens(const json::Value& value, size_t model_count, TokenizerParts& parts) {
  if (value.is_null()) return {};
  if (!value.is_array()) return invalid_argument("\"added_tokens\" is not a list");
  // The ids in the file are ignored: a token gets the model's id, or the next free one.
  auto next_id = static_cast<int64_t>(model_count);
  std::map<int32_t, AddedToken> tokens;
  for (const json::Value& entry : value.as_array()) {
    AddedToken token;
    token.content = entry.get_string("content", "");
    if (token.content.empty()) continue;
    if (find_invalid_utf8(token.content) != std::string::npos) {
      return invalid_argument("added_tokens: a token is not valid UTF-8");
    }
    token.single_word = entry.get_bool("single_word", false);
    token.lstrip = entry.get_bool("lstrip", false);
    token.rstrip = entry.get_bool("rstrip", false);
    token.special = entry.get_bool("special", false);
    token.normalized = entry.get_bool("normalized", !token.special);
    token.id = parts.vocab.find(token.content);
    if (token.id < 0) {
      token.id = static_cast<int32_t>(next_id++);
      parts.vocab.set(token.id, token.content);
    }
    tokens[token.id] = std::move(token);
  }
  parts.special.resize(static_cast<size_t>(parts.vocab.size()));
  std::vector<AddedToken> raw, normalized;
  for (auto& [id, token] : tokens) {
    parts.special[static_cast<size_t>(id)] = token.special;
    if (!token.normalized) {
      raw.push_back(std::move(token));
      continue;
    }
    if (!parts.normalizer.empty()) {
      token.content = parts.normalizer.run(token.content);
      if (token.content != parts.vocab.text(id)) parts.vocab.set(id, token.content);
    }
    normalized.push_back(std::move(token));
  }
  parts.raw_tokens = AddedTokens(std::move(raw));
  parts.normalized_tokens = AddedTokens(std::move(normalized));
  return {};
}

PartsResult build_tokenizer_json(const json::Value& root, const std::string& name) {
  auto parts = std::make_shared<TokenizerParts>();
  if (Status status = parse_root(root, *parts); !status.ok()) return status.with_context(name);
  return parts;
}

PartsResult parse_tokenizer_json(std::string_view text, const std::string& name) {
  auto root = json::parse(text);
  if (!root.ok()) return root.status().with_context(name);
  return build_tokenizer_json(*root, name);
}

}  // namespace freshet::tokenizer
