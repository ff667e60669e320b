#include "speculative/model_drafter.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "speculative/registry.h"

namespace freshet::speculative {
namespace {

// A head runs rows as they come, those of all sequences together, once a sequence has more than
// this: so their features need not be kept.
constexpr size_t kPendingRows = 64;
// Where nothing was drafted for as many steps of one token, the head forgets what it knows of the
// sequence, and reads no more rows until it is asked: so it costs no time while drafts don't pay.
constexpr size_t kIdleSteps = 16;

// The target's id of the best column that the target knows; -1: it knows none.
int32_t best_known(std::span<const float> logits, std::span<const int32_t> target_ids) {
  int32_t best = -1;
  float most = 0.0f;
  for (size_t i = 0; i < std::min(logits.size(), target_ids.size()); ++i) {
    if (target_ids[i] < 0 || (best >= 0 && logits[i] <= most)) continue;
    best = target_ids[i];
    most = logits[i];
  }
  return best;
}

}  // namespace

ModelDrafter::ModelDrafter(std::unique_ptr<DraftRunner> runner, ModelDrafterOptions options)
    : runner_(std::move(runner)),
      options_(std::move(options)),
      scratch_(options_.vocab),
      logits_(options_.target_ids.empty() ? runner_->spec().vocab_size
                                          : std::ssize(options_.target_ids)) {
  if (heads()) width_ = static_cast<size_t>(runner_->spec().features->width);
  knows_all_ = std::ranges::none_of(options_.target_ids, [](int32_t id) { return id < 0; });
}

void ModelDrafter::forget(uint64_t sequence) {
  const auto at = states_.find(sequence);
  if (at == states_.end()) return;
  runner_->release(at->second.cache);
  states_.erase(at);
}

// ---- heads: the target's rows ----------------------------------------------------------------

// Position p of a head holds the token at p + 1, of a DFlash head the one at p.
void ModelDrafter::start_head(State& s, const TargetRows& rows) {
  s.base = rows.first;
  s.cache.salt = fmt::format("{}", rows.owner);
  if (rows.first == 0) return;
  const auto before = static_cast<size_t>(rows.first);
  runner_->begin(s.cache, rows.tokens.subspan(waiting(), before));
  if (std::ssize(s.cache.ids) == rows.first) {
    s.base = 0;
    return;
  }
  runner_->release(s.cache);
  s.cache.salt = fmt::format("part {}", next_salt_++);  // without its beginning it is another
}

void ModelDrafter::append(State& s, const TargetRows& rows) {
  const int32_t skip = s.seen() - rows.first;
  const auto hidden = width_ / (options_.needs.boundaries.size() + (options_.needs.last ? 1 : 0));
  for (int32_t i = std::max(0, skip); i < rows.count; ++i) {
    s.pending.push_back(rows.tokens[static_cast<size_t>(rows.first + i) + waiting()]);
    const auto add = [&](const float* states) {
      const float* const from = states + static_cast<size_t>(i) * hidden;
      s.features.insert(s.features.end(), from, from + hidden);
    };
    if (options_.needs.last) add(rows.last);
    for (const float* boundary : rows.boundaries) add(boundary);
  }
}

// Forgets a head's history; it goes on with the rows that come.
void ModelDrafter::restart(State& s) {
  runner_->release(s.cache);
  std::vector<float> room = std::move(s.features);
  s = State();
  s.features = std::move(room);
  s.features.clear();
}

// Takes the first `count` pending rows, which were run, or which there was no room for.
void ModelDrafter::drop_pending(State& s, size_t count) {
  s.pending.erase(s.pending.begin(), s.pending.begin() + static_cast<std::ptrdiff_t>(count));
  s.features.erase(s.features.begin(),
                   s.features.begin() + static_cast<std::ptrdiff_t>(count * width_));
}

// Runs the pending rows of these sequences but the last of each, which gives a draft.
void ModelDrafter::run_pending(std::span<State* const> states) {
  const size_t most = static_cast<size_t>(runner_->max_tokens());
  std::vector<State*> left(states.begin(), states.end());
  while (!left.empty()) {
    work_.clear();
    for (State* s : left) {
      work_.push_back(
          {.sequence = &s->cache,
           .ids = std::span(s->pending).first(std::min(most, s->pending.size() - waiting())),
           .features = s->features.data()});
    }
    runner_->run(work_, false);
    std::vector<State*> next;
    for (size_t i = 0; i < left.size(); ++i) {
      State& s = *left[i];
      if (work_[i].failed) {
        restart(s);
        continue;
      }
      runner_->confirm(s.cache, static_cast<int32_t>(s.cache.ids.size()));
      drop_pending(s, work_[i].ids.size());
      if (s.pending.size() > waiting()) next.push_back(&s);
    }
    left = std::move(next);
  }
}

void ModelDrafter::observe(std::span<const TargetRows> rows) {
  if (!heads()) return;
  const size_t most = std::min(kPendingRows, static_cast<size_t>(runner_->max_tokens()));
  std::vector<State*> full;
  for (const TargetRows& r : rows) {
    const bool fresh = !states_.contains(r.sequence);
    State& s = state_of(r.sequence);
    const size_t idle = r.count == 1 ? s.idle + 1 : 0;
    const bool sleeps = idle > kIdleSteps;
    // Or rows between were lost.
    if (!fresh && (sleeps ? s.seen() > 0 : r.first > s.seen())) restart(s);
    s.idle = idle;
    if (sleeps) continue;
    if (s.seen() == 0) start_head(s, r);
    append(s, r);
    if (s.pending.size() > most) full.push_back(&s);
  }
  if (!full.empty()) run_pending(full);
}

// ---- proposals -------------------------------------------------------------------------------

// The sequence as ids of a language model.
std::span<const int32_t> ModelDrafter::ids_of(State& s, const DraftRequest& r) const {
  if (options_.map == nullptr) return r.tokens;
  for (; s.translated < r.tokens.size(); ++s.translated) {
    options_.map->translate(r.tokens[s.translated], s.own);
  }
  return s.own;
}

std::span<const int32_t> ModelDrafter::target_ids() const {
  return options_.map != nullptr ? options_.map->target_ids() : options_.target_ids;
}

// Brings a language model's cache up to the last id but one step. False: it has no room.
bool ModelDrafter::catch_up(State& s, std::span<const int32_t> ids) {
  const auto size = static_cast<int32_t>(ids.size());
  if (size == 0) return false;
  if (s.cache.ids.empty()) runner_->begin(s.cache, ids.first(ids.size() - 1));
  const auto differ = std::ranges::mismatch(s.cache.ids, ids).in1 - s.cache.ids.begin();
  runner_->cut(s.cache,
               std::max(s.cache.confirmed, std::min(static_cast<int32_t>(differ), size - 1)));
  const auto most = static_cast<size_t>(std::min(runner_->max_tokens(), 512));
  while (ids.size() - s.cache.ids.size() > most) {
    Work work{.sequence = &s.cache, .ids = ids.subspan(s.cache.ids.size(), most)};
    runner_->run({&work, 1}, false);
    if (work.failed) return false;
    runner_->confirm(s.cache, static_cast<int32_t>(s.cache.ids.size()));
  }
  return true;
}

// Takes the drafted token of a work.
void ModelDrafter::take(State& s, DraftRequest& r, Work& work) {
  int32_t token = work.token;
  if (s.sampler.draws()) {
    token = s.sampler.draw(r, work.logits, target_ids(), scratch_, row_);
  } else if (options_.map != nullptr) {
    token = best_known(work.logits, target_ids());
  } else if (token >= 0 && !options_.target_ids.empty()) {
    token = options_.target_ids[static_cast<size_t>(token)];
  }
  if (heads()) s.state.assign(work.state.begin(), work.state.end());
  s.token = token;
  if (token < 0 || token >= options_.vocab) return;
  if (heads() && r.draft.empty()) s.drawn_from = r.drawn_from;
  r.draft.push_back(token);
  s.drafting = true;
  if (options_.map == nullptr) return;
  std::vector<int32_t> own;
  options_.map->translate(token, own);
  s.drafting = own.size() == 1;
  s.own_draft = own.empty() ? -1 : own.front();
}

// Puts masks behind the ids of a work: a row for each draft but the first, whose row is the last
// id's.
void ModelDrafter::add_masks(Work& work, int drafts, Masked& masked) const {
  const auto room = runner_->max_tokens() - static_cast<int>(work.ids.size());
  work.wanted = std::clamp(drafts, 1, 1 + std::max(0, room));
  masked.ids.assign(work.ids.begin(), work.ids.end());
  masked.ids.resize(masked.ids.size() + static_cast<size_t>(work.wanted) - 1, options_.mask);
  if (heads()) {
    masked.features.assign(work.features, work.features + work.ids.size() * width_);
    for (size_t i = work.ids.size(); i < masked.ids.size(); ++i) {
      masked.features.insert(masked.features.end(), options_.mask_features.begin(),
                             options_.mask_features.end());
    }
    work.features = masked.features.data();
  }
  work.ids = masked.ids;
}

// Makes the work a block of a DFlash head: the last known token and a mask for each draft. False:
// there is no room for one.
bool ModelDrafter::add_block(Work& work, int32_t last, int drafts, Masked& masked) const {
  const auto known = static_cast<int>(work.sequence->ids.size());
  const int room = std::min(runner_->max_tokens(), runner_->max_model_len() - known);
  work.wanted = std::min({drafts, options_.block - 1, room - 1});
  if (work.wanted <= 0) return false;
  masked.ids.assign(1, last);
  masked.ids.resize(1 + static_cast<size_t>(work.wanted), options_.mask);
  work.ids = masked.ids;
  return true;
}

// Stores the features of all rows that were seen.
void ModelDrafter::store_pending(std::span<DraftRequest> requests) {
  std::vector<State*> states;
  for (const DraftRequest& r : requests) {
    const auto at = states_.find(r.sequence);
    if (at != states_.end() && !at->second.pending.empty()) states.push_back(&at->second);
  }
  run_pending(states);
}

// The drafts of a pass with masks, which the cache does not keep.
void ModelDrafter::take_all(State& s, DraftRequest& r, const Work& work) {
  const auto rows = static_cast<size_t>(work.wanted);
  const size_t vocab = work.logits.size() / rows;
  for (size_t k = 0; k < rows; ++k) {
    Work row = work;
    row.token = work.tokens[k];
    if (!work.logits.empty()) row.logits = work.logits.subspan(k * vocab, vocab);
    s.drafting = false;
    take(s, r, row);
    if (!s.drafting) break;
  }
  s.drafting = false;
}

// What gives a sequence's first draft. Nothing: it gets none, or has its draft already.
std::optional<ModelDrafter::Work> ModelDrafter::first_work(DraftRequest& r) {
  if (heads() && !states_.contains(r.sequence)) return {};
  State& s = state_of(r.sequence);
  s.drafting = false;
  s.idle = 0;
  if (!std::exchange(s.sampled, true)) {
    s.sampler = DraftSampler(r, options_.vocab, options_.greedy);
  }
  Work work{.sequence = &s.cache, .wants_token = true, .wants_logits = wants_logits(s) || grows(r)};
  if (heads()) {
    if (s.seen() + 1 != std::ssize(r.tokens)) return {};
    if (blocks()) return work;
    if (s.pending.empty()) {  // proposed before, and not verified
      if (s.token < 0) return {};
      r.draft.push_back(s.token);
      r.drawn_from = s.drawn_from;
      s.drafting = true;
      return {};
    }
    work.ids = s.pending;
    work.features = s.features.data();
    return work;
  }
  if (s.cache.ids.empty()) s.cache.salt = fmt::format("{}", r.owner);
  const std::span<const int32_t> ids = ids_of(s, r);
  if (!catch_up(s, ids)) return {};
  work.ids = ids.subspan(s.cache.ids.size());
  if (work.ids.empty()) return {};
  return work;
}

void ModelDrafter::first_step(std::span<DraftRequest> requests) {
  if (blocks()) store_pending(requests);
  work_.clear();
  owner_.clear();
  masked_.resize(requests.size());
  int rows = 0;
  for (size_t i = 0; i < requests.size() && rows < runner_->max_rows(); ++i) {
    DraftRequest& r = requests[i];
    std::optional<Work> first = first_work(r);
    if (!first) continue;
    Work& work = *first;
    const int most = std::min<int>(r.limit, runner_->max_rows() - rows);
    if (blocks()) {
      if (!add_block(work, r.tokens.back(), most, masked_[i])) continue;
    } else if (options_.mask >= 0) {
      add_masks(work, most, masked_[i]);
    }
    rows += work.wanted;
    work_.push_back(work);
    owner_.push_back(i);
  }
  if (chains(requests)) return run_chain(requests);
  runner_->run(work_, false);
  for (size_t k = 0; k < work_.size(); ++k) {
    DraftRequest& r = requests[owner_[k]];
    State& s = state_of(r.sequence);
    if (work_[k].failed) {
      if (heads()) restart(s);
      continue;
    }
    // The last row runs again with new masks.
    const bool again = heads() && options_.mask >= 0 && !blocks();
    const auto known = blocks() ? s.cache.confirmed
                                : static_cast<int32_t>(s.cache.ids.size()) - (work_[k].wanted - 1) -
                                      (again ? 1 : 0);
    runner_->confirm(s.cache, known);
    runner_->cut(s.cache, known);
    const auto kept = static_cast<std::ptrdiff_t>(again ? 1 : 0);
    s.pending.erase(s.pending.begin(), s.pending.end() - kept);
    s.features.erase(s.features.begin(),
                     s.features.end() - kept * static_cast<std::ptrdiff_t>(width_));
    if (options_.mask >= 0) {
      take_all(s, r, work_[k]);
    } else {
      grows(r) ? plant(s, r, work_[k]) : take(s, r, work_[k]);
    }
  }
}

// Whether all rounds of work_ can be enqueued at once: best tokens alone, which need no translation
// by the host.
bool ModelDrafter::chains(std::span<const DraftRequest> requests) {
  if (options_.mask >= 0 || options_.map != nullptr || !knows_all_ || work_.empty()) return false;
  rounds_.clear();
  for (const size_t i : owner_) rounds_.push_back(std::max<int>(1, requests[i].limit));
  return runner_->chains(work_, rounds_);
}

// All drafts of work_, as first_step() and next_step() would find them.
void ModelDrafter::run_chain(std::span<DraftRequest> requests) {
  const std::vector<std::vector<int32_t>> tokens = runner_->chain(work_, rounds_);
  for (size_t k = 0; k < work_.size(); ++k) {
    DraftRequest& r = requests[owner_[k]];
    State& s = state_of(r.sequence);
    if (work_[k].failed) {
      if (heads()) restart(s);
      continue;
    }
    const auto later = static_cast<int32_t>(tokens[k].size()) - 1;
    const auto known = static_cast<int32_t>(s.cache.ids.size()) - later;
    runner_->confirm(s.cache, known);
    s.pending.clear();
    s.features.clear();
    if (heads()) s.state.assign(work_[k].state.begin(), work_[k].state.end());
    for (size_t i = 0; i < tokens[k].size(); ++i) {
      int32_t token = tokens[k][i];
      if (token >= 0 && !options_.target_ids.empty()) {
        token = options_.target_ids[static_cast<size_t>(token)];
      }
      if (i == 0) s.token = token;
      if (token < 0 || token >= options_.vocab) {
        runner_->cut(s.cache, known + static_cast<int32_t>(i));
        break;
      }
      if (static_cast<int32_t>(i) < later) s.cache.ids[static_cast<size_t>(known) + i] = token;
      r.draft.push_back(token);
    }
    if (heads() && !r.draft.empty()) s.drawn_from = r.drawn_from;
  }
}

void ModelDrafter::next_step(std::span<DraftRequest> requests) {
  work_.clear();
  owner_.clear();
  for (size_t i = 0; i < requests.size(); ++i) {
    DraftRequest& r = requests[i];
    const auto at = states_.find(r.sequence);
    if (at == states_.end() || !at->second.drafting || std::ssize(r.draft) >= r.limit) continue;
    State& s = at->second;
    work_.push_back({.sequence = &s.cache,
                     .ids = options_.map != nullptr ? std::span<const int32_t>(&s.own_draft, 1)
                                                    : std::span<const int32_t>(r.draft).last(1),
                     .features = heads() ? s.state.data() : nullptr,
                     .wants_token = true,
                     .wants_logits = wants_logits(s)});
    owner_.push_back(i);
  }
  runner_->run(work_, true);
  for (size_t k = 0; k < work_.size(); ++k) {
    DraftRequest& r = requests[owner_[k]];
    State& s = state_of(r.sequence);
    s.drafting = false;
    if (!work_[k].failed) take(s, r, work_[k]);
  }
}

// ---- trees -----------------------------------------------------------------------------------

std::vector<DraftChoice> ModelDrafter::choices_of(const DraftRequest& r, const DraftTree& tree,
                                                  int32_t node, std::span<const float> logits) {
  const int64_t position = std::ssize(r.tokens) + tree.depth_of(node);
  return best_choices(logits, options_.target_ids, r, position, options_.greedy, tree.choices(node),
                      logits_);
}

// The first level of a tree, from the row that gives a chain its first draft.
void ModelDrafter::plant(State& s, DraftRequest& r, const Work& work) {
  Growing& g = trees_.emplace_back(DraftTree(options_.tree, r.limit), &r);
  const auto choices = choices_of(r, g.tree, DraftTree::kRoot, work.logits);
  g.tree.grow(DraftTree::kRoot, choices);
  s.token = choices.empty() ? -1 : choices.front().token;
  if (heads()) s.state.assign(work.state.begin(), work.state.end());
}

// Runs the nodes that grow, whose parents are in `level`, and makes them the level.
void ModelDrafter::next_level(std::vector<Branch>& level) {
  std::vector<Branch> next;
  std::vector<int32_t> ids;
  std::vector<const Branch*> parents;
  for (size_t t = 0; t < trees_.size(); ++t) {
    const DraftTree& tree = trees_[t].tree;
    for (const int32_t node : tree.growing()) {
      if (std::ssize(next) == std::min(runner_->max_rows(), runner_->max_tokens())) break;
      const int32_t parent = tree.parent(node);
      const auto at = std::ranges::find_if(
          level, [&](const Branch& b) { return b.tree == t && b.node == parent; });
      const State& root = state_of(trees_[t].request->sequence);
      if (parent != DraftTree::kRoot && at == level.end()) continue;  // its cache had no room
      const bool first = parent == DraftTree::kRoot;
      next.push_back(
          {t, node, runner_->fork(first ? root.cache : at->cache), first ? root.state : at->state});
      ids.push_back(tree.token(node));
    }
  }
  for (Branch& b : level) runner_->release(b.cache);
  work_.clear();
  for (size_t i = 0; i < next.size(); ++i) {
    work_.push_back({.sequence = &next[i].cache,
                     .ids = std::span(ids).subspan(i, 1),
                     .features = heads() ? next[i].state.data() : nullptr,
                     .wants_token = true,
                     .wants_logits = true});
  }
  runner_->run(work_, true);
  level.clear();
  for (size_t i = 0; i < next.size(); ++i) {
    Branch& b = next[i];
    Growing& g = trees_[b.tree];
    if (work_[i].failed) {
      runner_->release(b.cache);
      continue;
    }
    if (heads()) b.state.assign(work_[i].state.begin(), work_[i].state.end());
    g.tree.grow(b.node, choices_of(*g.request, g.tree, b.node, work_[i].logits));
    level.push_back(std::move(b));
  }
}

void ModelDrafter::grow_trees() {
  std::vector<Branch> level;
  do {
    next_level(level);
  } while (!level.empty());
  for (const Growing& g : trees_) g.tree.write(*g.request);
  trees_.clear();
}

void ModelDrafter::propose(std::span<DraftRequest> requests) {
  first_step(requests);
  grow_trees();
  // The first step's token and state are kept: next_step() overwrites them.
  std::vector<std::pair<int32_t, std::vector<float>>> first;
  if (heads()) {
    for (const DraftRequest& r : requests) {
      const auto at = states_.find(r.sequence);
      first.emplace_back(at == states_.end() ? -1 : at->second.token,
                         at == states_.end() ? std::vector<float>() : at->second.state);
    }
  }
  do {
    next_step(requests);
  } while (!work_.empty());
  if (!heads()) return;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto at = states_.find(requests[i].sequence);
    if (at == states_.end()) continue;
    State& s = at->second;
    runner_->cut(s.cache, s.cache.confirmed);
    s.token = first[i].first;
    s.state = std::move(first[i].second);
  }
}

