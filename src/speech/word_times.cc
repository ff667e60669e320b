#include "speech/word_times.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "base/status.h"

namespace freshet::speech {
namespace {

// Each number less the mean of its column, by the column's deviation: [rows, columns].
void standardise(std::vector<float>& m, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) {
    double sum = 0.0, squares = 0.0;
    for (int64_t r = 0; r < rows; ++r) sum += double{m[static_cast<size_t>(r * columns + c)]};
    const double mean = sum / static_cast<double>(rows);
    for (int64_t r = 0; r < rows; ++r) {
      const double d = double{m[static_cast<size_t>(r * columns + c)]} - mean;
      squares += d * d;
    }
    const auto deviation = static_cast<float>(std::sqrt(squares / static_cast<double>(rows)));
    for (int64_t r = 0; r < rows; ++r) {
      float& x = m[static_cast<size_t>(r * columns + c)];
      x = (x - static_cast<float>(mean)) / deviation;
    }
  }
}

// The median of `width` neighbours; rows are mirrored at their ends.
void filter_medians(std::vector<float>& m, int64_t rows, int64_t columns, int width) {
  const int64_t side = width / 2;
  if (columns <= side) return;
  std::vector<float> row(static_cast<size_t>(columns)), near(static_cast<size_t>(width));
  // NaNs come last.
  const auto before = [](float a, float b) { return std::isnan(b) ? !std::isnan(a) : a < b; };
  for (int64_t r = 0; r < rows; ++r) {
    float* const at = m.data() + r * columns;
    std::copy_n(at, columns, row.begin());
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t i = 0; i < width; ++i) {
        int64_t from = std::abs(c + i - side);
        if (from >= columns) from = 2 * (columns - 1) - from;
        near[static_cast<size_t>(i)] = row[static_cast<size_t>(from)];
      }
      std::ranges::sort(near, before);
      at[c] = near[static_cast<size_t>(side)];
    }
  }
}

// The cheapest path from the first row and column to the last ones; for each row its first column.
std::vector<int64_t> warp(const std::vector<float>& costs, int64_t rows, int64_t columns) {
  enum Step : uint8_t { kBoth, kRow, kColumn };
  const int64_t stride = columns + 1;
  const auto index = [&](int64_t r, int64_t c) { return static_cast<size_t>(r * stride + c); };
  std::vector<float> total(static_cast<size_t>((rows + 1) * stride),
                           std::numeric_limits<float>::infinity());
  std::vector<uint8_t> trace(total.size(), kColumn);
  total[0] = 0.0f;
  for (int64_t c = 1; c <= columns; ++c) {
    for (int64_t r = 1; r <= rows; ++r) {
      const float both = total[index(r - 1, c - 1)];
      const float row = total[index(r - 1, c)], column = total[index(r, c - 1)];
      Step step = kColumn;
      float from = column;
      if (both < row && both < column) {
        step = kBoth;
        from = both;
      } else if (row < both && row < column) {
        step = kRow;
        from = row;
      }
      const double cost = double{costs[static_cast<size_t>((r - 1) * columns + c - 1)]};
      total[index(r, c)] = static_cast<float>(cost + double{from});
      trace[index(r, c)] = step;
    }
  }
  for (int64_t r = 1; r <= rows; ++r) trace[index(r, 0)] = kRow;
  std::vector<int64_t> first(static_cast<size_t>(rows), 0);
  for (int64_t r = rows, c = columns; r > 0 || c > 0;) {
    if (r > 0) first[static_cast<size_t>(r - 1)] = std::max<int64_t>(0, c - 1);
    const uint8_t step = trace[index(r, c)];
    r -= step != kColumn ? 1 : 0;
    c -= step != kRow ? 1 : 0;
  }
  return first;
}

// A run of tokens, as a text with the indices of its tokens.
struct Piece {
  std::string text;
  size_t first = 0, end = 0;
};

