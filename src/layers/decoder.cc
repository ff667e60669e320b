#include "layers/decoder.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "layers/rope.h"
#include "ops/device.h"

namespace freshet {

Decoder::Decoder(ModelSpec spec, ModelWeights weights, std::vector<WeightInfo> infos, ops::Ops& ops)
    : spec_(std::move(spec)), weights_(std::move(weights)), infos_(std::move(infos)), ops_(ops) {
  cos_sin_.resize(spec_.ropes.size());
  last_cos_sin_.resize(spec_.ropes.size());
}

size_t Decoder::arena_bytes(int64_t tokens, int64_t logit_rows) const {
  const int64_t hidden = spec_.hidden_size;
  // The residual stream, and that of the rows a last layer goes on with.
  size_t fixed = matrix_bytes(tokens, hidden) + matrix_bytes(logit_rows, hidden);
  for (const RopeSpec& rope : spec_.ropes) {
    fixed += matrix_bytes(tokens, rope.rotary_dim) + matrix_bytes(logit_rows, rope.rotary_dim);
  }
  // The most that is taken on top of that at once: by the look-up, a layer or the head.
  size_t peak = matrix_bytes(tokens, spec_.embedding_size) + matrix_bytes(tokens, 1) +
                matrix_bytes(tokens, hidden);
  peak = std::max(
      peak, 2 * matrix_bytes(logit_rows, hidden) + matrix_bytes(logit_rows, spec_.embedding_size));
  for (const LayerSpec& layer : spec_.layers) {
    const bool mla = layer.attention.kind == AttentionSpec::Kind::kMla;
    const size_t attention = mla ? mla_attention_bytes(layer.attention, tokens)
                                 : gqa_attention_bytes(layer.attention, tokens);
    const size_t mlp_part =
        layer.moe ? moe_bytes(*layer.moe, hidden, tokens) : mlp_bytes(layer.mlp, tokens);
    // A branch's normalised input and its output; parallel branches have both inputs at once.
    peak = std::max(peak, (layer.parallel ? 3 : 2) * matrix_bytes(tokens, hidden) +
                              std::max(attention, mlp_part));
  }
  if (ops_.device() != nullptr) {  // results wait there for the host
    fixed += matrix_bytes(logit_rows, spec_.vocab_size) + matrix_bytes(tokens, hidden);
  }
  return fixed + peak;
}

ops::Ops::ShapeLimits Decoder::limits(int64_t tokens, int64_t context) const {
  ops::Ops::ShapeLimits l;
  l.tokens = tokens;
  l.max_context = context;
  l.max_cols = std::max(spec_.hidden_size, spec_.embedding_size);
  l.max_rows = std::max(spec_.vocab_size, spec_.hidden_size);
  for (const LayerSpec& layer : spec_.layers) {
    const AttentionSpec& a = layer.attention;
    const bool mla = a.kind == AttentionSpec::Kind::kMla;
    const int64_t key = mla ? a.kv_rank + a.rope_dim : a.head_dim;
    const int64_t value = mla ? a.kv_rank : a.value_dim;
    const int64_t widest = a.heads * std::max({key, value, int64_t{a.head_dim}});
    l.heads = std::max(l.heads, a.heads);
    l.max_head_dim = std::max(l.max_head_dim, static_cast<int>(std::max(key, value)));
    l.max_cols = std::max({l.max_cols, widest, int64_t{a.q_rank}});
    l.max_rows = std::max(l.max_rows, widest);
    int64_t ff = layer.mlp.ff;
    if (layer.moe) {
      ff = std::max(layer.moe->expert_ff, layer.moe->shared_ff);
      l.max_expert_ff = std::max(l.max_expert_ff, int64_t{layer.moe->expert_ff});
      l.top_k = std::max(l.top_k, layer.moe->routing.top_k);
    }
    l.max_cols = std::max(l.max_cols, ff);
    if (layer.mlp.gated) l.max_gated_cols = spec_.hidden_size;
    l.max_rows = std::max(l.max_rows, 2 * ff);
  }
  return l;
}

// What a device gets of a step: five arrays of tokens or rows, block tables, what becomes of rows;
// three arrays and a table of what the last layer goes on with. No step has more sequences than it
// may have rows of logits.
size_t Decoder::input_bytes(int64_t tokens, int64_t logit_rows, int64_t context) const {
  constexpr size_t kLists = size_t{5} << 20;  // samplers' lists, and what rounding takes
  const int64_t blocks =
      (context / ops::kBlockTokens + 2 * kTablePiece) / kTablePiece * kTablePiece;
  const auto groups = std::ssize(kv_cache_spec(spec_, ops::KvType::kF16).groups);
  return kLists + sizeof(int32_t) * static_cast<size_t>(
                                        5 * tokens + logit_rows * (blocks * (groups + 1) + 4 +
                                                                   int64_t{ops::kSampleRowWords}));
}

size_t Decoder::workspace_bytes(int64_t tokens, int64_t logit_rows, int64_t context) const {
  const size_t inputs =
      ops_.device() != nullptr ? input_bytes(tokens, logit_rows, context) : size_t{0};
  return arena_bytes(tokens, logit_rows) + ops_.scratch_bytes(limits(tokens, context)) + inputs;
}

Status Decoder::reserve(int64_t tokens, int64_t logit_rows, int64_t context) {
  FRESHET_CHECK(tokens > 0 && logit_rows > 0 && context > 0,
                "a plan for {} tokens, {} logits, {} positions", tokens, logit_rows, context);
  if (spec_.learned_positions > 0 && context > spec_.learned_positions - spec_.position_offset) {
    return invalid_argument("a context of {} tokens: the model has {} learned positions", context,
                            spec_.learned_positions - spec_.position_offset);
  }
  if (const ops::Device* device = ops_.device()) {
    for (const LayerSpec& layer : spec_.layers) {
      FRESHET_RETURN_IF_ERROR(device->supports(kv_shape(layer.attention, ops::KvType::kF16)));
      if (layer.moe) FRESHET_RETURN_IF_ERROR(device->supports(layer.moe->routing));
    }
  }
  FRESHET_RETURN_IF_ERROR(ops_.set_scratch(ops_.scratch_bytes(limits(tokens, context))));
  FRESHET_RETURN_IF_ERROR(ops_.set_inputs(input_bytes(tokens, logit_rows, context)));
  arena_ = Arena();  // gives its memory back before the new one is asked for
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer,
                           Buffer::allocate(arena_bytes(tokens, logit_rows), ops_.memory()));
  arena_ = Arena(std::move(buffer));
  FRESHET_ASSIGN_OR_RETURN(
      named_, Buffer::allocate(static_cast<size_t>(logit_rows) * sizeof(int32_t), ops_.memory()));
  max_tokens_ = tokens;
  max_logit_rows_ = logit_rows;
  frequencies_.clear();
  for (const RopeSpec& rope : spec_.ropes) {
    const std::vector<float> all = rope_frequencies(rope, context);
    Vector& on_device = frequencies_.emplace_back();
    FRESHET_ASSIGN_OR_RETURN(on_device.buffer, ops_.upload(all));
    on_device.size = std::ssize(all);
  }
  every_.resize(static_cast<size_t>(tokens));
  std::iota(every_.begin(), every_.end(), 0);
  return {};
}