// ---- making one ------------------------------------------------------------------------------

Result<std::unique_ptr<Drafter>> make_model_drafter(const MakeContext& c,
                                                    std::unique_ptr<runtime::LoadedModel> model,
                                                    ModelDrafterOptions options) {
  const ModelSpec& spec = model->spec();
  DraftRunnerLimits limits;
  limits.max_model_len = c.max_model_len;
  // A head is run beyond the context that it was trained for: its drafts only get worse.
  if (!spec.features) {
    limits.max_model_len =
        static_cast<int>(std::min<int64_t>(limits.max_model_len, spec.max_context));
  }
  if (spec.learned_positions > 0) {
    limits.max_model_len = static_cast<int>(
        std::min<int64_t>(limits.max_model_len, spec.learned_positions - spec.position_offset));
  }
  limits.max_tokens = c.max_num_batched_tokens;
  limits.max_rows = draft_rows(c.config, c.max_num_seqs, c.max_num_batched_tokens);
  limits.cache_tokens = c.cache_tokens;
  limits.kv_type = c.kv_type;
  FRESHET_ASSIGN_OR_RETURN(auto runner, DraftRunner::create(std::move(model), limits));
  options.vocab = c.target.spec().vocab_size;
  options.greedy = c.config.greedy_drafts;
  options.tree = c.config.tree;
  FRESHET_RETURN_IF_ERROR(runner->set_id_map(options.target_ids));
  return std::unique_ptr<Drafter>(
      std::make_unique<ModelDrafter>(std::move(runner), std::move(options)));
}

}  // namespace freshet::speculative
