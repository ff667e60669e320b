// /v1/score, /v1/rerank (Jina, Cohere) and /classify, as vLLM has them.
//
// A model with a classification head of one label reads both texts together; its score passes
// through a sigmoid. Without such a head, texts are embedded one by one, and the score is the
// cosine of the angle between them.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "layers/pooled_head.h"
#include "server/app.h"
#include "server/fields.h"
#include "server/pooled_answer.h"

namespace freshet::server {
namespace {

using Vectors = std::vector<std::vector<float>>;

// Pairs of texts whose scores are wanted, by their places in `texts`.
struct PairList {
  std::vector<std::string> texts;
  std::vector<std::pair<size_t, size_t>> pairs;
};

struct ScoreOptions {
  CommonRequest common;
  bool activation = true;  // sigmoid
  std::string instruction;
  const char* field = "text_2";
};

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double ab = 0.0, aa = 0.0, bb = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += double{a[i]} * b[i];
    aa += double{a[i]} * a[i];
    bb += double{b[i]} * b[i];
  }
  return aa > 0.0 && bb > 0.0 ? ab / std::sqrt(aa * bb) : 0.0;
}

std::optional<ApiError> check_ready(App& app, const CommonRequest& common) {
  if (auto error = app.check_model(common.model)) return error;
  if (app.draining()) return ApiError{503, "the server is shutting down", ""};
  return {};
}

// A string, or an object with a text.
std::optional<std::string> text_of(const json::Value& v) {
  if (v.is_string()) return v.as_string();
  const json::Value* text = v.is_object() ? v.find("text") : nullptr;
  if (text != nullptr && text->is_string()) return text->as_string();
  return {};
}

// A text or a list of at most `size` texts.
std::vector<std::string> read_texts(Fields& fields, std::string_view name, size_t size) {
  const json::Value* v = fields.get(name);
  std::vector<std::string> out;
  const std::string wanted =
      fmt::format("'{}' must be a text or a list of 1 to {} texts", name, size);
  if (v == nullptr) {
    fields.fail(name, fmt::format("'{}' is missing", name));
    return out;
  }
  const json::Array one{*v};
  const json::Array& list = v->is_array() ? v->as_array() : one;
  for (const json::Value& item : list) {
    auto text = text_of(item);
    if (!text) fields.fail(name, wanted);
    out.push_back(text ? std::move(*text) : std::string());
  }
  if (out.empty() || out.size() > size) fields.fail(name, wanted);
  return out;
}

using Scores = std::function<json::Value(const std::vector<double>& scores, const Usage& usage)>;

// By a classification head: each pair is one input.
void score_together(App& app, App::Exchanges exchange, const ScoreOptions& options,
                    const PairList& list, const Scores& format) {
  std::vector<PooledInput> inputs;
  for (const auto& [a, b] : list.pairs) {
    auto pair = app.encode_pair(list.texts[a], list.texts[b], options.instruction, options.common);
    if (auto* error = std::get_if<ApiError>(&pair)) return send_error(exchange, *error);
    auto& joined = std::get<Tokenizer::Pair>(pair);
    inputs.push_back({std::move(joined.ids), std::move(joined.types)});
  }
  Request request = pooled_request(app, exchange, options.common);
  request.pooling = Pooling::kClassify;
  const bool activation = options.activation && app.heads().sigmoid_default;
  answer_pooled(app, std::move(exchange), std::move(request), std::move(inputs), options.field,
                [format, activation](Vectors& vectors, const Usage& usage) {
                  std::vector<double> scores;
                  for (const std::vector<float>& v : vectors)
                    scores.push_back(activation ? sigmoid(v[0]) : double{v[0]});
                  return format(scores, usage);
                });
}

