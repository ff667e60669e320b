#include "layers/decoder.h"

#include <algorithm>
#include <array>
#include <utility>

#include "layers/branch_kinds.h"
#include "layers/encoder_pass.h"
#include "layers/vision_tower.h"
#include "ops/device.h"

namespace freshet {

Decoder::Decoder(ModelSpec spec, ModelWeights weights, std::vector<WeightInfo> infos, ops::Ops& ops,
                 ops::Ops* host)
    : Decoder(std::move(spec), std::make_shared<const ModelWeights>(std::move(weights)), nullptr,
              std::move(infos), ops, host) {}

Decoder::Decoder(ModelSpec spec, std::shared_ptr<const ModelWeights> weights,
                 std::shared_ptr<const ModelWeights> ends, std::vector<WeightInfo> infos,
                 ops::Ops& ops, ops::Ops* host)
    : spec_(std::move(spec)),
      weights_(std::move(weights)),
      ends_(ends != nullptr ? std::move(ends) : weights_),
      infos_(std::move(infos)),
      ops_(ops),
      last_stored_(last_stored(spec_)) {
  if (spec_.encoder != nullptr) {
    encoder_ = std::make_unique<EncoderPass>(spec_.encoder, weights_->encoder, weights_, ops);
  }
  if (weights_ != nullptr && weights_->vision != nullptr) {
    tower_ = std::make_unique<VisionTower>(spec_.vision, weights_->vision,
                                           host != nullptr ? *host : ops, ops);
  }
  cos_sin_.resize(spec_.ropes.size());
  last_cos_sin_.resize(spec_.ropes.size());
  int stored = 0;
  for (const LayerSpec& layer : spec_.layers) {
    std::vector<int>& indices = cache_layers_.emplace_back();
    for (const BranchSpec& branch : layer.branches) {
      indices.push_back(kind_of(branch).cache != nullptr ? stored++ : -1);
    }
  }
  if (last_stored_.layer < 0) return;
  const auto from = static_cast<size_t>(last_stored_.layer);
  for (size_t layer = from; layer < cache_layers_.size(); ++layer) {
    const bool shares = layer > from || spec_.layers[layer].parallel;
    for (size_t b = shares ? 0 : static_cast<size_t>(last_stored_.branch);
         b < cache_layers_[layer].size(); ++b) {
      if (cache_layers_[layer][b] >= 0) last_cache_layers_.push_back(cache_layers_[layer][b]);
    }
  }
}

Decoder::~Decoder() = default;

// Stores the keys and values of encoder outputs, for batch.encoder_inputs from `first` on.
// `encoded`: a batch whose tokens are the outputs.
void Decoder::write_cross(const ForwardBatch& batch, const KvStorage& cache, size_t first,
                          const ForwardBatch& encoded, const Matrix& states) {
  Step step{ops_, spec_, batch, cache, arena_, cos_sin_, key_views_};
  for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
    const std::vector<BranchSpec>& branches = spec_.layers[layer].branches;
    for (size_t b = 0; b < branches.size(); ++b) {
      const BranchKind& kind = kind_of(branches[b]);
      if (kind.write_cross == nullptr) continue;
      const int cache_layer = cache_layers_[layer][b];
      const BlockTables& tables = batch.tables[static_cast<size_t>(cache.group_of(cache_layer))];
      cross_tables_.clear();
      for (size_t s = 0; s < encoded.context_len.size(); ++s) {
        const auto at =
            tables.ids.begin() + batch.encoder_inputs[first + s].sequence * tables.stride;
        cross_tables_.insert(cross_tables_.end(), at, at + tables.stride);
      }
      kind.write_cross(
          step, branches[b], weights_->layers[layer].branches[b], cache_layer, states,
          {encoded.query_start, encoded.context_len, cross_tables_.data(), tables.stride});
    }
  }
}

// Stores the keys and values of an output that exists already.
void Decoder::write_states(const ForwardBatch& batch, const KvStorage& cache, size_t input) {
  const EncoderInput& in = batch.encoder_inputs[input];
  const int64_t width = encoder_ != nullptr ? spec_.encoder->hidden_size : spec_.hidden_size;
  for (int64_t done = 0; done < in.state_rows;) {
    const int64_t count = std::min(max_tokens_, in.state_rows - done);
    ForwardBatch part;
    part.query_start = {0, static_cast<int32_t>(count)};
    part.context_len = {static_cast<int32_t>(done + count)};
    write_cross(batch, cache, input, part,
                {const_cast<float*>(in.states + done * width), count, width, width});
    done += count;
  }
}

