#include "bench_client/server_vocabulary.h"

#include <algorithm>

#include "base/json.h"

namespace freshet::bench_client {
namespace {

constexpr int kMaxId = 1 << 24;

// A text with many different tokens, for servers that do not report the size of their vocabulary.
constexpr char kText[] =
    "The quick brown fox jumps over the lazy dog while seven wizards brew black quartz elixirs. "
    "Rivers carry meltwater from the mountains to the sea: every spring the valley floods, and "
    "farmers mend bridges, fences, roads. In 1867 engineers measured 4,250 metres of pipe; by 1903 "
    "the city had 96 pumps, 12 reservoirs and a laboratory. Numbers such as 3.14159 or 2,718 "
    "appear "
    "often, as do names: Anna, Boris, Chen, Dolores, Emeka, Fatima, Giovanni, Hiroshi. Ask "
    "yourself "
    "why a function returns early, whether memory is shared, how long a queue may grow, what light "
    "does inside a prism. She said: \"Bring paper, ink, two candles and some bread.\" Winter "
    "nights "
    "are long; summer mornings smell of hay. def main(args): return sum(x * x for x in args if x > "
    "0)";

}  // namespace

Result<Ids> ServerVocabulary::encode(const std::string& text) {
  json::Object body;
  body["model"] = model_;
  body["prompt"] = text;
  body["add_special_tokens"] = false;
  FRESHET_ASSIGN_OR_RETURN(const http::Reply reply,
                           client_.request_now("/tokenize", json::write(body)));
  if (reply.status != 200) {
    return unsupported(
        "the server's /tokenize answers {}: give the model's tokenizer with --tokenizer",
        reply.status);
  }
  FRESHET_ASSIGN_OR_RETURN(const json::Value answer, json::parse(reply.body));
  const json::Value* tokens = answer.find("tokens");
  if (tokens == nullptr || !tokens->is_array())
    return io_error("the server's /tokenize answers without \"tokens\"");
  Ids ids;
  for (const json::Value& t : tokens->as_array()) {
    const auto id = t.is_number() ? t.as_int64() : std::nullopt;
    if (!id || *id < 0 || *id >= kMaxId)
      return io_error("the server's /tokenize answers with a value that is not a token id");
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

Result<std::string> ServerVocabulary::decode(const Ids& ids) {
  json::Array tokens;
  for (const int32_t id : ids) tokens.emplace_back(id);
  json::Object body;
  body["model"] = model_;
  body["tokens"] = std::move(tokens);
  FRESHET_ASSIGN_OR_RETURN(const http::Reply reply,
                           client_.request_now("/detokenize", json::write(body)));
  if (reply.status != 200) {
    return unsupported(
        "the server's /detokenize answers {}: give the model's tokenizer with --tokenizer",
        reply.status);
  }
  FRESHET_ASSIGN_OR_RETURN(const json::Value answer, json::parse(reply.body));
  for (const char* key : {"prompt", "content"}) {
    const json::Value* text = answer.find(key);
    if (text != nullptr && text->is_string()) return text->as_string();
  }
  return io_error("the server's /detokenize answers without \"prompt\"");
}

Result<Ids> ServerVocabulary::usable_ids() {
  Ids ids;
  if (size_ > 0) {
    for (int32_t id = 0; id < size_; ++id) ids.push_back(id);
    return ids;
  }
  auto found = encode(kText);
  if (!found.ok())
    return unsupported("the server does not report the size of its vocabulary: give --vocab-size");
  ids = std::move(found).value();
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  if (ids.empty()) return io_error("the server's /tokenize answers without tokens");
  return ids;
}

}  // namespace freshet::bench_client
