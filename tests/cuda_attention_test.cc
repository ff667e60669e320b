// Attention of the CUDA backend against the reference ops, on random shapes; and batch invariance:
// a query has the same bits alone and in any batch. Skipped without a GPU.
#include <cmath>
#include <cstring>
#include <numeric>

#include "backend/cuda/arguments.h"
#include "backend/cuda/attention/attention_rows.h"
#include "tests/cuda_fixture.h"
#include "tests/op_cases.h"

namespace freshet {
namespace {

using ops::kBlockTokens;
using test::DeviceFloats;
using test::random_floats;
using test::rounded;

class CudaAttention : public test::CudaTest {};

// Softmax weights are rounded to the number type of the cache. In INT8, code times scale is rounded
// to F16, which matters if scores are large.
float tolerance(const ops::KvShape& shape, float sharpness = 1.0f) {
  const float least = shape.type == ops::KvType::kBF16 ? 5e-3f : 2e-3f;
  const bool scaled = shape.type == ops::KvType::kInt8 || ops::has_int4(shape.type);
  return scaled ? least + 5e-4f * sharpness : least;
}

// One cache on each side with the same keys and values.
struct AttentionProblem {
  AttentionProblem(const cases::AttentionCase& of, ops::Ops& g, ops::Ops& h, uint32_t seed,
                   float sharpness = 1.0f)
      : c(of), gpu(g), cpu(h) {
    if (!g.device()->supports(c.shape).ok()) c.shape.type = ops::KvType::kF16;
    std::mt19937 rng(seed);
    int64_t total = 0;
    for (const auto& s : c.sequences) {
      stride = std::max<int64_t>(stride, (s.context + kBlockTokens - 1) / kBlockTokens);
      total += s.context;
      tokens += s.queries;
    }
    blocks = static_cast<int32_t>(c.sequences.size()) * static_cast<int32_t>(stride) + 3;
    std::vector<int32_t> ids(static_cast<size_t>(blocks));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng);
    for (size_t i = 0; i < c.sequences.size() * static_cast<size_t>(stride); ++i) {
      tables.push_back(ids[i]);
    }
    const size_t bytes = c.shape.block_bytes() * static_cast<size_t>(blocks);
    host_cache = std::move(Buffer::allocate(bytes)).value();
    gpu_cache = std::move(Buffer::allocate(bytes, gpu.memory())).value();
    const int64_t k_cols = int64_t{c.shape.kv_heads} * c.shape.key_dim;
    const int64_t v_cols = int64_t{c.shape.kv_heads} * c.shape.value_dim;
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      const int32_t n = c.sequences[s].context;
      std::vector<float> k = random_floats(static_cast<size_t>(n * k_cols), seed + 1);
      std::vector<float> v = random_floats(static_cast<size_t>(n * v_cols), seed + 2);
      const int32_t starts[] = {0, n};
      const ops::AttentionBatch batch{
          starts, {&n, 1}, tables.data() + static_cast<int64_t>(s) * stride, stride};
      DeviceFloats dk(gpu, k), dv(gpu, v);
      cpu.store_kv(host_view(), {k.data(), n, k_cols, k_cols}, {v.data(), n, v_cols, v_cols},
                   batch);
      gpu.store_kv(gpu_view(), dk.matrix(n, k_cols), dv.matrix(n, v_cols), batch);
      (void)dk.get();
      seed += 3;
    }
    queries =
        rounded(random_floats(static_cast<size_t>(tokens * c.heads * c.shape.key_dim), seed + 5));
    for (float& q : queries) q *= sharpness;
    sinks = random_floats(static_cast<size_t>(c.heads), seed + 6, 2.0f);
  }
  ops::KvView host_view() { return {c.shape, host_cache.data(), blocks}; }
  ops::KvView gpu_view() { return {c.shape, gpu_cache.data(), blocks}; }

