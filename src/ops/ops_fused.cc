// The default composition of fused operations out of single ones. It defines the result of each
// group. It runs on the host, on a device that has no kernel for the group, and while projection
// hooks are set. Gated MLPs are in ops_gated.cc, experts in ops_moe.cc.
#include <algorithm>

#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

constexpr bool present(const Product& p) {
  return p.weight != nullptr;
}

}  // namespace

Status Ops::set_projection_hooks(ProjectionHooks* hooks, int64_t tokens, int64_t cols) {
  impl_->hooks = hooks;
  const auto bytes = static_cast<size_t>(tokens * cols) * sizeof(float);
  FRESHET_ASSIGN_OR_RETURN(impl_->hook_room, Buffer::allocate(bytes, memory()));
  return {};
}

void Ops::project(const Input& in, std::span<const Product> products) {
  if (in.x.rows == 0 || products.empty()) return;
  for (const Product& p : products) {
    FRESHET_CHECK(p.weight != nullptr && p.weight->cols == in.x.cols && p.out.rows == in.x.rows &&
                      p.out.cols == p.weight->rows,
                  "project x [{}, {}], out [{}, {}]", in.x.rows, in.x.cols, p.out.rows, p.out.cols);
  }
  const auto whole = [](const Product& p) { return undivided(p); };
  if (Device* d = device(); d != nullptr && impl_->hooks == nullptr &&
                            std::ranges::all_of(products, whole) && d->project(in, products)) {
    return;
  }
  if (in.norm != nullptr) norm(in.normed, in.x, *in.norm);
  matmul(in.rows(), products);
}

void Ops::prepare(const Input& in, std::span<const Weight* const> readers) {
  FRESHET_CHECK(in.norm != nullptr, "prepare without a norm");
  if (in.x.rows == 0) return;
  const auto whole = [](const Weight* w) { return w->outliers == nullptr; };
  if (Device* d = device();
      d != nullptr && std::ranges::all_of(readers, whole) && d->prepare(in, readers)) {
    return;
  }
  norm(in.normed, in.x, *in.norm);
}

void Ops::heads(const Heads& h) {
  if (Device* d = device(); d != nullptr && impl_->hooks == nullptr && d->heads(h)) return;
  for (const Heads::Part& p : {h.q, h.k}) {
    if (p.x.rows == 0) continue;
    const auto normalise = [&] {
      if (p.norm != nullptr && p.norm_all_heads) {
        norm(p.x, p.x, *p.norm);
      } else if (p.norm != nullptr) {
        norm_heads(p.x, p.heads, p.head_dim, *p.norm, p.norm_per_head);
      }
    };
    if (!p.norm_after) normalise();
    if (p.rotary_dim > 0) {
      rope(p.x, p.heads, p.head_dim, p.offset, p.rotary_dim, p.interleaved, h.cos_sin);
    }
    if (p.norm_after) normalise();
    if (p.factors != nullptr) scale_cols(p.x, p.factors);
  }
  if (h.k.x.rows == 0) return;
  if (impl_->hooks != nullptr) impl_->hooks->storing(h.q.x, h.k.x, h.v);
  store_kv(h.cache, h.k.x, h.v, h.batch);
}

void Ops::attend(const Attend& a) {
  if (Device* d = device();
      d != nullptr && impl_->hooks == nullptr && undivided(a.o) && d->attend(a)) {
    return;
  }
  heads(a.heads);
  const Matrix& q = a.heads.q.x;
  const float* others = nullptr;
  if (a.coarse.any()) {
    FRESHET_CHECK(a.selections.empty(), "coarse tokens and selections in one step");
    others = attend_both(a.out, q, a.heads.cache, a.heads.batch, a.params, a.coarse);
  } else if (a.selections.empty()) {
    attention(a.out, q, a.heads.cache, a.heads.batch, a.params);
  } else {
    selected_attention(a.out, q, a.heads.cache, a.heads.batch, a.params, a.selections);
  }
  if (!a.scored.empty()) key_scores(q, a.heads.cache, a.heads.batch, a.params, a.scored, others);
  if (present(a.o)) matmul(a.out, {&a.o, 1});
}

void Ops::qkv_attention(const QkvAttention& layer) {
  if (layer.in.x.rows == 0) return;
  const bool whole = undivided(layer.q, layer.k, layer.v, layer.attend.o);
  if (Device* d = device();
      d != nullptr && impl_->hooks == nullptr && whole && d->qkv_attention(layer)) {
    return;
  }
  std::array<Product, 3> products;
  size_t count = 0;
  for (const Product* p : {&layer.q, &layer.k, &layer.v}) {
    if (present(*p)) products[count++] = *p;
  }
  project(layer.in, std::span(products).first(count));
  if (!present(layer.q)) return heads(layer.attend.heads);
  attend(layer.attend);
}

void Ops::latent_attention(const LatentAttention& l) {
  if (l.in.x.rows == 0) return;
  const bool whole = undivided(l.q_down, l.q, l.kv_down, l.o);
  if (Device* d = device();
      d != nullptr && impl_->hooks == nullptr && whole && d->latent_attention(l)) {
    return;
  }
  const bool attends = l.absorbed.data != nullptr;
  std::array<Product, 2> down;
  size_t count = 0;
  if (attends) down[count++] = present(l.q_down) ? l.q_down : l.q;
  if (present(l.kv_down)) down[count++] = l.kv_down;
  project(l.in, std::span(down).first(count));
  if (attends) {
    if (present(l.q_down)) project({l.q_down.out, l.q_norm, l.q_down.out}, {&l.q, 1});
    if (l.rotary_dim > 0) {
      rope(l.q.out, l.params.heads, l.head_dim, l.rope_offset, l.rotary_dim, l.interleaved,
           l.cos_sin);
    }
  }
  if (present(l.kv_down)) {
    const Matrix& k = l.kv_down.out;
    const Matrix latent = k.slice_cols(0, l.kv_rank);
    norm(latent, latent, *l.kv_norm);
    Heads stored;
    stored.k = {k, 1, static_cast<int>(k.cols)};
    stored.k.offset = static_cast<int>(l.kv_rank);
    stored.k.rotary_dim = l.rotary_dim;
    stored.k.interleaved = l.interleaved;
    stored.v = latent;
    stored.cos_sin = l.cos_sin;
    stored.cache = l.cache;
    stored.batch = l.batch;
    heads(stored);
  }
  if (!attends) return;
  matmul_heads(l.q.out, l.q_absorb, l.absorbed);
  attention(l.mixed, l.absorbed, l.cache, l.batch, l.params);
  if (!l.scored.empty()) key_scores(l.absorbed, l.cache, l.batch, l.params, l.scored);
  matmul_heads(l.mixed, l.v_up, l.values);
  matmul(l.values, {&l.o, 1});
}

void Ops::add_residual(const ResidualAdd& end) {
  if (Device* d = device(); d != nullptr && d->add_residual(end)) return;
  if (end.norm != nullptr) norm(end.branch, end.branch, *end.norm);
  add(end.x, end.branch, end.scale);
  if (end.after != nullptr) norm(end.x, end.x, *end.after);
}

}  // namespace freshet::ops