// Stores the keys and values of encoder outputs for the sequences that begin. Runs the encoder for
// those that do not exist yet.
void Decoder::encode(const ForwardBatch& batch, const KvStorage& cache) {
  const std::span<const EncoderInput> inputs = batch.encoder_inputs;
  const auto exists = [](const EncoderInput& input) { return input.states != nullptr; };
  for (size_t i = 0; i < inputs.size();) {
    if (encoder_ == nullptr || exists(inputs[i])) {
      write_states(batch, cache, i++);
      continue;
    }
    const auto end = std::find_if(inputs.begin() + static_cast<int64_t>(i), inputs.end(), exists);
    const auto count = static_cast<size_t>(end - inputs.begin()) - i;
    encoder_->run(inputs.subspan(i, count),
                  [&](size_t first, const ForwardBatch& encoded, const Matrix& states) {
                    write_cross(batch, cache, i + first, encoded, states);
                  });
    if (ops_.device() != nullptr) ops_.wait();  // tables outside a step may be written again
    i += count;
  }
}

// Replaces embeddings by the rows of pictures, or adds the rows of a further level.
void Decoder::put_pictures(const ForwardBatch& batch, int level, const Matrix& x) {
  for (const EmbeddingRows& given : batch.embedding_rows) {
    if (level > given.levels) continue;
    const Matrix rows{const_cast<float*>(given.rows + level * given.level_stride), given.count,
                      x.cols, x.cols};
    if (ops::Device* const device = ops_.device()) {
      const Scratch scratch(arena_);
      const Matrix part{x.row(given.token), given.count, x.cols, x.stride};
      const Matrix sent = level > 0 ? arena_.matrix(rows.rows, rows.cols) : part;
      FRESHET_CHECK(sent.stride == sent.cols, "rows of pictures with a stride of {}", sent.stride);
      const auto bytes = static_cast<size_t>(rows.rows * rows.cols) * sizeof(float);
      const Status status = device->write(sent.data, rows.data, bytes);
      FRESHET_CHECK(status.ok(), "{}", status.message());
      if (level > 0) ops_.add(part, sent, 1.0f);
      continue;
    }
    const auto to = std::span(every_).subspan(static_cast<size_t>(given.token),
                                              static_cast<size_t>(given.count));
    ops_.put_rows(x, to, rows, level > 0);
  }
}

std::span<const int32_t> Decoder::types_of(const ForwardBatch& batch) const {
  if (!batch.token_types.empty()) return batch.token_types;
  return std::span<const int32_t>(zeros_).first(batch.token_ids.size());
}

Matrix Decoder::embed(Step& step) {
  const ForwardBatch& batch = step.batch;
  const int64_t tokens = batch.tokens();
  const Matrix x = arena_.matrix(tokens, spec_.hidden_size);
  const Scratch scratch(arena_);
  // An encoder may only share the decoder's embedding.
  const ModelWeights& tables = weights_->positions.empty() ? *ends_ : *weights_;
  if (spec_.embedding_size == spec_.hidden_size) {
    ops_.embed(x, embedding(), batch.token_ids, spec_.embedding_scale);
  } else {
    const Matrix narrow = arena_.matrix(tokens, spec_.embedding_size);
    ops_.embed(narrow, embedding(), batch.token_ids, spec_.embedding_scale);
    const ops::Product products[] = {product_of(ends_->embedding_in, x)};
    ops_.matmul(narrow, products);
  }
  put_pictures(batch, 0, x);
  if (spec_.learned_positions > 0) {
    const Matrix positions = arena_.matrix(tokens, spec_.hidden_size);
    ops_.embed(positions, tables.positions, batch.positions, 1.0f, spec_.position_offset);
    ops_.add(x, positions, 1.0f);
  }
  if (spec_.token_types > 0) {
    const Matrix types = arena_.matrix(tokens, spec_.hidden_size);
    ops_.embed(types, ends_->token_types, types_of(batch), 1.0f);
    ops_.add(x, types, 1.0f);
  }
  if (spec_.embedded_norm) ops_.norm(x, x, norm_of(*spec_.embedded_norm, tables.embedded_norm));
  return x;
}

ops::Product Decoder::head(const Matrix& logits) const {
  const Linear& own = weights_->head.weight.empty() ? ends_->head : weights_->head;
  ops::Product head = product_of(own, logits);
  if (own.weight.empty()) head.weight = &embedding();
  head.scale = spec_.logits_scale;
  return head;
}

