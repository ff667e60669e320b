// Text to token ids and back, for every vocabulary format that Freshet reads.
//
// A Tokenizer is an immutable value that is cheap to copy; all of it is safe to use from many
// threads. Texts may hold any bytes: what is not valid UTF-8 is read as U+FFFD, and decoded text is
// always valid UTF-8. Ids that the vocabulary lacks decode to nothing.
//
// Formats: Hugging Face tokenizer.json; SentencePiece tokenizer.model; tiktoken ranks; GGUF
// metadata; BERT's vocab.txt. A directory is read with its tokenizer_config.json,
// generation_config.json and chat template.
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
  bool add_special = true;    // what the vocabulary's template puts around a text: <s>, </s>, [CLS]
  bool parse_special = true;  // special tokens that are written out in the text count as such
};

struct DecodeOptions {
  bool skip_special = false;
};

struct TokenizerParts;  // tokenizer_parts.h

class Tokenizer {
 public:
  // `path` is a directory, a GGUF file or a bare vocabulary file. Special tokens of bare
  // SentencePiece and tiktoken files are not parsed from text, as their own libraries do not.
  static Result<Tokenizer> load(const std::string& path);

  explicit Tokenizer(std::shared_ptr<const TokenizerParts> parts) : parts_(std::move(parts)) {}

  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  std::string decode(std::span<const int32_t> ids, const DecodeOptions& options = {}) const;

  int32_t vocab_size() const;  // the highest id + 1; some ids below it may be without a token
  // The bytes that a token adds in the middle of a text (not necessarily whole characters); for
  // special tokens their name. Empty for ids without a token.
  std::string_view token_bytes(int32_t id) const;
  // The token as the vocabulary file writes it, e.g. "Ġthe" or "▁the".
  std::string_view token_text(int32_t id) const;
  std::optional<int32_t> token_to_id(std::string_view text) const;  // by token_text

  std::optional<int32_t> bos() const;
  std::optional<int32_t> eos() const;
  std::optional<int32_t> unk() const;
  std::optional<int32_t> pad() const;
  bool adds_bos() const;  // whether encode() puts bos() first
  bool is_special(int32_t id) const;
  bool is_end_of_generation(int32_t id) const;
  const std::vector<int32_t>& end_of_generation() const;  // ascending

  // The special tokens by the names under which chat templates see them, as transformers binds
  // them: bos_token, pad_token, additional_special_tokens ... What the model lacks is absent.
  const json::Object& special_tokens() const;

  // The default chat template's Jinja source, and another by name (such as "tool_use").
  const std::optional<std::string>& chat_template() const;
  const std::string* chat_template(std::string_view name) const;  // nullptr: none
  // The one that transformers takes: "tool_use" for requests with tools where there is one, else
  // the default. nullptr: none.
  const std::string* chat_template_for(bool with_tools) const;

  const TokenizerParts& parts() const { return *parts_; }

 private:
  friend class StreamDecoder;
  std::shared_ptr<const TokenizerParts> parts_;
};

// Turns ids into text as they come. The texts that push() and finish() return make up exactly what
// decode() gives for all the ids, and each is whole UTF-8 characters. For one thread at a time.
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
