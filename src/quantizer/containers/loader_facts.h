// What engines load, as their sources and documents of 2026 say; for the `loaders` of containers.
// Pure; thread-safe.
#pragma once

#include <string>
#include <vector>

#include "quantizer/containers/container.h"

namespace freshet::quantizer {

// vLLM on GPUs with integer weights in groups (Marlin, Machete): 4 or 8 bits, groups of 32, 64,
// 128 or a row, rows and columns in multiples of 64 and 128.
Loader marlin_loader(std::string engine, const Scheme& scheme, const ModelFacts& facts);

Loader loads_in(std::string engine, std::string note = {});
Loader not_in(std::string engine, std::string why);

// Freshet, for schemes whose columns must be multiples of `cols`.
Loader freshet_loader(const ModelFacts& facts, int64_t cols);

// llama.cpp reads GGUF only.
Loader llama_cpp_loader();

}  // namespace freshet::quantizer
