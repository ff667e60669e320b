#include "kv_cache/tier_store.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <utility>

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kv_cache/block_pool.h"

namespace freshet::kv_cache {
namespace {

constexpr size_t kUnitsAtOnce = 8;        // that a reader takes from a load
constexpr size_t kLaneUnitsAtOnce = 128;  // likewise, for a device

int64_t steady_ns() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(t).count();
}

BlockSecret random_secret() {
  std::random_device random;
  return {(uint64_t{random()} << 32) | random(), (uint64_t{random()} << 32) | random()};
}

// Lets threads that compute run first: what is written is needed by a later request.
void give_way() {
  (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
}

}  // namespace

// ---- where blocks lie ------------------------------------------------------------------------

BlockPlaces::BlockPlaces(const KvStorage& storage) {
  for (const KvGroup& group : storage.spec().groups) {
    auto& layers = layers_.emplace_back();
    auto& bytes = bytes_.emplace_back();
    for (const int layer : group.layers) {
      layers.push_back(storage.layer(layer).data);
      bytes.push_back(storage.spec().layers[static_cast<size_t>(layer)].block_bytes());
    }
  }
  host_ = storage.in_host_memory();
}

std::vector<size_t> BlockPlaces::unit_bytes() const {
  std::vector<size_t> units;
  for (const std::vector<size_t>& group : bytes_) {
    size_t& unit = units.emplace_back(0);
    for (const size_t piece : group) unit += piece;
  }
  return units;
}

ops::LaneLayers BlockPlaces::lane_layers() const {
  ops::LaneLayers groups;
  for (size_t g = 0; g < layers_.size(); ++g) {
    std::vector<ops::LaneLayer>& layers = groups.emplace_back();
    int64_t offset = 0;
    for (size_t i = 0; i < layers_[g].size(); ++i) {
      const auto bytes = static_cast<int64_t>(bytes_[g][i]);
      layers.push_back({layers_[g][i], bytes, offset});
      offset += bytes;
    }
  }
  return groups;
}

BlockPieces BlockPlaces::pieces(int group, int32_t block) const {
  BlockPieces pieces;
  const auto g = static_cast<size_t>(group);
  for (size_t i = 0; i < layers_[g].size(); ++i) {
    const size_t bytes = bytes_[g][i];
    pieces.emplace_back(layers_[g][i] + bytes * static_cast<size_t>(block), bytes);
  }
  return pieces;
}

// ---- the store -------------------------------------------------------------------------------

Result<std::unique_ptr<TierStore>> TierStore::create(Options options, const KvStorage& storage) {
  BlockPlaces places(storage);
  std::unique_ptr<Lanes> lanes;
  if (!places.in_host_memory()) {
    lanes = std::make_unique<Lanes>();
    const ops::LaneLayers layers = places.lane_layers();
    for (auto* lane : {&lanes->stores, &lanes->loads}) {
      if (options.open_lane) *lane = options.open_lane(layers);
      if (*lane != nullptr) continue;
      return unsupported(
          "this device has no copies of cache blocks: leave out --kv-offloading-size, "
          "--kv-transfer-config and --kv-cache-dir, or use --device cpu");
    }
  }
  if (options.now_ns == nullptr) options.now_ns = steady_ns;
  FRESHET_ASSIGN_OR_RETURN(
      HostTier host, HostTier::create(options.host_bytes, places.unit_bytes(), options.host_policy,
                                      options.lane_memory));
  const BlockSecret secret = options.disk != nullptr ? options.disk->secret() : random_secret();
  const bool reads_disk = lanes != nullptr && options.disk != nullptr;
  std::unique_ptr<TierStore> store(new TierStore(std::move(options), std::move(places),
                                                 std::move(host), secret, std::move(lanes)));
  const size_t longest = *std::ranges::max_element(store->unit_bytes_);
  for (int i = 0; i < std::max(1, store->options_.readers); ++i) {
    Buffer& buffer = store->buffers_.emplace_back();
    if (!reads_disk) continue;
    FRESHET_ASSIGN_OR_RETURN(buffer,
                             Buffer::allocate(kUnitsAtOnce * longest, store->options_.lane_memory));
  }
  store->start();
  return store;
}

TierStore::TierStore(Options options, BlockPlaces places, HostTier host, const BlockSecret& secret,
                     std::unique_ptr<Lanes> lanes)
    : options_(std::move(options)),
      places_(std::move(places)),
      unit_bytes_(places_.unit_bytes()),
      keys_(secret),
      lanes_(std::move(lanes)),
      budget_at_(options_.now_ns()),
      host_(std::move(host)) {}

void TierStore::start() {
  if (options_.disk != nullptr || lanes_ != nullptr)
    threads_.emplace_back([this] { write_blocks(); });
  for (Buffer& buffer : buffers_) {
    const std::span<uint8_t> room(buffer.data(), buffer.size());
    threads_.emplace_back([this, room] { read_blocks(room); });
  }
}

TierStore::~TierStore() {
  stop();
}

void TierStore::stop() {
  before_step();  // what the last step stored
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  to_write_.notify_all();
  to_read_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

bool TierStore::has(const BlockKey& key, int group) {
  {
    const std::lock_guard lock(mutex_);
    if (host_.find(key, group) != kNoBlock) return true;
  }
  return options_.disk != nullptr && options_.disk->contains(key, group);
}

void TierStore::touch(std::span<const BlockKey> keys) {
  const std::lock_guard lock(mutex_);
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    for (int g = 0; g < host_.groups(); ++g) host_.touch(*key, g);
  }
}

bool TierStore::within_budget(size_t bytes) {
  if (options_.write_rate <= 0.0) return true;
  const int64_t now = options_.now_ns();
  const double most = options_.write_rate * 0.1;  // a tenth of a second's worth at once
  const double grown = static_cast<double>(now - budget_at_) * 1e-9 * options_.write_rate;
  budget_ = std::min(std::max(most, 8.0 * static_cast<double>(bytes)), budget_ + grown);
  budget_at_ = now;
  if (budget_ < static_cast<double>(bytes)) return false;
  budget_ -= static_cast<double>(bytes);
  return true;
}

bool TierStore::store(const BlockUnit& unit, bool swap) {
  const bool to_disk = options_.disk != nullptr && unit.tokens == ops::kBlockTokens;
  if (to_disk && options_.disk->contains(unit.key, unit.group)) return true;
  const size_t bytes = unit_bytes_[static_cast<size_t>(unit.group)];
  int32_t slot = kNoBlock;
  std::span<uint8_t> data;
  {
    const std::lock_guard lock(mutex_);
    if (host_.contains(unit.key, unit.group)) {
      host_.touch(unit.key, unit.group);
      return true;
    }
    if (swap || within_budget(bytes)) slot = host_.take(unit.key, unit.group);
    if (slot == kNoBlock) {
      ++stats_.stores_skipped;
      return false;
    }
    data = host_.data(unit.group, slot);
  }
  Write write{unit, slot, lanes_ == nullptr, to_disk, swap, options_.now_ns()};
  if (lanes_ != nullptr) {  // it keeps holding the slot
    lanes_->listed.push_back(write);
    return true;
  }
  for (const std::span<uint8_t> piece : places_.pieces(unit.group, unit.block)) {
    std::memcpy(data.data(), piece.data(), piece.size());
    data = data.subspan(piece.size());
  }
  const std::lock_guard lock(mutex_);
  complete(write);
  if (to_disk) {
    writes_.push_back(write);  // it keeps holding the slot
    to_write_.notify_one();
  } else {
    host_.drop(unit.group, slot);
  }
  return true;
}

// Under the lock: the slot's bytes are there.
void TierStore::complete(const Write& write) {
  host_.complete(write.unit.group, write.slot);
  ++stats_.stores;
  stats_.swapped += write.swap;
  stats_.store_bytes += static_cast<int64_t>(unit_bytes_[static_cast<size_t>(write.unit.group)]);
  stats_.store_seconds += static_cast<double>(options_.now_ns() - write.from_ns) * 1e-9;
}

void TierStore::before_step() {
  if (lanes_ == nullptr || lanes_->listed.empty()) return;
  lanes_->stores->follow();
  std::vector<ops::LaneUnit> units;
  {
    const std::lock_guard lock(mutex_);
    for (int g = 0; g < host_.groups(); ++g) {
      units.clear();
      for (const Write& write : lanes_->listed) {
        if (write.unit.group != g) continue;
        units.push_back({host_.data(g, write.slot).data(), write.unit.block});
      }
      if (!units.empty()) lanes_->stores->copy(g, units, false);
    }
    writes_.insert(writes_.end(), lanes_->listed.begin(), lanes_->listed.end());
  }
  lanes_->listed.clear();
  lanes_->stores->precede();
  to_write_.notify_one();
}

void TierStore::write_blocks() {
  if (lanes_ == nullptr) give_way();
  std::unique_lock lock(mutex_);
  while (true) {
    to_write_.wait(lock, [this] { return stop_ || !writes_.empty(); });
    if (writes_.empty()) return;  // only once all is written
    if (!writes_.front().copied) {
      const size_t started = writes_.size();
      lock.unlock();
      lanes_->stores->wait();
      lock.lock();
      for (size_t i = 0; i < started; ++i) {
        if (!std::exchange(writes_[i].copied, true)) complete(writes_[i]);
      }
    }
    const Write write = writes_.front();
    writes_.pop_front();
    writing_ = true;
    const std::span<uint8_t> data = host_.data(write.unit.group, write.slot);
    lock.unlock();
    const bool written = !write.to_disk || options_.disk->append(write.unit.key, write.unit.group,
                                                                 write.unit.tokens, data);
    lock.lock();
    if (!written) ++stats_.stores_skipped;
    host_.drop(write.unit.group, write.slot);
    writing_ = false;
    if (writes_.empty()) idle_.notify_all();
  }
}

void TierStore::flush() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return writes_.empty() && !writing_; });
}

