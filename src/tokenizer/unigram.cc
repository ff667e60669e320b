#include "tokenizer/unigram.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "tokenizer/unicode.h"

namespace freshet::tokenizer {
namespace {
constexpr double kUnknownPenalty = 10.0;
}

UnigramModel::UnigramModel(UnigramOptions options, const std::vector<Token>& tokens,
                           const TokenMap& keys)
    : options_(options), keys_(keys) {
  double min_score = std::numeric_limits<double>::infinity();
  double max_score = -min_score;
  std::vector<std::pair<std::string_view, int32_t>> entries;
  for (const Token& token : tokens) {
    if (!token.text.empty()) {
      entries.emplace_back(token.text, static_cast<int32_t>(scores_.size()));
    }
    scores_.push_back(token.score);
    ids_.push_back(token.id);
    user_defined_.push_back(token.user_defined);
    if (token.user_defined) continue;
    min_score = std::min(min_score, token.score);
    max_score = std::max(max_score, token.score);
  }
  if (min_score > max_score) min_score = max_score = 0;
  trie_ = Trie(std::move(entries));
  max_score_ = max_score;
  unknown_score_ = min_score - kUnknownPenalty;
  if (options_.single_precision) {
    unknown_score_ = static_cast<float>(min_score) - static_cast<float>(kUnknownPenalty);
  }
  for (int b = 0; b < 256; ++b) {
    byte_tokens_[static_cast<size_t>(b)] = keys.find(fmt::format("<0x{:02X}>", b));
  }
}

void UnigramModel::encode(std::string_view word, Scratch&, std::vector<int32_t>& out) const {
  std::vector<Node> best(word.size() + 1);
  best[0].reached = true;
  const auto offer = [&](size_t from, size_t to, double score, int32_t id) {
    double total = best[from].score + score;
    Node& node = best[to];
    if (node.reached && !(total > node.score)) return;
    if (options_.single_precision) total = static_cast<float>(total);
    node = {total, static_cast<uint32_t>(from), id, true};
  };
  for (size_t at = 0; at < word.size();) {
    const size_t size = std::min(utf8_size(word[at]), word.size() - at);
    bool single = false;
    trie_.for_each_prefix(word.substr(at), [&](size_t length, int32_t index) {
      const auto i = static_cast<size_t>(index);
      // SentencePiece scores user-defined tokens by their length, just below the best score per
      // byte.
      const double score =
          user_defined_[i] ? static_cast<double>(length) * max_score_ - 0.1 : scores_[i];
      offer(at, at + length, score, ids_[i]);
      single |= length == size;
    });
    if (!single) offer(at, at + size, unknown_score_, -1);
    at += size;
  }
  // Walks backwards over the token spans; adjacent unknown characters form one span.
  struct Span {
    uint32_t begin, end;
    int32_t id;
  };
  std::vector<Span> spans;
  for (auto end = static_cast<uint32_t>(word.size()); end > 0;) {
    const Node& node = best[end];
    const bool unknown = node.id < 0 || node.id == options_.unknown;
    if (unknown && !spans.empty() && spans.back().id < 0) {
      spans.back().begin = node.from;
    } else {
      spans.push_back({node.from, end, unknown ? -1 : node.id});
    }
    end = node.from;
  }
  for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
    if (span->id >= 0) {
      out.push_back(span->id);
    } else {
      emit_unknown(word.substr(span->begin, span->end - span->begin), out);
    }
  }
}

void UnigramModel::emit_unknown(std::string_view text, std::vector<int32_t>& out) const {
  if (!options_.single_precision) {
    // Hugging Face looks up the joined unknown characters once more.
    const int32_t id = keys_.find(text);
    if (id >= 0) {
      out.push_back(id);
      return;
    }
  }
  if (options_.byte_fallback) {
    const size_t before = out.size();
    for (const char b : text) {
      const int32_t id = byte_tokens_[static_cast<uint8_t>(b)];
      if (id >= 0) out.push_back(id);
    }
    if (out.size() - before == text.size()) return;
    out.resize(before);
  }
  if (options_.unknown >= 0) out.push_back(options_.unknown);
}

}  // namespace freshet::tokenizer
