// Finding out what a path holds, and the configuration files beside a vocabulary.
#include <algorithm>
#include <filesystem>
#include <map>

#include "base/json.h"
#include "base/mapped_file.h"
#include "tokenizer/gguf_vocab.h"
#include "tokenizer/tokenizer_parts.h"

namespace freshet::tokenizer {
namespace {

namespace fs = std::filesystem;

std::string_view view(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

// tiktoken's lines: Base64, a space, digits.
bool looks_like_tiktoken(std::string_view text) {
  const std::string_view line = text.substr(0, std::min(text.find('\n'), text.size()));
  const size_t space = line.find(' ');
  return space != line.npos && space > 0 && space + 1 < line.size() &&
         line.find_first_not_of(
             "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=") == space &&
         line.find_first_not_of("0123456789\r", space + 1) == line.npos;
}

PartsResult parse_bare(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  const std::string_view bytes = view(file);
  const size_t first = bytes.find_first_not_of(" \t\r\n");
  if (first == bytes.npos) return invalid_argument("{}: the file is empty", path);
  if (bytes[first] == '{') return parse_tokenizer_json(bytes, path);
  if (looks_like_tiktoken(bytes)) return parse_tiktoken(bytes, path);
  if (fs::path(path).extension() == ".txt") return parse_wordpiece_vocab(bytes, path);
  return parse_sentencepiece(bytes, path);
}

Result<std::string> find_vocabulary(const fs::path& directory) {
  for (const char* name : {"tokenizer.json", "tokenizer.model", "vocab.txt"}) {
    if (is_file(directory / name)) return (directory / name).string();
  }
  std::vector<std::string> others;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const std::string extension = entry.path().extension().string();
    if (extension == ".tiktoken" || extension == ".model") others.push_back(entry.path().string());
  }
  std::sort(others.begin(), others.end());
  if (!others.empty()) return others.front();
  return not_found("{} holds no tokenizer.json, tokenizer.model, *.tiktoken or vocab.txt",
                   directory.string());
}

// A missing file counts as an empty object.
Result<json::Value> read_config(const fs::path& path) {
  if (!is_file(path)) return json::Value(json::Object());
  return json::parse_file(path.string());
}

// "name" or {"content": "name"}.
std::string token_name(const json::Value& config, std::string_view key) {
  const json::Value* value = config.find(key);
  if (value == nullptr) return {};
  return value->is_string() ? value->as_string() : value->get_string("content", "");
}

void read_template(const json::Value& config, TokenizerParts& parts) {
  const json::Value* value = config.find("chat_template");
  if (value == nullptr) return;
  if (value->is_string()) parts.chat_template = value->as_string();
  if (!value->is_array()) return;
  for (const json::Value& entry : value->as_array()) {
    const std::string name = entry.get_string("name", "");
    std::string text = entry.get_string("template", "");
    if (name == "default") {
      parts.chat_template = std::move(text);
    } else if (!name.empty()) {
      parts.named_templates.emplace_back(name, std::move(text));
    }
  }
}

Status read_text(const fs::path& path, std::optional<std::string>& text) {
  if (!is_file(path)) return {};
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path.string()));
  text = std::string(view(file));
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

// A SentencePiece or tiktoken vocabulary in a model's directory: its special tokens count in text,
// and those that tokenizer_config.json adds are added.
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

// Where bos and eos go by the configuration. The classes of Llama and Gemma follow it even where
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

Status read_directory(const fs::path& directory, bool json_vocabulary, TokenizerParts& parts) {
  const auto config = read_config(directory / "tokenizer_config.json");
  if (!config.ok()) return config.status();
  const auto find = [&](std::string_view key, std::optional<int32_t>& id) {
    const std::string name = token_name(*config, key);
    const int32_t found = name.empty() ? -1 : parts.vocab.find(name);
    if (found >= 0) id = found;
  };
  const bool has_config = is_file(directory / "tokenizer_config.json");
  if (has_config && !json_vocabulary) apply_config(*config, parts);
  find("bos_token", parts.bos);
  find("eos_token", parts.eos);
  find("unk_token", parts.unk);
  find("pad_token", parts.pad);
  if (has_config) apply_bos_eos(*config, json_vocabulary, parts);
  read_template(*config, parts);
  const auto separate = read_config(directory / "chat_template.json");
  if (!separate.ok()) return separate.status();
  read_template(*separate, parts);
  FRESHET_RETURN_IF_ERROR(read_text(directory / "chat_template.jinja", parts.chat_template));
  const auto generation = read_config(directory / "generation_config.json");
  if (!generation.ok()) return generation.status();
  add_eos_ids(*generation, parts);
  if (parts.end_of_generation.empty()) {
    const auto model = read_config(directory / "config.json");
    if (model.ok()) add_eos_ids(*model, parts);
  }
  return {};
}

}  // namespace

