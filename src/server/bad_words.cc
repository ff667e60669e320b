#include "server/bad_words.h"

#include <string_view>
#include <utility>

namespace freshet::server {

std::vector<std::vector<int32_t>> sequences_of(const tokenizer::Tokenizer& tokenizer,
                                               const std::string& word) {
  const size_t first = word.find_first_not_of(" \t\r\n\v\f");
  if (first == std::string::npos) return {};
  const std::string bare = word.substr(first);
  const tokenizer::EncodeOptions options{.add_special = false};
  std::vector<std::vector<int32_t>> out;
  for (const std::string& text : {bare, " " + bare}) {
    std::vector<int32_t> ids = tokenizer.encode(text, options);
    if (ids.empty()) continue;
    const bool differs =
        out.empty() || (ids.size() == out.front().size() && ids.front() != out.front().front());
    if (differs) out.push_back(std::move(ids));
  }
  return out;
}

}  // namespace freshet::server
