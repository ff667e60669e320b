#include "ops/ops.h"

#include <algorithm>
#include <cstring>

#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

// Below this number of elements, one thread finishes before the others have woken up.
constexpr int64_t kRegionElements = 16 << 10;

}  // namespace

Ops::Ops(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Ops::~Ops() = default;

std::unique_ptr<Ops> Ops::create(ThreadPool& pool, std::unique_ptr<Device> device) {
  auto impl = std::make_unique<Impl>(pool, Capabilities{});
  impl->device = std::move(device);
  return std::unique_ptr<Ops>(new Ops(std::move(impl)));
}

Device* Ops::device() const {
  return impl_->device.get();
}
Memory* Ops::memory() const {
  return impl_->device.get();
}
Memory* Ops::host_memory() const {
  return impl_->device != nullptr ? &impl_->device->host_memory() : nullptr;
}

Result<Buffer> Ops::upload(std::span<const float> values) {
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(values.size_bytes(), memory()));
  if (Device* d = device()) {
    FRESHET_RETURN_IF_ERROR(d->write(buffer.data(), values.data(), values.size_bytes()));
  } else if (!values.empty()) {
    std::memcpy(buffer.data(), values.data(), values.size_bytes());
  }
  return buffer;
}

void Ops::fetch(void* host, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (Device* d = device()) return d->fetch(host, from, bytes);
  std::memcpy(host, from, bytes);
}
void Ops::wait() {
  if (Device* d = device()) d->wait();
}

void Ops::step(const StepInputs& inputs, FunctionRef<void()> body) {
  Device* const d = device();
  if (d == nullptr) return body();
  StepInputs its = inputs;
  its.repeats = inputs.repeats && impl_->hooks == nullptr;  // hooks may do something else each time
  d->step(its, body);
}

ThreadPool& Ops::pool() {
  return impl_->pool;
}
const Capabilities& Ops::capabilities() const {
  return impl_->capabilities;
}
bool Ops::reference() const {
  return impl_->reference;
}
bool Ops::reorders_inputs() const {
  return device() == nullptr;
}

void Ops::Impl::for_rows(int64_t rows, int64_t cols,
                         FunctionRef<void(int64_t first, int64_t last)> body) {
  const int64_t most = int64_t{4} * pool.size();
  const int64_t pieces = std::min({rows, rows * cols / kRegionElements, most});
  if (pieces <= 1 || pool.size() == 1) {
    if (rows > 0) body(0, rows);
    return;
  }
  pool.parallel_for(pieces,
                    [&](int64_t i, int) { body(rows * i / pieces, rows * (i + 1) / pieces); });
}

size_t Ops::scratch_bytes(const ShapeLimits& limits) const {
  ShapeLimits l = limits;
  l.split_cols = std::max(l.split_cols, impl_->split_cols);
  if (Device* d = device()) return d->scratch_bytes(l);
  constexpr size_t kSlack = 1 << 18;      // rounding of parts to 64 bytes, and lists of calls
  constexpr int64_t kMostExperts = 1024;  // of one router
  const auto floats = [](int64_t n) { return static_cast<size_t>(n) * sizeof(float); };
  // All encodings that some kernel needs: a group of GEMMs may mix them.
  const auto encoded = [this](int64_t rows, int64_t cols) {
    size_t bytes = 0;
    for (size_t kind = 1; kind < impl_->encoders.size(); ++kind) {
      if (impl_->encoders[kind] == nullptr || cols == 0) continue;
      bytes += impl_->encoded_bytes(static_cast<ActKind>(kind), rows, cols);
    }
    return bytes;
  };
  // Reordered inputs, for kernels that use them unencoded.
  const size_t picked = impl_->reference ? floats(l.tokens * l.max_cols) : 0;
  const size_t products =
      picked + floats(l.tokens * l.split_cols) +
      std::max(encoded(l.tokens, l.max_cols) + encoded(l.tokens, l.max_gated_cols),
               encoded(l.tokens * l.heads, l.max_head_dim));
  const int64_t pairs = l.tokens * l.top_k;
  const size_t experts = floats(pairs * (3 * l.max_expert_ff + 2 * l.max_cols + 4)) +
                         encoded(pairs, std::max(l.max_cols, l.max_expert_ff)) +
                         floats(l.tokens * 3 * kMostExperts) +
                         (impl_->hooks != nullptr ? products : 0);
  size_t attention = 0;
  for (const AttentionKernel* row : impl_->attention) {
    const KvShape shape{KvType::kF32, std::max(l.heads, 1), l.max_head_dim, l.max_head_dim, false};
    attention = std::max(
        attention, row->scratch_bytes(shape, l.heads, l.tokens, l.max_context, impl_->pool.size()));
  }
  return std::max({products, l.top_k > 0 ? experts : 0, attention}) + kSlack;
}

Status Ops::set_scratch(size_t bytes) {
  if (bytes <= impl_->scratch_bytes) return {};
  impl_->scratch_bytes = 0;  // a device that fails has no scratch left
  if (Device* d = device()) {
    FRESHET_RETURN_IF_ERROR(d->set_scratch(bytes));
  } else {
    FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(bytes));
    impl_->arena = Arena(std::move(buffer));
  }
  impl_->scratch_bytes = bytes;
  return {};
}

