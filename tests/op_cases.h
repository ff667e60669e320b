// The shapes that op_conformance_test checks and that the op benchmark times.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ops/attention.h"
#include "quant/format.h"

namespace freshet::cases {

struct AttentionCase {
  ops::KvShape shape;
  int heads = 0;
  float softcap = 0.0f;
  int window = 0;
  bool sinks = false;
  struct Sequence {
    int context;  // tokens; the last `queries` of them are queries
    int queries;
  };
  std::vector<Sequence> sequences;

  std::string name() const {
    std::string s = fmt::format("{} heads={}/{} key={} value={}", ops::name_of(shape.type), heads,
                                shape.kv_heads, shape.key_dim, shape.value_dim);
    if (shape.value_is_key_prefix) s += " mla";
    if (softcap > 0.0f) s += fmt::format(" softcap={}", softcap);
    if (window > 0) s += fmt::format(" window={}", window);
    if (sinks) s += " sinks";
    for (const Sequence& q : sequences) s += fmt::format(" {}@{}", q.queries, q.context);
    return s;
  }
};

// Shapes of real models, and random ones around the edges of blocks, tiles, splits and windows.
inline std::vector<AttentionCase> attention_cases() {
  using ops::KvType;
  const std::vector<AttentionCase::Sequence> mixed = {{1, 1}, {300, 1}, {37, 37}, {530, 20}};
  std::vector<AttentionCase> all = {
      {{KvType::kF16, 2, 64, 64, false}, 8, 0.0f, 0, false, mixed},       // Llama 3.2
      {{KvType::kBF16, 1, 128, 128, false}, 8, 0.0f, 0, false, mixed},    // Qwen 2.5
      {{KvType::kF32, 2, 96, 96, false}, 2, 0.0f, 0, false, mixed},       // Phi 3
      {{KvType::kF16, 1, 256, 256, false}, 2, 50.0f, 300, false, mixed},  // Gemma 2
      {{KvType::kF16, 2, 64, 64, false}, 16, 0.0f, 128, true, mixed},     // GPT-OSS
      {{KvType::kBF16, 2, 192, 128, false}, 2, 0.0f, 0, false, mixed},    // DeepSeek, expanded
      {{KvType::kBF16, 1, 576, 512, true}, 16, 0.0f, 0, false, {{280, 1}, {40, 3}}},  // DeepSeek
      {{KvType::kF16, 1, 40, 32, true}, 4, 0.0f, 0, false, mixed},
      {{KvType::kF32, 1, 24, 24, false}, 3, 0.0f, 20, true, mixed},
      {{KvType::kF16, 1, 8, 8, false}, 1, 0.0f, 1, false, mixed},
      {{KvType::kFP8, 2, 128, 128, false}, 8, 0.0f, 0, false, mixed},
      {{KvType::kFP8, 1, 72, 40, true}, 6, 0.0f, 200, false, mixed},
      {{KvType::kInt8, 2, 64, 64, false}, 8, 0.0f, 0, false, mixed},
      {{KvType::kInt8, 1, 128, 128, false}, 7, 0.0f, 0, true, mixed},
      {{KvType::kInt8, 3, 256, 128, false}, 6, 50.0f, 300, false, mixed},
      {{KvType::kInt8, 1, 576, 512, true}, 16, 0.0f, 0, false, {{280, 1}, {40, 3}}},
      {{KvType::kInt8, 1, 72, 40, true}, 6, 0.0f, 200, true, mixed},
      {{KvType::kInt8, 1, 64, 64, false}, 8, 0.0f, 0, false, {{1500, 1}}},
      {{KvType::kInt4, 2, 64, 64, false}, 8, 0.0f, 0, false, mixed},
      {{KvType::kInt4, 1, 128, 128, false}, 7, 0.0f, 0, true, mixed},
      {{KvType::kInt4, 3, 256, 128, false}, 6, 50.0f, 300, false, mixed},
      {{KvType::kInt4, 2, 80, 80, false}, 6, 0.0f, 200, true, mixed},
      {{KvType::kInt4, 1, 64, 64, false}, 8, 0.0f, 0, false, {{1500, 1}}},
      {{KvType::kInt4, 1, 72, 40, false}, 70, 0.0f, 0, false, {{600, 2}}},
      {{KvType::kK8V4, 2, 64, 64, false}, 8, 0.0f, 0, false, mixed},
      {{KvType::kK8V4, 1, 128, 128, false}, 5, 0.0f, 100, true, mixed},
      {{KvType::kK8V4, 2, 104, 24, false}, 6, 30.0f, 0, false, mixed},
      {{KvType::kF16, 4, 64, 64, false}, 8, 0.0f, 0, false, {{1500, 1}}},  // few tiles, many splits
      // A query across two tiles.
      {{KvType::kF16, 1, 64, 64, false}, 70, 0.0f, 0, false, {{600, 2}}},
  };
  std::mt19937 rng(20240);
  const auto pick = [&](std::vector<int> v) { return v[rng() % v.size()]; };
  for (int i = 0; i < 40; ++i) {
    AttentionCase c;
    c.shape.type = static_cast<KvType>(rng() % 5);
    c.shape.value_is_key_prefix = rng() % 5 == 0;
    c.shape.kv_heads = c.shape.value_is_key_prefix ? 1 : pick({1, 2, 3});
    c.heads = c.shape.kv_heads * pick({1, 2, 3, 4, 5, 7, 8});
    c.shape.key_dim = pick({8, 16, 24, 32, 40, 64, 80, 96, 112, 128, 256});
    c.shape.value_dim = rng() % 2 != 0 ? c.shape.key_dim : pick({8, 16, 24, 40, 64, 72, 128});
    if (c.shape.value_is_key_prefix) {
      c.shape.value_dim = std::min(c.shape.value_dim, c.shape.key_dim);
    }
    c.softcap = rng() % 4 == 0 ? 20.0f : 0.0f;
    c.window = rng() % 2 != 0 ? pick({1, 5, 16, 100, 256, 257, 400}) : 0;
    c.sinks = rng() % 3 == 0;
    for (int s = pick({1, 2, 4}); s > 0; --s) {
      const int context = pick({1, 15, 16, 17, 100, 255, 256, 257, 511, 513, 700});
      const int queries = std::min(context, pick({1, 1, 2, 5, 16, 33, 70}));
      c.sequences.push_back({context, queries});
    }
    all.push_back(c);
  }
  // The same for codes of 4 bits.
  for (size_t i = all.size() - 24, end = all.size(); i < end; ++i) {
    AttentionCase c = all[i];
    c.shape.type = rng() % 2 != 0 ? KvType::kInt4 : KvType::kK8V4;
    c.shape.value_is_key_prefix = false;
    all.push_back(c);
  }
  return all;
}

struct MatmulCase {
  int64_t tokens, rows, cols;
};

// Edges of panels (16 rows), of token tiles and of blocks; cols also fits block sizes of 256.
inline std::vector<MatmulCase> matmul_cases() {
  return {{1, 16, 256},  {1, 40, 768},  {2, 17, 512},   {3, 33, 256},  {5, 64, 512},
          {8, 16, 1024}, {9, 48, 256},  {16, 32, 512},  {17, 1, 256},  {31, 100, 256},
          {33, 80, 512}, {64, 48, 256}, {70, 130, 512}, {130, 35, 256}};
}

// Row lengths around the widths of vectors.
inline std::vector<int64_t> row_lengths() {
  return {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 257, 1000, 4096};
}

}  // namespace freshet::cases