  struct Part {
    size_t sequence;
    int32_t skip, queries;
  };
  // on_gpu: whether to use the GPU. `o` is an output projection or absent; if present, its output
  // is returned.
  std::vector<float> attend(bool on_gpu, const std::vector<Part>& parts,
                            const ops::Weight* o = nullptr) {
    std::vector<int32_t> starts = {0}, contexts, part_tables;
    std::vector<ops::KeyRange> ranges;
    std::vector<float> q;
    const int64_t q_cols = int64_t{c.heads} * c.shape.key_dim;
    const int64_t out_cols = int64_t{c.heads} * c.shape.value_dim;
    for (const Part& p : parts) {
      const auto& s = c.sequences[p.sequence];
      int64_t first = p.skip;
      for (size_t i = 0; i < p.sequence; ++i) first += c.sequences[i].queries;
      q.insert(q.end(), queries.begin() + first * q_cols,
               queries.begin() + (first + p.queries) * q_cols);
      starts.push_back(starts.back() + p.queries);
      contexts.push_back(s.context - s.queries + p.skip + p.queries);
      if (range != nullptr) {
        contexts.back() = s.context;
        for (int32_t i = 0; i < p.queries; ++i) {
          ranges.push_back(range(s.context, s.context - s.queries + p.skip + i));
        }
      }
      const auto table = tables.begin() + static_cast<int64_t>(p.sequence) * stride;
      part_tables.insert(part_tables.end(), table, table + stride);
    }
    const int64_t n = starts.back();
    const ops::AttentionBatch batch{starts, contexts, part_tables.data(), stride, ranges};
    ops::AttentionParams params{c.heads, 1.0f / std::sqrt(static_cast<float>(c.shape.key_dim)),
                                c.softcap, c.window, c.sinks ? sinks.data() : nullptr};
    if (!bias.empty()) {
      params.distance_bias = bias.data();
      params.bias_reach = static_cast<int>(bias.size()) / c.heads / 2;
    }
    if (!on_gpu) {
      std::vector<float> out(static_cast<size_t>(n * out_cols));
      cpu.attention({out.data(), n, out_cols, out_cols}, {q.data(), n, q_cols, q_cols}, host_view(),
                    batch, params);
      return out;
    }
    DeviceFloats dq(gpu, q), ds(gpu, sinks), out(gpu, static_cast<size_t>(n * out_cols));
    DeviceFloats db(gpu, bias);
    if (c.sinks) params.sinks = ds.data();
    if (!bias.empty()) params.distance_bias = db.data();
    if (o == nullptr) {
      gpu.attention(out.matrix(n, out_cols), dq.matrix(n, q_cols), gpu_view(), batch, params);
      return out.get();
    }
    DeviceFloats projected(gpu, static_cast<size_t>(n * o->rows));
    ops::Attend all;
    all.heads.q = {dq.matrix(n, q_cols), c.heads, c.shape.key_dim};
    all.heads.cache = gpu_view();
    all.heads.batch = batch;
    all.out = out.matrix(n, out_cols);
    all.params = params;
    all.o = {o, projected.matrix(n, o->rows)};
    gpu.attend(all);
    return projected.get();
  }

  struct NewHeads {
    int rotary, offset;
    bool interleaved, normed;
  };
  // One step with new tokens of the sequences: their heads are normalised, rotated and stored, and
  // attend.
  std::vector<float> decode(bool on_gpu, const NewHeads& how, uint32_t seed, bool apart) {
    ops::Ops& o = on_gpu ? gpu : cpu;
    std::vector<int32_t> starts = {0}, contexts;
    for (const auto& s : c.sequences) {
      starts.push_back(starts.back() + s.queries);
      contexts.push_back(s.context);
    }
    const int64_t n = starts.back();
    const int dim = c.shape.key_dim, kv_heads = c.shape.kv_heads;
    const auto floats = [&](int64_t count) {
      return DeviceFloats(o, random_floats(static_cast<size_t>(count), seed++));
    };
    DeviceFloats dq = floats(n * c.heads * dim), dk = floats(n * kv_heads * dim);
    DeviceFloats dv = floats(n * kv_heads * c.shape.value_dim), table = floats(n * how.rotary);
    DeviceFloats weight = floats(dim), its_sinks(o, sinks);
    DeviceFloats out(o, static_cast<size_t>(n * c.heads * c.shape.value_dim));
    const Matrix q = dq.matrix(n, int64_t{c.heads} * dim),
                 k = dk.matrix(n, int64_t{kv_heads} * dim),
                 v = dv.matrix(n, int64_t{kv_heads} * c.shape.value_dim);
    const ops::AttentionBatch batch{starts, contexts, tables.data(), stride};
    const ops::KvView cache = on_gpu ? gpu_view() : host_view();
    const ops::Norm norm{ops::NormKind::kRms, weight.data(), nullptr, 1e-6f};
    ops::Attend all;
    all.heads.q = {
        q,          c.heads,        dim, how.normed ? &norm : nullptr, false, false, how.offset,
        how.rotary, how.interleaved};
    all.heads.k = all.heads.q;
    all.heads.k.x = k;
    all.heads.k.heads = kv_heads;
    all.heads.v = v;
    all.heads.cos_sin = table.data();
    all.heads.cache = cache;
    all.heads.batch = batch;
    all.out = out.matrix(n, int64_t{c.heads} * c.shape.value_dim);
    all.params = {c.heads, 1.0f / std::sqrt(static_cast<float>(dim)), c.softcap, c.window,
                  c.sinks ? its_sinks.data() : nullptr};
    if (!apart) {
      o.attend(all);
      return out.get();
    }
    for (const ops::Heads::Part& p : {all.heads.q, all.heads.k}) {
      if (how.normed) o.norm_heads(p.x, p.heads, dim, norm, false);
      o.rope(p.x, p.heads, dim, how.offset, how.rotary, how.interleaved, table.data());
    }
    o.store_kv(cache, k, v, batch);
    o.attention(all.out, q, cache, batch, all.params);
    return out.get();
  }
  std::vector<uint8_t> gpu_bytes() {
    std::vector<uint8_t> got(gpu_cache.size());
    gpu.fetch(got.data(), gpu_cache.data(), got.size());
    gpu.wait();
    return got;
  }

  cases::AttentionCase c;
  ops::Ops &gpu, &cpu;
  std::vector<int32_t> tables;
  std::vector<float> queries, sinks;
  // nullptr, or the keys that a query at `position` attends to: then every part has all keys.
  ops::KeyRange (*range)(int32_t context, int32_t position) = nullptr;
  std::vector<float> bias;  // empty, or [heads, 2 reach + 1]: for parts that end their sequence
  Buffer host_cache, gpu_cache;
  int64_t stride = 0, tokens = 0;
  int32_t blocks = 0;
};

