// The table rows of GEMMs and activation encoders: joins the kernels compiled for each instruction
// set with packing.
#include <array>
#include <cstddef>

#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_layout.h"
#include "backend/cpu/matmul_pack.h"
#include "backend/cpu/tables.h"
#include "ops/weight.h"

namespace freshet::cpu {

using ops::ActEncoder;
using ops::ActKind;
using ops::CpuIsa;
using ops::MatmulArgs;
using ops::MatmulKernel;
using quant::Format;

namespace {

constexpr ActKind act_kind(Format f, CpuIsa isa) {
  if (f == Format::kF32 && isa == CpuIsa::kAmx) return ActKind::kBF16;  // matmul_amx_f32.inl
  switch (f) {
    case Format::kF32:
    case Format::kF16:
    case Format::kFP8:
    case Format::kMXFP8:
    case Format::kFP8G32:
    case Format::kNF4:
    case Format::kFP4:
      return ActKind::kF32;
    case Format::kBF16:
      return ActKind::kBF16;
    case Format::kINT8:
      return ActKind::kInt8;
    default:
      return ActKind::kQ8x256;
  }
}

constexpr const char* kNames[kFormats] = {
    "f32",    "f16",       "bf16",      "fp8",       "int8",     "q4_0",      "q4_1",     "q5_0",
    "q5_1",   "q8_0",      "q2_k",      "q3_k",      "q4_k",     "q5_k",      "q6_k",     "iq4_nl",
    "iq4_xs", "mxfp4",     "int4_g128", "int4_g32",  "mxfp8",    "fp8_g32",   "nf4",      "fp4",
    "nvfp4",  "int2_g128", "int2_g32",  "int3_g128", "int3_g32", "int8_g128", "int8_g32", "iq1_s",
    "iq1_m",  "iq2_xxs",   "iq2_xs",    "iq2_s",     "iq3_xxs",  "iq3_s",     "tq1_0",    "tq2_0"};

template <const IsaKernels& kernels, Format f>
void run(const MatmulArgs& args, const uint8_t* act, int64_t act_row_bytes, int64_t first,
         int64_t last) {
  GateCall gate;
  const MatmulCall call = call_of(args, act, act_row_bytes, gate);
  if (args.tokens > 0) kernels.run_of(f)(call, first, last);
}

template <Format f>
size_t packed_bytes_of(int64_t rows, int64_t cols) {
  return packed_bytes(f, rows, cols);
}
template <Format f>
void pack_panel_of(uint8_t* packed, int64_t panel, const uint8_t* const* rows, int64_t cols) {
  pack_panel(f, packed, panel, rows, cols);
}
template <Format f>
void unpack_row_of(const uint8_t* packed, int64_t row, int64_t cols, float* out) {
  unpack_row(f, packed, row, cols, out);
}

struct Text {
  char data[24] = {};
};
constexpr Text row_name(Format f, std::string_view isa) {
  Text name;
  size_t n = 0;
  for (const char* c = kNames[static_cast<size_t>(f)]; *c != 0; ++c) name.data[n++] = *c;
  name.data[n++] = '.';
  for (const char c : isa) name.data[n++] = c;
  return name;
}

constexpr std::string_view isa_name(CpuIsa isa) {
  constexpr std::string_view kIsas[] = {"scalar",     "avx2", "avxvnni", "avx512",
                                        "avx512vnni", "amx",  "neon",    "neondot"};
  return kIsas[static_cast<size_t>(isa)];
}
template <Format f, CpuIsa isa>
inline constexpr Text kRowName = row_name(f, isa_name(isa));

template <const IsaKernels& kernels, CpuIsa isa, Format f>
constexpr MatmulKernel row() {
  return {kRowName<f, isa>.data,
          f,
          isa,
          act_kind(f, isa),
          packed_bytes_of<f>,
          pack_panel_of<f>,
          unpack_row_of<f>,
          run<kernels, f>,
          (kernels.gates >> static_cast<int>(f) & 1) != 0,
          f == Format::kF32 && isa == CpuIsa::kAmx};
}

constexpr size_t kRows = size_t{8} * kFormats;  // every format with every instruction set
struct Rows {
  std::array<MatmulKernel, kRows> rows{};
  size_t count = 0;
};

template <const IsaKernels& kernels, CpuIsa isa, size_t... i>
void append(Rows& to, std::index_sequence<i...>) {
  ((kernels.run_of(static_cast<Format>(i)) != nullptr
        ? void(to.rows[to.count++] = row<kernels, isa, static_cast<Format>(i)>())
        : void()),
   ...);
}

Rows all_rows() {
  constexpr auto kAll = std::make_index_sequence<kFormats>();
  Rows rows;
#if defined(__x86_64__)
  append<kAmxKernels, CpuIsa::kAmx>(rows, kAll);
  append<kAvx512VnniKernels, CpuIsa::kAvx512Vnni>(rows, kAll);
  append<kAvx512Kernels, CpuIsa::kAvx512>(rows, kAll);
  append<kAvxVnniKernels, CpuIsa::kAvxVnni>(rows, kAll);
  append<kAvx2Kernels, CpuIsa::kAvx2>(rows, kAll);
#elif defined(__aarch64__)
  append<kNeonDotKernels, CpuIsa::kNeonDot>(rows, kAll);
  append<kNeonKernels, CpuIsa::kNeon>(rows, kAll);
#endif
  append<kScalarKernels, CpuIsa::kScalar>(rows, kAll);
  return rows;
}

constexpr bool reads_no_fine(int64_t, int64_t) {
  return false;
}

// Makes the stride of long rows 17 lines modulo 64, so that eight lines of each of 32 rows, the
// operands of a step on tiles, spread over all sets of an L1 cache.
size_t spread_bytes(int64_t bytes) {
  int64_t lines = bytes / kLine;
  if (lines >= 64) lines += (17 + 64 - lines % 64) % 64;
  return static_cast<size_t>(lines * kLine);
}
size_t bf16_bytes(int64_t cols) {
  return spread_bytes(bf16_layout(cols).bytes);
}
size_t int8_bytes(int64_t cols) {
  return spread_bytes(int8_layout(cols).bytes);
}
size_t q8x256_bytes(int64_t cols) {
  return static_cast<size_t>(q8x256_layout(cols).bytes);
}

template <const IsaKernels& k>
void append(std::vector<ActEncoder>& to, CpuIsa isa) {
  to.push_back({ActKind::kBF16, isa, bf16_bytes, uses_fine_plane, k.bf16});
  to.push_back({ActKind::kQ8x256, isa, q8x256_bytes, uses_fine_plane, k.q8x256});
  to.push_back({ActKind::kInt8, isa, int8_bytes, reads_no_fine, k.int8});
}

std::vector<ActEncoder> all_encoders() {
  std::vector<ActEncoder> rows;
#if defined(__x86_64__)
  append<kAvx512Kernels>(rows, CpuIsa::kAvx512);
  append<kAvx2Kernels>(rows, CpuIsa::kAvx2);
#elif defined(__aarch64__)
  append<kNeonKernels>(rows, CpuIsa::kNeon);
#endif
  append<kScalarKernels>(rows, CpuIsa::kScalar);
  return rows;
}

}  // namespace

MatmulCall call_of(const MatmulArgs& args, const uint8_t* act, int64_t act_row_bytes,
                   GateCall& gate) {
  MatmulCall call{args.weight->packed.data(),
                  args.weight->rows,
                  args.weight->cols,
                  args.tokens,
                  args.rows_index,
                  act,
                  act_row_bytes,
                  args.out,
                  args.out_stride,
                  args.bias,
                  args.scale,
                  args.add};
  if (const ops::GateArgs* g = args.gate) {
    gate = {g->weight->packed.data(), g->bias, g->scale, g->glu, g->activation, g->limit, g->alpha};
    call.gate = &gate;
  }
  return call;
}

std::span<const MatmulKernel> matmul_kernels() {
  static const Rows rows = all_rows();
  return {rows.rows.data(), rows.count};
}

std::span<const ActEncoder> act_encoders() {
  static const std::vector<ActEncoder> rows = all_encoders();
  return rows;
}

}  // namespace freshet::cpu
