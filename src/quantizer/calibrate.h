// An importance matrix, and factors of keys and values, from a text: one pass of a model over
// calibration windows.
//
// One part of the model is in memory at a time. Entries have the names of the GGUF file that
// `freshet convert` makes of the model; experts that no token reached have a count of 0. Errors
// name the tensor. One thread.
#pragma once

#include <functional>
#include <string>

#include "quantizer/calibration/part_runner.h"
#include "quantizer/imatrix.h"
#include "quantizer/kv_scale_file.h"
#include "quantizer/working_model.h"

namespace freshet::quantizer {

struct CalibrateOptions {
  size_t memory = size_t{1} << 30;                // of activations; beyond that they are on disk
  std::string folder;                             // for those
  std::string dataset;                            // the text's name
  uint32_t chunk_size = 512;                      // tokens of a window
  std::function<bool(double fraction)> progress;  // returns false to stop; may be empty
  bool matrix = true;  // false: only the factors, for models that have no names in GGUF files, too
};

struct Calibration {
  Imatrix imatrix;
  KvScaleFile kv_scales;  // of the layers with attention
};

Result<Calibration> calibrate(const WorkingModel& working, const Windows& windows,
                              const CalibrateOptions& options);

}  // namespace freshet::quantizer