Matrix Decoder::embed(Step& step) {
  const ForwardBatch& batch = step.batch;
  const int64_t tokens = batch.tokens();
  const Matrix x = arena_.matrix(tokens, spec_.hidden_size);
  const Scratch scratch(arena_);
  if (spec_.embedding_size == spec_.hidden_size) {
    ops_.embed(x, weights_.embedding, batch.token_ids, spec_.embedding_scale);
  } else {
    const Matrix narrow = arena_.matrix(tokens, spec_.embedding_size);
    ops_.embed(narrow, weights_.embedding, batch.token_ids, spec_.embedding_scale);
    const ops::Product products[] = {product_of(weights_.embedding_in, x)};
    ops_.matmul(narrow, products);
  }
  if (spec_.learned_positions > 0) {
    const Matrix positions = arena_.matrix(tokens, spec_.hidden_size);
    ops_.embed(positions, weights_.positions, batch.positions, 1.0f, spec_.position_offset);
    ops_.add(x, positions, 1.0f);
  }
  return x;
}

// x = after(x + out(branch(in))), the norms as the spec has them.
void Decoder::branch(Step& step, int layer, bool attention, const ops::Input& in, const Matrix& x) {
  const LayerSpec& spec = spec_.layers[static_cast<size_t>(layer)];
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const BranchNorms& norms = attention ? spec.attention_norms : spec.mlp_norms;
  const BranchNormWeights& norm_weights = attention ? w.attention_norms : w.mlp_norms;
  const auto run = [&](Into into) {
    if (attention) {
      if (!spec.moe && spec.mlp.gated) {
        into.prefetch_next = {&w.mlp.gate.weight, &w.mlp.up.weight};
      }
      const bool mla = spec.attention.kind == AttentionSpec::Kind::kMla;
      (mla ? mla_attention : gqa_attention)(step, layer, w.attention, in, into);
    } else if (spec.moe) {
      moe(step, *spec.moe, w.moe, in, into);
    } else {
      mlp(step, spec.mlp, w.mlp, in, into);
    }
  };
  const auto optional_norm = [](const std::optional<NormSpec>& norm, const NormWeights& weights) {
    return norm ? norm_of(*norm, weights) : ops::Norm{};
  };
  const ops::Norm after = optional_norm(norms.after, norm_weights.after);
  const bool scaled_experts = !attention && spec.moe && spec_.residual_scale != 1.0f;
  if (!norms.out && !scaled_experts && in.rows().data != x.data) {
    run({x, true, spec_.residual_scale});
    if (norms.after) ops_.norm(x, x, after);
    return;
  }
  const Scratch scratch(arena_);
  const Matrix out = arena_.matrix(x.rows, x.cols);
  run({out, false, 1.0f});
  const ops::Norm own = optional_norm(norms.out, norm_weights.out);
  ops_.add_residual(
      {x, out, norms.out ? &own : nullptr, spec_.residual_scale, norms.after ? &after : nullptr});
}

