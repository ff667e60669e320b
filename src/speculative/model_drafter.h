// Drafts with a model of its own: a small language model, the first layers of the target, or a head
// that reads the target's states (EAGLE, MTP). One token after the other, or a tree depth by depth
// (draft_tree.h), in which each node that grows has a fork of its parent's cache.
//
// A language model is given the sequence's tokens. At position p a head is given the token at p + 1
// and the target's features at p, and proposes the token at p + 2; for its own drafts it is given
// its own states instead of features, and forgets them when the target's features arrive. A head
// whose history is not in its cache, because the target found the prefix in its own, starts with
// what it has seen: the hit is never shortened for the drafter.
//
// DFlash heads differ: the target's features at p are keys and values at p, and a pass proposes the
// tokens behind the last known one, at whose position its rows begin.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "speculative/draft_runner.h"
#include "speculative/draft_sampler.h"
#include "speculative/draft_tree.h"
#include "speculative/drafter.h"
#include "speculative/vocabulary_map.h"

namespace freshet::speculative {

struct MakeContext;

struct ModelDrafterOptions {
  StateNeeds needs;                 // of a head: its features, side by side
  std::vector<int32_t> target_ids;  // the target's ids of the drafter's columns; empty: the same
  std::shared_ptr<const VocabularyMap> map;  // of a language model with another vocabulary
  int64_t vocab = 0;                         // of the target
  bool greedy = false;                       // draw the argmax at any temperature
  // Of a model that drafts all tokens in one pass (PARD, P-EAGLE, DFlash): the token that stands
  // for those to come.
  int32_t mask = -1;
  std::vector<float> mask_features;  // of a head: its features there
  TreeOptions tree;                  // with a map, chains are drafted instead
  int block = 0;                     // of a DFlash head: most rows of a pass; 0: another drafter
};

class ModelDrafter final : public Drafter {
 public:
  ModelDrafter(std::unique_ptr<DraftRunner> runner, ModelDrafterOptions options);

  void propose(std::span<DraftRequest> requests) override;
  StateNeeds needs() const override { return options_.needs; }
  void observe(std::span<const TargetRows> rows) override;
  void forget(uint64_t sequence) override;

 private:
  struct State {
    DraftSequence cache;
    int32_t base = 0;  // the sequence's position that the cache begins with
    // Of heads: the ids and the features that the cache does not hold yet.
    std::vector<int32_t> pending;
    std::vector<float> features;
    size_t idle = 0;  // of heads: steps of one row since drafts were asked for
    // The last proposal's first step, for a sequence whose step was put off.
    int32_t token = -1;
    std::vector<float> state;
    // With a map: the sequence and the drafts as ids of the drafter.
    std::vector<int32_t> own;
    size_t translated = 0;  // tokens of the sequence
    int32_t own_draft = -1;
    std::vector<std::vector<Candidate>> drawn_from;  // of that step's token alone
    DraftSampler sampler;
    bool sampled = false;  // the sampler was made
    bool drafting = false;

    int32_t seen() const { return base + cache.confirmed + static_cast<int32_t>(pending.size()); }
  };
  using Work = DraftRunner::Work;

  bool heads() const { return runner_->spec().features.has_value(); }
  bool blocks() const { return options_.block > 0; }
  // A head's row runs once the token behind it is known. Only DFlash heads need no such token.
  size_t waiting() const { return blocks() ? 0 : 1; }
  State& state_of(uint64_t sequence) { return states_[sequence]; }
  void start_head(State& s, const TargetRows& rows);
  void append(State& s, const TargetRows& rows);
  void drop_pending(State& s, size_t count);
  void run_pending(std::span<State* const> states);
  void restart(State& s);
  std::span<const int32_t> ids_of(State& s, const DraftRequest& r) const;
  std::span<const int32_t> target_ids() const;
  bool wants_logits(const State& s) const { return s.sampler.draws() || options_.map != nullptr; }
  bool catch_up(State& s, std::span<const int32_t> ids);
  std::optional<Work> first_work(DraftRequest& r);
  void first_step(std::span<DraftRequest> requests);
  void next_step(std::span<DraftRequest> requests);
  bool chains(std::span<const DraftRequest> requests);
  void run_chain(std::span<DraftRequest> requests);
  void take(State& s, DraftRequest& r, Work& work);
  struct Masked {
    std::vector<int32_t> ids;
    std::vector<float> features;
  };
  void add_masks(Work& work, int drafts, Masked& masked) const;
  bool add_block(Work& work, int32_t last, int drafts, Masked& masked) const;
  void store_pending(std::span<DraftRequest> requests);
  void take_all(State& s, DraftRequest& r, const Work& work);

  // Trees. A branch is a node that grew: its cache and its state.
  struct Branch {
    size_t tree = 0;  // index in trees_
    int32_t node = DraftTree::kRoot;
    DraftSequence cache;
    std::vector<float> state;
  };
  struct Growing {
    DraftTree tree;
    DraftRequest* request;
  };
  bool grows(const DraftRequest& r) const {
    return r.tree && options_.tree.wanted() && options_.map == nullptr;
  }
  std::vector<DraftChoice> choices_of(const DraftRequest& r, const DraftTree& tree, int32_t node,
                                      std::span<const float> logits);
  void plant(State& s, DraftRequest& r, const Work& work);
  void next_level(std::vector<Branch>& level);
  void grow_trees();

  std::unique_ptr<DraftRunner> runner_;
  ModelDrafterOptions options_;
  size_t width_ = 0;       // of a head's features
  bool knows_all_ = true;  // every column of the logits is one of the target's ids
  std::unordered_map<uint64_t, State> states_;
  uint64_t next_salt_ = 0;
  SamplerScratch scratch_;
  std::vector<float> row_;
  std::vector<Work> work_;
  std::vector<size_t> owner_;   // [work_] index of the request
  std::vector<int> rounds_;     // [work_] of a chain
  std::vector<Masked> masked_;  // [requests] with a mask: what is run
  LogitScratch logits_;         // for rows of the drafter
  std::vector<Growing> trees_;
};

// A drafter with this model; what the context tells is filled into the options.
Result<std::unique_ptr<Drafter>> make_model_drafter(const MakeContext& context,
                                                    std::unique_ptr<runtime::LoadedModel> model,
                                                    ModelDrafterOptions options);

}  // namespace freshet::speculative
