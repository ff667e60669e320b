// Ops that process each row, or each head of a row, independently.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/ops_impl.h"
#include "ops/sample.h"

namespace freshet::ops {
namespace {

void check_same(const char* op, const Matrix& a, const Matrix& b) {
  FRESHET_CHECK(a.rows == b.rows && a.cols == b.cols, "{} of [{}, {}] and [{}, {}]", op, a.rows,
                a.cols, b.rows, b.cols);
}

void norm_row(const VectorKernels& v, float* out, const float* x, int64_t n, const Norm& norm,
              int64_t weight_offset) {
  const float* weight = norm.weight != nullptr ? norm.weight + weight_offset : nullptr;
  const float* bias = norm.bias != nullptr ? norm.bias + weight_offset : nullptr;
  const auto f = norm.kind == NormKind::kRms ? v.rms_norm : v.layer_norm;
  f(out, x, weight, bias, n, norm.eps);
}

}  // namespace

void Ops::norm(const Matrix& out, const Matrix& x, const Norm& norm) {
  check_same("norm", out, x);
  if (Device* d = device()) return d->norm(out, x, norm);
  impl_->for_rows(x.rows, x.cols, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      norm_row(*impl_->vector, out.row(t), x.row(t), x.cols, norm, 0);
    }
  });
}

void Ops::norm_heads(const Matrix& x, int heads, int head_dim, const Norm& norm,
                     bool weight_per_head) {
  FRESHET_CHECK(x.cols == int64_t{heads} * head_dim, "norm_heads x [{}, {}], heads={} head_dim={}",
                x.rows, x.cols, heads, head_dim);
  if (Device* d = device()) return d->norm_heads(x, heads, head_dim, norm, weight_per_head);
  impl_->for_rows(x.rows, x.cols, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        float* head = x.row(t) + h * head_dim;
        norm_row(*impl_->vector, head, head, head_dim, norm, weight_per_head ? h * head_dim : 0);
      }
    }
  });
}

namespace {

// The angle is an F32 product, as in training; its cosine is exact to F32.
void rotate_pair(float* row, int64_t half, int64_t i, float position, float frequency,
                 double factor) {
  const double angle = position * frequency;
  row[i] = static_cast<float>(factor * std::cos(angle));
  row[half + i] = static_cast<float>(factor * std::sin(angle));
}

}  // namespace

void Ops::rope_table(float* cos_sin, std::span<const int32_t> positions, int count,
                     std::span<const int> axes, std::span<const float> inv_freq, float scale) {
  const auto half = static_cast<int64_t>(inv_freq.size());
  const int64_t tokens = std::ssize(positions) / count;
  FRESHET_CHECK(device() == nullptr, "rope_table of several axes on a device");
  FRESHET_CHECK(std::ssize(axes) == half && std::ssize(positions) == tokens * count,
                "rope_table axes={} frequencies={} positions={}", axes.size(), half,
                positions.size());
  impl_->for_rows(tokens, half * 32, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const std::span<const int32_t> own =
          positions.subspan(static_cast<size_t>(t * count), static_cast<size_t>(count));
      for (int64_t i = 0; i < half; ++i) {
        const auto at = static_cast<size_t>(i);
        const auto position = static_cast<float>(own[static_cast<size_t>(axes[at])]);
        rotate_pair(cos_sin + t * 2 * half, half, i, position, inv_freq[at], scale);
      }
    }
  });
}

void Ops::rope_table(float* cos_sin, std::span<const int32_t> positions,
                     std::span<const float> inv_freq, float scale, const PositionScale& growth) {
  if (Device* d = device()) {
    return d->rope_table(cos_sin, positions, inv_freq, scale, growth);
  }
  const auto half = static_cast<int64_t>(inv_freq.size());
  const auto tokens = static_cast<int64_t>(positions.size());
  impl_->for_rows(tokens, half * 32, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      float* row = cos_sin + t * 2 * half;
      const auto position = static_cast<float>(positions[static_cast<size_t>(t)]);
      const double steps = std::floor((position + 1.0f) / growth.interval);
      const double factor =
          growth.gain == 0.0f ? double{scale} : scale * (1.0 + growth.gain * std::log1p(steps));
      for (int64_t i = 0; i < half; ++i)
        rotate_pair(row, half, i, position, inv_freq[static_cast<size_t>(i)], factor);
    }
  });
}

