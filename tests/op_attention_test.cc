// Every attention row that this CPU can run, against the reference row; and batch invariance: a
// query's result has the same bits alone, in a batch, in a chunk, and for any thread pool.
#include <algorithm>
#include <limits>
#include <numeric>

#include "backend/cpu/attention_row.h"
#include "tensor/dtype.h"
#include "tests/op_cases.h"
#include "tests/op_test_util.h"

#ifdef FRESHET_EMULATED_ATTENTION
namespace freshet::cpu {
extern const AttentionIsa kAttentionEmulated;  // testing/attention_emulated_avx512vnni.cc
}
#endif

namespace freshet {
namespace {

// The rows of the CPU, and emulated tiles.
const ops::KernelTable& kernels() {
  static const std::vector<ops::AttentionKernel> kRows = [] {
    const auto rows = cpu::kernels().attention;
    std::vector<ops::AttentionKernel> all(rows.begin(), rows.end());
#ifdef FRESHET_EMULATED_ATTENTION
    all.push_back(
        cpu::row<cpu::kAttentionEmulated>("attention.emulated", ops::CpuIsa::kAvx512Vnni));
#endif
    return all;
  }();
  static const ops::KernelTable kTable = [] {
    ops::KernelTable table = cpu::kernels();
    table.attention = kRows;
    return table;
  }();
  return kTable;
}

using cases::AttentionCase;
using ops::AttentionBatch;
using ops::AttentionParams;
using ops::kBlockTokens;
using test::Guarded;

// Keys, values and queries of a case, and a cache of shuffled blocks.
struct Problem {
  explicit Problem(const AttentionCase& attention_case, uint32_t seed) : c(attention_case) {
    std::mt19937 rng(seed);
    int64_t total = 0;
    for (const auto& s : c.sequences) {
      stride = std::max<int64_t>(stride, (s.context + kBlockTokens - 1) / kBlockTokens);
      total += s.context;
      tokens += s.queries;
    }
    const auto kv = static_cast<size_t>(total * c.shape.kv_heads);
    keys = test::random_floats(kv * static_cast<size_t>(c.shape.key_dim), seed + 1);
    values = test::random_floats(kv * static_cast<size_t>(c.shape.value_dim), seed + 2);
    const auto q_floats = static_cast<size_t>(tokens * c.heads * c.shape.key_dim);
    queries = test::random_floats(q_floats, seed + 3);
    sinks = test::random_floats(static_cast<size_t>(c.heads), seed + 4, 2.0f);
    params = {c.heads, 1.0f / std::sqrt(static_cast<float>(c.shape.key_dim)), c.softcap, c.window,
              c.sinks ? sinks.data() : nullptr};
    blocks = static_cast<int32_t>(c.sequences.size()) * static_cast<int32_t>(stride) + 3;
    std::vector<int32_t> ids(static_cast<size_t>(blocks));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng);
    tables.assign(static_cast<size_t>(stride) * c.sequences.size(), -1);
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      for (int64_t b = first_block(s); b * kBlockTokens < c.sequences[s].context; ++b) {
        tables[s * static_cast<size_t>(stride) + static_cast<size_t>(b)] = ids.back();
        ids.pop_back();
      }
    }
  }

  // The first block visible to any query of the sequence.
  int64_t first_block(size_t s) const {
    const auto& q = c.sequences[s];
    const int seen = c.window > 0 ? std::max(0, q.context - q.queries - c.window + 1) : 0;
    return seen / kBlockTokens;
  }
  Matrix rows_of(std::vector<float>& v, int64_t first, int64_t count, int64_t cols) const {
    return {v.data() + first * cols, count, cols, cols};
  }