// ---- loads -----------------------------------------------------------------------------------

void TierStore::note_compute(int64_t tokens, double seconds) {
  if (tokens <= 0 || seconds <= 0.0) return;
  const double ns = seconds * 1e9 / static_cast<double>(tokens);
  const double before = compute_ns_.load();
  compute_ns_ = before == 0.0 ? ns : before + 0.2 * (ns - before);
}

bool TierStore::pays(std::span<const BlockUnit> units, int64_t tokens, bool swap) {
  const double compute = compute_ns_.load() * static_cast<double>(tokens);
  if (compute == 0.0) return true;  // nothing was computed yet: a warm start
  const std::lock_guard lock(mutex_);
  double seconds = options_.load_seconds;
  for (const BlockUnit& unit : units) {
    const auto bytes = static_cast<double>(unit_bytes_[static_cast<size_t>(unit.group)]);
    const bool in_host = swap || host_.find(unit.key, unit.group) != kNoBlock;
    seconds += (swap ? 2.0 : 1.0) * bytes / (in_host ? host_rate_ : disk_rate_);
  }
  return seconds * 1e9 < compute;
}

uint64_t TierStore::load(std::vector<BlockUnit> units) {
  FRESHET_CHECK(!units.empty());
  if (lanes_ != nullptr) {
    before_step();  // its blocks may be some that were stored
    lanes_->loads->follow();
  }
  auto load = std::make_shared<Load>();
  load->left = units.size();
  load->ok.assign(units.size(), 0);
  load->units = std::move(units);
  load->started_at = options_.now_ns();
  {
    const std::lock_guard lock(mutex_);
    load->ticket = next_ticket_++;
    loads_.push_back(load);
  }
  to_read_.notify_all();
  return load->ticket;
}

