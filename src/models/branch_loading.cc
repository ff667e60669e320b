#include "models/branch_loading.h"

namespace freshet::models {
namespace {

// In the order of BranchBody's alternatives.
constexpr const BranchLoading* kLoadings[] = {&kAttentionLoading, &kMlaLoading,
                                              &kMlpLoading,       &kMoeLoading,
                                              &kShortConvLoading, &kMambaLoading,
                                              &kMamba2Loading,    &kDeltaNetLoading,
                                              &kLightningLoading, &kCrossAttentionLoading,
                                              &kLinearLoading};
static_assert(std::size(kLoadings) == std::variant_size_v<BranchBody>,
              "every kind of branch needs a row");

}  // namespace

const BranchLoading& loading_of(const BranchSpec& branch) {
  return *kLoadings[branch.body.index()];
}

const NormRoles& norm_roles_of(const BranchSpec& branch) {
  return branch.side == Side::kOpens ? kSideNorms : loading_of(branch).norms;
}

const loader::TensorSource* find_kv_scale(const WeightReader& reader, Role projection, int layer,
                                          const std::string& name) {
  if (reader.is_gguf()) return nullptr;
  const std::string own = reader.stem(projection, layer);
  if (const auto* found = reader.find_name(own + name)) return found;
  const size_t dot = own.rfind('.');
  return dot == std::string::npos ? nullptr : reader.find_name(own.substr(0, dot) + name);
}

}  // namespace freshet::models
