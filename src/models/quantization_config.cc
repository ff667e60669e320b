#include "models/quantization_config.h"

#include <cctype>

namespace freshet::models {

const json::Value* quantization_config(const json::Value& config) {
  if (const json::Value* q = config.find("quantization_config")) return q;
  const json::Value* text = config.find("text_config");
  return text != nullptr ? text->find("quantization_config") : nullptr;
}

std::string quantization_text(const json::Value& quantization, const std::string& key,
                              std::string_view otherwise) {
  const json::Value* value = quantization.find(key);
  if (value == nullptr || !value->is_string()) return std::string(otherwise);
  std::string text = value->as_string();
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

}  // namespace freshet::models
