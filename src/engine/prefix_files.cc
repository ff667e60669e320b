#include "engine/prefix_files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <future>
#include <system_error>
#include <utility>

#include <unistd.h>

#include "kv_cache/block_log.h"

namespace freshet::engine {
namespace {

using kv_cache::BlockCache;
using kv_cache::BlockKey;
using kv_cache::BlockPieces;
using kv_cache::BlockTable;
using kv_cache::kBlockTokens;
using kv_cache::kNoBlock;
using kv_cache::LogFile;
using kv_cache::LogRecord;

constexpr int32_t kTokensGroup = -1;  // of the record that holds the tokens

// Runs `order` on the step thread and waits for it. False: the engine is ending.
template <class F>
bool on_step_thread(StepLoop& loop, const F& order) {
  std::promise<void> done;
  const bool posted = loop.post([&] {
    order(loop.blocks());
    done.set_value();
  });
  if (posted) done.get_future().wait();
  return posted;
}

Status is_ending() {
  return cancelled("the engine is shutting down");
}

Status reaches_blocks(StepLoop& loop) {
  if (loop.cache().in_host_memory()) return {};
  return unsupported(
      "prefixes cannot be saved to a file from a GPU's cache, nor restored: use "
      "--device cpu, or --kv-cache-dir, which keeps them");
}

Status write_blocks_of(LogFile& file, const kv_cache::BlockPlaces& places,
                       const std::vector<int32_t>& tokens, const BlockTable& table) {
  const std::span<const uint8_t> ids(reinterpret_cast<const uint8_t*>(tokens.data()),
                                     tokens.size() * sizeof(int32_t));
  const size_t whole[] = {ids.size()};
  FRESHET_RETURN_IF_ERROR(file.append({}, kTokensGroup, static_cast<int32_t>(tokens.size()), ids,
                                      kv_cache::checksum_of(ids, whole))
                              .status());
  std::vector<uint8_t> bytes;
  for (size_t g = 0; g < table.ids.size(); ++g) {
    for (size_t i = 0; i < table.ids[g].size(); ++i) {
      if (table.ids[g][i] == kNoBlock) continue;
      const BlockPieces pieces = places.pieces(static_cast<int>(g), table.ids[g][i]);
      bytes.clear();
      for (const std::span<uint8_t> piece : pieces)
        bytes.insert(bytes.end(), piece.begin(), piece.end());
      FRESHET_RETURN_IF_ERROR(file.append({i, 0}, static_cast<int32_t>(g), kBlockTokens, bytes,
                                          kv_cache::checksum_of(pieces))
                                  .status());
    }
  }
  return {};
}

Status damaged_file(const std::string& path, std::string_view what) {
  return invalid_argument("{} cannot be restored: {}", path, what);
}

// Reads the records of blocks into those of the table, each exactly once.
Status read_blocks_of(const LogFile& file, const kv_cache::BlockPlaces& places,
                      const BlockTable& table) {
  std::vector<std::vector<bool>> seen;
  size_t missing = 0;
  for (const std::vector<int32_t>& ids : table.ids) {
    seen.emplace_back(ids.size(), false);
    missing +=
        static_cast<size_t>(std::ranges::count_if(ids, [](int32_t b) { return b != kNoBlock; }));
  }
  const std::vector<size_t> unit_bytes = places.unit_bytes();
  for (const LogRecord& record : std::span(file.records()).subspan(1)) {
    const auto g = static_cast<size_t>(record.group);
    const size_t i = record.key.low;
    if (record.group < 0 || g >= table.ids.size() || i >= table.ids[g].size() ||
        record.bytes != unit_bytes[g] || seen[g][i])
      return damaged_file(file.path(), "its blocks are not those of its tokens");
    seen[g][i] = true;
    if (table.ids[g][i] == kNoBlock) continue;
    --missing;
    const Status read = file.read(record, places.pieces(static_cast<int>(g), table.ids[g][i]));
    if (!read.ok()) return damaged_file(file.path(), read.message());
  }
  if (missing > 0) return damaged_file(file.path(), "it ends too soon");
  return {};
}

Result<std::vector<int32_t>> read_tokens_of(const LogFile& file) {
  const std::vector<LogRecord>& records = file.records();
  if (records.empty() || records[0].group != kTokensGroup || records[0].bytes == 0 ||
      records[0].bytes % (kBlockTokens * sizeof(int32_t)) != 0)
    return damaged_file(file.path(), "it has no tokens");
  std::vector<int32_t> tokens(records[0].bytes / sizeof(int32_t));
  const Status read = file.read(
      records[0], {{reinterpret_cast<uint8_t*>(tokens.data()), tokens.size() * sizeof(int32_t)}});
  if (!read.ok()) return damaged_file(file.path(), read.message());
  return tokens;
}

}  // namespace

Result<PrefixFile> save_prefix(StepLoop& loop, const std::string& identity,
                               const std::vector<int32_t>& tokens, const std::string& salt,
                               const std::string& path) {
  FRESHET_RETURN_IF_ERROR(reaches_blocks(loop));
  BlockTable table;
  PrefixFile saved;
  const bool taken = on_step_thread(loop, [&](BlockCache& cache) {
    const auto whole =
        static_cast<size_t>(cache.cached(salt, tokens) / kBlockTokens) * kBlockTokens;
    saved.tokens.assign(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(whole));
    std::vector<kv_cache::BlockCopy> copies;
    if (whole > 0) cache.begin(table, salt, saved.tokens, copies);
  });
  if (!taken) return is_ending();
  if (saved.tokens.empty()) return not_found("nothing of this text is cached");
  const std::string fresh = path + ".new";
  kv_cache::LogCalls calls;
  const auto write = [&]() -> Status {
    ::unlink(fresh.c_str());
    FRESHET_ASSIGN_OR_RETURN(const auto file, LogFile::create(fresh, identity, calls));
    FRESHET_RETURN_IF_ERROR(
        write_blocks_of(*file, kv_cache::BlockPlaces(loop.cache()), saved.tokens, table));
    saved.bytes = file->bytes();
    if (::rename(fresh.c_str(), path.c_str()) != 0)
      return io_error("cannot write {}: {}", path, std::generic_category().message(errno));
    return {};
  };
  const Status written = write();
  if (!written.ok()) ::unlink(fresh.c_str());
  if (!on_step_thread(loop, [&](BlockCache& cache) { cache.release(table); })) return is_ending();
  if (!written.ok()) return written;
  return saved;
}

Result<PrefixFile> restore_prefix(StepLoop& loop, const std::string& identity,
                                  const std::string& path, const std::string& salt) {
  FRESHET_RETURN_IF_ERROR(reaches_blocks(loop));
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return not_found("there is no {}", path);
  kv_cache::LogCalls calls;
  FRESHET_ASSIGN_OR_RETURN(const auto file, LogFile::open(path, identity, calls));
  if (file->kind() == kv_cache::LogKind::kForeign)
    return damaged_file(path, "it was written for another model, setting or version");
  if (file->kind() == kv_cache::LogKind::kDamaged)
    return damaged_file(path, "it is no file of a cached prefix");
  PrefixFile restored;
  FRESHET_ASSIGN_OR_RETURN(restored.tokens, read_tokens_of(*file));
  restored.bytes = file->bytes();
  const auto size = static_cast<int32_t>(restored.tokens.size());
  BlockTable table;
  bool room = false;
  const auto take = [&](BlockCache& cache) {
    std::vector<kv_cache::BlockCopy> copies;
    cache.begin(table, salt, {}, copies);
    room = cache.reserve_load(table, size);
    if (!room) cache.release(table);
  };
  if (!on_step_thread(loop, take)) return is_ending();
  if (!room) return resource_exhausted("the cache has no room for {} tokens now", size);
  const Status read = read_blocks_of(*file, kv_cache::BlockPlaces(loop.cache()), table);
  const auto give = [&](BlockCache& cache) {
    if (read.ok()) cache.computed(table, restored.tokens, size);
    cache.release(table);
  };
  if (!on_step_thread(loop, give)) return is_ending();
  if (!read.ok()) return read;
  return restored;
}

int erase_prefix(StepLoop& loop, const std::vector<int32_t>& tokens, const std::string& salt) {
  int erased = 0;
  on_step_thread(loop, [&](BlockCache& cache) { erased = cache.forget(salt, tokens); });
  return erased;
}

}  // namespace freshet::engine
