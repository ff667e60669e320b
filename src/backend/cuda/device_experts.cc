// The ops of a CudaDevice for experts.
#include <algorithm>
#include <utility>

#include "backend/cuda/arguments.h"
#include "backend/cuda/device.h"
#include "backend/cuda/moe/moe.h"

namespace freshet::cuda {
namespace {

// Tiles of tokens of one expert, and the most of them there can be.
struct Slots {
  int tokens;
  int count;
};
Slots slots_of(int tokens, int64_t pairs, int64_t experts) {
  return {tokens, static_cast<int>(std::min(pairs, experts) + pairs / tokens)};
}
// With wgmma: twice what an expert has on average, and at most kWideSlot, or kManySlot if that is
// known.
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

// A router's product waits for the routes, and these for the groups: one kernel does all three.
bool CudaDevice::hold_router(const Matrix& x, std::span<const ops::Product> products) {
  const ops::Product& p = products[0];
  const bool aligned =
      x.cols % 4 == 0 && x.stride % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  if (products.size() != 1 || p.weight->format != quant::Format::kF32 || !aligned ||
      x.rows > kMaxRouterTokens || x.rows == 0) {
    return false;
  }
  router_ = Router{};
  router_.x = x;
  router_.out = p.out;
  router_.product = {product_view(*p.weight),
                     nullptr,
                     0,
                     x.data,
                     x.stride,
                     p.out.data,
                     p.out.stride,
                     p.bias,
                     p.scale,
                     p.add};
  wrote(p.out);
  router_.held = true;
  return true;
}

void CudaDevice::flush_router() {
  if (!router_.held) return;
  router_.held = false;
  check(api_.gemm.products(ctx_, &router_.product, 1, router_.x.rows, nullptr), "products");
  if (router_.ids == nullptr) return;
  const Rows rows = rows_of(router_.out);
  check(api_.moe.route(ctx_, &rows, &router_.routing, router_.ids, router_.weights), "route");
}

void CudaDevice::route(const Matrix& logits, const ops::Routing& routing, int32_t* ids,
                       float* weights) {
  const RoutingArgs args = args_of(routing);
  if (router_.held && router_.ids == nullptr && router_.out.data == logits.data &&
      router_.out.rows == logits.rows && router_.out.stride == logits.stride &&
      router_.out.cols == logits.cols) {
    router_.routing = args;
    router_.ids = ids;
    router_.weights = weights;
    return;
  }
  flush();
  const Rows rows = rows_of(logits);
  check(api_.moe.route(ctx_, &rows, &args, ids, weights), "route");
}

// Whether these routes are held back.
bool CudaDevice::router_holds(const int32_t* ids, const float* weights, int64_t tokens,
                              int top_k) const {
  return router_.held && router_.ids == ids && router_.weights == weights &&
         router_.x.rows == tokens && router_.routing.top_k == top_k;
}

// Tokens by expert, after the routes that are held back if these are the ones.
void CudaDevice::run_groups(const GroupArgs& g) {
  if (router_holds(g.ids, g.weights, g.tokens, g.top_k)) {
    router_.held = false;
    if (run_route_one()) {
      check(api_.moe.group(ctx_, &g), "group");
      return;
    }
    flush_norm();
    check(api_.moe.router(ctx_, &router_.product, g.tokens, &router_.routing, router_.ids,
                          router_.weights, &g),
          "router");
    return;
  }
  flush();
  check(api_.moe.group(ctx_, &g), "group");
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

// The formats, sizes and unit of experts.
ExpertsArgs CudaDevice::experts_args(const ops::Experts& e) {
  ExpertsArgs args{};
  args.gate_up_code = code_of(e.gate_up[0].format);
  args.down_code = code_of(e.down[0].format);
  args.hidden = e.down[0].rows;
  args.ff = e.down[0].cols;
  args.glu = {static_cast<int32_t>(e.glu.activation), e.glu.limit, e.glu.alpha};
  return args;
}

// Gate, up and down in two kernels. Few tokens go to every expert in use as they are.
void* CudaDevice::run_experts(const Matrix& x, const ops::Experts& e, const GroupArgs& g) {
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
    args.in = {const_cast<uint8_t*>(encoded(x, Order::kCores)),
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

// Gate and up, gating, and down, each by itself.
float* CudaDevice::run_experts_singly(const Matrix& x, const ops::Experts& e, const GroupArgs& g) {
  const int64_t ff = e.down[0].cols;
  const int64_t places = int64_t{g.slot_tokens} * g.slots;
  const Activations act{
      scratch(static_cast<size_t>(api_.gemm.fragment_bytes(ctx_, places, x.cols))), 0};
  const Rows in = rows_of(x);
  // Tiles of `act` from a place on.
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
  run_expert(e.gate_up[0], table_of(e.gate_up), act.data, gate_up.data, e.gate_up_bias, g);
  const Matrix hidden{scratch_array<float>(places * ff), places, ff, ff};
  const Activations hidden_act{
      scratch(static_cast<size_t>(api_.gemm.fragment_bytes(ctx_, places, ff))), 0};
  const GluArgs glu{static_cast<int32_t>(e.glu.activation), e.glu.limit, e.glu.alpha};
  each([&](int64_t first, int64_t count) {
    const Matrix both = gate_up.slice_rows(first, count);
    const Rows to = rows_of(hidden.slice_rows(first, count)),
               gate = rows_of(both.slice_cols(0, ff)), up = rows_of(both.slice_cols(ff, ff));
    const Activations gated = behind(hidden_act, first, ff);
    check(api_.rows.glu(ctx_, &to, &gate, &up, &glu, &gated), "glu");
  });
  auto* y = scratch_array<float>(places * e.down[0].rows);
  run_expert(e.down[0], table_of(e.down), hidden_act.data, y, e.down_bias, g);
  return y;
}

// The norm, the product and the routes that are held back, at once if there is a kernel for it; or
// else the norm alone.
bool CudaDevice::run_route_one() {
  if (!norm_.held || norm_.out.data != router_.x.data) return false;
  const HeldNorm norm = std::exchange(norm_, {});
  const Output to = output_of(norm.out, norm.reader, true);
  const RouteOneArgs args{rows_of(norm.x), to.rows,         norm.norm,   to.act,
                          router_.product, router_.routing, router_.ids, router_.weights};
  const bool fits = api_.moe.route_one_fits(ctx_, &args) != 0;
  check(fits ? api_.moe.route_one(ctx_, &args)
             : api_.rows.norm(ctx_, &to.rows, &args.x, &args.norm, &to.act),
        "norm");
  return fits;
}

// Few tokens: from the router's logits to the sums without groups.
bool CudaDevice::run_few_experts(const Matrix& out, const Matrix& x, const int32_t* ids,
                                 const float* weights, int top_k, const ops::Experts& e, bool add) {
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
  if (router_holds(ids, weights, x.rows, top_k)) {
    router_.held = false;
    args.routing = router_.routing;
    if (!run_route_one()) {
      args.logits = router_.out.data;
      args.logits_stride = router_.out.stride;
      check(api_.gemm.products(ctx_, &router_.product, 1, x.rows, nullptr), "products");
    }
  }
  flush();
  args.gate_up = table_of(e.gate_up);
  args.down = table_of(e.down);
  args.in = encoded(x, Order::kLanes);
  const int64_t tiles = std::min<int64_t>(x.rows * top_k, args.routing.experts);
  args.act =
      scratch(static_cast<size_t>(api_.gemm.fragment_bytes(ctx_, tiles * kTokenTile, args.ff)));
  check(api_.moe.few_experts(ctx_, &args), "few_experts");
  wrote(out);
  return true;
}

void CudaDevice::moe(const Matrix& out, const Matrix& x, const int32_t* ids, const float* weights,
                     int top_k, const ops::Experts& e, bool add) {
  if (run_few_experts(out, x, ids, weights, top_k, e, add)) return;
  const auto experts = static_cast<int64_t>(e.gate_up.size());
  const int64_t pairs = x.rows * top_k;
  ExpertsArgs args = experts_args(e);
  args.groups.tokens = static_cast<int32_t>(x.rows);
  args.groups.top_k = top_k;
  args.groups.experts = static_cast<int32_t>(experts);
  const int least = api_.moe.experts_fused(ctx_, &args);
  const bool fused = least > 0;
  const bool whole = fused && x.rows <= kWholeTokens && !e.weight_before;
  const bool many = args.gate_up_code == Code::kBF16 && !e.weight_before;
  const Slots slots = whole   ? whole_slots(least, x.rows, pairs, experts)
                      : fused ? wide_slots(least, pairs, experts, many)
                              : slots_of(pairs >= 16 * experts ? 32 : 8, pairs, experts);
  GroupArgs g = new_groups(ids, weights, x.rows, top_k, experts, slots.tokens, slots.count);
  g.whole = whole;
  run_groups(g);
  const void* y = fused ? run_experts(x, e, g) : run_experts_singly(x, e, g);
  const Rows result = rows_of(out);
  const bool bf16 = fused && given_bf16(args.gate_up_code, g.slot_tokens);
  check(api_.moe.combine(ctx_, &result, y, bf16, &g, !e.weight_before, add), "combine");
  wrote(out);
}

}  // namespace freshet::cuda
