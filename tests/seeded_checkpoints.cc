// Writes the checkpoints of tests/data/golden and tests/data/seeded, whose weights are a formula.
//
// usage: seeded_checkpoints FROM TO [EXACT]
//
// FROM/<name>/ holds config.json, golden.safetensors (what transformers computes with the weights)
// and weights.json, an object of tensors: "name": [[shape], scale, offset]. TO/<name>/ gets all
// files but the last, and model.safetensors with BF16 tensors; EXACT the same in F32.
// tools/golden_seeded.py makes FROM and has the same formula: number i of a tensor is offset +
// scale * u, rounded to BF16, where u in
// [-1, 1) is made of the upper 24 bits of splitmix64(FNV-1a of the name + i).
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/json.h"
#include "tensor/dtype.h"

namespace freshet {
namespace {

namespace fs = std::filesystem;

uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t hash_of(const std::string& name) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return h;
}

// exact: the same numbers in F32, which a GPU multiplies in F32.
void write_checkpoint(const fs::path& from, const fs::path& to, bool exact) {
  std::stringstream text;
  text << std::ifstream(from / "weights.json").rdbuf();
  const Result<json::Value> tensors = json::parse(text.str());
  FRESHET_CHECK(tensors.ok(), "{}: {}", from.string(), tensors.status().message());
  json::Object header;
  std::string data;
  for (const auto& [name, described] : tensors->as_object()) {
    const json::Array& parts = described.as_array();
    int64_t numbers = 1;
    for (const json::Value& size : parts[0].as_array()) numbers *= size.as_int64().value();
    const double scale = parts[1].as_double(), offset = parts[2].as_double();
    const size_t start = data.size();
    for (int64_t i = 0; i < numbers; ++i) {
      const uint64_t bits = mixed(hash_of(name) + static_cast<uint64_t>(i)) >> 40;
      const double u = static_cast<double>(bits) / 8388608.0 - 1.0;
      const uint16_t number = f32_to_bf16(static_cast<float>(offset + scale * u));
      const float same = bf16_to_f32(number);
      if (exact) {
        data.append(reinterpret_cast<const char*>(&same), sizeof same);
      } else {
        data.append(reinterpret_cast<const char*>(&number), sizeof number);
      }
    }
    json::Object entry;
    entry["dtype"] = exact ? "F32" : "BF16";
    entry["shape"] = parts[0];
    entry["data_offsets"] = json::Array{start, data.size()};
    header[name] = std::move(entry);
  }
  std::string written = json::write(header);
  written.resize((written.size() + 7) / 8 * 8, ' ');
  const uint64_t length = written.size();
  fs::create_directories(to);
  for (const auto& file : fs::directory_iterator(from)) {
    if (file.path().filename() == "weights.json") continue;
    fs::copy_file(file.path(), to / file.path().filename(), fs::copy_options::overwrite_existing);
  }
  std::ofstream out(to / "model.safetensors", std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out.write(written.data(), static_cast<std::streamsize>(written.size()));
  out.write(data.data(), static_cast<std::streamsize>(data.size()));
  out.close();
  FRESHET_CHECK(out.good(), "cannot write {}", to.string());
}

}  // namespace
}  // namespace freshet

int main(int argc, char** argv) {
  FRESHET_CHECK(argc == 3 || argc == 4, "usage: seeded_checkpoints FROM TO [EXACT]");
  namespace fs = std::filesystem;
  for (int i = 2; i < argc; ++i) {
    const fs::path to = argv[i];
    fs::remove_all(to);
    fs::create_directories(to);
    for (const auto& entry : fs::directory_iterator(argv[1])) {
      if (!entry.is_directory()) continue;
      freshet::write_checkpoint(entry.path(), to / entry.path().filename(), i == 3);
    }
  }
  return 0;
}
