#include "tokenizer/bpe.h"

#include <algorithm>
#include <bit>

#include "tokenizer/bpe_merge.h"
#include "tokenizer/unicode.h"

namespace freshet::tokenizer {
namespace {

std::array<int32_t, 256> find_byte_tokens(const TokenMap& keys) {
  std::array<int32_t, 256> ids;
  for (int b = 0; b < 256; ++b)
    ids[static_cast<size_t>(b)] = keys.find(fmt::format("<0x{:02X}>", b));
  return ids;
}

}  // namespace

void PairRanks::reserve(size_t count) {
  const size_t size = std::bit_ceil(std::max<size_t>(16, count * 2));
  if (size <= slots_.size()) return;
  const std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(size));
  for (const Slot& s : old) {
    if (s.key == kEmpty) continue;
    size_t i = slot(s.key);
    while (slots_[i].key != kEmpty) i = (i + 1) & (slots_.size() - 1);
    slots_[i] = s;
  }
}

void PairRanks::add(int32_t left, int32_t right, Merge merge) {
  if ((count_ + 1) * 2 > slots_.size()) reserve(std::max<size_t>(16, slots_.size()));
  const uint64_t key = make_key(left, right);
  size_t i = slot(key);
  for (; slots_[i].key != kEmpty; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].key == key) return;
  }
  slots_[i] = {key, merge};
  ++count_;
}

BpeModel::BpeModel(BpeOptions options, const TokenMap& keys, int32_t id_count)
    : options_(std::move(options)),
      keys_(keys),
      id_count_(id_count),
      byte_tokens_(find_byte_tokens(keys)),
      known_(new std::atomic<uint8_t>[static_cast<size_t>(id_count)]()) {
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    byte_ids_[static_cast<size_t>(b)] = keys.find({&byte, 1});
  }
}

void BpeModel::set_pairs(PairRanks pairs) {
  pairs_ = std::move(pairs);
}

void BpeModel::set_token_ranks(std::vector<int32_t> ranks) {
  FRESHET_CHECK(ranks.size() == static_cast<size_t>(id_count_));
  ranks_ = std::move(ranks);
  by_token_ = true;
}

bool BpeModel::has_all_byte_tokens() const {
  return std::all_of(byte_tokens_.begin(), byte_tokens_.end(), [](int32_t id) { return id >= 0; });
}

void BpeModel::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const {
  if (!cut_) {
    encode_piece(word, scratch, out);
    return;
  }
  size_t begin = 0;
  for (size_t i = 1; i < word.size(); ++i) {
    if (word[i] != kSpaceMark[0] || !word.substr(i).starts_with(kSpaceMark)) continue;
    if (i - begin >= 3 && word.substr(i - 3, 3) == kSpaceMark) continue;
    encode_piece(word.substr(begin, i - begin), scratch, out);
    begin = i;
  }
  encode_piece(word.substr(begin), scratch, out);
}

void BpeModel::encode_piece(std::string_view word, Scratch& scratch,
                            std::vector<int32_t>& out) const {
  const bool plain = options_.prefix.empty() && options_.suffix.empty();
  const bool whole = options_.whole_words ||
                     (options_.whole_newlines && word.find_first_not_of('\n') == word.npos);
  const int32_t itself = plain || whole ? keys_.find(word) : -1;
  if (itself >= 0) {
    auto& known = known_[static_cast<size_t>(itself)];
    if (whole || known.load(std::memory_order_relaxed) == kMergesToItself) {
      out.push_back(itself);
      return;
    }
  }
  scratch.symbols.clear();
  if (options_.bytes) {
    split_bytes(word, scratch.symbols);
  } else {
    split_chars(word, scratch.symbols);
  }
  merge(word, scratch);
  const size_t before = out.size();
  emit(word, scratch.symbols, out);
  if (itself >= 0 && plain) {
    const bool same = out.size() == before + 1 && out.back() == itself;
    known_[static_cast<size_t>(itself)].store(same ? kMergesToItself : kDoesNot,
                                              std::memory_order_relaxed);
  }
}

void BpeModel::split_bytes(std::string_view word, std::vector<Symbol>& symbols) const {
  for (size_t i = 0; i < word.size(); ++i) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(word[i])];
    if (id >= 0) symbols.push_back({static_cast<uint32_t>(i), 1, id});
  }
}