std::vector<LoadResult> TierStore::take_loaded() {
  const std::lock_guard lock(mutex_);
  return std::exchange(ended_, {});
}

// From the host tier, or else from the disk.
bool TierStore::read_unit(const BlockUnit& unit) {
  const BlockPieces to = places_.pieces(unit.group, unit.block);
  const int64_t from = options_.now_ns();
  std::unique_lock lock(mutex_);
  const int32_t slot = host_.find(unit.key, unit.group);
  bool ok = true;
  if (slot != kNoBlock) {
    host_.hold(unit.group, slot);
    std::span<uint8_t> data = host_.data(unit.group, slot);
    lock.unlock();
    for (const std::span<uint8_t> piece : to) {
      std::memcpy(piece.data(), data.data(), piece.size());
      data = data.subspan(piece.size());
    }
    lock.lock();
    host_.drop(unit.group, slot);
  } else {
    lock.unlock();
    ok = options_.disk != nullptr && options_.disk->read(unit.key, unit.group, to);
    lock.lock();
  }
  count_load(unit, ok, slot != kNoBlock, options_.now_ns() - from);
  return ok;
}

// Under the lock. ns: that the unit took.
void TierStore::count_load(const BlockUnit& unit, bool ok, bool from_host, int64_t ns) {
  if (!ok) {
    ++stats_.load_failures;
    return;
  }
  const auto bytes = static_cast<double>(unit_bytes_[static_cast<size_t>(unit.group)]);
  ++stats_.loads;
  stats_.load_bytes += static_cast<int64_t>(bytes);
  double& measured = from_host ? host_rate_ : disk_rate_;
  measured += 0.05 * (bytes * 1e9 / static_cast<double>(std::max<int64_t>(ns, 1)) - measured);
}

bool TierStore::read_disk(const BlockUnit& unit, uint8_t* to) {
  if (options_.disk == nullptr) return false;
  BlockPieces pieces;
  for (const size_t bytes : places_.piece_bytes()[static_cast<size_t>(unit.group)]) {
    pieces.emplace_back(to, bytes);
    to += bytes;
  }
  return options_.disk->read(unit.key, unit.group, pieces);
}