  // Fills the cache with NaN, then stores each sequence in two steps.
  void fill(ops::Ops& o, const ops::KvView& cache) {
    std::memset(cache.data, 0xff, c.shape.block_bytes() * static_cast<size_t>(blocks));
    int64_t first = 0;
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      const int32_t context = c.sequences[s].context;
      const auto from = static_cast<int32_t>(first_block(s) * kBlockTokens);
      const int32_t middle = from + (context - from) / 2;
      for (const auto& [a, b] : {std::pair{from, middle}, std::pair{middle, context}}) {
        if (a == b) continue;
        const int32_t starts[] = {0, b - a};
        const AttentionBatch batch{
            starts, {&b, 1}, tables.data() + static_cast<int64_t>(s) * stride, stride};
        o.store_kv(cache,
                   rows_of(keys, first + a, b - a, int64_t{c.shape.kv_heads} * c.shape.key_dim),
                   rows_of(values, first + a, b - a, int64_t{c.shape.kv_heads} * c.shape.value_dim),
                   batch);
      }
      first += context;
    }
  }

  struct Part {
    size_t sequence;
    int32_t skip, queries;  // of the sequence's queries
  };
  // Runs attention for the parts as one batch; out has one row per query.
  void attend(ops::Ops& o, const ops::KvView& cache, const std::vector<Part>& parts, float* out) {
    std::vector<int32_t> starts = {0}, contexts, part_tables;
    std::vector<float> q;
    const int64_t q_cols = int64_t{c.heads} * c.shape.key_dim;
    for (const Part& p : parts) {
      const auto& s = c.sequences[p.sequence];
      int64_t first = p.skip;
      for (size_t i = 0; i < p.sequence; ++i) first += c.sequences[i].queries;
      q.insert(q.end(), queries.begin() + first * q_cols,
               queries.begin() + (first + p.queries) * q_cols);
      starts.push_back(starts.back() + p.queries);
      contexts.push_back(s.context - s.queries + p.skip + p.queries);
      const auto table = tables.begin() + static_cast<int64_t>(p.sequence) * stride;
      part_tables.insert(part_tables.end(), table, table + stride);
    }
    const int64_t out_cols = int64_t{c.heads} * c.shape.value_dim;
    o.attention({out, starts.back(), out_cols, out_cols}, {q.data(), starts.back(), q_cols, q_cols},
                cache, {starts, contexts, part_tables.data(), stride}, params);
  }

  size_t out_floats() const { return static_cast<size_t>(tokens * c.heads * c.shape.value_dim); }
  std::unique_ptr<ops::Ops> make(ThreadPool& pool, const std::string& row) const {
    ops::OpsOptions options;
    options.force_kernels = {"attention=" + row};
    auto o = std::move(ops::Ops::create(pool, kernels(), test::machine(), options)).value();
    EXPECT_EQ(o->attention_row(c.shape), row);
    EXPECT_TRUE(o->set_scratch(
                     o->scratch_bytes({.tokens = tokens,
                                       .max_cols = 1,
                                       .max_rows = 1,
                                       .heads = c.heads,
                                       .max_head_dim = std::max(c.shape.key_dim, c.shape.value_dim),
                                       .max_context = stride * kBlockTokens}))
                    .ok());
    return o;
  }

  AttentionCase c;
  AttentionParams params;
  std::vector<float> keys, values, queries, sinks;
  std::vector<int32_t> tables;
  int64_t stride = 0;
  int64_t tokens = 0;
  int32_t blocks = 0;
};

// Tiles support only some shapes.
bool supported(const std::string& name, const ops::KvShape& shape) {
  for (const ops::AttentionKernel& row : kernels().attention) {
    if (row.name == name) return row.supports(shape, {});
  }
  return false;
}

class AttentionConformance : public testing::TestWithParam<const char*> {};

std::vector<const char*> runnable_rows() {
  std::vector<const char*> names;
  for (const ops::AttentionKernel& row : kernels().attention) {
    if (test::machine().has(row.isa)) names.push_back(row.name);
  }
  return names;
}
INSTANTIATE_TEST_SUITE_P(Rows, AttentionConformance, testing::ValuesIn(runnable_rows()),
                         [](const auto& i) {
                           std::string s = i.param;
                           std::replace(s.begin(), s.end(), '.', '_');
                           return s;
                         });

std::vector<Problem::Part> whole(const AttentionCase& c) {
  std::vector<Problem::Part> parts;
  for (size_t s = 0; s < c.sequences.size(); ++s) parts.push_back({s, 0, c.sequences[s].queries});
  return parts;
}

