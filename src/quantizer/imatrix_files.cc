// Writing importance matrices.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/whole_file.h"
#include "loader/gguf_writer.h"
#include "quantizer/imatrix.h"

namespace freshet::quantizer {
namespace {

void append_i32(std::string& out, int64_t v) {
  const auto n = static_cast<int32_t>(v);
  out.append(reinterpret_cast<const char*>(&n), sizeof n);
}

void append_text(std::string& out, const std::string& text) {
  append_i32(out, std::ssize(text));
  out += text;
}

// One entry of the old form; empty if no token reached the tensor.
std::string dat_entry(const std::string& name, const Imatrix::Entry& e, uint32_t chunk_size) {
  const float most = *std::max_element(e.counts.begin(), e.counts.end());
  if (most <= 0) return {};
  const auto calls =
      static_cast<int64_t>(std::ceil(static_cast<double>(most) / static_cast<double>(chunk_size)));
  std::string out;
  append_text(out, name);
  append_i32(out, calls);
  append_i32(out, std::ssize(e.sum2));
  const size_t cols = e.sum2.size() / e.counts.size();
  for (size_t i = 0; i < e.sum2.size(); ++i) {
    const float n = e.counts[i / cols];
    const float mean = n > 0 ? e.sum2[i] / n : 1.0f;
    const float v = mean * static_cast<float>(calls);
    out.append(reinterpret_cast<const char*>(&v), sizeof v);
  }
  return out;
}

std::span<const uint8_t> bytes_of(const std::vector<float>& v) {
  return {reinterpret_cast<const uint8_t*>(v.data()), v.size() * sizeof(float)};
}

}  // namespace

Status Imatrix::save_gguf(const std::string& path) const {
  loader::GgufWriter out;
  out.add_string("general.type", "imatrix");
  out.add_strings("imatrix.datasets", datasets);
  out.add_u32("imatrix.chunk_count", chunk_count);
  out.add_u32("imatrix.chunk_size", chunk_size);
  const auto declare = [&](const std::string& name, const std::vector<float>& v, int64_t experts) {
    return out.add_tensor(name, quant::Format::kF32, {experts, std::ssize(v) / experts});
  };
  for (const auto& [name, e] : entries) {
    const auto experts = std::ssize(e.counts);
    FRESHET_RETURN_IF_ERROR(declare(name + ".in_sum2", e.sum2, experts));
    FRESHET_RETURN_IF_ERROR(declare(name + ".counts", e.counts, experts));
    if (!e.sum.empty()) FRESHET_RETURN_IF_ERROR(declare(name + ".in_sum", e.sum, experts));
  }
  FRESHET_RETURN_IF_ERROR(out.open(path));
  for (const auto& [name, e] : entries) {
    FRESHET_RETURN_IF_ERROR(out.write(bytes_of(e.sum2)));
    FRESHET_RETURN_IF_ERROR(out.write(bytes_of(e.counts)));
    if (!e.sum.empty()) FRESHET_RETURN_IF_ERROR(out.write(bytes_of(e.sum)));
  }
  return out.close();
}

Status Imatrix::save_dat(const std::string& path) const {
  std::string body;
  int64_t count = 0;
  for (const auto& [name, e] : entries) {
    const std::string entry = dat_entry(name, e, chunk_size);
    if (!entry.empty()) ++count;
    body += entry;
  }
  if (count == 0) return invalid_argument("{}: no tensor was calibrated", path);
  std::string out;
  append_i32(out, count);
  out += body;
  append_i32(out, chunk_count);
  append_text(out, datasets.empty() ? std::string() : datasets.back());
  return write_whole_file(path, out);
}

}  // namespace freshet::quantizer
