// Any bytes as a vocabulary of each format: a one-line error, or a tokenizer that accepts any text.
// The first byte selects the format; the rest is the file, which is also used as the text.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/utf8.h"
#include "tokenizer/tokenizer_parts.h"

namespace {

using namespace freshet;
using namespace freshet::tokenizer;

PartsResult parse(uint8_t format, std::string_view file) {
  switch (format % 4) {
    case 0:
      return parse_tokenizer_json(file, "fuzz");
    case 1:
      return parse_sentencepiece(file, "fuzz");
    case 2:
      return parse_wordpiece_vocab(file, "fuzz");
    default:
      break;
  }
  return parse_tiktoken(file, "fuzz");
}

void exercise(const Tokenizer& tokenizer, std::string_view text) {
  for (const bool special : {false, true}) {
    const auto ids = tokenizer.encode(text, {.add_special = special, .parse_special = special});
    for (const int32_t id : ids) FRESHET_CHECK(id >= 0 && id < tokenizer.vocab_size());
    StreamDecoder stream(tokenizer, {.skip_special = special});
    std::string streamed;
    for (const int32_t id : ids) streamed += stream.push(id);
    streamed += stream.finish();
    FRESHET_CHECK(streamed == tokenizer.decode(ids, {.skip_special = special}));
    FRESHET_CHECK(find_invalid_utf8(streamed) == std::string_view::npos);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view file(reinterpret_cast<const char*>(data) + 1, size - 1);
  const PartsResult parts = parse(data[0], file);
  if (!parts.ok()) {
    FRESHET_CHECK(!parts.status().message().empty());
    return 0;
  }
  guess_special_ids(**parts);
  add_named_ends(**parts);
  if (!finish_parts(**parts).ok()) return 0;
  const Tokenizer tokenizer(*parts);
  for (const std::string_view text :
       {std::string_view(
            "Hello, w\xC3\xB6rld! 123\n\n  <s> \xE4\xBD\xA0\xF0\x9F\x99\x82 don't \xFF"),
        std::string_view(), file.substr(0, 512)}) {
    exercise(tokenizer, text);
  }
  return 0;
}
