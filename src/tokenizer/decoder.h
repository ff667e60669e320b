// Decoders: tokens to text, as a stream.
//
// A DecoderPlan is a list of steps, like the "decoder" of a tokenizer.json (a Sequence is
// flattened); it is immutable and safe to share. A DecoderStream runs the plan: tokens go in one by
// one, and text comes out as soon as it is final, always in whole UTF-8 characters. Decoding a full
// list runs a stream over it, so both give the same result. A stream must be used by one thread.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/regex.h"

namespace freshet::tokenizer {

struct DecoderStep {
  enum class Kind {
    kByteLevel,     // printable characters to bytes; fuses tokens
    kBytes,         // tokens are already raw bytes; fuses tokens
    kMetaspace,     // replaces text by a space; flag: removes it from the first token
    kWordPiece,     // text: prefix of continuation tokens; flag: clean up
    kBpe,           // text: suffix of words
    kByteFallback,  // <0xXX> to bytes
    kFuse,
    kStrip,    // removes text (one character) up to left times at the start, right times at the end
    kReplace,  // text or regex -> content
    kCtc,      // text: padding, content: word delimiter, flag: clean up
    kJoin,     // no decoder: joins the tokens with spaces
  };
  Kind kind;
  std::string text, content;
  std::shared_ptr<const Regex> regex;
  size_t left = 0, right = 0;
  bool flag = false;
};

class DecoderPlan {
 public:
  void add(DecoderStep step) { steps_.push_back(std::move(step)); }
  const std::vector<DecoderStep>& steps() const { return steps_; }
  // The bytes of a token in the middle of a text.
  std::string token_bytes(std::string_view token) const;

 private:
  std::vector<DecoderStep> steps_;
};

class DecoderStream {
 public:
  virtual ~DecoderStream() = default;
  // Appends the text that is now final to `out`.
  virtual void push(std::string_view token, std::string& out) = 0;
  // Appends the remaining text. No push() may follow.
  virtual void finish(std::string& out) = 0;
};
std::unique_ptr<DecoderStream> make_decoder_stream(const DecoderPlan& plan);

// Bytes in, well-formed text out: an invalid sequence becomes U+FFFD, one per maximal well-formed
// prefix or one per byte. Holds back at most three bytes.
class Utf8Assembler {
 public:
  explicit Utf8Assembler(bool each_byte = false) : each_byte_(each_byte) {}
  void push(std::string_view bytes, std::string& out);
  void finish(std::string& out);

 private:
  void drain(std::string& out, bool final);
  bool each_byte_;
  std::string held_;
};

// The byte of a token <0xXX>; -1 if it is not one.
int byte_of_token(std::string_view token);

}  // namespace freshet::tokenizer
