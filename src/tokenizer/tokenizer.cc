#include "tokenizer/tokenizer.h"

#include <algorithm>

#include "tokenizer/tokenizer_parts.h"
#include "tokenizer/unicode.h"

namespace freshet::tokenizer {
std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  const TokenizerParts& p = *parts_;
  FRESHET_CHECK(text.size() < (size_t{1} << 30), "a text of {} bytes", text.size());
  std::string clean;
  if (!p.each_bad_byte && find_invalid_utf8(text) != std::string_view::npos) {
    clean = sanitize(text);
    text = clean;
  }
  std::vector<int32_t> out;
  if (options.add_special) out = p.prefix;
  out.reserve(out.size() + text.size() / 3 + p.suffix.size());
  Scratch scratch;
  const auto on_token = [&](int32_t id) { out.push_back(id); };
  const auto on_word = [&](std::string_view word) {
    if (p.model != nullptr) p.model->encode(word, scratch, out);  // nullptr: an empty vocabulary
  };
  const auto on_normalized = [&](std::string_view piece, const PieceContext& context) {
    p.pre_tokenizer.run(piece, context.at_start, on_word);
  };
  const auto on_raw = [&](std::string_view piece, const PieceContext& context) {
    std::string normalized;
    if (!p.normalizer.empty()) {
      normalized = p.normalizer.run(piece, context);
      piece = normalized;
    }
    p.normalized_tokens.split(piece, options.parse_special, context, on_token, on_normalized);
  };
  p.raw_tokens.split(text, options.parse_special, {}, on_token, on_raw);
  if (options.add_special) out.insert(out.end(), p.suffix.begin(), p.suffix.end());
  return out;
}

namespace {

// The tokens that two texts keep of `most`: as the tokenizers library cuts "longest first".
std::pair<size_t, size_t> longest_first(size_t first, size_t second, size_t most) {
  if (first + second <= most) return {first, second};
  const bool swapped = first > second;
  if (swapped) std::swap(first, second);
  second = first > most ? first : std::max(first, most - first);
  if (first + second > most) {
    first = most / 2;
    second = first + most % 2;
  }
  if (swapped) std::swap(first, second);
  return {first, second};
}

}  // namespace

Tokenizer::Pair Tokenizer::encode_pair(std::string_view first, std::string_view second,
                                       size_t most) const {
  static const std::vector<PairPiece> kPlain = {{PairPiece::kFirstText, 0},
                                                {PairPiece::kSecondText, 0}};
  const std::vector<PairPiece>& pieces = parts_->pair.empty() ? kPlain : parts_->pair;
  std::vector<int32_t> a = encode(first, {.add_special = false});
  std::vector<int32_t> b = encode(second, {.add_special = false});
  if (most > 0) {
    const auto joining = static_cast<size_t>(
        std::ranges::count_if(pieces, [](const PairPiece& p) { return p.id >= 0; }));
    const auto [keep_a, keep_b] =
        longest_first(a.size(), b.size(), most > joining ? most - joining : 0);
    a.resize(keep_a);
    b.resize(keep_b);
  }
  Pair out;
  for (const PairPiece& piece : pieces) {
    if (piece.id >= 0) {
      out.ids.push_back(piece.id);
    } else {
      const std::vector<int32_t>& text = piece.id == PairPiece::kFirstText ? a : b;
      out.ids.insert(out.ids.end(), text.begin(), text.end());
    }
    out.types.resize(out.ids.size(), piece.type);
  }
  return out;
}

std::vector<int32_t> Tokenizer::encode_up_to(std::string_view text, size_t most,
                                             const EncodeOptions& options) const {
  EncodeOptions bare = options;
  bare.add_special = false;
  std::vector<int32_t> out = encode(text, bare);
  const size_t around =
      options.add_special ? parts_->prefix.size() + parts_->suffix.size() : size_t{0};
  out.resize(std::min(out.size(), most > around ? most - around : 0));
  if (!options.add_special) return out;
  out.insert(out.begin(), parts_->prefix.begin(), parts_->prefix.end());
  out.insert(out.end(), parts_->suffix.begin(), parts_->suffix.end());
  return out;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, const DecodeOptions& options) const {
  StreamDecoder stream(*this, options);
  std::string out;
  for (const int32_t id : ids) out += stream.push(id);
  return out += stream.finish();
}

int32_t Tokenizer::vocab_size() const {
  return parts_->vocab.size();
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  return id >= 0 && id < vocab_size() ? parts_->bytes[static_cast<size_t>(id)] : std::string_view();
}

std::string_view Tokenizer::token_text(int32_t id) const {
  return parts_->vocab.text(id);
}

std::optional<int32_t> Tokenizer::token_to_id(std::string_view text) const {
  const int32_t id = parts_->vocab.find(text);
  return id < 0 ? std::nullopt : std::optional(id);
}

