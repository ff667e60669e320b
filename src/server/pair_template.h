// How a reranker that is a language model reads a query and a document: as one text, made by a
// template.
//
// The template is the one of --chat-template or of the model's files, if it is written for messages
// with the roles "query" and "document" (vLLM's score templates, sentence-transformers); else that
// of a GGUF file ("rerank"), whose places are {query} and {document}; else, for a model that
// answers "yes" or "no", the one that Qwen3-Reranker was trained with. Immutable, so safe to use
// from many threads.
#pragma once

#include <string>

#include "base/status.h"
#include "layers/pooled_head.h"
#include "tokenizer/chat_renderer.h"

namespace freshet::server {

class PairTemplate {
 public:
  // `renderer` must outlive it.
  PairTemplate(const tokenizer::Tokenizer& tokenizer, const tokenizer::ChatRenderer& renderer,
               const PooledHeads& heads);

  // Whether pairs are joined by the tokenizer instead.
  bool empty() const { return !by_roles_ && places_.empty(); }
  // Clients of Qwen3-Reranker may send parts of a formatted text: its beginning as the query, and
  // the rest as the document. These are joined as they are.
  bool is_formatted(const std::string& query) const;
  // `instruction`: what the documents are judged by; "": the template's.
  Result<std::string> render(const std::string& query, const std::string& document,
                             const std::string& instruction) const;

 private:
  const tokenizer::ChatRenderer& renderer_;
  bool by_roles_ = false;
  bool built_in_ = false;
  std::string places_;  // a text with places; "": none
};

}  // namespace freshet::server