// The residual stream of a draft head, or of a part of a model (FeatureSpec).
Matrix Decoder::feature_stream(const ForwardBatch& batch, const Matrix& embedded) {
  const FeatureSpec& f = *spec_.features;
  const int64_t tokens = batch.tokens(), hidden = spec_.hidden_size;
  const bool joins = f.use == FeatureSpec::Use::kJoined;
  const int64_t width = batch.own_states ? hidden : f.width;
  const std::span<const int32_t> rows = std::span(every_).first(static_cast<size_t>(tokens));
  // States that the previous batch kept are those of its rows.
  const bool kept = batch.own_states && !batch.ids_from.empty();
  const std::span<const int32_t> from = kept ? std::span(batch.ids_from) : rows;
  const int64_t given_rows = kept ? max_logit_rows_ : tokens;
  const Matrix given{const_cast<float*>(batch.features), given_rows, width, width};
  const auto norm = [](const std::optional<NormSpec>& spec, const NormWeights& w) {
    return norm_of(*spec, w);
  };
  const Matrix x = arena_.matrix(tokens, hidden);
  if (f.use == FeatureSpec::Use::kStream) {
    ops_.gather_rows(x, given, from);
    return x;
  }
  if (joins) {
    const Scratch scratch(arena_);
    const Matrix joined = arena_.matrix(tokens, hidden + width);
    const Matrix e = joined.slice_cols(f.features_first ? width : 0, hidden);
    const Matrix own = joined.slice_cols(f.features_first ? 0 : hidden, width);
    ops_.gather_rows(e, embedded, rows);
    ops_.gather_rows(own, given, from);
    if (f.embedding_norm) ops_.norm(e, e, norm(f.embedding_norm, weights_->embedding_norm));
    if (f.feature_norm) ops_.norm(own, own, norm(f.feature_norm, weights_->feature_norm));
    const ops::Product products[] = {product_of(weights_->features, x)};
    ops_.matmul(joined, products);
    return x;
  }
  if (batch.own_states) {
    ops_.gather_rows(x, given, from);
  } else {
    const Scratch scratch(arena_);
    const Matrix features = arena_.matrix(tokens, width);
    ops_.gather_rows(features, given, from);
    const int64_t part = width / input_norm_parts_;
    for (int64_t first = 0; f.input_norm && first < width; first += part) {
      const Matrix one = features.slice_cols(first, part);
      ops::Norm own = norm(f.input_norm, weights_->input_norm);
      if (own.weight != nullptr) own.weight += first;
      ops_.norm(one, one, own);
    }
    const ops::Product products[] = {product_of(weights_->features, x)};
    ops_.matmul(features, products);
  }
  if (f.normed_residual) ops_.norm(x, x, norm(f.feature_norm, weights_->feature_norm));
  return x;
}

// The input of an EAGLE-3 head's first branch: [norm(e); norm(x)].
ops::Input Decoder::paired_input(const Matrix& stream) {
  const FeatureSpec& f = *spec_.features;
  const int64_t hidden = spec_.hidden_size;
  const Matrix pair = arena_.matrix(stream.rows, 2 * hidden);
  const Matrix e = pair.slice_cols(0, hidden), x = pair.slice_cols(hidden, hidden);
  const auto rows = std::span(every_).first(static_cast<size_t>(stream.rows));
  if (f.embedding_norm) {
    ops_.norm(e, embedded_, norm_of(*f.embedding_norm, weights_->embedding_norm));
  } else {
    ops_.gather_rows(e, embedded_, rows);
  }
  if (f.feature_norm && !f.normed_residual) {
    ops_.norm(x, stream, norm_of(*f.feature_norm, weights_->feature_norm));
  } else {
    ops_.gather_rows(x, stream, rows);
  }
  return {pair};
}

// The input of a branch that reads a side stream, or opens one.
ops::Input Decoder::side_input(const BranchSpec& spec, const BranchWeights& w, const Matrix& stream,
                               ops::Norm& norm) {
  if (spec.norms.in) norm = norm_of(*spec.norms.in, w.norms.in);
  ops::Input in{side_};
  if (spec.side == Side::kOpens) {
    const int64_t hidden = stream.cols;
    const auto rows = std::span(every_).first(static_cast<size_t>(stream.rows));
    in.x = arena_.matrix(stream.rows, 2 * hidden);
    ops_.gather_rows(in.x.slice_cols(0, hidden), stream, rows);
    ops_.gather_rows(in.x.slice_cols(hidden, hidden), embeddings_, rows);
  } else if (spec.side == Side::kCloses) {
    ops_.add(side_, stream, 1.0f);
  }
  if (!spec.norms.in) return in;
  in.norm = &norm;
  in.normed = in.x;
  return in;
}

