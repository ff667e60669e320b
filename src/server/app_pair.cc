// App: pairs of texts, from which classifiers make scores.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "server/app.h"

namespace freshet::server {

// The end of the document is cut if all of it would be too long.
Parsed<Tokenizer::Pair> App::encode_by_template(std::string_view first, std::string_view second,
                                                const std::string& instruction,
                                                const CommonRequest& request) const {
  constexpr int kTries = 8;
  const size_t keep = request.truncate_prompt_tokens != 0 ? pooled_tokens_to_keep(request) : 0;
  const std::string query(first);
  std::string document(second);
  Tokenizer::Pair pair;
  for (int i = 0; i < kTries; ++i) {
    const auto text = pair_template_->render(query, document, instruction);
    if (!text.ok()) return bad_request(request.prompt_field, text.status().message());
    pair.ids = engine_.tokenizer().encode(*text, {.add_special = false});
    if (keep == 0 || pair.ids.size() <= keep) return pair;
    std::vector<int32_t> ids = engine_.tokenizer().encode(document, {.add_special = false});
    if (ids.empty()) break;
    ids.resize(ids.size() - std::min(ids.size(), pair.ids.size() - keep));
    document = engine_.tokenizer().decode(ids);
  }
  return bad_request(request.prompt_field,
                     fmt::format("the query and the template leave no room for a document in {} "
                                 "tokens",
                                 keep));
}

Parsed<Tokenizer::Pair> App::encode_pair(const std::string& first, const std::string& second,
                                         const std::string& instruction,
                                         const CommonRequest& request) const {
  const bool cuts = request.truncate_prompt_tokens != 0;
  for (const std::string* text : {&first, &second}) {
    if (cuts || text->size() <= max_text_bytes_) continue;
    return bad_request(request.prompt_field,
                       fmt::format("a text has {} bytes: more than {} tokens can hold",
                                   text->size(), engine_.max_model_len()));
  }
  const std::string_view a = std::string_view(first).substr(0, max_text_bytes_);
  const std::string_view b = std::string_view(second).substr(0, max_text_bytes_);
  const bool joined = pair_template_->empty() || pair_template_->is_formatted(first);
  if (joined && !instruction.empty()) {
    return bad_request("instruction", pair_template_->empty()
                                          ? "this model reads pairs without an instruction"
                                          : "the query has its instruction in it already");
  }
  Tokenizer::Pair pair;
  if (joined) {
    pair = engine_.tokenizer().encode_pair(a, b, cuts ? pooled_tokens_to_keep(request) : 0);
  } else {
    auto made = encode_by_template(a, b, instruction, request);
    if (auto* error = std::get_if<ApiError>(&made)) return *error;
    pair = std::get<Tokenizer::Pair>(std::move(made));
  }
  if (pair.ids.empty()) return bad_request(request.prompt_field, "the texts have no tokens");
  if (pair.ids.size() > static_cast<size_t>(engine_.max_model_len())) {
    return bad_request(request.prompt_field,
                       fmt::format("two texts have {} tokens together; at most {} are possible "
                                   "('truncate_prompt_tokens': -1 cuts them)",
                                   pair.ids.size(), engine_.max_model_len()));
  }
  if (engine_.model().spec().token_types < 2) pair.types.clear();
  return pair;
}

}  // namespace freshet::server