Status Ops::set_inputs(size_t bytes) {
  if (Device* d = device()) return d->set_inputs(bytes);
  return {};
}

namespace {

// Checks the ranges of sequence s.
void check_ranges(size_t s, const AttentionBatch& b) {
  KeyRange before;
  for (int32_t i = b.query_start[s]; i < b.query_start[s + 1]; ++i) {
    const KeyRange& r = b.ranges[static_cast<size_t>(i)];
    FRESHET_CHECK(r.first >= before.first && r.end >= before.end && r.first < r.end &&
                      r.end <= b.context_len[s],
                  "attention sequence={} query={} attends to [{}, {}) of {} behind [{}, {})", s,
                  i - b.query_start[s], r.first, r.end, b.context_len[s], before.first, before.end);
    before = r;
  }
}

void check_batch(const char* op, int64_t tokens, const KvView& cache, const AttentionBatch& b,
                 bool stores) {
  const auto n = static_cast<size_t>(b.sequences());
  FRESHET_CHECK(
      b.query_start.size() == n + 1 && b.query_start[0] == 0 && b.query_start[n] == tokens,
      "{} tokens={} sequences={} query_start [{}]", op, tokens, n, b.query_start.size());
  const bool ranged = !stores && !b.ranges.empty();
  FRESHET_CHECK(!ranged || std::ssize(b.ranges) == tokens, "{} tokens={} ranges={}", op, tokens,
                b.ranges.size());
  for (size_t s = 0; s < n; ++s) {
    const int32_t queries = b.query_start[s + 1] - b.query_start[s];
    FRESHET_CHECK(queries >= 1 && (ranged || b.context_len[s] >= queries) &&
                      (b.context_len[s] + kBlockTokens - 1) / kBlockTokens <= b.table_stride,
                  "{} sequence={} queries={} context={} table_stride={}", op, s, queries,
                  b.context_len[s], b.table_stride);
    if (ranged) {
      check_ranges(s, b);
      continue;
    }
    const int32_t* table = b.block_tables + static_cast<int64_t>(s) * b.table_stride;
    for (int32_t p = (b.context_len[s] - queries) / kBlockTokens;
         p * kBlockTokens < b.context_len[s]; ++p) {
      FRESHET_CHECK(table[p] >= 0 && table[p] < cache.blocks, "{} sequence={} block {} is {} of {}",
                    op, s, p, table[p], cache.blocks);
    }
  }
}

}  // namespace

void Ops::store_kv(const KvView& cache, const Matrix& k, const Matrix& v,
                   const AttentionBatch& batch) {
  const KvShape& s = cache.shape;
  FRESHET_CHECK(
      k.cols == s.kv_heads * s.key_dim &&
          (s.value_is_key_prefix || (v.rows == k.rows && v.cols == s.kv_heads * s.value_dim)),
      "store_kv k [{}, {}], v [{}, {}], kv_heads={} key_dim={} value_dim={}", k.rows, k.cols,
      v.rows, v.cols, s.kv_heads, s.key_dim, s.value_dim);
  FRESHET_CHECK(!s.value_is_key_prefix || (s.kv_heads == 1 && s.value_dim <= s.key_dim),
                "store_kv shares keys and values of kv_heads={} key_dim={} value_dim={}",
                s.kv_heads, s.key_dim, s.value_dim);
  check_batch("store_kv", k.rows, cache, batch, true);
  if (Device* d = device(); d != nullptr && k.rows > 0) return d->store_kv(cache, k, v, batch);
  if (k.rows == 0) return;
  impl_->attention_for(s).store(cache, k, v, batch, impl_->pool);
  if (s.bounded) bound_keys(cache, batch);
  if (s.summed) sum_values(cache, batch);
}

void Ops::attention(const Matrix& out, const Matrix& q, const KvView& cache,
                    const AttentionBatch& batch, const AttentionParams& params) {
  const KvShape& s = cache.shape;
  FRESHET_CHECK(params.heads > 0 && params.heads % s.kv_heads == 0 && out.rows == q.rows &&
                    q.cols == params.heads * s.key_dim && out.cols == params.heads * s.value_dim,
                "attention q [{}, {}], out [{}, {}], heads={} kv_heads={} key_dim={} value_dim={}",
                q.rows, q.cols, out.rows, out.cols, params.heads, s.kv_heads, s.key_dim,
                s.value_dim);
  check_batch("attention", q.rows, cache, batch, false);
  if (q.rows == 0) return;
  if (Device* d = device()) return d->attention(out, q, cache, batch, params);
  const AttentionKernel& kernel = impl_->attention_for(s);
  const int32_t context = *std::max_element(batch.context_len.begin(), batch.context_len.end());
  const size_t mark = impl_->arena.mark();
  const size_t bytes = kernel.scratch_bytes(s, params.heads, q.rows, context, impl_->pool.size());
  auto* scratch = static_cast<uint8_t*>(impl_->arena.allocate(bytes));
  kernel.run(out, q, cache, batch, params, impl_->pool, scratch, bytes);
  impl_->arena.rewind(mark);
}

}  // namespace freshet::ops
