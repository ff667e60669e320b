#include "cli/chat_prompt.h"

#include <utility>

#include "base/mapped_file.h"
#include "cli/media_reader.h"

namespace freshet::cli {
namespace {

constexpr size_t kMaxTemplate = size_t{1} << 20;

Result<std::string> read_template(const std::string& file) {
  if (file.empty()) return std::string();
  FRESHET_ASSIGN_OR_RETURN(const MappedFile mapped, MappedFile::open(file));
  if (mapped.bytes().size() > kMaxTemplate)
    return invalid_argument("{}: too large for a chat template", file);
  return std::string(mapped.bytes().begin(), mapped.bytes().end());
}

}  // namespace

json::Value message(std::string_view role, std::string_view content) {
  json::Object m;
  m["role"] = role;
  m["content"] = content;
  return m;
}

json::Value message_with_pictures(const std::vector<std::string>& files, std::string_view text) {
  json::Array parts;
  for (const std::string& file : files) {
    json::Object picture;
    picture["type"] = "image";
    picture["path"] = file;
    parts.emplace_back(std::move(picture));
  }
  json::Object words;
  words["type"] = "text";
  words["text"] = text;
  parts.emplace_back(std::move(words));
  json::Object m;
  m["role"] = "user";
  m["content"] = std::move(parts);
  return m;
}

std::vector<std::string> picture_files(const json::Array& messages) {
  std::vector<std::string> files;
  for (const json::Value& m : messages) {
    const json::Value* content = m.find("content");
    if (content == nullptr || !content->is_array()) continue;
    for (const json::Value& part : content->as_array()) {
      if (part.get_string("type", "") == "image") files.push_back(part.get_string("path", ""));
    }
  }
  return files;
}

std::string shown_content(const json::Value& message) {
  const json::Value* content = message.find("content");
  std::string shown;
  for (const std::string& file : picture_files({message})) shown += "[" + file + "] ";
  return shown + tokenizer::text_of_content(content);
}

Result<engine::Picture> read_picture_file(const std::string& file, const Engine& engine) {
  if (engine.pictures() == nullptr)
    return invalid_argument("this model reads text only: it takes no pictures");
  constexpr media::PictureLimits kLimits;
  FRESHET_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes,
                           read_media_file(file, kLimits.encoded_bytes));
  auto picture = engine::read_picture(bytes, *engine.pictures(), engine.max_model_len(), kLimits);
  if (!picture.ok()) return picture.status().with_context(file);
  return picture;
}

Result<std::optional<ChatPrompt>> ChatPrompt::find(const tokenizer::Tokenizer& tokenizer,
                                                   const std::string& template_file) {
  FRESHET_ASSIGN_OR_RETURN(const std::string source, read_template(template_file));
  auto renderer = tokenizer::ChatRenderer::make(tokenizer, source);
  if (!renderer.ok()) return renderer.status().with_context("chat template");
  std::optional<ChatPrompt> prompt;
  if (!renderer->empty()) prompt = ChatPrompt(tokenizer, std::move(renderer).value());
  return prompt;
}

Result<ChatPrompt> ChatPrompt::make(const tokenizer::Tokenizer& tokenizer,
                                    const std::string& template_file) {
  FRESHET_ASSIGN_OR_RETURN(std::optional<ChatPrompt> prompt, find(tokenizer, template_file));
  if (!prompt) {
    return invalid_argument(
        "this model has no chat template: it continues text (freshet run), or give "
        "--chat-template FILE");
  }
  return *std::move(prompt);
}

Result<std::string> ChatPrompt::render(const json::Array& messages,
                                       const json::Object& extra) const {
  auto text =
      renderer_.render({.messages = messages,
                        .variables = extra,
                        .picture_marker = reading_ != nullptr ? reading_->settings.marker : ""});
  if (!text.ok()) return text.status().with_context("chat template");
  return text;
}

Result<std::vector<int32_t>> ChatPrompt::encode(const json::Array& messages) const {
  FRESHET_ASSIGN_OR_RETURN(const std::string text, render(messages));
  return encode_text(text);
}

Result<engine::PictureText> ChatPrompt::encode_text(
    const std::string& text, const std::vector<engine::Picture>& pictures) const {
  if (pictures.empty()) return engine::PictureText{encode_text(text), {}};
  return engine::expand_pictures(text, pictures, *reading_, *tokenizer_, {.add_special = false});
}

std::vector<int32_t> ChatPrompt::encode_text(const std::string& text) const {
  // The template itself writes the special tokens.
  return tokenizer_->encode(text, {.add_special = false});
}

}  // namespace freshet::cli
