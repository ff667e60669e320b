// The ops of a CudaDevice: each translates its arguments and enqueues.
#include <algorithm>

#include "backend/cuda/arguments.h"
#include "backend/cuda/device.h"

namespace freshet::cuda {

void CudaDevice::embed(const Matrix& out, const ops::Weight& table, std::span<const int32_t> ids,
                       float scale, int32_t offset) {
  flush();
  const Rows to = rows_of(out);
  const WeightView view = view_of(table);
  check(api_.embed(&to, &view, ints(ids), offset, scale), "embed");
  wrote(out);
}

void CudaDevice::matmul(const Matrix& x, std::span<const ops::Product> products) {
  flush();
  if (hold_router(x, products)) return;
  std::array<ProductArgs, kMaxProducts> args;
  FRESHET_CHECK(products.size() <= args.size(), "{} products at once", products.size());
  for (size_t i = 0; i < products.size(); ++i) {
    const ops::Product& p = products[i];
    const WeightView w = view_of(*p.weight);
    const uint8_t* act = w.code == Code::kF32 ? nullptr : encoded(x, w.code);
    args[i] = {w,       act,  chunks_of(x.cols), x.data, x.stride, p.out.data, p.out.stride, p.bias,
               p.scale, p.add};
  }
  check(api_.products(args.data(), static_cast<int>(products.size()), x.rows), "products");
  for (const ops::Product& p : products) wrote(p.out);
}

void CudaDevice::matmul_heads(const Matrix& x, std::span<const ops::Weight> weights,
                              const Matrix& out) {
  flush();
  const int64_t cols = weights.front().cols;
  // Heads of whole pieces are slices of one encoded matrix.
  const Code code = view_of(weights.front()).code;
  const Order order = api_.order_for(code, x.rows);
  const int64_t unit = order == Order::kE4M3 ? kE4M3Cols : kPadCols;
  const bool whole = cols % unit == 0;
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
      const Activations to_part{scratch(static_cast<size_t>(api_.fragment_bytes(x.rows, cols))),
                                order == Order::kLanes ? 0 : tiles, order == Order::kE4M3};
      check(api_.encode(&to_part, &part, nullptr, nullptr, x.rows), "encode");
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
      check(api_.products(args.data(), count, x.rows), "products");
      count = 0;
    }
  }
  wrote(out);
}

void CudaDevice::norm(const Matrix& out, const Matrix& x, const ops::Norm& norm) {
  flush();
  if (x.rows == 0) return;
  wrote(out);
  const Rows to = rows_of(out), from = rows_of(x);
  const NormArgs args = args_of(norm);
  const Activations act = new_encoded(out);
  check(api_.norm(&to, &from, &args, &act), "norm");
}

void CudaDevice::norm_heads(const Matrix& x, int heads, int head_dim, const ops::Norm& norm,
                            bool weight_per_head) {
  flush();
  const Rows rows = rows_of(x);
  const NormArgs args = args_of(norm);
  check(api_.norm_heads(&rows, heads, head_dim, &args, weight_per_head), "norm_heads");
  wrote(x);
}

void CudaDevice::rope_table(float* cos_sin, std::span<const int32_t> positions,
                            std::span<const float> inv_freq, float scale) {
  flush();
  const auto tokens = static_cast<int64_t>(positions.size());
  const auto half = static_cast<int64_t>(inv_freq.size());
  check(api_.rope_table(cos_sin, ints(positions), inv_freq.data(), tokens, half, scale),
        "rope_table");
}

// Queries' and keys' rotations come one after the other: the first is held back for the second.
void CudaDevice::rope(const Matrix& x, int heads, int head_dim, int offset, int rotary_dim,
                      bool interleaved, const float* cos_sin) {
  if (held_ropes_ > 0 && (held_table_ != cos_sin || ropes_[0].rows != x.rows)) flush();
  ropes_[static_cast<size_t>(held_ropes_++)] = {x.data,   x.rows, x.stride,   heads,
                                                head_dim, offset, rotary_dim, interleaved};
  held_table_ = cos_sin;
  wrote(x);
  if (held_ropes_ == 2) flush();
}

