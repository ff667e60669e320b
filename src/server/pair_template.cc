#include "server/pair_template.h"

#include <utility>

namespace freshet::server {
namespace {

// Of Qwen3-Reranker.
constexpr std::string_view kQwenTemplate =
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    "the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n"
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
constexpr std::string_view kQwenInstruction =
    "Given a web search query, retrieve relevant passages that answer the query";

bool quotes(const std::string& source, std::string_view word) {
  for (const char quote : {'"', '\''}) {
    if (source.find(quote + std::string(word) + quote) != std::string::npos) return true;
  }
  return false;
}

json::Value pair_message(const char* role, const std::string& content) {
  json::Object message;
  message["role"] = role;
  message["content"] = content;
  return json::Value(std::move(message));
}

}  // namespace

PairTemplate::PairTemplate(const tokenizer::Tokenizer& tokenizer,
                           const tokenizer::ChatRenderer& renderer, const PooledHeads& heads)
    : renderer_(renderer) {
  const std::string& source = renderer.source(false);
  by_roles_ = heads.classifier && quotes(source, "query") && quotes(source, "document");
  if (by_roles_ || !heads.classifier) return;
  if (const std::string* own = tokenizer.chat_template("rerank")) places_ = *own;
  if (!places_.empty() || heads.answer_tokens.size() != 2 || heads.classifier->size != 1) return;
  places_ = kQwenTemplate;
  built_in_ = true;
}

bool PairTemplate::is_formatted(const std::string& query) const {
  return built_in_ && query.starts_with("<|im_start|>");
}

Result<std::string> PairTemplate::render(const std::string& query, const std::string& document,
                                         const std::string& instruction) const {
  if (by_roles_) {
    tokenizer::Conversation c;
    if (!instruction.empty()) {
      c.messages.push_back(pair_message("system", instruction));
      c.variables["instruction"] = instruction;
    }
    c.messages.push_back(pair_message("query", query));
    c.messages.push_back(pair_message("document", document));
    return renderer_.render(c);
  }
  const std::string& judged_by = instruction.empty() ? std::string(kQwenInstruction) : instruction;
  const std::pair<std::string_view, const std::string*> places[] = {
      {"{query}", &query}, {"{document}", &document}, {"{instruction}", &judged_by}};
  if (!instruction.empty() && places_.find(places[2].first) == std::string::npos)
    return invalid_argument("the model's template has no place for an instruction");
  std::string out;
  for (size_t i = 0; i < places_.size();) {
    bool replaced = false;
    for (const auto& [place, text] : places) {
      if (places_.compare(i, place.size(), place) != 0) continue;
      out += *text;
      i += place.size();
      replaced = true;
      break;
    }
    if (!replaced) out += places_[i++];
  }
  return out;
}

}  // namespace freshet::server
