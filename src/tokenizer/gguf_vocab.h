// Vocabularies in GGUF metadata (tokenizer.ggml.*, tokenizer.huggingface.json and
// freshet.tokenizer.*).
//
// GgufVocab is plain data with views into the file; nothing in it is trusted. The Tokenizer made
// from it keeps no view. If a file has tokenizer.huggingface.json, that defines the tokenizer, and
// the tokenizer.ggml.* keys only name special tokens; `freshet convert` writes it if GGUF has no
// keys for some part of the tokenizer. Docs: docs/cli.md, "freshet convert".
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "loader/gguf.h"
#include "tokenizer/tokenizer.h"

namespace freshet::tokenizer {

struct GgufVocab {
  std::string name;                      // general.name
  std::string model;                     // llama, gpt2, gemma4, bert, t5
  std::string pre;                       // how a gpt2 vocabulary splits words
  std::vector<std::string_view> tokens;  // by id
  std::vector<float> scores;             // by id, or empty
  std::vector<int32_t> types;            // by id, or empty: 1 normal, 2 unknown, 3 control,
                                         // 4 user-defined, 5 unused, 6 byte
  std::vector<std::string_view> merges;  // "a b"
  std::optional<int64_t> bos, eos, eot, eom, unk, sep, pad, cls, mask;
  std::optional<bool> add_bos, add_eos, add_sep, add_space_prefix, remove_extra_whitespaces;
  std::optional<bool> lowercase, strip_accents;  // bert
  std::string charsmap;
  std::optional<std::string> chat_template;
  std::vector<std::pair<std::string, std::string>> named_templates;
  std::optional<std::string_view> hugging_face;  // tokenizer.huggingface.json
  // freshet.tokenizer.*: each replaces the value derived from the keys above.
  std::optional<std::vector<int64_t>> prefix, suffix;  // ids added around each text
  std::optional<std::vector<int64_t>> ends;            // ids that end generation
  std::optional<std::string_view> special_tokens;      // JSON: special tokens as templates see them
};

// The text that converters give an embedding row without a token, such as "[PAD7]" (type unused).
std::string filler_token(size_t id);

Result<GgufVocab> read_gguf_vocab(const loader::GgufFile& file);
Result<Tokenizer> tokenizer_from_gguf(const GgufVocab& vocab);

// How a "gpt2" vocabulary with this tokenizer.ggml.pre splits words and merges.
struct GgufPre {
  // Applied in order, each to the parts that the previous one left.
  std::vector<std::string> patterns;
  bool ignore_merges = false;
  bool add_bos = false;
  bool marked_spaces = false;  // spaces are U+2581 and text is UTF-8, not printable bytes
  bool whole_newlines = false;
};
std::optional<GgufPre> find_gguf_pre(std::string_view name);

}  // namespace freshet::tokenizer
