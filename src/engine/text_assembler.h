// Decodes a sample's tokens to text, and ends it before a stop string.
//
// push() returns the text that is safe to show: text that could be the beginning of a stop string
// is held back until it is certain. All texts together are the decoded output up to the stop
// string. For one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace freshet::engine {

class TextAssembler {
 public:
  // `tokenizer` may be nullptr: then there is no text. It must outlive the assembler.
  TextAssembler(const tokenizer::Tokenizer* tokenizer, bool skip_special,
                std::vector<std::string> stops, bool include_stop);

  // `may_stop`: whether a stop string counts yet (it does not before min_tokens).
  std::string push(int32_t id, bool may_stop);
  // The text that was held back. After a stop string: nothing.
  std::string finish();
  // The stop string that was found, if any. push() must not be called after it.
  const std::string* stopped_by() const { return stopped_by_; }

 private:
  std::string release(bool may_stop);

  std::optional<tokenizer::StreamDecoder> decoder_;
  std::vector<std::string> stops_;
  bool include_stop_;
  std::string held_;
  const std::string* stopped_by_ = nullptr;
};

}  // namespace freshet::engine
