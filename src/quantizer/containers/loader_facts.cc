#include "quantizer/containers/loader_facts.h"

#include <algorithm>

#include "quantizer/containers/packing.h"

namespace freshet::quantizer {

Loader loads_in(std::string engine, std::string note) {
  return {std::move(engine), true, std::move(note)};
}

Loader not_in(std::string engine, std::string why) {
  return {std::move(engine), false, std::move(why)};
}

Loader marlin_loader(std::string engine, const Scheme& s, const ModelFacts& facts) {
  constexpr int64_t kGroups[] = {0, 32, 64, 128};
  constexpr int64_t kRows = 64, kCols = 128;
  if (s.bits != 4 && s.bits != 8) {
    return not_in(std::move(engine),
                  fmt::format("its kernels take 4 or 8 bits, and these are {}", s.bits));
  }
  if (!s.symmetric && s.bits != 4) {
    return not_in(std::move(engine), "its kernels take zero points with 4 bits only");
  }
  if (std::ranges::find(kGroups, s.group) == std::end(kGroups)) {
    return not_in(
        std::move(engine),
        fmt::format("its kernels take groups of 32, 64, 128 or a row, and these are {}", s.group));
  }
  const std::string off = layer_off(facts, kRows, kCols);
  if (!off.empty()) {
    return not_in(std::move(engine),
                  fmt::format("its kernels take rows in multiples of {} and columns of {}: {}",
                              kRows, kCols, off));
  }
  const bool rounds = s.scale == ScaleType::kF16 && facts.dtype == "bfloat16";
  return loads_in(
      std::move(engine),
      rounds ? "rounds the F16 scales to bfloat16 unless it runs with --dtype float16" : "");
}

Loader freshet_loader(const ModelFacts& facts, int64_t cols) {
  const std::string off = layer_off(facts, 1, cols);
  if (off.empty()) return loads_in("Freshet");
  return not_in("Freshet", fmt::format("it takes rows in multiples of {}: {}", cols, off));
}

Loader llama_cpp_loader() {
  return not_in("llama.cpp", "it reads GGUF files: take --format gguf");
}

}  // namespace freshet::quantizer
