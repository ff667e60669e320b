#include <cstring>

#include "models/branch_loading.h"
#include "models/dummy_maker.h"

namespace freshet::models {
namespace {

using loader::TensorSource;

// Row orders that turn a matrix with gates and ups into [gates, ups].
std::vector<int64_t> gates_then_ups(int64_t ff, bool interleaved) {
  std::vector<int64_t> order(static_cast<size_t>(2 * ff));
  for (int64_t i = 0; i < ff; ++i) {
    order[static_cast<size_t>(i)] = interleaved ? 2 * i : i;
    order[static_cast<size_t>(ff + i)] = interleaved ? 2 * i + 1 : ff + i;
  }
  return order;
}

Status append(Rows& to, const Rows& from, const std::string& name) {
  if (to.format != from.format) {
    return unsupported("tensor '{}' is {} where its gate is {}: an expert's halves must agree",
                       name, quant::info(from.format).name, quant::info(to.format).name);
  }
  to.rows.insert(to.rows.end(), from.rows.begin(), from.rows.end());
  return {};
}

// Converts published MXFP4 experts to the storage format: blocks [experts, rows, cols / 32, 16]
// with two neighbours in each byte, and scales [experts, rows, cols / 32].
Result<Rows> read_mxfp4(const WeightReader& reader, const std::string& stem, int64_t expert,
                        int64_t experts, int64_t rows, int64_t cols) {
  const TensorSource* blocks = reader.find_name(stem + "_blocks");
  const TensorSource* scales = reader.find_name(stem + "_scales");
  if (blocks == nullptr || scales == nullptr) {
    return invalid_argument("tensor '{}' is missing: the checkpoint is incomplete", stem);
  }
  const int64_t per_row = cols / 32;
  const auto total = static_cast<size_t>(experts * rows * per_row);
  if (cols % 32 != 0 || blocks->bytes != total * 16 || scales->bytes != total) {
    return invalid_argument(
        "tensor '{}_blocks' has {} bytes and '{}_scales' {}, expected {} and {}", stem,
        blocks->bytes, stem, scales->bytes, total * 16, total);
  }
  if (reader.shapes_suffice()) return Rows::shape(quant::Format::kMXFP4, rows, cols);
  Rows out;
  out.format = quant::Format::kMXFP4;
  out.cols = cols;
  const size_t stride = quant::row_bytes(out.format, cols);
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(static_cast<size_t>(rows) * stride));
  const auto first = static_cast<size_t>(expert * rows * per_row);
  for (size_t b = 0; b < static_cast<size_t>(rows * per_row); ++b) {
    const uint8_t* from = blocks->data + (first + b) * 16;
    uint8_t* to = buffer.data() + b * 17;
    to[0] = scales->data[first + b];
    for (size_t i = 0; i < 16; ++i) {
      // Number i goes to a low half byte, number i + 16 to a high one.
      const int low = from[i / 2] >> (i % 2 * 4) & 15;
      const int high = from[8 + i / 2] >> (i % 2 * 4) & 15;
      to[1 + i] = static_cast<uint8_t>(low | high << 4);
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    out.rows.push_back(buffer.data() + static_cast<size_t>(r) * stride);
  out.owned.push_back(std::move(buffer));
  return out;
}

// Reads one expert after the other, whichever way the file groups them.
class ExpertReader {
 public:
  ExpertReader(WeightReader& reader, const MoeSpec& moe, int64_t hidden, int layer)
      : reader_(reader), moe_(moe), hidden_(hidden), layer_(layer) {
    interleaved_ = reader.architecture().experts_interleaved && !reader.is_gguf();
    const bool transposed = reader.architecture().experts_transposed && !reader.is_gguf();
    layout_ = transposed && !has_rows() ? Layout::kTransposed : Layout::kRows;
  }

  Status read(MoeWeights& out) {
    const int experts = moe_.routing.experts;
    out.gate_up.resize(static_cast<size_t>(experts));
    out.down.resize(static_cast<size_t>(experts));
    for (int e = 0; e < experts; ++e) {
      FRESHET_RETURN_IF_ERROR(gate_up(e, out.gate_up[static_cast<size_t>(e)]));
      FRESHET_RETURN_IF_ERROR(down(e, out.down[static_cast<size_t>(e)]));
    }
    for (const Role role :
         {Role::kExpertsGate, Role::kExpertsUp, Role::kExpertsDown, Role::kExpertsGateUp}) {
      if (const TensorSource* tensor = reader_.find(role, ".weight", layer_))
        reader_.release(*tensor);
    }
    return moe_.expert_bias ? biases(out) : Status();
  }

 private:
  // Whether stacked experts are [experts, out, in] where those of the architecture mostly are
  // [experts, in, out]; files that transformers 5 wrote may have either.
  bool has_rows() const {
    const TensorSource* const stacked = reader_.find(Role::kExpertsGateUp, ".weight", layer_);
    const int64_t ff = moe_.expert_ff;
    return stacked != nullptr && stacked->shape.size() == 3 && stacked->shape[1] == 2 * ff &&
           stacked->shape[2] == hidden_ && 2 * ff != hidden_;
  }

  // An expert's own tensor, or its part of a stacked one.
  Result<Rows> part(Role own, Role stacked, int expert, int64_t rows, int64_t cols) {
    if (const TensorSource* tensor = reader_.find(stacked, ".weight", layer_)) {
      name_ = tensor->name;
      return reader_.rows_of(*tensor, expert, moe_.routing.experts, rows, cols, layout_);
    }
    FRESHET_ASSIGN_OR_RETURN(const TensorSource* tensor,
                             reader_.require(own, ".weight", layer_, expert));
    name_ = tensor->name;
    return reader_.rows(*tensor, rows, cols);
  }

  Status pack(ops::Weight& out, const std::string& name, const Rows& rows,
              std::span<const int64_t> order = {}) {
    return reader_.pack(out, name, rows, order, ops::Use::kExperts);
  }

  Status gate_up(int expert, ops::Weight& out) {
    const int64_t ff = moe_.expert_ff;
    const std::string fused = reader_.stem(Role::kExpertsGateUp, layer_);
    if (interleaved_ && reader_.find_name(fused + "_blocks") != nullptr) {
      FRESHET_ASSIGN_OR_RETURN(const Rows rows, read_mxfp4(reader_, fused, expert,
                                                           moe_.routing.experts, 2 * ff, hidden_));
      return pack(out, fused, rows, gates_then_ups(ff, true));
    }
    if (reader_.find(Role::kExpertsGateUp, ".weight", layer_) != nullptr) {
      FRESHET_ASSIGN_OR_RETURN(
          const Rows rows, part(Role::kExpertGate, Role::kExpertsGateUp, expert, 2 * ff, hidden_));
      return pack(out, name_, rows, gates_then_ups(ff, interleaved_));
    }
    FRESHET_ASSIGN_OR_RETURN(Rows rows,
                             part(Role::kExpertGate, Role::kExpertsGate, expert, ff, hidden_));
    FRESHET_ASSIGN_OR_RETURN(const Rows up,
                             part(Role::kExpertUp, Role::kExpertsUp, expert, ff, hidden_));
    FRESHET_RETURN_IF_ERROR(append(rows, up, name_));
    return pack(out, name_, rows);
  }

  Status down(int expert, ops::Weight& out) {
    const std::string stacked = reader_.stem(Role::kExpertsDown, layer_);
    if (interleaved_ && reader_.find_name(stacked + "_blocks") != nullptr) {
      FRESHET_ASSIGN_OR_RETURN(
          const Rows rows,
          read_mxfp4(reader_, stacked, expert, moe_.routing.experts, hidden_, moe_.expert_ff));
      return pack(out, stacked, rows);
    }
    FRESHET_ASSIGN_OR_RETURN(const Rows rows, part(Role::kExpertDown, Role::kExpertsDown, expert,
                                                   hidden_, moe_.expert_ff));
    return pack(out, name_, rows);
  }

  Status biases(MoeWeights& out) {
    const int64_t experts = moe_.routing.experts;
    const int64_t ff = moe_.expert_ff;
    std::vector<float> gate_up(static_cast<size_t>(experts * 2 * ff));
    if (const TensorSource* fused = reader_.find(Role::kExpertsGateUp, ".bias", layer_)) {
      FRESHET_ASSIGN_OR_RETURN(const std::vector<float> all,
                               reader_.values(*fused, experts * 2 * ff));
      const std::vector<int64_t> order = gates_then_ups(ff, interleaved_);
      for (int64_t i = 0; i < experts * 2 * ff; ++i) {
        const int64_t from = i / (2 * ff) * (2 * ff) + order[static_cast<size_t>(i % (2 * ff))];
        gate_up[static_cast<size_t>(i)] = all[static_cast<size_t>(from)];
      }
    } else {
      int64_t half = 0;
      for (const Role role : {Role::kExpertsGate, Role::kExpertsUp}) {
        FRESHET_ASSIGN_OR_RETURN(const TensorSource* tensor,
                                 reader_.require(role, ".bias", layer_));
        FRESHET_ASSIGN_OR_RETURN(const std::vector<float> all,
                                 reader_.values(*tensor, experts * ff));
        for (int64_t i = 0; i < experts * ff; ++i) {
          gate_up[static_cast<size_t>(i / ff * 2 * ff + half * ff + i % ff)] =
              all[static_cast<size_t>(i)];
        }
        ++half;
      }
    }
    FRESHET_RETURN_IF_ERROR(reader_.store(out.gate_up_bias, gate_up));
    return reader_.vector(out.down_bias, Role::kExpertsDown, ".bias", layer_, experts * hidden_);
  }

  WeightReader& reader_;
  const MoeSpec& moe_;
  int64_t hidden_;
  int layer_;
  bool interleaved_ = false;
  Layout layout_ = Layout::kRows;
  std::string name_;  // of the last tensor read
};

// The router stays in F32: it is small, and a rounded score can change which experts are chosen.
Status assemble_router(WeightReader& reader, const MoeSpec& moe, int64_t hidden, int layer,
                       MoeWeights& out) {
  const int64_t experts = moe.routing.experts;
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* tensor,
                           reader.require(Role::kRouter, ".weight", layer));
  FRESHET_RETURN_IF_ERROR(reader.rows(*tensor, experts, hidden).status());
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> values,
                           reader.values(*tensor, experts * hidden));
  FRESHET_ASSIGN_OR_RETURN(const Rows rows, reader.encode(values, hidden, quant::Format::kF32));
  FRESHET_RETURN_IF_ERROR(reader.pack(out.router.weight, tensor->name, rows));
  if (moe.router_bias) {
    FRESHET_RETURN_IF_ERROR(reader.vector(out.router.bias, Role::kRouter, ".bias", layer, experts));
  }
  if (!moe.router_correction) return {};
  const TensorSource* correction = reader.find(Role::kRouterCorrection, "", layer);
  if (correction == nullptr) {
    FRESHET_ASSIGN_OR_RETURN(correction, reader.require(Role::kRouterCorrection, ".bias", layer));
  }
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> bias, reader.values(*correction, experts));
  return reader.store(out.correction, bias);
}

