#include "cli/model_inputs.h"

#include <algorithm>
#include <cstring>

#include "engine/picture_text.h"
#include "loader/safetensors.h"
#include "speech/speech_model.h"

namespace freshet::cli {
namespace {

template <class T>
int64_t whole_at(const uint8_t* data, int64_t i) {
  T value;
  std::memcpy(&value, data + static_cast<size_t>(i) * sizeof(T), sizeof(T));
  return int64_t{value};
}

Result<std::vector<int32_t>> whole_numbers(const loader::TensorSource& t) {
  if ((t.dtype != "I64" && t.dtype != "I32") || t.shape.size() != 1)
    return invalid_argument("tensor '{}' must be a list of whole numbers (I64 or I32)", t.name);
  std::vector<int32_t> out;
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    const int64_t v =
        t.dtype == "I64" ? whole_at<int64_t>(t.data, i) : whole_at<int32_t>(t.data, i);
    if (v < 0 || v > INT32_MAX)
      return invalid_argument("tensor '{}': {} is not a token id", t.name, v);
    out.push_back(static_cast<int32_t>(v));
  }
  return out;
}

// Numbers of any shape, of a processor's table.
Result<std::vector<int64_t>> table_of(const loader::TensorSource& t) {
  if (t.dtype != "I64" && t.dtype != "I32")
    return invalid_argument("tensor '{}' must have whole numbers (I64 or I32)", t.name);
  std::vector<int64_t> out;
  for (int64_t i = 0; i < t.elements(); ++i)
    out.push_back(t.dtype == "I64" ? whole_at<int64_t>(t.data, i) : whole_at<int32_t>(t.data, i));
  return out;
}

Status read_images(const loader::SafetensorsFile& file, size_t i, ModelInput& input) {
  constexpr int64_t kMostSide = 1 << 15;
  while (const auto* t = file.find(fmt::format("image_{}_{}", i, input.images.size()))) {
    if (t->dtype != "U8" || t->shape.size() != 3 || t->shape[2] != 3 || t->elements() == 0 ||
        t->shape[0] > kMostSide || t->shape[1] > kMostSide) {
      return invalid_argument("tensor '{}' must be U8 [height, width, 3] of at most {} on a side",
                              t->name, kMostSide);
    }
    media::Picture picture(static_cast<int>(t->shape[1]), static_cast<int>(t->shape[0]));
    std::memcpy(picture.rgb.data(), t->data, t->bytes);
    input.images.push_back(std::move(picture));
  }
  return {};
}

Status read_pixels(const loader::SafetensorsFile& file, size_t i, eval::PixelValues& out) {
  const auto* const t = file.find(fmt::format("pixel_values_{}", i));
  if (t == nullptr) return {};
  if (t->dtype != "F32" || t->elements() == 0)
    return invalid_argument("tensor '{}' must be F32, and not empty", t->name);
  out.shape = t->shape;
  out.values.resize(static_cast<size_t>(t->elements()));
  std::memcpy(out.values.data(), t->data, t->bytes);
  for (const auto& [name, table] : {std::pair{"image_grid_thw", &out.grid_thw},
                                    std::pair{"aspect_ratio_ids", &out.aspect_ratio_ids},
                                    std::pair{"aspect_ratio_mask", &out.aspect_ratio_mask}}) {
    const auto* const found = file.find(fmt::format("{}_{}", name, i));
    if (found == nullptr) continue;
    FRESHET_ASSIGN_OR_RETURN(*table, table_of(*found));
  }
  return {};
}

Status read_features(const loader::TensorSource& t, ModelInput& input) {
  if (t.dtype != "F32" || t.shape.size() != 2)
    return invalid_argument("tensor '{}' must be F32 [mel_bins, frames]", t.name);
  input.mel_bins = t.shape[0];
  input.frames = t.shape[1];
  input.features.resize(static_cast<size_t>(t.elements()));
  std::memcpy(input.features.data(), t.data, t.bytes);
  return {};
}

Status read_audio(const loader::TensorSource& t, ModelInput& input) {
  if (t.dtype != "I16" || t.shape.size() != 1 || t.shape[0] < 1)
    return invalid_argument("tensor '{}' must be I16 [samples], at 16 kHz", t.name);
  for (int64_t i = 0; i < t.shape[0]; ++i)
    input.audio.push_back(static_cast<float>(whole_at<int16_t>(t.data, i)) / 32768.0f);
  return {};
}

// Input `i`; whether there is one.
Result<bool> read_input(const loader::SafetensorsFile& file, size_t i, ModelInput& input) {
  const auto find = [&](const char* name) { return file.find(fmt::format("{}_{}", name, i)); };
  const loader::TensorSource* const ids = find("ids");
  const loader::TensorSource* const features = find("input_features");
  const loader::TensorSource* const audio = find("audio");
  const loader::TensorSource* const decoder = find("decoder_ids");
  if (ids == nullptr && features == nullptr && audio == nullptr) return false;
  if (ids != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(input.ids, whole_numbers(*ids));
    if (input.ids.empty()) return invalid_argument("tensor '{}' is empty", ids->name);
  }
  if (const loader::TensorSource* const types = find("token_type_ids")) {
    FRESHET_ASSIGN_OR_RETURN(input.token_type_ids, whole_numbers(*types));
    if (input.token_type_ids.size() != input.ids.size()) {
      return invalid_argument("'{}' has {} numbers for {} ids", types->name,
                              input.token_type_ids.size(), input.ids.size());
    }
  }
  if (audio != nullptr) {
    FRESHET_RETURN_IF_ERROR(read_audio(*audio, input));
  } else if (features != nullptr) {
    FRESHET_RETURN_IF_ERROR(read_features(*features, input));
  }
  FRESHET_RETURN_IF_ERROR(read_images(file, i, input));
  FRESHET_RETURN_IF_ERROR(read_pixels(file, i, input.pixels));
  if (decoder == nullptr) {
    if (ids == nullptr) return invalid_argument("there is no tensor 'decoder_ids_{}'", i);
    return true;
  }
  input.encoder_ids = std::move(input.ids);
  FRESHET_ASSIGN_OR_RETURN(input.ids, whole_numbers(*decoder));
  if (input.ids.empty()) return invalid_argument("tensor '{}' is empty", decoder->name);
  return true;
}

}  // namespace

