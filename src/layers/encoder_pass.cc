#include "layers/encoder_pass.h"

#include <algorithm>
#include <numeric>

namespace freshet {
namespace {

constexpr int64_t kLeastPositions = 512;  // of a pass
constexpr int64_t kMostInputs = 64;       // of a pass

}  // namespace

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
  const KvCacheSpec cache = kv_cache_spec(*spec_, ops::KvType::kF32);
  const auto blocks = static_cast<size_t>(positions / ops::kBlockTokens + 1 + kMostInputs);
  for (size_t g = 0; g < cache.groups.size(); ++g) {
    w.own += blocks * cache.block_bytes(static_cast<int>(g));
  }
  w.own += static_cast<size_t>(positions * spec_->hidden_size) * sizeof(float);
  if (spec_->stem) {
    const int64_t columns = 3 * std::max(spec_->stem->mel_bins, spec_->hidden_size);
    w.own +=
        static_cast<size_t>(2 * positions * (columns + 2 * spec_->hidden_size)) * sizeof(float);
  }
  return w;
}

Status EncoderPass::reserve() {
  const int64_t positions = this->positions();
  FRESHET_RETURN_IF_ERROR(decoder_.reserve(positions, 1, spec_->max_context));
  const KvCacheSpec cache = kv_cache_spec(*spec_, ops::KvType::kF32);
  const auto blocks = static_cast<int32_t>(positions / ops::kBlockTokens + 1 + kMostInputs);
  FRESHET_ASSIGN_OR_RETURN(
      cache_,
      KvStorage::allocate(cache, std::vector<int32_t>(cache.groups.size(), blocks), ops_.memory()));
  batch_.tables.resize(cache.groups.size());
  states_.resize(static_cast<size_t>(positions * spec_->hidden_size));
  return {};
}

// Makes batch_ of as many inputs as a pass has room for.
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

// gelu(columns W^T + bias), one of the stem's convolutions.
Matrix EncoderPass::convolve(int which, const Matrix& columns, float* room) const {
  const int64_t hidden = spec_->hidden_size;
  const Matrix out{room, columns.rows, hidden, hidden};
  const ops::Product products[] = {product_of(weights_->stem[which], out)};
  ops_.matmul(columns, products);
  ops_.activation(out, ops::Activation::kGelu);
  return out;
}

// The residual stream of sounds: convolutions over time as GEMMs of shifted copies.
void EncoderPass::hear(std::span<const EncoderInput> inputs) {
  const int64_t hidden = spec_->hidden_size, mels = spec_->stem->mel_bins;
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  stream_.resize(size(batch_.tokens() * hidden));
  float* to = stream_.data();
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
    convolve(0, {columns_.data(), frames, 3 * mels, 3 * mels}, heard_.data());
    std::fill(columns_.begin(), columns_.end(), 0.0f);
    for (int64_t t = 0; t < half; ++t) {
      for (int64_t tap = 0; tap < 3; ++tap) {
        const int64_t from = 2 * t + tap - 1;
        if (from < 0 || from >= frames) continue;
        float* const row = columns_.data() + t * 3 * hidden + tap;
        for (int64_t d = 0; d < hidden; ++d) row[3 * d] = heard_[size(from * hidden + d)];
      }
    }
    const Matrix x = convolve(1, {columns_.data(), half, 3 * hidden, 3 * hidden}, to);
    const Matrix places{heard_.data(), half, hidden, hidden};
    ops_.embed(places, weights_->positions, std::span(batch_.positions).first(size(half)), 1.0f);
    ops_.add(x, places, 1.0f);
    to += half * hidden;
  }
  batch_.features = stream_.data();
}

void EncoderPass::run(std::span<const EncoderInput> inputs, Sink sink) {
  for (size_t first = 0; first < inputs.size();) {
    const size_t taken = take(inputs.subspan(first));
    if (spec_->stem) hear(inputs.subspan(first, taken));
    StepResults results;
    results.hidden = states_.data();
    decoder_.forward(batch_, cache_, results);
    sink(first, batch_, {states_.data(), batch_.tokens(), spec_->hidden_size, spec_->hidden_size});
    first += taken;
  }
}

}  // namespace freshet
