// /v1/embeddings: pooled hidden states, in OpenAI's format with vLLM's extra fields.
//
// Pooling, further layers, normalisation, prompts and shorter sizes are those of the model's files
// (layers/pooled_head.h), unless --pooling or the request says otherwise.
#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <openssl/evp.h>

#include "layers/pooled_head.h"
#include "server/app.h"
#include "server/fields.h"
#include "server/pooled_answer.h"

namespace freshet::server {
namespace {

struct EmbeddingOptions {
  std::string model;
  bool base64 = false;
  bool normalize = true;
  size_t dimensions = 0;
  std::string prompt;  // before each text
};

std::string base64_of(const std::vector<float>& v) {
  static_assert(sizeof(float) == 4);
  std::string bytes(v.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), v.data(), bytes.size());  // OpenAI's clients expect little-endian F32
  std::string out((bytes.size() + 2) / 3 * 4 + 1, '\0');  // EVP_EncodeBlock ends with a NUL
  const int size = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(out.data()),
                                   reinterpret_cast<const unsigned char*>(bytes.data()),
                                   static_cast<int>(bytes.size()));
  out.resize(static_cast<size_t>(size));
  return out;
}

json::Value format_embeddings(const EmbeddingOptions& options,
                              std::vector<std::vector<float>>& vectors, const Usage& usage) {
  json::Array data;
  for (size_t i = 0; i < vectors.size(); ++i) {
    std::vector<float>& v = vectors[i];
    v.resize(std::min(v.size(), options.dimensions));
    if (options.normalize) normalize_vector(v);
    json::Object o;
    o["object"] = "embedding";
    o["index"] = static_cast<int64_t>(i);
    if (options.base64) {
      o["embedding"] = base64_of(v);
    } else {
      json::Array numbers;
      numbers.reserve(v.size());
      for (const float x : v) numbers.emplace_back(static_cast<double>(x));
      o["embedding"] = std::move(numbers);
    }
    data.emplace_back(std::move(o));
  }
  json::Object o;
  o["object"] = "list";
  o["data"] = std::move(data);
  o["model"] = options.model;
  o["usage"] = usage_json(usage);
  return json::Value(std::move(o));
}

const std::string* find_prompt(const PooledHeads& heads, std::string_view name) {
  for (const auto& [known, text] : heads.prompts) {
    if (known == name) return &text;
  }
  return nullptr;
}

