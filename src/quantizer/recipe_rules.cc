#include "quantizer/recipe_rules.h"

namespace freshet::quantizer {
namespace {

using enum TensorKind;
using enum RecipeFamily;
using P = TensorPlace;

bool always(const P&) {
  return true;
}
bool gqa4(const P& p) {
  return p.model->heads_per_kv_head >= 4;
}
bool gqa4_or_experts(const P& p) {
  return gqa4(p) || p.model->experts >= 4;
}
bool no_imatrix(const P& p) {
  return !p.model->importance;
}
bool eight(const P& p) {
  return p.experts(8);
}
bool not_eight(const P& p) {
  return !p.experts(8);
}
bool first2(const P& p) {
  return p.index < 2;
}
bool first4(const P& p) {
  return p.index < 4;
}
bool first_eighth(const P& p) {
  return p.ff_layer() < p.model->layers / 8;
}
bool first_eighth_by_index(const P& p) {
  return p.index < p.model->layers / 8;
}
bool first_eighth_no_imatrix(const P& p) {
  return first_eighth(p) && no_imatrix(p);
}
bool first_eighth_imatrix(const P& p) {
  return first_eighth(p) && !no_imatrix(p);
}
bool first_sixteenth(const P& p) {
  return p.ff_layer() < p.model->layers / 16;
}
bool middle(const P& p) {
  const int n = p.model->layers;
  return p.ff_layer() >= n / 8 && p.ff_layer() < 7 * n / 8;
}
// The first and last eighths and every third between.
bool more_bits(int i, int n) {
  return i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
}
bool more_values(const P& p) {
  return more_bits(p.index, p.count);
}
bool more_downs(const P& p) {
  return more_bits(p.ff_layer(), p.model->layers);
}
bool first_eighth_or_eight_more(const P& p) {
  return first_eighth(p) || (p.experts(8) && more_downs(p));
}

// clang-format off
constexpr RecipeRow kRecipes[] = {
    {"f32", "", 0, kPlain, "f32", "f32", "", {}},
    {"f16", "", 1, kPlain, "f16", "f16", "", {}},
    {"bf16", "", 32, kPlain, "bf16", "bf16", "", {}},
    {"q8_0", "", 7, kUsual, "q8_0", "q8_0", "", {}},
    {"q4_0", "", 2, kUsual, "q4_0", "q6_k", "", {{kDown, first_eighth_imatrix, "q4_1"}}},
    {"q4_1", "", 3, kUsual, "q4_1", "q6_k", "", {}},
    {"q5_0", "", 8, kUsual, "q5_0", "q6_k", "", {{kDown, first_eighth_imatrix, "q5_1"}}},
    {"q5_1", "", 9, kUsual, "q5_1", "q6_k", "", {}},
    {"q2_k", "", 10, kUsual, "q2_k", "q6_k", "",
     {{kValue, gqa4, "q4_k"}, {kValue, always, "q3_k"}, {kDown, always, "q3_k"},
      {kAttentionOutput, eight, "q5_k"}, {kAttentionOutput, always, "q3_k"}}},
    {"q2_k_s", "", 21, kUsual, "q2_k", "q6_k", "",
     {{kValue, gqa4, "q4_k"}, {kDown, first_eighth, "q4_k"}}},
    {"q3_k_s", "", 11, kUsual, "q3_k", "q6_k", "", {{kAttentionOutput, eight, "q5_k"}}},
    {"q3_k_m", "q3_k", 12, kUsual, "q3_k", "q6_k", "",
     {{kValue, first2, "q5_k"}, {kValue, always, "q4_k"}, {kDown, first_sixteenth, "q5_k"},
      {kDown, always, "q4_k"}, {kAttentionOutput, eight, "q5_k"},
      {kAttentionOutput, always, "q4_k"}}},
    {"q3_k_l", "", 13, kUsual, "q3_k", "q6_k", "",
     {{kValue, always, "q5_k"}, {kDown, always, "q5_k"}, {kAttentionOutput, not_eight, "q5_k"}}},
    {"q4_k_s", "", 14, kUsual, "q4_k", "q6_k", "",
     {{kValue, first4, "q5_k"}, {kDown, first_eighth, "q5_k"}, {kAttentionOutput, eight, "q5_k"}}},
    {"q4_k_m", "q4_k", 15, kUsual, "q4_k", "q6_k", "",
     {{kValue, more_values, "q6_k"}, {kDown, more_downs, "q6_k"},
      {kAttentionOutput, eight, "q5_k"}}},
    {"q5_k_s", "", 16, kUsual, "q5_k", "q6_k", "", {}},
    {"q5_k_m", "q5_k", 17, kUsual, "q5_k", "q6_k", "",
     {{kValue, more_values, "q6_k"}, {kDown, more_downs, "q6_k"}}},
    {"q6_k", "", 18, kUsual, "q6_k", "q6_k", "", {}},
    {"iq1_s", "", 24, kLow, "iq1_s", "q5_k", "q2_k",
     {{kValue, gqa4_or_experts, "q4_k"}, {kValue, always, "q2_k"}, {kKey, eight, "q4_k"},
      {kDown, first_eighth_by_index, "q2_k"}, {kAttentionOutput, eight, "q5_k"},
      {kAttentionOutput, always, "iq2_xxs"}}},
    {"iq1_m", "", 31, kLow, "iq1_m", "q5_k", "q2_k",
     {{kValue, gqa4_or_experts, "q4_k"}, {kValue, always, "q2_k"}, {kKey, eight, "q4_k"},
      {kDown, first_eighth_by_index, "q2_k"}, {kAttentionOutput, eight, "q5_k"},
      {kAttentionOutput, always, "iq2_xxs"}}},
    {"iq2_xxs", "", 19, kLow, "iq2_xxs", "q5_k", "q2_k",
     {{kValue, gqa4_or_experts, "q4_k"}, {kValue, always, "q2_k"}, {kKey, eight, "q4_k"},
      {kDown, first_eighth_by_index, "q2_k"}, {kAttentionOutput, eight, "q5_k"}}},
    {"iq2_xs", "", 20, kLow, "iq2_xs", "q5_k", "q2_k",
     {{kValue, gqa4_or_experts, "q4_k"}, {kValue, always, "q2_k"}, {kKey, eight, "q4_k"},
      {kDown, first_eighth_by_index, "q2_k"}, {kAttentionOutput, eight, "q5_k"}}},
    {"iq2_s", "", 28, kLow, "iq2_xs", "q5_k", "iq3_s",
     {{kValue, gqa4_or_experts, "q4_k"}, {kValue, always, "iq3_s"}, {kKey, eight, "q4_k"},
      {kDown, first_eighth_by_index, "iq3_s"}, {kAttentionOutput, eight, "q5_k"},
      {kAttentionOutput, always, "iq3_s"}}},
    {"iq2_m", "", 29, kLow, "iq2_s", "q5_k", "iq3_s",
     {{kValue, gqa4_or_experts, "q4_k"}, {kValue, always, "iq3_s"}, {kKey, eight, "q4_k"},
      {kDown, first_eighth_by_index, "iq3_s"}, {kAttentionOutput, eight, "q5_k"},
      {kAttentionOutput, always, "iq3_s"}}},
    {"iq3_xxs", "", 23, kUsual, "iq3_xxs", "q5_k", "iq3_s",
     {{kValue, gqa4, "q4_k"}, {kValue, no_imatrix, "iq3_s"}, {kKey, always, "iq2_s"},
      {kQuery, always, "iq2_s"}, {kDown, first_eighth_no_imatrix, "q4_k"},
      {kDown, no_imatrix, "q3_k"}, {kAttentionOutput, eight, "q5_k"},
      {kAttentionOutput, always, "iq3_s"}}},
    {"iq3_xs", "", 22, kUsual, "iq3_s", "q6_k", "",
     {{kValue, gqa4, "q4_k"}, {kKey, always, "iq3_xxs"}, {kQuery, always, "iq3_xxs"},
      {kGate, middle, "iq3_xxs"}, {kUp, middle, "iq3_xxs"}, {kAttentionOutput, eight, "q5_k"}}},
    {"iq3_s", "", 26, kUsual, "iq3_s", "q6_k", "",
     {{kValue, gqa4, "q4_k"}, {kAttentionOutput, eight, "q5_k"}}},
    {"iq3_m", "", 27, kUsual, "iq3_s", "q6_k", "",
     {{kValue, always, "q4_k"}, {kDown, first_eighth_or_eight_more, "q4_k"},
      {kAttentionOutput, eight, "q5_k"}, {kAttentionOutput, always, "q4_k"}}},
    {"iq4_nl", "", 25, kUsual, "iq4_nl", "q6_k", "",
     {{kValue, gqa4, "q5_k"}, {kDown, first_eighth_no_imatrix, "q5_k"},
      {kAttentionOutput, eight, "q5_k"}}},
    {"iq4_xs", "", 30, kUsual, "iq4_xs", "q6_k", "",
     {{kValue, gqa4, "q5_k"}, {kDown, first_eighth_no_imatrix, "q5_k"},
      {kAttentionOutput, eight, "q5_k"}}},
    {"tq1_0", "", 36, kUsual, "tq1_0", "q6_k", "q4_k", {}},
    {"tq2_0", "", 37, kUsual, "tq2_0", "q6_k", "q4_k", {}},
    {"mxfp4_moe", "", 38, kExperts, "mxfp4", "q8_0", "q8_0", {}},
};
// clang-format on

}  // namespace

std::span<const RecipeRow> recipe_rows() {
  return kRecipes;
}

}  // namespace freshet::quantizer
