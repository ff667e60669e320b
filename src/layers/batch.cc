#include "layers/batch.h"

#include <algorithm>

namespace freshet {

ops::AttentionBatch KeyView::batch(ops::AttentionBatch whole) const {
  whole.ranges = ranges;
  if (!cut()) return whole;
  return {query_start, context_len, tables.data(), stride, ranges};
}

namespace {

// The keys that a token sees; the token is `behind` tokens before the end of `slots` tokens.
ops::KeyRange range_of(const KvGroup& kind, int32_t slots, int32_t behind,
                       const ops::KeyRange& span) {
  const int32_t position = slots - behind;
  const bool spanned = span.end > span.first;
  if (kind.spans == SpanUse::kOnly && spanned) return span;
  ops::KeyRange range{0, kind.two_way ? slots : position + 1};
  if (kind.chunk > 0) range.first = position / kind.chunk * kind.chunk;
  if (kind.window > 0) {
    range.first = std::max(0, position - kind.window + 1);
    if (kind.two_way) range.end = std::min(slots, position + kind.window);
  }
  if (kind.spans == SpanUse::kAlso && spanned) range.end = std::max(range.end, span.end);
  return range;
}

// Ends a part of sequence `s` after the ranges listed so far.
void end_part(const BlockTables& table, size_t s, int32_t slots, KeyView& view) {
  const auto queries = static_cast<int32_t>(view.ranges.size());
  if (view.query_start.back() == queries) return;
  view.query_start.push_back(queries);
  view.context_len.push_back(slots);
  const auto ids = table.ids.begin() + static_cast<int64_t>(s) * table.stride;
  view.tables.insert(view.tables.end(), ids, ids + table.stride);
}

}  // namespace

void find_key_ranges(const ForwardBatch& batch, int group, const KvGroup& kind, KeyView& view) {
  view.ranges.clear();
  view.tokens.clear();
  view.query_start.clear();
  const bool spans = kind.spans != SpanUse::kNone && !batch.spans.empty();
  const bool pictures = kind.cross > 0 && kind.spans != SpanUse::kNone;
  if (kind.chunk == 0 && !kind.two_way && kind.cross == 0 && !spans) return;
  view.query_start.assign(1, 0);
  view.context_len.clear();
  view.tables.clear();
  const BlockTables& table = batch.tables[static_cast<size_t>(group)];
  view.stride = table.stride;
  const std::vector<int32_t>& slots = batch.slots(group);
  bool cut = pictures;
  for (size_t s = 0; s < slots.size(); ++s) {
    if (pictures && slots[s] == 0) continue;
    const int32_t start = batch.query_start[s], end = batch.query_start[s + 1];
    for (int32_t token = start; token < end; ++token) {
      const auto t = static_cast<size_t>(token);
      ops::KeyRange range{0, slots[s]};
      if (kind.cross == 0) {
        range = range_of(kind, slots[s], end - token, spans ? batch.spans[t] : ops::KeyRange{});
      } else if (pictures) {
        FRESHET_CHECK(!batch.views.empty(), "a sequence with pictures, but no views of them");
        if (batch.views[t].end > batch.views[t].first) range = batch.views[t];
        view.tokens.push_back(token);
      }
      const bool falls = token > start && (range.first < view.ranges.back().first ||
                                           range.end < view.ranges.back().end);
      if (falls) end_part(table, s, slots[s], view);
      cut = cut || falls;
      view.ranges.push_back(range);
    }
    end_part(table, s, slots[s], view);
  }
  if (!cut) view.query_start.clear();
}

namespace {

// Copies the fields that say where a token is relative to the pictures of its sequence.
void copy_places(const ForwardBatch& batch, int32_t token, ForwardBatch& to) {
  const auto at = static_cast<size_t>(token);
  if (!batch.axis_positions.empty()) {
    const auto axes = std::ssize(batch.axis_positions) / batch.tokens();
    const auto first = batch.axis_positions.begin() + token * axes;
    to.axis_positions.insert(to.axis_positions.end(), first, first + axes);
  }
  if (!batch.spans.empty()) to.spans.push_back(batch.spans[at]);
  if (!batch.views.empty()) to.views.push_back(batch.views[at]);
}

}  // namespace

bool take_logit_rows(const ForwardBatch& batch, std::span<const int> groups, ForwardBatch& to) {
  const std::vector<int32_t>& rows = batch.logit_rows;
  if (std::ssize(rows) == batch.tokens()) return false;
  to.token_ids.clear();
  to.positions.clear();
  to.query_start.assign(1, 0);
  to.context_len.clear();
  to.sparse.clear();
  to.cross_readers.clear();
  to.axis_positions.clear();
  to.spans.clear();
  to.views.clear();
  to.tables.resize(batch.tables.size());
  for (const int group : groups) {
    BlockTables& table = to.tables[static_cast<size_t>(group)];
    table.ids.clear();
    table.context_len.clear();
    const BlockTables& from = batch.tables[static_cast<size_t>(group)];
    table.stride = from.stride;
    table.coarse_slots.clear();
    table.coarse_ids.clear();
    table.coarse_stride = from.coarse_stride;
    table.coarse_parts = from.coarse_parts;
  }
  auto row = rows.begin();
  for (size_t s = 0; s < batch.context_len.size(); ++s) {
    const int32_t end = batch.query_start[s + 1];
    const auto first = row;
    for (; row != rows.end() && *row < end; ++row) {
      to.token_ids.push_back(batch.token_ids[static_cast<size_t>(*row)]);
      to.positions.push_back(batch.positions[static_cast<size_t>(*row)]);
      copy_places(batch, *row, to);
    }
    if (row == first) continue;
    if (*first != end - (row - first)) return false;
    to.query_start.push_back(static_cast<int32_t>(to.token_ids.size()));
    for (const CrossReader& reader : batch.cross_readers) {
      if (reader.sequence != static_cast<int32_t>(s)) continue;
      to.cross_readers.push_back({static_cast<int32_t>(to.context_len.size()), reader.weights});
    }
    to.context_len.push_back(batch.context_len[s]);
    if (!batch.sparse.empty()) to.sparse.push_back(batch.sparse[s]);
    for (const int group : groups) {
      const BlockTables& from = batch.tables[static_cast<size_t>(group)];
      BlockTables& table = to.tables[static_cast<size_t>(group)];
      const auto ids = from.ids.begin() + static_cast<int64_t>(s) * from.stride;
      table.ids.insert(table.ids.end(), ids, ids + from.stride);
      if (!from.context_len.empty()) table.context_len.push_back(from.context_len[s]);
      if (from.coarse_slots.empty()) continue;
      table.coarse_slots.push_back(from.coarse_slots[s]);
      const auto coarse = from.coarse_ids.begin() + static_cast<int64_t>(s) * from.coarse_stride;
      table.coarse_ids.insert(table.coarse_ids.end(), coarse, coarse + from.coarse_stride);
    }
  }
  return true;
}

}  // namespace freshet
