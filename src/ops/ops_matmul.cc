// GEMM with packed weights: packing, encoding of activations, and distribution over the pool.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

std::string describe(const Matrix& x, const Weight& w, const Matrix& out) {
  return fmt::format("matmul tokens={} K={} N={} format={} kernel={}: x [{}, {}], out [{}, {}]",
                     x.rows, w.cols, w.rows, quant::info(w.format).name,
                     w.kernel != nullptr ? w.kernel->name : "none", x.rows, x.cols, out.rows,
                     out.cols);
}

int64_t panels_of(const Weight& w) {
  return (w.rows + kPanelRows - 1) / kPanelRows;
}

// How the GEMMs of a region are cut: pieces of `panels` panels and `tokens` tokens.
struct Cut {
  int64_t panels;
  int64_t tokens;
  int64_t pieces;
};

constexpr int64_t kPiecesPerWorker = 6;
constexpr int64_t kMinPieceBytes = 16 << 10;  // below this, latency dominates a stream of weights

// At about this many tokens, computing takes as long as reading the weights.
constexpr int64_t kFewTokens = 8;

// The cost of one panel for all tokens, in bytes of weights: reading it and computing with it.
double panel_cost(const MatmulCall& c, int64_t panels) {
  const double bytes =
      static_cast<double>(c.args.weight->packed.size()) / static_cast<double>(panels);
  return bytes * std::max(1.0, static_cast<double>(c.args.tokens) / kFewTokens);
}

Cut cut_of(const MatmulCall& c, double piece_cost, int64_t cache_bytes) {
  const int64_t panels = panels_of(*c.args.weight);
  const double cost = panel_cost(c, panels);
  const double bytes =
      static_cast<double>(c.args.weight->packed.size()) / static_cast<double>(panels);
  Cut cut{std::max<int64_t>(1, std::llround(piece_cost / cost)), c.args.tokens, 0};
  if (c.args.tokens > kFewTokens) {  // a piece's weights stay in cache across tokens
    cut.panels = std::min(
        cut.panels,
        std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(cache_bytes) / bytes)));
  } else {
    cut.panels = std::max(cut.panels, static_cast<int64_t>(kMinPieceBytes / bytes));
  }
  cut.panels = std::clamp<int64_t>(cut.panels, 1, panels);
  if (cost > piece_cost && c.args.tokens > kPanelRows) {
    const int64_t parts = std::llround(std::ceil(cost / piece_cost));
    cut.tokens = (c.args.tokens / parts + kPanelRows) / kPanelRows * kPanelRows;
  }
  cut.pieces =
      (panels + cut.panels - 1) / cut.panels * ((c.args.tokens + cut.tokens - 1) / cut.tokens);
  return cut;
}

// Cuts into `pieces` pieces of about the same cost.
void cut_all(std::span<const MatmulCall> calls, int64_t pieces, int64_t cache_bytes, Cut* cuts) {
  double total = 0.0;
  for (const MatmulCall& c : calls) {
    const int64_t panels = panels_of(*c.args.weight);
    total += panel_cost(c, panels) * static_cast<double>(panels);
  }
  const double piece_cost = total / static_cast<double>(pieces);
  for (size_t i = 0; i < calls.size(); ++i) cuts[i] = cut_of(calls[i], piece_cost, cache_bytes);
}

// From this many tokens on, computing dominates and reading the weights does not matter.
constexpr int64_t kManyTokens = 64;
// The kernels that gained from wide pieces in measurements: block formats and INT8 on AMX. Without
// AMX, prompts of 512 tokens were 1 to 20 % slower with wide pieces; BF16 on 16 cores was a third
// slower, but its kernel had changed.
bool takes_wide_pieces(const MatmulCall& c) {
  const MatmulKernel& kernel = *c.args.weight->kernel;
  return c.args.tokens > kManyTokens && kernel.isa == CpuIsa::kAmx &&
         (kernel.act == ActKind::kQ8x256 || kernel.act == ActKind::kInt8);
}
// The calls that gain from shares: few tokens. Prompts take as long either way.
bool takes_shares(const MatmulCall& c) {
  return c.args.tokens <= kManyTokens;
}
constexpr int64_t kLeastTokens = 128;  // per piece, if calls are cut by tokens
// The overhead of a piece, in units of one panel times one token: unpacking its panels, and
// fetching its activations once per group of panels.
constexpr int64_t kUnpackCost = 40;
constexpr int64_t kFetchCost = 2;
constexpr int64_t kFetchGroup = 16;

