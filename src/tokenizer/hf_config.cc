#include "tokenizer/hf_config.h"

#include <algorithm>
#include <array>
#include <map>

#include "base/json.h"
#include "base/mapped_file.h"

namespace freshet::tokenizer {
namespace {

namespace fs = std::filesystem;

constexpr std::array<const char*, 7> kNamedTokens = {
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"};

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

// A missing file counts as an empty object.
Result<json::Value> read_config(const fs::path& path) {
  if (!is_file(path)) return json::Value(json::Object());
  return json::parse_file(path.string());
}

// "name" or {"content": "name"}; nullopt for anything else.
std::optional<std::string> token_text(const json::Value& value) {
  if (value.is_string()) return value.as_string();
  const json::Value* content = value.find("content");
  if (content == nullptr || !content->is_string()) return std::nullopt;
  return content->as_string();
}

// The defaults of transformers' classes for tokens that tokenizer_config.json does not name.
struct ClassTokens {
  std::string_view name;  // prefix of the class name
  std::array<const char*, 7> tokens;
};
constexpr ClassTokens kClassTokens[] = {
    {"Llama", {"<s>", "</s>", "<unk>"}},
    {"CodeLlama", {"<s>", "</s>", "<unk>"}},
    {"GPT2", {"<|endoftext|>", "<|endoftext|>", "<|endoftext|>"}},
    {"Gemma", {"<bos>", "<eos>", "<unk>", nullptr, "<pad>", nullptr, "<mask>"}},
    {"Qwen2", {nullptr, "<|endoftext|>", "<|endoftext|>", nullptr, "<|endoftext|>"}},
    {"Bert", {nullptr, nullptr, "[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]"}},
};

// tokenizer_config.json merged with special_tokens_map.json, which older folders use.
json::Object merged_config(const json::Value& config, const json::Value& map) {
  json::Object merged;
  if (config.is_object()) merged = config.as_object();
  if (merged.find("added_tokens_decoder") != nullptr || !map.is_object()) return merged;
  for (const auto& [key, value] : map.as_object()) merged[key] = value;
  return merged;
}

// The map that templates see. `config` comes from merged_config().
json::Object template_tokens(const json::Object& config) {
  json::Object tokens;
  const json::Value* type = config.find("tokenizer_class");
  const std::string name = type != nullptr && type->is_string() ? type->as_string() : "";
  for (const ClassTokens& row : kClassTokens) {
    if (!name.starts_with(row.name)) continue;
    for (size_t i = 0; i < kNamedTokens.size(); ++i) {
      if (row.tokens[i] != nullptr && config.find(kNamedTokens[i]) == nullptr)
        tokens[kNamedTokens[i]] = row.tokens[i];
    }
  }
  const auto add = [&](const std::string& key, const json::Value& value) {
    if (auto text = token_text(value)) tokens[key] = *std::move(text);
  };
  for (const auto& [key, value] : config) {
    if (key.ends_with("_token")) add(key, value);
    if (key == "extra_special_tokens" && value.is_object()) {
      for (const auto& [extra, token] : value.as_object()) add(extra, token);
    }
    if (key == "additional_special_tokens" && value.is_array()) {
      json::Array texts;
      for (const json::Value& token : value.as_array()) {
        if (auto text = token_text(token)) texts.emplace_back(*std::move(text));
      }
      tokens[key] = std::move(texts);
    }
  }
  return tokens;
}

// "chat_template": a text, a list of {"name", "template"}, or an object from names to texts.
void read_template(const json::Value& config, TokenizerParts& parts) {
  const json::Value* value = config.find("chat_template");
  if (value == nullptr) return;
  if (value->is_string()) parts.set_template("default", value->as_string());
  if (value->is_array()) {
    for (const json::Value& entry : value->as_array()) {
      const std::string name = entry.get_string("name", "");
      if (!name.empty()) parts.set_template(name, entry.get_string("template", ""));
    }
  }
  if (value->is_object()) {
    for (const auto& [name, text] : value->as_object()) {
      if (text.is_string() && !name.empty()) parts.set_template(name, text.as_string());
    }
  }
}

Status add_template_file(const std::string& name, const fs::path& path, TokenizerParts& parts) {
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path.string()));
  parts.set_template(name, std::string(file.bytes().begin(), file.bytes().end()));
  return {};
}

// Template files take precedence over the configuration: chat_template.jinja is the default, and
// additional_chat_templates/NAME.jinja has the name NAME.
Status read_template_files(const fs::path& directory, TokenizerParts& parts) {
  const fs::path alone = directory / "chat_template.jinja";
  if (is_file(alone)) {
    parts.named_templates.clear();
    FRESHET_RETURN_IF_ERROR(add_template_file("default", alone, parts));
  }
  std::vector<fs::path> named;
  std::error_code error;
  for (fs::directory_iterator it(directory / "additional_chat_templates", error), end;
       !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".jinja" && is_file(it->path())) named.push_back(it->path());
  }
  std::sort(named.begin(), named.end());
  for (const fs::path& path : named)
    FRESHET_RETURN_IF_ERROR(add_template_file(path.stem().string(), path, parts));
  return {};
}

