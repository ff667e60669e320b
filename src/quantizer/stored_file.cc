#include "quantizer/stored_file.h"

#include <utility>
#include <vector>

#include "base/whole_file.h"

namespace freshet::quantizer {

Status write_tensors(const std::string& path, std::span<const StoredTensor> tensors,
                     json::Object metadata) {
  json::Object header;
  header["__metadata__"] = json::Value(std::move(metadata));
  size_t at = 0;
  for (const StoredTensor& t : tensors) {
    json::Array shape;
    for (const int64_t d : t.shape) shape.emplace_back(d);
    json::Object entry;
    entry["dtype"] = t.dtype;
    entry["shape"] = json::Value(std::move(shape));
    entry["data_offsets"] = json::Value(json::Array{at, at + t.bytes.size()});
    header[t.name] = json::Value(std::move(entry));
    at += t.bytes.size();
  }
  const std::string text = json::write(json::Value(std::move(header)));
  const uint64_t length = text.size();
  std::vector<std::span<const uint8_t>> pieces = {
      {reinterpret_cast<const uint8_t*>(&length), sizeof length},
      {reinterpret_cast<const uint8_t*>(text.data()), text.size()}};
  for (const StoredTensor& t : tensors) pieces.emplace_back(t.bytes);
  return write_whole_file(path, pieces, Durable::kNo);
}

}  // namespace freshet::quantizer
