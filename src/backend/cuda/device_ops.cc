// CudaDevice: single operations. Each translates its arguments and enqueues.
#include <algorithm>
#include <utility>

#include "backend/cuda/arguments.h"
#include "backend/cuda/device.h"

namespace freshet::cuda {

void CudaDevice::embed(const Matrix& out, const ops::Weight& table, std::span<const int32_t> ids,
                       float scale, int32_t offset) {
  FRESHET_CHECK(table.use == ops::Use::kTable, "a table that was packed for products");
  const Rows to = rows_of(out);
  const WeightView view = view_of(table);
  check(api_.rows.embed(ctx_, &to, &view, ints(ids), offset, scale), "embed");
}

ProductArgs CudaDevice::product_args(const Matrix& x, const ops::Product& p, Forms& forms) {
  const WeightView w = product_view(*p.weight);
  const bool as_they_are = w.code == Code::kF32 || w.code == Code::kExactF32;
  const uint8_t* act =
      as_they_are ? nullptr : form_of(x, api_.gemm.order_for(ctx_, w.code, x.rows), forms);
  return {w,       act,  chunks_of(x.cols), x.data, x.stride, p.out.data, p.out.stride, p.bias,
          p.scale, p.add};
}

void CudaDevice::run_products(const Matrix& x, std::span<const ops::Product> products,
                              Forms& forms) {
  std::array<ProductArgs, kMaxProducts> args;
  FRESHET_CHECK(products.size() <= args.size(), "{} products at once", products.size());
  for (size_t i = 0; i < products.size(); ++i) args[i] = product_args(x, products[i], forms);
  const ops::PrefetchNext& next = products.back().prefetch_next;
  const bool told = next[0] != nullptr && next[1] != nullptr;
  const NextProducts weights =
      told ? NextProducts{{view_of(*next[0]), view_of(*next[1])}, 2} : NextProducts{};
  check(api_.gemm.products(ctx_, args.data(), static_cast<int>(products.size()), x.rows,
                           told ? &weights : nullptr),
        "products");
}

void CudaDevice::matmul(const Matrix& x, std::span<const ops::Product> products) {
  Forms forms;
  run_products(x, products, forms);
}

void CudaDevice::split_columns(const Matrix& x, const ops::OutlierColumns& outliers, Matrix& kept,
                               Matrix& apart) {
  const auto count = std::ssize(outliers.columns);
  kept = {scratch_array<float>(x.rows * x.cols), x.rows, x.cols, x.cols};
  apart = {scratch_array<float>(x.rows * count), x.rows, count, count};
  const Rows to = rows_of(kept), listed = rows_of(apart), from = rows_of(x);
  check(api_.rows.split_columns(ctx_, &to, &listed, &from, outliers.list.as<int32_t>()),
        "split_columns");
}

void CudaDevice::add_moments(float* sums, const Matrix& x) {
  const Rows rows = rows_of(x);
  check(api_.moments.add_moments(ctx_, sums, &rows), "add_moments");
}

// Heads whose columns are whole units are slices of one encoded matrix.
bool CudaDevice::slices_heads(const ops::Weight& first, int64_t tokens) const {
  const Order order = api_.gemm.order_for(ctx_, code_of(first.format), tokens);
  const int64_t unit = order == Order::kE4M3 ? kE4M3Cols : kPadCols;
  return first.cols % unit == 0 && order != Order::kInt8;  // INT8 has one scale per row
}

void CudaDevice::matmul_heads(const Matrix& x, std::span<const ops::Weight> weights,
                              const Matrix& out) {
  Forms forms;
  run_products_of_heads(x, weights, out, forms);
}

void CudaDevice::run_products_of_heads(const Matrix& x, std::span<const ops::Weight> weights,
                                       const Matrix& out, Forms& forms) {
  const int64_t cols = weights.front().cols;
  const Order order = api_.gemm.order_for(ctx_, code_of(weights.front().format), x.rows);
  const int64_t unit = order == Order::kE4M3 ? kE4M3Cols : kPadCols;
  const bool whole = slices_heads(weights.front(), x.rows);
  const uint8_t* all = whole ? form_of(x, order, forms) : nullptr;
  const int64_t tiles = (x.rows + kTokenTile - 1) / kTokenTile;
  // Bytes from a column unit to the next, for one row tile or for all rows.
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
}

void CudaDevice::norm(const Matrix& out, const Matrix& x, const ops::Norm& norm) {
  if (x.rows == 0) return;
  const Rows to = rows_of(out), from = rows_of(x);
  const NormArgs args = args_of(norm);
  const Activations none{};
  check(api_.rows.norm(ctx_, &to, &from, &args, &none), "norm");
}

void CudaDevice::rope_table(float* cos_sin, std::span<const int32_t> positions,
                            std::span<const float> inv_freq, float scale,
                            const ops::PositionScale& growth) {
  const auto tokens = static_cast<int64_t>(positions.size());
  const auto half = static_cast<int64_t>(inv_freq.size());
  check(api_.attention.rope_table(ctx_, cos_sin, ints(positions), inv_freq.data(), tokens, half,
                                  scale, growth.gain, growth.interval),
        "rope_table");
}

// ---- Operations on heads, one part at a time. heads_args() fuses them.

void CudaDevice::norm_heads(const Matrix& x, int heads, int head_dim, const ops::Norm& norm,
                            bool weight_per_head) {
  if (x.rows == 0) return;
  // Limit of the kernel for heads, which keeps one head in a warp's shared memory.
  constexpr int kLongestHead = 1024;
  if (head_dim > kLongestHead) {
    for (int h = 0; h < heads; ++h) {
      const Matrix head = x.slice_cols(int64_t{h} * head_dim, head_dim);
      const int64_t from = weight_per_head ? int64_t{h} * head_dim : 0;
      ops::Norm own = norm;
      if (own.weight != nullptr) own.weight += from;
      if (own.bias != nullptr) own.bias += from;
      this->norm(head, head, own);
    }
    return;
  }
  ops::Heads all;
  all.q = {x, heads, head_dim, &norm, weight_per_head};
  this->heads(all);
}

void CudaDevice::rope(const Matrix& x, int heads, int head_dim, int offset, int rotary_dim,
                      bool interleaved, const float* cos_sin) {
  if (x.rows == 0 || rotary_dim == 0) return;
  ops::Heads all;
  all.q = {x, heads, head_dim, nullptr, false, false, offset, rotary_dim, interleaved};
  all.cos_sin = cos_sin;
  this->heads(all);
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
  ops::Heads all;
  all.k = {k, cache.shape.kv_heads, cache.shape.key_dim};
  all.v = v;
  all.cache = cache;
  all.batch = batch;
  this->heads(all);
}

void CudaDevice::attention(const Matrix& out, const Matrix& q, const ops::KvView& cache,
                           const ops::AttentionBatch& batch, const ops::AttentionParams& params) {
  Forms none;
  run_attention(out, queries_for(cache, q, false), cache, batch, params, nullptr, nullptr, true,
                none);
}

void CudaDevice::glu(const Matrix& out, const Matrix& gate, const Matrix& up, const ops::Glu& glu) {
  if (out.rows == 0) return;
  const Rows to = rows_of(out), g = rows_of(gate), u = rows_of(up);
  const GluArgs args = args_of(glu);
  const Activations none{};
  check(api_.rows.glu(ctx_, &to, &g, &u, &args, &none), "glu");
}

void CudaDevice::activation(const Matrix& x, ops::Activation activation) {
  const Rows rows = rows_of(x);
  check(api_.rows.activation(ctx_, &rows, static_cast<int>(activation)), "activation");
}

void CudaDevice::add(const Matrix& out, const Matrix& x, float scale) {
  const Rows to = rows_of(out), from = rows_of(x);
  check(api_.rows.add(ctx_, &to, &from, scale), "add");
}

void CudaDevice::scale(const Matrix& x, float scale) {
  const Rows rows = rows_of(x);
  check(api_.rows.scale(ctx_, &rows, scale), "scale");
}

void CudaDevice::softcap(const Matrix& x, float cap) {
  const Rows rows = rows_of(x);
  check(api_.rows.softcap(ctx_, &rows, cap), "softcap");
}

void CudaDevice::gather_rows(const Matrix& out, const Matrix& x, std::span<const int32_t> rows) {
  const Rows to = rows_of(out), from = rows_of(x);
  check(api_.rows.gather(ctx_, &to, &from, ints(rows)), "gather_rows");
}

void CudaDevice::sigmoid_gate(const Matrix& x, const Matrix& gate) {
  const Rows rows = rows_of(x), gates = rows_of(gate);
  check(api_.rows.sigmoid_gate(ctx_, &rows, &gates), "sigmoid_gate");
}

void CudaDevice::sigmoid_product(const Matrix& x, const Matrix& gate) {
  const Rows rows = rows_of(x), gates = rows_of(gate);
  check(api_.rows.sigmoid_product(ctx_, &rows, &gates), "sigmoid_product");
}

void CudaDevice::xielu(const Matrix& x, const ops::Xielu& p) {
  const Rows rows = rows_of(x);
  check(api_.rows.xielu(ctx_, &rows, p.positive, p.negative, p.beta, p.eps), "xielu");
}

void CudaDevice::argmax(const Matrix& x, int32_t* ids) {
  const Rows rows = rows_of(x);
  check(api_.sampling.argmax(ctx_, &rows, ids), "argmax");
}

void CudaDevice::sample(const Matrix& logits, std::span<const int32_t> words,
                        std::span<const int32_t> tokens, int32_t* ids) {
  const Rows rows = rows_of(logits);
  const int32_t* lists = ints(words);
  check(api_.sampling.sample(ctx_, &rows, lists, tokens.empty() ? nullptr : ints(tokens), ids),
        "sample");
}

void CudaDevice::take_ids(std::span<const int32_t> ids, std::span<const int32_t> from,
                          const int32_t* named, const int32_t* map) {
  auto* to = const_cast<int32_t*>(ints(ids));  // the device's copy, owned by the step
  check(api_.sampling.take_ids(ctx_, to, ints(from), std::ssize(ids), named, map), "take_ids");
}

}  // namespace freshet::cuda
