// Medusa heads (arXiv:2401.10774): head i guesses the token i + 2 positions behind a state after
// the final norm, as y = x + SiLU(W x + b) and a head of the vocabulary on y.
//
// Names: blocks.{i} (the reference family), blocks.{i}.layers.{j} and lm_heads.{i} (vLLM),
// {i}.{j}.linear and {i}.{layers} (the original), each also behind "medusa_head.". A head without a
// vocabulary matrix of its own uses the target's.
#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>

#include "layers/weights.h"
#include "models/weight_reader.h"
#include "speculative/draft_sampler.h"
#include "speculative/draft_tree.h"
#include "speculative/registry.h"

namespace freshet::speculative {
namespace {

using loader::Checkpoint;
using loader::TensorSource;

constexpr int kMostHeads = 16, kMostBlocks = 8;

struct MedusaHead {
  std::vector<Linear> blocks;
  Linear head;  // empty: the target's
};

// The tensors of head `i`: the stems of its blocks, and of its vocabulary matrix ("" if shared).
struct HeadNames {
  std::vector<std::string> blocks;
  std::string head;
};

const TensorSource* weight_of(const Checkpoint& c, const std::string& stem) {
  if (const TensorSource* found = c.find(stem + ".weight")) return found;
  return c.find("medusa_head." + stem + ".weight");
}

HeadNames names_of(const Checkpoint& c, int i) {
  HeadNames names;
  const auto add = [&](const std::string& stem) {
    const TensorSource* const found = weight_of(c, stem);
    if (found == nullptr) return false;
    names.blocks.push_back(
        found->name.substr(0, found->name.size() - std::string_view(".weight").size()));
    return true;
  };
  if (!add(fmt::format("blocks.{}", i))) {
    for (int j = 0; j < kMostBlocks; ++j) {
      if (!add(fmt::format("blocks.{}.layers.{}", i, j)) && !add(fmt::format("{}.{}.linear", i, j)))
        break;
    }
  }
  for (const std::string& stem :
       {fmt::format("lm_heads.{}", i), fmt::format("{}.{}", i, names.blocks.size())}) {
    if (const TensorSource* found = weight_of(c, stem)) {
      names.head = found->name;
      break;
    }
  }
  return names;
}

Status read_linear(models::WeightReader& reader, const std::string& weight, int64_t rows,
                   int64_t cols, Linear& out) {
  const TensorSource* const tensor = reader.find_name(weight);
  FRESHET_ASSIGN_OR_RETURN(const models::Rows source, reader.rows(*tensor, rows, cols));
  FRESHET_RETURN_IF_ERROR(reader.pack(out.weight, weight, source));
  const std::string stem = weight.substr(0, weight.size() - std::string_view(".weight").size());
  const TensorSource* const bias = reader.find_name(stem + ".bias");
  if (bias == nullptr) return {};
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> values, reader.values(*bias, rows));
  return reader.store(out.bias, values);
}

Result<std::vector<MedusaHead>> read_heads(const Checkpoint& checkpoint, const ModelSpec& target,
                                           ops::Ops& ops) {
  const Progress none;
  const models::Architecture any{.type = "medusa", .spec = nullptr};
  models::WeightReader reader(checkpoint, any, ops, none);
  std::vector<MedusaHead> heads;
  for (int i = 0; i < kMostHeads; ++i) {
    const HeadNames names = names_of(checkpoint, i);
    if (names.blocks.empty()) break;
    MedusaHead& head = heads.emplace_back();
    for (const std::string& stem : names.blocks) {
      FRESHET_RETURN_IF_ERROR(read_linear(reader, stem + ".weight", target.hidden_size,
                                          target.hidden_size, head.blocks.emplace_back())
                                  .with_context(checkpoint.path()));
    }
    if (names.head.empty()) continue;
    FRESHET_RETURN_IF_ERROR(
        read_linear(reader, names.head, target.vocab_size, target.hidden_size, head.head)
            .with_context(checkpoint.path()));
  }
  if (heads.empty()) {
    return invalid_argument("{}: tensor 'blocks.0.weight' is missing: these are no Medusa heads",
                            checkpoint.path());
  }
  return heads;
}

class Medusa final : public Drafter {
 public:
  Medusa(const MakeContext& c, std::vector<MedusaHead> heads,
         std::shared_ptr<const ModelWeights> target)
      : ops_(c.compute->ops()),
        spec_(c.target.spec()),
        heads_(std::move(heads)),
        target_(std::move(target)),
        rows_(std::min(c.max_num_seqs, c.max_num_batched_tokens)),
        greedy_(c.config.greedy_drafts),
        tree_(c.config.tree),
        scratch_(spec_.vocab_size),
        logit_scratch_(spec_.vocab_size) {}

