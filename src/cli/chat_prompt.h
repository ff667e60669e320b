// Renders a conversation with the model's chat template.
//
// Immutable after make(); thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "engine/picture_text.h"
#include "tokenizer/chat_renderer.h"
#include "tokenizer/tokenizer.h"

namespace freshet::cli {

// {"role": role, "content": content}
json::Value message(std::string_view role, std::string_view content);
// A user's message whose content is parts: pictures as {"type": "image", "path": file}, then the
// text.
json::Value message_with_pictures(const std::vector<std::string>& files, std::string_view text);
// The files of all pictures in the messages, in order.
std::vector<std::string> picture_files(const json::Array& messages);
// The texts of a message, and "[file]" for each picture.
std::string shown_content(const json::Value& message);

// A picture from a file of this machine. Errors name the file; one is that the model reads none.
Result<engine::Picture> read_picture_file(const std::string& file, const Engine& engine);

class ChatPrompt {
 public:
  // The tokenizer's template, or the one in `template_file` unless that is empty. The tokenizer
  // must outlive the result. An error if there is none.
  static Result<ChatPrompt> make(const tokenizer::Tokenizer& tokenizer,
                                 const std::string& template_file);
  // The same; nullopt if there is none.
  static Result<std::optional<ChatPrompt>> find(const tokenizer::Tokenizer& tokenizer,
                                                const std::string& template_file);

  // The template's text.
  const std::string& source() const { return renderer_.source(false); }

  // `extra`: additional template variables.
  Result<std::string> render(const json::Array& messages, const json::Object& extra = {}) const;
  Result<std::vector<int32_t>> encode(const json::Array& messages) const;
  // `text`: as returned by render().
  std::vector<int32_t> encode_text(const std::string& text) const;
  // The same with the pictures of the messages. From read_with() on, render() marks pictures.
  Result<engine::PictureText> encode_text(const std::string& text,
                                          const std::vector<engine::Picture>& pictures) const;
  // How the model takes pictures; nullptr: not at all. Must outlive this.
  void read_with(const PictureReading* reading) { reading_ = reading; }

 private:
  ChatPrompt(const tokenizer::Tokenizer& tokenizer, tokenizer::ChatRenderer renderer)
      : tokenizer_(&tokenizer), renderer_(std::move(renderer)) {}

  const tokenizer::Tokenizer* tokenizer_;
  tokenizer::ChatRenderer renderer_;
  const PictureReading* reading_ = nullptr;
};

}  // namespace freshet::cli
