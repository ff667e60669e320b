// Reads what a model is to be run on from a .safetensors file.
//
// Input i is the tensors ids_i (whole numbers, [tokens]) and token_type_ids_i, if there; i counts
// from 0 without gaps. Encoder-decoders have decoder_ids_i too; their encoder reads ids_i, or
// input_features_i (F32, [mel_bins, frames]), or audio_i (I16, [samples] at 16 kHz), which counts
// if both are there. Models with a tower have pictures: image_i_k (U8, [height, width, 3]), k from
// 0 without gaps; or pixel_values_i, which takes precedence, in the shape of the model's image
// processor, with image_grid_thw_i or with aspect_ratio_ids_i and aspect_ratio_mask_i if the
// processor gives them. Other tensors are left alone: files of reference outputs can be given as
// they are. Errors name the tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "eval/pictures.h"
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

  std::vector<media::Picture> images;
  eval::PixelValues pixels;  // empty, or what a processor made of the pictures
  bool has_pictures() const { return !images.empty() || !pixels.values.empty(); }
};

Result<std::vector<ModelInput>> read_model_inputs(const std::string& path);
// Makes the features of inputs with audio, as the files in the model's folder say.
Status add_features(std::vector<ModelInput>& inputs, const std::string& folder,
                    const ModelSpec& spec);
// What the engine is asked for an input; without parameters. Pictures are made ready as the model's
// files say.
Result<Request> request_of(const ModelInput& input, const Engine& engine);

}  // namespace freshet::cli
