// Reads what a model is to be run on from a .safetensors file.
//
// Input i is the tensors ids_i (whole numbers, [tokens]) and token_type_ids_i, if there; i counts
// from 0 without gaps. Encoder-decoders have decoder_ids_i too; their encoder reads ids_i, or
// input_features_i (F32, [mel_bins, frames]), or audio_i (I16, [samples] at 16 kHz), which counts
// if both are there. Other tensors are left alone: files of reference outputs can be given as they
// are. Errors name the tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "freshet/engine.h"
#include "layers/spec.h"

namespace freshet::cli {

struct ModelInput {
  std::vector<int32_t> ids;             // that the model reads: the decoder's, if it has two sides
  std::vector<int32_t> token_type_ids;  // empty, or one for each id
  std::vector<int32_t> encoder_ids;
  std::vector<float> features;  // [mel_bins, frames]
  int64_t mel_bins = 0, frames = 0;
  std::vector<float> audio;  // samples, if the features are still to be made
};

Result<std::vector<ModelInput>> read_model_inputs(const std::string& path);
// Makes the features of inputs with audio, as the files in the model's folder say.
Status add_features(std::vector<ModelInput>& inputs, const std::string& folder,
                    const ModelSpec& spec);
// What the engine is asked for an input; without parameters.
Request request_of(const ModelInput& input);

}  // namespace freshet::cli
