#include "quantizer/containers/checkpoint_writer.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

#include "loader/tensor_source.h"

namespace freshet::quantizer {
namespace {

namespace fs = std::filesystem;

// The room for the header of a shard whose bytes are in the file before all its names are known.
constexpr int64_t kHeaderRoom = int64_t{1} << 20;
// The one folder below a checkpoint that transformers writes.
constexpr const char* kTemplates = "additional_chat_templates";

std::optional<int64_t> bits_of_dtype(std::string_view dtype) {
  constexpr std::pair<std::string_view, int64_t> kBits[] = {
      {"F64", 64},    {"I64", 64},    {"U64", 64},    {"F32", 32}, {"I32", 32}, {"U32", 32},
      {"F16", 16},    {"BF16", 16},   {"I16", 16},    {"U16", 16}, {"I8", 8},   {"U8", 8},
      {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"BOOL", 8}};
  for (const auto& [name, bits] : kBits) {
    if (name == dtype) return bits;
  }
  return std::nullopt;
}

std::string text_of_error(int error) {
  return std::generic_category().message(error);
}

// The header with its length in front; at least `room` bytes in all.
std::string shard_header(json::Object tensors, int64_t room) {
  json::Object metadata, header;
  metadata["format"] = "pt";
  header["__metadata__"] = std::move(metadata);
  for (const auto& [name, entry] : tensors) header[name] = entry;
  std::string text = json::write(json::Value(std::move(header)));
  const auto least = static_cast<size_t>(std::max<int64_t>(room - 8, 0));
  text.resize(std::max((text.size() + 7) / 8 * 8, least), ' ');
  uint64_t size = text.size();
  std::string out;
  for (int i = 0; i < 8; ++i, size >>= 8) out += static_cast<char>(size & 0xff);
  return out + text;
}

// Why an existing output is not replaced; "" if it may be.
std::string not_a_checkpoint(const fs::path& output) {
  std::error_code error;
  if (!fs::is_directory(output, error)) return "it is no folder";
  if (fs::is_empty(output, error)) return "";
  if (!fs::exists(output / "config.json", error)) return "it has no config.json";
  for (const fs::directory_entry& entry : fs::directory_iterator(output, error)) {
    if (entry.is_directory(error) && entry.path().filename() != kTemplates) {
      return fmt::format("it holds the folder '{}', which is none of a checkpoint",
                         entry.path().filename().string());
    }
  }
  return "";
}

bool is_within(const fs::path& path, const fs::path& folder) {
  const auto [end, rest] = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return end == folder.end();
}

Status check_output(const CheckpointOptions& options, const fs::path& output) {
  std::error_code error;
  const fs::path source = fs::weakly_canonical(options.source, error);
  if (!options.source.empty() && (is_within(source, output) || is_within(output, source))) {
    return invalid_argument("the output {} {} the model that is read: choose another folder",
                            options.output, is_within(source, output) ? "holds" : "is inside");
  }
  if (!fs::exists(fs::symlink_status(output, error))) return {};
  const bool empty = fs::is_directory(output, error) && fs::is_empty(output, error);
  if (!options.force && !empty) {
    return invalid_argument("the output {} exists: choose another, or replace it with --force",
                            options.output);
  }
  const std::string why = not_a_checkpoint(output);
  if (why.empty()) return {};
  return invalid_argument("the output {} is not replaced: {}", options.output, why);
}

Result<fs::path> output_path(const CheckpointOptions& options) {
  std::error_code error;
  // weakly_canonical() leaves a relative path of nothing that exists as it is.
  fs::path output = fs::absolute(options.output, error);
  if (!error) output = fs::weakly_canonical(output, error);
  if (options.output.empty() || error) {
    return invalid_argument("the output '{}' is no path of a folder", options.output);
  }
  return output.filename().empty() ? output.parent_path() : output;
}

Status sync_path(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return io_error("cannot open {}: {}", path.string(), text_of_error(errno));
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  // Some file systems do not sync folders.
  if (result == 0 || error == EINVAL) return {};
  return io_error("cannot write {}: {}", path.string(), text_of_error(error));
}

}  // namespace

bool is_copied(std::string_view name) {
  constexpr std::string_view kWeights[] = {".safetensors", ".bin",  ".pt",   ".pth",  ".ckpt",
                                           ".gguf",        ".ggml", ".onnx", ".h5",   ".msgpack",
                                           ".index.json",  ".tar",  ".zip",  ".part", ".dat"};
  constexpr std::string_view kOurs[] = {
      "config.json",          "quantize_config.json",     "quant_config.json",
      "hf_quant_config.json", "quantization_config.json", "recipe.yaml"};
  if (name.starts_with(".") || std::ranges::find(kOurs, name) != std::end(kOurs)) return false;
  return std::ranges::none_of(kWeights, [&](std::string_view w) { return name.ends_with(w); });
}

json::Value config_with(const json::Value& config, json::Value quantization_config,
                        json::Value provenance) {
  json::Object out = config.is_object() ? config.as_object() : json::Object();
  if (json::Value* text = out.find("text_config"); text != nullptr && text->is_object()) {
    text->as_object().erase("quantization_config");
  }
  out.erase("compression_config");
  out["quantization_config"] = std::move(quantization_config);
  out.erase("freshet");
  if (!provenance.is_null()) out["freshet"] = std::move(provenance);
  return json::Value(std::move(out));
}

Status CheckpointWriter::check(const CheckpointOptions& options) {
  FRESHET_ASSIGN_OR_RETURN(const fs::path output, output_path(options));
  return check_output(options, output);
}

Result<std::unique_ptr<CheckpointWriter>> CheckpointWriter::create(
    const CheckpointOptions& options) {
  FRESHET_ASSIGN_OR_RETURN(const fs::path output, output_path(options));
  FRESHET_RETURN_IF_ERROR(check_output(options, output));
  std::error_code error;
  std::unique_ptr<CheckpointWriter> writer(new CheckpointWriter(options));
  writer->options_.output = output.string();
  const std::string folder = fmt::format("{}.{}.partial", output.string(), ::getpid());
  fs::remove_all(folder, error);
  if (!fs::create_directories(folder, error)) {
    return io_error("cannot create {}: {}", folder, error.message());
  }
  writer->folder_ = folder;
  return writer;
}

CheckpointWriter::~CheckpointWriter() {
  if (file_ != nullptr) std::fclose(file_);
  std::error_code error;
  if (!folder_.empty()) fs::remove_all(folder_, error);
}

Status CheckpointWriter::failed(const std::string& path) const {
  return io_error("cannot write {}: {}", path, text_of_error(errno));
}

Status CheckpointWriter::add(const StoredTensor& tensor) {
  return add(tensor.name, tensor.dtype, tensor.shape, tensor.bytes);
}

Status CheckpointWriter::add(const std::string& name, const std::string& dtype,
                             const std::vector<int64_t>& shape, std::span<const uint8_t> bytes) {
  const std::optional<int64_t> bits = bits_of_dtype(dtype), n = loader::checked_product(shape);
  if (!bits || !n || *n * *bits / 8 != std::ssize(bytes)) {
    return internal_error("tensor '{}' of type {} and shape [{}] has {} bytes", name, dtype,
                          fmt::join(shape, ", "), bytes.size());
  }
  if (!names_.insert(name).second) return internal_error("tensor '{}' is written twice", name);
  const auto size = std::ssize(bytes);
  const auto entry = static_cast<int64_t>(name.size()) + 120;
  const bool full = !placed_.empty() || !last_.empty();
  if (full &&
      (data_bytes_ + size > options_.shard_bytes || header_bytes_ + entry > kHeaderRoom - 200)) {
    FRESHET_RETURN_IF_ERROR(end_shard());
  }
  if (file_ == nullptr) FRESHET_RETURN_IF_ERROR(begin_shard());
  header_bytes_ += entry;
  data_bytes_ += size;
  total_bytes_ += size;
  Placed placed{name, dtype, shape, size, {}};
  if (size % 8 != 0) {
    placed.held.assign(bytes.begin(), bytes.end());
    last_.push_back(std::move(placed));
    return {};
  }
  placed_.push_back(std::move(placed));
  return append(bytes);
}

Status CheckpointWriter::begin_shard() {
  path_ = fmt::format("{}/shard-{}", folder_, shards_.size());
  file_ = std::fopen(path_.c_str(), "wbe");
  if (file_ == nullptr) return failed(path_);
  spilled_ = false;
  header_bytes_ = data_bytes_ = 0;
  return {};
}

Status CheckpointWriter::write_out(std::span<const uint8_t> bytes) {
  if (bytes.empty()) return {};
  return std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size() ? Status()
                                                                           : failed(path_);
}

Status CheckpointWriter::append(std::span<const uint8_t> bytes) {
  if (spilled_) return write_out(bytes);
  if (std::ssize(begun_) + std::ssize(bytes) <= kHeldBytes) {
    begun_.insert(begun_.end(), bytes.begin(), bytes.end());
    return {};
  }
  if (std::fseek(file_, static_cast<long>(kHeaderRoom), SEEK_SET) != 0) return failed(path_);
  FRESHET_RETURN_IF_ERROR(write_out(begun_));
  begun_.clear();
  begun_.shrink_to_fit();
  spilled_ = true;
  return write_out(bytes);
}

Status CheckpointWriter::end_shard() {
  // Wider types first: each tensor starts at a multiple of its own size.
  std::ranges::stable_sort(last_, std::greater<>(),
                           [](const Placed& p) { return bits_of_dtype(p.dtype).value_or(8); });
  for (Placed& p : last_) {
    FRESHET_RETURN_IF_ERROR(append(p.held));
    p.held = {};
    placed_.push_back(std::move(p));
  }
  json::Object tensors;
  tensors.reserve(placed_.size());
  std::vector<std::string> names;
  int64_t at = 0;
  for (const Placed& p : placed_) {
    json::Object entry;
    json::Array shape;
    for (const int64_t n : p.shape) shape.emplace_back(n);
    entry["dtype"] = p.dtype;
    entry["shape"] = std::move(shape);
    entry["data_offsets"] = json::Array{at, at + p.bytes};
    at += p.bytes;
    tensors[p.name] = std::move(entry);
    names.push_back(p.name);
  }
  const std::string header = shard_header(std::move(tensors), spilled_ ? kHeaderRoom : 0);
  FRESHET_CHECK(!spilled_ || std::ssize(header) == kHeaderRoom, "the header has {} bytes",
                header.size());
  if (spilled_ && std::fseek(file_, 0, SEEK_SET) != 0) return failed(path_);
  FRESHET_RETURN_IF_ERROR(
      write_out({reinterpret_cast<const uint8_t*>(header.data()), header.size()}));
  if (!spilled_) FRESHET_RETURN_IF_ERROR(write_out(begun_));
  begun_.clear();
  placed_.clear();
  last_.clear();
  shards_.push_back(std::move(names));
  std::FILE* file = std::exchange(file_, nullptr);
  const bool written = std::fflush(file) == 0 && ::fsync(::fileno(file)) == 0;
  const int error = errno;
  const bool closed = std::fclose(file) == 0;
  if (!written) errno = error;
  return written && closed ? Status() : failed(path_);
}

Status CheckpointWriter::name_shards() {
  const size_t count = shards_.size();
  json::Object map;
  for (size_t i = 0; i < count; ++i) {
    const std::string name = count == 1
                                 ? "model.safetensors"
                                 : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count);
    const std::string from = fmt::format("{}/shard-{}", folder_, i);
    if (std::rename(from.c_str(), fmt::format("{}/{}", folder_, name).c_str()) != 0) {
      return failed(from);
    }
    for (const std::string& tensor : shards_[i]) map[tensor] = name;
  }
  if (count == 1) return {};
  json::Object index, metadata;
  metadata["total_size"] = total_bytes_;
  index["metadata"] = std::move(metadata);
  index["weight_map"] = std::move(map);
  return write_json("model.safetensors.index.json", json::Value(std::move(index)));
}