void Ops::rope(const Matrix& x, int heads, int head_dim, int offset, int rotary_dim,
               bool interleaved, const float* cos_sin) {
  FRESHET_CHECK(x.cols == int64_t{heads} * head_dim && rotary_dim % 2 == 0 && offset >= 0 &&
                    offset + rotary_dim <= head_dim,
                "rope x [{}, {}], heads={} head_dim={} offset={} rotary_dim={}", x.rows, x.cols,
                heads, head_dim, offset, rotary_dim);
  if (Device* d = device()) {
    return d->rope(x, heads, head_dim, offset, rotary_dim, interleaved, cos_sin);
  }
  impl_->for_rows(x.rows, int64_t{heads} * rotary_dim, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      for (int h = 0; h < heads; ++h) {
        impl_->vector->rope(x.row(t) + int64_t{h} * head_dim + offset, cos_sin + t * rotary_dim,
                            rotary_dim, interleaved);
      }
    }
  });
}

void Ops::glu(const Matrix& out, const Matrix& gate, const Matrix& up, const Glu& glu) {
  check_same("glu", gate, up);
  check_same("glu", out, gate);
  if (Device* d = device()) return d->glu(out, gate, up, glu);
  impl_->for_rows(out.rows, out.cols * 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      impl_->vector->glu(out.row(t), gate.row(t), up.row(t), out.cols,
                         static_cast<int>(glu.activation), glu.limit, glu.alpha);
    }
  });
}

void Ops::activation(const Matrix& x, Activation activation) {
  if (Device* d = device()) return d->activation(x, activation);
  impl_->for_rows(x.rows, x.cols * 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      impl_->vector->activation(x.row(t), x.cols, static_cast<int>(activation));
    }
  });
}

void Ops::xielu(const Matrix& x, const Xielu& p) {
  if (Device* d = device(); d != nullptr && x.rows > 0) return d->xielu(x, p);
  impl_->for_rows(x.rows, x.cols * 16, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      float* const row = x.row(t);
      for (int64_t i = 0; i < x.cols; ++i) {
        const float v = row[i];
        const float curve =
            v > 0.0f ? p.positive * v * v : p.negative * (std::expm1(std::min(v, p.eps)) - v);
        row[i] = curve + p.beta * v;
      }
    }
  });
}

void Ops::add(const Matrix& out, const Matrix& x, float scale) {
  check_same("add", out, x);
  if (Device* d = device()) return d->add(out, x, scale);
  impl_->for_rows(x.rows, x.cols, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) impl_->vector->add(out.row(t), x.row(t), x.cols, scale);
  });
}

void Ops::scale(const Matrix& x, float scale) {
  if (Device* d = device()) return d->scale(x, scale);
  impl_->for_rows(x.rows, x.cols, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) impl_->vector->scale(x.row(t), x.cols, scale);
  });
}

void Ops::scale_cols(const Matrix& x, const float* factors) {
  FRESHET_CHECK(device() == nullptr, "scale_cols on a device");
  impl_->for_rows(x.rows, x.cols, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      float* const row = x.row(t);
      for (int64_t c = 0; c < x.cols; ++c) row[c] *= factors[c];
    }
  });
}

void Ops::softcap(const Matrix& x, float cap) {
  FRESHET_CHECK(cap > 0.0f, "softcap={}", cap);
  if (Device* d = device()) return d->softcap(x, cap);
  impl_->for_rows(x.rows, x.cols * 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) impl_->vector->softcap(x.row(t), x.cols, cap);
  });
}

