#include "engine/translation.h"

#include <algorithm>

namespace freshet {
namespace {

Result<int32_t> language_token(const tokenizer::Tokenizer& tokenizer, const std::string& name) {
  for (const std::string& spelling : {name, "__" + name + "__"}) {
    const auto id = tokenizer.token_to_id(spelling);
    if (id && tokenizer.is_special(*id)) return *id;
  }
  return invalid_argument("the vocabulary has no language '{}'", name.substr(0, 32));
}

}  // namespace

Result<TranslationPrompt> translation_prompt(const tokenizer::Tokenizer& tokenizer,
                                             const std::vector<int32_t>& start,
                                             const std::string& text, const std::string& source,
                                             const std::string& target) {
  TranslationPrompt out;
  out.encoder_ids = tokenizer.encode(text, {.parse_special = false});
  if (!source.empty()) {
    FRESHET_ASSIGN_OR_RETURN(const int32_t id, language_token(tokenizer, source));
    // The special token around the text that does not begin or end it.
    const auto is_language = [&](int32_t token) {
      return tokenizer.is_special(token) && token != tokenizer.bos() && token != tokenizer.eos() &&
             token != tokenizer.unk() && token != tokenizer.pad();
    };
    const auto at = std::ranges::find_if(out.encoder_ids, is_language);
    if (at == out.encoder_ids.end())
      return invalid_argument("the tokenizer puts no language beside a text: it has one language");
    *at = id;
  }
  out.prompt = start;
  if (!target.empty()) {
    FRESHET_ASSIGN_OR_RETURN(const int32_t id, language_token(tokenizer, target));
    out.prompt.resize(std::min<size_t>(start.size(), 1));
    out.prompt.push_back(id);
  }
  return out;
}

}  // namespace freshet
