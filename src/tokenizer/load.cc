// Detects the format of a path, and reads the configuration files next to a vocabulary.
#include <algorithm>
#include <filesystem>

#include "base/json.h"
#include "base/mapped_file.h"
#include "tokenizer/gguf_vocab.h"
#include "tokenizer/hf_config.h"
#include "tokenizer/tokenizer_parts.h"

namespace freshet::tokenizer {
namespace {

namespace fs = std::filesystem;

std::string_view view(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// Lines of a tiktoken file: Base64, a space, digits.
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
    std::error_code error;
    if (fs::is_regular_file(directory / name, error)) return (directory / name).string();
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

}  // namespace

PartsResult parse_wordpiece_vocab(std::string_view text, const std::string& name) {
  // BERT's vocab.txt: one token per line; the line number is the id. The rest of the pipeline is
  // BERT's default.
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
    FRESHET_RETURN_IF_ERROR(read_hf_config(path, json, *parts));
  }
  guess_special_ids(*parts);
  // If no file says where generation ends, the tokens are found by their names.
  if (parts->end_of_generation.empty()) add_named_ends(*parts);
  if (Status status = finish_parts(*parts); !status.ok()) return status.with_context(vocabulary);
  return Tokenizer(parts);
}

}  // namespace freshet::tokenizer
