// Gated MLPs: the default composition, and the host's fused form. With many tokens, each worker
// takes a slice of the hidden features through both GEMMs, the activation and the encoding for
// `down`, so that the intermediate values stay in its caches: written out and read back, they are
// more data than all the weights. Kernels that support `gate` keep only the activation's result in
// between. If rows are encoded as a whole (INT8), the intermediate values are written out.
#include <algorithm>

#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

constexpr int64_t kManyTokens = 64;    // from here on, computing dominates reading the weights
constexpr int64_t kMostTokens = 512;   // per piece: its values stay in the L2 cache
constexpr int64_t kLeastTokens = 128;  // with fewer, unpacking a piece's weights is noticeable
constexpr int64_t kPiecesPerWorker = 4;

// Hidden features in slices of kEncodedPart, tokens in equal parts.
struct Pieces {
  int64_t stretches;
  int64_t parts;
  int64_t tokens;  // per part

  Pieces(int64_t rows, int64_t ff, int64_t workers)
      : stretches((ff + kEncodedPart - 1) / kEncodedPart),
        parts((rows + kMostTokens - 1) / kMostTokens) {
    // Cores differ in speed from moment to moment.
    while (stretches * parts < kPiecesPerWorker * workers && rows / (parts * 2) >= kLeastTokens) {
      parts *= 2;
    }
    tokens =
        ((rows + parts - 1) / parts + 2 * kPanelRows - 1) / (2 * kPanelRows) * (2 * kPanelRows);
  }
};

// Hidden features [first, last) of some tokens.
struct Piece {
  int64_t first;
  int64_t last;
  int64_t tokens;
  const uint8_t* act;  // of the first token
  int64_t act_row_bytes;
};

// The GEMM of x with p, or with `gate` the result of SwiGLU, into rows of `out`.
void run_product(const Product& p, const GateArgs* gate, const Piece& at, float* out,
                 int64_t stride) {
  const MatmulArgs args{p.weight, at.tokens, nullptr, out - at.first, stride, p.bias,
                        p.scale,  false,     gate};
  p.weight->kernel->run(args, at.act, at.act_row_bytes, at.first / kPanelRows,
                        (at.last + kPanelRows - 1) / kPanelRows);
}

// SwiGLU of a piece, into rows of `out`. g, u: buffers for the two GEMMs.
void run_units(const Product& gate, const Product& up, const GateArgs& unit, const Piece& at,
               float* g, float* u, float* out, int64_t stride) {
  const MatmulKernel* const kernel = up.weight->kernel;
  if (kernel->gates && gate.weight->kernel == kernel && at.last % kPanelRows == 0 &&
      at.tokens > kFewGated) {
    return run_product(up, &unit, at, out, stride);
  }
  run_product(gate, nullptr, at, g, kEncodedPart);
  run_product(up, nullptr, at, u, kEncodedPart);
  for (int64_t t = 0; t < at.tokens; ++t) {
    unit.glu(out + t * stride, g + t * kEncodedPart, u + t * kEncodedPart, at.last - at.first,
             unit.activation, unit.limit, unit.alpha);
  }
}

}  // namespace

void Ops::gated(const GatedMlp& mlp) {
  const Matrix& x = mlp.in.rows();
  const Product &gate = mlp.gate, &up = mlp.up, &down = mlp.down;
  FRESHET_CHECK(gate.out.rows == x.rows && up.out.rows == x.rows && down.out.rows == x.rows &&
                    gate.out.cols == up.out.cols && gate.weight->rows == gate.out.cols &&
                    up.weight->rows == gate.out.cols && down.weight->cols == gate.out.cols &&
                    gate.weight->cols == x.cols && up.weight->cols == x.cols &&
                    down.weight->rows == down.out.cols,
                "gated x [{}, {}], gate [{}, {}], up [{}, {}], down [{}, {}]", x.rows, x.cols,
                gate.weight->rows, gate.weight->cols, up.weight->rows, up.weight->cols,
                down.weight->rows, down.weight->cols);
  if (x.rows == 0) return;
  if (impl_->hooks == nullptr && undivided(gate, up, down)) {
    Device* const d = device();
    if (d != nullptr ? d->gated(mlp) : run_gated_by_pieces(mlp)) return;
  }
  const Product both[] = {gate, up};
  project(mlp.in, both);
  glu(up.out, gate.out, up.out, mlp.glu);
  matmul(up.out, {&down, 1});
}

