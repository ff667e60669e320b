// What a tokenizer is made of. Each loader fills one of these in; tokenizer.cc runs it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/decoder.h"
#include "tokenizer/model.h"
#include "tokenizer/normalizer.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/vocab.h"

namespace freshet::tokenizer {

// How ids become text.
enum class DecodeMode {
  kTokens,         // decoder over the tokens' texts
  kBytes,          // the tokens' bytes, one after another
  kSentencePiece,  // as SentencePiece: the first space is not there, control tokens are invisible
};

enum class PieceKind : uint8_t { kNormal, kUnknown, kControl, kByte };

struct TokenizerParts {
  TokenizerParts() = default;
  TokenizerParts(const TokenizerParts&) = delete;
  TokenizerParts& operator=(const TokenizerParts&) = delete;

  Vocab vocab;
  TokenMap byte_keys;                         // raw bytes -> id, for byte-level models
  AddedTokens raw_tokens, normalized_tokens;  // looked for before and after normalisation
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  std::unique_ptr<const Model> model;
  std::vector<int32_t> prefix, suffix;  // what add_special adds
  bool each_bad_byte = false;           // the normaliser makes U+FFFD of each bad byte

  DecoderPlan decoder;
  DecodeMode decode_mode = DecodeMode::kTokens;
  bool strip_first_space = false;  // kBytes, kSentencePiece: the first token's leading space goes
  bool strip_all_leading = false;  // kSentencePiece: and those of the tokens after it
  bool hide_control = false;       // kSentencePiece: control tokens are nothing
  std::vector<PieceKind> kinds;    // kSentencePiece: by id
  std::string unknown_text;        // kSentencePiece: what the unknown token is shown as

  std::vector<std::string_view> bytes;  // by id, in vocab.arena()
  std::vector<bool> special;            // by id
  std::optional<int32_t> bos, eos, unk, pad, sep, cls, mask;
  std::vector<int32_t> end_of_generation;  // ascending
  // What chat templates see: bos_token, additional_special_tokens ... Without a configuration that
  // says so (nullopt), finish_parts() makes it of the ids.
  std::optional<json::Object> special_tokens;
  std::optional<std::string> chat_template;
  std::vector<std::pair<std::string, std::string>> named_templates;

  // Sets or replaces a chat template; "default" is the one without a name.
  void set_template(const std::string& name, std::string text);
};

// Fills in what follows from the rest: bytes (from the decoder where a loader has not set them),
// the order of end_of_generation, sizes. Fails when a special id is out of range.
Status finish_parts(TokenizerParts& parts);

// bos, eos and the like by the names that most vocabularies use, where they are not yet known.
void guess_special_ids(TokenizerParts& parts);
// Adds the tokens whose names mark an end of turn or text, as llama.cpp finds them.
void add_named_ends(TokenizerParts& parts);

// The file of one of the formats, in memory; `name` is used in errors.
using PartsResult = Result<std::shared_ptr<TokenizerParts>>;
PartsResult parse_tokenizer_json(std::string_view text, const std::string& name);
PartsResult build_tokenizer_json(const json::Value& root, const std::string& name);
PartsResult parse_sentencepiece(std::string_view bytes, const std::string& name);
PartsResult parse_tiktoken(std::string_view text, const std::string& name);
PartsResult parse_wordpiece_vocab(std::string_view text, const std::string& name);

// The largest id that a vocabulary of `count` tokens may use: ids index vectors, so that a file
// that names a few tokens with huge ids must be refused.
inline int64_t largest_id(size_t count) {
  return static_cast<int64_t>(count) * 16 + 262144;
}

}  // namespace freshet::tokenizer