Status CheckpointWriter::write_json(const std::string& name, const json::Value& value) {
  const std::string path = fmt::format("{}/{}", folder_, name);
  std::FILE* file = std::fopen(path.c_str(), "wbe");
  if (file == nullptr) return failed(path);
  const std::string text = json::write(value, {.indent = 2}) + "\n";
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size() &&
                       std::fflush(file) == 0 && ::fsync(::fileno(file)) == 0;
  const int error = errno;
  const bool closed = std::fclose(file) == 0;
  if (!written) errno = error;
  return written && closed ? Status() : failed(path);
}

Status CheckpointWriter::copy_source() {
  if (options_.source.empty()) return {};
  std::error_code error;
  const auto copy = [&](const fs::path& from, const fs::path& to) -> Status {
    if (!fs::copy_file(from, to, fs::copy_options::overwrite_existing, error)) {
      return io_error("cannot copy {} to {}: {}", from.string(), to.string(), error.message());
    }
    // Files of a shared cache may be read-only.
    fs::permissions(to, fs::perms::owner_write, fs::perm_options::add, error);
    return sync_path(to);
  };
  for (const fs::directory_entry& e : fs::directory_iterator(options_.source, error)) {
    const std::string name = e.path().filename().string();
    if (!e.is_regular_file(error) || !is_copied(name)) continue;
    FRESHET_RETURN_IF_ERROR(copy(e.path(), fs::path(folder_) / name));
  }
  const fs::path templates = fs::path(options_.source) / kTemplates;
  if (!fs::is_directory(templates, error)) return {};
  fs::create_directory(fs::path(folder_) / kTemplates, error);
  for (const fs::directory_entry& e : fs::directory_iterator(templates, error)) {
    if (!e.is_regular_file(error)) continue;
    FRESHET_RETURN_IF_ERROR(copy(e.path(), fs::path(folder_) / kTemplates / e.path().filename()));
  }
  return {};
}

