// Converts router logits to experts and their weights, as defined by Mixtral, Qwen-MoE, DeepSeek V2
// (greedy and group-limited) and V3 (corrected sigmoid scores), GPT-OSS, and PhiMoE (sparsemixer).
// Ties go to the lower id.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void softmax(float* x, int n) {
  const float max = *std::max_element(x, x + n);
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - max);
  for (int i = 0; i < n; ++i) x[i] = static_cast<float>(x[i] / sum);
}

// Removes the largest of choice[0, n) and returns its index; ties go to the lower index.
int take_best(float* choice, int n) {
  int best = 0;
  for (int i = 1; i < n; ++i) {
    if (choice[i] > choice[best]) best = i;
  }
  choice[best] = kNever;
  return best;
}

float group_score(const float* choice, int n, int top) {
  float first = kNever, second = kNever;
  for (int i = 0; i < n; ++i) {
    if (choice[i] > first) {
      second = first;
      first = choice[i];
    } else {
      second = std::max(second, choice[i]);
    }
  }
  return top == 2 && n > 1 ? first + second : first;
}

// Removes the experts of all but the best groups from the choice. group_scores: scratch of
// [groups].
void limit_groups(const Routing& r, float* choice, float* group_scores) {
  const int n = r.experts / r.groups;
  for (int g = 0; g < r.groups; ++g) {
    group_scores[g] = group_score(choice + g * n, n, r.group_score_top);
  }
  for (int dropped = 0; dropped < r.groups - r.top_groups; ++dropped) {
    int worst = -1;  // ties: the higher id is removed first
    for (int g = 0; g < r.groups; ++g) {
      if (std::isnan(group_scores[g])) continue;
      if (worst < 0 || group_scores[g] <= group_scores[worst]) worst = g;
    }
    if (worst < 0) return;
    group_scores[worst] = std::numeric_limits<float>::quiet_NaN();  // removed
    std::fill_n(choice + worst * n, n, kNever);
  }
}

// The weight of an expert that was taken from the choice, whose logit was `best`.
float sparsemixer_weight(const float* logits, const float* choice, float best, const Routing& r) {
  double sum = 1.0;  // of the chosen one
  for (int e = 0; e < r.experts; ++e) {
    if (choice[e] == kNever) continue;
    const float distance = (best - choice[e]) / std::max(std::fabs(logits[e]), best);
    if (!(distance > r.tolerance)) sum += std::exp(double{choice[e]} - best);
  }
  return static_cast<float>(1.0 / sum);
}

// scratch: [3 * experts]
void route_row(const float* logits, const Routing& r, int32_t* ids, float* weights,
               float* scratch) {
  float* scores = scratch;
  float* choice = scratch + r.experts;
  std::copy_n(logits, r.experts, scores);
  if (r.score == Routing::Score::kSoftmax) softmax(scores, r.experts);
  if (r.score == Routing::Score::kSigmoid) {
    for (int e = 0; e < r.experts; ++e) {
      scores[e] = static_cast<float>(1.0 / (1.0 + std::exp(-double{scores[e]})));
    }
  }
  for (int e = 0; e < r.experts; ++e) {
    choice[e] = scores[e] + (r.correction != nullptr ? r.correction[e] : 0.0f);
  }
  if (r.groups > 1) limit_groups(r, choice, choice + r.experts);
  for (int k = 0; k < r.top_k; ++k) {
    ids[k] = take_best(choice, r.experts);
    weights[k] = scores[ids[k]];
    if (r.score == Routing::Score::kSparsemixer)
      weights[k] = sparsemixer_weight(logits, choice, logits[ids[k]], r);
  }
  if (r.score == Routing::Score::kTopkSoftmax) softmax(weights, r.top_k);
  float factor = r.scale;
  if (r.renormalize) {
    float sum = r.renormalize_eps;
    for (int k = 0; k < r.top_k; ++k) sum += weights[k];
    factor /= sum;
  }
  for (int k = 0; k < r.top_k; ++k) weights[k] *= factor;
}

}  // namespace

void Ops::route(const Matrix& logits, const Routing& r, int32_t* ids, float* weights) {
  FRESHET_CHECK(logits.cols == r.experts && r.top_k >= 1 && r.groups >= 1 &&
                    r.experts % r.groups == 0 && r.top_groups <= r.groups &&
                    r.top_k <= (r.groups > 1 ? r.experts / r.groups * r.top_groups : r.experts),
                "route logits [{}, {}], experts={} top_k={} groups={} top_groups={}", logits.rows,
                logits.cols, r.experts, r.top_k, r.groups, r.top_groups);
  if (Device* d = device()) return d->route(logits, r, ids, weights);
  const size_t mark = impl_->arena.mark();
  auto* scratch = impl_->arena.allocate_array<float>(logits.rows * 3 * r.experts);
  impl_->for_rows(logits.rows, int64_t{r.experts} * 8, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      route_row(logits.row(t), r, ids + t * r.top_k, weights + t * r.top_k,
                scratch + t * 3 * r.experts);
    }
  });
  impl_->arena.rewind(mark);
}

}  // namespace freshet::ops
