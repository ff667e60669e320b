#include "layers/batch.h"

#include <algorithm>

namespace freshet {

void find_key_ranges(const ForwardBatch& batch, int group, const KvGroup& kind,
                     std::vector<ops::KeyRange>& ranges) {
  ranges.clear();
  if (kind.chunk == 0 && !kind.two_way && kind.cross == 0) return;
  const std::vector<int32_t>& slots = batch.slots(group);
  for (size_t s = 0; s < slots.size(); ++s) {
    const int32_t start = batch.query_start[s], end = batch.query_start[s + 1];
    for (int32_t token = start; token < end; ++token) {
      if (kind.cross > 0) {
        ranges.push_back({0, slots[s]});
        continue;
      }
      const int32_t position = slots[s] - (end - token);
      ops::KeyRange range{0, kind.two_way ? slots[s] : position + 1};
      if (kind.chunk > 0) range.first = position / kind.chunk * kind.chunk;
      if (kind.window > 0) {
        range.first = std::max(0, position - kind.window + 1);
        if (kind.two_way) range.end = std::min(slots[s], position + kind.window);
      }
      ranges.push_back(range);
    }
  }
}

bool take_logit_rows(const ForwardBatch& batch, std::span<const int> groups, ForwardBatch& to) {
  const std::vector<int32_t>& rows = batch.logit_rows;
  if (std::ssize(rows) == batch.tokens()) return false;
  to.token_ids.clear();
  to.positions.clear();
  to.query_start.assign(1, 0);
  to.context_len.clear();
  to.sparse.clear();
  to.tables.resize(batch.tables.size());
  for (const int group : groups) {
    BlockTables& table = to.tables[static_cast<size_t>(group)];
    table.ids.clear();
    table.context_len.clear();
    table.stride = batch.tables[static_cast<size_t>(group)].stride;
  }
  auto row = rows.begin();
  for (size_t s = 0; s < batch.context_len.size(); ++s) {
    const int32_t end = batch.query_start[s + 1];
    const auto first = row;
    for (; row != rows.end() && *row < end; ++row) {
      to.token_ids.push_back(batch.token_ids[static_cast<size_t>(*row)]);
      to.positions.push_back(batch.positions[static_cast<size_t>(*row)]);
    }
    if (row == first) continue;
    if (*first != end - (row - first)) return false;
    to.query_start.push_back(static_cast<int32_t>(to.token_ids.size()));
    to.context_len.push_back(batch.context_len[s]);
    if (!batch.sparse.empty()) to.sparse.push_back(batch.sparse[s]);
    for (const int group : groups) {
      const BlockTables& from = batch.tables[static_cast<size_t>(group)];
      BlockTables& table = to.tables[static_cast<size_t>(group)];
      const auto ids = from.ids.begin() + static_cast<int64_t>(s) * from.stride;
      table.ids.insert(table.ids.end(), ids, ids + from.stride);
      if (!from.context_len.empty()) table.context_len.push_back(from.context_len[s]);
    }
  }
  return true;
}

}  // namespace freshet