std::vector<float> attended(const AttentionCase& c, uint32_t seed, ThreadPool& pool,
                            const std::string& row) {
  Problem p(c, seed);
  const auto o = p.make(pool, row);
  Guarded memory(c.shape.block_bytes() * static_cast<size_t>(p.blocks));
  Guarded out(p.out_floats() * sizeof(float));
  const ops::KvView cache{c.shape, memory.data(), p.blocks};
  p.fill(*o, cache);
  p.attend(*o, cache, whole(c), out.floats());
  return {out.floats(), out.floats() + p.out_floats()};
}
float farthest(const std::vector<float>& a, const std::vector<float>& b) {
  float worst = 0.0f;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(b[i])) return std::numeric_limits<float>::infinity();
    worst = std::max(worst, std::abs(a[i] - b[i]));
  }
  return worst;
}

// Tiles convert F16 to 16-bit integers: they may lose part of the precision that F16 itself loses.
TEST_P(AttentionConformance, AgreesWithTheReference) {
  ThreadPool pool(2, false);
  uint32_t seed = 1;
  const std::string name = GetParam();
  const bool whole_numbers = name == "attention.amx" || name == "attention.emulated";
  for (const AttentionCase& c : cases::attention_cases()) {
    if (!supported(name, c.shape)) continue;
    SCOPED_TRACE(c.name());
    const std::vector<float> want = attended(c, seed += 10, pool, "attention.reference");
    float most = 1e-5f;
    if (whole_numbers) {
      AttentionCase exact = c;
      exact.shape.type = ops::KvType::kF32;
      most = 0.75f * farthest(want, attended(exact, seed, pool, "attention.reference"));
    }
    ASSERT_LT(farthest(want, attended(c, seed, pool, name)), most);
  }
}

// A query of a single token returns the token's value, so INT8 can be read back. The expected
// result is llama.cpp's q8_0, except that the codes use the scale as stored.
TEST_P(AttentionConformance, Int8KeepsWholeNumbersAndAScaleOf32) {
  if (!supported(GetParam(), {ops::KvType::kInt8, 2, 104, 104, false})) GTEST_SKIP();
  constexpr int kDim = 104;  // three whole groups of 32, and one of 8
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  ThreadPool pool(1);
  for (const char* row : {"attention.reference", GetParam()}) {
    AttentionCase c{{ops::KvType::kInt8, 2, kDim, kDim, false}, 2, 0.0f, 0, false, {{1, 1}}};
    Problem p(c, 5);
    std::mt19937 rng(6);
    for (int round = 0; round < 200; ++round) {
      for (size_t i = 0; i < p.values.size(); ++i) {
        const size_t group = i % kDim / 32 + i / kDim * 4;
        const float size = std::ldexp(1.0f, static_cast<int>((group * 7 + round) % 40) - 25);
        p.values[i] = size * (static_cast<float>(rng() % 20001) / 10000.0f - 1.0f);
        if (round % 7 == 1 && group == 2) p.values[i] = 0.0f;
      }
      if (round == 3) p.values[5] = kInfinity;
      if (round == 4) p.values[40] = -kInfinity;
      const auto o = p.make(pool, row);
      Guarded memory(c.shape.block_bytes() * static_cast<size_t>(p.blocks));
      Guarded out(p.out_floats() * sizeof(float));
      const ops::KvView cache{c.shape, memory.data(), p.blocks};
      p.fill(*o, cache);
      p.attend(*o, cache, whole(c), out.floats());
      for (size_t i = 0; i < p.values.size(); ++i) {
        const size_t from = i / kDim * kDim + i % kDim / 32 * 32;
        const size_t to = std::min(from + 32, i / kDim * kDim + kDim);
        float most = 0.0f;
        for (size_t j = from; j < to; ++j) most = std::max(most, std::abs(p.values[j]));
        const float scale = f16_to_f32(f32_to_f16(std::min(most / 127.0f, 65504.0f)));
        const float code =
            scale > 0.0f ? std::clamp(std::nearbyint(p.values[i] * (1.0f / scale)), -127.0f, 127.0f)
                         : 0.0f;
        ASSERT_EQ(out.floats()[i], code * scale) << row << " at " << i << " of " << p.values[i];
      }
    }
  }
}