TEST_F(CudaAttention, IsNearTheReferenceAndKeepsItsBits) {
  uint32_t seed = 1000;
  for (const cases::AttentionCase& c : cases::attention_cases()) {
    AttentionProblem p(c, *gpu, *cpu, seed += 50);
    std::vector<AttentionProblem::Part> whole;
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      whole.push_back({s, 0, c.sequences[s].queries});
    }
    const std::vector<float> want = p.attend(false, whole), got = p.attend(true, whole);
    expect_near(got, want, tolerance(p.c.shape) * std::max(1.0f, largest(want)), c.name());
    const size_t row = static_cast<size_t>(c.heads * c.shape.value_dim);
    size_t at = 0;
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      for (int32_t q = 0; q < c.sequences[s].queries; ++q, at += row) {
        if (q % 5 != 0 && q + 1 != c.sequences[s].queries) continue;
        const std::vector<float> alone = p.attend(true, {{s, q, 1}});
        ASSERT_EQ(std::memcmp(alone.data(), got.data() + at, row * sizeof(float)), 0)
            << c.name() << ": query " << q << " of sequence " << s << " alone";
        const int32_t few = std::min(3, c.sequences[s].queries - q);
        const std::vector<float> some = p.attend(true, {{s, q, few}});
        ASSERT_EQ(std::memcmp(some.data(), got.data() + at, row * sizeof(float) * size_t(few)), 0)
            << c.name() << ": queries from " << q << " of sequence " << s;
      }
    }
  }
}

constexpr ops::KeyRange (*kRanges[])(int32_t context, int32_t position) = {
    [](int32_t context, int32_t) { return ops::KeyRange{0, context}; },
    [](int32_t context, int32_t p) {
      return ops::KeyRange{std::max(0, p - 100), std::min(context, p + 101)};
    },
    [](int32_t, int32_t p) { return ops::KeyRange{p / 256 * 256, p + 1}; },
};

TEST_F(CudaAttention, RangesAreNearTheReferenceAndKeepTheirBits) {
  using ops::KvType;
  const std::vector<cases::AttentionCase::Sequence> some = {{513, 1}, {700, 300}, {40, 40}, {9, 1}};
  uint32_t seed = 5000;
  for (const cases::AttentionCase& c : std::vector<cases::AttentionCase>{
           {{KvType::kF16, 2, 64, 64, false}, 8, 0.0f, 0, false, some},
           {{KvType::kBF16, 1, 128, 128, false}, 3, 0.0f, 0, false, some},
           {{KvType::kF16, 1, 80, 80, false}, 4, 30.0f, 0, true, some},
           {{KvType::kInt8, 2, 64, 64, false}, 2, 0.0f, 0, false, some},
           {{KvType::kInt4, 2, 128, 128, false}, 4, 0.0f, 0, false, some},
           {{KvType::kF16, 2, 128, 128, false}, 8, 0.0f, 0, false, {{513, 1}, {70, 1}}}}) {
    for (const auto range : kRanges) {
      AttentionProblem p(c, *gpu, *cpu, seed += 50);
      p.range = range;
      std::vector<AttentionProblem::Part> whole;
      for (size_t s = 0; s < c.sequences.size(); ++s) {
        whole.push_back({s, 0, c.sequences[s].queries});
      }
      const std::vector<float> want = p.attend(false, whole), got = p.attend(true, whole);
      expect_near(got, want, tolerance(p.c.shape) * std::max(1.0f, largest(want)), c.name());
      const auto row = static_cast<size_t>(c.heads * c.shape.value_dim);
      size_t at = 0;
      for (size_t s = 0; s < c.sequences.size(); ++s) {
        for (int32_t q = 0; q < c.sequences[s].queries; ++q, at += row) {
          if (q % 7 != 0) continue;
          const std::vector<float> alone = p.attend(true, {{s, q, 1}});
          ASSERT_EQ(std::memcmp(alone.data(), got.data() + at, row * sizeof(float)), 0)
              << c.name() << ": query " << q << " of sequence " << s << " alone, ranges "
              << std::distance(std::begin(kRanges), std::ranges::find(kRanges, range));
        }
      }
    }
  }
}

TEST_F(CudaAttention, BiasByDistance) {
  using ops::KvType;
  uint32_t seed = 7000;
  for (const KvType type : {KvType::kF16, KvType::kBF16, KvType::kInt8}) {
    const cases::AttentionCase c{{type, 2, 64, 64, false, true}, 4, 0.0f, 0, false,
                                 {{600, 300}, {40, 40}, {9, 1}}};
    for (const bool both_ways : {false, true}) {
      AttentionProblem p(c, *gpu, *cpu, seed += 50);
      p.bias = random_floats(static_cast<size_t>(c.heads * (2 * 90 + 1)), seed, 2.0f);
      if (both_ways) p.range = kRanges[0];
      std::vector<AttentionProblem::Part> whole;
      for (size_t s = 0; s < c.sequences.size(); ++s) {
        whole.push_back({s, 0, c.sequences[s].queries});
      }
      const std::vector<float> want = p.attend(false, whole), got = p.attend(true, whole);
      expect_near(got, want, 2 * tolerance(p.c.shape) * std::max(1.0f, largest(want)), c.name());
      const auto row = static_cast<size_t>(c.heads * c.shape.value_dim);
      for (const int32_t q : {1, 100, 299}) {
        const std::vector<float> end = p.attend(true, {{0, q, 300 - q}});
        ASSERT_EQ(std::memcmp(end.data(), got.data() + static_cast<size_t>(q) * row,
                              end.size() * sizeof(float)),
                  0)
            << c.name() << ": queries from " << q;
      }
    }
  }
}