// Cuts a call of many tokens into pieces of `panels` panels and all tokens, or equal parts of them.
Cut cut_many(const MatmulCall& c, int64_t panels, int64_t parts) {
  const int64_t all = panels_of(*c.args.weight), tokens = c.args.tokens;
  parts = std::clamp<int64_t>(tokens / kLeastTokens, 1, parts);
  const int64_t step = 2 * kPanelRows;
  Cut cut{std::min(panels, all), ((tokens + parts - 1) / parts + step - 1) / step * step, 0};
  cut.pieces = (all + cut.panels - 1) / cut.panels * ((tokens + cut.tokens - 1) / cut.tokens);
  return cut;
}

// Chooses the pieces with which the workers finish first. Cores differ in speed, by half for
// seconds at a time if another machine shares them. At the end most workers wait for the last
// piece, on average for half of one.
void cut_all_many(std::span<const MatmulCall> calls, int64_t workers, Cut* cuts) {
  double best = 0.0;
  for (const int64_t panels : {32, 16, 12, 8, 6, 4, 2}) {
    for (const int64_t parts : {1, 2, 4}) {
      int64_t pieces = 0, cost = 0;
      for (const MatmulCall& c : calls) {
        const Cut cut = cut_many(c, panels, parts);
        const int64_t all = panels_of(*c.args.weight);
        const int64_t groups = (cut.panels + kFetchGroup - 1) / kFetchGroup;
        cost += (all * kUnpackCost) * ((c.args.tokens + cut.tokens - 1) / cut.tokens) +
                c.args.tokens * (all + (all + cut.panels - 1) / cut.panels * groups * kFetchCost);
        pieces += cut.pieces;
      }
      const double rounds =
          std::max(1.0, static_cast<double>(pieces) / static_cast<double>(workers)) +
          (workers > 1 ? 0.5 : 0.0);
      const double time = static_cast<double>(cost) * rounds / static_cast<double>(pieces);
      if (best != 0.0 && time >= best) continue;
      best = time;
      for (size_t i = 0; i < calls.size(); ++i) cuts[i] = cut_many(calls[i], panels, parts);
    }
  }
}

// Runs pieces [first, last) of a call.
void run_pieces(const MatmulCall& c, const Cut& cut, int64_t first, int64_t last) {
  const int64_t token_parts = (c.args.tokens + cut.tokens - 1) / cut.tokens;
  const int64_t panels = panels_of(*c.args.weight);
  const int64_t step = token_parts == 1 ? last - first : 1;  // adjacent panels form one piece
  for (int64_t piece = first; piece < last; piece += step) {
    const int64_t panel = piece / token_parts * cut.panels;
    const int64_t t0 = piece % token_parts * cut.tokens;
    MatmulArgs args = c.args;
    args.tokens = std::min(cut.tokens, args.tokens - t0);
    args.out += t0 * args.out_stride;
    const uint8_t* act = c.act;
    if (args.rows_index != nullptr) {
      args.rows_index += t0;
    } else {
      act += t0 * c.act_row_bytes;
    }
    args.weight->kernel->run(args, act, c.act_row_bytes, panel,
                             std::min(panel + step * cut.panels, panels));
  }
}

// Makes pieces small enough that workers finish at nearly the same time. Several adjacent pieces
// taken at once still form a sequential stream.
constexpr int64_t kFinePanels = 4;
void refine(const MatmulCall& c, Cut& cut) {
  if (cut.tokens < c.args.tokens) return;
  const int64_t panels = panels_of(*c.args.weight);
  const auto bytes = static_cast<int64_t>(c.args.weight->packed.size()) / panels;
  const int64_t least =
      c.args.tokens > kFewTokens ? kFinePanels : std::max<int64_t>(1, kMinPieceBytes / bytes);
  cut.panels = std::min(cut.panels, least);
  cut.pieces = (panels + cut.panels - 1) / cut.panels;
}

// Adjacent pieces. One worker takes from the front; workers that have nothing left take from the
// back.
class alignas(64) Share {
 public:
  Share(int64_t first, int64_t last) : left_(first << 32 | last) {}