// Tokens that are whole characters together.
std::vector<Piece> whole_characters(const Tokenizer& tokenizer, std::span<const int32_t> tokens) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  const std::string all = tokenizer.decode(tokens);
  std::vector<Piece> pieces;
  size_t begin = 0, offset = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::string text = tokenizer.decode(tokens.subspan(begin, i + 1 - begin));
    const size_t cut = text.find(kReplacement);
    const bool whole = cut == std::string::npos || offset + cut >= all.size() ||
                       all.compare(offset + cut, kReplacement.size(), kReplacement) == 0;
    if (!whole) continue;
    offset += text.size();
    pieces.push_back({std::move(text), begin, i + 1});
    begin = i + 1;
  }
  // A character that the tokens do not complete.
  if (begin < tokens.size())
    pieces.push_back({tokenizer.decode(tokens.subspan(begin)), begin, tokens.size()});
  return pieces;
}

std::string_view without_spaces(std::string_view s) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t first = s.find_first_not_of(kSpace);
  if (first == s.npos) return {};
  return s.substr(first, s.find_last_not_of(kSpace) - first + 1);
}

void join(Piece& to, const Piece& next) {
  to.text += next.text;
  to.end = next.end;
}

// Pieces that begin with a space, and punctuation, begin words.
std::vector<Piece> at_spaces(std::vector<Piece> pieces) {
  constexpr std::string_view kPunctuation = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";
  std::vector<Piece> words;
  for (Piece& piece : pieces) {
    const bool marks = kPunctuation.find(without_spaces(piece.text)) != kPunctuation.npos;
    if (words.empty() || piece.text.starts_with(' ') || marks)
      words.push_back(std::move(piece));
    else
      join(words.back(), piece);
  }
  return words;
}

// Opening marks belong to the word behind them, others to the one before.
std::vector<Piece> with_marks(std::vector<Piece> words) {
  constexpr std::string_view kOpening = "\"'“¡¿([{-";
  constexpr std::string_view kClosing = "\"'.。,，!！?？:：”)]}、";
  for (size_t i = words.size(), next = words.size(); i-- > 0;) {
    const std::string_view text = words[i].text;
    const bool opens = text.starts_with(' ') && kOpening.find(without_spaces(text)) != text.npos;
    if (!opens || next >= words.size()) {
      next = i;
      continue;
    }
    Piece joined = std::move(words[i]);
    join(joined, words[next]);
    words[next] = std::move(joined);
    words[i].text.clear();
  }
  std::erase_if(words, [](const Piece& word) { return word.text.empty(); });
  std::vector<Piece> out;
  for (Piece& word : words) {
    const bool closes = !out.empty() && !out.back().text.ends_with(' ') &&
                        kClosing.find(word.text) != kClosing.npos;
    if (closes)
      join(out.back(), word);
    else
      out.push_back(std::move(word));
  }
  return out;
}

}  // namespace

std::vector<int64_t> token_ends(const CrossWeights& weights, int64_t first, int64_t count,
                                int64_t columns, int width) {
  if (count <= 0 || columns <= 0 || weights.weights.empty()) return {};
  columns = std::min(columns, weights.positions);
  std::vector<float> costs(static_cast<size_t>(count * columns), 0.0f);
  std::vector<float> one(costs.size());
  for (const std::vector<float>& head : weights.weights) {
    FRESHET_CHECK(std::ssize(head) >= (first + count) * weights.positions,
                  "weights of fewer tokens than were written");
    for (int64_t r = 0; r < count; ++r) {
      std::copy_n(head.begin() + (first + r) * weights.positions, columns,
                  one.begin() + r * columns);
    }
    standardise(one, count, columns);
    filter_medians(one, count, columns, width);
    for (size_t i = 0; i < costs.size(); ++i) costs[i] += one[i];
  }
  const auto heads = static_cast<float>(weights.weights.size());
  for (float& c : costs) c = -(c / heads);
  return warp(costs, count, columns);
}

std::vector<Word> words_of(const Tokenizer& tokenizer, std::span<const int32_t> tokens,
                           std::span<const double> begins, std::span<const double> ends,
                           const std::string& language) {
  constexpr std::array<std::string_view, 6> kUnspaced = {"zh", "ja", "th", "lo", "my", "yue"};
  std::vector<Piece> pieces = whole_characters(tokenizer, tokens);
  if (std::ranges::find(kUnspaced, language) == kUnspaced.end())
    pieces = at_spaces(std::move(pieces));
  std::vector<Word> words;
  for (const Piece& piece : with_marks(std::move(pieces))) {
    words.push_back(
        {std::string(without_spaces(piece.text)), begins[piece.first], ends[piece.end - 1]});
  }
  return words;
}

}  // namespace freshet::speech
