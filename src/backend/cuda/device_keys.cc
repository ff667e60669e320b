// CudaDevice: operations on stored keys and values other than attention. They compute in raw_,
// which is free between uploads; the stream's order keeps them apart.
#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "backend/cuda/arguments.h"
#include "backend/cuda/device.h"

namespace freshet::cuda {
namespace {

static_assert(kScoreUnits == ops::kScoreUnits);

constexpr int64_t kLeastRoom = int64_t{1} << 21;  // numbers of a host room for sums
constexpr int64_t kMostKept = int64_t{1} << 19;   // numbers of a staged list
constexpr size_t kQueryRoom = size_t{16} << 20;   // of raw_, for rotated queries

int64_t chunks_of_slots(int64_t slots) {
  return (slots + kScoreChunk - 1) / kScoreChunk;
}
// Bytes that the scores of `rows` rows of one KV head need.
int64_t score_bytes(int64_t rows, int64_t slots) {
  constexpr int64_t kChunkBytes = (kScoreChunk + 2) * static_cast<int64_t>(sizeof(float));
  return slots * static_cast<int64_t>(sizeof(int64_t)) +
         rows * chunks_of_slots(slots) * kChunkBytes;
}

// How many queries fit in their room, rotated.
int64_t most_scored_queries(const Matrix& q) {
  return static_cast<int64_t>(kQueryRoom / sizeof(float)) / std::max<int64_t>(1, q.cols);
}

}  // namespace

// Host memory for `count` sums, valid until take_scores().
int64_t* CudaDevice::score_room(int64_t count) {
  while (score_room_ < score_rooms_.size()) {
    const Buffer& room = score_rooms_[score_room_];
    const auto holds = static_cast<int64_t>(room.size() / sizeof(int64_t));
    if (score_room_at_ + count <= holds) break;
    ++score_room_;
    score_room_at_ = 0;
  }
  if (score_room_ == score_rooms_.size()) {
    const auto bytes = static_cast<size_t>(std::max(count, kLeastRoom)) * sizeof(int64_t);
    auto room = Buffer::allocate(bytes, &pinned_);
    if (!room.ok()) room = Buffer::allocate(bytes, nullptr);
    FRESHET_CHECK(room.ok(), "scores of keys: {}", room.status().message());
    score_rooms_.push_back(std::move(*room));
  }
  int64_t* const at = reinterpret_cast<int64_t*>(score_rooms_[score_room_].data()) + score_room_at_;
  score_room_at_ += count;
  return at;
}

// The layout of raw_ behind the rotated queries: sums, softmax of chunks, scores.
void CudaDevice::run_key_scores(KeyScoreArgs& args, bool clear) {
  int64_t count = 0, chunks = 0, scores = 0;
  for (int i = 0; i < args.count; ++i) {
    ScoredPart& part = args.of[i];
    part.at = count;
    part.chunks_at = chunks;
    part.scores_at = scores;
    const int64_t its = int64_t{args.score_heads} * part.rows * chunks_of_slots(part.slots);
    count += int64_t{args.score_heads} * part.slots;
    chunks += 2 * its;
    scores += its * kScoreChunk;
  }
  const auto bytes = count * static_cast<int64_t>(sizeof(int64_t));
  const auto all = bytes + (chunks + scores) * static_cast<int64_t>(sizeof(float));
  FRESHET_CHECK(kQueryRoom + static_cast<size_t>(all) <= raw_.size(), "scores of {} keys", count);
  args.sums = reinterpret_cast<int64_t*>(raw_.data() + kQueryRoom);
  args.chunks = reinterpret_cast<float*>(args.sums + count);
  args.scores = args.chunks + chunks;
  if (clear) check(api_.memory.clear(ctx_, args.sums, bytes), "clear");
  check(api_.attention.key_scores(ctx_, &args), "key_scores");
}

// Sends the sums of the last run to the host. to: of each part.
void CudaDevice::send_key_scores(const KeyScoreArgs& args, std::span<const ScoreRows> to) {
  int64_t count = 0;
  for (int i = 0; i < args.count; ++i) count += int64_t{args.score_heads} * args.of[i].slots;
  int64_t* const room = score_room(count);
  check(api_.memory.download(ctx_, room, args.sums, count * static_cast<int64_t>(sizeof(int64_t))),
        "download");
  for (int i = 0; i < args.count; ++i) {
    ScoreRows rows = to[static_cast<size_t>(i)];
    rows.from = room + args.of[i].at;
    score_rows_.push_back(rows);
  }
}

// Queries as attention() reads them: q itself, or rotated to row `to` of raw_. Returns the first
// one's row there.
int32_t CudaDevice::scored_queries(const Matrix& q, const ops::KvView& cache, int64_t token,
                                   int64_t queries, int64_t to) {
  if (!ops::info(cache.shape.type).key.rotated) return static_cast<int32_t>(token);
  const Matrix rows = {const_cast<float*>(q.row(token)), queries, q.cols, q.stride};
  const Matrix turned = {reinterpret_cast<float*>(raw_.data()) + to * q.cols, queries, q.cols,
                         q.cols};
  const Rows from = rows_of(rows), its = rows_of(turned);
  const int heads = static_cast<int>(q.cols / cache.shape.key_dim);
  check(api_.attention.rotate_heads(ctx_, &its, &from, heads, cache.shape.key_dim), "rotate_heads");
  return static_cast<int32_t>(to);
}

// A part that is too large for the room: one KV head at a time, some rows at a time.
void CudaDevice::score_in_pieces(KeyScoreArgs& args, const Matrix& q, const ops::KvView& cache,
                                 const ScoredPart& part, int64_t queries, const ScoreRows& to) {
  const int32_t group = args.heads / cache.shape.kv_heads;
  const auto room = static_cast<int64_t>(raw_.size() - kQueryRoom);
  const int64_t fits = (room - score_bytes(0, part.slots)) /
                       (score_bytes(1, part.slots) - score_bytes(0, part.slots));
  const int64_t of_queries = std::max<int64_t>(1, most_scored_queries(q) - 1) * group;
  const int64_t all = queries * group,
                each = std::clamp<int64_t>(std::min(fits, of_queries), 1, all);
  args.count = 1;
  args.score_heads = 1;
  for (int32_t head = 0; head < cache.shape.kv_heads; ++head) {
    args.first_head = head;
    for (int64_t row = 0; row < all; row += each) {
      const int64_t first = row / group, rows = std::min(each, all - row);
      const int64_t last = (row + rows - 1) / group;
      args.of[0] = part;
      args.of[0].token = scored_queries(q, cache, part.token + first, last - first + 1, 0);
      args.of[0].seen = part.seen + static_cast<int32_t>(first);
      args.of[0].first_row = static_cast<int32_t>(row - first * group);
      args.of[0].rows = static_cast<int32_t>(rows);
      run_key_scores(args, row == 0);
    }
    const ScoreRows its = {nullptr, to.to + head * to.stride, 1, to.slots, to.stride};
    send_key_scores(args, {&its, 1});
  }
  args.count = 0;
}

void CudaDevice::key_scores(const Matrix& q, const ops::KvView& cache,
                            const ops::AttentionBatch& batch, const ops::AttentionParams& params,
                            std::span<const ops::ScoredQueries> scored) {
  const ops::KvShape& s = cache.shape;
  const int64_t group = params.heads / s.kv_heads;
  const auto room = static_cast<int64_t>(raw_.size() - kQueryRoom);
  const bool rotated = ops::info(s.type).key.rotated;
  const auto sequences = static_cast<size_t>(batch.sequences());
  KeyScoreArgs args{};
  args.cache = args_of(cache);
  args.tables = ints({batch.block_tables, sequences * static_cast<size_t>(batch.table_stride)});
  args.table_stride = batch.table_stride;
  args.q = rotated ? reinterpret_cast<const float*>(raw_.data()) : q.data;
  args.q_stride = rotated ? q.cols : q.stride;
  args.sinks = params.sinks;
  args.scale = params.scale;
  args.softcap = params.softcap;
  args.heads = params.heads;
  std::array<ScoreRows, kMaxScored> to;
  int64_t taken = 0, queries_taken = 0;  // bytes of the room, rows of rotated queries
  const auto run = [&] {
    if (args.count == 0) return;
    args.first_head = 0;
    args.score_heads = s.kv_heads;
    run_key_scores(args, true);
    send_key_scores(args, to);
    args.count = 0;
    taken = queries_taken = 0;
  };
  const auto add = [&](const ops::ScoredQueries& part, int32_t first, int32_t queries) {
    const auto i = static_cast<size_t>(part.sequence);
    const int32_t seen = batch.context_len[i] - part.queries + first + 1;
    const int32_t slots = seen + queries - 1;
    const int64_t needs = s.kv_heads * score_bytes(queries * group, slots);
    const int64_t token = batch.query_start[i + 1] - part.queries + first;
    int64_t* const sums = part.sums + (part.apart ? int64_t{first} * s.kv_heads * part.stride : 0);
    const ScoreRows rows = {nullptr, sums, s.kv_heads, slots, part.stride};
    ScoredPart its{};
    its.sequence = part.sequence;
    its.token = static_cast<int32_t>(token);
    its.seen = seen;
    its.rows = static_cast<int32_t>(queries * group);
    its.slots = slots;
    if (args.count == kMaxScored || taken + needs > room ||
        queries_taken + queries > most_scored_queries(q))
      run();
    if (needs > room || queries > most_scored_queries(q))
      return score_in_pieces(args, q, cache, its, queries, rows);
    its.token = scored_queries(q, cache, token, queries, queries_taken);
    to[static_cast<size_t>(args.count)] = rows;
    args.of[args.count++] = its;
    taken += needs;
    queries_taken += queries;
  };
  for (const ops::ScoredQueries& part : scored) {
    const int32_t each = part.apart ? 1 : part.queries;
    for (int32_t first = 0; first < part.queries; first += each) add(part, first, each);
  }
  run();
}

// Several entries may add to the same sums, whose task adds all of them.
void CudaDevice::take_scores(ThreadPool& pool) {
  struct Row {
    int64_t* to;
    const int64_t* from;
    int64_t slots;
  };
  std::vector<Row> rows;
  for (const ScoreRows& all : score_rows_) {
    for (int64_t r = 0; r < all.rows; ++r)
      rows.push_back({all.to + r * all.stride, all.from + r * all.slots, all.slots});
  }
  std::ranges::sort(rows, std::less<>{}, &Row::to);
  std::vector<size_t> first;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i == 0 || rows[i].to != rows[i - 1].to) first.push_back(i);
  }
  first.push_back(rows.size());
  pool.parallel_for(std::ssize(first) - 1, [&](int64_t i, int) {
    const auto task = static_cast<size_t>(i);
    for (size_t k = first[task]; k < first[task + 1]; ++k) {
      for (int64_t slot = 0; slot < rows[k].slots; ++slot) rows[k].to[slot] += rows[k].from[slot];
    }
  });
  score_rows_.clear();
  score_room_ = 0;
  score_room_at_ = 0;
}

