// A checkpoint whose tensors change while it is quantised.
//
// Changed tensors are held in memory in their stored type; readers of checkpoint() see them.
// Numbers go in and out as F32. Errors name the tensor. One thread.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "loader/checkpoint.h"
#include "models/parts.h"
#include "models/registry.h"
#include "runtime/compute.h"

namespace freshet::quantizer {

class WorkingModel {
 public:
  // Fails where a weight is quantised already, or is a NaN or an infinity once it is read.
  static Result<std::unique_ptr<WorkingModel>> open(const std::string& path,
                                                    std::shared_ptr<runtime::Compute> compute);

  const loader::Checkpoint& checkpoint() const { return checkpoint_; }
  const models::Description& model() const { return model_; }
  const models::WeightReader& reader() const { return *reader_; }
  const std::shared_ptr<runtime::Compute>& compute() const { return compute_; }
  std::string dtype() const;  // config.json's: what the model computes in

  // What is quantised at a time, in order: matrices that layers share, and the parts that run.
  std::vector<models::Part> parts() const;
  // The linear layers of a part.
  Result<std::vector<models::LinearTensor>> linears(const models::Part& part) const;
  // The numbers of a matrix, [rows, cols].
  Result<std::vector<float>> read(const models::LinearTensor& linear) const;
  // Replaces one matrix of a tensor.
  Status write(const models::LinearTensor& linear, std::span<const float> values);
  // The same for a whole tensor of any shape, in stored order.
  Result<std::vector<float>> read_all(const std::string& name) const;
  Status write_all(const std::string& name, std::span<const float> values);
  // Gives back the memory of a changed tensor; readers see the file again.
  void restore(const std::string& name);

 private:
  WorkingModel(loader::Checkpoint checkpoint, models::Description model,
               std::shared_ptr<runtime::Compute> compute);
  struct Changed {
    loader::TensorSource original;
    Buffer values;
  };
  Result<Changed*> change(const std::string& name);
  Status check_shared(const models::Part& part,
                      const std::vector<models::LinearTensor>& linears) const;

  loader::Checkpoint checkpoint_;
  models::Description model_;
  std::shared_ptr<runtime::Compute> compute_;
  Progress no_progress_;
  std::unique_ptr<models::WeightReader> reader_;
  std::map<std::string, Changed> changed_;
};

// What a reader of the output computes from a stored matrix: rows decoded, columns in the order of
// the inputs.
std::vector<float> decode_rows(const models::Rows& rows, ThreadPool& pool);

}  // namespace freshet::quantizer
