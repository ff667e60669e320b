#include "models/branch_loading.h"

namespace freshet::models {
namespace {

// In the order of BranchBody's alternatives.
constexpr const BranchLoading* kLoadings[] = {
    &kAttentionLoading, &kMlaLoading,           &kMlpLoading,    &kMoeLoading,
    &kShortConvLoading, &kMambaLoading,         &kMamba2Loading, &kDeltaNetLoading,
    &kLightningLoading, &kCrossAttentionLoading};
static_assert(std::size(kLoadings) == std::variant_size_v<BranchBody>,
              "every kind of branch needs a row");

}  // namespace

const BranchLoading& loading_of(const BranchSpec& branch) {
  return *kLoadings[branch.body.index()];
}

}  // namespace freshet::models
