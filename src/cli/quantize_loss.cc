#include "cli/quantize_loss.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "base/json.h"
#include "base/mapped_file.h"
#include "base/whole_file.h"
#include "cli/eval_texts.h"
#include "runtime/compute.h"

namespace freshet::cli {
namespace {

constexpr const char* kLossKeys[] = {"delta_nats_per_token", "standard_error", "kl_divergence",
                                     "top1_agreement"};
constexpr std::string_view kPrefix = "freshet.quantization.";

double loss_value(const eval::ModelComparison& loss, size_t key) {
  const double values[] = {loss.delta.mean, loss.delta.standard_error, loss.kl.mean,
                           loss.top1_agreement};
  return values[key];
}

Status cannot_write(const std::string& path) {
  return resource_exhausted("cannot write {}: {}", path, std::strerror(errno));
}

// Overwrites the F32 values that follow the keys in the head of a GGUF file.
Status patch_gguf(const std::string& path, const eval::ModelComparison& loss) {
  std::vector<std::pair<long, float>> places;
  {
    FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
    const std::string_view bytes(reinterpret_cast<const char*>(file.bytes().data()),
                                 file.bytes().size());
    for (size_t k = 0; k < std::size(kLossKeys); ++k) {
      const std::string key = std::string(kPrefix) + kLossKeys[k];
      const size_t at = bytes.find(key);
      if (at == std::string_view::npos) return internal_error("{} lacks {}", path, key);
      places.emplace_back(static_cast<long>(at + key.size() + sizeof(uint32_t)),
                          static_cast<float>(loss_value(loss, k)));
    }
  }
  const auto close = [](std::FILE* f) { std::fclose(f); };
  std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "r+b"), close);
  if (file == nullptr) return cannot_write(path);
  for (const auto& [at, value] : places) {
    if (std::fseek(file.get(), at, SEEK_SET) != 0 ||
        std::fwrite(&value, sizeof value, 1, file.get()) != 1)
      return cannot_write(path);
  }
  return std::fclose(file.release()) == 0 ? Status() : cannot_write(path);
}

Status patch_config(const std::string& folder, const eval::ModelComparison& loss) {
  const std::string path = folder + "/config.json";
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  FRESHET_ASSIGN_OR_RETURN(
      json::Value config,
      json::parse({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()}));
  json::Value& record = config.as_object()["freshet"];
  if (!record.is_object()) record = json::Value(json::Object());
  for (size_t k = 0; k < std::size(kLossKeys); ++k)
    record.as_object()[kLossKeys[k]] = loss_value(loss, k);
  record.as_object()["evaluation_tokens"] = loss.tokens;
  record.as_object()["evaluation_windows"] = loss.fingerprint;
  return write_whole_file(path, json::write(config, {.indent = 2}) + "\n");
}

}  // namespace

Result<eval::ModelComparison> measure_loss(const std::string& base, const std::string& output,
                                           const std::vector<std::string>& texts, int threads,
                                           Context& context) {
  eval::Comparer::Options e;
  FRESHET_ASSIGN_OR_RETURN(e.texts, read_texts(texts, 0));
  e.base.model = base;
  e.base.device = "cpu";
  e.base.threads = threads;
  FRESHET_ASSIGN_OR_RETURN(eval::Comparer comparer, eval::Comparer::make(std::move(e)));
  ProgressLine progress;
  eval::SessionOptions model;
  model.model = output;
  auto loss = comparer.compare_with(model, output, [&](double fraction) {
    progress.update("measuring the loss", fraction);
    return !context.interrupts.requested();
  });
  progress.clear();
  return loss;
}

std::vector<std::pair<std::string, std::string>> unmeasured_loss() {
  std::vector<std::pair<std::string, std::string>> out;
  for (const char* key : kLossKeys) out.emplace_back(std::string(kPrefix) + key, "0.0");
  return out;
}

Status record_loss(const std::string& output, bool gguf, const eval::ModelComparison& loss) {
  return gguf ? patch_gguf(output, loss) : patch_config(output, loss);
}

}  // namespace freshet::cli