// As read_unit(), to the blocks of a device. `buffer` holds kUnitsAtOnce units of any group.
void TierStore::read_by_lane(std::span<const BlockUnit> units, uint8_t* ok,
                             std::span<uint8_t> buffer) {
  struct Read {
    size_t unit;
    int32_t slot;     // kNoBlock: from the disk
    int64_t disk_ns;  // that reading it from there took
  };
  std::vector<Read> reads;
  std::vector<std::vector<ops::LaneUnit>> copies(unit_bytes_.size());
  size_t at = 0;  // in the buffer
  const auto run = [&] {
    const int64_t from = options_.now_ns();
    for (size_t g = 0; g < copies.size(); ++g) {
      if (copies[g].empty()) continue;
      const std::lock_guard one(lanes_->loading);
      lanes_->loads->copy(static_cast<int>(g), copies[g], true);
      copies[g].clear();
    }
    lanes_->loads->wait();
    const std::lock_guard lock(mutex_);
    const int64_t ns = (options_.now_ns() - from) / std::max<int64_t>(1, std::ssize(reads));
    for (const auto& [i, slot, disk_ns] : reads) {
      count_load(units[i], ok[i] != 0, slot != kNoBlock, ns + disk_ns);
      if (slot != kNoBlock) host_.drop(units[i].group, slot);
    }
    reads.clear();
    at = 0;
  };
  const size_t longest = *std::ranges::max_element(unit_bytes_);
  for (size_t i = 0; i < units.size(); ++i) {
    const BlockUnit& unit = units[i];
    std::unique_lock lock(mutex_);
    const int32_t slot = host_.find(unit.key, unit.group);
    uint8_t* data = nullptr;
    if (slot != kNoBlock) {
      host_.hold(unit.group, slot);
      data = host_.data(unit.group, slot).data();
    }
    lock.unlock();
    Read& read = reads.emplace_back(i, slot, 0);
    ok[i] = 1;
    if (slot == kNoBlock) {
      data = buffer.data() + at;
      const int64_t from = options_.now_ns();
      ok[i] = read_disk(unit, data) ? 1 : 0;
      read.disk_ns = options_.now_ns() - from;
      at += unit_bytes_[static_cast<size_t>(unit.group)];
    }
    if (ok[i] != 0) copies[static_cast<size_t>(unit.group)].push_back({data, unit.block});
    if (at + longest > buffer.size() && at > 0) run();
  }
  if (!reads.empty()) run();
}

void TierStore::read_blocks(std::span<uint8_t> buffer) {
  const size_t at_once = lanes_ != nullptr ? kLaneUnitsAtOnce : kUnitsAtOnce;
  std::unique_lock lock(mutex_);
  while (true) {
    to_read_.wait(lock, [this] { return stop_ || !loads_.empty(); });
    if (stop_) return;
    const std::shared_ptr<Load> load = loads_.front();
    const size_t first = load->next;
    const size_t end = std::min(first + at_once, load->units.size());
    load->next = end;
    if (end == load->units.size()) loads_.pop_front();
    lock.unlock();
    if (lanes_ != nullptr) {
      read_by_lane(std::span(load->units).subspan(first, end - first), load->ok.data() + first,
                   buffer);
    } else {
      for (size_t i = first; i < end; ++i) load->ok[i] = read_unit(load->units[i]) ? 1 : 0;
    }
    lock.lock();
    load->left -= end - first;
    if (load->left > 0) continue;
    stats_.load_seconds += static_cast<double>(options_.now_ns() - load->started_at) * 1e-9;
    ended_.push_back({load->ticket, {load->ok.begin(), load->ok.end()}});
    lock.unlock();
    if (on_loaded_) on_loaded_();
    lock.lock();
  }
}

// ---- books -----------------------------------------------------------------------------------

TierStats TierStore::stats() const {
  std::unique_lock lock(mutex_);
  TierStats s = stats_;
  s.host_rate = host_rate_;
  s.disk_rate = disk_rate_;
  for (int g = 0; g < host_.groups(); ++g) {
    s.host_usage = std::max(s.host_usage, static_cast<double>(host_.used(g)) / host_.slots());
  }
  lock.unlock();
  if (options_.disk != nullptr) s.disk = options_.disk->stats();
  return s;
}

Status TierStore::check() const {
  const std::lock_guard lock(mutex_);
  return host_.check();
}

}  // namespace freshet::kv_cache
