// Positions on several axes (M-RoPE, the rows and columns of a tower).
//
// A device has an op for one axis. Tokens behind pictures have the same position on all axes, so
// that this op suffices for steps that decode; tables of other steps are made on the host, and such
// steps are never replayed.
#include <cmath>

#include "layers/decoder.h"
#include "ops/device.h"

namespace freshet {

namespace {

// The tokens' positions, if each has the same on all axes; otherwise false.
bool even_positions(const ForwardBatch& batch, std::vector<int32_t>& out) {
  out.clear();
  if (batch.tokens() == 0) return true;
  const int64_t axes = std::ssize(batch.axis_positions) / batch.tokens();
  for (auto token = batch.axis_positions.begin(); token != batch.axis_positions.end();
       token += axes) {
    for (int64_t axis = 1; axis < axes; ++axis) {
      if (token[axis] != *token) {
        out.clear();
        return false;
      }
    }
    out.push_back(*token);
  }
  return true;
}

}  // namespace

// Fills even_ and last_even_. Whether a device makes all tables of the step.
bool Decoder::find_even_positions(const ForwardBatch& batch, bool narrows) {
  even_.clear();
  last_even_.clear();
  if (ops_.device() == nullptr || batch.axis_positions.empty()) return true;
  bool even = even_positions(batch, even_);
  if (narrows) even = even_positions(last_, last_even_) && even;
  return even;
}

void Decoder::axis_table(const ForwardBatch& batch, size_t r, float* table) {
  const RopeSpec& rope = spec_.ropes[r];
  const Vector& frequencies = frequencies_[r];
  const std::span<const float> own(frequencies.data(), static_cast<size_t>(frequencies.size));
  const auto axes = static_cast<int>(std::ssize(batch.axis_positions) / batch.tokens());
  ops::Device* const device = ops_.device();
  if (device == nullptr) {
    ops_.rope_table(table, batch.axis_positions, axes, rope.axes, own, rope.attention_factor);
    return;
  }
  const std::vector<int32_t>& even = &batch == &last_ ? last_even_ : even_;
  if (!even.empty()) {
    ops_.rope_table(table, even, own, rope.attention_factor);
    return;
  }
  const std::vector<float>& inverse = host_frequencies_[r];
  const auto half = std::ssize(inverse);
  host_table_.resize(static_cast<size_t>(batch.tokens() * 2 * half));
  ops_.pool().parallel_for(batch.tokens(), [&](int64_t t, int) {
    float* const row = host_table_.data() + t * 2 * half;
    const int32_t* const positions = batch.axis_positions.data() + t * axes;
    for (int64_t i = 0; i < half; ++i) {
      const auto at = static_cast<size_t>(i);
      const auto position = static_cast<float>(positions[rope.axes[at]]);
      const double angle = position * inverse[at];
      row[i] = static_cast<float>(double{rope.attention_factor} * std::cos(angle));
      row[half + i] = static_cast<float>(double{rope.attention_factor} * std::sin(angle));
    }
  });
  const Status sent = device->write(table, host_table_.data(), host_table_.size() * sizeof(float));
  FRESHET_CHECK(sent.ok(), "{}", sent.message());
}

}  // namespace freshet