void CudaDevice::flush() {
  flush_router();
  if (held_ropes_ == 0) return;
  check(api_.rope(ropes_.data(), held_ropes_, held_table_), "rope");
  held_ropes_ = 0;
}

BatchArgs CudaDevice::batch_args(const ops::AttentionBatch& b, int64_t tokens) {
  const auto sequences = static_cast<size_t>(b.sequences());
  const size_t table = sequences * static_cast<size_t>(b.table_stride);
  return {ints(b.query_start), ints(b.context_len), ints({b.block_tables, table}),
          b.table_stride,      b.sequences(),       static_cast<int32_t>(tokens)};
}

void CudaDevice::store_kv(const ops::KvView& cache, const Matrix& k, const Matrix& v,
                          const ops::AttentionBatch& batch) {
  flush();
  const CacheArgs to = args_of(cache);
  const Rows keys = rows_of(k), values = rows_of(v);
  const BatchArgs b = batch_args(batch, k.rows);
  check(api_.store(&to, &keys, &values, &b), "store_kv");
}

void CudaDevice::attention(const Matrix& out, const Matrix& q, const ops::KvView& cache,
                           const ops::AttentionBatch& batch, const ops::AttentionParams& params) {
  flush();
  wrote(out);
  AttentionArgs a{};
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
    a.max_queries = std::max(a.max_queries, batch.query_start[i + 1] - batch.query_start[i]);
  }
  a.single = a.max_queries == 1;
  const auto partial = static_cast<size_t>(api_.attention_partial_bytes(
      batch.sequences(), params.heads, cache.shape.value_dim, a.max_context));
  if (a.single != 0 && partial <= scratch_.size() / 4) {
    a.partial = reinterpret_cast<float*>(scratch(partial));
    a.act = new_encoded(out);
  }
  check(api_.attention(&a), "attention");
}

void CudaDevice::glu(const Matrix& out, const Matrix& gate, const Matrix& up, const ops::Glu& glu) {
  flush();
  if (out.rows == 0) return;
  wrote(out);
  const Rows to = rows_of(out), g = rows_of(gate), u = rows_of(up);
  const GluArgs args{static_cast<int32_t>(glu.activation), glu.limit, glu.alpha};
  const Activations act = new_encoded(out);
  check(api_.glu(&to, &g, &u, &args, &act), "glu");
}

void CudaDevice::activation(const Matrix& x, ops::Activation activation) {
  flush();
  const Rows rows = rows_of(x);
  check(api_.activation(&rows, static_cast<int>(activation)), "activation");
  wrote(x);
}

void CudaDevice::add(const Matrix& out, const Matrix& x, float scale) {
  flush();
  const Rows to = rows_of(out), from = rows_of(x);
  check(api_.add(&to, &from, scale), "add");
  wrote(out);
}

void CudaDevice::scale(const Matrix& x, float scale) {
  flush();
  const Rows rows = rows_of(x);
  check(api_.scale(&rows, scale), "scale");
  wrote(x);
}

void CudaDevice::softcap(const Matrix& x, float cap) {
  flush();
  const Rows rows = rows_of(x);
  check(api_.softcap(&rows, cap), "softcap");
  wrote(x);
}

void CudaDevice::gather_rows(const Matrix& out, const Matrix& x, std::span<const int32_t> rows) {
  flush();
  const Rows to = rows_of(out), from = rows_of(x);
  check(api_.gather(&to, &from, ints(rows)), "gather_rows");
  wrote(out);
}

void CudaDevice::sigmoid_gate(const Matrix& x, const Matrix& gate) {
  flush();
  const Rows rows = rows_of(x), gates = rows_of(gate);
  check(api_.sigmoid_gate(&rows, &gates), "sigmoid_gate");
  wrote(x);
}

}  // namespace freshet::cuda
