// What an interrupted quantisation has finished: a folder with a file for each part of the model.
//
// A file is there whole or not at all. A key in the folder says what they are results of; with
// another key, everything in it is deleted. Errors name the file. One thread.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "loader/safetensors.h"
#include "quantizer/containers/container.h"

namespace freshet::quantizer {

class PartResults {
 public:
  // `key`: everything that results depend on.
  static Result<PartResults> open(const std::string& folder, const std::string& key);

  const std::string& folder() const { return folder_; }
  bool has(int part) const;
  // `record`: what the report needs of the part.
  Status write(int part, std::span<const StoredTensor> tensors, const json::Value& record);
  struct Part {
    loader::SafetensorsFile file;
    json::Value record;
  };
  Result<Part> read(int part) const;
  // Deletes the folder.
  void remove();

 private:
  explicit PartResults(std::string folder) : folder_(std::move(folder)) {}
  std::string path_of(int part) const;
  std::string folder_;
};

}  // namespace freshet::quantizer
