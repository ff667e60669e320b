#include "quantizer/calibration/part_runner.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "layers/spec.h"

namespace freshet::quantizer {
namespace {

// Tokens of a step, if windows are not longer: enough for efficient GEMMs.
constexpr int64_t kStepTokens = 2048;

int64_t blocks_of(int64_t tokens) {
  return (tokens + ops::kBlockTokens - 1) / ops::kBlockTokens;
}

// The widest output of a projection that is added to another's: to the stream, or an adapter's.
int64_t widest_sum(const ModelSpec& spec) {
  int64_t most = spec.hidden_size;
  for (const LayerSpec& layer : spec.layers) {
    for (const BranchSpec& b : layer.branches) {
      if (const auto* a = std::get_if<AttentionSpec>(&b.body); a != nullptr && a->adapter_rank > 0)
        most = std::max(most, int64_t{a->heads} * std::max(a->head_dim, a->value_dim));
      if (const auto* m = std::get_if<MlpSpec>(&b.body); m != nullptr && m->adapter_rank > 0)
        most = std::max<int64_t>(most, m->ff);
    }
  }
  return most;
}

}  // namespace

PartRunner::PartRunner(std::shared_ptr<runtime::Compute> compute,
                       const loader::Checkpoint& checkpoint, const models::Description& model,
                       const Windows& windows, const Options& options, StreamStore streams)
    : compute_(std::move(compute)),
      checkpoint_(checkpoint),
      model_(model),
      windows_(windows),
      options_(options),
      streams_(std::move(streams)) {
  for (const auto& window : windows_) {
    tokens_ += std::ssize(window);
    longest_ = std::max(longest_, std::ssize(window));
  }
  step_tokens_ = std::max(kStepTokens, longest_);
  const auto numbers = static_cast<size_t>(step_tokens_ * model_.spec.hidden_size);
  in_.resize(numbers);
  out_.resize(numbers);
  plan_steps();
}

void PartRunner::plan_steps() {
  for (int64_t w = 0, tokens = 0; w < streams_.windows(); ++w) {
    const int64_t length = streams_.length(w);
    if (steps_.empty() || tokens + length > step_tokens_) {
      steps_.push_back({w, w, 0});
      tokens = 0;
    }
    tokens += length;
    steps_.back().last = w + 1;
    steps_.back().blocks += blocks_of(length);
  }
}

Result<std::unique_ptr<PartRunner>> PartRunner::create(std::shared_ptr<runtime::Compute> compute,
                                                       const loader::Checkpoint& checkpoint,
                                                       const models::Description& model,
                                                       const Windows& windows,
                                                       const Options& options) {
  if (compute->device() != nullptr) return unsupported("calibration runs on the processor only");
  std::vector<int64_t> lengths;
  for (const auto& window : windows) {
    if (window.empty()) return invalid_argument("a calibration window without tokens");
    lengths.push_back(std::ssize(window));
  }
  if (windows.empty()) return invalid_argument("the calibration text has no tokens");
  FRESHET_ASSIGN_OR_RETURN(StreamStore streams,
                           StreamStore::create(std::move(lengths), model.spec.hidden_size,
                                               options.memory, options.folder));
  return std::unique_ptr<PartRunner>(
      new PartRunner(std::move(compute), checkpoint, model, windows, options, std::move(streams)));
}

Result<std::unique_ptr<Model>> PartRunner::load(const models::Part& part) {
  return models::load_part(checkpoint_, *model_.architecture, model_.spec, part, compute_->ops());
}

Status PartRunner::step(Model& part, const KvStorage& cache, const Step& step, bool reads_ids,
                        bool moves_on) {
  const int64_t hidden = model_.spec.hidden_size;
  ForwardBatch batch;
  batch.query_start.push_back(0);
  batch.tables.resize(cache.spec().groups.size());
  const int64_t stride = blocks_of(longest_);
  for (BlockTables& t : batch.tables) t.stride = stride;
  int32_t block = 0;
  for (int64_t w = step.first; w < step.last; ++w) {
    const std::vector<int32_t>& ids = windows_[static_cast<size_t>(w)];
    if (!reads_ids) FRESHET_RETURN_IF_ERROR(streams_.read(w, in_.data() + batch.tokens() * hidden));
    const size_t at = batch.positions.size();
    batch.token_ids.insert(batch.token_ids.end(), ids.begin(), ids.end());
    batch.positions.resize(at + ids.size());
    std::iota(batch.positions.begin() + static_cast<int64_t>(at), batch.positions.end(), 0);
    batch.query_start.push_back(static_cast<int32_t>(batch.tokens()));
    batch.context_len.push_back(static_cast<int32_t>(ids.size()));
    const int64_t blocks = blocks_of(std::ssize(ids));
    for (BlockTables& t : batch.tables) {
      for (int64_t b = 0; b < stride; ++b)
        t.ids.push_back(b < blocks ? block + static_cast<int32_t>(b) : -1);
    }
    block += static_cast<int32_t>(blocks);
  }
  if (!reads_ids) batch.features = in_.data();
  float* const results[] = {out_.data()};
  StepResults to;
  to.boundaries = results;
  part.forward(batch, cache, to);
  const float* from = out_.data();
  for (int64_t w = step.first; moves_on && w < step.last; ++w) {
    FRESHET_RETURN_IF_ERROR(streams_.write(w, from));
    from += streams_.length(w) * hidden;
  }
  return {};
}

Status PartRunner::run(Model& part, bool reads_ids, InputCollector* collector, bool moves_on) {
  const KvCacheSpec spec = kv_cache_spec(part.spec(), ops::KvType::kF32);
  int64_t blocks = 0;
  for (const Step& s : steps_) blocks = std::max(blocks, s.blocks);
  const std::vector<int32_t> counts = spec.pools(blocks, blocks);  // no more sequences than blocks
  FRESHET_ASSIGN_OR_RETURN(const KvStorage cache,
                           KvStorage::allocate(spec, counts, compute_->ops().memory()));
  for (const Step& s : steps_) {
    if (options_.stop && options_.stop()) return cancelled("interrupted");
    if (collector != nullptr) collector->begin_step();
    FRESHET_RETURN_IF_ERROR(step(part, cache, s, reads_ids, moves_on));
  }
  return {};
}

std::unique_ptr<InputCollector> PartRunner::new_collector(const InputCollector::Wants& wants) {
  return std::make_unique<InputCollector>(wants, compute_->ops(), step_tokens_,
                                          model_.spec.hidden_size, options_.device);
}

Status PartRunner::observe(Model& part, bool reads_ids, InputCollector& collector, bool moves_on) {
  ops::Ops& ops = compute_->ops();
  FRESHET_RETURN_IF_ERROR(
      ops.set_projection_hooks(&collector, step_tokens_, widest_sum(part.spec())));
  Status done = part.reserve(step_tokens_, 1, longest_);
  if (done.ok()) done = run(part, reads_ids, &collector, moves_on);
  FRESHET_RETURN_IF_ERROR(ops.set_projection_hooks(nullptr));
  return done;
}

Result<PartRunner::Collected> PartRunner::collect(const models::Part& part,
                                                  const InputCollector::Wants& wants,
                                                  bool moves_on) {
  FRESHET_ASSIGN_OR_RETURN(const auto model, load(part));
  Collected out;
  out.collector = new_collector(wants);
  FRESHET_RETURN_IF_ERROR(observe(*model, part.layer < 0, *out.collector, moves_on));
  FRESHET_RETURN_IF_ERROR(out.collector->finish());
  out.weights = model->weights();
  return out;
}

Result<PartRunner::Collected> PartRunner::collect_uses(const models::Part& shared,
                                                       InputCollector::Wants wants,
                                                       const models::WeightReader& reader) {
  FRESHET_ASSIGN_OR_RETURN(const auto linears, models::linear_tensors(reader, model_.spec, shared));
  std::vector<int> uses = models::sharers_of(model_.spec, shared);
  const auto is_shared = [&](const Model::WeightInfo& w) {
    return std::ranges::any_of(
        linears, [&](const models::LinearTensor& t) { return t.source->name == w.name; });
  };
  Collected out;
  for (const models::Part& part : models::parts_of(model_.spec)) {
    if (std::ranges::count(uses, part.layer) == 0) {
      FRESHET_RETURN_IF_ERROR(advance(part));
      continue;
    }
    FRESHET_ASSIGN_OR_RETURN(const auto model, load(part));
    const std::vector<Model::WeightInfo>& weights = model->weights();
    if (out.collector == nullptr) {
      out.weights = weights;
      for (size_t id = 0; id < weights.size(); ++id) {
        if (is_shared(weights[id])) wants.gram_of.push_back(static_cast<int32_t>(id));
      }
      out.collector = new_collector(wants);
    }
    // Layers that share matrices have the same ones in the same order, so ids mean the same.
    for (size_t id = 0; id < weights.size(); ++id) {
      FRESHET_CHECK(!is_shared(weights[id]) || weights[id].name == out.weights[id].name,
                    "'{}' is another matrix in layer {}", weights[id].name, part.layer);
    }
    FRESHET_RETURN_IF_ERROR(observe(*model, false, *out.collector, true));
    std::erase(uses, part.layer);
    if (uses.empty()) break;
  }
  FRESHET_RETURN_IF_ERROR(out.collector->finish());
  return out;
}

Status PartRunner::copy_streams(const PartRunner& from) {
  for (int64_t w = 0; w < streams_.windows(); ++w) {
    FRESHET_RETURN_IF_ERROR(from.read(w, in_.data()));
    FRESHET_RETURN_IF_ERROR(streams_.write(w, in_.data()));
  }
  return {};
}

Status PartRunner::advance(const models::Part& part) {
  FRESHET_ASSIGN_OR_RETURN(const auto model, load(part));
  FRESHET_RETURN_IF_ERROR(model->reserve(step_tokens_, 1, longest_));
  return run(*model, part.layer < 0, nullptr, true);
}

InputStats* PartRunner::Collected::find(const std::string& tensor, int64_t occurrence) const {
  for (size_t id = 0; id < weights.size(); ++id) {
    if (weights[id].name == tensor && occurrence-- == 0)
      return collector->of(static_cast<int32_t>(id));
  }
  return nullptr;
}

InputStats* PartRunner::Collected::of(const models::LinearTensor& t,
                                      const models::WeightReader& reader) const {
  using models::Role;
  if (t.input == models::InputOf::kLatent) return nullptr;
  const int64_t occurrence = t.count > 1 ? t.index : 0;
  if (InputStats* found = find(t.source->name, occurrence)) return found;
  // While a model runs, a delta net's gates are rows of its other inputs, and the gate and the up
  // projection of an expert are one matrix, under one name.
  if (t.role == Role::kStateZ) {
    const auto* joined = reader.find(Role::kStateIn, ".weight", t.layer);
    return joined == nullptr ? nullptr : find(joined->name);
  }
  const Role up = t.role == Role::kExpertGate    ? Role::kExpertUp
                  : t.role == Role::kExpertsGate ? Role::kExpertsUp
                                                 : Role::kCount;
  if (up == Role::kCount) return nullptr;
  const int expert = up == Role::kExpertUp ? t.expert : -1;
  const auto* other = reader.find(up, ".weight", t.layer, expert);
  return other == nullptr ? nullptr : find(other->name, occurrence);
}

}  // namespace freshet::quantizer
