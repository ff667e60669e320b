#include "speech/transcription.h"

#include <algorithm>
#include <utility>

#include <zlib.h>

#include "tokenizer/tokenizer.h"

namespace freshet::speech {
namespace {

// How much shorter zlib makes a text: high for one that repeats itself.
double compression_ratio(const std::string& text) {
  if (text.empty()) return 0.0;
  uLongf size = compressBound(static_cast<uLong>(text.size()));
  std::vector<Bytef> out(size);
  const int done = compress(out.data(), &size, reinterpret_cast<const Bytef*>(text.data()),
                            static_cast<uLong>(text.size()));
  FRESHET_CHECK(done == Z_OK, "zlib compresses into a buffer that suffices");
  return static_cast<double>(text.size()) / static_cast<double>(size);
}

std::string_view trimmed(std::string_view s) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t first = s.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return s.substr(first, s.find_last_not_of(kSpace) - first + 1);
}

// As many tokens of earlier text as a decoder of `max_tokens` reads.
size_t most_earlier_tokens(int max_tokens) {
  return static_cast<size_t>(std::max(0, max_tokens / 2 - 1));
}

// Text made at a higher temperature does not stand before later windows: errors would spread.
constexpr float kSteadyTemperature = 0.5f;

}  // namespace

std::vector<int32_t> prompt_tokens(const SpeechModel& model, const Tokenizer& tokenizer,
                                   const std::string& text) {
  const std::string_view words = trimmed(text);
  if (words.empty() || model.tokens.previous < 0) return {};
  std::vector<int32_t> ids =
      tokenizer.encode(" " + std::string(words), {.add_special = false, .parse_special = false});
  const size_t most = most_earlier_tokens(model.max_tokens);
  if (ids.size() > most) ids.erase(ids.begin(), ids.end() - static_cast<ptrdiff_t>(most));
  return ids;
}

Transcription::Transcription(const SpeechModel& model, const Tokenizer& tokenizer,
                             const TranscribeOptions& options, std::vector<float> samples)
    : model_(model), tokenizer_(tokenizer), options_(options), language_(options.language) {
  temperature_ = options.temperature;
  media::MelSettings mel = model.mel;
  const auto given = static_cast<int64_t>(samples.size());
  duration_ = static_cast<double>(given) / mel.rate;
  frames_ = std::max<int64_t>(1, given / mel.hop);
  begun_ = std::max<int64_t>(1, (given + mel.hop - 1) / mel.hop);
  if (given > mel.samples) mel.samples = static_cast<int>(given);
  stride_ = mel.frames();
  frames_ = std::min(frames_, stride_);
  features_ = media::LogMel(mel).features(samples);
  if (model.tokens.languages.empty()) language_ = "en";
}

Request Transcription::next_window() {
  FRESHET_CHECK(!done(), "the whole sound is transcribed");
  window_.seek = seek_;
  window_.frames = std::min(model_.window_frames, frames_ - seek_);
  const SpeechTokens& t = model_.tokens;
  RuleOptions rules;
  rules.timestamps = options_.timestamps;
  if (!language_.empty()) rules.language = t.language(language_);
  rules.task = options_.translate ? t.translate : t.transcribe;
  window_.rules = std::make_shared<WhisperRules>(t, rules);

  Request request;
  const auto mels = static_cast<int64_t>(model_.mel.mels);
  request.frames = model_.window_frames;
  request.features.assign(static_cast<size_t>(mels * request.frames), 0.0f);
  // The first window of a short sound has its silence; what lies behind a long one's end is 0.
  const int64_t there = std::min(model_.window_frames, (seek_ == 0 ? stride_ : frames_) - seek_);
  for (int64_t m = 0; m < mels; ++m) {
    const auto from = features_.begin() + m * stride_ + seek_;
    std::copy(from, from + there, request.features.begin() + m * request.frames);
  }
  request.cache_salt = options_.cache_salt;
  request.prompt = earlier_text();
  request.prompt.push_back(t.start);
  window_.weights.reset();
  if (options_.words) {
    window_.weights = std::make_shared<CrossWeights>();
    window_.weights->heads = model_.alignment_heads;
    request.cross_weights = window_.weights;
    window_.text_at = std::ssize(request.prompt) + window_.rules->lead_tokens();
  }
  SamplingParams& p = request.params;
  p.temperature = temperature_;
  p.seed = options_.seed;
  // A transcript at temperature 0 is repeatable, also where a window is made again.
  if (!p.seed && options_.temperature == 0.0f) p.seed = 0;
  p.max_tokens = model_.max_tokens;
  p.stop_token_ids = {t.end};
  p.rules = window_.rules;
  return request;
}

