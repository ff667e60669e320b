#include "quantizer/calibration/input_collector.h"

#include <algorithm>
#include <cmath>

#include "base/hash.h"
#include "ops/device.h"

namespace freshet::quantizer {

struct InputCollector::Shared {
  InputStats stats;
  int32_t first_reader = -1;
  std::vector<double> sum_abs, sum_square;  // [cols]
  Buffer gram_there;                        // the sums in the device's memory until finish()
};

namespace {

constexpr int64_t kPad = 32;  // the kernels' step along a row

}  // namespace

InputCollector::InputCollector(const Wants& wants, ops::Ops& ops, int64_t step_tokens,
                               int64_t step_cols, ops::Device* device)
    : wants_(wants), ops_(ops), step_tokens_(step_tokens), step_cols_(step_cols), device_(device) {}

InputCollector::~InputCollector() = default;

void InputCollector::begin_step() {
  in_step_.clear();
}

void InputCollector::before(const ops::Weight& weight, const Matrix& x) {
  if (weight.id < 0 || x.rows == 0 || !failure_.ok()) return;
  uint64_t hash = static_cast<uint64_t>(x.rows) << 32 | static_cast<uint64_t>(x.cols);
  for (int64_t r = 0; r < x.rows; ++r) {
    hash = hash_bytes(
        {reinterpret_cast<const uint8_t*>(x.row(r)), static_cast<size_t>(x.cols) * sizeof(float)},
        hash);
  }
  const auto known = by_id_.find(weight.id);
  const auto same = in_step_.find(hash);
  if (same != in_step_.end() && (known == by_id_.end() || known->second == same->second)) {
    by_id_[weight.id] = same->second;
    return;
  }
  Shared* s = known == by_id_.end() ? nullptr : known->second;
  if (s == nullptr) {
    s = all_.emplace_back(std::make_unique<Shared>()).get();
    const auto cols = static_cast<size_t>(x.cols);
    s->stats.cols = x.cols;
    s->stats.max_abs.resize(cols);
    s->sum_abs.resize(cols);
    s->sum_square.resize(cols);
    s->first_reader = weight.id;
    const bool wanted = wants_.gram_of.empty() || std::ranges::count(wants_.gram_of, weight.id) > 0;
    if (wants_.gram && wanted) make_room_for_gram(*s);
    by_id_[weight.id] = s;
  }
  in_step_[hash] = s;
  add_samples(*s, x);
  add_sums(*s, x);
  if (s->gram_there.size() > 0) {
    add_gram_there(*s, x);
  } else if (!s->stats.gram.empty()) {
    add_gram(*s, x);
  }
}

// On the device if it has the memory.
void InputCollector::make_room_for_gram(Shared& s) {
  const auto cols = static_cast<size_t>(s.stats.cols);
  if (device_ != nullptr && cols % 4 == 0) {
    const size_t inputs = static_cast<size_t>(most_summed()) * cols * sizeof(float);
    if (inputs > inputs_there_.size()) {
      inputs_there_ = {};
      if (auto room = Buffer::allocate(inputs, device_); room.ok())
        inputs_there_ = std::move(*room);
    }
    if (inputs <= inputs_there_.size()) {
      auto sums = Buffer::allocate(cols * cols * sizeof(float), device_);
      if (sums.ok()) s.gram_there = std::move(*sums);
    }
    if (s.gram_there.size() > 0) return;
  }
  s.stats.gram.resize(cols * cols);
}

void InputCollector::storing(const Matrix& q, const Matrix& k, const Matrix& v) {
  const auto raise = [](float& most, const Matrix& x) {
    for (int64_t r = 0; r < x.rows; ++r) {
      const float* row = x.row(r);
      for (int64_t c = 0; c < x.cols; ++c) most = std::max(most, std::fabs(row[c]));
    }
  };
  raise(key_max_, k);
  raise(value_max_, v);
  const auto add_squares = [](std::vector<double>& sums, const Matrix& x) {
    sums.resize(std::max(sums.size(), static_cast<size_t>(x.cols)));
    for (int64_t r = 0; r < x.rows; ++r) {
      const float* row = x.row(r);
      for (int64_t c = 0; c < x.cols; ++c)
        sums[static_cast<size_t>(c)] += static_cast<double>(row[c]) * row[c];
    }
  };
  if (q.rows == k.rows) {
    add_squares(query_squares_, q);
    add_squares(key_squares_, k);
  }
}

void InputCollector::add_samples(Shared& s, const Matrix& x) {
  if (wants_.sample_every == 0) return;
  for (int64_t r = 0; r < x.rows; ++r) {
    if ((s.stats.tokens + r) % wants_.sample_every != 0) continue;
    s.stats.samples.insert(s.stats.samples.end(), x.row(r), x.row(r) + x.cols);
  }
}

void InputCollector::add_sums(Shared& s, const Matrix& x) {
  constexpr int64_t kColumns = 64;  // of a task
  ops_.pool().parallel_for((x.cols + kColumns - 1) / kColumns, [&](int64_t task, int) {
    const auto first = static_cast<size_t>(task * kColumns);
    const auto last = std::min(static_cast<size_t>(x.cols), first + kColumns);
    for (int64_t r = 0; r < x.rows; ++r) {
      const float* row = x.row(r);
      for (size_t c = first; c < last; ++c) {
        const float magnitude = std::fabs(row[c]);
        s.sum_abs[c] += magnitude;
        s.sum_square[c] += static_cast<double>(row[c]) * row[c];
        s.stats.max_abs[c] = std::max(s.stats.max_abs[c], magnitude);
      }
    }
  });
  s.stats.tokens += x.rows;
}

// The most tokens whose products are summed before they are added to the others.
int64_t InputCollector::most_summed() const {
  return std::max<int64_t>(step_cols_ / kPad, 1) * kPad;
}

// gram += x^T x with the bits of add_gram().
void InputCollector::add_gram_there(Shared& s, const Matrix& x) {
  const int64_t most = most_summed();
  for (int64_t first = 0; first < x.rows && failure_.ok(); first += most) {
    const Matrix part = x.slice_rows(first, std::min(most, x.rows - first));
    const float* from = part.data;
    if (part.stride != part.cols) {
      turned_.clear();
      for (int64_t t = 0; t < part.rows; ++t)
        turned_.insert(turned_.end(), part.row(t), part.row(t) + part.cols);
      from = turned_.data();
    }
    failure_ = device_->write(inputs_there_.data(), from,
                              static_cast<size_t>(part.rows * part.cols) * sizeof(float));
    if (!failure_.ok()) return;
    device_->add_moments(s.gram_there.as<float>(),
                         {inputs_there_.as<float>(), part.rows, part.cols, part.cols});
    device_->wait();
  }
}

// gram += x^T x, as products of x^T with itself as a weight: the kernels of the model do the work.
void InputCollector::add_gram(Shared& s, const Matrix& x) {
  const int64_t most = most_summed();
  for (int64_t first = 0; first < x.rows; first += most) {
    const int64_t tokens = std::min(most, x.rows - first);
    const int64_t padded = (tokens + kPad - 1) / kPad * kPad;
    turned_.assign(static_cast<size_t>(x.cols * padded), 0.0f);
    constexpr int64_t kTurned = 64;  // columns of a task
    ops_.pool().parallel_for((x.cols + kTurned - 1) / kTurned, [&](int64_t task, int) {
      const int64_t last = std::min(x.cols, (task + 1) * kTurned);
      for (int64_t t = 0; t < tokens; ++t) {
        const float* row = x.row(first + t);
        for (int64_t c = task * kTurned; c < last; ++c)
          turned_[static_cast<size_t>(c * padded + t)] = row[c];
      }
    });
    std::vector<const uint8_t*> rows(static_cast<size_t>(x.cols));
    for (size_t c = 0; c < rows.size(); ++c)
      rows[c] = reinterpret_cast<const uint8_t*>(turned_.data() + c * static_cast<size_t>(padded));
    auto weight = ops_.pack(quant::Format::kF32, rows, padded, ops::Ops::kNoLook, ops::Use::kExact);
    if (!weight.ok()) {
      failure_ = weight.status();
      return;
    }
    for (int64_t c = 0; c < x.cols; c += step_tokens_) {
      const int64_t count = std::min(step_tokens_, x.cols - c);
      const Matrix in{turned_.data() + c * padded, count, padded, padded};
      ops::Product product;
      product.weight = &*weight;
      product.out = {s.stats.gram.data() + c * x.cols, count, x.cols, x.cols};
      product.add = true;
      ops_.matmul(in, {&product, 1});
    }
  }
}

Status InputCollector::finish() {
  turned_ = {};
  inputs_there_ = {};
  if (!failure_.ok()) return failure_;
  for (const auto& s : all_) {
    InputStats& stats = s->stats;
    if (s->gram_there.size() > 0) {
      stats.gram.resize(s->gram_there.size() / sizeof(float));
      device_->fetch(stats.gram.data(), s->gram_there.data(), s->gram_there.size());
      device_->wait();
      s->gram_there = {};
    }
    const auto tokens = static_cast<double>(stats.tokens);
    for (size_t c = 0; c < s->sum_abs.size(); ++c) {
      stats.mean_abs.push_back(static_cast<float>(s->sum_abs[c] / tokens));
      stats.mean_square.push_back(static_cast<float>(s->sum_square[c] / tokens));
    }
    const auto scale = static_cast<float>(1.0 / tokens);
    ops_.pool().parallel_for(stats.gram.empty() ? 0 : stats.cols, [&](int64_t r, int) {
      float* row = stats.gram.data() + r * stats.cols;
      for (int64_t c = 0; c < stats.cols; ++c) row[c] *= scale;
    });
  }
  return {};
}

InputStats* InputCollector::of(int32_t id) {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &found->second->stats;
}

int32_t InputCollector::first_reader(const InputStats* stats) const {
  for (const auto& s : all_) {
    if (&s->stats == stats) return s->first_reader;
  }
  return -1;
}

}  // namespace freshet::quantizer