// By embeddings: each text is one input.
void score_apart(App& app, App::Exchanges exchange, const ScoreOptions& options, PairList list,
                 const Scores& format) {
  std::vector<PooledInput> inputs;
  for (const std::string& text : list.texts) {
    auto ids = app.encode_pooled(Prompt(text), options.common);
    if (auto* error = std::get_if<ApiError>(&ids)) return send_error(exchange, *error);
    inputs.push_back({std::get<std::vector<int32_t>>(std::move(ids)), {}});
  }
  Request request = pooled_request(app, exchange, options.common);
  request.pooling = app.options().pooling;
  answer_pooled(app, std::move(exchange), std::move(request), std::move(inputs), options.field,
                [format, pairs = std::move(list.pairs)](Vectors& vectors, const Usage& usage) {
                  std::vector<double> scores;
                  for (const auto& [a, b] : pairs) scores.push_back(cosine(vectors[a], vectors[b]));
                  return format(scores, usage);
                });
}

void score_pairs(App& app, App::Exchanges exchange, const ScoreOptions& options, PairList list,
                 const Scores& format) {
  const std::optional<PooledHead>& head = app.heads().classifier;
  if (!head && !options.instruction.empty()) {
    return send_error(exchange, bad_request("instruction",
                                            "this model embeds each text by itself, "
                                            "without an instruction"));
  }
  if (!head) return score_apart(app, std::move(exchange), options, std::move(list), format);
  if (head->size != 1) {
    return send_error(exchange,
                      bad_request("model", fmt::format("scores need a head with one label; this "
                                                       "model has {}: use /classify",
                                                       head->size)));
  }
  score_together(app, std::move(exchange), options, list, format);
}

// A field of its own, or vLLM's arguments of the template.
void read_instruction(Fields& fields, std::string& instruction) {
  constexpr size_t kMost = size_t{1} << 16;
  for (const char* name : {"instruct", "instruction"}) fields.read(name, instruction, kMost);
  const json::Value* const kwargs = fields.get("chat_template_kwargs");
  if (kwargs == nullptr || kwargs->is_null()) return;
  const json::Value* const given = kwargs->is_object() ? kwargs->find("instruction") : nullptr;
  const size_t members = kwargs->is_object() ? kwargs->as_object().size() : 0;
  if (!kwargs->is_object() || members != (given != nullptr ? 1 : 0) ||
      (given != nullptr && !given->is_string())) {
    return fields.fail("chat_template_kwargs",
                       "'chat_template_kwargs' must be an object with an 'instruction'");
  }
  if (given != nullptr) instruction = given->as_string();
}

// vLLM's names, old and new.
void read_activation(Fields& fields, bool& activation) {
  for (const char* name : {"activation", "softmax", "use_activation"})
    fields.read(name, activation);
}

json::Object answer_head(App& app, const char* prefix, const CommonRequest& common) {
  const FormatContext context = app.format_context(prefix, common);
  json::Object o;
  o["id"] = context.id;
  o["object"] = "list";
  o["created"] = context.created;
  o["model"] = context.model;
  return o;
}

void score(App& app, App::Exchanges exchange, const json::Value& body) {
  if (!body.is_object())
    return send_error(exchange, bad_request("", "the body must be a JSON object"));
  ScoreOptions options;
  options.common.prompt_field = "text_2";
  Fields fields(body);
  read_pooled_fields(fields, options.common);
  read_activation(fields, options.activation);
  read_instruction(fields, options.instruction);
  const size_t most = app.options().limits.max_prompts;
  const std::vector<std::string> first = read_texts(fields, "text_1", most);
  const std::vector<std::string> second = read_texts(fields, "text_2", most);
  if (fields.ok() && first.size() != 1 && first.size() != second.size()) {
    fields.fail("text_1", fmt::format("'text_1' must be one text or as many as 'text_2': {} and {}",
                                      first.size(), second.size()));
  }
  if (fields.error()) return send_error(exchange, *fields.error());
  if (auto error = check_ready(app, options.common)) return send_error(exchange, *error);
  PairList list;
  list.texts = first;
  list.texts.insert(list.texts.end(), second.begin(), second.end());
  for (size_t i = 0; i < second.size(); ++i)
    list.pairs.emplace_back(first.size() == 1 ? 0 : i, first.size() + i);
  json::Object head = answer_head(app, "score", options.common);
  score_pairs(app, std::move(exchange), options, std::move(list),
              [head](const std::vector<double>& scores, const Usage& usage) {
                json::Array data;
                for (size_t i = 0; i < scores.size(); ++i) {
                  json::Object o;
                  o["index"] = static_cast<int64_t>(i);
                  o["object"] = "score";
                  o["score"] = scores[i];
                  data.emplace_back(std::move(o));
                }
                json::Object answer = head;
                answer["data"] = std::move(data);
                answer["usage"] = usage_json(usage);
                return json::Value(std::move(answer));
              });
}