std::optional<int32_t> Tokenizer::bos() const {
  return parts_->bos;
}
std::optional<int32_t> Tokenizer::eos() const {
  return parts_->eos;
}
std::optional<int32_t> Tokenizer::unk() const {
  return parts_->unk;
}
std::optional<int32_t> Tokenizer::pad() const {
  return parts_->pad;
}

bool Tokenizer::adds_bos() const {
  return parts_->bos && !parts_->prefix.empty() && parts_->prefix.front() == *parts_->bos;
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && parts_->special[static_cast<size_t>(id)];
}

bool Tokenizer::is_end_of_generation(int32_t id) const {
  return std::binary_search(parts_->end_of_generation.begin(), parts_->end_of_generation.end(), id);
}

const std::vector<int32_t>& Tokenizer::end_of_generation() const {
  return parts_->end_of_generation;
}

const std::optional<std::string>& Tokenizer::chat_template() const {
  return parts_->chat_template;
}

const std::string* Tokenizer::chat_template(std::string_view name) const {
  for (const auto& [key, text] : parts_->named_templates) {
    if (key == name) return &text;
  }
  return nullptr;
}

const std::string* Tokenizer::chat_template_for(bool with_tools) const {
  const std::string* tool_use = with_tools ? chat_template("tool_use") : nullptr;
  if (tool_use != nullptr) return tool_use;
  return parts_->chat_template ? &*parts_->chat_template : nullptr;
}

const json::Object& Tokenizer::special_tokens() const {
  return *parts_->special_tokens;
}

struct StreamDecoder::State {
  std::shared_ptr<const TokenizerParts> parts;
  bool skip_special = false;
  std::unique_ptr<DecoderStream> stream;  // kTokens
  Utf8Assembler assembler;
  bool expect_first_space = true, first_space_seen = false;

  void push(int32_t id, std::string& out);
  void push_piece(int32_t id, std::string& out);
};

void StreamDecoder::State::push(int32_t id, std::string& out) {
  const TokenizerParts& p = *parts;
  if (!p.vocab.has(id) || (skip_special && p.special[static_cast<size_t>(id)])) return;
  switch (p.decode_mode) {
    case DecodeMode::kTokens:
      stream->push(p.vocab.text(id), out);
      return;
    case DecodeMode::kSentencePiece:
      push_piece(id, out);
      return;
    case DecodeMode::kBytes:
      break;
  }
  std::string_view bytes = p.bytes[static_cast<size_t>(id)];
  if (p.strip_first_space && expect_first_space && bytes.starts_with(' ')) bytes.remove_prefix(1);
  expect_first_space = false;
  assembler.push(bytes, out);
}

void StreamDecoder::State::push_piece(int32_t id, std::string& out) {
  const TokenizerParts& p = *parts;
  const PieceKind kind = p.kinds[static_cast<size_t>(id)];
  if (kind == PieceKind::kByte) {
    assembler.push(p.bytes[static_cast<size_t>(id)], out);
    expect_first_space &= out.empty();
    return;
  }
  assembler.finish(out);
  if (first_space_seen || !out.empty()) expect_first_space = false;
  first_space_seen = false;
  std::string_view piece = p.vocab.text(id);
  if (kind == PieceKind::kControl && p.hide_control) return;
  if (kind == PieceKind::kUnknown && p.hide_control) {
    out += p.unknown_text;
  } else if (kind != PieceKind::kNormal) {
    out += piece;
  } else {
    if (expect_first_space && p.strip_first_space && piece.starts_with(kSpaceMark)) {
      piece.remove_prefix(kSpaceMark.size());
      first_space_seen = !p.strip_all_leading;
    }
    out += spaces_for_marks(piece);
  }
  expect_first_space &= out.empty();
}

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, const DecodeOptions& options)
    : state_(std::make_unique<State>()) {
  state_->parts = tokenizer.parts_;
  state_->skip_special = options.skip_special;
  state_->assembler = Utf8Assembler(tokenizer.parts_->each_bad_byte);
  if (state_->parts->decode_mode == DecodeMode::kTokens) {
    state_->stream = make_decoder_stream(state_->parts->decoder);
  }
}
StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
StreamDecoder& StreamDecoder::operator=(StreamDecoder&&) noexcept = default;
StreamDecoder::~StreamDecoder() = default;

std::string StreamDecoder::push(int32_t id) {
  std::string out;
  state_->push(id, out);
  return out;
}

std::string StreamDecoder::finish() {
  std::string out;
  if (state_->stream != nullptr) {
    state_->stream->finish(out);
  } else {
    state_->assembler.finish(out);
  }
  return out;
}

}  // namespace freshet::tokenizer