  Status allocate() {
    const auto rows = static_cast<size_t>(rows_), hidden = static_cast<size_t>(spec_.hidden_size);
    const auto vocab = static_cast<size_t>(spec_.vocab_size);
    Memory* const host = ops_.host_memory();
    Memory* const memory = ops_.memory();
    FRESHET_ASSIGN_OR_RETURN(given_, Buffer::allocate(rows * hidden * 4, host));
    FRESHET_ASSIGN_OR_RETURN(x_, Buffer::allocate(rows * hidden * 4, memory));
    FRESHET_ASSIGN_OR_RETURN(y_, Buffer::allocate(rows * hidden * 4, memory));
    FRESHET_ASSIGN_OR_RETURN(logits_, Buffer::allocate(rows * vocab * 4, memory));
    FRESHET_ASSIGN_OR_RETURN(ids_, Buffer::allocate(rows * 4, memory));
    FRESHET_ASSIGN_OR_RETURN(host_logits_, Buffer::allocate(rows * vocab * 4, host));
    FRESHET_ASSIGN_OR_RETURN(host_ids_, Buffer::allocate(rows * 4, host));
    ops::Ops::ShapeLimits limits;
    limits.tokens = rows_;
    limits.max_cols = spec_.hidden_size;
    limits.max_rows = std::max(spec_.vocab_size, spec_.hidden_size);
    return ops_.set_scratch(ops_.scratch_bytes(limits));
  }

  StateNeeds needs() const override { return {.last = true, .boundaries = {}}; }

  void observe(std::span<const TargetRows> rows) override {
    for (const TargetRows& r : rows) {
      State& s = states_[r.sequence];
      const auto hidden = static_cast<ptrdiff_t>(spec_.hidden_size);
      const float* const last = r.last + (r.count - 1) * hidden;
      s.state.assign(last, last + hidden);
      s.position = r.first + r.count - 1;
    }
  }
  void forget(uint64_t sequence) override { states_.erase(sequence); }

  void propose(std::span<DraftRequest> requests) override {
    ready_.clear();
    int32_t longest = 0;
    for (DraftRequest& r : requests) {
      const auto at = states_.find(r.sequence);
      if (at == states_.end() || at->second.position + 2 != std::ssize(r.tokens)) continue;
      if (std::ssize(ready_) == rows_) break;
      State& s = at->second;
      if (!std::exchange(s.sampled, true)) s.sampler = DraftSampler(r, spec_.vocab_size, greedy_);
      std::ranges::copy(s.state, given_.as<float>() + std::ssize(ready_) * spec_.hidden_size);
      longest = std::max(longest, r.limit);
      ready_.push_back({&r, &s, {}});
      if (r.tree && tree_.wanted()) {
        ready_.back().tree.emplace(tree_,
                                   std::min<int32_t>(r.limit, static_cast<int32_t>(heads_.size())));
      }
    }
    if (ready_.empty()) return;
    const auto count = std::min<size_t>(heads_.size(), static_cast<size_t>(longest));
    for (size_t i = 0; i < count; ++i) guess(heads_[i], static_cast<int64_t>(i));
    for (const Ready& r : ready_) {
      if (r.tree) r.tree->write(*r.request);
    }
  }

 private:
  struct State {
    std::vector<float> state;
    int32_t position = -1;
    DraftSampler sampler;
    bool sampled = false;
  };
  struct Ready {
    DraftRequest* request;
    State* state;
    std::optional<DraftTree> tree;
  };

  Matrix view(Buffer& buffer, int64_t cols) const {
    return {buffer.as<float>(), std::ssize(ready_), cols, cols};
  }

  // A head knows no draft: all nodes of a level have the same choices.
  void grow(Ready& r, std::span<const float> logits, int64_t level) {
    std::vector<int32_t> nodes = r.tree->growing();
    if (level == 0) nodes = {DraftTree::kRoot};
    int count = 0;
    for (const int32_t node : nodes) count = std::max(count, r.tree->choices(node));
    if (count == 0) return;
    const auto choices = best_choices(logits, {}, *r.request, std::ssize(r.request->tokens) + level,
                                      greedy_, count, logit_scratch_);
    for (const int32_t node : nodes) r.tree->grow(node, choices);
  }

