#include "sampling/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <ranges>

#include "base/philox.h"
#include "base/status.h"
#include "sampling/race.h"

namespace freshet {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kGreedyBelow = 1e-5f;

bool has_penalties(const SamplingParams& p) {
  return p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
}

// The fraction `part` of the total weight, at least 1.
Weight mass_of(float part, Weight total) {
  const double mass = static_cast<double>(part) * static_cast<double>(total);
  return std::max<Weight>(1, static_cast<Weight>(mass));
}

// Sets the weights of s.candidates. For many candidates it computes the whole row, with the same
// bits.
Weight weigh(std::span<const float> logits, float maximum, float scale, LogitScratch& s) {
  const bool many = s.candidates.size() > logits.size() / 16;
  if (many) exponentials(logits, maximum, scale, s);
  Weight total = 0;
  for (Candidate& x : s.candidates) {
    x.weight = whole(many ? s.weight[static_cast<size_t>(x.id)]
                          : exp_fraction((x.logit - maximum) * scale));
    total += x.weight;
  }
  return total;
}

// Copies those of the first `count` that pass `test` to c[at] and on, in order. Branch-free,
// because the branch would be unpredictable. REQUIRES: they fit c.
template <class Test>
size_t copy_those(std::vector<Candidate>& c, size_t count, size_t at, const Test& test) {
  for (size_t i = 0; i < count; ++i) {
    const Candidate x = c[i];
    c[at] = x;
    at += test(x) ? 1 : 0;
  }
  return at;
}

// Keeps the fewest tokens, in order of `cost` (ties: the better token first), whose weights reach
// `mass`, at least one. Returns the sum of their weights. Only the bucket of costs in which the
// limit falls is sorted, behind the end of `c`; the kept tokens stay in their order.
template <class Cost>
Weight keep_mass(std::vector<Candidate>& c, Weight mass, const Cost& cost) {
  constexpr size_t kBuckets = 1024;
  const auto [least, most] = std::ranges::minmax(c | std::views::transform(cost));
  const double first = least, scale = most > least ? (kBuckets - 1) / (most - least) : 0.0;
  const auto bucket = [&](const Candidate& x) {
    return static_cast<size_t>((cost(x) - first) * scale);
  };
  std::array<Weight, kBuckets> sums{};
  for (const Candidate& x : c) sums[bucket(x)] += x.weight;
  Weight sum = 0;
  size_t last = 0;
  while (last + 1 < kBuckets && sum + sums[last] < mass) sum += sums[last++];

  const size_t kept =
      copy_those(c, c.size(), 0, [&](const Candidate& x) { return bucket(x) <= last; });
  c.resize(2 * kept + 1);
  c.resize(copy_those(c, kept, kept, [&](const Candidate& x) { return bucket(x) == last; }));
  const auto before = [&](const Candidate& x, const Candidate& y) {
    const double cx = cost(x), cy = cost(y);
    return cx != cy ? cx < cy : better(x, y);
  };
  std::sort(c.begin() + static_cast<int64_t>(kept), c.end(), before);
  size_t end = kept;
  while (sum += c[end].weight, sum < mass && end + 1 < c.size()) ++end;
  const Candidate cut = c[end];
  c.resize(copy_those(c, kept, 0, [&](const Candidate& x) { return !before(cut, x); }));
  return sum;
}

// Tokens whose surprise is closest to the expected one, up to `part`. Returns the kept weight.
Weight keep_typical(std::vector<Candidate>& c, Weight total, float part, float maximum,
                    float scale) {
  // A token's surprise, up to a common constant, is its distance from the best logit.
  const auto surprise = [&](const Candidate& x) {
    return static_cast<double>((maximum - x.logit) * scale);
  };
  double expected = 0.0;
  for (const Candidate& x : c) expected += static_cast<double>(x.weight) * surprise(x);
  expected /= static_cast<double>(total);
  return keep_mass(c, mass_of(part, total),
                   [&](const Candidate& x) { return std::abs(surprise(x) - expected); });
}

void apply_mask(std::span<float> logits, TokenMask mask) {
  for (size_t w = 0; w < mask.size(); ++w) {
    if (mask[w] == ~uint32_t{0}) continue;
    const size_t end = std::min(logits.size(), (w + 1) * 32);
    for (size_t i = w * 32; i < end; ++i) {
      if (!((mask[w] >> (i % 32)) & 1)) logits[i] = kNone;
    }
  }
}

}  // namespace