// <|startofprev|> and what was said before the window; empty if nothing was.
std::vector<int32_t> Transcription::earlier_text() const {
  std::vector<int32_t> text = options_.prompt;
  text.insert(text.end(), said_.begin(), said_.end());
  if (text.empty() || model_.tokens.previous < 0) return {};
  const size_t most = most_earlier_tokens(model_.max_tokens);
  if (text.size() > most) text.erase(text.begin(), text.end() - static_cast<ptrdiff_t>(most));
  text.insert(text.begin(), model_.tokens.previous);
  return text;
}

std::string Transcription::plain_text(std::span<const int32_t> ids) const {
  std::vector<int32_t> words;
  const auto lead = static_cast<size_t>(window_.rules->lead_tokens());
  for (size_t i = lead; i < ids.size(); ++i) {
    if (ids[i] < model_.tokens.end) words.push_back(ids[i]);
  }
  return tokenizer_.decode(words, {.skip_special = true});
}

void Transcription::add(std::span<const int32_t> tokens, double start, double end,
                        const Segment& common) {
  Segment s = common;
  s.start = start;
  s.end = std::max(start, end);
  s.tokens.assign(tokens.begin(), tokens.end());
  std::vector<int32_t> words;
  for (const int32_t id : tokens) {
    if (id < model_.tokens.end) words.push_back(id);
  }
  s.text = tokenizer_.decode(words, {.skip_special = true});
  if (!window_.ends.empty()) add_words(tokens, s);
  segments_.push_back(std::move(s));
}

// When the tokens of the window end, in seconds. The weights of the last one are missing: nothing
// was written behind it.
void Transcription::find_ends() {
  window_.ends.clear();
  if (window_.weights == nullptr || window_.tokens.empty()) return;
  const CrossWeights& w = *window_.weights;
  const int64_t known =
      w.weights.empty() ? 0 : std::ssize(w.weights.front()) / w.positions - window_.text_at;
  const int64_t count = std::min(known, std::ssize(window_.tokens));
  const double offset = static_cast<double>(window_.seek) * model_.seconds_per_frame();
  const int64_t columns = std::min(model_.window_frames, begun_ - window_.seek) / 2;
  for (const int64_t end : token_ends(w, window_.text_at, count, columns, model_.median_filter))
    window_.ends.push_back(offset + static_cast<double>(end) * model_.seconds_per_timestamp());
  window_.ends.resize(window_.tokens.size(), window_.ends.empty() ? offset : window_.ends.back());
}

void Transcription::add_words(std::span<const int32_t> tokens, Segment& s) const {
  const auto first = static_cast<size_t>(tokens.data() - window_.tokens.data());
  const double offset = static_cast<double>(window_.seek) * model_.seconds_per_frame();
  std::vector<int32_t> said;
  std::vector<double> begins, ends;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const size_t at = first + i;
    s.token_ends.push_back(window_.ends[at]);
    if (tokens[i] >= model_.tokens.end) continue;
    said.push_back(tokens[i]);
    begins.push_back(at == 0 ? offset : window_.ends[at - 1]);
    ends.push_back(window_.ends[at]);
  }
  s.words = words_of(tokenizer_, said, begins, ends, language_);
}

