// Operations on stored keys and values on a GPU: scores near the host's, the same whole numbers in
// any cut of the queries; moved slots bit for bit. Skipped without a GPU.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/cuda_fixture.h"

namespace freshet {
namespace {

using ops::KvType;
using test::DeviceFloats;
using test::random_floats;

constexpr int kGroup = 3, kTokens = 75, kScored = 41, kBlocks = 24, kStride = 6;
constexpr int64_t kSumStride = 96;

struct Layout {
  KvType type;
  int kv_heads, key_dim, value_dim;
  bool shared = false;
};
constexpr Layout kLayouts[] = {
    {KvType::kF16, 2, 128, 128},       {KvType::kF16, 2, 64, 96},
    {KvType::kBF16, 2, 72, 64},        {KvType::kFP8, 2, 64, 128},
    {KvType::kInt8, 2, 96, 64},        {KvType::kInt4, 2, 128, 64},
    {KvType::kInt4, 2, 48, 96},        {KvType::kK8V4, 2, 128, 128},
    {KvType::kF16, 1, 576, 512, true}, {KvType::kInt8, 1, 96, 64, true},
};

class CudaKeys : public test::CudaTest {
 protected:
  // A cache of one sequence, on the GPU or in the reference's memory.
  class Cache {
   public:
    Cache(ops::Ops& o, const Layout& s) : ops(o) {
      view.shape = {s.type, s.kv_heads, s.key_dim, s.value_dim, s.shared};
      const size_t bytes = view.shape.block_bytes() * kBlocks;
      memory_ =
          std::move(Buffer::allocate(bytes, o.device() != nullptr ? o.memory() : nullptr)).value();
      view.data = memory_.data();
      view.blocks = kBlocks;
    }
    // Stores rows of k and v in the blocks of `table`.
    void store(std::vector<float> k, std::vector<float> v, int32_t tokens,
               const std::vector<int32_t>& table) {
      const int32_t starts[] = {0, tokens};
      DeviceFloats keys(ops, k), values(ops, v);
      ops.store_kv(view, keys.matrix(tokens, std::ssize(k) / tokens),
                   values.matrix(tokens, std::ssize(v) / tokens),
                   {starts, {&tokens, 1}, table.data(), kStride});
      (void)keys.get();
    }
    std::vector<float> keys(const std::vector<int32_t>& table, int head, int32_t slots) {
      std::vector<float> out(static_cast<size_t>(slots * view.shape.key_dim));
      ops.read_keys(view, table, head, slots, out.data());
      return out;
    }
    // Attention of one query in the last slot.
    std::vector<float> attend(const std::vector<int32_t>& table, int32_t slots) {
      const int heads = view.shape.kv_heads * kGroup;
      const int64_t q_cols = int64_t{heads} * view.shape.key_dim;
      const int64_t out_cols = int64_t{heads} * view.shape.value_dim;
      DeviceFloats q(ops, random_floats(static_cast<size_t>(q_cols), 77));
      DeviceFloats out(ops, static_cast<size_t>(out_cols));
      const int32_t starts[] = {0, 1};
      ops.attention(out.matrix(1, out_cols), q.matrix(1, q_cols), view,
                    {starts, {&slots, 1}, table.data(), kStride}, {.heads = heads, .scale = 0.2f});
      return out.get();
    }

    ops::Ops& ops;
    ops::KvView view;

   private:
    Buffer memory_;
  };

