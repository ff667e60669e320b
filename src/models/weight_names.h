// The name of each weight in a file.
//
// A role is a weight's place in the decoder. Names are patterns: "{}" is the layer, "{e}" the
// expert; ".weight" and ".bias" are appended. Safetensors start from Llama's names and GGUF from a
// common table; an architecture lists the differences.
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>

namespace freshet::models {

enum class Role {
  kEmbedding,
  kPositions,
  kTokenTypes,
  kEmbeddedNorm,
  kEmbeddingIn,
  kEmbeddingOut,
  kFinalNorm,
  kHead,
  kHeadBias,  // where the head is the embedding
  kConvolution1,
  kConvolution2,
  // Norms by where they stand: before a branch, on its output, after the residual.
  kAttentionIn,
  kAttentionOut,
  kAttentionAfter,
  kMlpIn,
  kMlpOut,
  kMlpAfter,
  // Attention
  kQuery,
  kKey,
  kValue,
  kQkv,
  kOutput,
  kQueryNorm,
  kKeyNorm,
  kSinks,
  kQueryDown,
  kQueryLatentNorm,
  kQueryUp,
  kKvDown,
  kKvLatentNorm,
  kKvUp,
  kKeyUpTransposed,
  kValueUp,
  kDistanceBias,
  // Cross-attention, and the norms around it
  kCrossIn,
  kCrossOut,
  kCrossAfter,
  kCrossQuery,
  kCrossKey,
  kCrossValue,
  kCrossOutput,
  // Layers with states
  kStateIn,
  kStateGates,
  kStateZ,
  kStateConv,
  kStateX,
  kStateDt,
  kStateDtBias,
  kStateA,  // the logarithm of what it is in GGUF files, with the other sign
  kStateD,
  kStateNorm,
  kStateDtNorm,
  kStateBNorm,
  kStateCNorm,
  kStateOut,
  // MLP
  kGate,
  kUp,
  kDown,
  kGateUp,
  kXieluPositive,
  kXieluNegative,
  kXieluBeta,
  kXieluEps,
  // Experts: one by one, or stacked in one tensor
  kRouter,
  kRouterCorrection,
  kExpertGate,
  kExpertUp,
  kExpertDown,
  kExpertsGate,
  kExpertsUp,
  kExpertsDown,
  kExpertsGateUp,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kSharedGateUp,
  kSharedScale,
  // Draft heads
  kFeatures,
  kFeatureNorm,
  kFeatureEmbeddingNorm,
  kFeatureInputNorm,
  // Towers for pictures, beside the roles above: "{}" of the deep ones counts connectors
  kPatches,
  kClassRow,
  kConnectorNorm,
  kConnectorIn,
  kConnectorOut,
  kDeepNorm,
  kDeepIn,
  kDeepOut,
  kTilePositions,
  kTileGate,
  kTilesBefore,
  kTilesBeforeGate,
  kTilesAfter,
  kTilesAfterGate,
  // Weights whose tanh scales a branch
  kAttentionGate,
  kCrossGate,
  kMlpGate,
  kCrossQueryNorm,
  kCrossKeyNorm,
  kConnectorMerge,
  kNewlineRow,
  // Of layers with side streams; "{e}" is the use of the shared weights that an adapter is for.
  kSideIn,
  kSideLinear,
  kQueryAdapterDown,
  kQueryAdapterUp,
  kKeyAdapterDown,
  kKeyAdapterUp,
  kValueAdapterDown,
  kValueAdapterUp,
  kGateUpAdapterDown,
  kGateUpAdapterUp,
  kCount,
};

struct NameRule {
  Role role;
  // Empty: the weight does not occur. "a|b": files have it under either name.
  std::string_view pattern;
};

class WeightNames {
 public:
  static WeightNames safetensors(std::span<const NameRule> differences);
  static WeightNames gguf(std::span<const NameRule> differences);

  // Without a suffix; empty when the role has no name here. `choice`: which of the names that a
  // pattern lists; empty behind the last one.
  std::string stem(Role role, int layer = -1, int expert = -1, int choice = 0) const;

 private:
  std::array<std::string_view, static_cast<size_t>(Role::kCount)> patterns_{};
};

}  // namespace freshet::models
