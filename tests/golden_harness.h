// Runs a model over token sequences through the paged cache, for tests: shuffled blocks, any
// chunking, any mix of sequences in a step.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/cpu/backend.h"
#include "layers/model.h"
#include "loader/checkpoint.h"
#include "ops/device.h"

namespace freshet::testing {

using Ids = std::vector<int32_t>;

class Runner {
 public:
  struct Options {
    bool reference = true;
    ops::KvType kv = ops::KvType::kF32;
    int threads = 2;
    int64_t max_tokens = 512;
    int64_t context = 512;
    std::string weight_cache;
    ops::ProjectionHooks* hooks = nullptr;
    std::vector<int> captures;  // every step returns the stream there, and the last states
  };

  static Result<std::unique_ptr<Runner>> open(const std::string& path, const Options& options,
                                              std::unique_ptr<ops::Device> device = nullptr) {
    FRESHET_ASSIGN_OR_RETURN(const loader::Checkpoint checkpoint, loader::Checkpoint::open(path));
    return open(checkpoint, options, std::move(device));
  }

  static Result<std::unique_ptr<Runner>> open(const loader::Checkpoint& checkpoint,
                                              const Options& options,
                                              std::unique_ptr<ops::Device> device = nullptr) {
    std::unique_ptr<Runner> runner(new Runner(options));
    ops::OpsOptions ops_options;
    ops_options.reference = options.reference;
    if (device != nullptr) {
      runner->ops_ = ops::Ops::create(runner->pool_, std::move(device));
    } else {
      FRESHET_ASSIGN_OR_RETURN(runner->ops_, ops::Ops::create(runner->pool_, cpu::kernels(),
                                                              cpu::detect(), ops_options));
    }
    FRESHET_ASSIGN_OR_RETURN(runner->model_,
                             load_model(checkpoint, *runner->ops_, {}, options.weight_cache));
    if (options.hooks != nullptr) {
      FRESHET_RETURN_IF_ERROR(runner->ops_->set_projection_hooks(
          options.hooks, options.max_tokens, runner->model_->spec().hidden_size));
    }
    FRESHET_RETURN_IF_ERROR(runner->model_->capture(options.captures));
    FRESHET_RETURN_IF_ERROR(
        runner->model_->reserve(options.max_tokens, options.max_tokens, options.context));
    return runner;
  }

  Model& model() { return *model_; }
  ops::Ops& ops() { return *ops_; }
  int vocab() const { return model_->spec().vocab_size; }

  // Whether the logits of a position of a sequence are wanted.
  using Wanted = bool (*)(const Ids& sequence, int32_t position);
  static bool every(const Ids&, int32_t) { return true; }

  // The logits of every wanted position of each sequence, [positions, vocab]. Each step takes the
  // next `chunk` tokens of every unfinished sequence (0: all at once).
  std::vector<std::vector<float>> run(const std::vector<Ids>& sequences, int chunk,
                                      uint32_t seed = 1, Wanted wanted = every) {
    allocate(sequences, seed);
    std::vector<std::vector<float>> logits(sequences.size());
    std::vector<int32_t> done(sequences.size(), 0);
    for (;;) {
      std::vector<int> members;
      std::vector<int32_t> counts;
      for (size_t s = 0; s < sequences.size(); ++s) {
        const auto left = static_cast<int32_t>(sequences[s].size()) - done[s];
        if (left == 0) continue;
        members.push_back(static_cast<int>(s));
        counts.push_back(chunk > 0 ? std::min(chunk, left) : left);
      }
      if (members.empty()) return logits;
      const std::vector<float> out = step(sequences, members, counts, done, wanted);
      const float* row = out.data();
      for (size_t m = 0; m < members.size(); ++m) {
        const auto s = static_cast<size_t>(members[m]);
        for (const int32_t end = done[s] + counts[m]; done[s] < end; ++done[s]) {
          if (!wanted(sequences[s], done[s])) continue;
          logits[s].insert(logits[s].end(), row, row + vocab());
          row += vocab();
        }
      }
    }
  }

  // The most likely token after each of `count` steps; `margins`: its lead over the second best.
  Ids greedy(const Ids& prompt, int count, std::vector<float>* margins = nullptr) {
    Ids all = prompt;
    Ids reserved = prompt;
    reserved.resize(prompt.size() + static_cast<size_t>(count));
    allocate({reserved}, 7);
    std::vector<int32_t> done = {0};
    for (int i = 0; i < count; ++i) {
      const auto fresh = static_cast<int32_t>(all.size()) - done[0];
      const std::vector<float> out = step({all}, {0}, {fresh}, done);
      done[0] += fresh;
      const auto last = out.end() - vocab();
      const auto best = std::max_element(last, out.end());
      if (margins != nullptr) {
        float second = -1e30f;
        for (auto it = last; it != out.end(); ++it) {
          if (it != best) second = std::max(second, *it);
        }
        margins->push_back(*best - second);
      }
      all.push_back(static_cast<int32_t>(best - last));
    }
    return {all.begin() + static_cast<int64_t>(prompt.size()), all.end()};
  }