PartsResult parse_wordpiece_vocab(std::string_view text, const std::string& name) {
  // BERT's own file: a token a line, its number the id. The rest of the machinery is BERT's
  // default.
  json::Object vocab;
  for (int32_t id = 0; !text.empty(); ++id) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    while (line.ends_with('\r') || line.ends_with(' ')) line.remove_suffix(1);
    if (find_invalid_utf8(line) != line.npos) {
      return invalid_argument("{}: line {} is not valid UTF-8", name, id + 1);
    }
    vocab[line] = json::Value(id);
  }
  const auto typed = [](std::string_view type) {
    json::Object object;
    object["type"] = json::Value(type);
    return object;
  };
  json::Object model = typed("WordPiece"), root, post = typed("BertProcessing");
  json::Array added;
  for (const std::string_view token : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}) {
    if (vocab.find(token) == nullptr) continue;
    json::Object entry;
    entry["content"] = json::Value(token);
    entry["special"] = json::Value(true);
    added.emplace_back(std::move(entry));
  }
  for (const std::string_view key : {"cls", "sep"}) {
    const std::string_view token = key == "cls" ? "[CLS]" : "[SEP]";
    const json::Value* id = vocab.find(token);
    if (id == nullptr) return invalid_argument("{}: there is no token {}", name, token);
    post[key] = json::Value(json::Array{json::Value(token), *id});
  }
  model["unk_token"] = json::Value("[UNK]");
  model["vocab"] = json::Value(std::move(vocab));
  root["normalizer"] = json::Value(typed("BertNormalizer"));
  root["pre_tokenizer"] = json::Value(typed("BertPreTokenizer"));
  root["decoder"] = json::Value(typed("WordPiece"));
  root["post_processor"] = json::Value(std::move(post));
  root["added_tokens"] = json::Value(std::move(added));
  root["model"] = json::Value(std::move(model));
  return build_tokenizer_json(json::Value(std::move(root)), name);
}

Result<Tokenizer> Tokenizer::load(const std::string& path) {
  std::error_code error;
  const bool directory = fs::is_directory(path, error);
  if (!directory) {
    FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
    if (view(file).starts_with("GGUF")) {
      FRESHET_ASSIGN_OR_RETURN(const auto gguf, loader::GgufFile::parse(file.bytes(), path));
      auto vocab = read_gguf_vocab(gguf);
      if (!vocab.ok()) return vocab.status().with_context(path);
      auto tokenizer = tokenizer_from_gguf(*vocab);
      return tokenizer.ok() ? tokenizer : tokenizer.status().with_context(path);
    }
  }
  std::string vocabulary = path;
  if (directory) {
    FRESHET_ASSIGN_OR_RETURN(vocabulary, find_vocabulary(path));
  }
  FRESHET_ASSIGN_OR_RETURN(const std::shared_ptr<TokenizerParts> parts, parse_bare(vocabulary));
  if (directory) {
    const bool json = fs::path(vocabulary).extension() == ".json";
    FRESHET_RETURN_IF_ERROR(read_directory(path, json, *parts));
  }
  guess_special_ids(*parts);
  // With nothing said about where generation ends, names have to do.
  if (parts->end_of_generation.empty()) add_named_ends(*parts);
  if (Status status = finish_parts(*parts); !status.ok()) return status.with_context(vocabulary);
  return Tokenizer(parts);
}

}  // namespace freshet::tokenizer
