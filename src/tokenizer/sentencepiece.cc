#include "tokenizer/sentencepiece.h"

#include <algorithm>
#include <cmath>

#include "tokenizer/bpe.h"
#include "tokenizer/protobuf.h"
#include "tokenizer/unicode.h"
#include "tokenizer/unigram.h"

namespace freshet::tokenizer {
namespace {

using Type = SentencePiece::Type;

// The merge rank of each token: the higher its score, the earlier; equal scores share a rank.
std::vector<int32_t> ranks_of_scores(const SentencePieceModel& model) {
  std::vector<float> scores;
  for (const SentencePiece& piece : model.pieces) scores.push_back(piece.score);
  std::sort(scores.begin(), scores.end(), std::greater<>());
  scores.erase(std::unique(scores.begin(), scores.end()), scores.end());
  std::vector<int32_t> ranks;
  for (const SentencePiece& piece : model.pieces) {
    const auto at = std::lower_bound(scores.begin(), scores.end(), piece.score, std::greater<>());
    ranks.push_back(static_cast<int32_t>(at - scores.begin()));
  }
  return ranks;
}

std::string piece_bytes(const SentencePiece& piece) {
  if (piece.type == Type::kByte) {
    const int byte = byte_of_token(piece.text);
    return byte < 0 ? std::string(piece.text) : std::string(1, static_cast<char>(byte));
  }
  if (piece.type == Type::kControl || piece.type == Type::kUnknown) return std::string(piece.text);
  return spaces_for_marks(piece.text);
}

void fill_tables(const SentencePieceModel& model, TokenizerParts& parts) {
  parts.vocab.reserve(model.pieces.size());
  for (size_t i = 0; i < model.pieces.size(); ++i) {
    const SentencePiece& piece = model.pieces[i];
    const auto id = static_cast<int32_t>(i);
    parts.vocab.set(id, piece.text);
    parts.bytes.push_back(parts.vocab.arena().add(piece_bytes(piece)));
    parts.special.push_back(piece.type == Type::kControl || piece.type == Type::kUnknown);
    parts.kinds.push_back(piece.type == Type::kControl   ? PieceKind::kControl
                          : piece.type == Type::kUnknown ? PieceKind::kUnknown
                          : piece.type == Type::kByte    ? PieceKind::kByte
                                                         : PieceKind::kNormal);
    if (piece.type == Type::kUnknown && !parts.unk) parts.unk = id;
    // Control tokens are never matched in text.
    const bool in_text = piece.type == Type::kNormal || piece.type == Type::kUserDefined ||
                         piece.type == Type::kUnused || piece.type == Type::kByte;
    if (in_text && !piece.text.empty()) parts.byte_keys.insert(parts.vocab.text(id), id);
  }
}

std::unique_ptr<const Model> make_bpe(const SentencePieceModel& model,
                                      const std::shared_ptr<const Trie>& user_defined,
                                      const TokenizerParts& parts) {
  BpeOptions options;
  options.byte_fallback = model.byte_fallback;
  options.fuse_unknown = true;
  options.late_unknown = true;
  options.unknown = parts.unk.value_or(-1);
  auto bpe = std::make_unique<BpeModel>(options, parts.byte_keys, parts.vocab.size());
  std::vector<int32_t> ranks = ranks_of_scores(model);
  std::vector<bool> unused(model.pieces.size());
  bool any_unused = false;
  for (size_t i = 0; i < model.pieces.size(); ++i) {
    unused[i] = model.pieces[i].type == Type::kUnused;
    any_unused |= unused[i];
    if (model.pieces[i].type == Type::kByte) ranks[i] = Merge::kNone;
  }
  bpe->set_token_ranks(std::move(ranks));
  if (any_unused) bpe->set_unused(std::move(unused));
  bpe->set_user_defined(user_defined);
  const bool covered = model.byte_fallback && bpe->has_all_byte_tokens();
  if (covered && user_defined == nullptr &&
      std::all_of(model.pieces.begin(), model.pieces.end(),
                  [](const SentencePiece& piece) { return marks_only_lead(piece.text); })) {
    bpe->cut_before_spaces();
  }
  return bpe;
}

std::unique_ptr<const Model> make_unigram(const SentencePieceModel& model,
                                          const TokenizerParts& parts) {
  UnigramOptions options;
  options.single_precision = !model.by_scores_in_double;
  options.byte_fallback = model.byte_fallback;
  options.unknown = parts.unk.value_or(-1);
  std::vector<UnigramModel::Token> tokens;
  for (size_t i = 0; i < model.pieces.size(); ++i) {
    const SentencePiece& piece = model.pieces[i];
    if (piece.type != Type::kNormal && piece.type != Type::kUserDefined) continue;
    const auto id = static_cast<int32_t>(i);
    tokens.push_back({parts.vocab.text(id), id, piece.score, piece.type == Type::kUserDefined});
  }
  return std::make_unique<UnigramModel>(options, tokens, parts.byte_keys);
}

Status parse_piece(std::string_view bytes, std::vector<SentencePiece>& pieces) {
  ProtoReader reader(bytes);
  SentencePiece piece;
  while (reader.next()) {
    if (reader.field() == 1) piece.text = reader.data();
    if (reader.field() == 2) piece.score = reader.number();
    if (reader.field() == 3) {
      if (reader.integer() < 1 || reader.integer() > 6) {
        return invalid_argument("piece {} has the unknown type {}", pieces.size(),
                                reader.integer());
      }
      piece.type = static_cast<Type>(reader.integer());
    }
  }
  if (!reader.ok()) return invalid_argument("piece {} is malformed", pieces.size());
  if (!std::isfinite(piece.score)) {
    return invalid_argument("the score of piece {} is not a finite number", pieces.size());
  }
  if (find_invalid_utf8(piece.text) != std::string_view::npos) {
    return invalid_argument("piece {} is not valid UTF-8", pieces.size());
  }
  pieces.push_back(piece);
  return {};
}

struct SpecialNames {
  std::string_view bos = "<s>", eos = "</s>", pad = "<pad>";
};

Status parse_trainer(std::string_view bytes, SentencePieceModel& model, SpecialNames& names) {
  ProtoReader reader(bytes);
  while (reader.next()) {
    switch (reader.field()) {
      case 3:
        if (reader.integer() != 1 && reader.integer() != 2) {
          return unsupported("model type {} is not supported (only unigram and BPE are)",
                             reader.integer());
        }
        model.unigram = reader.integer() == 1;
        break;
      case 24:
        model.rules.whitespace_as_suffix = reader.boolean();
        break;
      case 35:
        model.byte_fallback = reader.boolean();
        break;
      case 44:
        model.unknown_surface = reader.data();
        break;
      case 46:
        names.bos = reader.data();
        break;
      case 47:
        names.eos = reader.data();
        break;
      case 48:
        names.pad = reader.data();
        break;
      default:
        break;
    }
  }
  return reader.ok() ? Status() : invalid_argument("trainer_spec is malformed");
}

Status parse_rules(std::string_view bytes, SentencePieceRules& rules) {
  ProtoReader reader(bytes);
  while (reader.next()) {
    if (reader.field() == 2 && !reader.data().empty()) {
      FRESHET_ASSIGN_OR_RETURN(Charsmap charsmap, Charsmap::parse(reader.data()));
      rules.charsmap = std::make_shared<const Charsmap>(std::move(charsmap));
    }
    if (reader.field() == 3) rules.add_dummy_prefix = reader.boolean();
    if (reader.field() == 4) rules.remove_extra_whitespaces = reader.boolean();
    if (reader.field() == 5) rules.escape_whitespaces = reader.boolean();
  }
  return reader.ok() ? Status() : invalid_argument("normalizer_spec is malformed");
}

Status parse_model(std::string_view bytes, TokenizerParts& parts) {
  SentencePieceModel model;
  SpecialNames names;
  ProtoReader reader(bytes);
  while (reader.next()) {
    if (reader.field() == 1) FRESHET_RETURN_IF_ERROR(parse_piece(reader.data(), model.pieces));
    if (reader.field() == 2) {
      FRESHET_RETURN_IF_ERROR(parse_trainer(reader.data(), model, names));
    }
    if (reader.field() == 3) FRESHET_RETURN_IF_ERROR(parse_rules(reader.data(), model.rules));
  }
  if (!reader.ok()) return invalid_argument("the file is truncated or not a SentencePiece model");
  FRESHET_RETURN_IF_ERROR(build_sentencepiece(std::move(model), parts));
  const auto control = [&](std::string_view name) -> std::optional<int32_t> {
    const int32_t id = parts.vocab.find(name);
    const bool found = id >= 0 && parts.kinds[static_cast<size_t>(id)] == PieceKind::kControl;
    return found ? std::optional(id) : std::nullopt;
  };
  parts.bos = control(names.bos);
  parts.eos = control(names.eos);
  parts.pad = control(names.pad);
  return {};
}

}  // namespace

Status build_sentencepiece(SentencePieceModel model, TokenizerParts& parts) {
  if (model.pieces.empty()) return invalid_argument("the model has no pieces");
  fill_tables(model, parts);
  std::vector<std::pair<std::string_view, int32_t>> user_defined;
  for (size_t i = 0; i < model.pieces.size(); ++i) {
    const auto id = static_cast<int32_t>(i);
    if (model.pieces[i].type == Type::kUserDefined) {
      user_defined.emplace_back(parts.vocab.text(id), id);
    }
  }
  if (!user_defined.empty()) {
    model.rules.user_defined = std::make_shared<const Trie>(std::move(user_defined));
  }
  parts.model =
      model.unigram ? make_unigram(model, parts) : make_bpe(model, model.rules.user_defined, parts);
  parts.each_bad_byte = true;
  parts.decode_mode = DecodeMode::kSentencePiece;
  parts.hide_control = true;
  parts.unknown_text = model.unknown_surface;
  parts.strip_first_space = model.rules.add_dummy_prefix || model.rules.remove_extra_whitespaces;
  parts.strip_all_leading = model.rules.remove_extra_whitespaces;
  parts.normalizer.add(
      {.kind = NormalizerStep::Kind::kSentencePiece, .sentencepiece = std::move(model.rules)});
  return {};
}

PartsResult parse_sentencepiece(std::string_view bytes, const std::string& name) {
  auto parts = std::make_shared<TokenizerParts>();
  if (Status status = parse_model(bytes, *parts); !status.ok()) return status.with_context(name);
  return parts;
}

}  // namespace freshet::tokenizer