Sampler::Sampler(const SamplingParams& params, int64_t vocab, uint64_t seed, uint32_t index,
                 std::span<const int32_t> prompt, int64_t max_output, std::vector<int32_t> stop_ids)
    : params_(params),
      vocab_(vocab),
      seed_(seed),
      index_(index),
      stop_ids_(std::move(stop_ids)),
      penalties_(has_penalties(params)),
      bans_(params, vocab, prompt) {
  std::erase_if(stop_ids_, [&](int32_t id) { return id < 0 || id >= vocab; });
  std::ranges::stable_sort(params_.logit_bias, {}, [](const auto& entry) { return entry.first; });
  for (const auto& [id, bias] : params_.logit_bias) {
    if (biases_.empty() || biases_.back().id != id) {
      biases_.push_back({id, bias});
    } else {
      biases_.back().bias += bias;
    }
  }
  size_t distinct = 0;
  if (penalties_) {
    const bool prompt_counts = params.repetition_penalty != 1.0f;
    const int64_t longest =
        (prompt_counts ? std::ssize(prompt) : 0) + std::max<int64_t>(max_output, 0);
    distinct = static_cast<size_t>(std::min(longest, vocab));
    counts_ = TokenCounts(distinct);
    if (prompt_counts) {
      for (const int32_t id : prompt) {
        if (id < vocab) counts_.add(id, false);  // a picture's token may lie behind the vocabulary
      }
    }
  }
  banned_.reserve(bans_.most());
  if (!params_.allowed_token_ids.empty()) {
    allowed_.resize(static_cast<size_t>((vocab + 31) / 32));
    for (const int32_t id : params_.allowed_token_ids)
      allowed_[static_cast<size_t>(id / 32)] |= uint32_t{1} << (id % 32);
  }
  if (keeps_output()) said_.reserve(static_cast<size_t>(std::max<int64_t>(max_output, 0)));
  saved_.reserve(distinct + biases_.size() + stop_ids_.size());
}

bool Sampler::greedy() const {
  return params_.temperature < kGreedyBelow;
}

uint64_t Sampler::bits(int64_t position, Purpose purpose) const {
  return philox_bits(seed_, static_cast<uint64_t>(position),
                     index_ * 4 + static_cast<uint32_t>(purpose));
}

void Sampler::accept(int32_t id) {
  ++outputs_;
  if (keeps_output()) said_.push_back(id);
  if (penalties_) counts_.add(id, true);
}

void Sampler::change(std::span<float> logits, int32_t id, float value) {
  float& l = logits[static_cast<size_t>(id)];
  saved_.emplace_back(id, l);
  l = value;
}

void Sampler::adjust(std::span<float> logits, TokenMask mask) {
  saved_.clear();
  if (params_.rules != nullptr) params_.rules->apply(said_, logits.data(), std::ssize(logits));
  apply_mask(logits, mask);
  apply_mask(logits, allowed_);
  for (const TokenCounts::Entry& e : counts_.entries()) {
    float l = logits[static_cast<size_t>(e.id)];
    l = l > 0.0f ? l / params_.repetition_penalty : l * params_.repetition_penalty;
    l -= params_.frequency_penalty * static_cast<float>(e.outputs);
    if (e.outputs > 0) l -= params_.presence_penalty;
    change(logits, e.id, l);
  }
  for (const auto& [id, bias] : biases_) change(logits, id, logits[static_cast<size_t>(id)] + bias);
  if (!may_end(outputs_)) {
    for (const int32_t id : stop_ids_) change(logits, id, kNone);
  }
  banned_.clear();
  if (keeps_output()) {
    bans_.list(said_, banned_);
  } else {
    bans_.list(outputs_, banned_);
  }
  for (const int32_t id : banned_) logits[static_cast<size_t>(id)] = kNone;
}

