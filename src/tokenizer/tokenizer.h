// Text to token ids and back, for every vocabulary format that Freshet reads.
//
// A Tokenizer is an immutable value that is cheap to copy; all of it is safe to use from many
// threads. Texts may hold any bytes: invalid UTF-8 is read as U+FFFD, and decoded text is always
// valid UTF-8. Ids that are not in the vocabulary decode to nothing.
//
// Formats: Hugging Face tokenizer.json; SentencePiece tokenizer.model; tiktoken ranks; GGUF
// metadata; BERT's vocab.txt. If the path is a directory, its tokenizer_config.json,
// generation_config.json and chat template are read too.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace freshet::tokenizer {

struct EncodeOptions {
  // Add the tokens that the vocabulary puts around a text: <s>, </s>, [CLS].
  bool add_special = true;
  bool parse_special = true;  // parse special tokens that are spelled out in the text
};

struct DecodeOptions {
  bool skip_special = false;
};

struct TokenizerParts;  // tokenizer_parts.h

class Tokenizer {
 public:
  // `path` is a directory, a GGUF file or a bare vocabulary file. For bare SentencePiece and
  // tiktoken files, special tokens are not parsed from text; their own libraries do not parse them
  // either.
  static Result<Tokenizer> load(const std::string& path);

  explicit Tokenizer(std::shared_ptr<const TokenizerParts> parts) : parts_(std::move(parts)) {}

  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  std::string decode(std::span<const int32_t> ids, const DecodeOptions& options = {}) const;

  // Two texts, joined as the vocabulary's post-processor does: "[CLS] a [SEP] b [SEP]". With
  // `most` > 0 the ends of the texts are cut, the longer one's first, so that no more tokens
  // remain; the joining tokens always do.
  struct Pair {
    std::vector<int32_t> ids;
    std::vector<int32_t> types;  // [ids]: the token types (segments)
  };
  Pair encode_pair(std::string_view first, std::string_view second, size_t most = 0) const;
  // One text of at most `most` tokens: its end is cut, the special tokens around it remain.
  std::vector<int32_t> encode_up_to(std::string_view text, size_t most,
                                    const EncodeOptions& options = {}) const;

  int32_t vocab_size() const;  // the highest id + 1; some lower ids may have no token
  // The bytes that a token adds in the middle of a text (not necessarily whole characters); for
  // special tokens, their name. Empty for ids without a token.
  std::string_view token_bytes(int32_t id) const;
  // The token as written in the vocabulary file, e.g. "Ġthe" or "▁the".
  std::string_view token_text(int32_t id) const;
  std::optional<int32_t> token_to_id(std::string_view text) const;  // look-up by token_text

  std::optional<int32_t> bos() const;
  std::optional<int32_t> eos() const;
  std::optional<int32_t> unk() const;
  std::optional<int32_t> pad() const;
  bool adds_bos() const;  // whether encode() adds bos() at the start
  bool is_special(int32_t id) const;
  bool is_end_of_generation(int32_t id) const;
  const std::vector<int32_t>& end_of_generation() const;  // ascending

  // The special tokens under the names that chat templates use, as bound by transformers:
  // bos_token, pad_token, additional_special_tokens ... Tokens that the model lacks are absent.
  const json::Object& special_tokens() const;

  // The Jinja source of the default chat template, and of a named one (such as "tool_use").
  const std::optional<std::string>& chat_template() const;
  const std::string* chat_template(std::string_view name) const;  // nullptr: none
  // The template that transformers would choose: "tool_use" for requests with tools if it exists,
  // else the default. nullptr: none.
  const std::string* chat_template_for(bool with_tools) const;

  const TokenizerParts& parts() const { return *parts_; }

 private:
  friend class StreamDecoder;
  std::shared_ptr<const TokenizerParts> parts_;
};

// Turns ids into text as they arrive. The texts from push() and finish() together are exactly what
// decode() returns for all the ids; each consists of whole UTF-8 characters. For one thread at a
// time.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, const DecodeOptions& options = {});
  StreamDecoder(StreamDecoder&&) noexcept;
  StreamDecoder& operator=(StreamDecoder&&) noexcept;
  ~StreamDecoder();

  std::string push(int32_t id);
  std::string finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace freshet::tokenizer
