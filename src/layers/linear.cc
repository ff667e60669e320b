#include "layers/branch_kinds.h"

namespace freshet {
namespace {

struct LinearKind {
  using Spec = LinearSpec;
  using Weights = LinearWeights;
  static constexpr std::string_view kName = "linear";

  static void run(Step& step, const Spec&, const Weights& w, int, const ops::Input& in,
                  const Into& into) {
    const ops::Product products[] = {product_of(w.linear, into)};
    step.ops.project(in, products);
  }
  static size_t bytes(const Spec&, int64_t, int64_t) { return 0; }
  static void limits(const Spec&, int64_t, ops::Ops::ShapeLimits&) {}  // hidden by hidden
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.linear.weight; }
  static Status validate(const Spec&, const ModelSpec&, size_t) { return {}; }
  static std::string describe(const Spec&) { return "projection"; }
  static void fields(const Spec&, json::Object& to) { to["projection"] = true; }
};

}  // namespace

constinit const BranchKind kLinearKind = branch_kind<LinearKind>();

}  // namespace freshet