  struct Cut {
    int32_t first, count;  // tokens
    bool apart = false;
    int times = 1;  // sequences with the same keys
  };
  // The sums of the last kScored tokens' queries, which come in these cuts.
  static std::vector<int64_t> scores(Cache& cache, const std::vector<int32_t>& table,
                                     const std::vector<float>& q, float cap,
                                     const std::vector<float>& sinks,
                                     const std::vector<Cut>& cuts) {
    const int kv = cache.view.shape.kv_heads, heads = kv * kGroup;
    const int64_t cols = int64_t{heads} * cache.view.shape.key_dim;
    DeviceFloats logits(cache.ops, sinks);
    std::vector<int64_t> sums(static_cast<size_t>(kv * kSumStride), 3);
    for (const Cut& cut : cuts) {
      std::vector<int32_t> starts{0}, lengths, tables;
      std::vector<float> rows;
      std::vector<ops::ScoredQueries> scored;
      const int32_t queries = std::min(cut.count, cut.first + cut.count - (kTokens - kScored));
      const int64_t each = int64_t{kv} * kSumStride * (cut.apart ? queries : 1);
      std::vector<int64_t> added(static_cast<size_t>(each * cut.times), 5);
      for (int i = 0; i < cut.times; ++i) {
        rows.insert(rows.end(), q.begin() + cut.first * cols,
                    q.begin() + (cut.first + cut.count) * cols);
        starts.push_back(starts.back() + cut.count);
        lengths.push_back(cut.first + cut.count);
        tables.insert(tables.end(), table.begin(), table.end());
        scored.push_back({i, queries, added.data() + i * each, kSumStride, cut.apart});
      }
      DeviceFloats matrix(cache.ops, rows);
      cache.ops.key_scores(matrix.matrix(starts.back(), cols), cache.view,
                           {starts, lengths, tables.data(), kStride},
                           {heads, 0.2f, cap, 0, cap > 0.0f ? logits.data() : nullptr}, scored);
      cache.ops.wait();
      cache.ops.take_scores();
      for (int i = 0; i < cut.times; ++i) {
        const auto begin = added.begin() + i * each;
        EXPECT_TRUE(std::equal(begin, begin + each, added.begin())) << "sequence " << i;
      }
      for (int64_t i = 0; i < each; ++i)
        sums[static_cast<size_t>(i % (kv * kSumStride))] += added[static_cast<size_t>(i)] - 5;
    }
    return sums;
  }