void add_eos_ids(const json::Value& config, TokenizerParts& parts) {
  const json::Value* value = config.find("eos_token_id");
  const auto add = [&](const json::Value& id) {
    const auto number = id.is_number() ? id.as_int64() : std::nullopt;
    if (number && *number >= 0 && *number < parts.vocab.size()) {
      parts.end_of_generation.push_back(static_cast<int32_t>(*number));
    }
  };
  if (value == nullptr) return;
  if (value->is_array()) {
    for (const json::Value& id : value->as_array()) add(id);
  } else {
    add(*value);
  }
}

// A SentencePiece or tiktoken vocabulary in a model's directory: its special tokens are parsed from
// text, and the tokens that tokenizer_config.json adds are added.
void apply_config(const json::Value& config, TokenizerParts& parts) {
  std::map<int32_t, AddedToken> tokens;
  for (int32_t id = 0; id < parts.vocab.size(); ++id) {
    if (static_cast<size_t>(id) < parts.special.size() && parts.special[static_cast<size_t>(id)]) {
      tokens[id] = {.id = id, .content = std::string(parts.vocab.text(id)), .special = true};
    }
  }
  const json::Value* added = config.find("added_tokens_decoder");
  if (added != nullptr && added->is_object()) {
    const int64_t limit = largest_id(parts.vocab.count() + added->as_object().size());
    for (const auto& [key, value] : added->as_object()) {
      AddedToken token{.content = value.get_string("content", "")};
      const bool digits =
          !key.empty() && key.size() < 10 && key.find_first_not_of("0123456789") == key.npos;
      if (!digits || std::stoll(key) > limit || token.content.empty()) continue;
      token.id = std::stoi(key);
      token.lstrip = value.get_bool("lstrip", false);
      token.rstrip = value.get_bool("rstrip", false);
      token.single_word = value.get_bool("single_word", false);
      token.special = value.get_bool("special", false);
      parts.vocab.set(token.id, token.content);
      const auto size = static_cast<size_t>(parts.vocab.size());
      parts.special.resize(size);
      parts.bytes.resize(size);
      if (!parts.kinds.empty()) parts.kinds.resize(size);
      const auto i = static_cast<size_t>(token.id);
      parts.special[i] = token.special;
      parts.bytes[i] = parts.vocab.text(token.id);
      tokens[token.id] = std::move(token);
    }
  }
  std::vector<AddedToken> list;
  for (auto& [id, token] : tokens) list.push_back(std::move(token));
  parts.raw_tokens = AddedTokens(std::move(list));
  parts.hide_control = false;
}

// Where the configuration adds bos and eos. The classes of Llama and Gemma follow it even if
// tokenizer.json has a template of its own.
void apply_bos_eos(const json::Value& config, bool json_vocabulary, TokenizerParts& parts) {
  const std::string name = config.get_string("tokenizer_class", "");
  const bool llama =
      name.starts_with("Llama") || name.starts_with("CodeLlama") || name.starts_with("Gemma");
  if (json_vocabulary && !llama) return;
  parts.prefix.clear();
  parts.suffix.clear();
  if (config.get_bool("add_bos_token", llama) && parts.bos) parts.prefix = {*parts.bos};
  if (config.get_bool("add_eos_token", false) && parts.eos) parts.suffix = {*parts.eos};
}

// An unreadable generation_config.json is ignored, as in transformers.
json::Value read_generation_config(const fs::path& directory) {
  auto generation = read_config(directory / "generation_config.json");
  return generation.ok() ? std::move(generation).value() : json::Value(json::Object());
}

}  // namespace

Status read_hf_config(const fs::path& directory, bool json_vocabulary, TokenizerParts& parts) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value own, read_config(directory / "tokenizer_config.json"));
  FRESHET_ASSIGN_OR_RETURN(const json::Value map,
                           read_config(directory / "special_tokens_map.json"));
  const json::Value config(merged_config(own, map));
  const bool has_config = is_file(directory / "tokenizer_config.json");
  if (has_config && !json_vocabulary) apply_config(config, parts);
  const std::array<std::optional<int32_t>*, 7> ids = {
      &parts.bos, &parts.eos, &parts.unk, &parts.sep, &parts.pad, &parts.cls, &parts.mask};
  for (size_t i = 0; i < kNamedTokens.size(); ++i) {
    const json::Value* value = config.find(kNamedTokens[i]);
    const auto text = value == nullptr ? std::nullopt : token_text(*value);
    const int32_t found = text && !text->empty() ? parts.vocab.find(*text) : -1;
    if (found >= 0) *ids[i] = found;
  }
  if (!config.as_object().empty()) parts.special_tokens = template_tokens(config.as_object());
  if (has_config) apply_bos_eos(config, json_vocabulary, parts);
  read_template(config, parts);
  FRESHET_ASSIGN_OR_RETURN(const json::Value separate,
                           read_config(directory / "chat_template.json"));
  read_template(separate, parts);
  FRESHET_RETURN_IF_ERROR(read_template_files(directory, parts));
  add_eos_ids(read_generation_config(directory), parts);
  if (parts.end_of_generation.empty()) {
    const auto model = read_config(directory / "config.json");
    if (model.ok()) {
      add_eos_ids(*model, parts);
      const json::Value* text = model->find("text_config");  // of multimodal models
      if (parts.end_of_generation.empty() && text != nullptr) add_eos_ids(*text, parts);
    }
  }
  return {};
}

}  // namespace freshet::tokenizer
