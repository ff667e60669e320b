#include "server/llama_request.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

namespace freshet::server {
namespace {

json::Array ids_of(const Tokenizer& tokenizer, const std::string& text, bool add_special) {
  json::Array out;
  for (const int32_t id : tokenizer.encode(text, {.add_special = add_special}))
    out.emplace_back(static_cast<int64_t>(id));
  return out;
}

// [[id or text, bias], ...] or {"id or text": bias}, as OpenAI's object: false forbids a
// token, and a text means all of its tokens. Other values are passed on, and refused later.
json::Value openai_bias(const json::Value& bias, const Tokenizer& tokenizer) {
  json::Object out;
  const auto add = [&](const json::Value& token, const json::Value& value) {
    const json::Value number = value == json::Value(false) ? json::Value(-100.0) : value;
    if (token.is_string()) {
      for (const int32_t id : tokenizer.encode(token.as_string(), {.add_special = false}))
        out[std::to_string(id)] = number;
      return true;
    }
    const auto id = token.is_number() ? token.as_int64() : std::nullopt;
    if (id) out[std::to_string(*id)] = number;
    return id.has_value();
  };
  if (bias.is_array()) {
    for (const json::Value& pair : bias.as_array()) {
      if (!pair.is_array() || pair.as_array().size() != 2) return bias;
      if (!add(pair.as_array()[0], pair.as_array()[1])) return bias;
    }
    return out;
  }
  if (!bias.is_object()) return bias;
  for (const auto& [key, value] : bias.as_object()) {
    const bool is_id =
        !key.empty() && std::ranges::all_of(key, [](char c) { return c >= '0' && c <= '9'; });
    if (is_id) {
      out[key] = value == json::Value(false) ? json::Value(-100.0) : value;
    } else {
      add(json::Value(key), value);
    }
  }
  return out;
}

// Accepts a prompt that is {"prompt_string"} or a list that mixes token ids and texts.
std::optional<ApiError> take_prompt(json::Object& o, const Tokenizer& tokenizer) {
  const json::Value* prompt = o.find("prompt");
  if (prompt == nullptr) return std::nullopt;
  if (prompt->is_object()) {
    const json::Value* media = prompt->find("multimodal_data");
    if (media != nullptr && media->is_array() && !media->as_array().empty())
      return bad_request("prompt", "'prompt.multimodal_data' is not supported");
    const json::Value* text = prompt->find("prompt_string");
    if (text == nullptr) return bad_request("prompt", "'prompt.prompt_string' is missing");
    json::Value copy = *text;
    o["prompt"] = std::move(copy);
    return std::nullopt;
  }
  if (!prompt->is_array()) return std::nullopt;
  const json::Array& parts = prompt->as_array();
  const auto is_text = [](const json::Value& v) { return v.is_string(); };
  const auto is_id = [](const json::Value& v) { return v.is_number(); };
  const bool mixed =
      std::ranges::any_of(parts, is_text) && std::ranges::any_of(parts, is_id) &&
      std::ranges::all_of(parts, [&](const json::Value& v) { return is_text(v) || is_id(v); });
  if (!mixed) return std::nullopt;
  json::Array ids;
  for (const json::Value& part : parts) {
    if (part.is_number()) {
      ids.push_back(part);
      continue;
    }
    const json::Array some = ids_of(tokenizer, part.as_string(), ids.empty());
    ids.insert(ids.end(), some.begin(), some.end());
  }
  o["prompt"] = std::move(ids);
  return std::nullopt;
}

// Turns off the samplers that the list leaves out. Its order has no effect.
std::optional<ApiError> take_samplers(json::Object& o) {
  const json::Value* list = o.find("samplers");
  if (list == nullptr || list->is_null()) return std::nullopt;
  if (!list->is_array()) return bad_request("samplers", "'samplers' must be an array of names");
  static const std::set<std::string> kKnown = {"penalties", "dry",    "top_n_sigma", "top_k",
                                               "typ_p",     "top_p",  "min_p",       "xtc",
                                               "typical_p", "infill", "temperature"};
  std::set<std::string> names;
  for (const json::Value& name : list->as_array()) {
    if (!name.is_string() || !kKnown.contains(name.as_string()))
      return bad_request("samplers", "'samplers' has an unknown name");
    names.insert(name.as_string());
  }
  if (names.contains("typical_p")) names.insert("typ_p");
  for (const auto& [name, field, off] : {std::tuple{"top_k", "top_k", 0},
                                         {"typ_p", "typical_p", 1},
                                         {"top_p", "top_p", 1},
                                         {"min_p", "min_p", 0},
                                         {"temperature", "temperature", 1}}) {
    if (!names.contains(name)) o[field] = off;
  }
  return std::nullopt;
}

bool is_negative(const json::Value* v) {
  return v != nullptr && v->is_number() && v->as_double() < 0;
}

}  // namespace

Parsed<LlamaRequest> parse_llama_request(const json::Value& body, const Tokenizer& tokenizer,
                                         const RequestLimits& limits) {
  LlamaRequest r;
  Fields fields(body);
  double milliseconds = 0.0;
  bool after_sampling = false;
  fields.read("n_probs", r.n_probs, 0, limits.max_logprobs);
  fields.read("return_tokens", r.return_tokens);
  fields.read("t_max_predict_ms", milliseconds, -1, 1e12);
  fields.read("post_sampling_probs", after_sampling);
  if (after_sampling && r.n_probs > 0) {
    fields.fail("post_sampling_probs",
                "'post_sampling_probs' is not supported: 'n_probs' are those of the model");
  }
  if (const json::Value* names = fields.get("response_fields")) {
    if (!names->is_array()) fields.fail("response_fields", "'response_fields' must be an array");
    for (const json::Value& name : names->is_array() ? names->as_array() : json::Array()) {
      if (!name.is_string()) fields.fail("response_fields", "'response_fields' must hold names");
      if (name.is_string()) r.response_fields.push_back(name.as_string());
    }
  }
  if (fields.error()) return *fields.error();
  r.max_predict_s = std::max(milliseconds, 0.0) / 1e3;
  r.body = body;
  json::Object& o = r.body.as_object();
  // Negative values mean no limit, and a random seed.
  for (const char* name : {"n_predict", "max_tokens", "seed"}) {
    if (is_negative(o.find(name))) o.erase(name);
  }
  if (const json::Value* bias = o.find("logit_bias")) {
    json::Value copy = openai_bias(*bias, tokenizer);
    o["logit_bias"] = std::move(copy);
  }
  for (const char* name : {"logprobs", "prompt_logprobs"}) o.erase(name);
  if (r.n_probs > 0) o["logprobs"] = r.n_probs;
  if (auto error = take_samplers(o)) return *error;
  if (auto error = take_prompt(o, tokenizer)) return *error;
  return r;
}

json::Object selected_fields(const json::Object& answer, const std::vector<std::string>& names) {
  if (names.empty()) return answer;
  const json::Value whole(answer);
  json::Object out;
  for (const std::string& name : names) {
    const json::Value* at = &whole;
    std::string_view rest = name;
    std::string_view last = rest;
    while (at != nullptr && !rest.empty()) {
      const size_t end = std::min(rest.find('/'), rest.size());
      last = rest.substr(0, end);
      at = at->find(last);
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    if (at != nullptr && !last.empty()) out[last] = *at;
  }
  return out;
}

}  // namespace freshet::server