  static std::vector<int32_t> table_of(int first) {
    std::vector<int32_t> table(kStride);
    for (int i = 0; i < kStride; ++i) table[static_cast<size_t>(i)] = (first + i * 7) % kBlocks;
    return table;
  }
};

TEST_F(CudaKeys, ScoresAreTheHostsInAnyCut) {
  const std::vector<int32_t> table = table_of(3);
  for (const Layout& s : kLayouts) {
    const auto count = [&](int dim) { return static_cast<size_t>(kTokens * s.kv_heads * dim); };
    const std::vector<float> k = random_floats(count(s.key_dim), 1),
                             v = random_floats(count(s.value_dim), 2),
                             q = random_floats(count(s.key_dim) * kGroup, 3),
                             sinks = random_floats(static_cast<size_t>(s.kv_heads * kGroup), 4);
    Cache device(*gpu, s), host(*cpu, s);
    device.store(k, v, kTokens, table);
    host.store(k, v, kTokens, table);
    for (const float cap : {0.0f, 4.0f}) {
      SCOPED_TRACE(testing::Message() << ops::name_of(s.type) << " " << s.key_dim << " " << cap);
      const auto run = [&](const std::vector<Cut>& cuts) {
        return scores(device, table, q, cap, sinks, cuts);
      };
      const std::vector<int64_t> all = run({{0, kTokens}});
      const std::vector<int64_t> wanted = scores(host, table, q, cap, sinks, {{0, kTokens}});
      for (size_t i = 0; i < all.size(); ++i) {
        const auto sum = static_cast<double>(wanted[i]);
        EXPECT_NEAR(static_cast<double>(all[i]), sum, 4e-3 * sum + 0x1p18) << i;
      }
      EXPECT_EQ(run({{0, 40}, {40, 1}, {41, kTokens - 41}}), all);
      EXPECT_EQ(run({{0, 60}, {60, kTokens - 60, true}}), all);
      EXPECT_EQ(run({{0, kTokens, false, 70}}), all);
    }
  }
}

// So many rows that they run in pieces, of whole and of parted queries.
TEST_F(CudaKeys, ScoresOfManyRowsAreThoseOfFew) {
  constexpr int32_t kLong = 1200, kRows = 90, kLongBlocks = kLong / ops::kBlockTokens;
  constexpr int kHeads = 128;
  for (const Layout& s : {Layout{KvType::kF16, 1, 64, 64}, Layout{KvType::kInt4, 2, 64, 64}}) {
    ops::KvView view{{s.type, s.kv_heads, s.key_dim, s.value_dim}};
    const size_t bytes = view.shape.block_bytes() * kLongBlocks;
    Buffer memory = std::move(Buffer::allocate(bytes, gpu->memory())).value();
    view.data = memory.data();
    view.blocks = kLongBlocks;
    std::vector<int32_t> table(kLongBlocks);
    std::iota(table.begin(), table.end(), 0);
    const int64_t kv_cols = int64_t{s.kv_heads} * s.key_dim, cols = int64_t{kHeads} * s.key_dim;
    const std::vector<float> values = random_floats(static_cast<size_t>(kLong * kv_cols), 1);
    DeviceFloats k(*gpu, values), v(*gpu, values);
    const int32_t whole[] = {0, kLong}, length[] = {kLong};
    gpu->store_kv(view, k.matrix(kLong, kv_cols), v.matrix(kLong, kv_cols),
                  {whole, length, table.data(), kLongBlocks});
    const std::vector<float> q = random_floats(static_cast<size_t>(kRows * cols), 3);
    const auto run = [&](int32_t each) {
      std::vector<int64_t> sums(static_cast<size_t>(s.kv_heads * kLong));
      for (int32_t first = 0; first < kRows; first += each) {
        const int32_t starts[] = {0, each}, seen[] = {kLong - kRows + first + each};
        DeviceFloats rows(
            *gpu, std::vector<float>(q.begin() + first * cols, q.begin() + (first + each) * cols));
        const ops::ScoredQueries scored[] = {{0, each, sums.data(), kLong}};
        gpu->key_scores(rows.matrix(each, cols), view, {starts, seen, table.data(), kLongBlocks},
                        {kHeads, 0.2f}, scored);
        gpu->wait();
        gpu->take_scores();
      }
      return sums;
    };
    EXPECT_EQ(run(kRows), run(5)) << ops::name_of(s.type);
  }
}

// Blocks that are read later are written first.
TEST_F(CudaKeys, SlotsMoveBitForBit) {
  constexpr int32_t kKept = 37;
  const std::vector<int32_t> from = table_of(3);
  const std::vector<int32_t> to = {from[2], from[0], 5 * kBlocks % kBlocks + 1};
  for (const Layout& s : kLayouts) {
    SCOPED_TRACE(testing::Message() << ops::name_of(s.type) << " " << s.key_dim);
    const auto count = [&](int dim) { return static_cast<size_t>(kTokens * s.kv_heads * dim); };
    const std::vector<float> k = random_floats(count(s.key_dim), 1),
                             v = s.shared ? std::vector<float>(count(s.value_dim))
                                          : random_floats(count(s.value_dim), 2);
    Cache cache(*gpu, s), fresh(*gpu, s);
    cache.store(k, v, kTokens, from);
    std::vector<int32_t> kept;
    std::mt19937 random(9);
    for (int h = 0; h < s.kv_heads; ++h) {
      std::vector<int32_t> slots(kTokens);
      std::iota(slots.begin(), slots.end(), 0);
      std::shuffle(slots.begin(), slots.end(), random);
      std::sort(slots.begin(), slots.begin() + kKept);
      kept.insert(kept.end(), slots.begin(), slots.begin() + kKept);
    }
    const auto rows = [&](const std::vector<float>& x, int dim) {
      std::vector<float> out;
      for (int i = 0; i < kKept; ++i) {
        for (int h = 0; h < s.kv_heads; ++h) {
          const auto at =
              x.begin() + (kept[static_cast<size_t>(h * kKept + i)] * s.kv_heads + h) * dim;
          out.insert(out.end(), at, at + dim);
        }
      }
      return out;
    };
    const std::vector<int32_t> table = table_of(4);
    fresh.store(rows(k, s.key_dim), rows(v, s.value_dim), kKept, table);
    gpu->gather_kv(cache.view, from, to, kept.data(), kKept);
    std::vector<int32_t> moved = to;
    moved.resize(kStride, -1);
    for (int h = 0; h < s.kv_heads; ++h)
      EXPECT_EQ(cache.keys(to, h, kKept), fresh.keys(table, h, kKept)) << h;
    EXPECT_EQ(cache.attend(moved, kKept), fresh.attend(table, kKept));
  }
}

TEST_F(CudaKeys, ReadsTheKeysOfTheHost) {
  const std::vector<int32_t> table = table_of(3);
  for (const Layout& s : kLayouts) {
    SCOPED_TRACE(testing::Message() << ops::name_of(s.type) << " " << s.key_dim);
    const auto count = [&](int dim) { return static_cast<size_t>(kTokens * s.kv_heads * dim); };
    const std::vector<float> k = random_floats(count(s.key_dim), 1),
                             v = random_floats(count(s.value_dim), 2);
    Cache device(*gpu, s), host(*cpu, s);
    device.store(k, v, kTokens, table);
    host.store(k, v, kTokens, table);
    for (int h = 0; h < s.kv_heads; ++h) {
      const std::vector<float> wanted = host.keys(table, h, kTokens);
      expect_near(device.keys(table, h, kTokens), wanted, 2e-3f * largest(wanted), "keys");
    }
  }
}

}  // namespace
}  // namespace freshet
