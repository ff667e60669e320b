// Any bytes as the streamed answer of a server: no crash, and the same events however the bytes are
// split.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "bench_client/answer_reader.h"

namespace {

freshet::bench_client::Outcome read(std::string_view bytes, size_t piece, bool chat) {
  freshet::bench_client::Outcome outcome;
  freshet::bench_client::AnswerReader reader(chat, outcome);
  for (size_t at = 0; at < bytes.size(); at += piece) reader.push(bytes.substr(at, piece), 1.0);
  reader.finish();
  return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  for (const bool chat : {false, true}) {
    const auto whole = read(bytes, size + 1, chat);
    const auto cut = read(bytes, 3, chat);
    FRESHET_CHECK(whole.success == cut.success && whole.error == cut.error);
    FRESHET_CHECK(whole.text == cut.text && whole.itl.size() == cut.itl.size());
    FRESHET_CHECK(whole.output_tokens == cut.output_tokens && whole.output_tokens >= 0);
  }
  return 0;
}