Weight Sampler::filter(std::span<const float> logits, float maximum, SamplerScratch& s) const {
  const float scale = 1.0f / params_.temperature;
  auto& c = s.row.candidates;
  Weight total = 0;
  const bool top_k = params_.top_k > 0 && params_.top_k < vocab_;
  if (top_k || params_.min_p > 0.0f) {
    const float least = maximum + cut();
    if (top_k) {
      gather_best(logits, params_.top_k, s.row);
      while (c.size() > 1 && c.back().logit < least) c.pop_back();
    } else {
      gather_above(logits, least, s.row);
    }
    total = weigh(logits, maximum, scale, s.row);
  } else if (params_.top_p < 1.0f) {
    // All tokens below `floor` together weigh less than top-p drops.
    total = exponentials(logits, maximum, scale, s.row);
    const double floor = (1.0 - static_cast<double>(params_.top_p)) * static_cast<double>(total) *
                         std::ldexp(1.0, -kWeightBits) / static_cast<double>(vocab_);
    gather_above(
        logits, maximum + params_.temperature * static_cast<float>(std::log(floor)) - 1e-3f, s.row);
    for (Candidate& x : c) x.weight = whole(s.row.weight[static_cast<size_t>(x.id)]);
  } else {
    gather_above(logits, kNone, s.row);
    total = weigh(logits, maximum, scale, s.row);
  }
  if (params_.top_p < 1.0f) {
    total = keep_mass(c, mass_of(params_.top_p, total),
                      [](const Candidate& x) { return -static_cast<double>(x.logit); });
  }
  if (params_.typical_p < 1.0f) total = keep_typical(c, total, params_.typical_p, maximum, scale);
  return total;
}

int32_t Sampler::draw(std::span<const float> logits, float maximum, int64_t position,
                      SamplerScratch& s) const {
  const Race race(seed_, index_, position);
  const bool filtered =
      params_.top_k > 0 || params_.min_p > 0.0f || params_.top_p < 1.0f || params_.typical_p < 1.0f;
  if (!filtered) return race.winner(logits, maximum, 1.0f / params_.temperature, s.row);
  filter(logits, maximum, s);
  return race.winner(s.row.candidates);
}

int32_t Sampler::sample(std::span<float> logits, int64_t position, SamplerScratch& s,
                        TokenMask mask, std::vector<TokenLogprob>* logprobs) {
  FRESHET_CHECK(std::ssize(logits) == vocab_, "{} logits, planned for {}", logits.size(), vocab_);
  double log_sum = 0.0;
  const bool want = logprobs != nullptr && params_.logprobs >= 0;
  if (want) log_sum = raw_logprobs(logits, -1, params_.logprobs, s, *logprobs);
  adjust(logits, mask);
  const float maximum = find_maxima(logits, s.row);
  if (maximum == kNone) return -1;
  const bool certain = greedy() || maximum == std::numeric_limits<float>::infinity();
  const int32_t id = certain ? argmax(logits, s.row) : draw(logits, maximum, position, s);
  if (want) {
    float raw = logits[static_cast<size_t>(id)];
    const auto changed = std::find_if(saved_.begin(), saved_.end(),
                                      [&](const auto& entry) { return entry.first == id; });
    if (changed != saved_.end()) raw = changed->second;
    logprobs->insert(logprobs->begin(),
                     {id, static_cast<float>(static_cast<double>(raw) - log_sum)});
  }
  return id;
}