// The input of a branch: the stream, with a norm if the spec says so. `norm` must outlive the
// result.
ops::Input Decoder::branch_input(int layer, int branch, const Matrix& stream, ops::Norm& norm) {
  if (layer == 0 && branch == 0 && spec_.features &&
      spec_.features->use == FeatureSpec::Use::kPaired) {
    return paired_input(stream);
  }
  if (branch_of(layer, branch).side != Side::kNone) {
    return side_input(branch_of(layer, branch), weights_of(layer, branch), stream, norm);
  }
  const std::optional<NormSpec>& spec = branch_of(layer, branch).norms.in;
  ops::Input in{stream};
  if (!spec) return in;
  norm = norm_of(*spec, weights_of(layer, branch).norms.in);
  if (branch_of(layer, branch).normed_stream) {
    ops_.norm(stream, stream, norm);
    return in;
  }
  in.norm = &norm;
  in.normed = arena_.matrix(stream.rows, stream.cols);
  return in;
}

// x = after(x + out(branch(in))), with the norms that the spec has.
void Decoder::branch(Step& step, int layer, int branch, const ops::Input& in, const Matrix& x) {
  const BranchSpec& spec = branch_of(layer, branch);
  const BranchWeights& w = weights_of(layer, branch);
  const BranchKind& kind = kind_of(spec);
  const BranchNorms& norms = spec.norms;
  const auto run = [&](Into into) {
    if (branch + 1 < std::ssize(spec_.layers[static_cast<size_t>(layer)].branches)) {
      const BranchSpec& next = branch_of(layer, branch + 1);
      if (const auto prefetch = kind_of(next).prefetch) {
        into.prefetch_next = prefetch(next, weights_of(layer, branch + 1));
      }
    }
    kind.run(step, spec, w, cache_layer_of(layer, branch), in, into);
  };
  if (spec.side == Side::kOpens || spec.side == Side::kContinues) {
    run({next_side_, false, 1.0f});
    return std::swap(side_, next_side_);
  }
  const auto optional_norm = [](const std::optional<NormSpec>& norm, const NormWeights& weights) {
    return norm ? norm_of(*norm, weights) : ops::Norm{};
  };
  const ops::Norm after = optional_norm(norms.after, w.norms.after);
  const float scale = spec_.residual_scale * spec.scale;
  const bool scalable = kind.scales || scale == 1.0f;
  if (!norms.out && scalable && spec.stream_scale == 1.0f && in.rows().data != x.data) {
    run({x, true, scale});
    if (norms.after) ops_.norm(x, x, after);
    return;
  }
  const Scratch scratch(arena_);
  const Matrix out = arena_.matrix(x.rows, x.cols);
  run({out, false, 1.0f});
  const ops::Norm own = optional_norm(norms.out, w.norms.out);
  if (spec.stream_scale != 1.0f) ops_.scale(x, spec.stream_scale);
  ops_.add_residual({x, out, norms.out ? &own : nullptr, scale, norms.after ? &after : nullptr});
}

// A step of a head that reads features as keys and values of every layer (kStored).
void Decoder::store_features(Step& step) {
  FRESHET_CHECK(step.batch.logit_rows.empty(), "logits of features that are only stored");
  const Matrix x = feature_stream(step.batch, {});
  for (int layer = 0; layer < std::ssize(spec_.layers); ++layer) {
    const auto branches =
        static_cast<int>(spec_.layers[static_cast<size_t>(layer)].branches.size());
    for (int b = 0; b < branches; ++b) {
      if (kind_of(branch_of(layer, b)).store == nullptr) continue;
      const Scratch scratch(arena_);
      store(step, layer, b, {x});
    }
  }
}

// Stores the keys and values of all rows of the branch's input.
void Decoder::store(Step& step, int layer, int branch, const ops::Input& in) {
  const BranchSpec& spec = branch_of(layer, branch);
  kind_of(spec).store(step, spec, weights_of(layer, branch), cache_layer_of(layer, branch), in);
}