  // Takes a quarter of the remaining pieces, so that a share is few streams and ends in small
  // steps. Returns false if none are left.
  bool take(bool front, int64_t& first, int64_t& last) {
    int64_t left = left_.load(std::memory_order_relaxed);
    for (;;) {
      first = left >> 32;
      last = left & 0xffffffff;
      if (first == last) return false;
      const int64_t n = (last - first + 3) / 4;
      const int64_t rest = front ? (first + n) << 32 | last : first << 32 | (last - n);
      if (!left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) continue;
      (front ? last : first) = front ? first + n : last - n;
      return true;
    }
  }

 private:
  std::atomic<int64_t> left_;  // index of the first piece, and one past the last
};
static_assert(alignof(Share) <= 64, "an arena's pieces are aligned to 64");

bool same_outliers(const Product& a, const Product& b) {
  const OutlierColumns *const x = a.weight->outliers.get(), *const y = b.weight->outliers.get();
  return x == y || (x != nullptr && y != nullptr && x->columns == y->columns);
}

}  // namespace

Result<Weight> Ops::pack(quant::Format format, std::span<const uint8_t* const> rows, int64_t cols,
                         FunctionRef<void(const uint8_t*)> look, Use use) {
  const quant::FormatInfo& f = quant::info(format);
  if (cols <= 0 || rows.empty() || cols % f.block_size != 0) {
    return invalid_argument("a {} matrix cannot be [{}, {}]: rows come in blocks of {}", f.name,
                            rows.size(), cols, f.block_size);
  }
  Weight w;
  w.format = format;
  w.rows = static_cast<int64_t>(rows.size());
  w.cols = cols;
  w.use = use;
  if (Device* d = device()) {
    const Use packed_for = use == Use::kExact ? Use::kProducts : use;
    w.kernel = d->matmul_row(format);
    if (w.kernel == nullptr) {
      return unsupported(
          "weights of type {} cannot be used on {}: run with --device cpu, or convert", f.name,
          d->name());
    }
    constexpr int64_t kRowsAtOnce = 64;
    impl_->pool.parallel_for((w.rows + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t i, int) {
      for (int64_t r = i * kRowsAtOnce; r < std::min(w.rows, (i + 1) * kRowsAtOnce); ++r) {
        look(rows[static_cast<size_t>(r)]);
      }
    });
    FRESHET_ASSIGN_OR_RETURN(w.packed, d->pack(impl_->pool, format, rows, cols, packed_for));
    return w;
  }
  const bool exact = use == Use::kExact && format == quant::Format::kF32;
  w.kernel = exact ? impl_->exact_f32 : impl_->matmul[static_cast<size_t>(format)];
  FRESHET_ASSIGN_OR_RETURN(w.packed, impl_->weights.take(w.kernel->packed_bytes(w.rows, cols)));
  impl_->pool.parallel_for(panels_of(w), [&](int64_t panel, int) {
    const uint8_t* panel_rows[kPanelRows] = {};
    for (int64_t r = 0; r < kPanelRows && panel * kPanelRows + r < w.rows; ++r) {
      panel_rows[r] = rows[static_cast<size_t>(panel * kPanelRows + r)];
      look(panel_rows[r]);
    }
    w.kernel->pack_panel(w.packed.data(), panel, panel_rows, cols);
  });
  return w;
}

Result<Weight> Ops::adopt(quant::Format format, int64_t rows, int64_t cols, Buffer packed) {
  FRESHET_CHECK(device() == nullptr && rows > 0 && cols > 0);
  Weight w;
  w.format = format;
  w.rows = rows;
  w.cols = cols;
  w.kernel = impl_->matmul[static_cast<size_t>(format)];
  const size_t wanted = w.kernel->packed_bytes(rows, cols);
  if (packed.size() != wanted) {
    return invalid_argument("{} packed bytes of a {} matrix [{}, {}], expected {}", packed.size(),
                            quant::info(format).name, rows, cols, wanted);
  }
  w.packed = std::move(packed);
  return w;
}