// Runs on the host for many tokens if the kernels can; otherwise returns false.
bool Ops::run_gated_by_pieces(const GatedMlp& mlp) {
  const Matrix& x = mlp.in.rows();
  const Product &gate = mlp.gate, &up = mlp.up, &down = mlp.down;
  const Glu& glu = mlp.glu;
  const int64_t ff = up.out.cols;
  const bool in_order =
      gate.weight->inputs.empty() && up.weight->inputs.empty() && down.weight->inputs.empty();
  const Pieces cut(x.rows, ff, pool().size());
  const ActKind kind = down.weight->kernel->act;
  const bool in_parts = encodes_in_parts(kind);
  const int64_t part = cut.tokens * kEncodedPart;  // space for one worker's values, inside gate's
  const bool room = (in_parts ? 1 : 2) * part * pool().size() <= x.rows * ff;
  if (x.rows <= kManyTokens || !room || !in_order || !(in_parts || kind == ActKind::kInt8) ||
      gate.weight->kernel->act != up.weight->kernel->act) {
    return false;
  }
  if (mlp.in.norm != nullptr) norm(mlp.in.normed, mlp.in.x, *mlp.in.norm);
  Impl& m = *impl_;
  const size_t mark = m.arena.mark();
  const Impl::Encoded in =
      m.encode(x, gate.weight->kernel->act, m.reads_fine(*gate.weight) || m.reads_fine(*up.weight));
  const ActEncoder& encoder = *m.encoders[static_cast<size_t>(kind)];
  const auto row_bytes = static_cast<int64_t>(encoder.row_bytes(ff));
  auto* const inner =
      in_parts ? static_cast<uint8_t*>(m.arena.allocate(m.encoded_bytes(kind, x.rows, ff)))
               : nullptr;
  const bool fine = m.reads_fine(*down.weight);
  const GateArgs unit{
      gate.weight, gate.bias, gate.scale, m.vector->glu, static_cast<int>(glu.activation),
      glu.limit,   glu.alpha};
  m.pool.parallel_for(cut.stretches * cut.parts, [&](int64_t piece, int worker) {
    const int64_t first = piece / cut.parts * kEncodedPart;
    const int64_t last = std::min(first + kEncodedPart, ff);
    const int64_t t0 = piece % cut.parts * cut.tokens;
    const int64_t tokens = std::min(cut.tokens, x.rows - t0);
    if (tokens <= 0) return;
    float* const g = gate.out.data + (in_parts ? 1 : 2) * worker * part;
    float* const u = in_parts ? up.out.data + worker * part : g + part;
    float* const out = in_parts ? u : up.out.row(t0) + first;
    const int64_t stride = in_parts ? kEncodedPart : up.out.stride;
    run_units(gate, up, unit, {first, last, tokens, in.data + t0 * in.row_bytes, in.row_bytes}, g,
              u, out, stride);
    for (int64_t t = 0; in_parts && t < tokens; ++t) {
      encoder.encode(out + t * stride, ff, first, last, fine, inner + (t0 + t) * row_bytes);
    }
  });
  if (!in_parts) {
    m.arena.rewind(mark);
    matmul(up.out, {&down, 1});
    return true;
  }
  const MatmulCall call{{down.weight, x.rows, nullptr, down.out.data, down.out.stride, down.bias,
                         down.scale, down.add},
                        inner,
                        row_bytes};
  m.run_calls({&call, 1});
  m.arena.rewind(mark);
  return true;
}

}  // namespace freshet::ops
