#include "engine/tiers.h"

#include <algorithm>
#include <utility>

#include <fmt/ranges.h>

#include "base/hash.h"
#include "base/mapped_file.h"
#include "base/units.h"
#include "models/weight_cache.h"
#include "ops/device.h"

namespace freshet::engine {
namespace {

// Increment it if the layout of a block changes, or what is computed for it.
constexpr int kBlockLayout = 1;
// Without a host tier, the buffer between the cache and the disk.
constexpr size_t kWriteBuffer = size_t{256} << 20;
constexpr size_t kDeviceWriteBuffer = size_t{1} << 30;
constexpr size_t kLeastBlocks = 16;
constexpr double kDeviceWriteRate = 20e9;  // bytes a second that leave a device

// A file of the model, wherever it lies. The time of its last change tells of edits that the pages
// miss. The embedded model is a new file in memory at each start, so all of it is read.
std::string digest_of(const MappedFile& file) {
  constexpr size_t kPages = 64, kPage = 4096;
  const std::span<const uint8_t> bytes = file.bytes();
  if (file.path().starts_with("/proc/self/fd/"))
    return fmt::format("file {} {:016x}\n", bytes.size(), hash_bytes(bytes));
  uint64_t pages = 0;
  for (size_t i = 0; i < kPages && !bytes.empty(); ++i) {
    const size_t size = std::min(bytes.size(), kPage);
    pages = hash_bytes(bytes.subspan((bytes.size() - size) / (kPages - 1) * i, size), pages);
  }
  return fmt::format("file {} {} {:016x}\n", bytes.size(), file.changed_ns(), pages);
}

// The lines of the key of packed weights that are not about files: program, kernels, configuration.
std::string kernel_lines(const std::string& key) {
  std::string lines;
  for (size_t at = 0; at < key.size();) {
    const size_t end = std::min(key.find('\n', at), key.size() - 1) + 1;
    if (key.compare(at, 5, "file ") != 0) lines += key.substr(at, end - at);
    at = end;
  }
  return lines;
}

}  // namespace

Result<kv_cache::TierConfig> tier_config(const EngineOptions& o) {
  kv_cache::TierConfig config;
  config.folder = o.kv_cache_dir;
  if (o.kv_cache_dir_bytes > 0) config.folder_bytes = o.kv_cache_dir_bytes;
  if (!o.kv_transfer_config.empty()) {
    if (o.kv_offloading_bytes > 0)
      return invalid_argument(
          "--kv-offloading-size and --kv-transfer-config say the same: give one");
    FRESHET_RETURN_IF_ERROR(kv_cache::read_transfer_config(o.kv_transfer_config, config));
  }
  if (o.kv_offloading_bytes > 0) config.host_bytes = o.kv_offloading_bytes;
  if (o.kv_cache_dir_bytes > 0 && config.folder.empty())
    return invalid_argument("--kv-cache-dir-size needs --kv-cache-dir");
  if (config.wanted() && !o.enable_prefix_caching) {
    return invalid_argument(
        "--kv-offloading-size, --kv-transfer-config and --kv-cache-dir keep "
        "prefixes: leave out --no-enable-prefix-caching");
  }
  return config;
}

Status keeps_prefixes(const ModelSpec& spec, const std::vector<KvGroup>& groups, bool shared) {
  const auto has = [&](KvKind kind) {
    return std::ranges::find(groups, kind, &KvGroup::kind) != groups.end();
  };
  const char* why = nullptr;
  if (spec.encoder != nullptr || has(KvKind::kCross)) {
    why = "its keys and values depend on an encoder";
  } else if (has(KvKind::kState)) {
    why = "it has state-space or linear-attention layers";
  } else if (!shared) {
    why = "its cache does not share prefixes";
  }
  if (why == nullptr) return {};
  return unsupported(
      "prefixes of this model ({}) cannot be kept in files or host memory: {}; leave out "
      "--kv-offloading-size, --kv-transfer-config, --kv-cache-dir and --slot-save-path",
      spec.architecture, why);
}

std::string cache_identity(const EngineOptions& o, const loader::Checkpoint& checkpoint,
                           const ops::Ops& ops, const KvCacheSpec& cache) {
  std::string text = fmt::format("layout {}\n{}", kBlockLayout,
                                 kernel_lines(models::weight_cache_key(checkpoint, ops)));
  for (const MappedFile* file : checkpoint.files()) text += digest_of(*file);
  text += fmt::format("path {}\nforced {}\nblock {}\n", o.reference ? "reference" : "kernels",
                      fmt::join(o.force_kernels, " "), ops::kBlockTokens);
  if (const ops::Device* device = ops.device()) text += fmt::format("device {}\n", device->name());
  for (const KvGroup& group : cache.groups) {
    text += fmt::format("group {} {}", group.window, group.chunk);
    for (const int layer : group.layers) {
      const ops::KvShape& s = cache.layers[static_cast<size_t>(layer)].shape;
      text += fmt::format(" {}:{}:{}:{}:{}:{}{}{}{}", layer, ops::name_of(s.type), s.kv_heads,
                          s.key_dim, s.value_dim, s.block_bytes(), s.value_is_key_prefix ? "p" : "",
                          s.bounded ? "b" : "", s.summed ? "s" : "");
    }
    text += "\n";
  }
  return text;
}

Result<std::unique_ptr<kv_cache::TierStore>> open_tiers(const kv_cache::TierConfig& config,
                                                        const std::string& identity,
                                                        const KvStorage& cache,
                                                        ops::Device* device) {
  const kv_cache::BlockPlaces places(cache);
  size_t block = 0;
  for (const size_t unit : places.unit_bytes()) block += unit;
  kv_cache::TierStore::Options options;
  options.host_policy = config.policy;
  options.readers = config.readers;
  options.host_bytes = config.host_bytes;
  if (device != nullptr) {
    options.open_lane = [device](const ops::LaneLayers& layers) {
      return device->copy_lane(layers);
    };
    options.lane_memory = &device->host_memory();
    options.write_rate = kDeviceWriteRate;
  }
  if (!config.folder.empty()) {
    const size_t buffer = device != nullptr ? kDeviceWriteBuffer : kWriteBuffer;
    options.host_bytes =
        std::max({config.host_bytes, kLeastBlocks * block, std::min(buffer, 512 * block)});
    kv_cache::DiskTierOptions disk;
    disk.folder = config.folder;
    disk.limit = static_cast<int64_t>(config.folder_bytes);
    disk.identity = identity;
    disk.pieces = places.piece_bytes();
    FRESHET_ASSIGN_OR_RETURN(options.disk, kv_cache::DiskTier::open(std::move(disk)));
  }
  return kv_cache::TierStore::create(std::move(options), cache);
}

std::string describe_tiers(const kv_cache::TierConfig& config, const kv_cache::TierStore& store) {
  std::string text = fmt::format("\n  host tier  {:>9}  {}", format_bytes(store.host_bytes()),
                                 config.host_bytes > 0 ? config.policy : "write buffer");
  if (config.folder.empty()) return text;
  const kv_cache::DiskTier::Stats disk = store.stats().disk;
  return text + fmt::format("\n  disk tier  {:>9}  {}: {} in {} blocks now",
                            format_bytes(config.folder_bytes), config.folder,
                            format_bytes(static_cast<size_t>(disk.bytes)), disk.blocks);
}

EngineStats::Tiers tier_numbers(const kv_cache::TierStore& store) {
  const kv_cache::TierStats s = store.stats();
  EngineStats::Tiers t;
  t.store_bytes = s.store_bytes;
  t.load_bytes = s.load_bytes;
  t.store_seconds = s.store_seconds;
  t.load_seconds = s.load_seconds;
  t.stores = s.stores;
  t.loads = s.loads;
  t.stores_skipped = s.stores_skipped;
  t.load_failures = s.load_failures;
  t.swapped = s.swapped;
  t.host_usage = s.host_usage;
  t.disk_bytes = s.disk.bytes;
  t.disk_blocks = s.disk.blocks;
  return t;
}

}  // namespace freshet::engine