// The rows of x that need logits, as a separate stream.
Matrix Decoder::logit_rows(const Step& step, const Step& last, const Matrix& x) {
  const Matrix stream = arena_.matrix(last.batch.tokens(), x.cols);
  if (stream.rows > 0) ops_.gather_rows(stream, x, step.batch.logit_rows);
  return stream;
}

// Whether the caller ends the pass here (StepResults::between).
bool Decoder::stops() {
  if (between_ == nullptr || (*between_)()) return false;
  stopped_ = true;
  return true;
}

// Returns the residual stream after the layer. `last`: nullptr, or the step of the rows that need
// logits. In that case the layer has the last branch that stores: all rows store their keys and
// values, and only those rows continue, in a separate stream.
Matrix Decoder::run_layer(Step& step, int layer, const Matrix& x, Step* last) {
  const LayerSpec& spec = spec_.layers[static_cast<size_t>(layer)];
  Matrix stream = x;
  Step* on = &step;
  const int parallel = spec.parallel_branches();
  if (parallel > 0) {
    const bool ends = last != nullptr && last_stored_.branch < parallel;
    stream = run_parallel(step, layer, x, ends ? last : nullptr);
    if (stream.rows == 0) return stream;
    if (ends) on = last;
    if (stops()) return stream;
  }
  ops::Norm norm;
  for (int b = parallel; b < static_cast<int>(spec.branches.size()); ++b) {
    // If states advance, all rows run to the end of the branch.
    const bool ends = last != nullptr && b == last_stored_.branch;
    const bool runs_all = ends && kind_of(spec.branches[static_cast<size_t>(b)]).store == nullptr;
    if (ends && !runs_all) {
      const Matrix rows = logit_rows(step, *last, stream);
      const Scratch scratch(arena_);
      store(step, layer, b, branch_input(layer, b, stream, norm));
      if (rows.rows == 0) return rows;
      stream = rows;
      on = last;
    }
    {
      const Scratch scratch(arena_);
      branch(*on, layer, b, branch_input(layer, b, stream, norm), stream);
    }
    if (stops()) return stream;
    if (!runs_all) continue;
    stream = logit_rows(step, *last, stream);
    if (stream.rows == 0) return stream;
    on = last;
  }
  return stream;
}

Matrix Decoder::run_parallel(Step& step, int layer, const Matrix& x, Step* last) {
  const std::vector<BranchSpec>& branches = spec_.layers[static_cast<size_t>(layer)].branches;
  const int count = spec_.layers[static_cast<size_t>(layer)].parallel_branches();
  // A branch without a norm shares the input of the branch before it. The first one has a norm.
  const auto shares = [&](int b) { return !branches[static_cast<size_t>(b)].norms.in; };
  const bool advances = std::any_of(branches.begin(), branches.begin() + count, [](const auto& b) {
    return kind_of(b).cache != nullptr && kind_of(b).store == nullptr;
  });
  Matrix stream = x;
  if (last != nullptr && advances) {  // as in run_layer()
    stream = logit_rows(step, *last, run_parallel(step, layer, x, nullptr));
    return stream;
  }
  if (last != nullptr) {
    stream = logit_rows(step, *last, x);
    for (int b = 0; b < count; ++b) {
      if (cache_layer_of(layer, b) < 0) continue;
      const Scratch scratch(arena_);
      int source = b;
      while (shares(source)) --source;
      ops::Norm norm;
      store(step, layer, b, branch_input(layer, source, x, norm));
    }
    if (stream.rows == 0) return stream;
  }
  const Scratch scratch(arena_);
  Step& on = last != nullptr ? *last : step;
  // All branches read the stream before any of them adds to it. The first branch normalises its own
  // input; the norms of the others run before it.
  std::array<ops::Norm, kMaxBranches> norms;
  std::array<ops::EncodedForms, kMaxBranches> forms;
  std::array<ops::Input, kMaxBranches> in;
  for (int b = 0; b < count; ++b) {
    const auto i = static_cast<size_t>(b);
    if (b > 0 && shares(b)) {
      ops::Input& source = in[i - 1];
      if (source.shared == nullptr) source.shared = &forms[i - 1];
      in[i] = {source.rows(), nullptr, {}, source.shared};
      continue;
    }
    in[i] = branch_input(layer, b, stream, norms[i]);
    if (b == 0) continue;
    in[i].shared = &forms[i];
    const BranchSpec& spec = branch_of(layer, b);
    const ops::Weight* const readers[] = {&kind_of(spec).input_weight(spec, weights_of(layer, b))};
    ops_.prepare(in[i], readers);
    in[i] = {in[i].normed, nullptr, {}, in[i].shared};
  }
  for (int b = 0; b < count; ++b) branch(on, layer, b, in[static_cast<size_t>(b)], stream);
  return stream;
}