Result<std::vector<ModelInput>> read_model_inputs(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(const auto file, loader::SafetensorsFile::open(path));
  std::vector<ModelInput> inputs;
  while (true) {
    ModelInput input;
    const auto found = read_input(file, inputs.size(), input);
    if (!found.ok()) return found.status().with_context(path);
    if (!*found) break;
    inputs.push_back(std::move(input));
  }
  if (inputs.empty()) return invalid_argument("{}: there is no tensor 'ids_0'", path);
  return inputs;
}

Status add_features(std::vector<ModelInput>& inputs, const std::string& folder,
                    const ModelSpec& spec) {
  const auto heard = [](const ModelInput& input) { return !input.audio.empty(); };
  if (std::ranges::none_of(inputs, heard)) return {};
  if (spec.encoder == nullptr || !spec.encoder->stem)
    return invalid_argument("there is audio, and the model reads no sound");
  FRESHET_ASSIGN_OR_RETURN(const media::MelSettings settings,
                           speech::read_mel_settings(folder, spec));
  if (settings.rate != 16000)
    return unsupported("audio is given at 16 kHz, and the model hears {} Hz", settings.rate);
  const media::LogMel mel(settings);
  for (ModelInput& input : inputs) {
    if (!heard(input)) continue;
    if (std::ssize(input.audio) > settings.samples) {
      return invalid_argument("audio of {} samples: the model hears {} at once", input.audio.size(),
                              settings.samples);
    }
    input.features = mel.features(input.audio);
    input.mel_bins = settings.mels;
    input.frames = settings.frames();
  }
  return {};
}

Result<Request> request_of(const ModelInput& input, const Engine& engine) {
  Request request;
  if (input.has_pictures()) {
    const PictureReading* const reading = engine.pictures();
    if (reading == nullptr) return invalid_argument("pictures, but the model reads none here");
    if (input.images.empty()) return invalid_argument("pixel_values alone: give image_i_k");
    FRESHET_ASSIGN_OR_RETURN(
        std::vector<media::ImageInput> pictures,
        eval::process_pictures(input.images, reading->settings, *engine.model().spec().vision));
    for (media::ImageInput& picture : pictures)
      request.pictures.push_back(std::make_shared<const media::ImageInput>(std::move(picture)));
  }

  request.prompt = input.ids;
  request.token_type_ids = input.token_type_ids;
  request.encoder_ids = input.encoder_ids;
  request.features = input.features;
  request.frames = input.frames;
  return request;
}

}  // namespace freshet::cli
