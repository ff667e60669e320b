// CudaDevice: operations of experts.
#include <algorithm>
#include <utility>

#include "backend/cuda/arguments.h"
#include "backend/cuda/device.h"
#include "backend/cuda/moe/moe.h"

namespace freshet::cuda {
namespace {

// The tile size (tokens of one expert), and the largest possible number of tiles.
struct Slots {
  int tokens;
  int count;
};
Slots slots_of(int tokens, int64_t pairs, int64_t experts) {
  return {tokens, static_cast<int>(std::min(pairs, experts) + pairs / tokens)};
}
// With wgmma: up to twice the average per expert, at most kWideSlot; kManySlot if `many` allows it
// and the average is high enough.
Slots wide_slots(int least, int64_t pairs, int64_t experts, bool many) {
  if (many && 2 * pairs >= kManySlot * experts) return slots_of(kManySlot, pairs, experts);
  int tokens = least;
  while (tokens < kWideSlot && 2 * tokens * experts <= 2 * pairs) tokens *= 2;
  return slots_of(tokens, pairs, experts);
}
Slots whole_slots(int least, int64_t tokens, int64_t pairs, int64_t experts) {
  const int most = tokens <= 8 ? 8 : tokens <= 16 ? 16 : 32;
  return {std::max(least, most), static_cast<int>(std::min(pairs, experts))};
}

}  // namespace

// Whether a kernel runs this GEMM together with the routes.
bool CudaDevice::is_router(const ops::Product& p, const Matrix& x) {
  const bool aligned =
      x.cols % 4 == 0 && x.stride % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  return p.weight->format == quant::Format::kF32 && aligned && x.rows <= kMaxRouterTokens;
}

void CudaDevice::route(const Matrix& logits, const ops::Routing& routing, int32_t* ids,
                       float* weights) {
  const RoutingArgs args = args_of(routing);
  const Rows rows = rows_of(logits);
  check(api_.moe.route(ctx_, &rows, &args, ids, weights), "route");
}

// Runs the pending norm, router and routes in one kernel if one supports them; otherwise only the
// norm.
bool CudaDevice::route_one(Pending& p, Forms& forms) {
  if (!std::exchange(p.norm, false)) return false;
  const ops::Input& in = p.block.in;
  const RouteOneArgs args{
      rows_of(in.x), rows_of(in.normed), args_of(*in.norm), new_form_for_experts(in.normed, forms),
      p.product,     p.routing,          p.block.ids,       p.block.weights};
  const bool fits = api_.moe.route_one_fits(ctx_, &args) != 0;
  check(fits ? api_.moe.route_one(ctx_, &args)
             : api_.rows.norm(ctx_, &args.normed, &args.x, &args.norm, &args.act),
        "norm");
  return fits;
}

// Groups tokens by expert, after running the router if it is pending.
void CudaDevice::run_groups(const GroupArgs& g, Pending* p, Forms& forms) {
  if (p == nullptr || !std::exchange(p->router, false) || route_one(*p, forms)) {
    check(api_.moe.group(ctx_, &g), "group");
    return;
  }
  check(
      api_.moe.router(ctx_, &p->product, g.tokens, &p->routing, p->block.ids, p->block.weights, &g),
      "router");
}

const uint8_t* const* CudaDevice::table_of(std::span<const ops::Weight> weights) {
  const auto key = std::pair<const void*, const void*>(weights.data(), weights[0].packed.data());
  if (const auto found = known_tables_.find(key); found != known_tables_.end()) {
    return found->second;
  }
  FRESHET_CHECK(!recording_, "experts that no step before had");
  std::vector<const uint8_t*> pointers;
  for (const ops::Weight& w : weights) {
    FRESHET_CHECK(w.format == weights[0].format, "experts of {} and {}", quant::info(w.format).name,
                  quant::info(weights[0].format).name);
    FRESHET_CHECK(w.use == ops::Use::kExperts, "experts that were packed for products");
    pointers.push_back(w.packed.data());
  }
  const size_t bytes = (pointers.size() * sizeof(void*) + 255) / 256 * 256;
  FRESHET_CHECK(tables_at_ + bytes <= tables_.size(), "more than {} bytes of pointers to experts",
                tables_.size());
  uint8_t* to = tables_.data() + tables_at_;
  tables_at_ += bytes;
  const Status status =
      write(to, static_cast<const void*>(pointers.data()), pointers.size() * sizeof(void*));
  FRESHET_CHECK(status.ok(), "{}", status.message());
  return known_tables_[key] = reinterpret_cast<const uint8_t* const*>(to);
}

void CudaDevice::run_expert(const ops::Weight& first, const uint8_t* const* table,
                            const uint8_t* act, float* out, const float* bias, const GroupArgs& g) {
  const ExpertArgs args{table, first.rows,    first.cols, code_of(first.format), act, out,
                        bias,  g.slot_expert, g.slots,    g.slot_tokens};
  check(api_.moe.expert_products(ctx_, &args), "expert_products");
}

GroupArgs CudaDevice::new_groups(const int32_t* ids, const float* weights, int64_t tokens,
                                 int top_k, int64_t experts, int slot_tokens, int slots) {
  const int64_t places = int64_t{slot_tokens} * slots;
  GroupArgs g{};
  g.ids = ids;
  g.weights = weights;
  g.tokens = static_cast<int32_t>(tokens);
  g.top_k = top_k;
  g.experts = static_cast<int32_t>(experts);
  g.slot_tokens = slot_tokens;
  g.slots = slots;
  g.token = scratch_array<int32_t>(places);
  g.place = scratch_array<int32_t>(tokens * top_k);
  g.slot_expert = scratch_array<int32_t>(slots);
  g.used = scratch_array<int32_t>(1);
  g.place_weight = scratch_array<float>(places);
  return g;
}

// The formats, sizes and tile unit of experts.
ExpertsArgs CudaDevice::experts_args(const ops::Experts& e) {
  ExpertsArgs args{};
  args.gate_up_code = code_of(e.gate_up[0].format);
  args.down_code = code_of(e.down[0].format);
  args.hidden = e.down[0].rows;
  args.ff = e.down[0].cols;
  args.glu = {static_cast<int32_t>(e.glu.activation), e.glu.limit, e.glu.alpha};
  return args;
}

// Gate, up and down in two kernels. Few tokens are passed, ungrouped, to every expert in use.
void* CudaDevice::run_experts(const Matrix& x, const ops::Experts& e, const GroupArgs& g,
                              Forms& forms) {
  const int64_t places = int64_t{g.slot_tokens} * g.slots;
  const auto room = [&](int64_t cols) {
    return Activations{scratch(static_cast<size_t>(api_.gemm.fragment_bytes(ctx_, places, cols))),
                       places / kTokenTile};
  };
  ExpertsArgs args = experts_args(e);
  args.gate_up = table_of(e.gate_up);
  args.down = table_of(e.down);
  args.gate_up_bias = e.gate_up_bias;
  args.down_bias = e.down_bias;
  args.groups = g;
  args.x = rows_of(x);
  args.weight_before = e.weight_before;
  if (g.whole != 0) {
    args.in = {const_cast<uint8_t*>(form_of(x, Order::kCores, forms)),
               (x.rows + kTokenTile - 1) / kTokenTile};
  } else {
    args.in = room(x.cols);
  }
  args.act = room(args.ff);
  const bool bf16 = given_bf16(args.gate_up_code, g.slot_tokens);
  const size_t number = bf16 ? sizeof(uint16_t) : sizeof(float);
  args.y = scratch(static_cast<size_t>(places * args.hidden) * number);
  check(api_.moe.experts(ctx_, &args), "experts");
  return args.y;
}

// The experts that have tokens, read back from the device's groups. Synchronises.
std::vector<CudaDevice::ExpertPlaces> CudaDevice::places_of(const GroupArgs& g) {
  std::vector<int32_t> expert(static_cast<size_t>(g.slots));
  std::vector<int32_t> token(expert.size() * static_cast<size_t>(g.slot_tokens));
  fetch(expert.data(), g.slot_expert, expert.size() * sizeof(int32_t));
  fetch(token.data(), g.token, token.size() * sizeof(int32_t));
  wait();
  std::vector<ExpertPlaces> all;
  for (size_t slot = 0; slot < expert.size() && expert[slot] >= 0; ++slot) {
    const auto own = static_cast<size_t>(expert[slot]);
    const size_t first = slot * static_cast<size_t>(g.slot_tokens);
    if (all.empty() || all.back().expert != own) {
      all.push_back({own, static_cast<int64_t>(first), {}});
    }
    for (size_t i = 0; i < static_cast<size_t>(g.slot_tokens); ++i) {
      if (token[first + i] >= 0) all.back().tokens.push_back(token[first + i]);
    }
  }
  return all;
}

// Gate and up, the activation, and down as separate operations, with hooks around each expert's
// projections.
float* CudaDevice::run_experts_singly(const Matrix& x, const ops::Experts& e, const GroupArgs& g,
                                      ops::ProjectionHooks* hooks) {
  const int64_t ff = e.down[0].cols;
  const int64_t places = int64_t{g.slot_tokens} * g.slots;
  const Activations act{
      scratch(static_cast<size_t>(api_.gemm.fragment_bytes(ctx_, places, x.cols))), 0};
  const Rows in = rows_of(x);
  // The tiles of `act` from a given place on.
  const auto behind = [&](const Activations& a, int64_t place, int64_t cols) {
    return Activations{a.data + place * chunks_of(cols) * 64, 0};
  };
  // Rows are the second dimension of a grid.
  const auto each = [&](const auto& body) {
    constexpr int64_t kMost = 32768;
    for (int64_t first = 0; first < places; first += kMost) {
      body(first, std::min(kMost, places - first));
    }
  };
  each([&](int64_t first, int64_t count) {
    const Activations to = behind(act, first, x.cols);
    const float* weight = e.weight_before ? g.place_weight + first : nullptr;
    check(api_.gemm.encode(ctx_, &to, &in, g.token + first, weight, count), "encode");
  });
  const Matrix gate_up{scratch_array<float>(places * 2 * ff), places, 2 * ff, 2 * ff};
  const Matrix hidden{scratch_array<float>(places * ff), places, ff, ff};
  const Matrix y{scratch_array<float>(places * x.cols), places, x.cols, x.cols};
  // An expert's input and output, in the order of places, as hooks see them.
  const auto own = hooks != nullptr ? places_of(g) : std::vector<ExpertPlaces>();
  FRESHET_CHECK(hooks == nullptr || !e.weight_before, "hooks around experts of weighted inputs");
  const auto around = [&](std::span<const ops::Weight> w, const Matrix& from, const Matrix& out,
                          const float* bias, bool after) {
    for (const ExpertPlaces& p : own) {
      const auto count = std::ssize(p.tokens);
      const Matrix its = from.slice_rows(p.first, count);
      const float* its_bias =
          bias != nullptr ? bias + static_cast<int64_t>(p.expert) * out.cols : nullptr;
      const ops::Product product{&w[p.expert], out.slice_rows(p.first, count), its_bias};
      if (!after) hooks->before(w[p.expert], its);
      if (after) hooks->after(product, its);
    }
  };
  for (const ExpertPlaces& p : own) {  // inputs, in memory that later results overwrite
    gather_rows(y.slice_rows(p.first, std::ssize(p.tokens)), x, p.tokens);
  }
  around(e.gate_up, y, gate_up, e.gate_up_bias, false);
  run_expert(e.gate_up[0], table_of(e.gate_up), act.data, gate_up.data, e.gate_up_bias, g);
  around(e.gate_up, y, gate_up, e.gate_up_bias, true);
  const Activations hidden_act{
      scratch(static_cast<size_t>(api_.gemm.fragment_bytes(ctx_, places, ff))), 0};
  const GluArgs glu = args_of(e.glu);
  each([&](int64_t first, int64_t count) {
    const Matrix both = gate_up.slice_rows(first, count);
    const Rows to = rows_of(hidden.slice_rows(first, count)),
               gate = rows_of(both.slice_cols(0, ff)), up = rows_of(both.slice_cols(ff, ff));
    const Activations gated = behind(hidden_act, first, ff);
    check(api_.rows.glu(ctx_, &to, &gate, &up, &glu, &gated), "glu");
  });
  around(e.down, hidden, y, e.down_bias, false);
  run_expert(e.down[0], table_of(e.down), hidden_act.data, y.data, e.down_bias, g);
  around(e.down, hidden, y, e.down_bias, true);
  return y.data;
}

// Few tokens: from the router's logits to the weighted sums without grouping.
bool CudaDevice::run_few_experts(const Matrix& out, const Matrix& x, const int32_t* ids,
                                 const float* weights, int top_k, const ops::Experts& e, bool add,
                                 Pending* p, Forms& forms) {
  FewExpertsArgs args{};
  args.gate_up_code = code_of(e.gate_up[0].format);
  args.down_code = code_of(e.down[0].format);
  args.gate_up_bias = e.gate_up_bias;
  args.down_bias = e.down_bias;
  args.hidden = e.down[0].rows;
  args.ff = e.down[0].cols;
  args.glu = {static_cast<int32_t>(e.glu.activation), e.glu.limit, e.glu.alpha};
  args.routing.experts = static_cast<int32_t>(e.gate_up.size());
  args.routing.top_k = top_k;
  args.ids = const_cast<int32_t*>(ids);
  args.weights = const_cast<float*>(weights);
  args.tokens = static_cast<int32_t>(x.rows);
  args.out = rows_of(out);
  args.add = add;
  if (e.weight_before || api_.moe.few_experts_fit(ctx_, &args) == 0) return false;
  if (p != nullptr && std::exchange(p->router, false)) {
    args.routing = p->routing;
    if (!route_one(*p, forms)) {
      args.logits = p->product.out;
      args.logits_stride = p->product.out_stride;
      check(api_.gemm.products(ctx_, &p->product, 1, x.rows, nullptr), "products");
    }
  }
  args.gate_up = table_of(e.gate_up);
  args.down = table_of(e.down);
  args.in = form_of(x, Order::kLanes, forms);
  const int64_t tiles = std::min<int64_t>(x.rows * top_k, args.routing.experts);
  args.act =
      scratch(static_cast<size_t>(api_.gemm.fragment_bytes(ctx_, tiles * kTokenTile, args.ff)));
  check(api_.moe.few_experts(ctx_, &args), "few_experts");
  return true;
}

void CudaDevice::run_moe(const Matrix& out, const Matrix& x, const int32_t* ids,
                         const float* weights, int top_k, const ops::Experts& e, bool add,
                         Pending* p, Forms& forms, ops::ProjectionHooks* hooks) {
  if (hooks == nullptr && run_few_experts(out, x, ids, weights, top_k, e, add, p, forms)) return;
  const auto experts = static_cast<int64_t>(e.gate_up.size());
  const int64_t pairs = x.rows * top_k;
  ExpertsArgs args = experts_args(e);
  args.groups.tokens = static_cast<int32_t>(x.rows);
  args.groups.top_k = top_k;
  args.groups.experts = static_cast<int32_t>(experts);
  const int least = hooks == nullptr ? api_.moe.experts_fused(ctx_, &args) : 0;
  const bool fused = least > 0;
  const bool whole = fused && x.rows <= kWholeTokens && !e.weight_before;
  const bool many = args.gate_up_code == Code::kBF16 && !e.weight_before;
  const Slots slots = whole   ? whole_slots(least, x.rows, pairs, experts)
                      : fused ? wide_slots(least, pairs, experts, many)
                              : slots_of(pairs >= 16 * experts ? 32 : 8, pairs, experts);
  GroupArgs g = new_groups(ids, weights, x.rows, top_k, experts, slots.tokens, slots.count);
  g.whole = whole;
  run_groups(g, p, forms);
  const void* y = fused ? run_experts(x, e, g, forms) : run_experts_singly(x, e, g, hooks);
  const Rows result = rows_of(out);
  const bool bf16 = fused && given_bf16(args.gate_up_code, g.slot_tokens);
  check(api_.moe.combine(ctx_, &result, y, bf16, &g, !e.weight_before, add), "combine");
}

void CudaDevice::moe(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights,
                     int top_k, const ops::Experts& experts, bool add,
                     ops::ProjectionHooks* hooks) {
  Forms forms;
  run_moe(out, x, ids, weights, top_k, experts, add, nullptr, forms, hooks);
}

// The norm of few tokens is fused with the router, and the router with the routes, if a kernel
// supports it.
bool CudaDevice::moe_block(const ops::MoeBlock& b) {
  Forms own;
  Forms& forms = b.in.shared != nullptr ? *b.in.shared : own;
  const Matrix& x = b.in.rows();
  const bool shared = b.shared.down.weight != nullptr;
  Pending pending{b};
  pending.router = is_router(b.router, x);
  if (const ops::Norm* norm = b.in.norm) {
    const bool plain_rms =
        norm->kind == ops::NormKind::kRms && norm->weight != nullptr && norm->bias == nullptr;
    pending.norm = pending.router && plain_rms && !shared && b.in.shared == nullptr &&
                   x.rows <= kWholeTokens && b.in.x.data != x.data;
    if (!pending.norm && !shared) {
      const Rows to = rows_of(x), from = rows_of(b.in.x);
      const NormArgs args = args_of(*norm);
      const Activations act = new_form_for_experts(x, forms);
      check(api_.rows.norm(ctx_, &to, &from, &args, &act), "norm");
    } else if (shared) {
      const ops::Weight* const readers[] = {b.shared.gate.weight, b.shared.up.weight};
      ops::Input in = b.in;
      in.shared = &forms;
      normalise(in, readers, forms);
    }
  }
  pending.routing = args_of(b.routing);
  if (pending.router) {
    pending.product = product_args(x, b.router, forms);
  } else {
    run_products(x, {&b.router, 1}, forms);
    route(b.router.out, b.routing, b.ids, b.weights);
  }
  run_moe(b.out, x, b.ids, b.weights, b.routing.top_k, b.experts, b.add, &pending, forms, nullptr);
  if (!shared) return true;
  ops::GatedMlp mlp = b.shared;
  mlp.in = {x, nullptr, {}, &forms};
  gated(mlp);
  if (b.shared_gate.weight == nullptr) return true;
  run_products(x, {&b.shared_gate, 1}, forms);
  sigmoid_gate(b.shared.down.out, b.shared_gate.out);
  this->add(b.out, b.shared.down.out, 1.0f);
  return true;
}

}  // namespace freshet::cuda