void Ops::put_rows(const Matrix& out, std::span<const int32_t> rows, const Matrix& x, bool add) {
  FRESHET_CHECK(device() == nullptr, "put_rows on a device");
  FRESHET_CHECK(x.rows == static_cast<int64_t>(rows.size()) && out.cols == x.cols,
                "put_rows out [{}, {}], x [{}, {}], rows [{}]", out.rows, out.cols, x.rows, x.cols,
                rows.size());
  for (int64_t i = 0; i < x.rows; ++i) {
    const int32_t to = rows[static_cast<size_t>(i)];
    FRESHET_CHECK(to >= 0 && to < out.rows, "put_rows row={} of {}", to, out.rows);
    if (add) {
      impl_->vector->add(out.row(to), x.row(i), x.cols, 1.0f);
    } else {
      std::memcpy(out.row(to), x.row(i), static_cast<size_t>(x.cols) * sizeof(float));
    }
  }
}

void Ops::gather_rows(const Matrix& out, const Matrix& x, std::span<const int32_t> rows) {
  FRESHET_CHECK(out.rows == static_cast<int64_t>(rows.size()) && out.cols == x.cols,
                "gather_rows out [{}, {}], x [{}, {}], rows [{}]", out.rows, out.cols, x.rows,
                x.cols, rows.size());
  for (int64_t t = 0; t < out.rows; ++t) {
    const int32_t from = rows[static_cast<size_t>(t)];
    FRESHET_CHECK(from >= 0 && from < x.rows, "gather_rows row={} of {}", from, x.rows);
  }
  if (Device* d = device()) return d->gather_rows(out, x, rows);
  for (int64_t t = 0; t < out.rows; ++t) {
    const int32_t from = rows[static_cast<size_t>(t)];
    std::memcpy(out.row(t), x.row(from), static_cast<size_t>(x.cols) * sizeof(float));
  }
}

void Ops::argmax(const Matrix& x, int32_t* ids) {
  if (Device* d = device()) return d->argmax(x, ids);
  impl_->for_rows(x.rows, x.cols, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      float most = -std::numeric_limits<float>::infinity();
      ids[t] = -1;
      for (int64_t c = 0; c < x.cols; ++c) {
        if (!(x.row(t)[c] > most)) continue;
        most = x.row(t)[c];
        ids[t] = static_cast<int32_t>(c);
      }
    }
  });
}

bool Ops::samples(int64_t vocab) const {
  const Device* d = device();
  return d != nullptr && d->samples(vocab);
}

void Ops::sample(const Matrix& logits, std::span<const int32_t> words,
                 std::span<const int32_t> tokens, int32_t* ids) {
  FRESHET_CHECK(
      samples(logits.cols) && words.size() >= static_cast<size_t>(logits.rows) * kSampleRowWords,
      "sample [{}, {}] with {} words", logits.rows, logits.cols, words.size());
  device()->sample(logits, words, tokens, ids);
}

void Ops::take_ids(std::span<const int32_t> ids, std::span<const int32_t> from,
                   const int32_t* named, const int32_t* map) {
  FRESHET_CHECK(device() != nullptr && ids.size() == from.size(), "take_ids {} from {}", ids.size(),
                from.size());
  if (!ids.empty()) device()->take_ids(ids, from, named, map);
}
void Ops::note(int which) {
  device()->note(which);
}
void Ops::await(int which) {
  device()->await(which);
}

void Ops::sigmoid_gate(const Matrix& x, const Matrix& gate) {
  FRESHET_CHECK(gate.rows == x.rows && gate.cols >= 1, "sigmoid_gate x [{}, {}], gate [{}, {}]",
                x.rows, x.cols, gate.rows, gate.cols);
  if (Device* d = device()) return d->sigmoid_gate(x, gate);
  impl_->for_rows(x.rows, x.cols, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const double factor = 1.0 / (1.0 + std::exp(-double{gate.row(t)[0]}));
      impl_->vector->scale(x.row(t), x.cols, static_cast<float>(factor));
    }
  });
}

}  // namespace freshet::ops