struct Ranking {
  std::vector<std::string> documents;
  int top = 0;
  bool return_documents = true;
  bool bare = false;  // text-embeddings-inference's format: a list of {index, score}
  json::Object head;
};

json::Value format_ranking(const Ranking& r, const std::vector<double>& scores,
                           const Usage& usage) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  if (r.top > 0) order.resize(std::min(order.size(), static_cast<size_t>(r.top)));
  json::Array results;
  for (const size_t i : order) {
    json::Object o;
    o["index"] = static_cast<int64_t>(i);
    if (r.bare) {
      o["score"] = scores[i];
      if (r.return_documents) o["text"] = r.documents[i];
    } else {
      if (r.return_documents) {
        json::Object document;
        document["text"] = r.documents[i];
        o["document"] = std::move(document);
      }
      o["relevance_score"] = scores[i];
    }
    results.emplace_back(std::move(o));
  }
  if (r.bare) return json::Value(std::move(results));
  json::Object answer;
  answer["id"] = *r.head.find("id");
  answer["model"] = *r.head.find("model");
  json::Object tokens;
  tokens["prompt_tokens"] = usage.prompt_tokens;
  tokens["total_tokens"] = usage.prompt_tokens;
  answer["usage"] = std::move(tokens);
  answer["results"] = std::move(results);
  return json::Value(std::move(answer));
}

void rerank(App& app, App::Exchanges exchange, const json::Value& body, bool returns_documents) {
  if (!body.is_object())
    return send_error(exchange, bad_request("", "the body must be a JSON object"));
  ScoreOptions options;
  Ranking ranking;
  Fields fields(body);
  ranking.bare = fields.get("texts") != nullptr;
  options.field = options.common.prompt_field = ranking.bare ? "texts" : "documents";
  ranking.return_documents = returns_documents && !ranking.bare;
  std::string query;
  bool raw = false, truncate = false;
  read_pooled_fields(fields, options.common);
  read_activation(fields, options.activation);
  read_instruction(fields, options.instruction);
  fields.read("raw_scores", raw);
  fields.read("truncate", truncate);
  fields.read("query", query, size_t{1} << 24);
  fields.read("top_n", ranking.top, 1, 1 << 24);
  fields.read(ranking.bare ? "return_text" : "return_documents", ranking.return_documents);
  for (const char* name : {"rank_fields", "max_chunks_per_doc", "max_tokens_per_doc"}) {
    if (fields.get(name) != nullptr) fields.fail(name, fmt::format("'{}' is not supported", name));
  }
  ranking.documents = read_texts(fields, options.field, app.options().limits.max_prompts);
  if (fields.ok() && fields.get("query") == nullptr) fields.fail("query", "'query' is missing");
  if (fields.error()) return send_error(exchange, *fields.error());
  if (raw) options.activation = false;
  if (truncate && options.common.truncate_prompt_tokens == 0)
    options.common.truncate_prompt_tokens = -1;
  if (auto error = check_ready(app, options.common)) return send_error(exchange, *error);
  PairList list;
  list.texts = {query};
  list.texts.insert(list.texts.end(), ranking.documents.begin(), ranking.documents.end());
  for (size_t i = 0; i < ranking.documents.size(); ++i) list.pairs.emplace_back(0, i + 1);
  ranking.head = answer_head(app, "rerank", options.common);
  score_pairs(app, std::move(exchange), options, std::move(list),
              [ranking](const std::vector<double>& scores, const Usage& usage) {
                return format_ranking(ranking, scores, usage);
              });
}

