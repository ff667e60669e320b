// The parts of a tokenizer. Each loader fills in these parts; tokenizer.cc runs them.
#pragma once

#include <memory>
#include <optional>
#include <span>
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
  kTokens,         // decoder over the token texts
  kBytes,          // the concatenated bytes of the tokens
  kSentencePiece,  // as SentencePiece: drops the first space and control tokens
};

enum class PieceKind : uint8_t { kNormal, kUnknown, kControl, kByte };

// A part of two joined texts: one of the texts, or a token between them.
struct PairPiece {
  static constexpr int32_t kFirstText = -1, kSecondText = -2;
  int32_t id = kFirstText;
  int32_t type = 0;  // the token type (segment) of its tokens
};

struct TokenizerParts {
  TokenizerParts() = default;
  TokenizerParts(const TokenizerParts&) = delete;
  TokenizerParts& operator=(const TokenizerParts&) = delete;

  Vocab vocab;
  TokenMap byte_keys;                         // raw bytes -> id, for byte-level models
  AddedTokens raw_tokens, normalized_tokens;  // matched before and after normalisation
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  std::unique_ptr<const Model> model;
  std::vector<int32_t> prefix, suffix;  // ids added by add_special
  std::vector<PairPiece> pair;          // how two texts are joined; empty: one after the other
  bool each_bad_byte = false;           // one U+FFFD per invalid byte

  DecoderPlan decoder;
  DecodeMode decode_mode = DecodeMode::kTokens;
  bool strip_first_space = false;  // kBytes, kSentencePiece: drop the first token's leading space
  // kSentencePiece: drop leading spaces of the following tokens too.
  bool strip_all_leading = false;
  bool hide_control = false;     // kSentencePiece: control tokens decode to nothing
  std::vector<PieceKind> kinds;  // kSentencePiece: by id
  std::string unknown_text;      // kSentencePiece: text of the unknown token

  std::vector<std::string_view> bytes;  // by id, in vocab.arena()
  std::vector<bool> special;            // by id
  std::optional<int32_t> bos, eos, unk, pad, sep, cls, mask;
  std::vector<int32_t> end_of_generation;  // ascending
  // The special tokens for chat templates: bos_token, additional_special_tokens ... If no
  // configuration lists them (nullopt), finish_parts() derives them from the ids.
  std::optional<json::Object> special_tokens;
  std::optional<std::string> chat_template;
  std::vector<std::pair<std::string, std::string>> named_templates;

  // Sets or replaces a chat template; "default" is the unnamed one.
  void set_template(const std::string& name, std::string text);
};

// Two texts as BERT joins them, in segments ("[CLS] a [SEP] b [SEP]"), or as RoBERTa does ("<s> a
// </s></s> b </s>").
std::vector<PairPiece> joined_pair(std::span<const int32_t> prefix, std::span<const int32_t> suffix,
                                   bool segments);

// Fills in the derived parts: bytes (from the decoder, unless a loader has set them), the order of
// end_of_generation, sizes. Fails if a special id is out of range.
Status finish_parts(TokenizerParts& parts);

// Finds bos, eos etc. by the names that most vocabularies use, unless they are already known.
void guess_special_ids(TokenizerParts& parts);
// Adds the tokens whose names mark the end of a turn or text, found as in llama.cpp.
void add_named_ends(TokenizerParts& parts);

// A file in one of the formats, in memory; `name` is used in errors.
using PartsResult = Result<std::shared_ptr<TokenizerParts>>;
PartsResult parse_tokenizer_json(std::string_view text, const std::string& name);
PartsResult build_tokenizer_json(const json::Value& root, const std::string& name);
PartsResult parse_sentencepiece(std::string_view bytes, const std::string& name);
PartsResult parse_tiktoken(std::string_view text, const std::string& name);
PartsResult parse_wordpiece_vocab(std::string_view text, const std::string& name);

// The largest id that a vocabulary of `count` tokens may use. Ids index vectors, so a file with few
// tokens and huge ids must be refused.
inline int64_t largest_id(size_t count) {
  return static_cast<int64_t>(count) * 16 + 262144;
}

}  // namespace freshet::tokenizer
