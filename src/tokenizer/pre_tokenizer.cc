#include "tokenizer/pre_tokenizer.h"

#include <algorithm>

namespace freshet::tokenizer {
namespace {

struct Span {
  size_t begin, end;
  bool matched;
};

// Splits the text into alternating matched and unmatched spans; find calls its argument with each
// match.
template <class Find>
std::vector<Span> cut(std::string_view text, bool invert, Find&& find) {
  std::vector<Span> spans;
  size_t done = 0;
  find([&](size_t begin, size_t end) {
    if (begin > done) spans.push_back({done, begin, invert});
    spans.push_back({begin, end, !invert});
    done = end;
  });
  if (done < text.size()) spans.push_back({done, text.size(), invert});
  return spans;
}

void merge_spans(std::vector<Span>& spans, SplitBehavior behavior) {
  std::vector<Span> out;
  bool previous = false;
  switch (behavior) {
    case SplitBehavior::kIsolated:
      return;
    case SplitBehavior::kRemoved:
      std::erase_if(spans, [](const Span& s) { return s.matched; });
      return;
    case SplitBehavior::kContiguous:
      for (const Span& s : spans) {
        if (!out.empty() && s.matched == previous) {
          out.back().end = s.end;
        } else {
          out.push_back(s);
        }
        previous = s.matched;
      }
      break;
    case SplitBehavior::kMergedWithPrevious:
      for (const Span& s : spans) {
        if (!out.empty() && s.matched && !previous) {
          out.back().end = s.end;
        } else {
          out.push_back(s);
        }
        previous = s.matched;
      }
      break;
    case SplitBehavior::kMergedWithNext:
      for (size_t i = spans.size(); i-- > 0;) {
        const Span& s = spans[i];
        if (!out.empty() && s.matched && !previous) {
          out.back().begin = s.begin;
        } else {
          out.push_back(s);
        }
        previous = s.matched;
      }
      std::reverse(out.begin(), out.end());
      break;
  }
  spans = std::move(out);
}

template <class Found>
void find_literal(std::string_view text, std::string_view pattern, Found&& found) {
  if (pattern.empty()) return;
  for (size_t at = text.find(pattern); at != std::string_view::npos;
       at = text.find(pattern, at + pattern.size())) {
    found(at, at + pattern.size());
  }
}

template <class Found>
void find_class(const PreTokenizerStep& step, std::string_view text, Found&& found) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.substr(i));
    if ((char_class(c.code) & step.bits) != 0 ||
        (step.ascii_punctuation && is_ascii_punctuation(c.code))) {
      found(i, i + c.size);
    }
    i += c.size;
  }
}

std::vector<Span> split_spans(const PreTokenizerStep& step, std::string_view text) {
  using Kind = PreTokenizerStep::Kind;
  std::vector<Span> spans = cut(text, step.invert, [&](auto&& found) {
    if (step.kind == Kind::kRegex) {
      step.regex->for_each_match(text, found);
    } else if (step.kind == Kind::kLiteral) {
      find_literal(text, step.text, found);
    } else {
      find_class(step, text, found);
    }
  });
  merge_spans(spans, step.behavior);
  return spans;
}

std::string metaspace(const PreTokenizerStep& step, std::string_view text, bool at_start) {
  std::string out;
  out.reserve(text.size() * 2);
  const bool prefix =
      step.scheme == PrependScheme::kAlways || (step.scheme == PrependScheme::kFirst && at_start);
  if (prefix && !text.starts_with(' ') && !text.starts_with(step.text)) out += step.text;
  for (const char c : text) {
    if (c == ' ') {
      out += step.text;
    } else {
      out += c;
    }
  }
  return out;
}

// The end of a match of \w+ or [^\w\s]+ or of a run of spaces at `begin`; `space` tells which.
size_t whitespace_run(std::string_view text, size_t begin, bool& space) {
  const auto kind_at = [&](size_t i, size_t& size) {
    const Utf8Char c = decode_utf8(text.substr(i));
    size = c.size;
    if (is_word_char(c.code)) return 0;
    return (char_class(c.code) & kSpace) != 0 ? 1 : 2;
  };
  size_t size = 0, i = begin;
  const int kind = kind_at(i, size);
  do {
    i += size;
  } while (i < text.size() && kind_at(i, size) == kind);
  space = kind == 1;
  return i;
}

}  // namespace