// The residual stream x behind the layer. With `last`, the step of the rows whose logits are
// wanted, other rows end with their keys and values, and the stream of those rows is another.
Matrix Decoder::run_layer(Step& step, int layer, const Matrix& x, Step* last) {
  const LayerSpec& spec = spec_.layers[static_cast<size_t>(layer)];
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  ops::Norm attention_norm, mlp_norm;
  const auto input = [&](const Matrix& rows, const std::optional<NormSpec>& norm,
                         const NormWeights& weights, ops::Norm& kept) {
    ops::Input in{rows};
    if (!norm) return in;
    kept = norm_of(*norm, weights);
    in.norm = &kept;
    in.normed = arena_.matrix(rows.rows, rows.cols);
    return in;
  };
  const auto attention_in = [&](const Matrix& rows) {
    return input(rows, spec.attention_norms.in, w.attention_norms.in, attention_norm);
  };
  const auto mlp_in = [&](const Matrix& rows) {
    return input(rows, spec.mlp_norms.in, w.mlp_norms.in, mlp_norm);
  };
  Matrix stream = x;
  Step& on = last != nullptr ? *last : step;
  if (last != nullptr) {
    stream = arena_.matrix(last->batch.tokens(), x.cols);
    {
      const Scratch own(arena_);
      const bool mla = spec.attention.kind == AttentionSpec::Kind::kMla;
      (mla ? mla_store : gqa_store)(step, layer, w.attention, attention_in(x));
    }
    if (stream.rows == 0) return stream;
    ops_.gather_rows(stream, x, step.batch.logit_rows);
  }
  const Scratch scratch(arena_);
  if (!spec.parallel) {
    {
      const Scratch own(arena_);
      branch(on, layer, true, attention_in(stream), stream);
    }
    branch(on, layer, false, mlp_in(stream), stream);
    return stream;
  }
  // Both branches read the stream as it is now: the MLP's norm comes before attention adds to it,
  // or it reads what attention reads.
  ops::EncodedForms attention_forms, mlp_forms;
  ops::Input in = attention_in(stream), its = mlp_in(stream);
  if (its.norm != nullptr) {
    its.shared = &mlp_forms;
    const ops::Weight* const readers[] = {&w.mlp.up.weight};
    ops_.prepare(its, readers);
    its = {its.normed, nullptr, {}, its.shared};
  } else if (in.norm != nullptr) {
    in.shared = &attention_forms;
    its = {in.normed, nullptr, {}, in.shared};
  }
  branch(on, layer, true, in, stream);
  branch(on, layer, false, its, stream);
  return stream;
}

