#include "tokenizer/tokenizer_parts.h"

#include <algorithm>
#include <array>

namespace freshet::tokenizer {
namespace {

void compute_bytes(TokenizerParts& parts) {
  const bool byte_level = parts.decoder.steps().size() == 1 &&
                          parts.decoder.steps()[0].kind == DecoderStep::Kind::kByteLevel;
  parts.bytes.resize(static_cast<size_t>(parts.vocab.size()));
  for (int32_t id = 0; id < parts.vocab.size(); ++id) {
    if (!parts.vocab.has(id)) continue;
    const auto i = static_cast<size_t>(id);
    const std::string_view text = parts.vocab.text(id);
    const bool name = parts.special[i] && !byte_level;
    parts.bytes[i] = name ? text : parts.vocab.arena().add(parts.decoder.token_bytes(text));
  }
  // A fast path for by far the most common decoder: one look-up per token.
  if (byte_level) parts.decode_mode = DecodeMode::kBytes;
}

// For files without a map of their own. As in llama.cpp, the two tokens that most templates print
// are empty if unknown; the others are undefined.
json::Object special_tokens_by_id(const TokenizerParts& parts) {
  json::Object tokens;
  tokens["bos_token"] = parts.bos ? parts.vocab.text(*parts.bos) : std::string_view();
  tokens["eos_token"] = parts.eos ? parts.vocab.text(*parts.eos) : std::string_view();
  for (const auto& [name, id] : {std::pair("unk_token", parts.unk),
                                 {"sep_token", parts.sep},
                                 {"pad_token", parts.pad},
                                 {"cls_token", parts.cls},
                                 {"mask_token", parts.mask}}) {
    if (id) tokens[name] = parts.vocab.text(*id);
  }
  return tokens;
}

}  // namespace

void TokenizerParts::set_template(const std::string& name, std::string text) {
  if (name == "default") {
    chat_template = std::move(text);
    return;
  }
  for (auto& [known, old] : named_templates) {
    if (known != name) continue;
    old = std::move(text);
    return;
  }
  named_templates.emplace_back(name, std::move(text));
}

Status finish_parts(TokenizerParts& parts) {
  const auto size = static_cast<size_t>(parts.vocab.size());
  if (size == 0) return invalid_argument("the vocabulary is empty");
  parts.special.resize(size);
  if (parts.decode_mode == DecodeMode::kTokens && parts.bytes.empty()) compute_bytes(parts);
  parts.bytes.resize(size);
  const auto valid = [&](int32_t id) { return id >= 0 && static_cast<size_t>(id) < size; };
  for (const auto* list : {&parts.prefix, &parts.suffix}) {
    for (const int32_t id : *list) {
      if (!valid(id)) return invalid_argument("special token id {} is not in the vocabulary", id);
    }
  }
  for (auto* id :
       {&parts.bos, &parts.eos, &parts.unk, &parts.pad, &parts.sep, &parts.cls, &parts.mask}) {
    if (*id && !valid(**id)) *id = std::nullopt;
  }
  if (!parts.special_tokens) parts.special_tokens = special_tokens_by_id(parts);
  auto& ends = parts.end_of_generation;
  if (parts.eos) ends.push_back(*parts.eos);
  std::erase_if(ends, [&](int32_t id) { return !valid(id); });
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  return {};
}

void guess_special_ids(TokenizerParts& parts) {
  const auto first_of = [&](std::initializer_list<std::string_view> names) {
    for (const std::string_view name : names) {
      const int32_t id = parts.vocab.find(name);
      if (id >= 0) return std::optional(id);
    }
    return std::optional<int32_t>();
  };
  if (!parts.bos) {
    parts.bos = first_of({"<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "[CLS]",
                          "<\xEF\xBD\x9C"
                          "begin\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>"});
  }
  if (!parts.eos) {
    parts.eos = first_of({"</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "[SEP]",
                          "<\xEF\xBD\x9C"
                          "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>"});
  }
  if (!parts.unk) parts.unk = first_of({"<unk>", "[UNK]"});
  if (!parts.pad) parts.pad = first_of({"<pad>", "[PAD]", "<|pad|>"});
}

void add_named_ends(TokenizerParts& parts) {
  constexpr std::array<std::string_view, 23> kNames = {
      "<|eot_id|>",
      "<|im_end|>",
      "<|end|>",
      "<|return|>",
      "<|call|>",
      "<|flush|>",
      "<|calls|>",
      "<end_of_turn>",
      "<|endoftext|>",
      "</s>",
      "<|eom_id|>",
      "<EOT>",
      "_<EOT>",
      "[EOT]",
      "[EOS]",
      "<|end_of_text|>",
      "<end_of_utterance>",
      "<eos>",
      "<turn|>",
      "<|tool_response>",
      "[e~[",
      "<\xEF\xBD\x9C"
      "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>",
      "<|fim_pad|>"};
  const auto has = [&](std::string_view name) { return parts.vocab.find(name) >= 0; };
  // Harmony and similar formats end messages, not turns, with <|end|>; Gemma 4 has a </s> that does
  // not end a text.
  const bool end_is_message =
      (has("<|return|>") && has("<|call|>")) || (has("<|flush|>") && has("<|calls|>"));
  for (const std::string_view name : kNames) {
    if (name == "<|end|>" && end_is_message) continue;
    if (name == "</s>" && has("<|tool_response>")) continue;
    const int32_t id = parts.vocab.find(name);
    if (id >= 0) parts.end_of_generation.push_back(id);
  }
}

}  // namespace freshet::tokenizer