 private:
  explicit Runner(const Options& options) : options_(options), pool_(options.threads, false) {}

  // A fresh cache in which the blocks of each sequence are in random order.
  void allocate(const std::vector<Ids>& sequences, uint32_t seed) {
    const KvCacheSpec spec = kv_cache_spec(model_->spec(), options_.kv);
    std::mt19937 random(seed);
    int32_t blocks = 3;
    stride_ = 1;
    for (const Ids& ids : sequences) {
      const auto needed =
          static_cast<int64_t>(ids.size() + ops::kBlockTokens - 1) / ops::kBlockTokens;
      blocks += static_cast<int32_t>(needed);
      stride_ = std::max(stride_, needed);
    }
    auto storage =
        KvStorage::allocate(spec, spec.pools(std::ssize(sequences) + 1, blocks), ops_->memory());
    FRESHET_CHECK(storage.ok(), "{}", storage.status().message());
    cache_ = std::make_unique<KvStorage>(std::move(*storage));
    tables_.assign(spec.groups.size(), {});
    for (auto& table : tables_) {
      const auto g = static_cast<int>(&table - tables_.data());
      const bool states = g == spec.state_group();
      std::vector<int32_t> ids(static_cast<size_t>(cache_->blocks(g)));
      for (int32_t i = 0; i < std::ssize(ids); ++i) ids[static_cast<size_t>(i)] = i;
      std::shuffle(ids.begin(), ids.end(), random);
      size_t next = 0;
      for (const Ids& sequence : sequences) {
        std::vector<int32_t> mine(static_cast<size_t>(stride_), -1);
        const size_t needed =
            states ? 1 : (sequence.size() + ops::kBlockTokens - 1) / ops::kBlockTokens;
        for (size_t b = 0; b < needed; ++b) mine[b] = ids[next++];
        table.push_back(std::move(mine));
      }
    }
  }

  std::vector<float> step(const std::vector<Ids>& sequences, const std::vector<int>& members,
                          const std::vector<int32_t>& counts, const std::vector<int32_t>& done,
                          Wanted wanted = every) {
    ForwardBatch batch;
    batch.query_start.push_back(0);
    for (size_t m = 0; m < members.size(); ++m) {
      const auto s = static_cast<size_t>(members[m]);
      for (int32_t i = 0; i < counts[m]; ++i) {
        if (wanted(sequences[s], done[s] + i)) {
          batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()));
        }
        batch.token_ids.push_back(sequences[s][static_cast<size_t>(done[s] + i)]);
        batch.positions.push_back(done[s] + i);
      }
      batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
      batch.context_len.push_back(done[s] + counts[m]);
    }
    const auto& groups = cache_->spec().groups;
    for (size_t g = 0; g < groups.size(); ++g) {
      BlockTables tables{{}, stride_};
      for (const int member : members) {
        const auto s = static_cast<size_t>(member);
        std::vector<int32_t> row = tables_[g][s];
        // Blocks that slid out of the window are gone for good, as in the engine.
        const int64_t reach = groups[g].window > 0 ? int64_t{done[s]} - groups[g].window + 1 : 0;
        for (int64_t b = 0; (b + 1) * ops::kBlockTokens <= reach; ++b)
          row[static_cast<size_t>(b)] = -1;
        tables.ids.insert(tables.ids.end(), row.begin(), row.end());
      }
      batch.tables.push_back(std::move(tables));
    }
    std::vector<float> logits(batch.logit_rows.size() * static_cast<size_t>(vocab()));
    StepResults results{logits.data()};
    const auto states = static_cast<size_t>(batch.tokens() * model_->spec().hidden_size);
    std::vector<std::vector<float>> captured(options_.captures.size() + 1,
                                             std::vector<float>(states));
    std::vector<float*> boundaries;
    for (size_t i = 1; i < captured.size(); ++i) boundaries.push_back(captured[i].data());
    results.boundaries = boundaries;
    if (!boundaries.empty()) results.hidden = captured[0].data();
    model_->forward(batch, *cache_, results);
    return logits;
  }

  Options options_;
  ThreadPool pool_;
  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<KvStorage> cache_;
  std::vector<std::vector<std::vector<int32_t>>> tables_;  // [groups][sequences][blocks]
  int64_t stride_ = 0;
};

}  // namespace freshet::testing