Status Ops::set_outliers(Weight& weight, std::vector<int32_t> columns, Weight values) {
  FRESHET_CHECK(!columns.empty() && values.rows == weight.rows &&
                    values.cols == std::ssize(columns) && columns.back() < weight.cols,
                "{} outlier columns of [{}, {}], values [{}, {}]", columns.size(), weight.rows,
                weight.cols, values.rows, values.cols);
  auto outliers = std::make_shared<OutlierColumns>();
  if (Device* d = device()) {
    const size_t bytes = columns.size() * sizeof(int32_t);
    FRESHET_ASSIGN_OR_RETURN(outliers->list, Buffer::allocate(bytes, d));
    FRESHET_RETURN_IF_ERROR(d->write(outliers->list.data(), columns.data(), bytes));
  }
  impl_->split_cols = std::max(impl_->split_cols, weight.cols + std::ssize(columns));
  outliers->columns = std::move(columns);
  outliers->values = std::move(values);
  weight.outliers = std::move(outliers);
  return {};
}

size_t Ops::Impl::encoded_bytes(ActKind kind, int64_t rows, int64_t cols) const {
  if (kind == ActKind::kF32) return 0;
  return static_cast<size_t>(rows) * encoders[static_cast<size_t>(kind)]->row_bytes(cols);
}

bool Ops::Impl::reads_fine(const Weight& w) const {
  const ActKind kind = w.kernel->act;
  if (kind == ActKind::kF32) return false;
  return w.kernel->always_fine || encoders[static_cast<size_t>(kind)]->reads_fine(w.rows, w.cols);
}

Ops::Impl::Encoded Ops::Impl::encode(const Matrix& x, ActKind kind, bool fine,
                                     std::span<const int32_t> inputs) {
  const auto pick = [&](int64_t t, int64_t first, int64_t last, float* to) {
    for (int64_t c = first; c < last; ++c) *to++ = x.row(t)[inputs[static_cast<size_t>(c)]];
  };
  if (kind == ActKind::kF32) {
    Matrix in = x;
    if (!inputs.empty()) {
      in = {arena.allocate_array<float>(x.rows * x.cols), x.rows, x.cols, x.cols};
      for (int64_t t = 0; t < x.rows; ++t) pick(t, 0, x.cols, in.row(t));
    }
    return {reinterpret_cast<const uint8_t*>(in.data),
            in.stride * static_cast<int64_t>(sizeof(float))};
  }
  // Reordering a whole row would need memory that is not planned, and no checkpoint needs it.
  FRESHET_CHECK(inputs.empty() || encodes_in_parts(kind), "inputs of {} columns in another order",
                inputs.size());
  const ActEncoder& encoder = *encoders[static_cast<size_t>(kind)];
  const auto row_bytes = static_cast<int64_t>(encoder.row_bytes(x.cols));
  auto* data = static_cast<uint8_t*>(arena.allocate(encoded_bytes(kind, x.rows, x.cols)));
  for_rows(x.rows, x.cols, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      if (inputs.empty()) encoder.encode(x.row(t), x.cols, 0, x.cols, fine, data + t * row_bytes);
      for (int64_t c = 0; !inputs.empty() && c < x.cols; c += kEncodedPart) {
        float part[kEncodedPart];
        const int64_t end = std::min(c + kEncodedPart, x.cols);
        pick(t, c, end, part);
        encoder.encode(part, x.cols, c, end, fine, data + t * row_bytes);
      }
    }
  });
  return {data, row_bytes};
}

void Ops::Impl::run_calls(std::span<const MatmulCall> calls) {
  const size_t mark = arena.mark();
  const auto n = static_cast<int64_t>(calls.size());
  auto* cuts = arena.allocate_array<Cut>(n);
  auto* ends = arena.allocate_array<int64_t>(n);
  if (!calls.empty() && std::all_of(calls.begin(), calls.end(), takes_wide_pieces)) {
    cut_all_many(calls, pool.size(), cuts);
  } else {
    cut_all(calls, kPiecesPerWorker * pool.size(), capabilities.l2_bytes / 2, cuts);
  }
  const bool shares = pool.size() > 1 && std::all_of(calls.begin(), calls.end(), takes_shares);
  int64_t pieces = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (shares) refine(calls[static_cast<size_t>(i)], cuts[i]);
    ends[i] = pieces += cuts[i].pieces;
  }
  const auto run = [&](int64_t first, int64_t last) {
    while (first < last) {
      const int64_t i = std::upper_bound(ends, ends + n, first) - ends;
      const int64_t begin = i > 0 ? ends[i - 1] : 0, end = std::min(last, ends[i]);
      run_pieces(calls[static_cast<size_t>(i)], cuts[i], first - begin, end - begin);
      first = end;
    }
  };
  if (shares && pieces > 1) {
    const int64_t workers = pool.size();
    auto* share = static_cast<Share*>(arena.allocate(static_cast<size_t>(workers) * sizeof(Share)));
    for (int64_t w = 0; w < workers; ++w) {
      std::construct_at(share + w, pieces * w / workers, pieces * (w + 1) / workers);
    }
    pool.run([&](int worker) {
      for (int64_t w = 0; w < workers; ++w) {
        for (int64_t first, last; share[(worker + w) % workers].take(w == 0, first, last);) {
          run(first, last);
        }
      }
    });
  } else {
    pool.parallel_for(pieces, [&](int64_t piece, int) { run(piece, piece + 1); });
  }
  arena.rewind(mark);
}