Status CheckpointWriter::publish() {
  FRESHET_RETURN_IF_ERROR(sync_path(folder_));
  std::error_code error;
  const std::string& output = options_.output;
  // The state of the output may have changed since create().
  if (fs::exists(output, error)) {
    FRESHET_RETURN_IF_ERROR(check_output(options_, output));
    if (::renameat2(AT_FDCWD, folder_.c_str(), AT_FDCWD, output.c_str(), RENAME_EXCHANGE) == 0) {
      fs::remove_all(std::exchange(folder_, {}), error);
      return sync_path(fs::path(output).parent_path());
    }
    // A file system that cannot exchange: two renames.
    const std::string old = fmt::format("{}.{}.replaced", output, ::getpid());
    if (std::rename(output.c_str(), old.c_str()) != 0) return failed(output);
    if (std::rename(folder_.c_str(), output.c_str()) != 0) {
      const Status status = failed(output);
      fs::rename(old, output, error);
      return status;
    }
    fs::remove_all(old, error);
  } else if (std::rename(folder_.c_str(), output.c_str()) != 0) {
    return failed(output);
  }
  folder_.clear();
  return sync_path(fs::path(output).parent_path());
}

Status CheckpointWriter::finish(const json::Value& config,
                                std::span<const std::pair<std::string, json::Value>> side_files) {
  FRESHET_CHECK(!folder_.empty(), "a CheckpointWriter finishes once");
  if (file_ != nullptr) FRESHET_RETURN_IF_ERROR(end_shard());
  FRESHET_CHECK(!shards_.empty(), "a checkpoint has tensors");
  FRESHET_RETURN_IF_ERROR(name_shards());
  FRESHET_RETURN_IF_ERROR(copy_source());
  FRESHET_RETURN_IF_ERROR(write_json("config.json", config));
  for (const auto& [name, value] : side_files) {
    FRESHET_RETURN_IF_ERROR(write_json(name, value));
  }
  return publish();
}

}  // namespace freshet::quantizer
