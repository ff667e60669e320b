#include "eval/safetensors_writer.h"

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/json.h"

namespace freshet::eval {

Result<SafetensorsWriter> SafetensorsWriter::create(const std::string& path,
                                                    std::span<const Entry> entries) {
  json::Object header;
  int64_t offset = 0;
  for (const Entry& e : entries) {
    int64_t values = 1;
    json::Array shape;
    for (const int64_t n : e.shape) {
      values *= n;
      shape.emplace_back(n);
    }
    json::Object tensor;
    tensor["dtype"] = "F32";
    tensor["shape"] = std::move(shape);
    tensor["data_offsets"] = json::Array{offset, offset + values * 4};
    header[e.name] = std::move(tensor);
    offset += values * 4;
  }
  std::string text = json::write(json::Value(std::move(header)));
  text.resize((text.size() + 7) / 8 * 8, ' ');
  uint64_t size = text.size();
  char length[8];
  for (char& c : length) {
    c = static_cast<char>(size & 0xFF);
    size >>= 8;
  }
  std::FILE* file = std::fopen(path.c_str(), "wbe");
  if (file == nullptr)
    return io_error("cannot write {}: {}", path, std::generic_category().message(errno));
  SafetensorsWriter writer(file, path, offset / 4);
  if (std::fwrite(length, 1, 8, file) != 8 ||
      std::fwrite(text.data(), 1, text.size(), file) != text.size())
    return writer.failed();
  return writer;
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : file_(std::exchange(other.file_, nullptr)),
      path_(std::move(other.path_)),
      left_(other.left_) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (file_ != nullptr) std::fclose(file_);
}

Status SafetensorsWriter::failed() const {
  return io_error("cannot write {}: {}", path_, std::generic_category().message(errno));
}

Status SafetensorsWriter::write(std::span<const float> values) {
  left_ -= std::ssize(values);
  FRESHET_CHECK(left_ >= 0, "more values than declared");
  if (std::fwrite(values.data(), sizeof(float), values.size(), file_) != values.size())
    return failed();
  return {};
}

Status SafetensorsWriter::close() {
  FRESHET_CHECK(left_ == 0, "{} declared values were not written", left_);
  std::FILE* file = std::exchange(file_, nullptr);
  if (std::fclose(file) != 0) return failed();
  return {};
}

}  // namespace freshet::eval
