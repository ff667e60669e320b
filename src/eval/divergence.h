// How far one distribution over the next token is from another, from two rows of logits.
//
// Pure and thread-safe. Sums are in double precision, relative to each row's maximum, in the order
// of the tokens.
#pragma once

#include <cstdint>
#include <span>

namespace freshet::eval {

struct Divergence {
  double base_nats = 0.0;   // -ln p(token)
  double model_nats = 0.0;  // -ln q(token)
  double kl = 0.0;          // sum of p ln(p / q), in nats; exactly 0 for equal rows
  bool same_top = false;    // both have their maximum at the same token; ties go to the lowest id
};

// p: softmax of `base`, q: softmax of `model`; `token` is the one that came. Results are not finite
// if a logit is not. REQUIRES: rows of equal size, which `token` is below.
Divergence divergence(std::span<const float> base, std::span<const float> model, int32_t token);

}  // namespace freshet::eval