// A case whose sequences all have one query, or all have more, as the device describes it to the
// table of kernels.
cuda::AttentionProblem kernel_problem(const cases::AttentionCase& c) {
  cuda::AttentionProblem p;
  p.format = static_cast<int>(cuda::type_of(c.shape.type));
  p.key_dim = c.shape.key_dim, p.value_dim = c.shape.value_dim;
  p.heads = c.heads, p.kv_heads = c.shape.kv_heads;
  p.sequences = static_cast<int>(c.sequences.size());
  p.window = c.window;
  for (const auto& s : c.sequences) {
    p.tokens = std::max<int64_t>(p.tokens, s.queries);
    p.max_context = std::max<int64_t>(p.max_context,
                                      (s.context + kBlockTokens - 1) / kBlockTokens * kBlockTokens);
  }
  p.single = p.partial = p.tokens == 1;
  return p;
}

// Every row of the table of kernels, forced by name, on cases that it supports: the same bits as
// attention_sm80, which supports them all, and as the row chosen by default.
TEST_F(CudaAttention, EveryForcedRowHasTheSameBits) {
  using ops::KvType;
  std::vector<cases::AttentionCase> all = {
      {{KvType::kF16, 1, 96, 96, false}, 4, 0.0f, 0, false, {{300, 1}, {40, 1}}},
      {{KvType::kF16, 1, 96, 96, false}, 2, 0.0f, 0, false, {{300, 70}}}};
  for (const KvType type :
       {KvType::kF16, KvType::kBF16, KvType::kFP8, KvType::kInt8, KvType::kInt4, KvType::kK8V4}) {
    for (const int dim : {64, 128, 256}) {
      all.push_back({{type, 2, dim, dim, false}, 8, 0.0f, 0, false, {{513, 1}, {40, 1}}});
      all.push_back({{type, 1, dim, dim, false}, 16, 30.0f, 200, true, {{700, 1}}});
      all.push_back({{type, 2, dim, dim, false}, 8, 0.0f, 0, true, {{600, 90}, {130, 130}}});
      all.push_back({{type, 2, dim, dim, false}, 8, 0.0f, 0, true, {{1600, 16}, {3, 2}, {530, 7}}});
      all.push_back({{type, 1, dim, dim, false}, 3, 20.0f, 600, false, {{1300, 9}, {40, 1}}});
    }
  }
  const auto plain = open("cuda", {"attention=attention_sm80"});
  ASSERT_NE(plain, nullptr);
  for (const cuda::AttentionRow& row : cuda::kAttentionRows) {
    if (row.capability == 90 && limits().capability != 90) continue;
    const auto forced = open("cuda", {fmt::format("attention={}", row.name)});
    ASSERT_NE(forced, nullptr);
    uint32_t seed = 23000;
    int runs = 0;
    for (const cases::AttentionCase& c : all) {
      if (!cuda::fits(row, limits(), kernel_problem(c))) continue;
      SCOPED_TRACE(fmt::format("{}: {}", row.name, c.name()));
      ++runs, seed += 50;
      std::vector<AttentionProblem::Part> whole;
      for (size_t s = 0; s < c.sequences.size(); ++s) {
        whole.push_back({s, 0, c.sequences[s].queries});
      }
      AttentionProblem p(c, *forced, *cpu, seed), usual(c, *gpu, *cpu, seed);
      AttentionProblem on_sm80(c, *plain, *cpu, seed);
      const std::vector<float> got = p.attend(true, whole), want = p.attend(false, whole);
      EXPECT_EQ(got, on_sm80.attend(true, whole));
      EXPECT_EQ(got, usual.attend(true, whole));
      expect_near(got, want, tolerance(p.c.shape) * std::max(1.0f, largest(want)), c.name());
    }
    EXPECT_GT(runs, 0) << row.name << " was never run";
  }
}

// Several queries per sequence over long contexts, whose KV splits different blocks take, beside
// single queries: the bits of each query alone.
TEST_F(CudaAttention, FewQueriesOverLongContextsKeepTheirBits) {
  using ops::KvType;
  uint32_t seed = 27000;
  for (const auto& [type, dim, heads, window] : {std::tuple{KvType::kF16, 128, 32, 0},
                                                 {KvType::kBF16, 128, 8, 0},
                                                 {KvType::kF16, 96, 16, 0},
                                                 {KvType::kBF16, 64, 8, 1500},
                                                 {KvType::kFP8, 128, 24, 0},
                                                 {KvType::kInt8, 256, 16, 0},
                                                 {KvType::kInt4, 128, 32, 1100},
                                                 {KvType::kK8V4, 64, 32, 0}}) {
    const cases::AttentionCase c = {
        {type, 8, dim, dim, false},
        heads,
        0.0f,
        window,
        true,
        {{2100, 1}, {700, 1}, {3000, 6}, {9000, 16}, {513, 2}, {5, 5}, {1024, 1}, {40, 11}}};
    AttentionProblem p(c, *gpu, *cpu, seed += 50);
    std::vector<AttentionProblem::Part> whole;
    for (size_t s = 0; s < c.sequences.size(); ++s) whole.push_back({s, 0, c.sequences[s].queries});
    const std::vector<float> want = p.attend(false, whole), got = p.attend(true, whole);
    expect_near(got, want, tolerance(p.c.shape) * std::max(1.0f, largest(want)), c.name());
    EXPECT_EQ(p.attend(true, whole), got) << c.name();
    const auto row = static_cast<size_t>(heads * dim);
    size_t at = 0;
    for (const auto& part : whole) {
      for (int32_t q = 0; q < part.queries; ++q, at += row) {
        const std::vector<float> alone = p.attend(true, {{part.sequence, q, 1}});
        EXPECT_EQ(std::memcmp(alone.data(), got.data() + at, row * sizeof(float)), 0)
            << c.name() << ": query " << q << " of sequence " << part.sequence;
      }
    }
  }
}

