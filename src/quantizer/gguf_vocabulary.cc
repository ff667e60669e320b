#include "quantizer/gguf_vocabulary.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "base/mapped_file.h"
#include "quantizer/tokenizer_facts.h"
#include "tokenizer/gguf_vocab.h"
#include "tokenizer/tokenizer_parts.h"

namespace freshet::quantizer {
namespace {

using loader::GgufWriter;
using tokenizer::GgufVocab;

enum TokenType : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

struct Vocabulary {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<std::string> merges;  // "a b"
};

Result<Vocabulary> read_tokens(const json::Value& root, const tokenizer::Tokenizer& tokenizer,
                               int vocab_size) {
  const json::Value* model = root.find("model");
  const json::Value* vocab = model->find("vocab");
  Vocabulary v;
  v.tokens.resize(static_cast<size_t>(vocab_size));
  v.types.assign(static_cast<size_t>(vocab_size), kUnused);
  const auto put = [&](const std::string& token, int64_t id, int32_t type) -> Status {
    if (id < 0 || id >= vocab_size)
      return invalid_argument("token '{}' has id {}; the model has {}", token, id, vocab_size);
    v.tokens[static_cast<size_t>(id)] = token;
    v.types[static_cast<size_t>(id)] = type;
    return {};
  };
  for (const auto& [token, id] : vocab->as_object()) {
    const bool byte = token.size() == 6 && token.starts_with("<0x") && token.ends_with(">") &&
                      model->get_bool("byte_fallback", false);
    FRESHET_RETURN_IF_ERROR(
        put(token, id.is_number() ? id.as_int64().value_or(-1) : -1, byte ? kByte : kNormal));
  }
  if (const json::Value* added = root.find("added_tokens"); added != nullptr && added->is_array()) {
    for (const json::Value& t : added->as_array()) {
      const std::string content = t.get_string("content", "");
      if (content.empty()) continue;
      const auto id = tokenizer.token_to_id(content);  // may differ from the id in the file
      FRESHET_RETURN_IF_ERROR(put(content, id ? *id : t.get_int("id", -1),
                                  t.get_bool("special", false) ? kControl : kUserDefined));
    }
  }
  for (size_t i = 0; i < v.tokens.size(); ++i) {
    if (v.types[i] == kUnused) v.tokens[i] = tokenizer::filler_token(i);
  }
  if (const json::Value* merges = model->find("merges"); merges != nullptr && merges->is_array()) {
    for (const json::Value& m : merges->as_array()) {
      if (m.is_string()) v.merges.push_back(m.as_string());
      if (m.is_array() && m.as_array().size() == 2 && m.as_array()[0].is_string() &&
          m.as_array()[1].is_string())
        v.merges.push_back(m.as_array()[0].as_string() + " " + m.as_array()[1].as_string());
    }
  }
  return v;
}

// SentencePiece readers merge by score: the earlier a merge, the higher the score of its result.
std::vector<float> scores_of(const Vocabulary& v) {
  std::unordered_map<std::string, size_t> rank;
  for (size_t i = 0; i < v.merges.size(); ++i) {
    std::string whole = v.merges[i];
    if (const size_t space = whole.find(' '); space != whole.npos) whole.erase(space, 1);
    rank.emplace(std::move(whole), i);
  }
  std::vector<float> scores;
  for (size_t i = 0; i < v.tokens.size(); ++i) {
    const auto found = rank.find(v.tokens[i]);
    const size_t r = found != rank.end() ? found->second : v.merges.size() + i;
    scores.push_back(v.types[i] == kNormal ? -static_cast<float>(r) : 0.0f);
  }
  return scores;
}

// The special ids, in the order in which GGUF readers name them. If generation can end in several
// ways, there are an end of turn (eot) and an end of message (eom) besides eos.
void set_special_ids(const tokenizer::Tokenizer& t, GgufVocab& v) {
  const auto& parts = t.parts();
  v.bos = t.bos();
  v.eos = t.eos();
  v.unk = t.unk();
  v.pad = t.pad();
  v.sep = parts.sep;
  v.cls = parts.cls;
  v.mask = parts.mask;
  for (const int32_t id : t.end_of_generation()) {
    if (t.eos() == id) continue;
    const bool message = t.token_text(id).find("eom") != std::string_view::npos;
    std::optional<int64_t>& place = message || v.eot ? v.eom : v.eot;
    if (!place) place = id;
  }
  const auto is_just = [](const std::vector<int32_t>& ids, std::optional<int32_t> id) {
    return id && ids == std::vector<int32_t>{*id};
  };
  v.add_bos = is_just(parts.prefix, t.bos());
  v.add_eos = is_just(parts.suffix, t.eos());
}

void write_special_ids(const GgufVocab& v, GgufWriter& out) {
  for (const auto& [key, id] : {std::pair("bos", v.bos),
                                {"eos", v.eos},
                                {"eot", v.eot},
                                {"eom", v.eom},
                                {"unknown", v.unk},
                                {"seperator", v.sep},
                                {"padding", v.pad},
                                {"cls", v.cls},
                                {"mask", v.mask}}) {
    if (id) out.add_u32(fmt::format("tokenizer.ggml.{}_token_id", key), static_cast<uint32_t>(*id));
  }
  out.add_bool("tokenizer.ggml.add_bos_token", *v.add_bos);
  out.add_bool("tokenizer.ggml.add_eos_token", *v.add_eos);
}

void write_templates(const tokenizer::TokenizerParts& parts, GgufWriter& out) {
  if (parts.chat_template) out.add_string("tokenizer.chat_template", *parts.chat_template);
  std::vector<std::string> names;
  for (const auto& [name, text] : parts.named_templates) {
    names.push_back(name);
    out.add_string(fmt::format("tokenizer.chat_template.{}", name), text);
  }
  if (!names.empty()) out.add_strings("tokenizer.chat_templates", names);
}

// Whether two tokenizers have the same tokens under the same ids.
bool same_tokens(const tokenizer::Tokenizer& a, const tokenizer::Tokenizer& b) {
  if (a.vocab_size() != b.vocab_size()) return false;
  for (int32_t id = 0; id < a.vocab_size(); ++id) {
    if (a.token_text(id) != b.token_text(id) || a.token_bytes(id) != b.token_bytes(id) ||
        a.is_special(id) != b.is_special(id))
      return false;
  }
  return true;
}

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

// Writes to Freshet's own keys the information that the other keys cannot express. `text`:
// tokenizer.json.
Status add_the_rest(const std::string& path, const tokenizer::Tokenizer& folder,
                    const GgufVocab& vocab, TokenizerFacts facts, GgufWriter& out,
                    const std::function<void(const std::string&)>& warn) {
  auto plain = tokenizer::tokenizer_from_gguf(vocab);
  if (!plain.ok()) return plain.status().with_context(path);
  const auto& want = folder.parts();
  const auto& got = plain->parts();
  // "llama" vocabularies are merged by token scores, which gives the same result for nearly all
  // texts, but not for all.
  const bool whole = facts.sentencepiece || !facts.unsaid.empty() || !same_tokens(folder, *plain);
  if (whole) {
    FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
    out.add_string("tokenizer.huggingface.json",
                   {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()});
  }
  if (whole || got.prefix != want.prefix) out.add_i32s("freshet.tokenizer.prefix", want.prefix);
  if (whole || got.suffix != want.suffix) out.add_i32s("freshet.tokenizer.suffix", want.suffix);
  if (whole || got.end_of_generation != want.end_of_generation)
    out.add_i32s("freshet.tokenizer.ends", want.end_of_generation);
  if (whole || json::Value(folder.special_tokens()) != json::Value(plain->special_tokens()))
    out.add_string("freshet.tokenizer.special_tokens",
                   json::write(json::Value(folder.special_tokens())));
  if (got.prefix != want.prefix || got.suffix != want.suffix)
    facts.unsaid.emplace_back("post_processor's tokens");
  const auto known = [&](int32_t id) {
    return id == vocab.eos || id == vocab.eot || id == vocab.eom;
  };
  if (!std::all_of(want.end_of_generation.begin(), want.end_of_generation.end(), known))
    facts.unsaid.emplace_back("more than three ids that end a generation");
  if (!facts.unsaid.empty()) {
    warn(
        fmt::format("{}: GGUF has no key for {}: Freshet reads the file as it reads the folder, "
                    "other programs may not",
                    path, listed(facts.unsaid)));
  }
  return {};
}

// A folder whose vocabulary is not in a tokenizer.json.
Status check_for_others(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool vocabulary = name == "vocab.txt" || name == "vocab.json" || name == "merges.txt" ||
                            name.ends_with(".model") || name.ends_with(".tiktoken");
    if (!vocabulary) continue;
    return unsupported("{}: only vocabularies in a tokenizer.json can be written to GGUF",
                       entry.path().string());
  }
  return {};
}

}  // namespace

