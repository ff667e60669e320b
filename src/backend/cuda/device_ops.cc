// The ops of a CudaDevice: each translates its arguments and enqueues.
#include <algorithm>
#include <utility>

#include "backend/cuda/arguments.h"
#include "backend/cuda/device.h"

namespace freshet::cuda {

void CudaDevice::embed(const Matrix& out, const ops::Weight& table, std::span<const int32_t> ids,
                       float scale, int32_t offset) {
  FRESHET_CHECK(table.use == ops::Use::kTable, "a table that was packed for products");
  flush();
  const Rows to = rows_of(out);
  const WeightView view = view_of(table);
  check(api_.rows.embed(ctx_, &to, &view, ints(ids), offset, scale), "embed");
  wrote(out);
}

ProductArgs CudaDevice::product_args(const Matrix& x, const ops::Product& p) {
  const WeightView w = product_view(*p.weight);
  const bool as_they_are = w.code == Code::kF32 || w.code == Code::kExactF32;
  const uint8_t* act = as_they_are ? nullptr : encoded(x, w.code);
  return {w,       act,  chunks_of(x.cols), x.data, x.stride, p.out.data, p.out.stride, p.bias,
          p.scale, p.add};
}

void CudaDevice::matmul(const Matrix& x, std::span<const ops::Product> products) {
  if (norm_.held && norm_.out.data == x.data) {
    flush_but_norm();
    if (hold_router(x, products)) return;
  }
  flush();
  const NextProducts* next = next_of(products);
  if (hold_router(x, products) || hold_gated(x, products)) return;
  std::array<ProductArgs, kMaxProducts> args;
  FRESHET_CHECK(products.size() <= args.size(), "{} products at once", products.size());
  for (size_t i = 0; i < products.size(); ++i) args[i] = product_args(x, products[i]);
  check(api_.gemm.products(ctx_, args.data(), static_cast<int>(products.size()), x.rows, next),
        "products");
  for (const ops::Product& p : products) wrote(p.out);
}

// Steps have the same products in the same order: what came behind these the last time comes again,
// if anything does. It is told to who may bring its weights near, and touches no result.
const NextProducts* CudaDevice::next_of(std::span<const ops::Product> products) {
  const ops::Weight* first = products.front().weight;
  if (last_product_ != nullptr) {
    NextProducts& next = next_[last_product_];
    next.count = static_cast<int32_t>(products.size());
    next.of[0] = view_of(*first);
    next.of[1] = view_of(*products.back().weight);
  }
  last_product_ = first->packed.data();
  const auto found = next_.find(last_product_);
  return found != next_.end() ? &found->second : nullptr;
}

// Gate and up are written nowhere if the gated unit that reads them comes next.
bool CudaDevice::hold_gated(const Matrix& x, std::span<const ops::Product> products) {
  if (products.size() != 2) return false;
  const ops::Product &gate = products[0], &up = products[1];
  const Code code = code_of(gate.weight->format);
  if (up.weight->format != gate.weight->format || up.weight->rows != gate.weight->rows ||
      gate.add || up.add ||
      api_.gemm.gated_fits(ctx_, code, gate.weight->rows, x.cols, x.rows) == 0) {
    return false;
  }
  gated_ = {true, x.rows, gate.weight->format, {}};
  for (size_t i = 0; i < 2; ++i) gated_.products[i] = product_args(x, products[i]);
  for (const ops::Product& p : products) wrote(p.out);
  return true;
}

void CudaDevice::flush_gated() {
  if (!gated_.held) return;
  gated_.held = false;
  check(api_.gemm.products(ctx_, gated_.products.data(), 2, gated_.tokens, nullptr), "products");
}

void CudaDevice::matmul_heads(const Matrix& x, std::span<const ops::Weight> weights,
                              const Matrix& out) {
  flush();
  const int64_t cols = weights.front().cols;
  // Heads of whole pieces are slices of one encoded matrix.
  const Code code = view_of(weights.front()).code;
  const Order order = api_.gemm.order_for(ctx_, code, x.rows);
  const int64_t unit = order == Order::kE4M3 ? kE4M3Cols : kPadCols;
  const bool whole = cols % unit == 0 && order != Order::kInt8;  // whose scales are of rows
  const uint8_t* all = whole ? encoded(x, code) : nullptr;
  const int64_t tiles = (x.rows + kTokenTile - 1) / kTokenTile;
  // Bytes of a unit of columns, of a tile of rows or of all.
  const int64_t step = order == Order::kLanes   ? 1024
                       : order == Order::kCores ? 1024 * tiles
                                                : kE4M3TileBytes * tiles;
  std::array<ProductArgs, kMaxProducts> args;
  int count = 0;
  for (size_t h = 0; h < weights.size(); ++h) {
    const auto head = static_cast<int64_t>(h);
    const ops::Weight& w = weights[h];
    FRESHET_CHECK(w.cols == cols && x.cols == cols * static_cast<int64_t>(weights.size()),
                  "heads of {} and {} columns", w.cols, cols);
    const Matrix to = out.slice_cols(head * w.rows, w.rows);
    const uint8_t* act = nullptr;
    if (whole) {
      act = all + head * (cols / unit) * step;
    } else {
      const Rows part = rows_of(x.slice_cols(head * cols, cols));
      const Activations to_part{
          scratch(static_cast<size_t>(api_.gemm.fragment_bytes(ctx_, x.rows, cols))),
          order == Order::kLanes ? 0 : tiles, order == Order::kE4M3, order == Order::kInt8};
      check(api_.gemm.encode(ctx_, &to_part, &part, nullptr, nullptr, x.rows), "encode");
      act = to_part.data;
    }
    args[static_cast<size_t>(count++)] = {view_of(w),
                                          act,
                                          chunks_of(whole ? x.cols : cols),
                                          x.data + head * cols,
                                          x.stride,
                                          to.data,
                                          to.stride,
                                          nullptr,
                                          1.0f,
                                          0};
    if (count == kMaxProducts || h + 1 == weights.size()) {
      check(api_.gemm.products(ctx_, args.data(), count, x.rows, nullptr), "products");
      count = 0;
    }
  }
  wrote(out);
}

void CudaDevice::norm(const Matrix& out, const Matrix& x, const ops::Norm& norm,
                      const ops::Weight* reader) {
  flush();
  if (x.rows == 0) return;
  const bool usual = norm.kind == ops::NormKind::kRms && norm.weight != nullptr &&
                     norm.bias == nullptr && reader != nullptr;
  const NormArgs args = args_of(norm);
  if (usual && x.rows <= kWholeTokens && code_of(reader->format) == Code::kF32 &&
      !overlap(out, x)) {
    wrote(out);
    norm_ = {true, x, out, args, reader};
    return;
  }
  const Output to = output_of(out, reader, usual);
  const Rows from = rows_of(x);
  check(api_.rows.norm(ctx_, &to.rows, &from, &args, &to.act), "norm");
}

void CudaDevice::flush_norm() {
  if (!norm_.held) return;
  const HeldNorm norm = std::exchange(norm_, {});
  const Output to = output_of(norm.out, norm.reader, true);
  const Rows from = rows_of(norm.x);
  check(api_.rows.norm(ctx_, &to.rows, &from, &norm.norm, &to.act), "norm");
}

void CudaDevice::rope_table(float* cos_sin, std::span<const int32_t> positions,
                            std::span<const float> inv_freq, float scale) {
  flush();
  const auto tokens = static_cast<int64_t>(positions.size());
  const auto half = static_cast<int64_t>(inv_freq.size());
  check(api_.attention.rope_table(ctx_, cos_sin, ints(positions), inv_freq.data(), tokens, half,
                                  scale),
        "rope_table");
}

// ---- Heads: norms, rotations and the store of a layer come one after the other, and are held back
// so that one kernel does them all.

void CudaDevice::flush() {
  flush_norm();
  flush_but_norm();
}
void CudaDevice::flush_but_norm() {
  flush_router();
  flush_gated();
  if (held_.count == 0) return;
  check(api_.attention.heads(ctx_, &held_), "heads");
  held_ = {};
}

// The part of what is held that is `x`: one that has `done` is over, and another begins.
HeadsArgs::Part& CudaDevice::hold(const Matrix& x, int heads, int head_dim,
                                  FunctionRef<bool(const HeadsArgs::Part&)> done) {
  HeadsArgs::Part* found = nullptr;
  bool fits = held_.tokens == x.rows;
  for (HeadsArgs::Part& p : std::span(held_.of).first(static_cast<size_t>(held_.count))) {
    if (p.x == x.data && p.stride == x.stride && p.heads == heads && p.head_dim == head_dim) {
      found = &p;
      fits = fits && !done(p);
    } else {
      const Matrix its{p.x, held_.tokens, int64_t{p.heads} * p.head_dim, p.stride};
      fits = fits && !overlap(its, x);
    }
  }
  fits = fits && (found != nullptr || held_.count < std::ssize(held_.of));
  if (!fits) {
    flush();
    found = nullptr;
  }
  held_.tokens = x.rows;
  if (found == nullptr) {
    found = &held_.of[held_.count++];
    found->x = x.data;
    found->stride = x.stride;
    found->heads = heads;
    found->head_dim = head_dim;
  }
  return *found;
}

void CudaDevice::norm_heads(const Matrix& x, int heads, int head_dim, const ops::Norm& norm,
                            bool weight_per_head) {
  if (x.rows == 0) return;
  HeadsArgs::Part& part =
      hold(x, heads, head_dim, [](const auto& p) { return p.normed != 0 || p.rotary_dim != 0; });
  part.norm = args_of(norm);
  part.normed = 1;
  part.norm_per_head = weight_per_head;
  wrote(x);
}

void CudaDevice::rope(const Matrix& x, int heads, int head_dim, int offset, int rotary_dim,
                      bool interleaved, const float* cos_sin) {
  if (x.rows == 0 || rotary_dim == 0) return;
  if (held_.cos_sin != nullptr && held_.cos_sin != cos_sin) flush();
  HeadsArgs::Part& part = hold(x, heads, head_dim, [](const auto& p) { return p.rotary_dim != 0; });
  part.offset = offset;
  part.rotary_dim = rotary_dim;
  part.interleaved = interleaved;
  held_.cos_sin = cos_sin;
  wrote(x);
}

BatchArgs CudaDevice::batch_args(const ops::AttentionBatch& b, int64_t tokens) {
  const auto sequences = static_cast<size_t>(b.sequences());
  const size_t table = sequences * static_cast<size_t>(b.table_stride);
  return {ints(b.query_start), ints(b.context_len), ints({b.block_tables, table}),
          b.table_stride,      b.sequences(),       static_cast<int32_t>(tokens)};
}

void CudaDevice::store_kv(const ops::KvView& cache, const Matrix& k, const Matrix& v,
                          const ops::AttentionBatch& batch) {
  if (k.rows == 0) return;
  const ops::KvShape& s = cache.shape;
  const BatchArgs its_batch = batch_args(batch, k.rows);
  const auto store = [&](const Matrix& x, int dim, HeadsArgs::Store as) {
    hold(x, s.kv_heads, dim, [](const auto& p) { return p.store != HeadsArgs::kNowhere; }).store =
        as;
    held_.cache = args_of(cache);
    held_.batch = its_batch;
  };
  store(k, s.key_dim, HeadsArgs::kKeys);
  if (!s.value_is_key_prefix) store(v, s.value_dim, HeadsArgs::kValues);
  held_batch_ = batch;
}

// Whether what is held is for this attention alone: its queries, and keys and values of its batch.
bool CudaDevice::held_for(const Matrix& q, const ops::KvView& cache,
                          const ops::AttentionBatch& batch) const {
  const HeadsArgs::Part* p = held_.of;
  return held_.count == 3 && p[0].x == q.data && p[0].stride == q.stride &&
         held_.tokens == q.rows && p[0].store == HeadsArgs::kNowhere &&
         p[1].store == HeadsArgs::kKeys && p[2].store == HeadsArgs::kValues &&
         held_.cache.data == cache.data &&
         held_batch_.query_start.data() == batch.query_start.data() &&
         held_batch_.context_len.data() == batch.context_len.data() &&
         held_batch_.block_tables == batch.block_tables;
}

void CudaDevice::attention(const Matrix& out, const Matrix& q, const ops::KvView& cache,
                           const ops::AttentionBatch& batch, const ops::AttentionParams& params) {
  const bool first = held_for(q, cache, batch);
  if (!first) flush();
  const HeadsArgs before = std::exchange(held_, {});
  wrote(out);
  AttentionArgs a{};
  if (first) a.before = &before;
  a.out = out.data;
  a.out_stride = out.stride;
  a.q = q.data;
  a.q_stride = q.stride;
  a.cache = args_of(cache);
  a.batch = batch_args(batch, q.rows);
  a.sinks = params.sinks;
  a.scale = params.scale;
  a.softcap = params.softcap;
  a.heads = params.heads;
  a.window = params.window;
  // What the table holds rather than what the batch does, so that recorded steps stay right.
  a.max_context = static_cast<int32_t>(batch.table_stride * ops::kBlockTokens);
  for (int s = 0; s < batch.sequences(); ++s) {
    const auto i = static_cast<size_t>(s);
    const int32_t queries = batch.query_start[i + 1] - batch.query_start[i];
    a.max_queries = std::max(a.max_queries, queries);
    if (a.single == s && queries == 1) ++a.single;
  }
  const auto partial = static_cast<size_t>(api_.attention.partial_bytes(
      ctx_, a.single, params.heads, cache.shape.value_dim, a.max_context));
  const bool split = a.single > 0 && partial <= scratch_.size() / 4;
  if (split) a.partial = reinterpret_cast<float*>(scratch(partial));
  const ops::Weight* reader = params.reader;
  if ((split && a.single == batch.sequences()) || reader != nullptr) {
    const Output to = output_of(out, reader);
    a.act = to.act;
    a.only_act = to.rows.data == nullptr;
  }
  check(api_.attention.attention(ctx_, &a), "attention");
}

void CudaDevice::glu(const Matrix& out, const Matrix& gate, const Matrix& up, const ops::Glu& glu,
                     const ops::Weight* reader) {
  if (out.rows == 0) return;
  const bool silu = glu.activation == ops::Activation::kSilu && glu.limit <= 0.0f;
  const bool fused = silu && gated_.held && reader != nullptr &&
                     read_alike(reader->format, gated_.format, out.rows) &&
                     gated_.tokens == out.rows && gated_.products[0].out == gate.data &&
                     gated_.products[1].out == up.data &&
                     gated_.products[0].weight.rows == out.cols;
  if (!fused) flush();
  const Output to = output_of(out, reader, reader != nullptr);
  if (fused) {
    gated_.held = false;
    check(api_.gemm.gated_products(ctx_, gated_.products.data(), out.rows, &to.act),
          "gated_products");
    return;
  }
  const Rows g = rows_of(gate), u = rows_of(up);
  const GluArgs args{static_cast<int32_t>(glu.activation), glu.limit, glu.alpha};
  check(api_.rows.glu(ctx_, &to.rows, &g, &u, &args, &to.act), "glu");
}

void CudaDevice::activation(const Matrix& x, ops::Activation activation) {
  flush();
  const Rows rows = rows_of(x);
  check(api_.rows.activation(ctx_, &rows, static_cast<int>(activation)), "activation");
  wrote(x);
}

void CudaDevice::add(const Matrix& out, const Matrix& x, float scale) {
  flush();
  const Rows to = rows_of(out), from = rows_of(x);
  check(api_.rows.add(ctx_, &to, &from, scale), "add");
  wrote(out);
}

void CudaDevice::scale(const Matrix& x, float scale) {
  flush();
  const Rows rows = rows_of(x);
  check(api_.rows.scale(ctx_, &rows, scale), "scale");
  wrote(x);
}

void CudaDevice::softcap(const Matrix& x, float cap) {
  flush();
  const Rows rows = rows_of(x);
  check(api_.rows.softcap(ctx_, &rows, cap), "softcap");
  wrote(x);
}

void CudaDevice::gather_rows(const Matrix& out, const Matrix& x, std::span<const int32_t> rows) {
  flush();
  const Rows to = rows_of(out), from = rows_of(x);
  check(api_.rows.gather(ctx_, &to, &from, ints(rows)), "gather_rows");
  wrote(out);
}

void CudaDevice::sigmoid_gate(const Matrix& x, const Matrix& gate) {
  flush();
  const Rows rows = rows_of(x), gates = rows_of(gate);
  check(api_.rows.sigmoid_gate(ctx_, &rows, &gates), "sigmoid_gate");
  wrote(x);
}

void CudaDevice::argmax(const Matrix& x, int32_t* ids) {
  flush();
  const Rows rows = rows_of(x);
  check(api_.sampling.argmax(ctx_, &rows, ids), "argmax");
}

void CudaDevice::sample(const Matrix& logits, std::span<const int32_t> words,
                        std::span<const int32_t> tokens, int32_t* ids) {
  flush();
  const Rows rows = rows_of(logits);
  const int32_t* lists = ints(words);
  check(api_.sampling.sample(ctx_, &rows, lists, tokens.empty() ? nullptr : ints(tokens), ids),
        "sample");
}

void CudaDevice::take_ids(std::span<const int32_t> ids, std::span<const int32_t> from,
                          const int32_t* named) {
  flush();
  auto* to = const_cast<int32_t*>(ints(ids));  // the device's copy, the step's own
  check(api_.sampling.take_ids(ctx_, to, ints(from), std::ssize(ids), named), "take_ids");
}

}  // namespace freshet::cuda
