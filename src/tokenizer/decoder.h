// Decoders: from tokens back to text, as a stream.
//
// A DecoderPlan is a list of steps, as in a tokenizer.json's "decoder" (a Sequence is flattened);
// immutable and safe to share. A DecoderStream runs it: tokens go in one by one, text comes out as
// soon as it is certain, and always in whole UTF-8 characters. Decoding a whole list is running a
// stream over it, so the two cannot differ. A stream is used by one thread.
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
    kByteLevel,     // printable characters to bytes; fuses
    kBytes,         // tokens are raw bytes already; fuses
    kMetaspace,     // text to space; not on the first token if flag
    kWordPiece,     // text is the prefix of continuations; flag: clean up
    kBpe,           // text is the suffix of words
    kByteFallback,  // <0xXX> to bytes
    kFuse,
    kStrip,    // text (one character) from the start (left times) and the end (right times)
    kReplace,  // text or regex -> content
    kCtc,      // text: padding, content: word delimiter, flag: clean up
    kJoin,     // no decoder at all: spaces between the tokens
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
  // What a token in the middle of a text stands for, in bytes.
  std::string token_bytes(std::string_view token) const;

 private:
  std::vector<DecoderStep> steps_;
};

class DecoderStream {
 public:
  virtual ~DecoderStream() = default;
  // Appends to `out` the text that is now certain.
  virtual void push(std::string_view token, std::string& out) = 0;
  // Appends the rest. Nothing is pushed afterwards.
  virtual void finish(std::string& out) = 0;
};
std::unique_ptr<DecoderStream> make_decoder_stream(const DecoderPlan& plan);

// Bytes in, well-formed text out: a bad sequence becomes U+FFFD, one for each maximal well-formed
// prefix, or one for each byte. Holds at most three bytes back.
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

// The byte of a token <0xXX>, or -1.
int byte_of_token(std::string_view token);

}  // namespace freshet::tokenizer
