// What a model loses against another one of the same vocabulary, such as the one that it was
// quantised from.
//
// Both run over the same windows of text, side by side, and every token is scored with both: no
// logits are kept. The protocol is that of perplexity() in logits.h, each window after a BOS token
// if the vocabulary has one, all tokens scored, but the rest of a text behind its last whole window
// is a shorter window rather than left out. A window never crosses from one text to the next.
// Differences are paired window by window, and their errors come from the
// windows, since tokens of one window are correlated. Results do not depend on the number of
// threads or on the batch. Blocks the calling thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "eval/model_size.h"
#include "eval/session.h"
#include "eval/statistics.h"
#include "tokenizer/tokenizer.h"

namespace freshet::eval {

using tokenizer::Tokenizer;

struct TextWindows {
  std::vector<int32_t> ids;  // of all windows
  std::vector<size_t> ends;  // [windows] in ids
  int64_t window = 0;        // most tokens of a window
  int32_t bos = -1;          // put before each window; < 0: none, and the first token is not scored
  int64_t windows() const { return std::ssize(ends); }
  std::span<const int32_t> at(int64_t w) const;
  // Equal for equal windows after the same BOS: results are comparable only where it is.
  std::string fingerprint() const;
};
// An error if there is no token to score.
Result<TextWindows> cut_windows(const Tokenizer& tokenizer, std::span<const std::string> texts,
                                int64_t window);

struct ModelComparison {
  std::string base, model;  // as they were named to Comparer
  int64_t tokens = 0;       // scored
  int64_t windows = 0;
  int64_t window = 0;
  std::string fingerprint;             // of the windows
  std::string arithmetic;              // what both ran with: device, cache, reference path
  MeanAndError base_nats, model_nats;  // per token
  MeanAndError delta;                  // of the paired differences, model - base
  Interval delta_interval;             // 95 %, bootstrap over windows
  MeanAndError kl;                     // sum of p ln(p / q), nats per token; p is the base's
  Interval kl_interval;
  double kl_median = 0.0, kl_p99 = 0.0, kl_p999 = 0.0;  // over tokens
  double top1_agreement = 0.0;
  double top1_standard_error = 0.0;
  double rms_delta_p = 0.0;  // of the differences in the probability of the token that came
  ModelSize base_size, model_size;
};
std::string comparison_text(const ModelComparison& c);
json::Object comparison_json(const ModelComparison& c);

// Returns whether to go on.
using CompareProgress = std::function<bool(double fraction)>;

// Everything but names and sizes. REQUIRES: both sessions have `sequences` of at least 1 and the
// same `sequences` and `logit_rows`, a `context` above the window, and the same vocabulary.
Result<ModelComparison> compare(Session& base, Session& model, const TextWindows& windows,
                                const CompareProgress& progress);

// The same for several models after one pass of the base, which may run in other arithmetic than
// they. REQUIRES: as above, of all.
Result<std::vector<ModelComparison>> compare_each(Session& base, std::span<Session* const> models,
                                                  const TextWindows& windows,
                                                  const CompareProgress& progress);

// One line that says how the vocabularies differ, or ok.
Status same_vocabulary(const Tokenizer& base, const Tokenizer& model);

// A base that is loaded once, and compared with any number of models one after the other.
class Comparer {
 public:
  struct Options {
    SessionOptions base;             // limits are filled in
    std::string base_name;           // for results; "": base.model
    std::vector<std::string> texts;  // contents, each a document of its own
    int64_t window = 512;
    int batch = 4;  // windows at once
    // Session::open, or what chooses a device before.
    std::function<Result<std::unique_ptr<Session>>(const SessionOptions&)> open = Session::open;
  };
  static Result<Comparer> make(Options options);

  // `model`: its path and `on_progress` count; all else is as with the base. Loads the base at the
  // first call. Errors: another vocabulary, windows beyond a model's context.
  Result<ModelComparison> compare_with(const SessionOptions& model, const std::string& name,
                                       const CompareProgress& progress);
  const TextWindows& windows() const { return windows_; }

 private:
  Comparer(Options options, Tokenizer tokenizer, TextWindows windows)
      : options_(std::move(options)),
        tokenizer_(std::move(tokenizer)),
        windows_(std::move(windows)) {}

  Options options_;
  Tokenizer tokenizer_;
  TextWindows windows_;
  ModelSpec base_spec_;
  ModelSize base_size_;
  std::unique_ptr<Session> base_;
};

}  // namespace freshet::eval
