#include "speculative/acceptance.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace freshet::speculative {
namespace {

__extension__ using Wide128 = unsigned __int128;

// bits / 2^64 * bound, rounded down.
Wide128 scale_bits(uint64_t bits, Wide128 bound) {
  const Wide128 low = static_cast<Wide128>(bits) * static_cast<uint64_t>(bound);
  return static_cast<Wide128>(bits) * static_cast<uint64_t>(bound >> 64) + (low >> 64);
}

double unit_from(uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

Weight total_weight(Distribution d) {
  Weight sum = 0;
  for (const Candidate& c : d) sum += c.weight;
  return sum;
}

Weight weight_in(Distribution d, int32_t id) {
  const auto at = std::ranges::lower_bound(d, id, {}, &Candidate::id);
  return at != d.end() && at->id == id ? at->weight : 0;
}

double share_in(Distribution d, int32_t id) {
  return static_cast<double>(weight_in(d, id)) / static_cast<double>(total_weight(d));
}

// Calls use(candidate of p, its weight in q) in order of ids, until it returns false.
template <class Use>
void each_candidate(Distribution p, Distribution q, const Use& use) {
  auto other = q.begin();
  for (const Candidate& c : p) {
    while (other != q.end() && other->id < c.id) ++other;
    if (!use(c, other != q.end() && other->id == c.id ? other->weight : Weight{0})) return;
  }
}

// max(0, p - q) of each candidate of p, times both sums.
template <class Use>
void each_excess(Distribution p, Distribution q, const Use& use) {
  const Wide128 of_p = total_weight(p), of_q = total_weight(q);
  each_candidate(p, q, [&](const Candidate& c, Weight other) {
    const Wide128 a = c.weight * of_q, b = other * of_p;
    return use(c.id, a > b ? a - b : Wide128{0});
  });
}

Wide128 total_excess(Distribution p, Distribution q) {
  Wide128 total = 0;
  each_excess(p, q, [&](int32_t, Wide128 excess) {
    total += excess;
    return true;
  });
  return total;
}

template <class Use>
void each_block_excess(double product, Distribution p, Distribution q, const Use& use) {
  const double of_p = product / static_cast<double>(total_weight(p));
  const double of_q = 1.0 / static_cast<double>(total_weight(q));
  each_candidate(p, q, [&](const Candidate& c, Weight other) {
    const double a = static_cast<double>(c.weight) * of_p;
    const double b = static_cast<double>(other) * of_q;
    return use(c.id, std::max(0.0, a - b));
  });
}

}  // namespace

std::optional<Acceptance> acceptance_by_name(std::string_view name) {
  constexpr std::pair<std::string_view, Acceptance> kNames[] = {
      {"match", Acceptance::kMatch},        {"rejection", Acceptance::kRejection},
      {"standard", Acceptance::kRejection}, {"block", Acceptance::kBlock},
      {"typical", Acceptance::kTypical},    {"synthetic", Acceptance::kSynthetic},
  };
  for (const auto& [known, acceptance] : kNames) {
    if (known == name) return acceptance;
  }
  return {};
}

bool may_be(Distribution d, int32_t id) {
  return weight_in(d, id) > 0;
}

void order_by_id(std::span<Candidate> candidates) {
  if (!std::ranges::is_sorted(candidates, {}, &Candidate::id))
    std::ranges::sort(candidates, {}, &Candidate::id);
}

uint64_t draft_bits(const Sampler& sampler, int64_t first, int index, Sampler::Purpose purpose) {
  return sampler.bits((first + index) | int64_t{index} << 32, purpose);
}

int32_t draw_token(Distribution d, uint64_t bits) {
  const Wide128 target = scale_bits(bits, total_weight(d));
  Wide128 sum = 0;
  for (const Candidate& c : d) {
    sum += c.weight;
    if (target < sum) return c.id;
  }
  return -1;
}

bool keeps_draft(Distribution p, Distribution q, int32_t draft, uint64_t bits) {
  const Wide128 in_p = static_cast<Wide128>(weight_in(p, draft)) * total_weight(q);
  const Wide128 in_q = static_cast<Wide128>(weight_in(q, draft)) * total_weight(p);
  return scale_bits(bits, in_q) < in_p;
}

int32_t draw_residual(Distribution p, Distribution q, uint64_t bits) {
  const Wide128 target = scale_bits(bits, total_excess(p, q));
  Wide128 sum = 0;
  int32_t found = -1;
  each_excess(p, q, [&](int32_t id, Wide128 excess) {
    sum += excess;
    if (target < sum) found = id;
    return found < 0;
  });
  return found;
}

double total_variation(Distribution p, Distribution q) {
  return static_cast<double>(total_excess(p, q)) /
         (static_cast<double>(total_weight(p)) * static_cast<double>(total_weight(q)));
}

double block_product(double before, Distribution p, Distribution q, int32_t draft) {
  return std::min(1.0, before * share_in(p, draft) / share_in(q, draft));
}

double block_residual(double product, Distribution p, Distribution q) {
  double total = 0.0;
  each_block_excess(product, p, q, [&](int32_t, double excess) {
    total += excess;
    return true;
  });
  return total;
}

bool keeps_block(double product, double residual, uint64_t bits) {
  if (product >= 1.0) return true;
  return unit_from(bits) * (residual + 1.0 - product) < residual;
}

int32_t draw_block_residual(double product, Distribution p, Distribution q, uint64_t bits) {
  const double target = unit_from(bits) * block_residual(product, p, q);
  double sum = 0.0;
  int32_t found = -1;
  each_block_excess(product, p, q, [&](int32_t id, double excess) {
    sum += excess;
    if (excess > 0.0) found = id;  // the last one, should rounding leave no other
    return target >= sum;
  });
  return found >= 0 ? found : draw_token(p, bits);
}

bool is_typical(Distribution p, int32_t draft, const AcceptanceOptions& options) {
  const double total = static_cast<double>(total_weight(p));
  double entropy = 0.0;
  for (const Candidate& c : p) {
    const double share = static_cast<double>(c.weight) / total;
    if (share > 0.0) entropy -= share * std::log(share);
  }
  return share_in(p, draft) >
         std::min(options.posterior_threshold, options.posterior_alpha * std::exp(-entropy));
}

int synthetic_drafts(std::span<const double> rates, int drafts, uint64_t bits) {
  const auto most = std::min(rates.size(), static_cast<size_t>(drafts));
  const auto kept =
      std::ranges::find_if(rates.first(most), [&](double rate) { return unit_from(bits) >= rate; });
  return static_cast<int>(kept - rates.begin());
}

}  // namespace freshet::speculative
