// One run of quantize(): its state, for the files that implement it.
//
// quantize.cc has the order of the work, quantize_part.cc what happens to the matrices of a part,
// quantize_experts.cc what is different for those of experts, channel_scales.cc what AWQ and
// SmoothQuant do to them first, quantize_output.cc how the results become a checkpoint. One thread.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "quantizer/part_results.h"
#include "quantizer/quantize.h"
#include "tokenizer/regex.h"

namespace freshet::quantizer {

// "model.layers.0.mlp.down_proj" of its weight's name.
std::string module_name(const std::string& tensor);
json::Value record_of(const QuantizedLinear& linear);

class QuantizeJob {
 public:
  QuantizeJob(WorkingModel& working, const QuantizeOptions& options);

  Status prepare();
  Status check_shapes() const;
  Status run_parts();
  Status write_output();
  Status verify();
  void remove_partial() { results_->remove(); }
  ModelFacts facts() const;
  QuantizeReport take_report();

 private:
  // The scales of input channels of the matrices of a part (AWQ, SmoothQuant): columns are
  // multiplied by them, rows divided. Empty: ones.
  struct ChannelScales {
    std::vector<float> columns, rows;
  };
  // How a GGUF file holds a matrix, where not as its source.
  struct FileForm {
    std::vector<float> factors;    // of the source's rows; empty: ones
    std::vector<int64_t> columns;  // as Planned's
  };
  struct Work {  // a matrix on its way
    models::LinearTensor tensor;
    std::vector<Target> targets;
    InputStats* stats = nullptr;  // its gram matrix goes to the last that reads it
    ChannelScales scales;
    float tensor_max = 0.0f;             // MethodOptions::tensor_max
    std::string note;                    // for the report
    std::vector<QuantizedLinear> lines;  // of the report: one for each target
    const InputStats* own = nullptr;     // `stats` before experts share theirs
  };

  std::string key() const;
  std::string hash_of(const Imatrix& imatrix) const;
  Status weigh_target();
  std::vector<Target> targets(const models::LinearTensor& t) const;
  ExportOptions export_options() const;
  // Whether the part keeps keys and values that an FP8 cache may have factors for.
  bool has_kv_scales(const models::Part& part) const;
  bool reads_text() const;  // whether calibration windows run through the model
  bool stopped(double fraction) const;
  Status check_norms() const;
  Status check_joined(const std::vector<models::LinearTensor>& linears) const;
  Result<std::unique_ptr<PartRunner>> new_runner();
  Status run_part(int index, bool streams_needed);
  Status restore_part(int index, const std::vector<models::LinearTensor>& linears,
                      bool streams_needed);

  // quantize_part.cc
  Status quantise_part(int index, const models::Part& part,
                       const std::vector<models::LinearTensor>& linears);
  // Leaves out what is done already.
  Status quantise_work(std::vector<Work>& work, std::vector<bool>& done,
                       std::vector<StoredTensor>& stored);
  // `stats`: of the inputs, scaled; nullptr: unknown.
  Status quantise_matrix(Work& w, const Inputs& inputs, const InputStats* stats,
                         std::vector<StoredTensor>& stored);
  InputStats stats_for(size_t index, std::vector<Work>& work, const std::vector<bool>& done) const;
  const FileForm& form_of(const models::LinearTensor& t) const;
  void add_given_statistics(std::vector<Work>& work);
  Status share_tensor_scales(std::vector<Work>& work);
  Status apply_part(const PartResults::Part& part,
                    const std::vector<models::LinearTensor>& linears);

  Status apply_changes(const PartResults::Part& part);

  // quantize_experts.cc
  void share_experts(std::vector<Work>& work);
  bool takes_passes(const std::vector<Work>& work) const;
  Status quantise_in_passes(const models::Part& part, std::vector<Work>& work,
                            const InputCollector& seen, std::vector<StoredTensor>& stored);

  // channel_scales.cc
  Status scale_channels(const models::Part& part, const std::vector<models::LinearTensor>& linears,
                        std::vector<Work>& work, const PartRunner::Collected& collected,
                        std::vector<StoredTensor>& stored);
  Status scale_norm(const models::Part& part, int branch,
                    const std::vector<models::LinearTensor>& linears, std::vector<Work>& work,
                    const PartRunner::Collected& collected);
  Status scale_maker(Work& reader, std::vector<Work>& work);
  Status scale_state_norm(Work& reader);
  Result<std::vector<float>> search_scales(const std::vector<const Work*>& readers,
                                           const InputStats& stats);
  Status divide_norm(const BranchSpec& branch, models::Role role, int layer,
                     std::vector<float>& scales);
  Status divide_vector(const std::string& name, const std::vector<float>& scales, size_t first);
  Status multiply_columns(const std::string& name, const std::vector<float>& scales);
  Status change_tensor(const std::string& name, std::span<const float> values);

  // quantize_output.cc
  Status read_parts();
  Status write_gguf();
  Status write_container();
  std::vector<std::string> unquantised() const;
  std::vector<StoredTensor> kv_scale_tensors() const;
  json::Object provenance() const;
  Status verify_gguf(const loader::Checkpoint& checkpoint);
  Status verify_container(const loader::Checkpoint& checkpoint);

  WorkingModel& working_;
  const QuantizeOptions& options_;
  std::vector<models::Part> parts_;
  std::map<std::string, std::vector<quant::Format>> formats_;  // GGUF: by source tensor
  std::map<std::string, std::string> gguf_names_;              // by source tensor
  std::map<std::string, FileForm> forms_;                      // by source tensor
  std::vector<std::shared_ptr<const tokenizer::Regex>> ignored_;
  // Containers: the part and the matrix by tensor.
  std::map<std::string, std::pair<int, models::LinearTensor>> places_;
  std::vector<PartResults::Part> finished_;
  std::optional<PartResults> results_;
  std::unique_ptr<PartRunner> runner_;
  std::optional<GgufPlan> plan_;
  std::optional<Imatrix> measured_;                  // for the choice of formats
  std::optional<TensorLosses> losses_;               // the same
  std::optional<Importance> given_;                  // of options_.imatrix
  std::vector<std::unique_ptr<InputStats>> pooled_;  // of the experts of the part
  std::vector<InputStats> given_stats_;              // of the part
  std::vector<std::string> changed_;                 // tensors of the part besides its matrices
  bool in_passes_ = false;                           // the part: its experts have moments by turns
  std::map<models::Role, float> input_max_;  // of the part: the largest input of each kind of layer
  double fraction_ = 0.0;
  QuantizeReport report_;
};

// Whether the norm in front of a branch may be divided by scales of channels.
bool takes_scales(const BranchSpec& branch);

// The factors of keys and of values of a part, in its file.
inline constexpr char kKvScales[] = "kv_scales";
void store_kv_scales(const InputCollector& seen, std::vector<StoredTensor>& out);

// A matrix as a part's file holds it, and back. `name`: of the tensor, with the expert and the
// format where there are several.
std::string stored_name(const models::LinearTensor& t, const Target& target);
void store_matrix(const std::string& name, const QuantisedMatrix& matrix,
                  std::vector<StoredTensor>& out);
Result<QuantisedMatrix> load_matrix(const std::string& name, const models::LinearTensor& t,
                                    const Target& target, const loader::SafetensorsFile& file);

}  // namespace freshet::quantizer
