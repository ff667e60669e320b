// Packs weights into panels (matmul_layout.h) and unpacks them. Pure and thread-safe. One call
// writes a whole panel, so panels may be packed in parallel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/format.h"

namespace freshet::cpu {

size_t packed_bytes(quant::Format format, int64_t rows, int64_t cols);

// rows[16]: each row as stored (quant::row_bytes), at any alignment; nullptr past the last row.
void pack_panel(quant::Format format, uint8_t* packed, int64_t panel, const uint8_t* const* rows,
                int64_t cols);

// Decodes row `row`, bit-equal to quant::FormatInfo::decode.
void unpack_row(quant::Format format, const uint8_t* packed, int64_t row, int64_t cols, float* out);

}  // namespace freshet::cpu
