#include "backend/cuda/kernel_names.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "backend/cuda/attention/attention_rows.h"
#include "backend/cuda/gemm/gemm_rows.h"
#include "backend/cuda/moe/moe_rows.h"

namespace freshet::cuda {
namespace {

// The largest M of a row of the table below: the choice of kernels does not change beyond it.
constexpr int64_t kManyTokens = 16384;
constexpr int64_t kTokens[] = {1, 8, 16, 32, 64, 128, kManyTokens};

struct Named {
  std::string_view name;
  int capability;
};
template <class Row, size_t N>
std::vector<Named> names_of(const Row (&rows)[N]) {
  std::vector<Named> names;
  for (const Row& row : rows) names.push_back({row.name, row.capability});
  return names;
}
struct Op {
  std::string_view name;
  std::vector<Named> rows;
};
// In the order of ForcedOp.
const std::array<Op, kForcedOps>& ops() {
  static const std::array<Op, kForcedOps> kOps = {{{"matmul", names_of(kGemmRows)},
                                                   {"swiglu", names_of(kSwigluRows)},
                                                   {"attention", names_of(kAttentionRows)},
                                                   {"moe", names_of(kMoeRows)}}};
  return kOps;
}

GemmProblem one_weight(Code code, int64_t rows, int64_t cols, int64_t tokens) {
  GemmProblem p;
  p.tokens = tokens;
  p.aligned = cols % 4 == 0;
  p.add({code, rows, cols});
  return p;
}

}  // namespace

Result<ForcedRows> forced_rows(std::span<const std::string> texts) {
  ForcedRows forced = kNoForcedRows;
  for (const std::string& text : texts) {
    const size_t equals = std::min(text.find('='), text.size());
    const std::string_view op = std::string_view(text).substr(0, equals);
    const std::string_view name = std::string_view(text).substr(std::min(equals + 1, text.size()));
    const auto known = std::ranges::find(ops(), op, &Op::name);
    if (known == ops().end()) {
      return invalid_argument(
          "cannot force kernel \"{}\" on a GPU: write KIND=NAME with a KIND of matmul, swiglu, "
          "attention or moe, or use --device cpu",
          text);
    }
    const auto row = std::ranges::find(known->rows, name, &Named::name);
    if (row == known->rows.end()) {
      std::string all;
      for (const Named& n : known->rows) all += fmt::format(" {}", n.name);
      return invalid_argument(
          "no kernel {} for {} on a GPU; known:{}; kernels of the processor need --device cpu",
          name, op, all);
    }
    forced[static_cast<size_t>(known - ops().begin())] =
        static_cast<int>(row - known->rows.begin());
  }
  return forced;
}

Status runs_on(const ForcedRows& rows, const DeviceLimits& limits, std::string_view device) {
  for (size_t op = 0; op < rows.size(); ++op) {
    if (rows[op] < 0) continue;
    const Named& row = ops()[op].rows[static_cast<size_t>(rows[op])];
    const bool exact = row.capability == 90;
    if (exact ? limits.capability == 90 : limits.capability >= row.capability) continue;
    return unsupported(
        "cannot force kernel {}={}: it needs compute capability {}.{}{}, {} has {}.{}",
        ops()[op].name, row.name, row.capability / 10, row.capability % 10, exact ? "" : " or more",
        device, limits.capability / 10, limits.capability % 10);
  }
  return {};
}

Status takes_weight(const ForcedRows& forced, const DeviceLimits& limits, Code code, int64_t rows,
                    int64_t cols) {
  if (forced[kForcedMatmul] < 0) return {};
  const GemmRow& row = kGemmRows[forced[kForcedMatmul]];
  const bool two_formats = forced[kForcedMatmul] <= kGemmPairM65;
  if (two_formats || (row.formats & bit(code)) == 0) return {};
  const auto takes = [&](int64_t tokens) {
    return fits(row, limits, one_weight(code, rows, cols, tokens));
  };
  if (takes(row.m_min) || std::ranges::any_of(kTokens, takes)) return {};
  return unsupported("cannot force kernel matmul={} for a weight of {} x {}: it takes {}", row.name,
                     rows, cols, row.condition);
}

std::string gemm_names(const ForcedRows& forced, const DeviceLimits& limits, Code code,
                       int64_t rows, int64_t cols) {
  std::string text;
  int64_t from = 1;
  int last = -2;
  const auto end = [&](int64_t upto) {
    if (last == -2) return;
    const std::string_view name = last >= 0 ? kGemmRows[last].name : "none";
    const std::string range = upto == kManyTokens ? fmt::format("{}+", from)
                              : upto == from      ? fmt::format("{}", from)
                                                  : fmt::format("{}-{}", from, upto);
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", range, name);
    from = upto + 1;
  };
  int64_t before = 0;
  for (const int64_t tokens : kTokens) {
    const int row =
        choose(kGemmRows, limits, one_weight(code, rows, cols, tokens), forced[kForcedMatmul]);
    if (row != last) end(before);
    last = row;
    before = tokens;
  }
  end(before);
  return text;
}

}  // namespace freshet::cuda
