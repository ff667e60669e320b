// The mixture of experts: tokens are grouped by expert, so that an expert's weights are read once
// for all its tokens, and each token adds up its experts in order of their ids.
#include <algorithm>

#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

// A (token, slot of the top k) pair stands at its place in the order of (expert, token).
struct Groups {
  int32_t* start;   // [experts + 1] first place of an expert
  int32_t* token;   // [pairs] by place
  float* weight;    // [pairs] by place
  int32_t* places;  // [tokens, top_k] by token; ascending, hence in order of expert
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

}  // namespace

void Ops::moe(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights,
              int top_k, const Experts& e, bool add) {
  if (x.rows == 0) return;
  check(out, x, e);
  if (Device* d = device()) return d->moe(out, x, ids, weights, top_k, e, add);
  Impl& m = *impl_;
  const size_t mark = m.arena.mark();
  const auto experts = static_cast<int64_t>(e.gate_up.size());
  const int64_t pairs = x.rows * top_k, ff = e.down[0].cols;
  const Groups g = group(m.arena, ids, weights, x.rows, top_k, experts);
  auto* calls = m.arena.allocate_array<MatmulCall>(std::min(experts, pairs));
  const Matrix hidden = m.arena.matrix(pairs, ff);  // by place
  const Matrix y = m.arena.matrix(pairs, out.cols);

  // One call for every expert that somebody chose.
  const auto multiply = [&](std::span<const Weight> w, const float* bias, const Impl::Encoded& in,
                            const int32_t* rows_index, const Matrix& to) {
    size_t n = 0;
    for (int64_t i = 0; i < experts; ++i) {
      const int64_t first = g.start[i];
      const int64_t count = g.start[i + 1] - first;
      if (count == 0) continue;
      calls[n++] = {
          {&w[static_cast<size_t>(i)], count, rows_index != nullptr ? rows_index + first : nullptr,
           to.row(first), to.stride, bias != nullptr ? bias + i * to.cols : nullptr, 1.0f, false},
          rows_index != nullptr ? in.data : in.data + first * in.row_bytes,
          in.row_bytes};
    }
    m.run_calls({calls, n});
  };

  {
    const size_t inner = m.arena.mark();
    const Matrix gate_up = m.arena.matrix(pairs, 2 * ff);
    if (e.weight_before) {
      const Matrix scaled = m.arena.matrix(pairs, x.cols);
      m.for_rows(pairs, x.cols, [&](int64_t first, int64_t last) {
        for (int64_t p = first; p < last; ++p) {
          std::copy_n(x.row(g.token[p]), x.cols, scaled.row(p));
          m.vector->scale(scaled.row(p), x.cols, g.weight[p]);
        }
      });
      multiply(e.gate_up, e.gate_up_bias, m.encode(scaled, e.gate_up[0]), nullptr, gate_up);
    } else {
      multiply(e.gate_up, e.gate_up_bias, m.encode(x, e.gate_up[0]), g.token, gate_up);
    }
    glu(hidden, gate_up.slice_cols(0, ff), gate_up.slice_cols(ff, ff), e.glu);
    m.arena.rewind(inner);
  }
  multiply(e.down, e.down_bias, m.encode(hidden, e.down[0]), nullptr, y);

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

}  // namespace freshet::ops
