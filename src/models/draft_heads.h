// Draft heads of a target: EAGLE (arXiv:2401.15077), EAGLE-3 (arXiv:2503.01840), MTP layers
// (arXiv:2412.19437) and DFlash (arXiv:2602.06036), which read the target's states and share its
// embedding and head.
//
// A head is a model of its own kind of ModelSpec (FeatureSpec). Published files differ in names and
// in details that no configuration tells, so tensors decide where they can: a norm, a bias or an
// embedding that the file has is used. EAGLE-3 heads may also be GGUF files. Errors name the tensor
// or the key that does not fit.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/model.h"
#include "loader/checkpoint.h"

namespace freshet::models {

enum class HeadKind { kEagle, kEagle3, kMtp, kDFlash };

// A head before its weights are read.
struct HeadPlan {
  HeadKind kind = HeadKind::kEagle;
  ModelSpec spec;
  // Which states of the target are its features, in order: those after the final norm, or the
  // residual stream behind that number of layers (ascending, unless overrides say otherwise).
  bool reads_last = false;
  std::vector<int> boundaries;
  // Whether each of the features has a norm of its own (EAGLE 3.1's fc_norm).
  bool norms_each_feature = false;
  size_t weight_bytes = 0;
  // Of a head that drafts several tokens in one pass (P-EAGLE, arXiv:2602.01469; DFlash): the token
  // that stands for those to come; -1: it drafts one.
  int32_t mask_token = -1;
  // DFlash: the rows of a pass, which are the last known token and masks. 0: another kind of head.
  int block = 0;
};

struct DraftHead {
  HeadPlan plan;
  std::unique_ptr<Model> model;
  std::vector<int32_t> target_ids;  // the target's ids of the head's logits; empty: the same
  // With a mask token: the features of its rows, of plan.spec.features->width numbers.
  std::vector<float> mask_features;
};

// Departures from what a head's files say, to find out how it was trained.
struct HeadOverrides {
  int shift_layers = 0;             // added to the numbers of layers that are read
  bool reverse_layers = false;      // the last of them first
  bool before_norm = false;         // states before the target's final norm instead of after it
  bool swap_inputs = false;         // the features before the embedding, or the other way round
  bool flip_residual_norm = false;  // norm_before_residual
  bool drop_bias = false;           // of the features' projection
  bool absolute_ids = false;        // d2t holds ids instead of offsets
};

// The token that stands for those to come, of models and heads trained to draft several in one
// pass: pard_token, ptd_token_id or mask_token_id of their configuration; -1: it names none. An id
// beyond the `known` rows of the embedding is an error, which names `path`.
Result<int32_t> read_mask_token(const json::Value& config, int64_t known, const std::string& path);

// What every head takes from its target: the embedding, and its head where it has none.
void take_ends(ModelSpec& spec, const ModelSpec& target);
// `checkpoint`: the head's own file or folder, or the target's for an MTP layer.
Result<HeadPlan> plan_head(HeadKind kind, const loader::Checkpoint& checkpoint,
                           const ModelSpec& target, const HeadOverrides& overrides = {});
// `target`: the loaded target, whose embedding and head are shared.
Result<DraftHead> load_head(HeadKind kind, const loader::Checkpoint& checkpoint,
                            const Model& target, ops::Ops& ops,
                            const HeadOverrides& overrides = {});

}  // namespace freshet::models
