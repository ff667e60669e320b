#include "server/text_offsets.h"

namespace freshet::server {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

}  // namespace

std::string joined_text(std::string prompt, std::string_view pending, std::string_view answer,
                        std::string_view answer_bytes) {
  if (pending.empty() || answer_bytes.empty()) return prompt.append(answer);
  const std::string bytes = std::string(pending).append(answer_bytes.substr(0, 4));
  const Utf8Char c = decode_utf8(bytes);
  // In the answer, each of the character's bytes is one U+FFFD, unless the answer is shorter.
  for (size_t i = pending.size(); i < c.size && answer.starts_with(kReplacement); ++i)
    answer.remove_prefix(kReplacement.size());
  if (c.valid && prompt.ends_with(kReplacement)) {
    prompt.resize(prompt.size() - kReplacement.size());
    prompt.append(bytes, 0, c.size);
  }
  return prompt.append(answer);
}

}  // namespace freshet::server