int64_t Transcription::split(std::span<const int32_t> tokens, const Segment& common) {
  const int32_t first = model_.tokens.first_timestamp();
  const double step = model_.seconds_per_timestamp();
  const double offset = static_cast<double>(window_.seek) * model_.seconds_per_frame();
  const auto is_time = [&](size_t i) { return tokens[i] >= first; };
  const auto time_of = [&](int32_t id) { return offset + step * (id - first); };
  const size_t n = tokens.size();
  std::vector<size_t> ends;  // of segments: behind the first timestamp of a pair
  for (size_t i = 1; i < n; ++i) {
    if (is_time(i - 1) && is_time(i)) ends.push_back(i);
  }
  if (ends.empty()) {  // one segment: to the last timestamp, or to the end of the window
    double end = offset + static_cast<double>(window_.frames) * model_.seconds_per_frame();
    for (size_t i = n; i-- > 0;) {
      if (!is_time(i)) continue;
      if (tokens[i] != first) end = time_of(tokens[i]);
      break;
    }
    if (n > 0) add(tokens, offset, end, common);
    return window_.frames;
  }
  // A single timestamp at the end: nothing is said behind it. Otherwise what follows the last pair
  // is cut off by the window's end, and is heard again.
  const bool complete = n >= 2 && is_time(n - 1) && !is_time(n - 2);
  if (complete) ends.push_back(n);
  size_t begin = 0;
  for (const size_t end : ends) {
    const auto part = tokens.subspan(begin, end - begin);
    const double from = part.front() >= first ? time_of(part.front()) : offset;
    add(part, from, part.back() >= first ? time_of(part.back()) : from, common);
    begin = end;
  }
  if (complete) return window_.frames;
  return 2 * int64_t{tokens[ends.back() - 1] - first};
}

Transcription::Verdict Transcription::judge(const Segment& window) const {
  if (!options_.retries) return Verdict::kKeep;
  const RetryOptions& limits = *options_.retries;
  const bool unlikely = window.avg_logprob < static_cast<double>(limits.logprob);
  if (unlikely && window.no_speech_prob > static_cast<double>(limits.no_speech))
    return Verdict::kSkip;
  const bool repeats = window.compression_ratio > static_cast<double>(limits.compression_ratio);
  const bool hotter = limits.temperature_increment > 0.0f && temperature_ < 1.0f;
  return (unlikely || repeats) && hotter ? Verdict::kRetry : Verdict::kKeep;
}

void Transcription::take(std::span<const int32_t> ids) {
  const WhisperRules& rules = *window_.rules;
  const auto lead = std::min(ids.size(), static_cast<size_t>(rules.lead_tokens()));
  if (language_.empty() && !ids.empty()) language_ = model_.tokens.code_of(ids.front());
  std::span<const int32_t> tokens = ids.subspan(lead);
  if (!tokens.empty() && tokens.back() == model_.tokens.end)
    tokens = tokens.first(tokens.size() - 1);
  window_.tokens = tokens;
  find_ends();
  Segment common;
  common.seek = window_.seek;
  common.no_speech_prob = rules.no_speech();
  common.avg_logprob = rules.mean_logprob(ids);
  common.compression_ratio = compression_ratio(plain_text(ids));
  common.temperature = temperature_;
  const Verdict verdict = judge(common);
  if (verdict == Verdict::kRetry) {
    temperature_ = std::min(
        1.0f, temperature_ + std::max(kLeastIncrement, options_.retries->temperature_increment));
    return;
  }
  const size_t before = segments_.size();
  int64_t passed = window_.frames;
  if (verdict == Verdict::kKeep) {
    if (options_.timestamps)
      passed = split(tokens, common);
    else
      add(tokens, 0.0, duration_, common);
  }
  if (options_.condition_on_previous_text) {
    for (size_t i = before; i < segments_.size(); ++i)
      said_.insert(said_.end(), segments_[i].tokens.begin(), segments_[i].tokens.end());
    if (temperature_ > kSteadyTemperature) said_.clear();
  }
  temperature_ = options_.temperature;
  // A model that says nothing happens at all would never come to an end.
  seek_ += passed > 0 ? std::min(passed, window_.frames) : window_.frames;
}

std::string Transcription::text() const {
  std::string all;
  for (const Segment& s : segments_) all += s.text;
  return std::string(trimmed(all));
}

}  // namespace freshet::speech
