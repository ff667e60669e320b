// Quantises a model: part by part, with statistics of the parts before as they will be served.
//
// One part of the model is in memory at a time (models/parts.h). Calibration windows run through
// the quantised parts, so that each part makes up for the errors of those before it. Results of a
// part are kept in OUTPUT.partial; a run that was stopped continues there, with the same result.
// The output replaces nothing until it is whole. The result depends on the model, the options and
// the windows only, not on the number of threads. Errors name the tensor, the file or the option.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "quantizer/calibration/part_runner.h"
#include "quantizer/containers/container.h"
#include "quantizer/gguf_export.h"
#include "quantizer/imatrix.h"
#include "quantizer/method_set.h"
#include "quantizer/methods/methods.h"
#include "quantizer/working_model.h"

namespace freshet::quantizer {

// Where calibration windows come from, for the record in the output.
struct CalibrationText {
  Windows windows;
  std::string name;
  std::string hash;  // of the token ids
};

struct QuantizeOptions {
  std::string output;
  // One of the two: a GGUF file by its recipe, or a folder of a container.
  const Recipe* recipe = nullptr;
  const RecipeOverrides* overrides = nullptr;  // with a recipe
  SizeTarget target;                           // with a recipe
  const Container* container = nullptr;
  Scheme scheme;
  bool kv_scales = false;           // with a container: factors of keys and values for an FP8 cache
  std::vector<std::string> ignore;  // regular expressions of modules that stay as they are

  MethodSet method;
  CalibrationText calibration;       // read if the method needs it
  const Imatrix* imatrix = nullptr;  // given statistics, by GGUF names
  size_t memory = size_t{1} << 30;   // of activations; beyond that they are on disk
  ops::Device* device = nullptr;     // sums up second moments, with the processor's bits
  bool force = false;                // replaces the output if it exists
  std::string name;                  // of the model, in a GGUF file
  std::string producer;              // "freshet 0.1.0"
  // Further metadata of a GGUF file: key, and a value written as JSON.
  std::vector<std::pair<std::string, std::string>> metadata;
  // Returns false to stop. May be empty.
  std::function<bool(const std::string& stage, double fraction)> progress;
  std::function<void(const std::string& line)> note;  // must be set
};

// One line of the report for each linear layer.
struct QuantizedLinear {
  std::string tensor;
  int expert = -1;
  std::string format;
  int64_t rows = 0, cols = 0;
  int64_t tokens = 0;  // that its statistics are from; 0: none
  int64_t outlier_columns = 0;
  LinearReport report;
};

struct QuantizeReport {
  std::vector<QuantizedLinear> linears;
  int64_t resumed = 0;  // parts that an earlier run had finished
  size_t bytes = 0;     // of the output
  // The mean of the linears' relative errors of their outputs.
  double mean_relative_error = 0.0;
};

Result<QuantizeReport> quantize(WorkingModel& working, const QuantizeOptions& options);

// Which engines will load the output, one line each. Needs only shapes.
Result<std::vector<std::string>> loaders_of(WorkingModel& working, const QuantizeOptions& options);

}  // namespace freshet::quantizer