void CudaDevice::gather_kv(const ops::KvView& cache, std::span<const int32_t> from,
                           std::span<const int32_t> to, const int32_t* kept, int32_t count) {
  if (count == 0) return;
  MoveArgs args{};
  args.cache = args_of(cache);
  args.count = count;
  args.room = raw_.data();
  args.room_bytes = static_cast<int64_t>(raw_.size());
  const auto at_once =
      static_cast<int32_t>(std::clamp<int64_t>(kMostKept / count, 1, cache.shape.kv_heads));
  for (int32_t head = 0; head < cache.shape.kv_heads; head += at_once) {
    args.first_head = head;
    args.move_heads = std::min(at_once, cache.shape.kv_heads - head);
    args.from = ints(from);  // again for each list, which may take the place of older ones
    args.to = ints(to);
    args.kept = ints({kept + int64_t{head} * count,
                      static_cast<size_t>(args.move_heads) * static_cast<size_t>(count)});
    check(api_.attention.move_slots(ctx_, &args), "move_slots");
  }
}

void CudaDevice::read_keys(const ops::KvView& cache, std::span<const int32_t> blocks, int head,
                           int32_t slots, float* keys) {
  const auto dim = static_cast<int64_t>(cache.shape.key_dim);
  const CacheArgs args = args_of(cache);
  auto* const room = reinterpret_cast<float*>(raw_.data());
  const auto most = static_cast<int32_t>(static_cast<int64_t>(raw_.size() / sizeof(float)) / dim /
                                         ops::kBlockTokens * ops::kBlockTokens);
  const int32_t* const ids = ints(blocks);
  for (int32_t first = 0; first < slots; first += most) {
    const int32_t count = std::min(most, slots - first);
    check(api_.attention.read_keys(ctx_, room, &args, ids + first / ops::kBlockTokens, head, count),
          "read_keys");
    fetch(keys + first * dim, room, static_cast<size_t>(count * dim) * sizeof(float));
  }
  wait();
}

}  // namespace freshet::cuda