// A NaN token affects only the queries that see it.
TEST_P(AttentionConformance, Int8KeepsNotANumber) {
  if (!supported(GetParam(), {ops::KvType::kInt8, 1, 64, 64, false})) GTEST_SKIP();
  ThreadPool pool(1);
  for (const char* row : {"attention.reference", GetParam()}) {
    AttentionCase c{{ops::KvType::kInt8, 1, 64, 64, false}, 1, 0.0f, 0, false, {{40, 1}, {9, 9}}};
    Problem p(c, 7);
    p.values[20 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
    const auto o = p.make(pool, row);
    Guarded memory(c.shape.block_bytes() * static_cast<size_t>(p.blocks));
    Guarded out(p.out_floats() * sizeof(float));
    const ops::KvView cache{c.shape, memory.data(), p.blocks};
    p.fill(*o, cache);
    p.attend(*o, cache, whole(c), out.floats());
    for (size_t i = 0; i < p.out_floats(); ++i) {
      EXPECT_EQ(std::isnan(out.floats()[i]), i < 32) << row << " at " << i;
    }
  }
}

TEST_P(AttentionConformance, F16KeepsNotANumberAndSaturates) {
  const AttentionCase c{
      {ops::KvType::kF16, 1, 64, 64, false}, 1, 0.0f, 0, false, {{40, 1}, {9, 9}}};
  if (!supported(GetParam(), c.shape)) GTEST_SKIP();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  ThreadPool pool(1);
  const auto attended = [&](Problem& p) {
    const auto o = p.make(pool, GetParam());
    Guarded memory(c.shape.block_bytes() * static_cast<size_t>(p.blocks));
    Guarded out(p.out_floats() * sizeof(float));
    const ops::KvView cache{c.shape, memory.data(), p.blocks};
    p.fill(*o, cache);
    p.attend(*o, cache, whole(c), out.floats());
    return std::vector<float>(out.floats(), out.floats() + p.out_floats());
  };
  for (std::vector<float> Problem::* const where :
       {&Problem::keys, &Problem::values, &Problem::queries}) {
    for (const float number : {kNaN, kInfinity, -kInfinity}) {
      Problem p(c, 7);
      const bool query = where == &Problem::queries;
      (p.*where)[(query ? 0 : 20 * 64) + 3] = number;
      const std::vector<float> out = attended(p);
      for (size_t i = 64; i < out.size(); ++i) ASSERT_TRUE(std::isfinite(out[i])) << i;
      if (std::isnan(number)) {
        EXPECT_TRUE(std::isnan(out[3]));
      } else if (!query) {
        for (size_t i = 0; i < 64; ++i) ASSERT_TRUE(std::isfinite(out[i])) << i;
      }
    }
  }
  Problem p(c, 8);  // zeros: queries with equal scores for all tokens
  std::fill(p.keys.begin(), p.keys.end(), 0.0f);
  std::fill(p.values.begin() + 64, p.values.end(), 0.0f);
  const std::vector<float> out = attended(p);
  for (size_t i = 0; i < 64; ++i) EXPECT_NEAR(out[i], p.values[i] / 40.0f, 1e-4f);
}

TEST_P(AttentionConformance, TheBatchNeverChangesAResult) {
  ThreadPool one(1), two(2, false), many(7, false);
  uint32_t seed = 2;
  for (const AttentionCase& c : cases::attention_cases()) {
    if (!supported(GetParam(), c.shape)) continue;
    SCOPED_TRACE(c.name());
    Problem p(c, seed += 10);
    const auto o = p.make(one, GetParam());
    Guarded memory(c.shape.block_bytes() * static_cast<size_t>(p.blocks));
    const ops::KvView cache{c.shape, memory.data(), p.blocks};
    p.fill(*o, cache);
    std::vector<float> want(p.out_floats()), got(p.out_floats());
    p.attend(*o, cache, whole(c), want.data());
    const auto expect_same = [&](const char* how) {
      ASSERT_EQ(0, std::memcmp(want.data(), got.data(), want.size() * sizeof(float))) << how;
      std::fill(got.begin(), got.end(), 0.0f);
    };
    // In a cache that another pool has written, with KV splits shared among workers.
    for (ThreadPool* pool : {&two, &many}) {
      const auto other = p.make(*pool, GetParam());
      p.fill(*other, cache);
      p.attend(*other, cache, whole(c), got.data());
      expect_same("pool");
    }
    // Every sequence in chunks of `chunk` queries, each chunk a batch of its own.
    const int64_t out_cols = int64_t{c.heads} * c.shape.value_dim;
    const auto with_splits = p.make(many, GetParam());
    for (const int chunk : {1, 7, 1000}) {
      int64_t first = 0;
      for (size_t s = 0; s < c.sequences.size(); ++s) {
        for (int q = 0; q < c.sequences[s].queries; q += chunk) {
          const int n = std::min(chunk, c.sequences[s].queries - q);
          p.attend(chunk == 7 ? *with_splits : *o, cache, {{s, q, n}},
                   got.data() + (first + q) * out_cols);
        }
        first += c.sequences[s].queries;
      }
      expect_same("chunks");
      if (HasFatalFailure()) return;
    }
  }
}

// A query that attends to [first, end) is the last token of a sequence of `end` tokens with a
// window of end - first, bit for bit. Ranges may end behind the query, and start in front of its
// window.
TEST_P(AttentionConformance, RangesAreWindowsOfOtherSequences) {
  ThreadPool pool(2, false), many(7, false);
  std::mt19937 rng(3);
  uint32_t seed = 3;
  for (AttentionCase c : cases::attention_cases()) {
    if (!supported(GetParam(), c.shape)) continue;
    SCOPED_TRACE(c.name());
    c.window = 0;
    Problem p(c, seed += 10);
    const auto o = p.make(pool, GetParam()), shared = p.make(many, GetParam());
    Guarded memory(c.shape.block_bytes() * static_cast<size_t>(p.blocks));
    const ops::KvView cache{c.shape, memory.data(), p.blocks};
    p.fill(*o, cache);
    const int64_t q_cols = int64_t{c.heads} * c.shape.key_dim;
    const int64_t out_cols = int64_t{c.heads} * c.shape.value_dim;
    const auto run = [&](ops::Ops& ops, const AttentionBatch& batch, int64_t first, int64_t count,
                         float* out) {
      ops.attention({out, count, out_cols, out_cols}, p.rows_of(p.queries, first, count, q_cols),
                    cache, batch, p.params);
    };
    std::vector<ops::KeyRange> ranges;
    std::vector<int32_t> starts = {0}, contexts;
    std::vector<float> want(p.out_floats()), got(p.out_floats());
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      const int32_t context = c.sequences[s].context, queries = c.sequences[s].queries;
      std::vector<int32_t> ends(static_cast<size_t>(queries)), firsts = ends;
      for (int32_t& end : ends) end = 1 + static_cast<int32_t>(rng() % context);
      std::sort(ends.begin(), ends.end());
      for (int32_t& first : firsts) first = static_cast<int32_t>(rng() % ends.front());
      std::sort(firsts.begin(), firsts.end());
      contexts.push_back(context);
      starts.push_back(starts.back() + queries);
      for (size_t q = 0; q < ends.size(); ++q) {
        ranges.push_back({firsts[q], ends[q]});
        const int32_t one[] = {0, 1};
        const int64_t row = starts[s] + static_cast<int64_t>(q);
        p.params.window = ends[q] - firsts[q];
        run(*o,
            {one, {&ends[q], 1}, p.tables.data() + static_cast<int64_t>(s) * p.stride, p.stride},
            row, 1, want.data() + row * out_cols);
      }
    }
    p.params.window = 0;
    for (ops::Ops* ops : {o.get(), shared.get()}) {
      run(*ops, {starts, contexts, p.tables.data(), p.stride, ranges}, 0, p.tokens, got.data());
      ASSERT_EQ(0, std::memcmp(want.data(), got.data(), want.size() * sizeof(float)));
    }
  }
}

}  // namespace
}  // namespace freshet
