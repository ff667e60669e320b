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

int quantization_bits(const json::Value& config) {
  const json::Value* q = quantization_config(config);
  if (q == nullptr) return 4;
  const json::Value* bits = q->find("bits");
  const json::Value* groups = q->find("config_groups");
  if (bits == nullptr && groups != nullptr && groups->is_object()) {
    for (const auto& [name, group] : groups->as_object()) {
      const json::Value* weights = group.find("weights");
      if (weights != nullptr && bits == nullptr) bits = weights->find("num_bits");
    }
  }
  const int64_t n = bits != nullptr && bits->is_number() ? bits->as_int64().value_or(4) : 4;
  return n >= 2 && n <= 8 ? static_cast<int>(n) : 4;
}

}  // namespace freshet::models
