// Texts for models that translate between many languages (NLLB, M2M-100, mBART-50): the language of
// a text is a token beside it, and the decoder begins with the language to write. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "tokenizer/tokenizer.h"

namespace freshet {

struct TranslationPrompt {
  std::vector<int32_t> encoder_ids;
  std::vector<int32_t> prompt;  // of the decoder
};

// `source` and `target` are languages as the vocabulary spells them: "eng_Latn", or "en" for
// "__en__". "" leaves what the tokenizer and the configuration say. `start`: what the decoder
// begins with without a target (Engine::decoder_start()). Errors name the language.
Result<TranslationPrompt> translation_prompt(const tokenizer::Tokenizer& tokenizer,
                                             const std::vector<int32_t>& start,
                                             const std::string& text, const std::string& source,
                                             const std::string& target);

}  // namespace freshet
