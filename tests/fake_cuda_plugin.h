// A plug-in that computes nothing and records the launches it is asked for; for tests of CudaDevice
// on machines without a GPU.
//
// Device memory is one mapping at a fixed address, allocated in order and never reused, so the same
// calls get the same addresses in every run. It reads as zeros, because kernels do not run; but
// group() sends every token to the first experts. Each line of the log is one launch: its name, the
// sizes it was given, and the addresses it reads and writes. One device at a time.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <sys/mman.h>

#include "backend/cuda/api.h"
#include "base/status.h"

namespace freshet::cuda::testing {

// The kernels that the plug-in reports.
struct FakeKernels {
  bool gated = true;      // gate and up have a GEMM with a SwiGLU epilogue
  bool route_one = true;  // norm, router and routes are one kernel
  bool few_experts = true;
  int experts_fused = 16;
};

class FakePlugin {
 public:
  static inline FakeKernels kernels;
  static inline std::vector<std::string> log;

  static const Api& api();

 private:
  static MemoryApi memory();
  static StreamApi stream();
  static GemmApi gemm();
  static RowApi rows();
  static MoeApi moe();
  static AttentionApi attention();
  static SamplingApi sampling();
  static StateApi states();

  static constexpr size_t kBytes = size_t{64} << 30;
  static inline uint8_t* const kBase = reinterpret_cast<uint8_t*>(uintptr_t{0x100000000000});
  static inline uint8_t* memory_ = nullptr;
  static inline size_t at_ = 0;

