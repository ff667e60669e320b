#include "quantizer/calibration/windows.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "base/hash.h"
#include "base/json.h"
#include "base/mapped_file.h"
#include "base/utf8.h"
#include "tokenizer/template/chat_template.h"
#include "tokenizer/tokenizer.h"

namespace freshet::quantizer {
namespace {

class WindowReader {
 public:
  WindowReader(const std::string& file, const std::string& model, int64_t vocab,
               const WindowOptions& options)
      : file_(file), model_(model), vocab_(vocab), options_(options) {}

  Result<Windows> read() {
    FRESHET_ASSIGN_OR_RETURN(const MappedFile mapped, MappedFile::open(file_));
    const std::string_view text(reinterpret_cast<const char*>(mapped.bytes().data()),
                                mapped.bytes().size());
    const size_t start = text.find_first_not_of(" \t\r\n");
    if (start == std::string_view::npos) return invalid_argument("{} is empty", file_);
    if (text[start] == '[') {
      if (const auto lists = json::parse(text); lists.ok()) {
        FRESHET_RETURN_IF_ERROR(add_lists(*lists));
        return finish();
      }
    }
    if (text[start] == '{' && json::parse(first_line(text.substr(start))).ok()) {
      FRESHET_RETURN_IF_ERROR(add_lines(text));
    } else {
      FRESHET_RETURN_IF_ERROR(add_text(text));
    }
    return finish();
  }

 private:
  static std::string_view first_line(std::string_view text) {
    return text.substr(0, text.find('\n'));
  }
  bool full() const { return std::ssize(windows_) >= options_.samples; }

  Status load_tokenizer() {
    if (tokenizer_) return {};
    FRESHET_ASSIGN_OR_RETURN(auto loaded, tokenizer::Tokenizer::load(model_));
    tokenizer_.emplace(std::move(loaded));
    return {};
  }

  // One stream, in whole windows; a short text gives one short window.
  Status add_text(std::string_view text) {
    if (const size_t bad = find_invalid_utf8(text); bad < text.size())
      return invalid_argument("{} is no text: byte {} is not UTF-8", file_, bad);
    FRESHET_RETURN_IF_ERROR(load_tokenizer());
    const bool bos = tokenizer_->adds_bos() && tokenizer_->bos();
    const int64_t own = options_.length - (bos ? 1 : 0);
    const auto ids =
        tokenizer_->encode(text, {.add_special = false, .parse_special = options_.parse_special});
    const auto count = std::ssize(ids);
    for (int64_t at = 0; at < count && !full(); at += own) {
      if (at > 0 && at + own > count) break;
      auto& window = windows_.emplace_back();
      if (bos) window.push_back(*tokenizer_->bos());
      window.insert(window.end(), ids.begin() + at, ids.begin() + std::min(at + own, count));
    }
    return {};
  }

  Status add_ids(const json::Value& ids, const std::string& where) {
    if (!ids.is_array()) return invalid_argument("{}: token ids are not a list", where);
    auto& window = windows_.emplace_back();
    for (const json::Value& id : ids.as_array()) {
      const auto value = id.is_number() ? id.as_int64() : std::nullopt;
      if (!value || *value < 0 || *value >= vocab_)
        return invalid_argument("{}: a token id is not in the vocabulary of {}", where, vocab_);
      if (std::ssize(window) < options_.length) window.push_back(static_cast<int32_t>(*value));
    }
    if (window.empty()) windows_.pop_back();
    return {};
  }

  Status add_lists(const json::Value& lists) {
    size_t number = 0;
    for (const json::Value& list : lists.as_array()) {
      if (full()) break;
      FRESHET_RETURN_IF_ERROR(add_ids(list, fmt::format("{}, list {}", file_, number++)));
    }
    return {};
  }

  Status add_lines(std::string_view text) {
    for (int64_t line = 1; !text.empty() && !full(); ++line) {
      const std::string_view one = first_line(text);
      text.remove_prefix(std::min(one.size() + 1, text.size()));
      if (one.find_first_not_of(" \t\r") == std::string_view::npos) continue;
      const std::string where = fmt::format("{}, line {}", file_, line);
      const auto value = json::parse(one);
      if (!value.ok()) return value.status().with_context(where);
      FRESHET_RETURN_IF_ERROR(add_line(*value, where));
    }
    return {};
  }

  Status add_line(const json::Value& value, const std::string& where) {
    if (const json::Value* ids = value.find("input_ids")) return add_ids(*ids, where);
    FRESHET_RETURN_IF_ERROR(load_tokenizer());
    const json::Value* text = value.find("text");
    std::string own;
    bool special = tokenizer_->adds_bos(), parse = options_.parse_special;
    if (text != nullptr && text->is_string()) {
      own = text->as_string();
    } else if (value.find("messages") != nullptr) {
      FRESHET_ASSIGN_OR_RETURN(own, render(value, where));
      special = false;
      parse = true;
    } else {
      return invalid_argument("{}: expected \"text\", \"messages\" or \"input_ids\"", where);
    }
    std::vector<int32_t> ids =
        tokenizer_->encode(own, {.add_special = special, .parse_special = parse});
    if (std::ssize(ids) > options_.length) ids.resize(static_cast<size_t>(options_.length));
    if (!ids.empty()) windows_.push_back(std::move(ids));
    return {};
  }

  // A conversation as the chat template writes it.
  Result<std::string> render(const json::Value& value, const std::string& where) {
    json::Object context = value.as_object();
    const bool tools = context.find("tools") != nullptr;
    const std::string* source = tokenizer_->chat_template_for(tools);
    if (source == nullptr)
      return invalid_argument("{}: {} has no chat template for \"messages\"", where, model_);
    if (!template_) {
      FRESHET_ASSIGN_OR_RETURN(auto compiled, ChatTemplate::compile(*source));
      template_.emplace(std::move(compiled));
    }
    for (const auto& [name, token] : tokenizer_->special_tokens()) {
      if (context.find(name) == nullptr) context[name] = token;
    }
    auto text = template_->render(json::Value(std::move(context)));
    if (!text.ok()) return text.status().with_context(where);
    return text;
  }

  Result<Windows> finish() {
    if (windows_.empty()) return invalid_argument("{} has no tokens", file_);
    return std::move(windows_);
  }

  const std::string& file_;
  const std::string& model_;
  int64_t vocab_;
  const WindowOptions& options_;
  std::optional<tokenizer::Tokenizer> tokenizer_;
  std::optional<ChatTemplate> template_;
  Windows windows_;
};

}  // namespace

Result<CalibrationWindows> read_windows(const std::string& file, const std::string& model,
                                        int64_t vocab, const WindowOptions& options) {
  CalibrationWindows out;
  FRESHET_ASSIGN_OR_RETURN(out.windows, WindowReader(file, model, vocab, options).read());
  uint64_t hash = 0;
  for (const std::vector<int32_t>& window : out.windows) {
    out.tokens += std::ssize(window);
    for (const int32_t id : window) {
      if (id >= vocab)
        return invalid_argument(
            "{}: the tokenizer gives id {}, beyond the model's vocabulary of {}", file, id, vocab);
    }
    hash = hash_bytes(
        {reinterpret_cast<const uint8_t*>(window.data()), window.size() * sizeof(int32_t)}, hash);
  }
  out.hash = fmt::format("{:016x}", hash);
  return out;
}

}  // namespace freshet::quantizer
