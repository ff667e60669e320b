#include "kv_cache/block_cache.h"

#include <algorithm>

namespace freshet::kv_cache {
namespace {

int32_t blocks_for(int32_t tokens) {
  return (tokens + kBlockTokens - 1) / kBlockTokens;
}

int32_t coarse_blocks_for(int32_t slots, int32_t parts) {
  return (slots + kBlockTokens * parts - 1) / (kBlockTokens * parts);
}

// Whether the last coarse block has room for more tokens, given those that are there.
bool has_coarse_room(int32_t slots, int32_t parts) {
  return slots % (kBlockTokens * parts) != 0;
}

}  // namespace

BlockCache::BlockCache(Options options)
    : options_(std::move(options)),
      tree_(static_cast<int>(options_.groups.size()), options_.hash_seed),
      lives_(options_.timed_share) {
  for (const GroupConfig& group : options_.groups) {
    FRESHET_CHECK(group.kind != KvKind::kState || state_group_ < 0, "two groups of states");
    if (group.kind == KvKind::kState) state_group_ = groups();
    pools_.emplace_back(group.blocks);
    Cached& c = cached_.emplace_back();
    c.evictable = options_.eviction(group.blocks);
    c.node.assign(static_cast<size_t>(group.blocks), kNoNode);
  }
}

// ---- references and eviction -----------------------------------------------------------------

void BlockCache::list(int group, int32_t block) {
  Cached& c = cached_of(group);
  const NodeId node = c.node[static_cast<size_t>(block)];
  if (node == kNoNode || pool(group).refs(block) != 1) return;
  if (evicts_leaves_only(group) && !tree_.is_leaf(node)) return;
  c.evictable->add(block);
}

void BlockCache::unlist(int group, int32_t block) {
  cached_of(group).evictable->remove(block);
}

void BlockCache::ref(int group, int32_t block) {
  Cached& c = cached_of(group);
  if (c.node[static_cast<size_t>(block)] != kNoNode && pool(group).refs(block) == 1) {
    unlist(group, block);
    --c.idle;
  }
  pool_of(group).ref(block);
}

void BlockCache::unref(int group, int32_t block) {
  const int32_t left = pool_of(group).unref(block);
  Cached& c = cached_of(group);
  if (left == 1 && c.node[static_cast<size_t>(block)] != kNoNode) {
    ++c.idle;
    c.evictable->released(block);
    list(group, block);
  }
}

void BlockCache::give_to_tree(NodeId node, int group, int32_t block) {
  ref(group, block);
  tree_.set_block(node, group, block);
  cached_of(group).node[static_cast<size_t>(block)] = node;
}

void BlockCache::take_from_tree(NodeId node, int group) {
  const int32_t block = tree_.block(node, group);
  if (block == kNoBlock) return;
  Cached& c = cached_of(group);
  if (pool(group).refs(block) == 1) {
    unlist(group, block);
    --c.idle;
  }
  tree_.set_block(node, group, kNoBlock);
  c.node[static_cast<size_t>(block)] = kNoNode;
  pool_of(group).unref(block);
}

void BlockCache::prune(NodeId node) {
  const NodeId stays = tree_.prune(node);
  if (stays == kNoNode || !tree_.is_leaf(stays)) return;
  for (int g = 0; g < groups(); ++g) {  // a new leaf may be evicted now
    if (const int32_t block = tree_.block(stays, g); block != kNoBlock) list(g, block);
  }
}

void BlockCache::evict(int group, int32_t block) {
  const NodeId node = cached_of(group).node[static_cast<size_t>(block)];
  for (int g = 0; g < groups(); ++g) {
    if (g != group && !evicts_leaves_only(group)) continue;
    if (const int32_t b = tree_.block(node, g); b != kNoBlock) lives_.evicted(g, b);
    take_from_tree(node, g);
  }
  prune(node);
}

int32_t BlockCache::take(int group) {
  if (pool(group).free() == 0) {
    const int32_t idle = cached_of(group).evictable->first();
    FRESHET_CHECK(idle != kNoBlock, "group {} has no block to evict", group);
    evict(group, idle);
  }
  const int32_t block = pool_of(group).take();
  lives_.born(group, block);
  return block;
}

void BlockCache::drop_idle() {
  for (int g = 0; g < groups(); ++g) {
    const EvictionPolicy& evictable = *cached_of(g).evictable;
    while (evictable.first() != kNoBlock) evict(g, evictable.first());
  }
}

// ---- prefixes --------------------------------------------------------------------------------

int32_t BlockCache::window_start(int group, int32_t computed) const {
  if (window(group) == 0) return 0;
  return std::max(0, computed - window(group) + 1) / kBlockTokens;
}

BlockCache::Path BlockCache::find(std::string_view salt, std::span<const int32_t> tokens) const {
  Path path;
  NodeId at = tree_.find_root(salt);
  if (at == kNoNode) return path;
  size_t done = 0;
  while (tokens.size() - done >= kBlockTokens) {
    const NodeId next = tree_.child(at, tokens.subspan(done, kBlockTokens));
    if (next == kNoNode) break;
    path.nodes.push_back(next);
    at = next;
    done += kBlockTokens;
  }
  path.partial = tree_.longest_partial(at, tokens.subspan(done));
  return path;
}

// The longest prefix of the path, in blocks, for which every group has the blocks that the next
// query reads.
int32_t BlockCache::usable(const Path& path) const {
  const auto depth = static_cast<int32_t>(path.nodes.size());
  std::vector<bool> good(static_cast<size_t>(depth) + 1, true);
  for (int g = 0; g < groups(); ++g) {
    if (is_state(g)) {
      for (int32_t length = 1; length <= depth; ++length) {
        if (tree_.block(path.nodes[static_cast<size_t>(length) - 1], g) == kNoBlock)
          good[static_cast<size_t>(length)] = false;
      }
      continue;
    }
    int32_t run = 0;  // consecutive blocks that end at `length`
    for (int32_t length = 1; length <= depth; ++length) {
      run = tree_.block(path.nodes[static_cast<size_t>(length) - 1], g) == kNoBlock ? 0 : run + 1;
      if (run < length - window_start(g, length * kBlockTokens))
        good[static_cast<size_t>(length)] = false;
    }
  }
  int32_t length = depth;
  while (!good[static_cast<size_t>(length)]) --length;
  return length;
}

int32_t BlockCache::cached(std::string_view salt, std::span<const int32_t> tokens) const {
  if (!options_.share_prefixes) return 0;
  const Path path = find(salt, tokens);
  const int32_t length = usable(path);
  bool partly = length == static_cast<int32_t>(path.nodes.size()) && path.partial.tokens > 0 &&
                state_group_ < 0;  // a state cannot be cut
  for (int g = 0; partly && g < groups(); ++g)
    partly = tree_.block(path.partial.node, g) != kNoBlock;
  return length * kBlockTokens + (partly ? path.partial.tokens : 0);
}

void BlockCache::used(const BlockTable& table, int32_t cached) {
  for (int g = 0; g < groups(); ++g) {
    const int32_t blocks = std::min(cached / kBlockTokens, table.blocks(g));
    for (int32_t i = table.first[static_cast<size_t>(g)]; i < blocks; ++i)
      lives_.used(g, table.ids[static_cast<size_t>(g)][static_cast<size_t>(i)]);
  }
}

int32_t BlockCache::begin(BlockTable& table, std::string_view salt, std::span<const int32_t> tokens,
                          std::vector<BlockCopy>& copies) {
  FRESHET_CHECK(table.empty());
  table.ids.resize(pools_.size());
  table.first.assign(pools_.size(), 0);
  if (!options_.share_prefixes) return 0;
  const Path path = find(salt, tokens);
  const int32_t length = usable(path);
  move_cursor(table, length > 0 ? path.nodes[static_cast<size_t>(length) - 1] : tree_.root(salt));
  table.registered = length;
  for (int g = 0; g < groups(); ++g) {
    std::vector<int32_t>& ids = table.ids[static_cast<size_t>(g)];
    if (is_state(g)) {  // reserve() copies it
      if (length > 0) {
        ids = {tree_.block(path.nodes[static_cast<size_t>(length) - 1], g)};
        ref(g, ids.front());
      }
      continue;
    }
    const int32_t start = window_start(g, length * kBlockTokens);
    table.first[static_cast<size_t>(g)] = start;
    ids.assign(static_cast<size_t>(length), kNoBlock);
    for (int32_t i = start; i < length; ++i) {
      int32_t& id = ids[static_cast<size_t>(i)];
      id = tree_.block(path.nodes[static_cast<size_t>(i)], g);
      ref(g, id);
    }
  }
  const bool whole = length == static_cast<int32_t>(path.nodes.size());
  if (state_group_ >= 0) {
    table.junction = whole ? 0 : static_cast<int32_t>(path.nodes.size()) * kBlockTokens;
    return length * kBlockTokens;
  }
  if (!whole || path.partial.tokens == 0) return length * kBlockTokens;

  // Use the matching part of the next block: a private copy, if each group has the block and room.
  const NodeId source = path.partial.node;
  for (int g = 0; g < groups(); ++g) {
    const int32_t from = tree_.block(source, g);
    if (from == kNoBlock) return length * kBlockTokens;
    const bool takes_room =
        pool(g).refs(from) == 1;  // an idle source must not be evicted to make room for its copy
    if (available(g) - (takes_room ? 1 : 0) < 1) return length * kBlockTokens;
  }
  for (int g = 0; g < groups(); ++g) ref(g, tree_.block(source, g));
  for (int g = 0; g < groups(); ++g) {
    const int32_t from = tree_.block(source, g);
    const int32_t to = take(g);
    table.ids[static_cast<size_t>(g)].push_back(to);
    copies.push_back({g, from, to});
  }
  for (int g = 0; g < groups(); ++g) unref(g, tree_.block(source, g));
  return length * kBlockTokens + path.partial.tokens;
}

void BlockCache::move_cursor(BlockTable& table, NodeId to) {
  if (to != kNoNode) tree_.add_cursor(to);
  const NodeId from = table.node;
  table.node = to;
  if (from != kNoNode) {
    tree_.drop_cursor(from);
    prune(from);
  }
}

void BlockCache::offer(BlockTable& table, std::span<const int32_t> block_tokens) {
  NodeId node = tree_.child(table.node, block_tokens);
  if (node == kNoNode) {
    for (int g = 0; g < groups(); ++g) {  // the parent is no longer a leaf
      if (const int32_t b = tree_.block(table.node, g); b != kNoBlock && evicts_leaves_only(g))
        unlist(g, b);
    }
    node = tree_.add_child(table.node, block_tokens);
  }
  for (int g = 0; g < groups(); ++g) {
    if (is_state(g)) continue;
    int32_t& mine = table.ids[static_cast<size_t>(g)][static_cast<size_t>(table.registered)];
    if (mine == kNoBlock) continue;
    const int32_t theirs = tree_.block(node, g);
    if (theirs == kNoBlock) {
      give_to_tree(node, g, mine);
    } else if (theirs != mine) {  // the same tokens give the same bits: keep one copy
      ref(g, theirs);
      unref(g, mine);
      mine = theirs;
    }
  }
  move_cursor(table, node);
  ++table.registered;
}

void BlockCache::slide(BlockTable& table, int32_t computed) {
  for (int g = 0; g < groups(); ++g) {
    if (is_state(g)) continue;
    std::vector<int32_t>& ids = table.ids[static_cast<size_t>(g)];
    int32_t& first = table.first[static_cast<size_t>(g)];
    const int32_t start = std::min(window_start(g, computed), table.blocks(g));
    for (; first < start; ++first) {
      int32_t& id = ids[static_cast<size_t>(first)];
      if (id != kNoBlock) unref(g, id);
      id = kNoBlock;
    }
  }
}

void BlockCache::computed(BlockTable& table, std::span<const int32_t> tokens, int32_t computed,
                          int32_t shared) {
  if (options_.share_prefixes && !table.evicts()) {
    while ((table.registered + 1) * kBlockTokens <= std::min(computed, shared)) {
      offer(table,
            tokens.subspan(static_cast<size_t>(table.registered) * kBlockTokens, kBlockTokens));
    }
  }
  slide(table, computed);
}

// ---- a sequence's blocks ---------------------------------------------------------------------

bool BlockCache::copies_on_write(const BlockTable& table, int group, int32_t computed) const {
  const int32_t slots = table.slots(group, computed);
  if (slots % kBlockTokens == 0) return false;
  return pool(group).refs(
             table.ids[static_cast<size_t>(group)][static_cast<size_t>(slots / kBlockTokens)]) > 1;
}

// How many blocks tokens [computed, end) take at least.
int32_t BlockCache::needs(const BlockTable& table, int group, int32_t computed, int32_t end) const {
  if (is_state(group)) {
    const std::vector<int32_t>& ids = table.ids[static_cast<size_t>(group)];
    if (ids.empty()) return 1;
    return pool(group).refs(ids.front()) > 1 && !only_the_tree_shares(ids.front()) ? 1 : 0;
  }
  return std::max(0, blocks_for(table.slots(group, end)) - table.blocks(group)) +
         (copies_on_write(table, group, computed) ? 1 : 0);
}

bool BlockCache::reserve(BlockTable& table, int32_t computed, int32_t end,
                         std::vector<BlockCopy>& copies, int32_t drafts) {
  for (int g = 0; g < groups(); ++g) {
    if (needs(table, g, computed, end) + (is_state(g) ? drafts : 0) > available(g)) return false;
  }
  for (int g = 0; g < groups(); ++g) {
    if (is_state(g)) {
      reserve_state(table, end, copies, drafts);
      continue;
    }
    std::vector<int32_t>& ids = table.ids[static_cast<size_t>(g)];
    if (copies_on_write(table, g, computed)) {
      int32_t& id = ids[static_cast<size_t>(table.slots(g, computed) / kBlockTokens)];
      const int32_t to = take(g);
      copies.push_back({g, id, to});
      unref(g, id);
      id = to;
    }
    while (table.blocks(g) < blocks_for(table.slots(g, end))) ids.push_back(take(g));
  }
  return true;
}

int32_t BlockCache::fit(const BlockTable& table, int32_t computed, int32_t want) const {
  int32_t end = want;
  for (int g = 0; g < groups(); ++g) {
    if (is_state(g)) {
      if (needs(table, g, computed, want) > available(g)) return computed;
      continue;
    }
    const int32_t left = available(g) - (copies_on_write(table, g, computed) ? 1 : 0);
    if (left < 0) return computed;
    // 64 bits: a pool may hold more tokens than an int32 counts
    const int64_t most =
        (int64_t{table.blocks(g)} + left) * kBlockTokens + computed - table.slots(g, computed);
    end = static_cast<int32_t>(std::min<int64_t>(end, most));
  }
  return std::max(end, computed);
}

int32_t BlockCache::most_blocks(int window, int32_t end, int32_t chunk) {
  const int32_t all = blocks_for(end);
  if (window == 0) return all;
  // The window before the chunk and the chunk itself, neither aligned to blocks.
  return std::min(all, blocks_for(window) + blocks_for(chunk) + 1);
}

int32_t BlockCache::most_blocks(const KvGroup& group, int32_t end, int32_t chunk) {
  if (group.kind == KvKind::kState) return 1;
  if (group.kind == KvKind::kCross) return blocks_for(group.cross);
  return most_blocks(group.window, end, chunk);
}

int32_t BlockCache::most_blocks_in(int group, int32_t end, int32_t chunk) const {
  return is_state(group) ? 1 : most_blocks(window(group), end, chunk);
}

int32_t BlockCache::still_needs(const BlockTable& table, int group, int32_t end,
                                int32_t chunk) const {
  if (is_state(group)) return table.empty() ? 1 : needs(table, group, 0, end);
  const int32_t held =
      table.empty() ? 0 : table.blocks(group) - table.first[static_cast<size_t>(group)];
  const int32_t ahead =
      blocks_for(table.slots(group, end)) - (table.empty() ? 0 : table.blocks(group));
  return std::clamp(most_blocks(window(group), end, chunk) - held, 0, std::max(0, ahead));
}

BlockTable BlockCache::fork(const BlockTable& table, int32_t computed) {
  BlockTable copy = table;
  FRESHET_CHECK(table.saves.empty(), "a fork between reserve() and settle()");
  copy.rolled = kNoNode;
  for (int g = 0; g < groups(); ++g) {
    std::vector<int32_t>& ids = copy.ids[static_cast<size_t>(g)];
    if (!is_state(g))
      ids.resize(std::min(ids.size(), static_cast<size_t>(blocks_for(table.slots(g, computed)))));
    for (const int32_t id : ids) {
      if (id != kNoBlock) ref(g, id);
    }
    if (copy.coarse.empty()) continue;
    for (const int32_t id : copy.coarse[static_cast<size_t>(g)]) ref(g, id);
  }
  if (copy.node != kNoNode) tree_.add_cursor(copy.node);
  return copy;
}

// How many blocks the table takes to hold `slots` coarse tokens.
int32_t BlockCache::coarse_needs(const BlockTable& table, int group, int32_t slots,
                                 int32_t parts) const {
  const int32_t holds = table.coarse_slots(group);
  const bool copies = has_coarse_room(holds, parts) &&
                      pool(group).refs(table.coarse[static_cast<size_t>(group)].back()) > 1;
  return coarse_blocks_for(slots, parts) - coarse_blocks_for(holds, parts) + (copies ? 1 : 0);
}

// The table has `before` coarse tokens in its blocks, and takes the blocks for all of them.
void BlockCache::grow_coarse(BlockTable& table, int group, int32_t before, int32_t parts) {
  std::vector<int32_t>& ids = table.coarse[static_cast<size_t>(group)];
  if (has_coarse_room(before, parts) && pool(group).refs(ids.back()) > 1) {
    unref(group, ids.back());
    ids.back() = take(group);
  }
  while (std::ssize(ids) < coarse_blocks_for(table.coarse_slots(group), parts))
    ids.push_back(take(group));
}

bool BlockCache::compact(BlockTable& table, int32_t computed, std::span<const int32_t> kept,
                         std::vector<std::vector<int32_t>>& before,
                         std::span<const int32_t> parts) {
  const auto leaves = [&](int g) {
    const int32_t most = kept[static_cast<size_t>(g)];
    return most > 0 && table.slots(g, computed) > most ? most : 0;
  };
  for (int g = 0; g < groups(); ++g) {
    if (leaves(g) == 0) continue;
    int32_t freed = 0;  // blocks that nobody else needs
    for (const int32_t id : table.ids[static_cast<size_t>(g)]) {
      if (id == kNoBlock) continue;
      const bool cached = cached_of(g).node[static_cast<size_t>(id)] != kNoNode;
      if (pool(g).refs(id) == (cached ? 2 : 1)) ++freed;
    }
    int32_t needs = blocks_for(leaves(g));
    if (!parts.empty())
      needs += coarse_needs(table, g, computed - leaves(g), parts[static_cast<size_t>(g)]);
    if (needs > available(g) + freed) return false;
  }
  before.assign(pools_.size(), {});
  if (!table.evicts()) table.evicted.assign(pools_.size(), 0);
  if (!parts.empty()) table.coarse.resize(pools_.size());
  std::vector<int32_t> recoded(pools_.size(), -1);  // coarse tokens before; -1: the group stays
  for (int g = 0; g < groups(); ++g) {
    const int32_t most = leaves(g);
    if (most == 0) continue;
    recoded[static_cast<size_t>(g)] = table.coarse_slots(g);
    std::vector<int32_t>& ids = table.ids[static_cast<size_t>(g)];
    before[static_cast<size_t>(g)].swap(ids);
    const std::vector<int32_t>& old = before[static_cast<size_t>(g)];
    for (auto id = old.rbegin(); id != old.rend(); ++id) unref(g, *id);
    table.evicted[static_cast<size_t>(g)] = computed - most;
  }
  move_cursor(table, kNoNode);
  for (int g = 0; g < groups(); ++g) {
    const auto i = static_cast<size_t>(g);
    if (recoded[i] < 0) continue;
    std::vector<int32_t>& ids = table.ids[i];
    while (std::ssize(ids) < blocks_for(table.slots(g, computed))) ids.push_back(take(g));
    if (!parts.empty()) grow_coarse(table, g, recoded[i], parts[i]);
  }
  return true;
}

void BlockCache::release(BlockTable& table) {
  for (int g = 0; g < static_cast<int>(table.ids.size()); ++g) {
    // Last block first: fewer sequences share the end of a prefix than its beginning.
    for (auto id = table.ids[static_cast<size_t>(g)].rbegin();
         id != table.ids[static_cast<size_t>(g)].rend(); ++id) {
      if (*id != kNoBlock) unref(g, *id);
    }
  }
  for (size_t g = 0; g < table.coarse.size(); ++g) {
    for (const int32_t id : table.coarse[g]) unref(static_cast<int>(g), id);
  }
  for (const SavedState& saved : table.saves) unref(state_group_, saved.slot);
  move_cursor(table, kNoNode);
  table = BlockTable{};
}

// ---- verification ----------------------------------------------------------------------------

Status BlockCache::check(std::span<const BlockTable* const> tables) const {
  for (int g = 0; g < groups(); ++g) {
    FRESHET_RETURN_IF_ERROR(pool(g).check_conserved().with_context(fmt::format("group {}", g)));
    const Cached& c = cached_[static_cast<size_t>(g)];
    std::vector<int32_t> expected(static_cast<size_t>(pool(g).size()), 0);
    int32_t idle = 0;
    for (int32_t b = 0; b < pool(g).size(); ++b) {
      const NodeId node = c.node[static_cast<size_t>(b)];
      if (node == kNoNode) continue;
      ++expected[static_cast<size_t>(b)];
      if (tree_.block(node, g) != b)
        return internal_error("group {}: the tree lost block {}", g, b);
      if (pool(g).refs(b) == 1) ++idle;
      const bool may_go = pool(g).refs(b) == 1 && (!evicts_leaves_only(g) || tree_.is_leaf(node));
      if (c.evictable->contains(b) != may_go) {
        return internal_error("group {}: block {} is {} for eviction", g, b,
                              may_go ? "not listed" : "listed");
      }
    }
    if (idle != c.idle)
      return internal_error("group {}: {} idle blocks, {} counted", g, idle, c.idle);
    if (idle > 0 && c.evictable->first() == kNoBlock)
      return internal_error("group {}: idle blocks, none to evict", g);
    for (const BlockTable* table : tables) {
      if (table->empty()) continue;
      for (const int32_t id : table->ids[static_cast<size_t>(g)]) {
        if (id != kNoBlock) ++expected[static_cast<size_t>(id)];
      }
      if (!table->coarse.empty()) {
        for (const int32_t id : table->coarse[static_cast<size_t>(g)])
          ++expected[static_cast<size_t>(id)];
      }
      for (const SavedState& saved : table->saves)
        if (is_state(g)) ++expected[static_cast<size_t>(saved.slot)];
    }
    for (int32_t b = 0; b < pool(g).size(); ++b) {
      if (expected[static_cast<size_t>(b)] != pool(g).refs(b)) {
        return internal_error("group {}: block {} has {} references, {} holders", g, b,
                              pool(g).refs(b), expected[static_cast<size_t>(b)]);
      }
    }
  }
  return {};
}

}  // namespace freshet::kv_cache