Status assemble(WeightReader& reader, const MoeSpec& moe, int64_t hidden, int layer,
                MoeWeights& out) {
  FRESHET_RETURN_IF_ERROR(assemble_router(reader, moe, hidden, layer, out));
  FRESHET_RETURN_IF_ERROR(ExpertReader(reader, moe, hidden, layer).read(out));
  if (moe.shared_ff == 0) return {};
  const int64_t ff = moe.shared_ff;
  if (reader.find(Role::kSharedGateUp, ".weight", layer) != nullptr) {  // gates, then ups
    const std::vector<int64_t> order = gates_then_ups(ff, false);
    const std::span<const int64_t> rows(order);
    FRESHET_RETURN_IF_ERROR(reader.linear(out.shared.gate, Role::kSharedGateUp, layer, 2 * ff,
                                          hidden, false, rows.first(static_cast<size_t>(ff))));
    FRESHET_RETURN_IF_ERROR(reader.linear(out.shared.up, Role::kSharedGateUp, layer, 2 * ff, hidden,
                                          false, rows.last(static_cast<size_t>(ff))));
  } else {
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.shared.gate, Role::kSharedGate, layer, ff, hidden, false));
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.shared.up, Role::kSharedUp, layer, ff, hidden, false));
  }
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.shared.down, Role::kSharedDown, layer, hidden, ff, false));
  if (!moe.shared_gate) return {};
  return reader.linear(out.shared_gate, Role::kSharedScale, layer, 1, hidden, false);
}