// x: the residual stream of all rows, or of the rows that need logits.
void Decoder::write_logits(Step& step, const Matrix& x, const Matrix& logits,
                           const Matrix& hidden) {
  const auto rows = static_cast<int64_t>(step.batch.logit_rows.size());
  const ops::Norm final_norm =
      spec_.final_norm ? norm_of(*spec_.final_norm, weights_->final_norm) : ops::Norm{};
  const bool narrows = spec_.embedding_size != spec_.hidden_size;
  const ops::Product head = this->head(logits);
  if (hidden.data != nullptr) {
    if (spec_.final_norm && !(spec_.features && spec_.features->raw_states)) {
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
    const ops::Product products[] = {product_of(ends_->embedding_out, narrow)};
    ops_.project(in, products);
    in = {narrow};
  }
  ops_.project(in, {&head, 1});
  if (spec_.logits_softcap > 0) ops_.softcap(logits, spec_.logits_softcap);
}

void Decoder::rope_tables(const ForwardBatch& batch, std::vector<const float*>& tables) {
  const std::vector<int32_t>& positions = batch.positions;
  if (positions.empty()) return;
  for (size_t r = 0; r < spec_.ropes.size(); ++r) {
    auto* table = arena_.allocate_array<float>(std::ssize(positions) * spec_.ropes[r].rotary_dim);
    const Vector& frequencies = frequencies_[r];
    const RopeSpec& rope = spec_.ropes[r];
    if (!rope.axes.empty() && !batch.axis_positions.empty()) {
      axis_table(batch, r, table);
      tables[r] = table;
      continue;
    }
    ops::PositionScale growth;
    if (rope.scaling == RopeSpec::Scaling::kTemperature) {
      growth = {static_cast<float>(rope.factor), static_cast<float>(rope.original_context)};
    }
    ops_.rope_table(table, positions, {frequencies.data(), static_cast<size_t>(frequencies.size)},
                    rope.attention_factor, growth);
    tables[r] = table;
  }
}

void Decoder::copy_boundary(int boundary, const Matrix& x, std::span<const Matrix> boundaries) {
  for (size_t i = 0; i < boundaries.size(); ++i) {
    if (captures_[i] != boundary) continue;
    ops_.gather_rows(boundaries[i], x, std::span(every_).first(static_cast<size_t>(x.rows)));
  }
}

void Decoder::run(Step& step, Step* last, const Matrix& logits, const Matrix& hidden,
                  std::span<const Matrix> boundaries) {
  FRESHET_CHECK(has_features(step.batch), "a draft head without features");
  rope_tables(step.batch, step.cos_sin);
  if (last != nullptr) rope_tables(last->batch, last->cos_sin);
  const bool stored = spec_.features && spec_.features->use == FeatureSpec::Use::kStored;
  if (stored && step.batch.features != nullptr) return store_features(step);
  const bool continues = spec_.features && spec_.features->use == FeatureSpec::Use::kStream;
  Matrix x = continues ? Matrix{} : embed(step);
  if (spec_.features && !stored) {
    embedded_ = x;
    x = feature_stream(step.batch, embedded_);
  }
  if (has_side_streams(spec_)) {
    embeddings_ = continues ? embed(step) : arena_.matrix(x.rows, x.cols);
    if (!continues)
      ops_.gather_rows(embeddings_, x, std::span(every_).first(static_cast<size_t>(x.rows)));
    side_ = arena_.matrix(x.rows, x.cols);
    next_side_ = arena_.matrix(x.rows, x.cols);
  }
  Step* on = &step;
  const auto layers = static_cast<int>(spec_.layers.size());
  for (int layer = 0; layer < layers; ++layer) {
    const bool ends = last != nullptr && layer == last_stored_.layer;
    copy_boundary(layer, x, boundaries);
    x = run_layer(*on, layer, x, ends ? last : nullptr);
    if (stopped_) return;
    if (x.rows == 0) break;
    if (ends) on = last;
    if (on == &step) put_pictures(step.batch, layer + 1, x);
  }
  copy_boundary(layers, x, boundaries);
  write_logits(step, x, logits, hidden);
}

}  // namespace freshet