void PreTokenizer::run(size_t index, std::string_view text, bool at_start, Sink sink) const {
  using Kind = PreTokenizerStep::Kind;
  if (text.empty()) return;
  if (index == steps_.size()) {
    sink(text);
    return;
  }
  const PreTokenizerStep& step = steps_[index];
  const auto next = [&](size_t begin, size_t end) {
    run(index + 1, text.substr(begin, end - begin), at_start && begin == 0, sink);
  };
  switch (step.kind) {
    case Kind::kScan:
      for (size_t i = 0; i < text.size();) {
        const size_t end = scan_word(step.rules, text, i);
        next(i, end);
        i = end;
      }
      return;
    case Kind::kRegex:
    case Kind::kLiteral:
    case Kind::kClass:
      for (const Span& s : split_spans(step, text)) next(s.begin, s.end);
      return;
    case Kind::kWhitespace:
      for (size_t i = 0; i < text.size();) {
        bool space = false;
        const size_t end = whitespace_run(text, i, space);
        if (!space) next(i, end);
        i = end;
      }
      return;
    case Kind::kFixedLength:
      for (size_t i = 0; i < text.size();) {
        size_t end = i;
        for (size_t n = 0; n < step.length && end < text.size(); ++n) end += utf8_size(text[end]);
        next(i, end);
        i = end;
      }
      return;
    case Kind::kPrefixSpace:
      if (text.starts_with(' ')) return next(0, text.size());
      return run(index + 1, fmt::format(" {}", text), at_start, sink);
    case Kind::kByteLevel:
      return run(index + 1, bytes_to_printable(text), at_start, sink);
    case Kind::kMetaspace:
      break;
  }
  const std::string replaced = metaspace(step, text, at_start);
  if (!step.split) return run(index + 1, replaced, at_start, sink);
  std::vector<Span> spans =
      cut(replaced, false, [&](auto&& found) { find_literal(replaced, step.text, found); });
  merge_spans(spans, SplitBehavior::kMergedWithNext);
  for (const Span& s : spans) {
    run(index + 1, std::string_view(replaced).substr(s.begin, s.end - s.begin),
        at_start && s.begin == 0, sink);
  }
}

Result<PreTokenizerStep> make_split(std::string_view pattern, RegexDialect dialect,
                                    SplitBehavior behavior, bool invert) {
  PreTokenizerStep step{
      .kind = PreTokenizerStep::Kind::kRegex, .behavior = behavior, .invert = invert};
  // The patterns with a scanner match everything (or leave single white space between matches), so
  // only these behaviours are equivalent to scanning.
  const bool plain = (behavior == SplitBehavior::kIsolated && !invert) ||
                     (behavior == SplitBehavior::kRemoved && invert);
  if (plain) {
    if (const auto rules = rules_for_pattern(pattern)) {
      const bool covers = pattern.ends_with("|\\s+");
      if (covers || behavior == SplitBehavior::kIsolated) {
        step.kind = PreTokenizerStep::Kind::kScan;
        step.rules = *rules;
        return step;
      }
    }
  }
  FRESHET_ASSIGN_OR_RETURN(step.regex, Regex::compile(pattern, dialect));
  return step;
}

Result<PreTokenizerStep> make_script_split() {
  constexpr std::string_view kScripts =
      "Adlam Ahom Anatolian_Hieroglyphs Arabic Armenian Avestan Balinese Bamum Bassa_Vah Batak "
      "Bengali Bhaiksuki Bopomofo Brahmi Braille Buginese Buhid Canadian_Aboriginal Carian "
      "Caucasian_Albanian Chakma Cham Cherokee Coptic Cuneiform Cypriot Cyrillic Deseret "
      "Devanagari "
      "Duployan Egyptian_Hieroglyphs Elbasan Ethiopic Georgian Glagolitic Gothic Grantha Greek "
      "Gujarati Gurmukhi Hangul Hanunoo Hatran Hebrew Imperial_Aramaic Inscriptional_Pahlavi "
      "Inscriptional_Parthian Javanese Kaithi Kannada Kayah_Li Kharoshthi Khmer Khojki Khudawadi "
      "Lao "
      "Latin Lepcha Limbu Linear_A Linear_B Lisu Lycian Lydian Mahajani Malayalam Mandaic "
      "Manichaean "
      "Marchen Meetei_Mayek Mende_Kikakui Meroitic_Cursive Meroitic_Hieroglyphs Miao Modi "
      "Mongolian "
      "Mro Multani Myanmar Nabataean New_Tai_Lue Newa Nko Ogham Ol_Chiki Old_Hungarian Old_Italic "
      "Old_North_Arabian Old_Permic Old_Persian Old_South_Arabian Old_Turkic Oriya Osage Osmanya "
      "Pahawh_Hmong Palmyrene Pau_Cin_Hau Phags_Pa Phoenician Psalter_Pahlavi Rejang Runic "
      "Samaritan "
      "Saurashtra Sharada Shavian Siddham SignWriting Sinhala Sora_Sompeng Sundanese Syloti_Nagri "
      "Syriac Tagalog Tagbanwa Tai_Le Tai_Tham Tai_Viet Takri Tamil Tangut Telugu Thaana Thai "
      "Tibetan "
      "Tifinagh Tirhuta Ugaritic Vai Warang_Citi Yi Inherited";
  std::string pattern =
      "(?:[\\p{sc:Han}\\p{sc:Hiragana}\\p{sc:Katakana}\\x{30FC}] *)+|"
      "(?:[^\\P{sc:Common} \\x{30FC}] *)+";
  for (size_t i = 0; i < kScripts.size();) {
    const size_t end = std::min(kScripts.find(' ', i), kScripts.size());
    pattern += fmt::format("|(?:\\p{{sc:{}}} *)+", kScripts.substr(i, end - i));
    i = end + 1;
  }
  pattern += "|(?:[^ ] *)+?";
  PreTokenizerStep step{
      .kind = PreTokenizerStep::Kind::kRegex, .behavior = SplitBehavior::kRemoved, .invert = true};
  FRESHET_ASSIGN_OR_RETURN(step.regex, Regex::compile(pattern, RegexDialect::kRust));
  return step;
}

}  // namespace freshet::tokenizer