std::string names_of_prompts(const PooledHeads& heads) {
  std::vector<std::string> names;
  for (const auto& [name, text] : heads.prompts) names.push_back(name);
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

// The text before each input: by name, by Cohere's kind of input, or the model's default.
void read_prompt(Fields& fields, const PooledHeads& heads, std::string& prompt) {
  std::string name, kind;
  fields.read("prompt_name", name, 256);
  fields.read("input_type", kind, 256);
  if (!fields.ok()) return;
  if (!name.empty() && !kind.empty())
    return fields.fail("input_type", "give either 'prompt_name' or 'input_type'");
  const char* const field = kind.empty() ? "prompt_name" : "input_type";
  std::vector<std::string> names{name};
  if (kind == "query" || kind == "search_query") names = {kind, "query", "search_query"};
  if (kind == "document" || kind == "search_document" || kind == "passage")
    names = {kind, "document", "search_document", "passage"};
  if (!kind.empty() && names.size() == 1) names = {kind};
  if (name.empty() && kind.empty()) {
    if (const std::string* text = find_prompt(heads, heads.default_prompt)) prompt = *text;
    return;
  }
  for (const std::string& one : names) {
    if (const std::string* text = find_prompt(heads, one)) {
      prompt = *text;
      return;
    }
  }
  fields.fail(field, fmt::format("'{}': the model has no such prompt; it has: {}", field,
                                 names_of_prompts(heads)));
}

void read_dimensions(Fields& fields, const App& app, EmbeddingOptions& options) {
  const PooledHeads& heads = app.heads();
  int dimensions = app.embedding_size();
  fields.read("dimensions", dimensions, 1, 1 << 24);
  options.dimensions = static_cast<size_t>(dimensions);
  const bool may = dimensions == app.embedding_size() ||
                   (heads.any_size && dimensions < app.embedding_size()) ||
                   std::ranges::count(heads.matryoshka, dimensions) > 0;
  if (!fields.ok() || may) return;
  const std::string others =
      heads.any_size ? fmt::format("at most {}", app.embedding_size())
      : heads.matryoshka.empty()
          ? fmt::format("left out or {}: this model's vectors cannot be shortened",
                        app.embedding_size())
          : fmt::format("{} or one of {}", app.embedding_size(), fmt::join(heads.matryoshka, ", "));
  fields.fail("dimensions", fmt::format("'dimensions' must be {}", others));
}

// The options of the request besides its input.
std::optional<ApiError> read_options(App& app, const json::Value& body, CommonRequest& common,
                                     EmbeddingOptions& options) {
  Fields fields(body);
  std::string format = "float";
  read_pooled_fields(fields, common);
  fields.read("encoding_format", format);
  read_dimensions(fields, app, options);
  if (app.options().pooling == Pooling::kModel) options.normalize = app.heads().embedding.normalize;
  fields.read("normalize", options.normalize);
  read_prompt(fields, app.heads(), options.prompt);
  if (fields.get("messages") != nullptr)
    fields.fail("messages", "'messages' are not supported here: send 'input'");
  for (const auto& [name, only] : {std::pair{"embed_dtype", "float32"}, {"endianness", "little"}}) {
    std::string value = only;
    fields.read(name, value);
    if (value != only && value != "native")
      fields.fail(name, fmt::format("'{}' must be {}", name, only));
  }
  if (format != "float" && format != "base64")
    fields.fail("encoding_format", "'encoding_format' must be float or base64");
  options.base64 = format == "base64";
  return fields.error();
}

void embeddings(App& app, App::Exchanges exchange, const json::Value& body) {
  if (!body.is_object())
    return send_error(exchange, bad_request("", "the body must be a JSON object"));
  CommonRequest common;
  common.prompt_field = "input";
  EmbeddingOptions options;
  if (auto error = read_options(app, body, common, options)) return send_error(exchange, *error);
  if (auto error = app.check_model(common.model)) return send_error(exchange, *error);
  if (app.draining()) return send_error(exchange, {503, "the server is shutting down", ""});
  auto inputs = parse_prompts(body, "input", app.options().limits);
  if (auto* error = std::get_if<ApiError>(&inputs)) return send_error(exchange, *error);
  std::vector<PooledInput> prompts;
  for (Prompt& input : std::get<std::vector<Prompt>>(inputs)) {
    auto* const text = std::get_if<std::string>(&input);
    if (!options.prompt.empty() && text == nullptr && body.find("prompt_name") != nullptr) {
      return send_error(exchange, bad_request("prompt_name", "prompts go before texts, not ids"));
    }
    if (text != nullptr) *text = options.prompt + *text;
    auto ids = app.encode_pooled(input, common);
    if (auto* error = std::get_if<ApiError>(&ids)) return send_error(exchange, *error);
    prompts.push_back({std::get<std::vector<int32_t>>(std::move(ids)), {}});
  }
  options.model = common.model.empty() ? app.model_name() : common.model;
  Request request = pooled_request(app, exchange, common);
  request.pooling = app.options().pooling;
  answer_pooled(app, std::move(exchange), std::move(request), std::move(prompts), "input",
                [options](std::vector<std::vector<float>>& vectors, const Usage& usage) {
                  return format_embeddings(options, vectors, usage);
                });
}

}  // namespace

void add_embedding_routes(App& app, std::vector<App::Route>& routes) {
  routes.push_back(
      {"POST", "/v1/embeddings", false,
       [&app](App::Exchanges x, const json::Value& b) { embeddings(app, std::move(x), b); }});
}

}  // namespace freshet::server