  template <class... A>
  static int say(fmt::format_string<A...> format, A&&... args) {
    log.push_back(fmt::format(format, std::forward<A>(args)...));
    return 0;
  }
  static std::string at(const void* p) {
    if (p == nullptr) return "-";
    const auto* byte = static_cast<const uint8_t*>(p);
    if (byte >= kBase && byte < kBase + kBytes) return fmt::format("@{:x}", byte - kBase);
    return "host";
  }
  static std::string text(const Rows& r) {
    return fmt::format("{}[{},{}:{}]", at(r.data), r.rows, r.cols, r.stride);
  }
  static std::string text(const Activations& a) {
    return fmt::format("act{}({},{},{})", at(a.data), a.core_tiles, a.e4m3, a.int8);
  }
  static std::string text(const WeightView& w) {
    return fmt::format("w{}[{},{}]c{}", at(w.data), w.rows, w.cols, static_cast<int>(w.code));
  }
  static std::string text(const NormArgs& n) {
    return fmt::format("norm({},{},{},{})", at(n.weight), at(n.bias), n.eps, n.layer);
  }
  static std::string text(const GluArgs& g) {
    return fmt::format("glu({},{},{})", g.activation, g.limit, g.alpha);
  }
  static std::string text(const ProductArgs& p) {
    return fmt::format("{{{} act{} chunks{} x{}:{} out{}:{} bias{} scale{} add{}}}", text(p.weight),
                       at(p.act), p.act_chunks, at(p.x), p.x_stride, at(p.out), p.out_stride,
                       at(p.bias), p.scale, p.add);
  }
  static std::string text(const ProductArgs* p, int count) {
    std::string all;
    for (int i = 0; i < count; ++i) all.append(" ").append(text(p[i]));
    return all;
  }
  static std::string text(const RoutingArgs& r) {
    return fmt::format("routing({},{},{},{},{},{},{},{},{},{})", r.score, r.experts, r.top_k,
                       r.groups, r.top_groups, r.group_score_top, r.renormalize, at(r.correction),
                       r.renormalize_eps, r.scale);
  }
  static std::string text(const BatchArgs& b) {
    return fmt::format("batch({},{},{},{},{},{})", at(b.query_start), at(b.context_len),
                       at(b.tables), b.table_stride, b.sequences, b.tokens);
  }
  static std::string text(const CacheArgs& c) {
    return fmt::format("cache({},{},{},{},{})", at(c.data), c.kv_heads, c.key_dim, c.value_dim,
                       c.shared);
  }
  static std::string text(const StateArgs& s) {
    return fmt::format("states({},{},{},{},{},{},{},{},{})", at(s.data), s.slot_bytes,
                       at(s.query_start), at(s.context_len), at(s.slots), s.slot_stride,
                       at(s.saves), s.sequences, s.tokens);
  }
  static std::string text(const HeadsArgs& h) {
    std::string all = fmt::format("heads tokens{} cs{} ", h.tokens, at(h.cos_sin));
    bool stores = false;
    for (int i = 0; i < h.count; ++i) {
      const HeadsArgs::Part& p = h.of[i];
      all += fmt::format("{{{}:{} {}x{} ", at(p.x), p.stride, p.heads, p.head_dim);
      if (p.normed != 0) all += text(p.norm) + (p.norm_per_head != 0 ? "each " : " ");
      all += fmt::format("rot({},{},{}) store{}}} ", p.offset, p.rotary_dim, p.interleaved,
                         static_cast<int>(p.store));
      stores = stores || p.store != HeadsArgs::kNowhere;
    }
    return stores ? all + text(h.cache) + text(h.batch) : all;
  }
  static std::string text(const GroupArgs& g) {
    return fmt::format("groups(ids{} w{} {}x{} of {} slots {}x{} whole{})", at(g.ids),
                       at(g.weights), g.tokens, g.top_k, g.experts, g.slots, g.slot_tokens,
                       g.whole);
  }
};

inline MemoryApi FakePlugin::memory() {
  MemoryApi a{};
  a.allocate = [](Context*, void** to, int64_t bytes) {
    *to = memory_ + at_;
    at_ += (static_cast<size_t>(bytes) + 4095) / 4096 * 4096;
    FRESHET_CHECK(at_ <= kBytes, "the fake's memory is spent");
    return 0;
  };
  a.release = [](Context*, void*) { return 0; };
  a.allocate_host = [](Context*, void** to, int64_t bytes) {
    *to = std::malloc(static_cast<size_t>(bytes));
    return 0;
  };
  a.release_host = [](Context*, void* memory) {
    std::free(memory);
    return 0;
  };
  a.upload_ahead = [](Context*, int, void*, const void*, int64_t) { return 0; };
  a.upload_used = [](Context*, int) { return 0; };
  a.upload_await = [](Context*, int) { return 0; };
  a.upload = [](Context*, void*, const void*, int64_t) { return 0; };
  a.download = [](Context*, void* host, const void* from, int64_t bytes) {
    std::memcpy(host, from, static_cast<size_t>(bytes));
    return 0;
  };
  a.copy = [](Context*, void*, const void*, int64_t) { return say("copy"); };
  a.clear = [](Context*, void*, int64_t) { return 0; };
  a.read = [](Context*, const void*, int64_t, float*) { return 0; };
  return a;
}

inline StreamApi FakePlugin::stream() {
  StreamApi a{};
  a.sync = [](Context*) { return 0; };
  a.note = [](Context*, int) { return 0; };
  a.await = [](Context*, int) { return 0; };
  a.graph_begin = [](Context*) { return say("graph_begin"); };
  a.graph_end = [](Context*, void** graph) {
    *graph = &log;
    return say("graph_end");
  };
  a.graph_play = [](Context*, void*) { return say("graph_play"); };
  a.graph_release = [](Context*, void*) { return 0; };
  a.mark = [](Context*, int) { return 0; };
  a.elapsed = [](Context*, float* ms) {
    *ms = 1.0f;
    return 0;
  };
  return a;
}

inline GemmApi FakePlugin::gemm() {
  GemmApi a{};
  a.packed_bytes = [](Context*, Code, int64_t rows, int64_t cols) { return rows * cols * 4; };
  a.pack = [](Context*, Code, uint8_t*, const uint8_t*, int64_t, int64_t, int64_t, int64_t) {
    return 0;
  };
  a.fragment_bytes = [](Context*, int64_t rows, int64_t cols) {
    return (rows + 7) / 8 * 8 * ((cols + 127) / 128 * 128) * 2 + rows * 4;
  };
  a.order_for = [](Context*, Code code, int64_t tokens) {
    if (code == Code::kFP8) return Order::kE4M3;
    if (code == Code::kInt8) return Order::kInt8;
    return tokens > (code == Code::kBF16 ? 32 : 16) ? Order::kCores : Order::kLanes;
  };
  a.encode = [](Context*, const Activations* act, const Rows* x, const int32_t* index,
                const float* weights, int64_t rows) {
    return say("encode {} {} {} {} {}", text(*act), text(*x), at(index), at(weights), rows);
  };
  a.products = [](Context*, const ProductArgs* p, int count, int64_t tokens,
                  const NextProducts* next) {
    std::string brings;
    if (next != nullptr && next->count == 2) {
      brings = " next " + text(next->of[0]) + text(next->of[1]);
    }
    return say("products {}{}{}", tokens, text(p, count), brings);
  };
  a.gated_fits = [](Context*, Code code, int64_t, int64_t, int64_t) {
    return kernels.gated && code != Code::kF32 && code != Code::kF16 ? 1 : 0;
  };
  a.gated_products = [](Context*, const ProductArgs* p, int64_t tokens, const Activations* act) {
    return say("gated_products {}{} {}", tokens, text(p, 2), text(*act));
  };
  return a;
}

inline RowApi FakePlugin::rows() {
  RowApi a{};
  a.embed = [](Context*, const Rows* out, const WeightView* table, const int32_t* ids,
               int32_t offset, float scale) {
    return say("embed {} {} {} {} {}", text(*out), text(*table), at(ids), offset, scale);
  };
  a.norm = [](Context*, const Rows* out, const Rows* x, const NormArgs* norm,
              const Activations* act) {
    return say("norm {} {} {} {}", text(*out), text(*x), text(*norm), text(*act));
  };
  a.glu = [](Context*, const Rows* out, const Rows* gate, const Rows* up, const GluArgs* glu,
             const Activations* act) {
    return say("glu {} {} {} {} {}", text(*out), text(*gate), text(*up), text(*glu), text(*act));
  };
  a.activation = [](Context*, const Rows* x, int which) {
    return say("activation {} {}", text(*x), which);
  };
  a.add = [](Context*, const Rows* out, const Rows* x, float scale) {
    return say("add {} {} {}", text(*out), text(*x), scale);
  };
  a.scale = [](Context*, const Rows* x, float scale) {
    return say("scale {} {}", text(*x), scale);
  };
  a.softcap = [](Context*, const Rows* x, float cap) {
    return say("softcap {} {}", text(*x), cap);
  };
  a.gather = [](Context*, const Rows* out, const Rows* x, const int32_t* rows) {
    return say("gather {} {} {}", text(*out), text(*x), at(rows));
  };
  a.sigmoid_gate = [](Context*, const Rows* x, const Rows* gate) {
    return say("sigmoid_gate {} {}", text(*x), text(*gate));
  };
  a.sigmoid_product = [](Context*, const Rows* x, const Rows* gate) {
    return say("sigmoid_product {} {}", text(*x), text(*gate));
  };
  a.xielu = [](Context*, const Rows* x, float, float, float, float) {
    return say("xielu {}", text(*x));
  };
  a.split_columns = [](Context*, const Rows* kept, const Rows* apart, const Rows* x,
                       const int32_t* columns) {
    return say("split_columns {} {} {} {}", text(*kept), text(*apart), text(*x), at(columns));
  };
  return a;
}

inline MoeApi FakePlugin::moe() {
  MoeApi a{};
  a.expert_products = [](Context*, const ExpertArgs* e) {
    return say("expert_products {} [{},{}] {} {} {} {} {} {}", at(e->weights), e->rows, e->cols,
               at(e->act), at(e->out), at(e->bias), at(e->slot_expert), e->slots, e->slot_tokens);
  };
  a.experts_fused = [](Context*, const ExpertsArgs*) { return kernels.experts_fused; };
  a.experts = [](Context*, const ExpertsArgs* e) {
    return say("experts {} {} {} {} {} {} {} {} {} {}", at(e->gate_up), at(e->down),
               at(e->gate_up_bias), at(e->down_bias), text(e->glu), text(e->groups), text(e->x),
               e->weight_before, text(e->in), text(e->act));
  };
  a.few_experts_fit = [](Context*, const FewExpertsArgs* e) {
    return kernels.few_experts && e->tokens <= 8 ? 1 : 0;
  };
  a.few_experts = [](Context*, const FewExpertsArgs* e) {
    return say("few_experts {} {} {} {} {} logits{}:{} {} ids{} w{} {} in{} {} {} add{}",
               at(e->gate_up), at(e->down), at(e->gate_up_bias), at(e->down_bias), text(e->glu),
               at(e->logits), e->logits_stride, e->logits != nullptr ? text(e->routing) : "given",
               at(e->ids), at(e->weights), e->tokens, at(e->in), at(e->act), text(e->out), e->add);
  };
  a.route = [](Context*, const Rows* logits, const RoutingArgs* r, int32_t* ids, float* weights) {
    return say("route {} {} {} {}", text(*logits), text(*r), at(ids), at(weights));
  };
  a.group = [](Context*, const GroupArgs* g) {
    std::fill_n(g->slot_expert, g->slots, -1);
    std::fill_n(g->token, g->slots * g->slot_tokens, -1);
    const int each = (g->tokens + g->slot_tokens - 1) / g->slot_tokens;
    for (int e = 0; e < g->top_k; ++e) {
      std::fill_n(g->slot_expert + e * each, each, e);
      for (int t = 0; t < g->tokens; ++t) g->token[e * each * g->slot_tokens + t] = t;
    }
    return say("group {}", text(*g));
  };
  a.router = [](Context*, const ProductArgs* p, int64_t tokens, const RoutingArgs* r, int32_t* ids,
                float* weights, const GroupArgs* g) {
    return say("router {} {} {} {} {} {}", text(*p), tokens, text(*r), at(ids), at(weights),
               text(*g));
  };
  a.route_one_fits = [](Context*, const RouteOneArgs*) { return kernels.route_one ? 1 : 0; };
  a.route_one = [](Context*, const RouteOneArgs* o) {
    return say("route_one {} {} {} {} {} {} {} {}", text(o->x), text(o->normed), text(o->norm),
               text(o->act), text(o->product), text(o->routing), at(o->ids), at(o->weights));
  };
  a.combine = [](Context*, const Rows* out, const void*, int bf16, const GroupArgs* g, int weighted,
                 int add) {
    return say("combine {} {} {} {} {}", text(*out), bf16, text(*g), weighted, add);
  };
  return a;
}

inline AttentionApi FakePlugin::attention() {
  AttentionApi a{};
  a.rope_table = [](Context*, float* cos_sin, const int32_t*, const float*, int64_t tokens,
                    int64_t half, float, float,
                    float) { return say("rope_table {} {} {}", at(cos_sin), tokens, half); };
  a.heads = [](Context*, const HeadsArgs* h) { return say("{}", text(*h)); };
  a.partial_bytes = [](Context*, int sequences, int heads, int value_dim, int64_t) {
    return int64_t{sequences} * heads * value_dim * 16;
  };
  a.attention = [](Context*, const AttentionArgs* t) {
    if (t->ranges != nullptr || t->distance_bias != nullptr) {
      say("ranges {} bias {}", at(t->ranges), at(t->distance_bias));
    }
    return say(
        "attention {}:{} q{}:{} {} {} sinks{} {} {} {} {} {} {} single{} partial{} {} only{} {}",
        at(t->out), t->out_stride, at(t->q), t->q_stride, text(t->cache), text(t->batch),
        at(t->sinks), t->scale, t->softcap, t->heads, t->window, t->max_context, t->max_queries,
        t->single, at(t->partial), text(t->act), t->only_act,
        t->before != nullptr ? "before " + text(*t->before) : "");
  };
  a.rotate_heads = [](Context*, const Rows* out, const Rows* x, int heads, int dim) {
    return say("rotate_heads {} {} {}x{}", text(*out), text(*x), heads, dim);
  };
  return a;
}

inline StateApi FakePlugin::states() {
  StateApi a{};
  a.causal_conv = [](Context*, const CausalConvArgs* c) {
    return say("causal_conv {} {} {} {} {}", text(c->x), text(c->out), at(c->weight), at(c->bias),
               text(c->state));
  };
  a.selective_scan = [](Context*, const SelectiveScanArgs* s) {
    return say("selective_scan {} {} {} {} {} {}", text(s->x), text(s->dt), text(s->out),
               text(s->b), text(s->c), text(s->state));
  };
  a.linear_scan = [](Context*, const LinearScanArgs* s) {
    return say("linear_scan {} {} {} {} {} {}x{} {} {} {}", text(s->x), text(s->out), text(s->b),
               text(s->c), text(s->dt), s->heads, s->head_dim, s->groups, s->n, text(s->state));
  };
  a.delta_scan = [](Context*, const DeltaScanArgs* s) {
    return say("delta_scan {} {} {} {} {} {} {}", text(s->q), text(s->k), text(s->v), text(s->out),
               text(s->b), text(s->alpha), text(s->state));
  };
  return a;
}

inline SamplingApi FakePlugin::sampling() {
  SamplingApi a{};
  a.argmax = [](Context*, const Rows* x, int32_t* ids) {
    return say("argmax {} {}", text(*x), at(ids));
  };
  a.samples = [](Context*, int64_t) { return 1; };
  a.sample = [](Context*, const Rows* x, const int32_t*, const int32_t*, int32_t* ids) {
    return say("sample {} {}", text(*x), at(ids));
  };
  a.take_ids = [](Context*, int32_t* ids, const int32_t*, int64_t count, const int32_t*,
                  const int32_t*) { return say("take_ids {} {}", at(ids), count); };
  return a;
}

inline const Api& FakePlugin::api() {
  static const Api made = [] {
    Api a{};
    a.version = kApiVersion;
    a.error_text = [](int) -> const char* { return "no error"; };
    a.devices = [] { return 1; };
    a.open = [](int, Context** context, DeviceInfo* info) {
      *context = nullptr;
      *info = {"fake", {90, 132}, static_cast<int64_t>(kBytes), static_cast<int64_t>(kBytes)};
      if (memory_ == nullptr) {
        void* got = mmap(kBase, kBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        FRESHET_CHECK(got == kBase, "no room for the fake's memory");
        memory_ = kBase;
      }
      FRESHET_CHECK(madvise(kBase, kBytes, MADV_DONTNEED) == 0, "the fake's memory stays");
      at_ = 0;
      return 0;
    };
    a.force = [](Context*, int, int) { return 0; };
    a.problem_text = [](const Context*) -> const char* { return "no problem"; };
    a.close = [](Context*) { return 0; };
    a.memory = memory();
    a.stream = stream();
    a.gemm = gemm();
    a.rows = rows();
    a.moe = moe();
    a.attention = attention();
    a.sampling = sampling();
    a.states = states();
    return a;
  }();
  return made;
}

}  // namespace freshet::cuda::testing