// x: the residual stream of all rows, or of those whose logits are wanted.
void Decoder::write_logits(Step& step, const Matrix& x, const Matrix& logits,
                           const Matrix& hidden) {
  const auto rows = static_cast<int64_t>(step.batch.logit_rows.size());
  const ops::Norm final_norm =
      spec_.final_norm ? norm_of(*spec_.final_norm, weights_.final_norm) : ops::Norm{};
  const bool narrows = spec_.embedding_size != spec_.hidden_size;
  ops::Product head = product_of(weights_.head, logits);
  if (weights_.head.weight.empty()) head.weight = &weights_.embedding;
  head.scale = spec_.logits_scale;
  if (hidden.data != nullptr) {
    if (spec_.final_norm) {
      ops_.norm(hidden, x, final_norm);
    } else {
      ops_.gather_rows(hidden, x, std::span(every_).first(static_cast<size_t>(x.rows)));
    }
  }
  if (rows == 0) return;
  const Scratch scratch(arena_);
  Matrix last = x;
  if (rows < x.rows) {
    last = arena_.matrix(rows, spec_.hidden_size);
    ops_.gather_rows(last, x, step.batch.logit_rows);
  }
  ops::Input in{last};
  if (spec_.final_norm) {
    in.norm = &final_norm;
    in.normed = arena_.matrix(rows, spec_.hidden_size);
  }
  if (narrows) {
    const Matrix narrow = arena_.matrix(rows, spec_.embedding_size);
    const ops::Product products[] = {product_of(weights_.embedding_out, narrow)};
    ops_.project(in, products);
    in = {narrow};
  }
  ops_.project(in, {&head, 1});
  if (spec_.logits_softcap > 0) ops_.softcap(logits, spec_.logits_softcap);
}

void Decoder::rope_tables(const std::vector<int32_t>& positions,
                          std::vector<const float*>& tables) {
  if (positions.empty()) return;
  for (size_t r = 0; r < spec_.ropes.size(); ++r) {
    auto* table = arena_.allocate_array<float>(std::ssize(positions) * spec_.ropes[r].rotary_dim);
    const Vector& frequencies = frequencies_[r];
    ops_.rope_table(table, positions, {frequencies.data(), static_cast<size_t>(frequencies.size)},
                    spec_.ropes[r].attention_factor);
    tables[r] = table;
  }
}

void Decoder::run(Step& step, Step* last, const Matrix& logits, const Matrix& hidden) {
  rope_tables(step.batch.positions, step.cos_sin);
  if (last != nullptr) rope_tables(last->batch.positions, last->cos_sin);
  Matrix x = embed(step);
  const auto layers = static_cast<int>(spec_.layers.size());
  for (int layer = 0; layer < layers; ++layer) {
    x = run_layer(step, layer, x, layer + 1 == layers ? last : nullptr);
  }
  write_logits(step, x, logits, hidden);
}

// The logits of rows of which no token is named, and all else that is wanted.
void Decoder::fetch(const ForwardBatch& batch, const Matrix& logits, const int32_t* best,
                    const StepResults& results) {
  const auto named = [&](int64_t row) {
    return best != nullptr && batch.names_token(static_cast<size_t>(row));
  };
  for (int64_t row = 0, end = 0; row < logits.rows; row = end + 1) {
    for (end = row; end < logits.rows && !named(end);) ++end;
    if (end == row) continue;
    const auto bytes = static_cast<size_t>((end - row) * logits.cols) * sizeof(float);
    ops_.fetch(results.logits + row * logits.cols, logits.row(row), bytes);
  }
  if (best != nullptr) {
    ops_.fetch(results.best, best, static_cast<size_t>(logits.rows) * sizeof(int32_t));
  }
}

void Decoder::finish(const ForwardBatch& batch, const StepResults& results, int turn) {
  const size_t rows = batch.logit_rows.size();
  if (ops_.device() == nullptr) {
    if (results.best != nullptr) std::fill_n(results.best, rows, StepResults::kSeeLogits);
    return;
  }
  if (rows > 0 || results.hidden != nullptr) ops_.await(turn);
  for (size_t row = 0; results.best != nullptr && row < rows; ++row) {
    if (!batch.names_token(row)) results.best[row] = StepResults::kSeeLogits;
  }
}

