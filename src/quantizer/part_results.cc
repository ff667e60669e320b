#include "quantizer/part_results.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/whole_file.h"
#include "quantizer/stored_file.h"

namespace freshet::quantizer {
namespace {

namespace fs = std::filesystem;

}  // namespace

Result<PartResults> PartResults::open(const std::string& folder, const std::string& key) {
  PartResults results(folder);
  const std::string key_path = folder + "/key";
  std::ifstream in(key_path, std::ios::binary);
  const std::string kept((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (in && kept == key) return results;
  std::error_code error;
  fs::remove_all(folder, error);
  if (!fs::create_directories(folder, error))
    return invalid_argument("cannot create {}: {}", folder, error.message());
  FRESHET_RETURN_IF_ERROR(write_whole_file(key_path, key, Durable::kNo));
  return results;
}

std::string PartResults::path_of(int part) const {
  return fmt::format("{}/part-{:05}.safetensors", folder_, part);
}

bool PartResults::has(int part) const {
  std::error_code error;
  return fs::exists(path_of(part), error);
}

Status PartResults::write(int part, std::span<const StoredTensor> tensors,
                          const json::Value& record) {
  json::Object metadata;
  metadata["record"] = json::write(record);
  return write_tensors(path_of(part), tensors, std::move(metadata));
}

Result<PartResults::Part> PartResults::read(int part) const {
  FRESHET_ASSIGN_OR_RETURN(loader::SafetensorsFile file,
                           loader::SafetensorsFile::open(path_of(part)));
  const auto record = file.metadata().find("record");
  if (record == file.metadata().end())
    return invalid_argument("{} has no record: delete {}", path_of(part), folder_);
  FRESHET_ASSIGN_OR_RETURN(json::Value value, json::parse(record->second));
  return Part{std::move(file), std::move(value)};
}

void PartResults::remove() {
  std::error_code error;
  fs::remove_all(folder_, error);
}

}  // namespace freshet::quantizer
