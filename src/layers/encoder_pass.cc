#include "layers/encoder_pass.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ops/device.h"

namespace freshet {
namespace {

constexpr int64_t kLeastPositions = 512;  // per pass
constexpr int64_t kMostInputs = 64;       // per pass

// The type of the keys and values of a pass, which are dropped after it.
ops::KvType type_for(const ops::Ops& ops) {
  return ops.device() == nullptr ? ops::KvType::kF32 : ops::KvType::kF16;
}

}  // namespace

// Upper bound of the input features per position of the stem's convolutions.
static int64_t columns_of(const ModelSpec& spec) {
  return 3 * int64_t{std::max(spec.stem->mel_bins, spec.hidden_size)};
}

int64_t EncoderPass::positions() const {
  return std::max<int64_t>(spec_->max_context, kLeastPositions);
}

EncoderPass::EncoderPass(std::shared_ptr<const ModelSpec> spec,
                         std::shared_ptr<const ModelWeights> weights,
                         std::shared_ptr<const ModelWeights> ends, ops::Ops& ops)
    : spec_(std::move(spec)),
      weights_(std::move(weights)),
      ops_(ops),
      decoder_(*spec_, weights_, std::move(ends), {}, ops) {}

Decoder::Workspace EncoderPass::workspace() const {
  const int64_t positions = this->positions();
  Decoder::Workspace w = decoder_.workspace(positions, 1, spec_->max_context);
  const KvCacheSpec cache = kv_cache_spec(*spec_, type_for(ops_));
  const auto blocks = static_cast<size_t>(positions / ops::kBlockTokens + 1 + kMostInputs);
  for (size_t g = 0; g < cache.groups.size(); ++g) {
    w.own += blocks * cache.block_bytes(static_cast<int>(g));
  }
  w.own += static_cast<size_t>(positions * spec_->hidden_size) * sizeof(float);
  if (spec_->stem) {
    const int64_t columns = columns_of(*spec_);
    w.own +=
        static_cast<size_t>(2 * positions * (columns + 2 * spec_->hidden_size)) * sizeof(float);
    if (ops_.device() != nullptr) w.scratch = std::max(w.scratch, stem_scratch());
  }
  return w;
}

Status EncoderPass::reserve() {
  const int64_t positions = this->positions();
  FRESHET_RETURN_IF_ERROR(decoder_.reserve(positions, 1, spec_->max_context));
  const KvCacheSpec cache = kv_cache_spec(*spec_, type_for(ops_));
  const auto blocks = static_cast<int32_t>(positions / ops::kBlockTokens + 1 + kMostInputs);
  FRESHET_ASSIGN_OR_RETURN(
      cache_,
      KvStorage::allocate(cache, std::vector<int32_t>(cache.groups.size(), blocks), ops_.memory()));
  batch_.tables.resize(cache.groups.size());
  const auto bytes = static_cast<size_t>(positions * spec_->hidden_size) * sizeof(float);
  FRESHET_ASSIGN_OR_RETURN(states_, Buffer::allocate(bytes, ops_.memory()));
  if (spec_->stem) {
    FRESHET_ASSIGN_OR_RETURN(stream_, Buffer::allocate(bytes, ops_.host_memory()));
  }
  if (ops_.device() == nullptr) return {};
  FRESHET_ASSIGN_OR_RETURN(fetched_, Buffer::allocate(bytes, ops_.host_memory()));
  if (!spec_->stem) return {};
  const auto numbers =
      static_cast<size_t>(2 * positions * (columns_of(*spec_) + 2 * spec_->hidden_size));
  FRESHET_ASSIGN_OR_RETURN(room_, Buffer::allocate(numbers * sizeof(float), ops_.memory()));
  return ops_.set_scratch(stem_scratch());
}

size_t EncoderPass::stem_scratch() const {
  ops::Ops::ShapeLimits l;
  l.tokens = 2 * positions();
  l.max_cols = columns_of(*spec_);
  l.max_rows = spec_->hidden_size;
  return ops_.scratch_bytes(l);
}

// Makes batch_ of as many inputs as fit in a pass.
size_t EncoderPass::take(std::span<const EncoderInput> inputs) {
  ForwardBatch& b = batch_;
  b.token_ids.clear();
  b.positions.clear();
  b.query_start.assign(1, 0);
  b.context_len.clear();
  b.logit_rows.clear();
  const int64_t most = positions();
  size_t taken = 0;
  int64_t longest = 1;
  for (; taken < inputs.size() && taken < kMostInputs; ++taken) {
    const int64_t length = inputs[taken].positions();
    FRESHET_CHECK(length > 0 && length <= spec_->max_context, "an input of {} positions", length);
    if (b.tokens() + length > most) break;
    const std::span<const int32_t> ids = inputs[taken].ids;
    b.token_ids.insert(b.token_ids.end(), ids.begin(), ids.end());
    const auto start = static_cast<size_t>(b.query_start.back());
    b.positions.resize(start + static_cast<size_t>(length));
    b.token_ids.resize(b.positions.size(), 0);
    std::iota(b.positions.begin() + static_cast<int64_t>(start), b.positions.end(), 0);
    b.query_start.push_back(static_cast<int32_t>(b.positions.size()));
    b.context_len.push_back(static_cast<int32_t>(length));
    longest = std::max(longest, length);
  }
  const int64_t stride = (longest + ops::kBlockTokens - 1) / ops::kBlockTokens;
  for (BlockTables& table : b.tables) {
    table.stride = stride;
    table.ids.assign(static_cast<size_t>(stride) * taken, -1);
    int32_t next = 0;
    for (size_t s = 0; s < taken; ++s) {
      for (int64_t i = 0; i * ops::kBlockTokens < b.context_len[s]; ++i) {
        table.ids[s * static_cast<size_t>(stride) + static_cast<size_t>(i)] = next++;
      }
    }
  }
  return taken;
}

// gelu(columns_ W^T + bias), one of the stem's convolutions. The result is in memory of the ops,
// and on the host at `to` unless that is nullptr.
Matrix EncoderPass::convolve(int which, int64_t rows, int64_t cols, float* to) {
  const int64_t hidden = spec_->hidden_size;
  Matrix columns{columns_.data(), rows, cols, cols}, out{heard_.data(), rows, hidden, hidden};
  ops::Device* const device = ops_.device();
  if (device != nullptr) {
    columns.data = room_.as<float>();
    out.data = columns.data + 2 * positions() * columns_of(*spec_);
    const Status sent = device->write(columns.data, columns_.data(),
                                      static_cast<size_t>(rows * cols) * sizeof(float));
    FRESHET_CHECK(sent.ok(), "{}", sent.message());
  }
  const ops::Product products[] = {product_of(weights_->stem[which], out)};
  ops_.matmul(columns, products);
  ops_.activation(out, ops::Activation::kGelu);
  if (device != nullptr && to != nullptr) {
    ops_.fetch(to, out.data, static_cast<size_t>(rows * hidden) * sizeof(float));
    ops_.wait();
  }
  return out;
}

// The residual stream of audio: convolutions over time as GEMMs of shifted copies.
void EncoderPass::hear(std::span<const EncoderInput> inputs) {
  const int64_t hidden = spec_->hidden_size, mels = spec_->stem->mel_bins;
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  float* to = stream_.as<float>();
  for (const EncoderInput& input : inputs) {
    const int64_t frames = input.frames, half = (frames + 1) / 2;
    columns_.assign(size(std::max(frames * 3 * mels, half * 3 * hidden)), 0.0f);
    heard_.resize(size(frames * hidden));
    for (int64_t t = 0; t < frames; ++t) {
      for (int64_t tap = 0; tap < 3; ++tap) {
        const int64_t from = t + tap - 1;
        if (from < 0 || from >= frames) continue;
        float* const row = columns_.data() + t * 3 * mels + tap;
        for (int64_t mel = 0; mel < mels; ++mel) row[3 * mel] = input.features[mel * frames + from];
      }
    }
    convolve(0, frames, 3 * mels, heard_.data());
    std::fill(columns_.begin(), columns_.end(), 0.0f);
    for (int64_t t = 0; t < half; ++t) {
      for (int64_t tap = 0; tap < 3; ++tap) {
        const int64_t from = 2 * t + tap - 1;
        if (from < 0 || from >= frames) continue;
        float* const row = columns_.data() + t * 3 * hidden + tap;
        for (int64_t d = 0; d < hidden; ++d) row[3 * d] = heard_[size(from * hidden + d)];
      }
    }
    const Matrix x = convolve(1, half, 3 * hidden, nullptr);
    // The columns have been read; their memory is free.
    float* const room = ops_.device() != nullptr ? room_.as<float>() : columns_.data();
    const Matrix places{room, half, hidden, hidden};
    ops_.embed(places, weights_->positions, std::span(batch_.positions).first(size(half)), 1.0f);
    ops_.add(x, places, 1.0f);
    const size_t bytes = size(half * hidden) * sizeof(float);
    if (ops_.device() == nullptr) {
      std::memcpy(to, x.data, bytes);
    } else {
      ops_.fetch(to, x.data, bytes);
      ops_.wait();
    }
    to += half * hidden;
  }
  batch_.features = stream_.as<float>();
}

void EncoderPass::run(std::span<const EncoderInput> inputs, Sink sink) {
  run(inputs, sink, [] { return true; });
}

bool EncoderPass::run(std::span<const EncoderInput> inputs, Sink sink,
                      FunctionRef<bool()> between) {
  const uint64_t own = ++runs_;
  bool ended = false;
  const auto goes_on = [&] { return !(ended = ended || !between() || runs_ != own); };
  const FunctionRef<bool()> asks = goes_on;
  for (size_t first = 0; first < inputs.size();) {
    const size_t taken = take(inputs.subspan(first));
    if (spec_->stem) hear(inputs.subspan(first, taken));
    ops::Device* const device = ops_.device();
    StepResults results;
    results.hidden = device == nullptr ? states_.as<float>() : fetched_.as<float>();
    results.between = &asks;
    decoder_.forward(batch_, cache_, results);
    if (ended) return false;
    const Matrix states{states_.as<float>(), batch_.tokens(), spec_->hidden_size,
                        spec_->hidden_size};
    if (device != nullptr) {
      const auto bytes = static_cast<size_t>(states.rows * states.cols) * sizeof(float);
      const Status sent = device->write(states.data, results.hidden, bytes);
      FRESHET_CHECK(sent.ok(), "{}", sent.message());
    }
    sink(first, batch_, states);
    first += taken;
  }
  return true;
}

}  // namespace freshet
