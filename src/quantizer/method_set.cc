#include "quantizer/method_set.h"

#include <fmt/format.h>

#include "base/nearest.h"

namespace freshet::quantizer {

Result<MethodSet> MethodSet::parse(std::string_view text) {
  MethodSet out;
  const std::string all(text);
  bool plain = false;
  while (true) {
    const size_t plus = text.find('+');
    const std::string_view one = text.substr(0, plus);
    if (one == "rtn") {
      plain = true;
    } else if (one == "imatrix") {
      out.imatrix = true;
    } else if (one == "gptq") {
      out.gptq = true;
    } else if (one == "awq") {
      out.awq = true;
    } else if (one == "smoothquant") {
      out.smoothquant = true;
    } else {
      const std::string names[] = {"rtn", "imatrix", "gptq", "awq", "smoothquant"};
      const std::string close = nearest(one, names);
      return invalid_argument(
          "--method {}: '{}' is not a method{}: use rtn, imatrix, gptq, awq or smoothquant, or "
          "some joined by '+'",
          all, one, close.empty() ? "" : fmt::format(", did you mean {}?", close));
    }
    if (plus == std::string_view::npos) break;
    text.remove_prefix(plus + 1);
  }
  if (out.awq && out.smoothquant)
    return invalid_argument("--method {}: awq and smoothquant scale the same channels: use one",
                            all);
  if (plain && (out.gptq || out.imatrix))
    return invalid_argument("--method {}: rtn does not go with {}", all,
                            out.gptq ? "gptq" : "imatrix");
  return out;
}

std::string MethodSet::name() const {
  std::string name;
  const auto add = [&](bool on, const char* one) {
    if (on) name += (name.empty() ? "" : "+") + std::string(one);
  };
  add(awq, "awq");
  add(smoothquant, "smoothquant");
  add(imatrix, "imatrix");
  add(gptq, "gptq");
  return name.empty() ? "rtn" : name;
}

}  // namespace freshet::quantizer