  // The next draft of all ready requests, or the next level of their trees.
  void guess(const MedusaHead& head, int64_t index) {
    std::vector<int32_t> every(ready_.size());
    for (size_t i = 0; i < every.size(); ++i) every[i] = static_cast<int32_t>(i);
    const Matrix x = view(x_, spec_.hidden_size), y = view(y_, spec_.hidden_size);
    const Matrix logits = view(logits_, spec_.vocab_size);
    ops_.gather_rows(x, view(given_, spec_.hidden_size), every);
    for (const Linear& block : head.blocks) {
      ops::Product product{.weight = &block.weight, .out = y};
      product.bias = block.bias.data();
      ops_.matmul(x, {&product, 1});
      ops_.activation(y, ops::Activation::kSilu);
      ops_.add(x, y, 1.0f);
    }
    const Linear& own = head.head.weight.empty() ? target_->head : head.head;
    ops::Product product{.weight = own.weight.empty() ? &target_->embedding : &own.weight,
                         .out = logits};
    product.bias = own.bias.data();
    product.scale = spec_.logits_scale;
    ops_.matmul(x, {&product, 1});
    ops_.argmax(logits, ids_.as<int32_t>());
    ops_.fetch(host_ids_.data(), ids_.data(), ready_.size() * sizeof(int32_t));
    const bool draws = std::ranges::any_of(
        ready_, [](const Ready& r) { return r.tree || r.state->sampler.draws(); });
    const auto vocab = static_cast<size_t>(spec_.vocab_size);
    if (draws) ops_.fetch(host_logits_.data(), logits.data, ready_.size() * vocab * sizeof(float));
    ops_.wait();
    for (size_t i = 0; i < ready_.size(); ++i) {
      DraftRequest& r = *ready_[i].request;
      const std::span<float> row(host_logits_.as<float>() + i * vocab, vocab);
      if (ready_[i].tree) {
        grow(ready_[i], row, index);
        continue;
      }
      if (std::ssize(r.draft) != index || std::ssize(r.draft) >= r.limit) continue;
      int32_t token = host_ids_.as<int32_t>()[i];
      if (ready_[i].state->sampler.draws()) {
        token = ready_[i].state->sampler.draw(r, row, {}, scratch_, row_);
      }
      if (token >= 0) r.draft.push_back(token);
    }
  }

  ops::Ops& ops_;
  const ModelSpec& spec_;
  std::vector<MedusaHead> heads_;
  std::shared_ptr<const ModelWeights> target_;
  int64_t rows_;
  bool greedy_;
  const TreeOptions tree_;
  Buffer given_, x_, y_, logits_, ids_, host_logits_, host_ids_;
  std::unordered_map<uint64_t, State> states_;
  std::vector<Ready> ready_;
  SamplerScratch scratch_;
  LogitScratch logit_scratch_;
  std::vector<float> row_;
};

}  // namespace

Result<DrafterCost> medusa_cost(const PlanContext& c) {
  FRESHET_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_drafter(c.config.model));
  // Logits on the device and on the host, and three states.
  const auto numbers =
      2 * static_cast<size_t>(c.target.vocab_size) + 3 * static_cast<size_t>(c.target.hidden_size);
  return DrafterCost{.weights = checkpoint.total_bytes(), .bytes_per_row = numbers * sizeof(float)};
}

Result<std::unique_ptr<Drafter>> make_medusa(const MakeContext& c) {
  const auto target = c.target.model().share();
  const ModelSpec& spec = c.target.spec();
  if (target == nullptr || spec.embedding_size != spec.hidden_size) {
    return unsupported("this model shares no vocabulary matrix with Medusa heads");
  }
  FRESHET_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_drafter(c.config.model));
  FRESHET_ASSIGN_OR_RETURN(auto heads, read_heads(checkpoint, spec, c.compute->ops()));
  auto medusa = std::make_unique<Medusa>(c, std::move(heads), target);
  FRESHET_RETURN_IF_ERROR(medusa->allocate());
  return std::unique_ptr<Drafter>(std::move(medusa));
}

}  // namespace freshet::speculative
