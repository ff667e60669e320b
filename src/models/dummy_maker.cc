#include "models/dummy_maker.h"

#include <cstddef>
#include <cstring>

#include "ops/device.h"
#include "quant/fp8.h"
#include "tensor/dtype.h"

namespace freshet::models {
namespace {

constexpr int64_t kPoolRows = 64;
constexpr int64_t kTokenRows = 2048;  // of embeddings and heads: few of many tokens are alike

// As FP8 checkpoints are published: a scale a row.
void one_scale(uint8_t* row, int64_t cols) {
  constexpr size_t kBytes = sizeof(quant::FP8::Block), kScale = offsetof(quant::FP8::Block, scale);
  for (int64_t b = 1; b < cols / quant::FP8::kBlockSize; ++b) {
    std::memcpy(row + static_cast<size_t>(b) * kBytes + kScale, row + kScale, sizeof(float));
  }
}

uint64_t next(uint64_t& state) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 33;
}

float number(uint64_t& state) {
  return 0.07f * (static_cast<float>(next(state) % 65536) / 65536.0f - 0.5f);
}

}  // namespace

Status DummyMaker::matrix(ops::Weight& out, const std::string& name, Role role, int64_t rows,
                          int64_t cols, Fill fill, ops::Use use) {
  const bool head = role == Role::kHead || (role == Role::kEmbedding && spec_.tied_embeddings);
  return matrix(out, name, format_(role, layer_, cols, head), rows, cols, fill, use);
}

Status DummyMaker::matrix(ops::Weight& out, const std::string& name, quant::Format format,
                          int64_t rows, int64_t cols, Fill fill, ops::Use use) {
  if (quant::info(format).encode == nullptr) {
    return unsupported("random weights of type {}: nothing here writes it",
                       quant::info(format).name);
  }
  if (count_only_) {
    const ops::Device* const device = ops_.device();
    bytes_ += device != nullptr ? static_cast<size_t>(device->packed_bytes(format, rows, cols, use))
                                : static_cast<size_t>(rows) * quant::row_bytes(format, cols);
    return {};
  }
  const std::vector<uint8_t>& pool = pool_of(format, rows, cols, fill);
  const size_t bytes = quant::row_bytes(format, cols);
  std::vector<const uint8_t*> pointers(static_cast<size_t>(rows));
  const size_t pool_rows = pool.size() / bytes;
  for (size_t i = 0; i < pointers.size(); ++i)
    pointers[i] = pool.data() + (fill == Fill::kPlain ? next(state_) : i) % pool_rows * bytes;
  FRESHET_ASSIGN_OR_RETURN(out, ops_.pack(format, pointers, cols, ops::Ops::kNoLook, use));
  out.name = name;
  out.id = static_cast<int32_t>(infos_.size());
  infos_.push_back({name, format, rows, cols, out.packed.size(), ops_.kernel_names(out)});
  return {};
}

Status DummyMaker::vector(Vector& out, int64_t size, float value) {
  if (count_only_) {
    bytes_ += sizeof(float) * static_cast<size_t>(size);
    return {};
  }
  FRESHET_ASSIGN_OR_RETURN(out.buffer,
                           ops_.upload(std::vector<float>(static_cast<size_t>(size), value)));
  out.size = size;
  return {};
}

Status DummyMaker::linear(Linear& out, const std::string& name, Role role, int64_t rows,
                          int64_t cols, bool bias, Fill fill) {
  FRESHET_RETURN_IF_ERROR(matrix(out.weight, name, role, rows, cols, fill));
  return bias ? vector(out.bias, rows, 0.0f) : Status();
}

Status DummyMaker::norm(NormWeights& out, const std::optional<NormSpec>& spec, int64_t size) {
  if (!spec) return {};
  if (spec->weight) FRESHET_RETURN_IF_ERROR(vector(out.weight, size, 1.0f));
  return spec->bias ? vector(out.bias, size, 0.0f) : Status();
}

Status DummyMaker::mlp(MlpWeights& out, const MlpSpec& m, int64_t hidden,
                       const std::string& prefix) {
  if (m.gated)
    FRESHET_RETURN_IF_ERROR(linear(out.gate, prefix + ".gate", Role::kGate, m.ff, hidden, m.bias));
  FRESHET_RETURN_IF_ERROR(linear(out.up, prefix + ".up", Role::kUp, m.ff, hidden, m.bias));
  if (m.adapter_rank > 0) {
    const int64_t rank = m.adapter_rank;
    const Role down = Role::kGateUpAdapterDown, up = Role::kGateUpAdapterUp;
    FRESHET_RETURN_IF_ERROR(
        linear(out.adapter_down, prefix + ".adapter_down", down, rank, hidden, false));
    FRESHET_RETURN_IF_ERROR(
        linear(out.gate_adapter, prefix + ".gate_adapter", up, m.ff, rank, false));
    FRESHET_RETURN_IF_ERROR(linear(out.up_adapter, prefix + ".up_adapter", up, m.ff, rank, false));
  }
  return linear(out.down, prefix + ".down", Role::kDown, hidden, m.ff, m.bias);
}

// Routers have no pool: each gets new rows.
const std::vector<uint8_t>& DummyMaker::pool_of(quant::Format format, int64_t rows, int64_t cols,
                                                Fill fill) {
  std::vector<uint8_t>& pool = pools_[{format, cols, fill}];
  if (!pool.empty() && fill != Fill::kRouter) return pool;
  const quant::FormatInfo& info = quant::info(format);
  const size_t bytes = quant::row_bytes(format, cols);
  if (fill != Fill::kRouter) rows = fill == Fill::kPlain ? kPoolRows : kTokenRows;
  pool.resize(bytes * static_cast<size_t>(rows));
  std::vector<float> row(static_cast<size_t>(cols));
  uint64_t token = 0x9e3779b97f4a7c15u;  // the same in the embedding and in the head
  for (int64_t r = 0; r < rows; ++r) {
    for (float& v : row) {
      const float of_token = number(token);
      v = fill == Fill::kEmbedding ? 5000.0f * of_token : number(state_);
      if (fill == Fill::kHead) v += 0.12f * of_token;
      // As routers are published.
      if (format == quant::Format::kF32) v = bf16_to_f32(f32_to_bf16(v));
    }
    uint8_t* to = pool.data() + static_cast<size_t>(r) * bytes;
    info.encode(row.data(), to, cols, nullptr);
    if (format == quant::Format::kFP8) one_scale(to, cols);
  }
  return pool;
}

}  // namespace freshet::models