namespace {

template <class T>
ops::SampleRow::List append(std::vector<int32_t>& words, std::span<const T> items) {
  const size_t at = words.size();
  words.resize(at + items.size_bytes() / sizeof(int32_t));
  if (!items.empty()) std::memcpy(words.data() + at, items.data(), items.size_bytes());
  return {static_cast<int32_t>(at), static_cast<int32_t>(items.size())};
}

}  // namespace

bool Sampler::describe(int64_t position, TokenMask mask, int unseen, ops::SampleRow& row,
                       std::vector<int32_t>& words) const {
  row = {};
  if (keeps_output() || params_.logprobs >= 0 || (params_.typical_p < 1.0f && !greedy()))
    return false;
  if (penalties_ && unseen > 1) return false;
  row.how = greedy() ? ops::SampleRow::kBest : ops::SampleRow::kDraw;
  if (!greedy()) {
    row.scale = 1.0f / params_.temperature;
    row.min_p_cut = cut();
    row.top_k = params_.top_k;
    row.top_p = params_.top_p;
    row.race = Race(seed_, index_, position).stream();
  }
  row.repetition = params_.repetition_penalty;
  row.frequency = params_.frequency_penalty;
  row.presence = params_.presence_penalty;
  row.allowed = append(words, mask.empty() ? TokenMask(allowed_) : mask);
  if (!mask.empty() && !allowed_.empty()) {  // a mask may be shorter: it allows what it lacks
    const auto at = static_cast<size_t>(row.allowed.at);
    for (size_t w = 0; w < mask.size() && w < allowed_.size(); ++w)
      words[at + w] = static_cast<int32_t>(mask[w] & allowed_[w]);
    for (size_t w = mask.size(); w < allowed_.size(); ++w, ++row.allowed.count)
      words.push_back(static_cast<int32_t>(allowed_[w]));
  }
  row.seen = append<TokenCounts::Entry>(words, counts_.entries());
  row.biases = append<ops::SampleRow::Bias>(words, biases_);
  if (penalties_ && unseen == 1) row.last = 0;
  const size_t barred = words.size();
  bans_.list(outputs_ + unseen, words);
  if (!may_end(outputs_ + unseen)) words.insert(words.end(), stop_ids_.begin(), stop_ids_.end());
  row.barred = {static_cast<int32_t>(barred), static_cast<int32_t>(words.size() - barred)};
  return true;
}

float Sampler::cut() const {
  return params_.min_p > 0.0f ? params_.temperature * std::log(params_.min_p) : kNone;
}

std::span<const Candidate> Sampler::distribution(std::span<float> logits, SamplerScratch& s,
                                                 TokenMask mask) {
  adjust(logits, mask);
  const float maximum = find_maxima(logits, s.row);
  auto& c = s.row.candidates;
  c.clear();
  if (maximum == kNone) return c;
  if (greedy() || maximum == std::numeric_limits<float>::infinity()) {
    c.push_back({argmax(logits, s.row), maximum, 1});
    return c;
  }
  filter(logits, maximum, s);
  return c;
}

double raw_logprobs(std::span<const float> logits, int32_t chosen, int count, SamplerScratch& s,
                    std::vector<TokenLogprob>& out) {
  out.clear();
  const float maximum = find_maxima(logits, s.row);
  if (maximum == kNone) return static_cast<double>(kNone);
  const double log_sum = log_sum_exp(logits, maximum, s.row);
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - log_sum);
  };
  if (chosen >= 0) out.push_back({chosen, logprob(logits[static_cast<size_t>(chosen)])});
  if (count > 0) {
    gather_best(logits, std::min<int64_t>(count, std::ssize(logits)), s.row);
    for (const Candidate& c : s.row.candidates) out.push_back({c.id, logprob(c.logit)});
  }
  return log_sum;
}

}  // namespace freshet