void Ops::embed(const Matrix& out, const Weight& table, std::span<const int32_t> ids, float scale,
                int32_t offset) {
  FRESHET_CHECK(out.rows == static_cast<int64_t>(ids.size()) && out.cols == table.cols,
                "embed out [{}, {}], ids [{}], table [{}, {}]", out.rows, out.cols, ids.size(),
                table.rows, table.cols);
  for (const int32_t id : ids) {
    FRESHET_CHECK(id + offset >= 0 && id + offset < table.rows, "embed id={} of {} rows",
                  id + offset, table.rows);
  }
  if (Device* d = device()) return d->embed(out, table, ids, scale, offset);
  impl_->for_rows(out.rows, out.cols, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      table.kernel->unpack_row(table.packed.data(), ids[static_cast<size_t>(t)] + offset,
                               table.cols, out.row(t));
      if (scale != 1.0f) impl_->vector->scale(out.row(t), out.cols, scale);
    }
  });
}

void Ops::matmul(const Matrix& x, std::span<const Product> products) {
  if (x.rows == 0 || products.empty()) return;
  if (impl_->hooks == nullptr) return run_matmul(x, products);
  impl_->with_hooks([&](ProjectionHooks& hooks) {
    for (const Product& p : products) {
      FRESHET_CHECK(p.weight != nullptr, "matmul without a weight");
      hooks.before(*p.weight, x);
      Product own = p;
      if (p.add) {
        const auto room = static_cast<size_t>(x.rows * p.out.cols) * sizeof(float);
        FRESHET_CHECK(room <= impl_->hook_room.size(), "hooks for {} bytes of outputs, not {}",
                      impl_->hook_room.size(), room);
        own.out = {impl_->hook_room.as<float>(), x.rows, p.out.cols, p.out.cols};
        own.add = false;
      }
      run_matmul(x, {&own, 1});
      hooks.after(own, x);
      if (p.add) add(p.out, own.out, 1.0f);
    }
  });
}

// Products in two parts run together with the neighbours that have the same outlier columns.
void Ops::run_matmul(const Matrix& x, std::span<const Product> products) {
  for (const Product& p : products) FRESHET_CHECK(p.weight != nullptr, "matmul without a weight");
  while (!products.empty()) {
    const auto differs = [&](const Product& p) { return !same_outliers(p, products.front()); };
    const auto end = std::find_if(products.begin(), products.end(), differs);
    const std::span<const Product> run(products.begin(), end);
    (run.front().weight->outliers != nullptr ? run_split(x, run) : run_whole(x, run));
    products = products.subspan(run.size());
  }
}

void Ops::run_split(const Matrix& x, std::span<const Product> products) {
  const OutlierColumns& outliers = *products.front().weight->outliers;
  const auto count = std::ssize(outliers.columns);
  Impl& m = *impl_;
  const size_t mark = m.arena.mark();
  Matrix kept, apart;
  if (Device* d = device()) {
    d->split_columns(x, outliers, kept, apart);
  } else {
    kept = m.arena.matrix(x.rows, x.cols);
    apart = m.arena.matrix(x.rows, count);
    m.for_rows(x.rows, x.cols, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        std::copy_n(x.row(t), x.cols, kept.row(t));
        for (int64_t i = 0; i < count; ++i) {
          const int32_t c = outliers.columns[static_cast<size_t>(i)];
          apart.row(t)[i] = x.row(t)[c];
          kept.row(t)[c] = 0.0f;
        }
      }
    });
  }
  run_whole(kept, products);
  for (const Product& p : products) {
    const Product second{&p.weight->outliers->values, p.out, nullptr, p.scale, true};
    run_whole(apart, {&second, 1});
  }
  m.arena.rewind(mark);
}