// One label: a sigmoid; several: a softmax.
std::vector<double> probabilities(const std::vector<float>& v) {
  if (v.size() == 1) return {sigmoid(v[0])};
  const double most = *std::ranges::max_element(v);
  std::vector<double> out;
  double sum = 0.0;
  for (const float x : v) sum += out.emplace_back(std::exp(x - most));
  for (double& p : out) p /= sum;
  return out;
}

json::Value format_classes(json::Object answer, const std::vector<std::string>& labels,
                           bool activation, const Vectors& vectors, const Usage& usage) {
  json::Array data;
  for (size_t i = 0; i < vectors.size(); ++i) {
    const std::vector<float>& v = vectors[i];
    const auto best = static_cast<size_t>(std::ranges::max_element(v) - v.begin());
    const std::vector<double> shown =
        activation ? probabilities(v) : std::vector<double>(v.begin(), v.end());
    json::Object o;
    o["index"] = static_cast<int64_t>(i);
    o["label"] = labels[best];
    o["probs"] = json::Array(shown.begin(), shown.end());
    o["num_classes"] = static_cast<int64_t>(v.size());
    data.emplace_back(std::move(o));
  }
  answer["data"] = std::move(data);
  answer["usage"] = usage_json(usage);
  return json::Value(std::move(answer));
}

void classify(App& app, App::Exchanges exchange, const json::Value& body) {
  if (!body.is_object())
    return send_error(exchange, bad_request("", "the body must be a JSON object"));
  CommonRequest common;
  common.prompt_field = "input";
  bool activation = true;
  Fields fields(body);
  read_pooled_fields(fields, common);
  read_activation(fields, activation);
  if (fields.error()) return send_error(exchange, *fields.error());
  if (auto error = check_ready(app, common)) return send_error(exchange, *error);
  if (!app.heads().classifier) {
    return send_error(
        exchange,
        bad_request("model", "this model has no classification head: it gives no labels"));
  }
  auto prompts = parse_prompts(body, "input", app.options().limits);
  if (auto* error = std::get_if<ApiError>(&prompts)) return send_error(exchange, *error);
  std::vector<PooledInput> inputs;
  for (const Prompt& prompt : std::get<std::vector<Prompt>>(prompts)) {
    auto ids = app.encode_pooled(prompt, common);
    if (auto* error = std::get_if<ApiError>(&ids)) return send_error(exchange, *error);
    inputs.push_back({std::get<std::vector<int32_t>>(std::move(ids)), {}});
  }
  json::Object head = answer_head(app, "classify", common);
  Request request = pooled_request(app, exchange, common);
  request.pooling = Pooling::kClassify;
  const std::vector<std::string>& labels = app.heads().labels;
  answer_pooled(app, std::move(exchange), std::move(request), std::move(inputs), "input",
                [head, &labels, activation](Vectors& vectors, const Usage& usage) {
                  return format_classes(head, labels, activation, vectors, usage);
                });
}

}  // namespace

void add_score_routes(App& app, std::vector<App::Route>& routes) {
  using Run = void (*)(App&, App::Exchanges, const json::Value&);
  static constexpr std::pair<const char*, Run> kRoutes[] = {
      {"/v1/score", score},
      {"/score", score},
      {"/classify", classify},
      {"/v1/classify", classify},
      {"/rerank", [](App& a, App::Exchanges x, const json::Value& b) { rerank(a, x, b, true); }},
      {"/v1/rerank", [](App& a, App::Exchanges x, const json::Value& b) { rerank(a, x, b, true); }},
      {"/v2/rerank",
       [](App& a, App::Exchanges x, const json::Value& b) { rerank(a, x, b, false); }},
  };
  for (const auto& [path, run] : kRoutes) {
    routes.push_back({"POST", path, false, [&app, run](App::Exchanges x, const json::Value& b) {
                        run(app, std::move(x), b);
                      }});
  }
}

}  // namespace freshet::server
