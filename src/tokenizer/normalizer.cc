#include "tokenizer/normalizer.h"

#include <algorithm>

namespace freshet::tokenizer {
namespace {

// Rebuilds the text character by character; f(code, bytes, out) appends the replacement of a
// character.
template <class F>
std::string map_chars(std::string_view text, F&& f) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(i));
    f(c.code, text.substr(i, c.size), out);
    i += c.size;
  }
  return out;
}

std::string drop(std::string_view text, uint32_t bits) {
  return map_chars(text, [&](char32_t c, std::string_view bytes, std::string& out) {
    if ((char_class(c) & bits) == 0) out += bytes;
  });
}

std::string strip(std::string_view text, bool left, bool right) {
  size_t begin = 0, end = text.size();
  while (left && begin < end) {
    const Utf8Char c = decode_utf8(text.substr(begin));
    if ((char_class(c.code) & kSpace) == 0) break;
    begin += c.size;
  }
  while (right && end > begin) {
    size_t last = end - 1;
    while (last > begin && (static_cast<uint8_t>(text[last]) & 0xC0) == 0x80) --last;
    if ((char_class(decode_utf8(text.substr(last)).code) & kSpace) == 0) break;
    end = last;
  }
  return std::string(text.substr(begin, end - begin));
}

std::string replace(const NormalizerStep& step, std::string_view text, size_t limit) {
  std::string out;
  size_t done = 0;
  const auto put = [&](size_t begin, size_t end) {
    if (out.size() > limit) return;
    out += text.substr(done, begin - done);
    out += step.content;
    done = end;
  };
  if (step.regex != nullptr) {
    step.regex->for_each_match(text, put);
  } else if (!step.text.empty()) {
    for (size_t at = text.find(step.text); at != std::string_view::npos;
         at = text.find(step.text, at + step.text.size())) {
      put(at, at + step.text.size());
    }
  }
  out += text.substr(done);
  return out;
}

std::string bert(const NormalizerStep& step, std::string_view text) {
  std::string out = map_chars(text, [&](char32_t c, std::string_view bytes, std::string& o) {
    const uint32_t bits = char_class(c);
    if (step.clean) {
      const bool blank = c == '\t' || c == '\n' || c == '\r';
      if (!blank && (c == 0 || c == 0xFFFD || (bits & kOther) != 0)) return;
      if ((bits & kSpace) != 0) {
        o += ' ';
        return;
      }
    }
    if (step.cjk && is_cjk_ideograph(c)) {
      o += ' ';
      o += bytes;
      o += ' ';
    } else {
      o += bytes;
    }
  });
  if (step.strip_accents) out = drop(normalize(out, NormalForm::kNfd), kNonspacing);
  return step.lowercase ? to_lower(out) : out;
}

std::string nmt(std::string_view text) {
  return map_chars(text, [](char32_t c, std::string_view bytes, std::string& out) {
    if ((c >= 1 && c <= 8) || c == 0xB || (c >= 0xE && c <= 0x1F) || c == 0x7F || c == 0x8F ||
        c == 0x9F) {
      return;
    }
    const bool space = c == 9 || c == 10 || c == 12 || c == 13 || c == 0x1680 ||
                       (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
                       c == 0xFEFF || c == 0xFFFD;
    if (space) {
      out += ' ';
    } else {
      out += bytes;
    }
  });
}

// A short grapheme as a whole is replaced by the replacement of its shortest mapped prefix; a
// longer one is replaced character by character. The models were trained with this behaviour.
std::string precompiled(const Charsmap& charsmap, std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for_each_grapheme(text, [&](std::string_view grapheme) {
    if (grapheme.size() < 6) {
      if (const auto match = charsmap.shortest(grapheme)) {
        out += match->replacement;
        return;
      }
    }
    for (size_t i = 0; i < grapheme.size();) {
      const std::string_view c = grapheme.substr(i, utf8_size(grapheme[i]));
      const auto match = charsmap.shortest(c);
      out += match ? match->replacement : c;
      i += c.size();
    }
  });
  return out;
}

std::string run_step(const NormalizerStep& step, std::string_view text, const PieceContext& context,
                     size_t limit) {
  using Kind = NormalizerStep::Kind;
  switch (step.kind) {
    case Kind::kForm:
      return normalize(text, step.form);
    case Kind::kLowercase:
      return to_lower(text);
    case Kind::kStrip:
      return strip(text, step.left, step.right);
    case Kind::kStripAccents:
      return drop(text, kMark);
    case Kind::kReplace:
      return replace(step, text, limit);
    case Kind::kPrepend:
      return text.empty() ? std::string() : fmt::format("{}{}", step.content, text);
    case Kind::kSpacePrefix:
      return fmt::format("{}{}", context.after_token ? step.content : "", text);
    case Kind::kPrecompiled:
      return precompiled(*step.charsmap, text);
    case Kind::kSentencePiece:
      return sentencepiece_normalize(step.sentencepiece, text);
    case Kind::kBert:
      return bert(step, text);
    case Kind::kNmt:
      return nmt(text);
    case Kind::kByteLevel:
      break;
  }
  return bytes_to_printable(text);
}

}  // namespace

std::string sentencepiece_normalize(const SentencePieceRules& rules, std::string_view text) {
  // The first replacement in `rest`, and the bytes that it replaces.
  const auto prefix = [&](std::string_view rest) -> std::pair<std::string_view, size_t> {
    if (rules.user_defined != nullptr) {
      const size_t size = rules.user_defined->longest_prefix(rest).first;
      if (size > 0) return {rest.substr(0, size), size};
    }
    if (rules.charsmap != nullptr) {
      if (const auto match = rules.charsmap->longest(rest))
        return {match->replacement, match->size};
    }
    const Utf8Char c = decode_utf8(rest);
    if (!c.valid) return {"\xEF\xBF\xBD", 1};
    return {rest.substr(0, c.size), c.size};
  };
  if (rules.remove_extra_whitespaces) {
    while (!text.empty()) {
      const auto [piece, size] = prefix(text);
      if (piece != " ") break;
      text.remove_prefix(size);
    }
  }
  if (text.empty()) return {};
  const std::string_view space = rules.escape_whitespaces ? kSpaceMark : " ";
  std::string out;
  out.reserve(text.size() + text.size() / 4);
  if (rules.add_dummy_prefix && !rules.whitespace_as_suffix) out += space;
  bool after_space = rules.remove_extra_whitespaces;
  while (!text.empty()) {
    auto [piece, size] = prefix(text);
    while (after_space && piece.starts_with(' ')) piece.remove_prefix(1);
    for (const char c : piece) {
      out.append(c == ' ' ? space : std::string_view(&c, 1));
    }
    if (!piece.empty()) after_space = piece.ends_with(' ');
    if (!rules.remove_extra_whitespaces) after_space = false;
    text.remove_prefix(size);
  }
  if (rules.remove_extra_whitespaces) {
    while (std::string_view(out).ends_with(space)) out.erase(out.size() - space.size());
  }
  if (rules.add_dummy_prefix && rules.whitespace_as_suffix) out += space;
  return out;
}

std::string Normalizer::run(std::string_view text, const PieceContext& context) const {
  const size_t limit = text.size() * 64 + 4096;
  std::string out(text);
  for (const NormalizerStep& step : steps_) {
    if (out.size() > limit) break;
    out = run_step(step, out, context, limit);
  }
  return out;
}

}  // namespace freshet::tokenizer
