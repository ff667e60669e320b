#include "backend/cuda/device.h"

#include <algorithm>
#include <cstring>

#include "backend/cuda/arguments.h"
#include "backend/cuda/copy_lane.h"

namespace freshet::cuda {
namespace {

constexpr size_t kLeastStage = size_t{8} << 20;  // ids and block tables of a step
constexpr size_t kRaw = size_t{32} << 20;        // rows being packed, per upload slot
constexpr size_t kTables = size_t{4} << 20;      // pointers to experts
constexpr size_t kMostPartial = size_t{128} << 20;
constexpr size_t kMostGraphs = 96;
constexpr int kLeastCapability = 80;
constexpr int kMostKeyDim = 1280;

size_t aligned(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// The note behind the last use of a half of the host's staging memory.
constexpr int stage_note(int turn) {
  return 2 + turn;
}

// Used for their names only: the device runs its own GEMMs.
constexpr ops::MatmulKernel row_of(const char* name, quant::Format format) {
  return {name,    format, ops::CpuIsa::kScalar, ops::ActKind::kF32, nullptr, nullptr,
          nullptr, nullptr};
}
constexpr ops::MatmulKernel kRows[] = {
    row_of("f32.cuda", quant::Format::kF32),
    row_of("f16.cuda", quant::Format::kF16),
    row_of("bf16.cuda", quant::Format::kBF16),
    row_of("fp8.cuda", quant::Format::kFP8),
    row_of("q8_0.cuda", quant::Format::kQ8_0),
    row_of("q4_0.cuda", quant::Format::kQ4_0),
    row_of("q4_k.cuda", quant::Format::kQ4_K),
    row_of("q6_k.cuda", quant::Format::kQ6_K),
    row_of("mxfp4.cuda", quant::Format::kMXFP4),
    row_of("q4_1.cuda", quant::Format::kQ4_1),
    row_of("q5_0.cuda", quant::Format::kQ5_0),
    row_of("q5_1.cuda", quant::Format::kQ5_1),
    row_of("iq4_nl.cuda", quant::Format::kIQ4_NL),
    row_of("iq4_xs.cuda", quant::Format::kIQ4_XS),
    row_of("q2_k.cuda", quant::Format::kQ2_K),
    row_of("q3_k.cuda", quant::Format::kQ3_K),
    row_of("q5_k.cuda", quant::Format::kQ5_K),
    row_of("int8.cuda", quant::Format::kINT8),
    row_of("int4_g128.cuda", quant::Format::kInt4G128),
    row_of("int4_g32.cuda", quant::Format::kInt4G32),
};

}  // namespace

Result<std::unique_ptr<ops::Device>> CudaDevice::open(const Api& api, int index,
                                                      const ForcedRows& forced) {
  const int devices = api.devices();
  if (index != 0 && index >= devices) {
    return not_found("no GPU {}: this machine has {}, numbered from 0", index, devices);
  }
  Context* context = nullptr;
  DeviceInfo info = {};
  if (const int error = api.open(index, &context, &info); error != 0) {
    return not_found("no usable GPU ({}): use --device cpu", api.error_text(error));
  }
  std::unique_ptr<CudaDevice> device(new CudaDevice(api, context));
  const int capability = info.limits.capability;
  if (capability < kLeastCapability) {
    return unsupported("{} has compute capability {}.{}, 8.0 is needed: use --device cpu",
                       info.name, capability / 10, capability % 10);
  }
  FRESHET_RETURN_IF_ERROR(runs_on(forced, info.limits, info.name));
  for (int op = 0; op < kForcedOps; ++op) {
    const int row = forced[static_cast<size_t>(op)];
    if (row >= 0) device->check(api.force(context, op, row), "force");
  }
  device->limits_ = info.limits;
  device->forced_ = forced;
  device->name_ = info.name;
  device->free_ = static_cast<size_t>(info.free_bytes);
  device->total_ = static_cast<size_t>(info.total_bytes);
  FRESHET_RETURN_IF_ERROR(device->open_buffers());
  return std::unique_ptr<ops::Device>(std::move(device));
}

Status CudaDevice::open_buffers() {
  FRESHET_RETURN_IF_ERROR(set_inputs(kLeastStage));
  FRESHET_ASSIGN_OR_RETURN(raw_, Buffer::allocate(kUploadSlots * kRaw, this));
  FRESHET_ASSIGN_OR_RETURN(host_raw_, Buffer::allocate(kUploadSlots * kRaw, &pinned_));
  FRESHET_ASSIGN_OR_RETURN(tables_, Buffer::allocate(kTables, this));
  return {};
}

CudaDevice::~CudaDevice() {
  api_.stream.sync(ctx_);
  forget_steps();
}

void CudaDevice::forget_steps() {
  for (auto& [key, played] : steps_) {
    if (played.graph != nullptr) api_.stream.graph_release(ctx_, played.graph);
  }
  steps_.clear();
}

void CudaDevice::check(int error, const char* what) const {
  FRESHET_CHECK(error == 0, "CUDA: {}: {}", what,
                error == kNoKernel ? api_.problem_text(ctx_) : api_.error_text(error));
}

Result<void*> CudaDevice::take(size_t bytes) {
  void* memory = nullptr;
  if (api_.memory.allocate(ctx_, &memory, static_cast<int64_t>(bytes)) != 0) {
    return resource_exhausted("{} has no {} bytes left", name_, bytes);
  }
  check(api_.memory.clear(ctx_, memory, static_cast<int64_t>(bytes)), "clear");
  return memory;
}
void CudaDevice::give_back(void* memory) {
  api_.stream.sync(ctx_);
  forget_steps();  // steps and tables may hold its address, which will be reused
  known_tables_.clear();
  tables_at_ = 0;
  api_.memory.release(ctx_, memory);
}
void CudaDevice::copy(void* to, const void* from, size_t bytes) {
  check(api_.memory.copy(ctx_, to, from, static_cast<int64_t>(bytes)), "copy");
}

Result<void*> CudaDevice::Pinned::take(size_t bytes) {
  void* memory = nullptr;
  if (api_.memory.allocate_host(ctx_, &memory, static_cast<int64_t>(bytes)) != 0) {
    return resource_exhausted("cannot pin {} bytes of the host's memory", bytes);
  }
  std::memset(memory, 0, bytes);
  return memory;
}
void CudaDevice::Pinned::give_back(void* memory) {
  api_.memory.release_host(ctx_, memory);
}
void CudaDevice::Pinned::copy(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

Status CudaDevice::write(void* to, const void* host, size_t bytes) {
  int error = api_.memory.upload(ctx_, to, host, static_cast<int64_t>(bytes));
  if (error == 0) error = api_.stream.sync(ctx_);
  if (error != 0) return internal_error("CUDA: upload: {}", api_.error_text(error));
  return {};
}

void CudaDevice::fetch(void* host, const void* from, size_t bytes) {
  check(api_.memory.download(ctx_, host, from, static_cast<int64_t>(bytes)), "download");
}
void CudaDevice::wait() {
  check(api_.stream.sync(ctx_), "step");
}
void CudaDevice::note(int which) {
  check(api_.stream.note(ctx_, which), "note");
}
void CudaDevice::await(int which) {
  check(api_.stream.await(ctx_, which), "step");
}

std::unique_ptr<ops::CopyLane> CudaDevice::copy_lane(const ops::LaneLayers& groups) {
  return std::make_unique<CudaCopyLane>(api_, ctx_, groups);
}

double CudaDevice::time(FunctionRef<void()> body) {
  float milliseconds = 0.0f;
  check(api_.stream.mark(ctx_, 0), "mark");
  body();
  check(api_.stream.mark(ctx_, 1), "mark");
  check(api_.stream.elapsed(ctx_, &milliseconds), "elapsed");
  return static_cast<double>(milliseconds) / 1e3;
}

Result<double> CudaDevice::read_rate() {
  constexpr size_t kBytes = size_t{4} << 30;
  constexpr int kTimes = 5;
  FRESHET_ASSIGN_OR_RETURN(const Buffer memory, Buffer::allocate(kBytes, this));
  double best = 0.0;
  for (int i = 0; i < kTimes; ++i) {
    const double seconds = time([&] {
      check(api_.memory.read(ctx_, memory.data(), static_cast<int64_t>(kBytes),
                             reinterpret_cast<float*>(stage_.data())),
            "read");
    });
    best = std::max(best, static_cast<double>(kBytes) / seconds);
  }
  return best;
}

// ---- Steps

const int32_t* CudaDevice::stage(std::span<const int32_t> host) {
  const size_t bytes = aligned(host.size_bytes());
  FRESHET_CHECK(bytes <= stage_.size(), "a step with {} bytes of tables", host.size_bytes());
  if (stage_at_ + bytes > stage_.size()) {
    FRESHET_CHECK(registered_.empty(), "a step with more than {} bytes of tables", stage_.size());
    check(api_.stream.sync(ctx_), "stage");
    stage_at_ = 0;
  }
  std::memcpy(host_stage() + stage_at_, host.data(), host.size_bytes());
  uint8_t* to = stage_.data() + stage_at_;
  stage_at_ += bytes;
  return reinterpret_cast<const int32_t*>(to);
}

const int32_t* CudaDevice::ints(std::span<const int32_t> host) {
  for (const Registered& r : registered_) {
    if (r.host == host.data() && r.size >= host.size()) return r.device;
  }
  FRESHET_CHECK(!recording_, "an array of {} numbers that the step did not name", host.size());
  loose_ = true;
  const int32_t* at = stage(host);
  const size_t offset = static_cast<size_t>(reinterpret_cast<const uint8_t*>(at) - stage_.data());
  check(api_.memory.upload(ctx_, stage_.data() + offset, host_stage() + offset,
                           static_cast<int64_t>(host.size_bytes())),
        "upload");
  // Between steps nothing else tells when this half of the host's memory is free.
  check(api_.stream.note(ctx_, stage_note(stage_turn_)), "note");
  stage_used_[static_cast<size_t>(stage_turn_)] = true;
  return at;
}

void CudaDevice::step(const ops::StepInputs& inputs, FunctionRef<void()> body) {
  // The previous step may still read the other half; the step before it has ended, or is awaited.
  stage_turn_ ^= 1;
  bool& used = stage_used_[static_cast<size_t>(stage_turn_)];
  if (used) check(api_.stream.await(ctx_, stage_note(stage_turn_)), "step");
  used = true;
  stage_at_ = 0;
  // Starts at the beginning of scratch memory, so that a repeated step gets the same addresses.
  // Encoded activations of the previous step become invalid here.
  if (scratch_.size() > 0) scratch_at_ = (scratch_at_ / scratch_.size() + 2) * scratch_.size();
  registered_.clear();
  loose_ = false;
  for (const std::span<const int32_t> array : inputs.arrays) {
    if (!array.empty()) registered_.push_back({array.data(), array.size(), stage(array)});
  }
  check(api_.memory.upload(ctx_, stage_.data(), host_stage(), static_cast<int64_t>(stage_at_)),
        "upload");

  Played* played = nullptr;
  if (inputs.repeats) {
    const std::vector<int64_t> key(inputs.key.begin(), inputs.key.end());
    if (steps_.size() >= kMostGraphs && !steps_.contains(key)) {
      std::erase_if(steps_, [](const auto& step) { return step.second.graph == nullptr; });
      if (steps_.size() >= kMostGraphs) forget_steps();
    }
    played = &steps_[key];
  }
  if (played != nullptr && played->graph == nullptr && played->seen > 0 && !played->loose) {
    check(api_.stream.graph_begin(ctx_), "record");
    recording_ = true;
    body();
    recording_ = false;
    check(api_.stream.graph_end(ctx_, &played->graph), "record");
  }
  if (played != nullptr && played->graph != nullptr) {
    check(api_.stream.graph_play(ctx_, played->graph), "play");
  } else {
    body();
  }
  if (played != nullptr) {
    ++played->seen;
    played->loose = played->loose || loose_;
  }
  check(api_.stream.note(ctx_, stage_note(stage_turn_)), "note");
  registered_.clear();
}

// ---- Scratch

uint8_t* CudaDevice::scratch(size_t bytes) {
  bytes = aligned(std::max<size_t>(bytes, 1));
  const size_t size = scratch_.size();
  FRESHET_CHECK(bytes <= size, "scratch planned for {} bytes, asked for {}", size, bytes);
  if (scratch_at_ % size + bytes > size) scratch_at_ = (scratch_at_ / size + 1) * size;
  uint8_t* at = scratch_.data() + scratch_at_ % size;
  scratch_at_ += bytes;
  return at;
}

Activations CudaDevice::new_form(const Matrix& of, Order order, Forms& forms) {
  uint8_t* data = scratch(static_cast<size_t>(api_.gemm.fragment_bytes(ctx_, of.rows, of.cols)));
  const size_t slot = static_cast<size_t>(forms.count++) % forms.forms.size();
  const auto offset = static_cast<uint64_t>(data - scratch_.data());
  const uint64_t turn = (scratch_at_ - 1) / scratch_.size() * scratch_.size();
  forms.forms[slot] = {data, turn + offset, static_cast<int>(order)};
  const int64_t tiles = (of.rows + kTokenTile - 1) / kTokenTile;
  return {data, order == Order::kLanes ? 0 : tiles, order == Order::kE4M3, order == Order::kInt8};
}

// The router reads F32; the experts of few tokens read encoded activations.
Activations CudaDevice::new_form_for_experts(const Matrix& of, Forms& forms) {
  if (of.rows > kWholeTokens) return {};
  return new_form(of, of.rows <= kTokenTile ? Order::kLanes : Order::kCores, forms);
}

CudaDevice::Output CudaDevice::output_for(const Matrix& out, Readers readers, bool keep,
                                          bool whole_rows, Forms& forms) {
  Output result{rows_of(out), {}};
  const auto encodes = [](const ops::Weight* w) { return code_of(w->format) != Code::kF32; };
  const auto first = std::ranges::find_if(readers, encodes);
  if (first == readers.end()) return result;  // F32 GEMMs read the F32 values themselves
  const Order order = api_.gemm.order_for(ctx_, code_of((*first)->format), out.rows);
  const bool alone = !keep && std::ranges::all_of(readers, [&](const ops::Weight* w) {
    return encodes(w) && api_.gemm.order_for(ctx_, code_of(w->format), out.rows) == order;
  });
  if (order == Order::kInt8 && !(whole_rows && alone)) return result;
  if (alone) {
    result.rows.data = nullptr;
    forms.alone = true;
  }
  result.act = new_form(out, order, forms);
  return result;
}

const uint8_t* CudaDevice::form_of(const Matrix& x, Order order, Forms& forms) {
  for (const Forms::Form& f : forms.forms) {
    const bool lives = f.data != nullptr && scratch_at_ <= f.position + scratch_.size();
    if (lives && f.order == static_cast<int>(order)) return f.data;
  }
  FRESHET_CHECK(!forms.alone, "numbers that were left in another form than a GEMM reads");
  const Activations act = new_form(x, order, forms);
  const Rows rows = rows_of(x);
  check(api_.gemm.encode(ctx_, &act, &rows, nullptr, nullptr, x.rows), "encode");
  return act.data;
}

size_t CudaDevice::scratch_bytes(const ops::Ops::ShapeLimits& l) const {
  const auto fragments = [this](int64_t rows, int64_t cols) {
    return aligned(
        static_cast<size_t>(api_.gemm.fragment_bytes(ctx_, rows, std::max<int64_t>(cols, 1))));
  };
  const auto floats = [](int64_t n) { return aligned(static_cast<size_t>(n) * sizeof(float)); };
  size_t most = fragments(l.tokens, l.max_cols) +
                static_cast<size_t>(l.heads) * fragments(l.tokens, l.max_head_dim);
  most = std::max(
      most,
      aligned(std::min(kMostPartial, static_cast<size_t>(api_.attention.partial_bytes(
                                         ctx_, static_cast<int>(l.tokens), l.heads, l.max_head_dim,
                                         std::max<int64_t>(l.max_context, 1))))) +
          fragments(l.tokens, l.max_cols));
  // The input and the output of a SwiGLU GEMM.
  most = std::max(most, fragments(l.tokens, l.max_cols) / 2 * 3);
  if (l.top_k > 0) {
    for (const int64_t tokens : {l.tokens, std::min<int64_t>(l.tokens, 512)}) {
      const int64_t pairs = tokens * l.top_k;
      // Tiles have at most 32 tokens, or at most twice the average per expert: both bounds hold. A
      // few tokens may go to every expert in use.
      const int64_t places = std::max(pairs + 32 * std::min<int64_t>(pairs, kMaxExperts) + 32,
                                      pairs + 2 * pairs + 128);
      most = std::max(most, floats(places * 3 * l.max_expert_ff) + floats(places * l.max_cols) +
                                fragments(places, l.max_cols) + fragments(places, l.max_expert_ff) +
                                4 * floats(places) + floats(pairs));
    }
  }
  // A product in two parts has both halves of its input there, and their encoded forms.
  most +=
      floats(l.tokens * l.split_cols) + (l.split_cols > 0 ? fragments(l.tokens, l.split_cols) : 0);
  return 2 * most + (size_t{4} << 20);
}

Status CudaDevice::set_scratch(size_t bytes) {
  scratch_ = Buffer();
  FRESHET_ASSIGN_OR_RETURN(scratch_, Buffer::allocate(bytes, this));
  scratch_at_ = 0;
  forget_steps();
  return {};
}

Status CudaDevice::set_inputs(size_t bytes) {
  bytes = aligned(std::max(bytes, kLeastStage));
  if (bytes <= stage_.size()) return {};
  stage_ = Buffer();
  host_stage_ = Buffer();
  stage_at_ = 0;
  stage_used_ = {};
  FRESHET_ASSIGN_OR_RETURN(stage_, Buffer::allocate(bytes, this));
  FRESHET_ASSIGN_OR_RETURN(host_stage_, Buffer::allocate(2 * bytes, &pinned_));
  forget_steps();
  return {};
}

// ---- Weights

const ops::MatmulKernel* CudaDevice::matmul_row(quant::Format format) const {
  for (const ops::MatmulKernel& row : kRows) {
    if (row.format == format) return &row;
  }
  return nullptr;
}

std::string CudaDevice::kernel_names(const ops::Weight& w) const {
  if (w.use == ops::Use::kExperts) return "moe (by tokens and experts)";
  return gemm_names(forced_, limits_, product_view(w).code, w.rows, w.cols);
}

// Whether all F32 rows are exact in BF16.
static bool bf16_holds(std::span<const uint8_t* const> rows, int64_t cols) {
  return std::ranges::all_of(rows, [&](const uint8_t* row) {
    uint32_t low = 0;
    for (int64_t c = 0; c < cols; ++c) {
      uint32_t bits;
      std::memcpy(&bits, row + c * static_cast<int64_t>(sizeof(bits)), sizeof(bits));
      low |= bits & 0xffff;
    }
    return low == 0;
  });
}

CudaDevice::Packing CudaDevice::packing_of(quant::Format format, int64_t rows, int64_t cols,
                                           ops::Use use) const {
  const bool panels = format == quant::Format::kFP8 && use != ops::Use::kExperts;
  Packing p;
  p.code = panels ? Code::kFP8Panels : code_of(format);
  p.bytes = api_.gemm.packed_bytes(ctx_, p.code, rows, cols);
  p.beside = p.code;
  if (use == ops::Use::kTable) p.beside = heads_of(p.code);
  if (p.code == Code::kF32 && rows <= kMaxExperts) p.beside = Code::kExactF32;
  if (p.beside != p.code) p.bytes_beside = api_.gemm.packed_bytes(ctx_, p.beside, rows, cols);
  return p;
}

int64_t CudaDevice::packed_bytes(quant::Format format, int64_t rows, int64_t cols,
                                 ops::Use use) const {
  const Packing p = packing_of(format, rows, cols, use);
  return p.bytes + p.bytes_beside;
}

// A router's rows are packed a second time if they are exact in BF16: see product_view().
Result<Buffer> CudaDevice::pack(ThreadPool& pool, quant::Format format,
                                std::span<const uint8_t* const> rows, int64_t cols, ops::Use use) {
  const auto count = static_cast<int64_t>(rows.size());
  Packing p = packing_of(format, count, cols, use);
  if (use == ops::Use::kProducts) {
    FRESHET_RETURN_IF_ERROR(takes_weight(forced_, limits_, code_of(format), count, cols));
  }
  if (p.beside == Code::kExactF32 && !bf16_holds(rows, cols)) p.bytes_beside = 0;
  FRESHET_ASSIGN_OR_RETURN(Buffer packed,
                           Buffer::allocate(static_cast<size_t>(p.bytes + p.bytes_beside), this));
  const size_t row_bytes = quant::row_bytes(format, cols);
  const int64_t at_once = static_cast<int64_t>(kRaw / row_bytes) / 16 * 16;
  if (at_once == 0) return unsupported("rows of {} bytes are too long for {}", row_bytes, name_);
  int error = 0;
  for (int slot = 0; slot < kUploadSlots && error == 0; ++slot) {
    error = api_.memory.upload_used(ctx_, slot);  // uploads start after all earlier work
  }
  int slot = 0;
  for (int64_t first = 0; first < count && error == 0; first += at_once) {
    const int64_t n = std::min(at_once, count - first);
    const auto chunk = rows.subspan(static_cast<size_t>(first), static_cast<size_t>(n));
    error = pack_rows(pool, chunk, row_bytes, slot, [&](const uint8_t* raw) {
      int e = api_.gemm.pack(ctx_, p.code, packed.data(), raw, first, n, count, cols);
      if (e == 0 && p.bytes_beside > 0) {
        e = api_.gemm.pack(ctx_, p.beside, packed.data() + p.bytes, raw, first, n, count, cols);
      }
      return e;
    });
    slot = (slot + 1) % kUploadSlots;
  }
  if (error == 0) error = api_.stream.sync(ctx_);
  if (error != 0) return internal_error("CUDA: packing: {}", api_.error_text(error));
  return packed;
}

// Copies rows to the slot's pinned memory and uploads them on the copy stream while rows of the
// other slot are packed; then packs them.
int CudaDevice::pack_rows(ThreadPool& pool, std::span<const uint8_t* const> rows, size_t row_bytes,
                          int slot, FunctionRef<int(const uint8_t* raw)> pack) {
  constexpr size_t kRowsATask = 64;
  const size_t at = static_cast<size_t>(slot) * kRaw;
  if (const int error = api_.memory.upload_await(ctx_, slot); error != 0) return error;
  const size_t tasks = (rows.size() + kRowsATask - 1) / kRowsATask;
  pool.parallel_for(static_cast<int64_t>(tasks), [&](int64_t task, int) {
    const size_t begin = static_cast<size_t>(task) * kRowsATask;
    for (size_t r = begin; r < std::min(rows.size(), begin + kRowsATask); ++r) {
      std::memcpy(host_raw_.data() + at + r * row_bytes, rows[r], row_bytes);
    }
  });
  int error = api_.memory.upload_ahead(ctx_, slot, raw_.data() + at, host_raw_.data() + at,
                                       static_cast<int64_t>(rows.size() * row_bytes));
  if (error == 0) error = pack(raw_.data() + at);
  return error == 0 ? api_.memory.upload_used(ctx_, slot) : error;
}

// The view of a weight that GEMMs read.
WeightView CudaDevice::product_view(const ops::Weight& w) const {
  WeightView view = view_of(w);
  if (view.code != Code::kF32) return view;
  const auto bytes = static_cast<size_t>(api_.gemm.packed_bytes(ctx_, Code::kF32, w.rows, w.cols));
  if (w.packed.size() > bytes) {
    view.data += bytes;
    view.code = Code::kExactF32;
  }
  return view;
}

Status CudaDevice::supports(const ops::KvShape& s) const {
  if (s.type == ops::KvType::kF32) {
    return unsupported(
        "keys and values of type {} on {}: it keeps f16, bf16, fp8, int8, int4 and k8v4, use "
        "--kv-cache-dtype auto or --device cpu",
        ops::name_of(s.type), name_);
  }
  const auto keys = ops::info(s.type).key.code;
  const int unit = keys == ops::KvCode::kE4M3 || keys == ops::KvCode::kInt8 ? 16 : 8;
  if (s.key_dim % unit != 0 || s.value_dim % unit != 0 || s.key_dim > kMostKeyDim) {
    return unsupported("attention heads of {} and {} features in {} on {}: use {}", s.key_dim,
                       s.value_dim, ops::name_of(s.type), name_,
                       s.key_dim % 8 == 0 && s.value_dim % 8 == 0 && s.key_dim <= kMostKeyDim
                           ? "--kv-cache-dtype f16"
                           : "--device cpu");
  }
  return {};
}

Status CudaDevice::supports(const ops::Routing& r) const {
  if (r.experts > kMaxExperts || r.top_k > kMaxTopK) {
    return unsupported("{} of {} experts a token on {}: use --device cpu", r.top_k, r.experts,
                       name_);
  }
  if (r.score == ops::Routing::Score::kSparsemixer) {
    return unsupported("experts chosen by sparsemixer on {}: use --device cpu", name_);
  }
  return {};
}

}  // namespace freshet::cuda
