#include "backend/cpu/ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "backend/cpu/ceilings_probe.h"
#include "tensor/buffer.h"

namespace freshet::cpu {

using ops::ActKind;
using ops::Capabilities;
using ops::CpuIsa;

namespace {

// More than the caches of any known machine hold for these cores.
constexpr size_t kMemory = size_t{384} << 20;
constexpr int kRuns = 3;

double seconds_of(ThreadPool& pool, FunctionRef<void(int)> body) {
  const auto begin = std::chrono::steady_clock::now();
  pool.run(body);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Reads `streams` equal parts of [data, data + bytes) in parallel and prefetches `ahead` bytes
// ahead (0: leaves it to the hardware). Returns a value that depends on the data.
template <int streams, int ahead>
uint64_t read_streams(const uint8_t* data, size_t bytes) {
  const size_t part = bytes / streams / 64 * 64;
  uint64_t sum[8] = {};
  for (size_t at = 0; at < part; at += 64) {
    for (int s = 0; s < streams; ++s) {
      const uint8_t* line = data + static_cast<size_t>(s) * part + at;
      if (ahead > 0) __builtin_prefetch(line + ahead, 0, 2);
      uint64_t words[8];
      std::memcpy(words, line, sizeof words);
      for (int i = 0; i < 8; ++i) sum[i] += words[i];
    }
  }
  uint64_t total = 0;
  for (const uint64_t s : sum) total += s;
  return total;
}

using ReadWay = uint64_t (*)(const uint8_t*, size_t);
constexpr ReadWay kReadWays[] = {read_streams<1, 0>, read_streams<1, 2048>, read_streams<4, 512>,
                                 read_streams<8, 512>};

// Bytes per second when each worker reads its own `bytes`, `times` times.
double read_rate(ThreadPool& pool, const Buffer& buffer, size_t bytes, int times, ReadWay way) {
  std::atomic<uint64_t> total = 0;  // keeps the loop from being optimised away
  const double seconds = seconds_of(pool, [&](int worker) {
    const uint8_t* from = buffer.data() + static_cast<size_t>(worker) * bytes;
    uint64_t sum = 0;
    for (int i = 0; i < times; ++i) sum += way(from, bytes);
    total += sum;
  });
  FRESHET_CHECK(total % 8 == 0);  // every word is 8
  return static_cast<double>(bytes) * times * pool.size() / seconds;
}

Buffer filled(size_t bytes) {
  auto buffer = Buffer::allocate(bytes);
  if (!buffer.ok()) return {};
  std::fill_n(buffer->as<uint64_t>(), bytes / 8, uint64_t{8});
  return std::move(buffer).value();
}

double best_read(ThreadPool& pool, const Buffer& buffer, size_t bytes, int times) {
  if (buffer.size() == 0) return 0.0;
  double best = 0.0;
  for (int run = 0; run < kRuns; ++run) {
    for (const ReadWay way : kReadWays) {
      best = std::max(best, read_rate(pool, buffer, bytes, times, way));
    }
  }
  return best;
}

Ceiling measure_probe(ThreadPool& pool, const Probe& probe) {
  const int64_t turns = static_cast<int64_t>(2e9 / probe.operations) + 1;
  double best = 0.0;
  for (int run = 0; run < kRuns; ++run) {
    const double seconds = seconds_of(pool, [&](int) { probe.run(turns); });
    best = std::max(best, probe.operations * static_cast<double>(turns) * pool.size() / seconds);
  }
  return {probe.name, "op/s", best};
}

#if defined(__x86_64__)

const Probe* probe_of(const ops::MatmulKernel& kernel) {
  const bool numbers = kernel.act == ActKind::kF32 || kernel.act == ActKind::kBF16;
  switch (kernel.isa) {
    case CpuIsa::kAmx:
      return numbers ? &kTileBf16Probe : &kTileInt8Probe;
    case CpuIsa::kAvx512Vnni:
      return &kAvx512VnniProbes.int8;
    case CpuIsa::kAvx512:
      return &kAvx512Probes.f32;
    case CpuIsa::kAvxVnni:
      return &kAvxVnniProbes.int8;
    case CpuIsa::kAvx2:
      return numbers ? &kAvx2Probes.f32 : &kAvx2Probes.int8;
    default:
      return nullptr;
  }
  return nullptr;
}

std::vector<const Probe*> probes_for(const Capabilities& can) {
  std::vector<const Probe*> list;
  if (can.has(CpuIsa::kAvx2)) list = {&kAvx2Probes.f32, &kAvx2Probes.int8};
  if (can.has(CpuIsa::kAvxVnni)) list.push_back(&kAvxVnniProbes.int8);
  if (can.has(CpuIsa::kAvx512)) list.push_back(&kAvx512Probes.f32);
  if (can.has(CpuIsa::kAvx512Vnni)) list.push_back(&kAvx512VnniProbes.int8);
  if (can.has(CpuIsa::kAmx)) {
    list.push_back(&kTileBf16Probe);
    list.push_back(&kTileInt8Probe);
  }
  return list;
}

#elif defined(__aarch64__)

const Probe* probe_of(const ops::MatmulKernel& kernel) {
  if (kernel.isa == CpuIsa::kScalar) return nullptr;
  if (kernel.act == ActKind::kF32 || kernel.act == ActKind::kBF16) return &kNeonProbes.f32;
  return kernel.isa == CpuIsa::kNeonDot ? &kNeonDotProbes.int8 : &kNeonProbes.int8;
}

std::vector<const Probe*> probes_for(const Capabilities& can) {
  std::vector<const Probe*> list;
  if (can.has(CpuIsa::kNeon)) list = {&kNeonProbes.f32, &kNeonProbes.int8};
  if (can.has(CpuIsa::kNeonDot)) list.push_back(&kNeonDotProbes.int8);
  return list;
}

#else

const Probe* probe_of(const ops::MatmulKernel&) {
  return nullptr;
}
std::vector<const Probe*> probes_for(const Capabilities&) {
  return {};
}

#endif

}  // namespace

double measure_read(ThreadPool& pool) {
  const Buffer buffer = filled(kMemory);
  return best_read(pool, buffer, kMemory / static_cast<size_t>(pool.size()) / 4096 * 4096, 1);
}

Ceiling measure_arithmetic(ThreadPool& pool, const ops::MatmulKernel& kernel) {
  const Probe* probe = probe_of(kernel);
  return probe == nullptr ? Ceiling{"", "op/s", 0.0} : measure_probe(pool, *probe);
}

std::vector<Ceiling> measure_ceilings(ThreadPool& pool, const Capabilities& can) {
  const auto workers = static_cast<size_t>(pool.size());
  std::vector<Ceiling> list = {{"read", "B/s", measure_read(pool)}};
  const size_t half_l2 = static_cast<size_t>(can.l2_bytes) / 2;
  constexpr size_t kL3 = size_t{8} << 20;
  const Buffer buffer = filled(workers * kL3);
  list.push_back({"l3, 8 MiB a thread", "B/s", best_read(pool, buffer, kL3, 4)});
  list.push_back({"l2", "B/s", best_read(pool, buffer, std::min(half_l2, kL3), 64)});
  for (const Probe* p : probes_for(can)) list.push_back(measure_probe(pool, *p));
  return list;
}

}  // namespace freshet::cpu