// More single queries than blocks that run at once: the blocks share the remaining queries
// dynamically.
TEST_F(CudaAttention, ManySequencesKeepTheBitsOfEach) {
  using ops::KvType;
  uint32_t seed = 21000;
  for (const auto& [type, dim, heads, window] : {std::tuple{KvType::kF16, 128, 32, 0},
                                                 {KvType::kBF16, 64, 16, 0},
                                                 {KvType::kFP8, 128, 32, 0},
                                                 {KvType::kFP8, 128, 8, 700},
                                                 {KvType::kFP8, 64, 80, 0},
                                                 {KvType::kInt8, 128, 32, 0},
                                                 {KvType::kInt4, 128, 32, 0},
                                                 {KvType::kInt4, 64, 80, 700},
                                                 {KvType::kK8V4, 64, 16, 0},
                                                 {KvType::kFP8, 256, 16, 0}}) {
    cases::AttentionCase c = {{type, 8, dim, dim, false}, heads, 0.0f, window, false, {}};
    std::vector<AttentionProblem::Part> whole;
    for (size_t s = 0; s < 75; ++s) {
      c.sequences.push_back({static_cast<int32_t>(s % 25 == 0 ? 1100 - s : 1 + s * 37 % 200), 1});
      whole.push_back({s, 0, 1});
    }
    AttentionProblem p(c, *gpu, *cpu, seed += 50);
    const std::vector<float> want = p.attend(false, whole), got = p.attend(true, whole);
    expect_near(got, want, tolerance(p.c.shape) * std::max(1.0f, largest(want)), c.name());
    EXPECT_EQ(p.attend(true, whole), got) << c.name();
    const auto row = static_cast<size_t>(heads * dim);
    for (const auto& part : whole) {
      const std::vector<float> alone = p.attend(true, {part});
      EXPECT_EQ(std::memcmp(alone.data(), got.data() + part.sequence * row, row * sizeof(float)), 0)
          << c.name() << ": sequence " << part.sequence << " alone";
    }
  }
}