Status add_vocabulary(const std::string& folder, int vocab_size, GgufWriter& out,
                      const std::function<void(const std::string&)>& warn) {
  const std::string path = folder + "/tokenizer.json";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    FRESHET_RETURN_IF_ERROR(check_for_others(folder));
    warn(fmt::format("{} has no vocabulary, so the GGUF file has none", folder));
    out.add_string("tokenizer.ggml.model", "none");
    return {};
  }
  // Also validates everything that is read below.
  FRESHET_ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::load(folder));
  FRESHET_ASSIGN_OR_RETURN(const json::Value root, json::parse_file(path));
  auto facts = read_tokenizer_facts(root);
  if (!facts.ok()) return facts.status().with_context(path);
  auto vocabulary = read_tokens(root, tokenizer, vocab_size);
  if (!vocabulary.ok()) return vocabulary.status().with_context(path);
  GgufVocab v;
  v.model = facts->sentencepiece ? "llama" : "gpt2";
  v.pre = facts->pre;
  if (facts->sentencepiece) {
    const std::string unknown = root.find("model")->get_string("unk_token", "<unk>");
    for (size_t i = 0; i < vocabulary->tokens.size(); ++i) {
      if (vocabulary->tokens[i] == unknown) vocabulary->types[i] = kUnknown;
    }
    v.scores = scores_of(*vocabulary);
    v.add_space_prefix = facts->space_prefix;
  } else {
    v.merges.assign(vocabulary->merges.begin(), vocabulary->merges.end());
  }
  v.tokens.assign(vocabulary->tokens.begin(), vocabulary->tokens.end());
  v.types = vocabulary->types;
  set_special_ids(tokenizer, v);
  out.add_string("tokenizer.ggml.model", v.model);
  if (facts->sentencepiece) {
    out.add_f32s("tokenizer.ggml.scores", v.scores);
    out.add_bool("tokenizer.ggml.add_space_prefix", facts->space_prefix);
  } else {
    out.add_string("tokenizer.ggml.pre", v.pre);
    out.add_strings("tokenizer.ggml.merges", vocabulary->merges);
  }
  out.add_strings("tokenizer.ggml.tokens", vocabulary->tokens);
  out.add_i32s("tokenizer.ggml.token_type", vocabulary->types);
  write_special_ids(v, out);
  write_templates(tokenizer.parts(), out);
  return add_the_rest(path, tokenizer, v, *std::move(facts), out, warn);
}

}  // namespace freshet::quantizer
