#include "eval/logits.h"

#include <algorithm>
#include <cmath>

#include "sampling/logits.h"

namespace freshet::eval {
namespace {

double nats(std::span<const float> logits, int32_t id, LogitScratch& scratch) {
  return log_sum_exp(logits, find_maxima(logits, scratch), scratch) -
         static_cast<double>(logits[static_cast<size_t>(id)]);
}

// Scores the windows of one batch; adds a mean for each to `means`.
Status score(Session& session, std::span<const std::span<const int32_t>> windows, int32_t bos,
             LogitScratch& scratch, std::vector<double>& means) {
  const int64_t vocab = session.model().spec().vocab_size;
  const bool with_bos = bos >= 0;
  std::vector<double> sums(windows.size(), 0.0);
  for (size_t w = 0; w < windows.size(); ++w) session.reset(static_cast<int>(w));
  // Token i of a window is scored by the logits of the token before it, which is bos for i = 0.
  const auto count = static_cast<int64_t>(windows.front().size());
  const int64_t step =
      std::max<int64_t>(1, session.options().logit_rows / static_cast<int64_t>(windows.size()));
  std::vector<std::vector<int32_t>> inputs;
  for (const auto window : windows) {
    std::vector<int32_t> input(window.begin(), window.end() - 1);
    if (with_bos) input.insert(input.begin(), bos);
    inputs.push_back(std::move(input));
  }
  const auto length = static_cast<int64_t>(inputs.front().size());
  for (int64_t first = 0; first < length; first += step) {
    const int64_t n = std::min(step, length - first);
    std::vector<Session::Piece> pieces;
    for (size_t w = 0; w < windows.size(); ++w) {
      const std::span<const int32_t> ids(inputs[w]);
      pieces.push_back({static_cast<int>(w),
                        ids.subspan(static_cast<size_t>(first), static_cast<size_t>(n)), 0});
    }
    const std::span<const float> rows = session.run(pieces);
    for (size_t w = 0; w < windows.size(); ++w) {
      for (int64_t i = 0; i < n; ++i) {
        const auto row = static_cast<size_t>((static_cast<int64_t>(w) * n + i) * vocab);
        const int64_t target = first + i + (with_bos ? 0 : 1);
        sums[w] += nats(rows.subspan(row, static_cast<size_t>(vocab)),
                        windows[w][static_cast<size_t>(target)], scratch);
      }
    }
  }
  for (const double sum : sums) {
    if (!std::isfinite(sum)) return internal_error("the model's logits are not finite");
    means.push_back(sum / static_cast<double>(with_bos ? count : count - 1));
  }
  return {};
}

}  // namespace

int64_t known_ids(const ModelSpec& spec) {
  const int64_t image_token = spec.vision != nullptr ? spec.vision->image_token : -1;
  return std::max<int64_t>(spec.vocab_size, image_token + 1);
}

Status check_ids(std::span<const int32_t> ids, int64_t vocab) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab)
      return invalid_argument("token id {} is outside the model's vocabulary of {}", id, vocab);
  }
  return {};
}

int64_t longest_span(const runtime::PicturePrompt& prompt) {
  int64_t longest = 0;
  for (const ops::KeyRange& span : prompt.spans)
    longest = std::max<int64_t>(longest, span.end - span.first);
  return longest;
}

Status each_logits(Session& session, std::span<const int32_t> ids, const EncoderInput& encoder,
                   const SeenPictures* pictures,
                   const std::function<Status(int64_t, std::span<const float>)>& row) {
  const auto vocab = static_cast<size_t>(session.model().spec().vocab_size);
  FRESHET_RETURN_IF_ERROR(check_ids(ids, known_ids(session.model().spec())));
  const int64_t step = std::min(session.options().batch, session.options().logit_rows) -
                       (pictures != nullptr ? longest_span(pictures->prompt) : 0);
  const auto length = static_cast<int64_t>(ids.size());
  session.reset(0);
  for (int64_t first = 0, next = 0; first < length; first = next) {
    // The tokens of a picture that see one another run together.
    int64_t end = std::min(first + step, length);
    if (pictures != nullptr && !pictures->prompt.spans.empty())
      end = std::max<int64_t>(end, pictures->prompt.spans[static_cast<size_t>(end - 1)].end);
    const int64_t n = end - first;
    next = end;
    Session::Piece piece{0, ids.subspan(static_cast<size_t>(first), static_cast<size_t>(n)), 0};
    piece.pictures = pictures;
    if (first == 0) piece.encoder = encoder;
    const std::span<const float> rows = session.run({&piece, 1});
    for (int64_t i = 0; i < n; ++i)
      FRESHET_RETURN_IF_ERROR(row(first + i, rows.subspan(static_cast<size_t>(i) * vocab, vocab)));
  }
  return {};
}

Result<Perplexity> perplexity(Session& session, std::span<const int32_t> ids,
                              const PerplexityOptions& options,
                              const std::function<bool(double)>& progress) {
  FRESHET_RETURN_IF_ERROR(check_ids(ids, session.model().spec().vocab_size));
  const auto window = static_cast<size_t>(options.window);
  const size_t windows = ids.size() / window;
  if (windows == 0)
    return invalid_argument("the text has {} tokens; a window needs {}", ids.size(), window);
  std::vector<double> means;
  LogitScratch scratch(session.model().spec().vocab_size);
  const auto at_once = static_cast<size_t>(session.options().sequences);
  for (size_t w = 0; w < windows; w += at_once) {
    std::vector<std::span<const int32_t>> batch;
    for (size_t i = w; i < std::min(windows, w + at_once); ++i)
      batch.push_back(ids.subspan(i * window, window));
    FRESHET_RETURN_IF_ERROR(score(session, batch, options.bos, scratch, means));
    if (!progress(static_cast<double>(means.size()) / static_cast<double>(windows)))
      return cancelled("interrupted");
  }
  Perplexity p;
  p.windows = std::ssize(means);
  p.tokens = p.windows * (options.window - (options.bos >= 0 ? 0 : 1));
  for (const double m : means) p.nats_per_token += m / static_cast<double>(means.size());
  double variance = 0.0;
  for (const double m : means) variance += (m - p.nats_per_token) * (m - p.nats_per_token);
  if (means.size() > 1)
    p.standard_error = std::sqrt(variance / static_cast<double>(means.size() - 1) /
                                 static_cast<double>(means.size()));
  return p;
}

}  // namespace freshet::eval