// Prompts around the edges of KV splits, tiles and windows: near the reference, and bit-identical
// in one step, split in two at any point, and one query at a time. Sharp cases: scores far apart,
// so that the running maximum of the softmax is raised on the way.
class CudaAttentionOfPrompts : public CudaAttention, public ::testing::WithParamInterface<float> {};
INSTANTIATE_TEST_SUITE_P(Sharpness, CudaAttentionOfPrompts, ::testing::Values(1.0f, 32.0f, 256.0f));
TEST_P(CudaAttentionOfPrompts, KeepsItsBitsHoweverTheyAreCut) {
  using ops::KvType;
  const std::vector<cases::AttentionCase> all = {
      {{KvType::kF16, 2, 128, 128, false}, 8, 0.0f, 0, false, {{1000, 1000}, {129, 129}, {1, 1}}},
      {{KvType::kF16, 1, 128, 128, false}, 7, 0.0f, 0, true, {{641, 300}, {128, 128}, {383, 200}}},
      {{KvType::kF16, 2, 128, 128, false}, 2, 0.0f, 200, false, {{700, 513}, {90, 90}}},
      {{KvType::kF16, 1, 128, 128, false}, 4, 30.0f, 128, true, {{520, 260}, {257, 255}}},
      {{KvType::kF16, 2, 128, 128, false}, 16, 30.0f, 0, false, {{300, 299}}},
      {{KvType::kF16, 1, 64, 64, false}, 8, 0.0f, 130, true, {{777, 600}, {255, 17}}},
      {{KvType::kF16, 2, 64, 64, false}, 6, 0.0f, 0, false, {{513, 513}, {640, 5}}},
      {{KvType::kF16, 1, 128, 128, false}, 4, 0.0f, 0, false, {{2100, 530}}},
      {{KvType::kF16, 1, 64, 64, false}, 8, 0.0f, 700, true, {{1700, 300}}},
      {{KvType::kF16, 1, 96, 96, false}, 2, 0.0f, 600, false, {{1300, 70}}},
      {{KvType::kF16, 1, 128, 128, false}, 1, 0.0f, 1, false, {{400, 300}}},
      {{KvType::kFP8, 2, 128, 128, false}, 8, 0.0f, 0, false, {{1000, 1000}, {129, 129}, {1, 1}}},
      {{KvType::kFP8, 1, 128, 128, false}, 7, 30.0f, 300, true, {{641, 300}, {383, 200}}},
      {{KvType::kFP8, 2, 64, 64, false}, 8, 0.0f, 0, false, {{777, 600}, {255, 17}}},
      {{KvType::kFP8, 1, 128, 128, false}, 16, 0.0f, 0, true, {{1100, 40}, {520, 9}}},
      {{KvType::kFP8, 2, 128, 128, false}, 8, 30.0f, 600, false, {{1700, 25}, {40, 40}}},
      {{KvType::kFP8, 1, 256, 256, false}, 4, 0.0f, 0, false, {{400, 130}}},
      {{KvType::kBF16, 2, 128, 128, false}, 8, 0.0f, 0, false, {{1000, 1000}, {129, 129}, {1, 1}}},
      {{KvType::kBF16, 1, 128, 128, false}, 7, 30.0f, 300, true, {{641, 300}, {383, 200}}},
      {{KvType::kBF16, 2, 64, 64, false}, 12, 0.0f, 0, false, {{777, 600}, {255, 17}}},
      {{KvType::kBF16, 1, 256, 256, false}, 4, 0.0f, 0, false, {{400, 130}}},
      {{KvType::kBF16, 2, 256, 256, false}, 4, 0.0f, 200, false, {{700, 513}, {90, 90}}},
      {{KvType::kF16, 2, 256, 256, false}, 4, 0.0f, 0, false, {{1000, 1000}, {129, 129}, {1, 1}}},
      {{KvType::kF16, 1, 256, 256, false}, 2, 50.0f, 300, true, {{1100, 641}, {383, 200}}},
      {{KvType::kBF16, 1, 96, 96, false}, 2, 0.0f, 600, false, {{1300, 70}}},
      {{KvType::kInt8, 2, 128, 128, false}, 8, 0.0f, 0, false, {{1000, 1000}, {129, 129}, {1, 1}}},
      {{KvType::kInt8, 1, 128, 128, false}, 7, 30.0f, 300, true, {{641, 300}, {383, 200}}},
      {{KvType::kInt8, 2, 64, 64, false}, 12, 0.0f, 0, false, {{777, 600}, {255, 17}}},
      {{KvType::kInt8, 1, 128, 128, false}, 16, 0.0f, 0, true, {{1100, 40}, {520, 9}}},
      {{KvType::kInt8, 1, 256, 256, false}, 4, 0.0f, 0, false, {{400, 130}}},
      {{KvType::kInt8, 1, 80, 80, false}, 2, 0.0f, 600, false, {{1300, 70}}},
      {{KvType::kInt4, 2, 128, 128, false}, 8, 0.0f, 0, false, {{1000, 500}, {129, 129}}},
      {{KvType::kK8V4, 1, 64, 64, false}, 4, 30.0f, 300, true, {{641, 300}, {383, 200}}},
  };
  uint32_t seed = 9000;
  for (const cases::AttentionCase& c : all) {
    AttentionProblem p(c, *gpu, *cpu, seed += 50, GetParam());
    std::vector<AttentionProblem::Part> whole;
    for (size_t s = 0; s < c.sequences.size(); ++s) whole.push_back({s, 0, c.sequences[s].queries});
    const std::vector<float> want = p.attend(false, whole), got = p.attend(true, whole);
    expect_near(got, want, tolerance(p.c.shape, GetParam()) * std::max(1.0f, largest(want)),
                c.name());
    const size_t row = static_cast<size_t>(c.heads * c.shape.value_dim);
    size_t at = 0;
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      const int32_t queries = c.sequences[s].queries;
      const auto expect_same = [&](int32_t skip, int32_t count) {
        const std::vector<float> part = p.attend(true, {{s, skip, count}});
        ASSERT_EQ(std::memcmp(part.data(), got.data() + at + static_cast<size_t>(skip) * row,
                              part.size() * sizeof(float)),
                  0)
            << c.name() << ": " << count << " queries from " << skip << " of sequence " << s;
      };
      for (const int32_t cut : {1, 63, 128, queries / 2, queries - 130, queries - 1}) {
        if (cut <= 0 || cut >= queries) continue;
        expect_same(0, cut);
        expect_same(cut, queries - cut);
      }
      for (int32_t q = queries - 1; q >= 0; q -= 37) expect_same(q, 1);
      // Single queries before other queries.
      std::vector<AttentionProblem::Part> mixed;
      for (int32_t q = queries - 1; q >= 0; q -= 53) mixed.push_back({s, q, 1});
      const size_t singles = mixed.size();
      mixed.insert(mixed.end(), whole.begin(), whole.end());
      const std::vector<float> both = p.attend(true, mixed);
      for (size_t i = 0; i < singles; ++i) {
        const auto skip = static_cast<size_t>(mixed[i].skip);
        ASSERT_EQ(
            std::memcmp(both.data() + i * row, got.data() + at + skip * row, row * sizeof(float)),
            0)
            << c.name() << ": query " << skip << " of sequence " << s << " in front of prompts";
      }
      ASSERT_EQ(std::memcmp(both.data() + singles * row, got.data(), got.size() * sizeof(float)), 0)
          << c.name() << ": prompts behind " << singles << " single queries";
      at += row * static_cast<size_t>(queries);
    }
  }
}

