// CudaDevice: fused operations (ops/fused.h), except those of experts.
#include <array>

#include "backend/cuda/arguments.h"
#include "backend/cuda/attention/decode_sm90.h"
#include "backend/cuda/device.h"

namespace freshet::cuda {

// in.normed = norm(in.x), encoded for GEMMs with these weights and for other readers that share it.
void CudaDevice::normalise(const ops::Input& in, Readers readers, Forms& forms) {
  forms = {};
  const ops::Norm& norm = *in.norm;
  const bool plain_rms =
      norm.kind == ops::NormKind::kRms && norm.weight != nullptr && norm.bias == nullptr;
  const Output to = output_for(in.normed, readers, in.shared != nullptr, plain_rms, forms);
  const Rows from = rows_of(in.x);
  const NormArgs args = args_of(norm);
  check(api_.rows.norm(ctx_, &to.rows, &from, &args, &to.act), "norm");
}

bool CudaDevice::project(const ops::Input& in, std::span<const ops::Product> products) {
  Forms own;
  Forms& forms = in.shared != nullptr ? *in.shared : own;
  if (in.norm != nullptr) {
    std::array<const ops::Weight*, kMaxProducts> readers;
    FRESHET_CHECK(products.size() <= readers.size(), "{} products at once", products.size());
    for (size_t i = 0; i < products.size(); ++i) readers[i] = products[i].weight;
    normalise(in, std::span(readers).first(products.size()), forms);
  }
  run_products(in.rows(), products, forms);
  return true;
}

bool CudaDevice::prepare(const ops::Input& in, Readers readers) {
  Forms none;
  normalise(in, readers, in.shared != nullptr ? *in.shared : none);
  return true;
}

// Norms over all heads are separate operations; everything else goes to one kernel.
HeadsArgs CudaDevice::heads_args(const ops::Heads& h) {
  HeadsArgs args{};
  const auto add = [&](const ops::Heads::Part& p, HeadsArgs::Store store) {
    if (p.x.rows == 0) return;
    const bool over_all = p.norm != nullptr && p.norm_all_heads;
    if (over_all) norm(p.x, p.x, *p.norm);
    const bool normed = p.norm != nullptr && !over_all;
    if (!normed && p.rotary_dim == 0 && store == HeadsArgs::kNowhere) return;
    HeadsArgs::Part& part = args.of[args.count++];
    part = {p.x.data, p.x.stride, p.heads, p.head_dim, {}, normed, p.norm_per_head};
    if (normed) part.norm = args_of(*p.norm);
    part.rotary_dim = p.rotary_dim;
    if (p.rotary_dim > 0) {
      part.offset = p.offset;
      part.interleaved = p.interleaved;
      args.cos_sin = h.cos_sin;
    }
    part.store = store;
    args.tokens = p.x.rows;
  };
  add(h.q, HeadsArgs::kNowhere);
  if (h.k.x.rows == 0) return args;
  add(h.k, HeadsArgs::kKeys);
  const ops::KvShape& s = h.cache.shape;
  if (!s.value_is_key_prefix) add({h.v, s.kv_heads, s.value_dim}, HeadsArgs::kValues);
  args.cache = args_of(h.cache);
  args.batch = batch_args(h.batch, h.k.x.rows);
  return args;
}

namespace {

// No kernel normalises after the rotation: single operations run instead.
bool norms_follow(const ops::Heads& h) {
  return h.q.norm_after || h.k.norm_after;
}

}  // namespace

bool CudaDevice::heads(const ops::Heads& h) {
  if (norms_follow(h)) return false;
  const HeadsArgs args = heads_args(h);
  if (args.count > 0) check(api_.attention.heads(ctx_, &args), "heads");
  return true;
}

Matrix CudaDevice::queries_for(const ops::KvView& cache, const Matrix& q, bool in_place) {
  const ops::KvShape& s = cache.shape;
  if (!ops::info(s.type).key.rotated) return q;
  Matrix to = q;
  if (!in_place) to = {scratch_array<float>(q.rows * q.cols), q.rows, q.cols, q.cols};
  const Rows from = rows_of(q), rotated = rows_of(to);
  const int heads = static_cast<int>(q.cols / s.key_dim);
  check(api_.attention.rotate_heads(ctx_, &rotated, &from, heads, s.key_dim), "rotate_heads");
  return to;
}

// before: nullptr, or the heads that the same kernel processes. reader: nullptr, or the weight of
// the GEMM that reads the result; keep: other operations read it, too.
void CudaDevice::run_attention(const Matrix& out, const Matrix& q, const ops::KvView& cache,
                               const ops::AttentionBatch& batch, const ops::AttentionParams& params,
                               const HeadsArgs* before, const ops::Weight* reader, bool keep,
                               Forms& forms) {
  AttentionArgs a{};
  a.before = before;
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
  // Uses the table's capacity, not the batch's lengths, so that recorded steps stay valid.
  a.max_context = static_cast<int32_t>(batch.table_stride * ops::kBlockTokens);
  if (!batch.ranges.empty()) a.ranges = ints(ops::numbers_of(batch.ranges));
  a.distance_bias = params.distance_bias;
  a.bias_reach = params.bias_reach;
  for (int s = 0; s < batch.sequences(); ++s) {
    const auto i = static_cast<size_t>(s);
    const int32_t queries = batch.query_start[i + 1] - batch.query_start[i];
    a.max_queries = std::max(a.max_queries, queries);
    if (a.single == s && queries == 1) ++a.single;
  }
  // Kernels of more rows have one block walk a whole context, so only single queries need scratch.
  const int64_t rows = int64_t{a.max_queries} * (params.heads / cache.shape.kv_heads);
  for (const int tokens : {rows <= kExtendRows ? a.batch.tokens : a.single, a.single}) {
    const auto partial = static_cast<size_t>(api_.attention.partial_bytes(
        ctx_, tokens, params.heads, cache.shape.value_dim, a.max_context));
    if (tokens == 0 || partial > scratch_.size() / 4) continue;
    a.partial = reinterpret_cast<float*>(scratch(partial));
    a.partial_tokens = tokens;
    break;
  }
  const bool all_single = a.partial != nullptr && a.single == batch.sequences();
  const bool rotated = ops::info(cache.shape.type).value.rotated;
  if (rotated) reader = nullptr;  // the result is not complete before it is rotated back
  if (reader != nullptr && (all_single || !keep)) {
    const Output to = output_for(out, {&reader, 1}, keep, false, forms);
    a.act = to.act;
    a.only_act = to.rows.data == nullptr;
  }
  check(api_.attention.attention(ctx_, &a), "attention");
  if (!rotated) return;
  const Rows result = rows_of(out);
  check(api_.attention.rotate_heads(ctx_, &result, &result, params.heads, cache.shape.value_dim),
        "rotate_heads");
}

bool CudaDevice::attend(const ops::Attend& a) {
  const ops::Heads& h = a.heads;
  if (norms_follow(h)) return false;
  const HeadsArgs args = heads_args(h);
  // Queries, keys and values together, unless something else reads the queries afterwards.
  const bool together =
      args.count == 3 && !ops::info(h.cache.shape.type).key.rotated && a.scored.empty();
  if (args.count > 0 && !together) check(api_.attention.heads(ctx_, &args), "heads");
  if (!a.scored.empty()) key_scores(h.q.x, h.cache, h.batch, a.params, a.scored);
  Forms forms;
  run_attention(a.out, queries_for(h.cache, h.q.x, true), h.cache, h.batch, a.params,
                together ? &args : nullptr, a.o.weight, a.o.weight == nullptr, forms);
  if (a.o.weight != nullptr) run_products(a.out, {&a.o, 1}, forms);
  return true;
}

bool CudaDevice::latent_attention(const ops::LatentAttention& l) {
  const bool attends = l.absorbed.data != nullptr, stores = l.kv_down.weight != nullptr;
  std::array<ops::Product, 2> down;
  size_t count = 0;
  if (attends) down[count++] = l.q_down.weight != nullptr ? l.q_down : l.q;
  if (stores) down[count++] = l.kv_down;
  project(l.in, std::span(down).first(count));
  if (attends) {
    if (l.q_down.weight != nullptr) project({l.q_down.out, l.q_norm, l.q_down.out}, {&l.q, 1});
    rope(l.q.out, l.params.heads, l.head_dim, l.rope_offset, l.rotary_dim, l.interleaved,
         l.cos_sin);
  }
  if (stores) {
    const Matrix& k = l.kv_down.out;
    const Matrix latent = k.slice_cols(0, l.kv_rank);
    norm(latent, latent, *l.kv_norm);
    ops::Heads all;
    all.k = {k,
             1,
             static_cast<int>(k.cols),
             nullptr,
             false,
             false,
             static_cast<int>(l.kv_rank),
             l.rotary_dim,
             l.interleaved};
    all.v = latent;
    all.cos_sin = l.cos_sin;
    all.cache = l.cache;
    all.batch = l.batch;
    heads(all);
  }
  if (!attends) return true;
  matmul_heads(l.q.out, l.q_absorb, l.absorbed);
  if (!l.scored.empty()) key_scores(l.absorbed, l.cache, l.batch, l.params, l.scored);
  Forms mixed;
  const ops::Weight& v_up = l.v_up.front();
  run_attention(l.mixed, l.absorbed, l.cache, l.batch, l.params, nullptr,
                slices_heads(v_up, l.mixed.rows) ? &v_up : nullptr, true, mixed);
  run_products_of_heads(l.mixed, l.v_up, l.values, mixed);
  Forms values;
  run_products(l.values, {&l.o, 1}, values);
  return true;
}

bool CudaDevice::gated(const ops::GatedMlp& m) {
  Forms own, hidden;
  Forms& forms = m.in.shared != nullptr ? *m.in.shared : own;
  const ops::Weight* const readers[] = {m.gate.weight, m.up.weight};
  if (m.in.norm != nullptr) normalise(m.in, readers, forms);
  const Matrix& x = m.in.rows();
  const ProductArgs both[] = {product_args(x, m.gate, forms), product_args(x, m.up, forms)};
  const Code code = code_of(m.gate.weight->format), down = code_of(m.down.weight->format);
  const bool alike = m.up.weight->format == m.gate.weight->format &&
                     m.up.weight->rows == m.gate.weight->rows && !m.gate.add && !m.up.add;
  const bool silu = m.glu.activation == ops::Activation::kSilu && m.glu.limit <= 0.0f;
  // The GEMM's epilogue writes the layout that a GEMM in its own format reads.
  const bool fused =
      alike && silu && code != Code::kF32 && down != Code::kF32 &&
      api_.gemm.order_for(ctx_, down, x.rows) == api_.gemm.order_for(ctx_, code, x.rows) &&
      api_.gemm.gated_fits(ctx_, code, m.gate.weight->rows, x.cols, x.rows) != 0;
  if (!fused) check(api_.gemm.products(ctx_, both, 2, x.rows, nullptr), "products");
  const Matrix& out = m.up.out;
  const Output to = output_for(out, {&m.down.weight, 1}, false, true, hidden);
  if (fused) {
    check(api_.gemm.gated_products(ctx_, both, x.rows, &to.act), "gated_products");
  } else {
    const Rows g = rows_of(m.gate.out), u = rows_of(out);
    const GluArgs args = args_of(m.glu);
    check(api_.rows.glu(ctx_, &to.rows, &g, &u, &args, &to.act), "glu");
  }
  run_products(out, {&m.down, 1}, hidden);
  return true;
}

}  // namespace freshet::cuda
