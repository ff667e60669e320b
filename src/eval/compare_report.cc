// A ModelComparison for people and for scripts.
#include <cmath>

#include "base/units.h"
#include "eval/compare.h"

namespace freshet::eval {
namespace {

json::Value interval_json(const Interval& i, int64_t blocks) {
  if (blocks < 2) return nullptr;  // a single window says nothing about others
  return json::Array{i.low, i.high};
}

// Errors from a single window are unknown.
json::Value error_json(const MeanAndError& m, int64_t blocks) {
  return blocks < 2 ? json::Value(nullptr) : json::Value(m.standard_error);
}

std::string size_line(const char* label, const std::string& name, const ModelSize& size,
                      const MeanAndError& nats) {
  return fmt::format(
      "{:<6}{}: {:.4f} nats per token (perplexity {:.3f}), {:.3f} bits per weight ({:.3f} in "
      "all, {})\n",
      label, name, nats.mean, std::exp(nats.mean), size.bits_per_weight(),
      size.bits_per_weight_total(), format_bytes(size.bytes));
}

}  // namespace

std::string comparison_text(const ModelComparison& c) {
  std::string text = size_line("base", c.base, c.base_size, c.base_nats) +
                     size_line("model", c.model, c.model_size, c.model_nats);
  text +=
      fmt::format("delta {:+.5f} +- {:.5f} nats per token, 95 % [{:+.5f}, {:+.5f}]; ", c.delta.mean,
                  c.delta.standard_error, c.delta_interval.low, c.delta_interval.high);
  text += fmt::format("perplexity ratio {:.5f}\n", std::exp(c.delta.mean));
  text += fmt::format(
      "KL divergence {:.6f} +- {:.6f} nats per token; median {:.6f}, 99 % {:.5f}, 99.9 % {:.5f}\n",
      c.kl.mean, c.kl.standard_error, c.kl_median, c.kl_p99, c.kl_p999);
  text += fmt::format("same top token {:.2f} %; RMS of delta p {:.3f} %\n",
                      100.0 * c.top1_agreement, 100.0 * c.rms_delta_p);
  text += fmt::format("{} tokens in {} windows of up to {}\n", c.tokens, c.windows, c.window);
  return text;
}

json::Object comparison_json(const ModelComparison& c) {
  json::Object o;
  o["base"] = c.base;
  o["model"] = c.model;
  o["delta_nats_per_token"] = c.delta.mean;
  o["standard_error"] = error_json(c.delta, c.windows);
  o["delta_interval"] = interval_json(c.delta_interval, c.windows);
  o["perplexity_ratio"] = std::exp(c.delta.mean);
  o["kl_divergence"] = c.kl.mean;
  o["kl_divergence_standard_error"] = error_json(c.kl, c.windows);
  o["kl_divergence_interval"] = interval_json(c.kl_interval, c.windows);
  o["kl_divergence_median"] = c.kl_median;
  o["kl_divergence_p99"] = c.kl_p99;
  o["kl_divergence_p999"] = c.kl_p999;
  o["top1_agreement"] = c.top1_agreement;
  o["rms_delta_p"] = c.rms_delta_p;
  o["nats_per_token"] = c.model_nats.mean;
  o["perplexity"] = std::exp(c.model_nats.mean);
  o["base_nats_per_token"] = c.base_nats.mean;
  o["base_perplexity"] = std::exp(c.base_nats.mean);
  o["bits_per_weight"] = c.model_size.bits_per_weight();
  o["bits_per_weight_total"] = c.model_size.bits_per_weight_total();
  o["bytes"] = c.model_size.bytes;
  o["base_bits_per_weight"] = c.base_size.bits_per_weight();
  o["base_bits_per_weight_total"] = c.base_size.bits_per_weight_total();
  o["base_bytes"] = c.base_size.bytes;
  o["tokens"] = c.tokens;
  o["windows"] = c.windows;
  o["window"] = c.window;
  o["windows_hash"] = c.fingerprint;
  o["arithmetic"] = c.arithmetic;
  return o;
}

}  // namespace freshet::eval