// Heads that attention normalises, rotates and stores itself have the same bits as heads prepared
// in advance, and so does the cache.
TEST_F(CudaAttention, TakesHeadsOnTheWay) {
  using ops::KvType;
  // For every cache type that the kernel for few queries supports.
  const std::vector<cases::AttentionCase> few = {
      {{KvType::kF16, 8, 128, 128, false}, 32, 0.0f, 0, false, {{513, 1}}},
      {{KvType::kF16, 8, 128, 128, false}, 32, 0.0f, 0, false, {{1, 1}}},
      {{KvType::kF16, 8, 128, 128, false}, 32, 0.0f, 0, true, {{200, 1}, {512, 1}, {17, 1}}},
      {{KvType::kF16, 8, 128, 128, false}, 64, 30.0f, 0, false, {{1100, 1}}},
      {{KvType::kF16, 2, 128, 128, false}, 14, 0.0f, 200, true, {{1700, 1}, {140, 1}, {1024, 1}}},
      {{KvType::kF16, 2, 128, 128, false}, 32, 0.0f, 0, false, {{16, 1}, {385, 1}}},
      {{KvType::kF16, 1, 128, 128, false}, 24, 0.0f, 0, true, {{700, 1}, {128, 1}}},
      {{KvType::kF16, 8, 128, 128, false}, 8, 0.0f, 0, false, {{129, 1}, {2, 1}, {33, 1}, {8, 1}}},
  };
  std::vector<cases::AttentionCase> all = {
      // These have a separate kernel for the heads.
      {{KvType::kF16, 8, 128, 128, false}, 32, 0.0f, 0, false, {{2500, 1}, {700, 1}}},
      {{KvType::kF16, 2, 64, 64, false}, 8, 0.0f, 0, false, {{200, 1}}},
      {{KvType::kFP8, 8, 128, 128, false}, 32, 0.0f, 0, false, {{2500, 1}, {700, 1}}},
      {{KvType::kBF16, 2, 128, 128, false}, 8, 0.0f, 0, false, {{200, 1}, {90, 1}}},
      {{KvType::kInt8, 1, 80, 80, false}, 3, 0.0f, 0, false, {{200, 1}, {90, 1}}},
      // Prompts, whose kernel processes the queries itself.
      {{KvType::kF16, 2, 128, 128, false}, 8, 0.0f, 0, false, {{300, 300}, {37, 37}, {129, 20}}},
      {{KvType::kBF16, 1, 128, 128, false}, 7, 0.0f, 0, true, {{200, 1}, {90, 1}, {290, 281}}},
      {{KvType::kFP8, 3, 128, 128, false}, 3, 0.0f, 0, false, {{77, 1}, {411, 311}, {30, 27}}},
      {{KvType::kInt8, 2, 128, 128, false}, 10, 30.0f, 100, false, {{277, 277}, {20, 3}}},
      {{KvType::kF16, 2, 64, 64, false}, 8, 0.0f, 0, false, {{300, 290}}},
  };
  for (const KvType type : {KvType::kF16, KvType::kFP8, KvType::kInt8}) {
    for (const cases::AttentionCase& c : few) all.push_back(c), all.back().shape.type = type;
  }
  uint32_t seed = 15000;
  for (const cases::AttentionCase& c : all) {
    const int dim = c.shape.key_dim;
    for (const AttentionProblem::NewHeads& how : {AttentionProblem::NewHeads{dim, 0, false, false},
                                                  {dim, 0, false, true},
                                                  {dim, 0, true, false},
                                                  {dim / 2, dim / 4, false, true},
                                                  {dim / 4 + 2, 0, false, false}}) {
      seed += 50;
      AttentionProblem p(c, *gpu, *cpu, seed), other(c, *gpu, *cpu, seed);
      const std::vector<float> got = p.decode(true, how, seed, false);
      const std::vector<float> apart = other.decode(true, how, seed, true);
      const std::string what = fmt::format("{}, rotated {}", c.name(), how.rotary);
      EXPECT_EQ(std::memcmp(got.data(), apart.data(), got.size() * sizeof(float)), 0) << what;
      EXPECT_EQ(p.gpu_bytes(), other.gpu_bytes()) << what;
      const std::vector<float> want = p.decode(false, how, seed, false);
      expect_near(got, want, 1e-2f * std::max(1.0f, largest(want)), what);
    }
  }
}

// The same for so many sequences that each block processes several.
TEST_F(CudaAttention, TakesHeadsOfManySequences) {
  using ops::KvType;
  uint32_t seed = 17000;
  for (const auto& [type, heads, window] :
       {std::tuple{KvType::kF16, 32, 0}, {KvType::kBF16, 8, 0}, {KvType::kFP8, 64, 700}}) {
    cases::AttentionCase c = {{type, 8, 128, 128, false}, heads, 0.0f, window, false, {}};
    for (int s = 0; s < 75; ++s) {
      c.sequences.push_back({s % 25 == 0 ? 1100 - s : 1 + s * 37 % 200, 1});
    }
    for (const AttentionProblem::NewHeads& how :
         {AttentionProblem::NewHeads{128, 0, false, false}, {128, 0, false, true}}) {
      seed += 50;
      AttentionProblem p(c, *gpu, *cpu, seed), other(c, *gpu, *cpu, seed);
      EXPECT_EQ(p.decode(true, how, seed, false), other.decode(true, how, seed, true)) << c.name();
      EXPECT_EQ(p.gpu_bytes(), other.gpu_bytes()) << c.name();
    }
  }
}

