// The levels of NF4 and FP4 of bitsandbytes, times a block's scale. Data only, so that kernels of
// any instruction set may include it.
//
// NF4's are quantiles of a normal distribution, scaled to reach 1; FP4's are a sign and one of 0,
// 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1.
#pragma once

namespace freshet::quant {

inline constexpr float kNf4Levels[16] = {
    -0x1p+0f,        -0x1.647362p-1f, -0x1.0cd66p-1f,  -0x1.946540p-2f,
    -0x1.23449ap-2f, -0x1.7a6a7ep-3f, -0x1.74f0e2p-4f, 0.0f,
    0x1.45f5fep-4f,  0x1.4995c6p-3f,  0x1.f809bap-3f,  0x1.5a0674p-2f,
    0x1.c3497p-2f,   0x1.200f56p-1f,  0x1.722766p-1f,  0x1p+0f};
inline constexpr float kFp4Levels[16] = {
    0.0f, 0x1.555556p-8f,  0x1.555556p-1f,  1.0f,  0x1.555556p-2f,  0.5f,  0x1.555556p-3f,  0.25f,
    0.0f, -0x1.555556p-8f, -0x1.555556p-1f, -1.0f, -0x1.555556p-2f, -0.5f, -0x1.555556p-3f, -0.25f};

}  // namespace freshet::quant