int32_t BpeModel::char_id(std::string_view c, bool first, bool last) const {
  const bool affixed = (!first && !options_.prefix.empty()) || (last && !options_.suffix.empty());
  if (!affixed) return c.size() == 1 ? byte_ids_[static_cast<uint8_t>(c[0])] : keys_.find(c);
  std::string key = first ? std::string() : options_.prefix;
  key += c;
  if (last) key += options_.suffix;
  return keys_.find(key);
}

void BpeModel::split_chars(std::string_view word, std::vector<Symbol>& symbols) const {
  Symbol unknown;  // its size is 0 if there is none
  const auto flush = [&] {
    if (unknown.size != 0) symbols.push_back(unknown);
    unknown = {};
  };
  for (size_t i = 0; i < word.size();) {
    if (user_defined_ != nullptr) {
      const auto [size, id] = user_defined_->longest_prefix(word.substr(i));
      if (size > 0) {
        symbols.push_back(
            {static_cast<uint32_t>(i), static_cast<uint32_t>(size), id, -1, -1, true});
        i += size;
        continue;
      }
    }
    const std::string_view c = word.substr(i, utf8_size(word[i]));
    const auto begin = static_cast<uint32_t>(i), size = static_cast<uint32_t>(c.size());
    i += c.size();
    const int32_t id = char_id(c, begin == 0, i >= word.size());
    if (id >= 0 || options_.late_unknown) {
      flush();
      symbols.push_back({begin, size, id});
      continue;
    }
    const auto byte_token = [&](char b) { return byte_tokens_[static_cast<uint8_t>(b)]; };
    if (options_.byte_fallback &&
        std::all_of(c.begin(), c.end(), [&](char b) { return byte_token(b) >= 0; })) {
      for (uint32_t k = 0; k < size; ++k) symbols.push_back({begin + k, 1, byte_token(c[k])});
      continue;
    }
    if (options_.unknown < 0) continue;
    if (unknown.size != 0 && options_.fuse_unknown) {
      unknown.size += size;
      continue;
    }
    flush();
    unknown = {begin, size, options_.unknown};
  }
  flush();
}

void BpeModel::merge(std::string_view word, Scratch& scratch) const {
  if (!by_token_) {
    merge_symbols(scratch,
                  [&](const Symbol& l, const Symbol& r) { return pairs_.find(l.id, r.id); });
    return;
  }
  merge_symbols(scratch, [&](const Symbol& l, const Symbol& r) -> Merge {
    if (l.frozen || r.frozen) return {};
    const int32_t id = keys_.find(word.substr(l.begin, l.size + r.size));
    return id < 0 ? Merge{} : Merge{ranks_[static_cast<size_t>(id)], id};
  });
}

void BpeModel::emit(std::string_view word, const std::vector<Symbol>& symbols,
                    std::vector<int32_t>& out) const {
  bool after_unknown = false;
  for (const Symbol& symbol : symbols) {
    if (symbol.id < 0) {
      emit_unknown(word.substr(symbol.begin, symbol.size), after_unknown, out);
    } else if (!unused_.empty() && unused_[static_cast<size_t>(symbol.id)]) {
      emit_unused(word.substr(symbol.begin, symbol.size), out);
    } else {
      out.push_back(symbol.id);
    }
    after_unknown = symbol.id < 0;
  }
}

void BpeModel::emit_unknown(std::string_view text, bool after_unknown,
                            std::vector<int32_t>& out) const {
  const size_t before = out.size();
  for (const char b : text) {
    if (!options_.byte_fallback) break;
    const int32_t id = byte_tokens_[static_cast<uint8_t>(b)];
    if (id >= 0) out.push_back(id);
  }
  if (out.size() - before == text.size() && options_.byte_fallback) return;
  out.resize(before);
  if (options_.unknown >= 0 && !(after_unknown && options_.fuse_unknown)) {
    out.push_back(options_.unknown);
  }
}

// Splits an unused token into the two symbols it was last merged from, i.e. the symbols that remain
// when its text is merged without the last step.
void BpeModel::emit_unused(std::string_view text, std::vector<int32_t>& out) const {
  Scratch scratch;
  split_chars(text, scratch.symbols);
  merge_symbols(scratch, [&](const Symbol& l, const Symbol& r) -> Merge {
    const uint32_t size = l.size + r.size;
    if (l.frozen || r.frozen || size == text.size()) return {};
    const int32_t id = keys_.find(text.substr(l.begin, size));
    return id < 0 ? Merge{} : Merge{ranks_[static_cast<size_t>(id)], id};
  });
  if (scratch.symbols.size() == 1) {
    out.push_back(scratch.symbols[0].id);
  } else {
    emit(text, scratch.symbols, out);
  }
}

}  // namespace freshet::tokenizer