// Attention may write its output in the input form of the following GEMMs: the bits are the same as
// for input from elsewhere.
TEST_F(CudaAttention, EndsInWhatProductsRead) {
  using ops::KvType;
  constexpr int64_t kOut = 48;
  const std::vector<cases::AttentionCase> all = {
      {{KvType::kF16, 2, 128, 128, false}, 8, 0.0f, 0, false, {{400, 1}, {1, 1}, {77, 1}}},
      {{KvType::kF16, 8, 128, 128, false}, 32, 0.0f, 0, true, {{130, 1}}},
      {{KvType::kF16, 1, 128, 128, false}, 12, 0.0f, 0, true, {{300, 1}, {511, 1}}},
      {{KvType::kF16, 2, 128, 128, false}, 8, 30.0f, 0, false, {{2100, 1}, {513, 1}, {5, 1}}},
      {{KvType::kF16, 1, 128, 128, false}, 12, 0.0f, 900, false, {{3000, 1}}},
      {{KvType::kF16, 1, 256, 256, false}, 4, 0.0f, 0, false, {{200, 1}, {700, 1}}},
      {{KvType::kF16, 2, 64, 64, false}, 8, 0.0f, 0, false, {{200, 1}, {700, 1}}},
      {{KvType::kFP8, 2, 128, 128, false}, 8, 0.0f, 0, false, {{400, 1}, {1300, 1}, {77, 1}}},
      {{KvType::kFP8, 8, 128, 128, false}, 32, 0.0f, 0, true, {{130, 1}}},
      {{KvType::kInt8, 8, 128, 128, false}, 32, 0.0f, 0, true, {{900, 1}}},
      {{KvType::kFP8, 1, 128, 128, false}, 12, 0.0f, 900, false, {{3000, 1}}},
      {{KvType::kFP8, 1, 256, 256, false}, 16, 0.0f, 0, true, {{200, 1}, {700, 1}}},
      {{KvType::kF16, 2, 128, 128, false}, 8, 0.0f, 0, false, {{1000, 1000}, {129, 129}, {1, 1}}},
      {{KvType::kF16, 1, 128, 128, false}, 7, 0.0f, 0, true, {{641, 300}, {383, 200}}},
      {{KvType::kF16, 2, 64, 64, false}, 6, 0.0f, 0, false, {{513, 513}, {640, 5}}},
      {{KvType::kFP8, 2, 128, 128, false}, 8, 0.0f, 0, false, {{777, 600}, {255, 17}}},
      {{KvType::kF16, 1, 256, 256, false}, 4, 0.0f, 0, false, {{400, 130}}},
      {{KvType::kF16, 1, 96, 96, false}, 4, 0.0f, 0, false, {{300, 70}}},
      {{KvType::kF16, 2, 128, 128, false}, 8, 0.0f, 0, false, {{9, 1}, {1300, 1}, {641, 300}}},
      {{KvType::kFP8, 2, 128, 128, false}, 8, 0.0f, 0, true, {{400, 1}, {641, 300}, {255, 17}}},
      {{KvType::kF16, 2, 64, 64, false}, 8, 0.0f, 90, false, {{200, 1}, {700, 1}, {513, 200}}},
      {{KvType::kF16, 1, 96, 96, false}, 4, 0.0f, 0, false, {{301, 1}, {300, 70}}},
      {{KvType::kBF16, 2, 128, 128, false}, 8, 0.0f, 0, true, {{400, 1}, {641, 300}, {255, 17}}},
      {{KvType::kInt8, 2, 128, 128, false}, 8, 0.0f, 0, true, {{400, 1}, {641, 300}, {255, 17}}},
      {{KvType::kInt8, 1, 256, 256, false}, 16, 0.0f, 0, true, {{200, 1}, {700, 1}}},
      {{KvType::kInt4, 2, 128, 128, false}, 8, 0.0f, 0, true, {{400, 1}, {641, 300}, {255, 17}}},
      {{KvType::kK8V4, 2, 64, 64, false}, 8, 0.0f, 0, false, {{200, 1}, {700, 1}}},
  };
  uint32_t seed = 12000;
  for (const cases::AttentionCase& c : all) {
    AttentionProblem p(c, *gpu, *cpu, seed += 50);
    const int64_t cols = int64_t{c.heads} * c.shape.value_dim;
    std::vector<AttentionProblem::Part> parts;
    int64_t rows = 0;
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      parts.push_back({s, 0, c.sequences[s].queries});
      rows += c.sequences[s].queries;
    }
    for (const quant::Format format : {quant::Format::kFP8, quant::Format::kBF16}) {
      const Stored its = stored(format, kOut, cols, seed + 7);
      const auto w = gpu->pack(format, its.rows, cols);
      ASSERT_TRUE(w.ok());
      const auto product = [&](const Matrix& x) {
        DeviceFloats out(*gpu, static_cast<size_t>(rows * kOut));
        const ops::Product q{&*w, out.matrix(rows, kOut), nullptr, 1.0f, false};
        gpu->matmul(x, {&q, 1});
        return out.get();
      };
      const std::vector<float> got = p.attend(true, parts, &*w);
      DeviceFloats apart(*gpu, p.attend(true, parts));
      EXPECT_EQ(got, product(apart.matrix(rows, cols)))
          << quant::info(format).name << " " << c.name();
    }
  }
}

}  // namespace
}  // namespace freshet
