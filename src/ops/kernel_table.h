// Tables of the CPU kernels. The backend fills them (backend/cpu/table.cc); Ops chooses from them.
// The CUDA kernels have tables of their own (backend/cuda/runtime/kernel_row.h and, for GEMMs,
// backend/cuda/gemm/gemm_rows.h).
//
// A row is a named implementation of one op. Rows are listed best first. Ops picks the first row
// that the processor can run and that supports the problem, once when a model is planned and not
// per call. Tests and --force-kernel name a row; a forced row that cannot run is an error. Row
// names are "<operation or format>.<isa>", for instance "q4_0.avx512vnni".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "ops/attention.h"
#include "quant/format.h"
#include "tensor/buffer.h"

namespace freshet::ops {

struct Weight;

// Instruction sets in ascending order; each includes the ones before it. kAvx512 means F, BW, DQ,
// VL; kAvx512Vnni adds VNNI (and BF16 if a row says so); kAmx adds AMX-TILE, INT8 and BF16. The
// last two are for 64-bit ARM: kNeon is its baseline, kNeonDot adds byte dot products.
enum class CpuIsa : uint8_t {
  kScalar,
  kAvx2,
  kAvxVnni,
  kAvx512,
  kAvx512Vnni,
  kAmx,
  kNeon,
  kNeonDot
};
inline constexpr CpuIsa kAnyIsa = CpuIsa::kNeonDot;  // as a limit: no limit
std::string_view name_of(CpuIsa isa);  // scalar avx2 avxvnni avx512 avx512vnni amx neon neondot
// For the architecture of this build.
Result<CpuIsa> isa_by_name(std::string_view name);

struct Capabilities {
  CpuIsa isa = CpuIsa::kScalar;
  bool has(CpuIsa needed) const;  // avx512 machines without AVX-VNNI still satisfy kAvx512 etc.
  bool avx_vnni = false;
  bool avx512_bf16 = false;
  int l2_bytes = 1 << 20;
};
// The gate GEMM of SwiGLU. Its weight has the shape and the kernel of the up GEMM's weight.
struct GateArgs {
  const Weight* weight = nullptr;
  const float* bias = nullptr;
  float scale = 1.0f;
  // As in VectorKernels, with its arguments.
  void (*glu)(float* out, const float* gate, const float* up, int64_t n, int activation,
              float limit, float alpha) = nullptr;
  int activation = 0;
  float limit = 0.0f;
  float alpha = 0.0f;
};

// The arguments of a GEMM: `rows_index` selects rows of x (nullptr: all, in order).
struct MatmulArgs {
  const Weight* weight = nullptr;
  int64_t tokens = 0;                   // rows of the result
  const int32_t* rows_index = nullptr;  // [tokens] rows of x, or nullptr
  float* out = nullptr;                 // [tokens, weight->rows], row stride out_stride
  int64_t out_stride = 0;
  const float* bias = nullptr;
  float scale = 1.0f;
  bool add = false;
  const GateArgs* gate = nullptr;  // the result is glu(gate GEMM, this GEMM), see MatmulKernel
};

// The encoding of x that a kernel needs. x is encoded once per row, and shared by all GEMMs of a
// group that need the same encoding.
enum class ActKind : uint8_t {
  kF32,     // unchanged
  kBF16,    // rounded to BF16
  kQ8x256,  // int8 with one F32 scale per block of 256
  kInt8,    // int8 with one F32 scale per row; a row is encoded as a whole
};

struct MatmulKernel {
  const char* name;
  quant::Format format;
  CpuIsa isa;
  ActKind act;
  // Bytes of the packed form of [rows, cols].
  size_t (*packed_bytes)(int64_t rows, int64_t cols);
  // Packs panel `panel` (16 rows); rows[r] is nullptr past the last row. Called in parallel.
  void (*pack_panel)(uint8_t* packed, int64_t panel, const uint8_t* const* rows, int64_t cols);
  // Decodes row `row` to F32 (embedding lookups), bit-equal to quant::decode.
  void (*unpack_row)(const uint8_t* packed, int64_t row, int64_t cols, float* out);
  // Computes panels [first, last) of the GEMM for all tokens. `act` is x in the kernel's ActKind.
  void (*run)(const MatmulArgs& args, const uint8_t* act, int64_t act_row_bytes, int64_t first,
              int64_t last);
  // Whether run() accepts a `gate`, for more than kFewGated tokens and for panels in which all rows
  // exist.
  bool gates = false;
  // Whether run() reads the fine part of rows whatever the weight's shape.
  bool always_fine = false;
};
inline constexpr int64_t kFewGated = 64;

struct ActEncoder {
  ActKind kind;
  CpuIsa isa;
  size_t (*row_bytes)(int64_t cols);  // a multiple of 64; pads cols up to the block with zeros
  // Whether GEMMs with weights of this shape read the fine part of a row too.
  bool (*reads_fine)(int64_t rows, int64_t cols);
  // Encodes values [first, last) of a row of `cols`, in whole parts of kEncodedPart except at the
  // end of the row. x points to value `first`, out to the start of the row. All instruction sets
  // give the same bits.
  void (*encode)(const float* x, int64_t cols, int64_t first, int64_t last, bool fine,
                 uint8_t* out);
};
inline constexpr int64_t kEncodedPart = 256;
constexpr bool encodes_in_parts(ActKind kind) {
  return kind == ActKind::kBF16 || kind == ActKind::kQ8x256;
}

struct AttentionKernel {
  const char* name;
  CpuIsa isa;
  bool (*supports)(const KvShape& shape, const AttentionParams& params);
  void (*store)(const KvView& cache, const Matrix& k, const Matrix& v, const AttentionBatch& batch,
                ThreadPool& pool);
  void (*run)(const Matrix& out, const Matrix& q, const KvView& cache, const AttentionBatch& batch,
              const AttentionParams& params, ThreadPool& pool, uint8_t* scratch,
              size_t scratch_bytes);
  // Workspace of run() for at most `tokens` queries, `heads` heads and `context` cached tokens.
  size_t (*scratch_bytes)(const KvShape& shape, int heads, int64_t tokens, int64_t context,
                          int workers);
  // Decodes a head's keys of a block: keys[d * kBlockTokens + slot].
  void (*read_keys)(const KvShape& shape, const uint8_t* block, int head, float* keys);
  // Copies a slot of a head from one block to another, bits unchanged.
  void (*move_slot)(const KvShape& shape, const uint8_t* from, int from_slot, uint8_t* to,
                    int to_slot, int head);
  // As read_keys(), of these features alone, ascending: keys[i * kBlockTokens + slot] is
  // features[i]. And a head's values of a block: values[slot * value_dim + d]. Neither is for
  // values that are parts of keys, or for 4-bit codes.
  void (*read_features)(const KvShape& shape, const uint8_t* block, int head,
                        std::span<const int32_t> features, float* keys);
  void (*read_values)(const KvShape& shape, const uint8_t* block, int head, float* values);
};

// The inner loops of Ops::key_scores() and Ops::selected_attention().
struct ScoreKernel {
  const char* name;
  CpuIsa isa;
  // out[r * stride + t]: the dot product of row r of q, [rows, key_dim], and key t of a block's
  // keys, [key_dim, kBlockTokens].
  void (*dots)(const float* q, int rows, const float* keys, int key_dim, float* out,
               int64_t stride);
  // Adds the softmax of n scores, in whole units, to `sums`. n is a multiple of kBlockTokens;
  // scores may be overwritten. `sink`: a logit that adds to the denominator only, or nullptr.
  void (*add_weights)(float* scores, int64_t n, const float* sink, int64_t* sums);
  // The promise of a block: the sum over the rows of q, [rows, key_dim], of sum_d q_d *
  // (greatest[d] + least[d]) + spread * |q_d| * (greatest[d] - least[d]); infinite if that is NaN.
  // Bounds are BF16; key_dim is a multiple of 8.
  float (*promise)(const float* q, int rows, const uint16_t* least, const uint16_t* greatest,
                   int key_dim, float spread);
};

// Row-wise element kernels, one set per instruction set. Each call handles one row (or one head).
struct VectorKernels {
  const char* name;
  CpuIsa isa;
  void (*rms_norm)(float* out, const float* x, const float* weight, const float* bias, int64_t n,
                   float eps);
  void (*layer_norm)(float* out, const float* x, const float* weight, const float* bias, int64_t n,
                     float eps);
  void (*rope)(float* head, const float* cos_sin, int rotary_dim, bool interleaved);
  void (*glu)(float* out, const float* gate, const float* up, int64_t n, int activation,
              float limit, float alpha);
  void (*activation)(float* x, int64_t n, int activation);
  void (*add)(float* out, const float* x, int64_t n, float scale);
  void (*scale)(float* x, int64_t n, float scale);
  void (*softcap)(float* x, int64_t n, float cap);
};

struct KernelTable {
  std::string_view backend;  // "reference", "cpu"
  std::span<const MatmulKernel> matmul;
  std::span<const ActEncoder> encoders;
  std::span<const AttentionKernel> attention;
  std::span<const VectorKernels> vector;
  std::span<const ScoreKernel> scores;
};

const KernelTable& reference_kernels();  // ops/reference_*.cc: plain F32, for every format

}  // namespace freshet::ops