void Decoder::forward(const ForwardBatch& batch, const KvStorage& cache,
                      const StepResults& results) {
  start(batch, cache, results, 0);
  finish(batch, results, 0);
}

void Decoder::start(const ForwardBatch& batch, const KvStorage& cache, const StepResults& results,
                    int turn) {
  const int64_t tokens = batch.tokens();
  FRESHET_CHECK(tokens > 0 && tokens <= max_tokens_, "a step of {} tokens, planned for {}", tokens,
                max_tokens_);
  FRESHET_CHECK(static_cast<int64_t>(batch.logit_rows.size()) <= max_logit_rows_,
                "logits of {} tokens, planned for {}", batch.logit_rows.size(), max_logit_rows_);
  FRESHET_CHECK(static_cast<int64_t>(batch.positions.size()) == tokens,
                "{} positions for {} tokens", batch.positions.size(), tokens);
  arena_.reset();
  const auto rows = static_cast<int64_t>(batch.logit_rows.size());
  Matrix logits{results.logits, rows, spec_.vocab_size, spec_.vocab_size};
  Matrix states{results.hidden, tokens, spec_.hidden_size, spec_.hidden_size};
  const bool wants_states = results.hidden != nullptr;
  int32_t* best = nullptr;
  const bool apart = ops_.device() != nullptr;
  if (apart) {  // the same places in every step of the same numbers
    logits = arena_.matrix(rows, spec_.vocab_size);
    if (wants_states) states = arena_.matrix(tokens, spec_.hidden_size);
    // On the host a sampler is there as soon.
    if (results.best != nullptr && (!batch.best_only.empty() || !batch.samples.empty())) {
      best = named_.as<int32_t>();
    }
  }
  step_arrays_.assign(
      {batch.token_ids, batch.positions, batch.query_start, batch.context_len, batch.logit_rows});
  const bool takes = apart && !batch.ids_from.empty();
  const bool draws = best != nullptr && !batch.samples.empty();
  const int last_group = cache.group_of(static_cast<int>(spec_.layers.size()) - 1);
  const bool narrows = !wants_states && take_logit_rows(batch, last_group, last_);
  step_key_.assign({tokens, batch.sequences(), rows, wants_states, best != nullptr, draws, takes,
                    narrows ? last_.sequences() : -1});
  for (const BlockTables& table : batch.tables) {
    step_arrays_.push_back(table.ids);
    step_key_.push_back(table.stride);
  }
  for (size_t layer = 0; apart && layer < spec_.layers.size(); ++layer) {
    step_key_.push_back(reinterpret_cast<int64_t>(cache.layer(static_cast<int>(layer)).data));
  }
  if (narrows) {
    for (const std::vector<int32_t>* array :
         {&last_.positions, &last_.query_start, &last_.context_len,
          &last_.tables[static_cast<size_t>(last_group)].ids}) {
      step_arrays_.push_back(*array);
    }
  }
  if (takes) step_arrays_.push_back(batch.ids_from);
  step_arrays_.push_back(batch.samples);  // last: what stands in front is of known size
  Step step{ops_, spec_, batch, cache, arena_, cos_sin_};
  Step last{ops_, spec_, last_, cache, arena_, last_cos_sin_, true};
  const bool decode = tokens == batch.sequences() && rows == tokens && !wants_states;
  ops_.step({step_arrays_, step_key_, decode}, [&] {
    if (takes) ops_.take_ids(batch.token_ids, batch.ids_from, named_.as<int32_t>());
    run(step, narrows ? &last : nullptr, logits, states);
    if (best == nullptr || rows == 0) return;
    if (draws) return ops_.sample(logits, batch.samples, batch.token_ids, best);
    ops_.argmax(logits, best);
  });
  if (!apart) return;
  if (wants_states) {
    ops_.fetch(results.hidden, states.data,
               static_cast<size_t>(tokens * spec_.hidden_size) * sizeof(float));
  }
  if (rows > 0) fetch(batch, logits, best, results);
  if (rows > 0 || wants_states) ops_.note(turn);
}

}  // namespace freshet