Status make(DummyMaker& maker, const MoeSpec& m, int64_t hidden, MoeWeights& out) {
  const int experts = m.routing.experts;
  // In F32, as the loader keeps it.
  FRESHET_RETURN_IF_ERROR(maker.matrix(out.router.weight, "router", quant::Format::kF32, experts,
                                       hidden, Fill::kRouter, ops::Use::kProducts));
  if (m.router_bias) FRESHET_RETURN_IF_ERROR(maker.vector(out.router.bias, experts, 0.0f));
  if (m.router_correction) FRESHET_RETURN_IF_ERROR(maker.vector(out.correction, experts, 0.0f));
  out.gate_up.resize(static_cast<size_t>(experts));
  out.down.resize(static_cast<size_t>(experts));
  for (size_t e = 0; e < out.down.size(); ++e) {
    FRESHET_RETURN_IF_ERROR(maker.matrix(out.gate_up[e], "experts.gate_up", Role::kExpertsGateUp,
                                         2 * int64_t{m.expert_ff}, hidden, Fill::kPlain,
                                         ops::Use::kExperts));
    FRESHET_RETURN_IF_ERROR(maker.matrix(out.down[e], "experts.down", Role::kExpertsDown, hidden,
                                         m.expert_ff, Fill::kPlain, ops::Use::kExperts));
  }
  if (m.expert_bias) {
    FRESHET_RETURN_IF_ERROR(
        maker.vector(out.gate_up_bias, int64_t{experts} * 2 * m.expert_ff, 0.0f));
    FRESHET_RETURN_IF_ERROR(maker.vector(out.down_bias, experts * hidden, 0.0f));
  }
  if (m.shared_ff == 0) return {};
  MlpSpec shared;
  shared.ff = m.shared_ff;
  FRESHET_RETURN_IF_ERROR(maker.mlp(out.shared, shared, hidden, "shared"));
  return m.shared_gate
             ? maker.linear(out.shared_gate, "shared_gate", Role::kSharedScale, 1, hidden, false)
             : Status();
}

}  // namespace

constinit const BranchLoading kMoeLoading =
    branch_loading<MoeSpec, MoeWeights, assemble, make>(kMlpNorms);

}  // namespace freshet::models