void Ops::run_whole(const Matrix& x, std::span<const Product> products) {
  if (Device* d = device()) {
    for (const Product& p : products) {
      FRESHET_CHECK(
          x.cols == p.weight->cols && p.out.rows == x.rows && p.out.cols == p.weight->rows, "{}",
          describe(x, *p.weight, p.out));
    }
    return d->matmul(x, products);
  }
  for (const Product& p : products) {
    FRESHET_CHECK(p.weight->kernel != nullptr, "matmul without a kernel");
  }
  const auto reordered = [](const Product& p) { return !p.weight->inputs.empty(); };
  if (products.size() > 1 && std::any_of(products.begin(), products.end(), reordered)) {
    for (const Product& p : products) run_whole(x, {&p, 1});
    return;
  }
  Impl& m = *impl_;
  const size_t mark = m.arena.mark();
  auto* calls = m.arena.allocate_array<MatmulCall>(static_cast<int64_t>(products.size()));
  std::array<Impl::Encoded, 4> encoded;
  const auto reads_fine = [&](ActKind kind) {
    return std::any_of(products.begin(), products.end(), [&](const Product& p) {
      return p.weight->kernel->act == kind && m.reads_fine(*p.weight);
    });
  };
  for (size_t i = 0; i < products.size(); ++i) {
    const Product& p = products[i];
    FRESHET_CHECK(x.cols == p.weight->cols && p.out.rows == x.rows && p.out.cols == p.weight->rows,
                  "{}", describe(x, *p.weight, p.out));
    const ActKind kind = p.weight->kernel->act;
    Impl::Encoded& e = encoded[static_cast<size_t>(kind)];
    if (e.data == nullptr) e = m.encode(x, kind, reads_fine(kind), p.weight->inputs);
    calls[i] = {{p.weight, x.rows, nullptr, p.out.data, p.out.stride, p.bias, p.scale, p.add},
                e.data,
                e.row_bytes};
  }
  m.run_calls({calls, products.size()});
  m.arena.rewind(mark);
}

void Ops::matmul_heads(const Matrix& x, std::span<const Weight> weights, const Matrix& out) {
  if (x.rows == 0) return;
  const auto heads = static_cast<int64_t>(weights.size());
  const auto input = [&](int64_t h) {
    const Weight& w = weights[static_cast<size_t>(h)];
    return x.slice_cols(h * w.cols, w.cols);
  };
  const auto output = [&](int64_t h) {
    const Weight& w = weights[static_cast<size_t>(h)];
    return out.slice_cols(h * w.rows, w.rows);
  };
  if (impl_->hooks != nullptr) {
    return impl_->with_hooks([&](ProjectionHooks& hooks) {
      for (int64_t h = 0; h < heads; ++h) hooks.before(weights[static_cast<size_t>(h)], input(h));
      matmul_heads(x, weights, out);
      for (int64_t h = 0; h < heads; ++h) {
        hooks.after({&weights[static_cast<size_t>(h)], output(h)}, input(h));
      }
    });
  }
  if (Device* d = device()) return d->matmul_heads(x, weights, out);
  Impl& m = *impl_;
  const size_t mark = m.arena.mark();
  auto* calls = m.arena.allocate_array<MatmulCall>(heads);
  for (int64_t h = 0; h < heads; ++h) {
    const Weight& w = weights[static_cast<size_t>(h)];
    FRESHET_CHECK(w.kernel != nullptr && x.cols == heads * w.cols && out.cols == heads * w.rows &&
                      out.rows == x.rows,
                  "{} heads={}", describe(x, w, out), heads);
    const Impl::Encoded e = m.encode(input(h), w);
    const Matrix to = output(h);
    calls[h] = {
        {&w, x.rows, nullptr, to.data, to.stride, nullptr, 1.0f, false}, e.data, e.row_bytes};
  }
  m.run_calls({calls, weights.size()});
  m.arena.rewind(mark);
}

}  // namespace freshet::ops
