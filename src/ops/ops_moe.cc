// The mixture of experts. Tokens are grouped by expert, so that an expert's weights are read once
// for all its tokens. Each token sums its experts in order of expert id.
#include <algorithm>

#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

// The (token, slot of the top k) pairs, sorted by (expert, token). A pair's index in this order is
// its place.
struct Groups {
  int32_t* start;   // [experts + 1] first place of each expert
  int32_t* token;   // [pairs] by place
  float* weight;    // [pairs] by place
  int32_t* places;  // [tokens, top_k] by token; ascending, hence in order of expert id
};

Groups group(Arena& arena, const int32_t* ids, const float* weights, int64_t tokens, int top_k,
             int64_t experts) {
  const int64_t pairs = tokens * top_k;
  Groups g{arena.allocate_array<int32_t>(experts + 1), arena.allocate_array<int32_t>(pairs),
           arena.allocate_array<float>(pairs), arena.allocate_array<int32_t>(pairs)};
  std::fill_n(g.start, experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) {
    FRESHET_CHECK(ids[i] >= 0 && ids[i] < experts, "moe expert id={} of {}", ids[i], experts);
    ++g.start[ids[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) g.start[e + 1] += g.start[e];
  const size_t mark = arena.mark();
  auto* next = arena.allocate_array<int32_t>(experts);
  std::copy_n(g.start, experts, next);
  for (int64_t i = 0; i < pairs; ++i) {
    const int32_t place = next[ids[i]]++;
    g.token[place] = static_cast<int32_t>(i / top_k);
    g.weight[place] = weights[i];
    g.places[i] = place;
  }
  arena.rewind(mark);
  for (int64_t t = 0; t < tokens; ++t) {
    std::sort(g.places + t * top_k, g.places + (t + 1) * top_k);
  }
  return g;
}

void check(const Matrix& out, const Matrix& x, const Experts& e) {
  FRESHET_CHECK(!e.gate_up.empty() && e.gate_up.size() == e.down.size(),
                "moe gate_up [{}], down [{}]", e.gate_up.size(), e.down.size());
  for (size_t i = 0; i < e.gate_up.size(); ++i) {
    const Weight& g = e.gate_up[i];
    const Weight& d = e.down[i];
    FRESHET_CHECK(g.kernel != nullptr && d.kernel != nullptr && g.cols == x.cols &&
                      d.rows == out.cols && g.rows == 2 * d.cols && out.rows == x.rows &&
                      g.rows == e.gate_up[0].rows && g.kernel->act == e.gate_up[0].kernel->act &&
                      d.kernel->act == e.down[0].kernel->act,
                  "moe expert {}: gate_up [{}, {}], down [{}, {}], x [{}, {}], out [{}, {}]", i,
                  g.rows, g.cols, d.rows, d.cols, x.rows, x.cols, out.rows, out.cols);
  }
}

// Multiplies by the weights of every selected expert; `to` is by place. If hooks are set, they are
// called before and after each expert and see `x`, the expert's input by place. M: Ops::Impl.
template <class M, class Encoded>
void multiply(M& m, const Groups& g, std::span<const Weight> w, const float* bias,
              const Encoded& in, const int32_t* rows_index, const Matrix& x, const Matrix& to) {
  const size_t mark = m.arena.mark();
  const auto experts = static_cast<int64_t>(w.size());
  auto* calls = m.arena.template allocate_array<MatmulCall>(std::min(experts, to.rows));
  const auto each = [&](const auto& body) {
    for (int64_t i = 0; i < experts; ++i) {
      const int64_t first = g.start[i], count = g.start[i + 1] - first;
      if (count == 0) continue;
      const float* const its_bias = bias != nullptr ? bias + i * to.cols : nullptr;
      body(Product{&w[static_cast<size_t>(i)], to.slice_rows(first, count), its_bias}, first);
    }
  };
  if (m.hooks != nullptr) {
    m.with_hooks([&](ProjectionHooks& hooks) {
      each([&](const Product& p, int64_t first) {
        hooks.before(*p.weight, x.slice_rows(first, p.out.rows));
      });
    });
  }
  size_t n = 0;
  each([&](const Product& p, int64_t first) {
    calls[n++] = {{p.weight, p.out.rows, rows_index != nullptr ? rows_index + first : nullptr,
                   p.out.data, p.out.stride, p.bias, 1.0f, false},
                  rows_index != nullptr ? in.data : in.data + first * in.row_bytes,
                  in.row_bytes};
  });
  m.run_calls({calls, n});
  if (m.hooks != nullptr) {
    m.with_hooks([&](ProjectionHooks& hooks) {
      each([&](const Product& p, int64_t first) {
        hooks.after(p, x.slice_rows(first, p.out.rows));
      });
    });
  }
  m.arena.rewind(mark);
}

}  // namespace

void Ops::moe(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights,
              int top_k, const Experts& e, bool add) {
  if (x.rows == 0) return;
  check(out, x, e);
  if (Device* d = device()) {
    if (impl_->hooks == nullptr) return d->moe(out, x, ids, weights, top_k, e, add, nullptr);
    return impl_->with_hooks(
        [&](ProjectionHooks& hooks) { d->moe(out, x, ids, weights, top_k, e, add, &hooks); });
  }
  Impl& m = *impl_;
  const size_t mark = m.arena.mark();
  const auto experts = static_cast<int64_t>(e.gate_up.size());
  const int64_t pairs = x.rows * top_k, ff = e.down[0].cols;
  const Groups g = group(m.arena, ids, weights, x.rows, top_k, experts);
  const Matrix hidden = m.arena.matrix(pairs, ff);  // by place
  const Matrix y = m.arena.matrix(pairs, out.cols);
  {
    const size_t inner = m.arena.mark();
    const Matrix gate_up = m.arena.matrix(pairs, 2 * ff);
    if (e.weight_before || m.hooks != nullptr) {
      const Matrix own = m.arena.matrix(pairs, x.cols);  // the experts' inputs, by place
      m.for_rows(pairs, x.cols, [&](int64_t first, int64_t last) {
        for (int64_t p = first; p < last; ++p) {
          std::copy_n(x.row(g.token[p]), x.cols, own.row(p));
          if (e.weight_before) m.vector->scale(own.row(p), x.cols, g.weight[p]);
        }
      });
      const Impl::Encoded in = m.encode(own, e.gate_up[0]);
      multiply(m, g, e.gate_up, e.gate_up_bias, in, nullptr, own, gate_up);
    } else {
      const Impl::Encoded in = m.encode(x, e.gate_up[0]);
      multiply(m, g, e.gate_up, e.gate_up_bias, in, g.token, {}, gate_up);
    }
    glu(hidden, gate_up.slice_cols(0, ff), gate_up.slice_cols(ff, ff), e.glu);
    m.arena.rewind(inner);
  }
  multiply(m, g, e.down, e.down_bias, m.encode(hidden, e.down[0]), nullptr, hidden, y);

  m.for_rows(x.rows, out.cols * top_k, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int32_t* places = g.places + t * top_k;
      float* sum = y.row(places[0]);
      if (!e.weight_before) m.vector->scale(sum, out.cols, g.weight[places[0]]);
      for (int k = 1; k < top_k; ++k) {
        const float w = e.weight_before ? 1.0f : g.weight[places[k]];
        m.vector->add(sum, y.row(places[k]), out.cols, w);
      }
      if (add) {
        m.vector->add(out.row(t), sum, out.cols, 1.0f);
      } else {
        std::copy_n(sum, out.cols, out.row(t));
      }
    }
  });
  m.arena.rewind(mark);
}

void Ops::moe_block(const MoeBlock& b) {
  if (b.in.x.rows == 0) return;
  const bool whole = undivided(b.router, b.shared.gate, b.shared.up, b.shared.down, b.shared_gate);
  if (Device* d = device(); d != nullptr && impl_->hooks == nullptr && whole && d->moe_block(b)) {
    return;
  }
  project(b.in, {&b.router, 1});
  route(b.router.out, b.routing, b.ids, b.weights);
  moe(b.out, b.in.rows(), b.ids, b.weights, b.routing.top_k, b.experts, b.add);
  if (b.shared.down.weight != nullptr) run_shared_expert(b);
}

void Ops::run_shared_expert(const MoeBlock& b) {
  GatedMlp shared = b.shared;
  shared.in = {b.in.rows(), nullptr, {}, b.in.shared};
  gated(shared);
  if (b.shared_gate.weight == nullptr) return;
  matmul(b.in.rows(), {&b.shared_gate, 1});
  sigmoid_gate(b.shared.down.out, b.shared_gate.out);
  add(b.out, b.shared.down.out, 1.0f);
}

}  // namespace freshet::ops
