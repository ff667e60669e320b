// A fixture that loads golden models after changes to their tensors and configuration.
#pragma once

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/log.h"
#include "layers/model.h"
#include "loader/safetensors.h"
#include "ops/kernel_table.h"

namespace freshet {

struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using Tensors = std::map<std::string, Tensor>;

// A name, or the path of another folder.
inline std::string golden(const std::string& name) {
  const bool path = name.starts_with('/');
  return (path ? "" : FRESHET_UNPACKED_DATA "/golden/") + name;
}

inline Tensors read_tensors(const std::string& name) {
  auto file = loader::SafetensorsFile::open(golden(name) + "/model.safetensors");
  FRESHET_CHECK(file.ok(), "{}", file.status().message());
  Tensors tensors;
  for (const loader::TensorSource& t : file->tensors()) {
    tensors[t.name] = {t.dtype, t.shape,
                       std::string(reinterpret_cast<const char*>(t.data), t.bytes)};
  }
  return tensors;
}

inline void write_tensors(const std::string& path, const Tensors& tensors) {
  json::Object header;
  std::string data;
  for (const auto& [name, t] : tensors) {
    json::Array shape;
    for (const int64_t d : t.shape) shape.emplace_back(d);
    json::Object entry;
    entry["dtype"] = json::Value(t.dtype);
    entry["shape"] = json::Value(std::move(shape));
    entry["data_offsets"] = json::Value(json::Array{data.size(), data.size() + t.bytes.size()});
    header[name] = json::Value(std::move(entry));
    data += t.bytes;
  }
  const std::string text = json::write(json::Value(std::move(header)));
  const uint64_t length = text.size();
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << text << data;
}

class Load : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              fmt::format("freshet-load-{}-{}", ::testing::UnitTest::GetInstance()->random_seed(),
                          static_cast<const void*>(this));
    std::filesystem::create_directories(folder_);
    auto made = ops::Ops::create(pool_, ops::reference_kernels(), {}, {.reference = true});
    ASSERT_TRUE(made.ok());
    ops_ = std::move(*made);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Loads golden model `name` after `change` to its tensors and configuration.
  Result<std::unique_ptr<Model>> load(const std::string& name,
                                      const std::function<void(Tensors&, json::Object&)>& change) {
    Tensors tensors = read_tensors(name);
    auto config = json::parse_file(golden(name) + "/config.json");
    change(tensors, config->as_object());
    write_tensors((folder_ / "model.safetensors").string(), tensors);
    std::ofstream(folder_ / "config.json") << json::write(*config);
    FRESHET_ASSIGN_OR_RETURN(const loader::Checkpoint checkpoint,
                             loader::Checkpoint::open(folder_.string()));
    FRESHET_ASSIGN_OR_RETURN(auto model, load_model(checkpoint, *ops_, {}));
    expect_same_from_cache(checkpoint, *model);
    return model;
  }

  // Packed weights in a file are the model, too: as it is written, and at the next start.
  void expect_same_from_cache(const loader::Checkpoint& checkpoint, Model& model) {
    const std::vector<float> want = first_logits(model);
    for (const char* told : {"written", "mapped"}) {
      std::string log;
      set_log_sink(LogLevel::kInfo, [&](LogLevel, std::string_view line) { log += line; });
      auto cached = load_model(checkpoint, *ops_, {}, (folder_ / "cache").string());
      set_log_sink(LogLevel::kOff, {});
      ASSERT_TRUE(cached.ok()) << cached.status().message();
      EXPECT_NE(log.find(fmt::format("packed weights are {}", told)), std::string::npos) << log;
      EXPECT_NE(log.find("packed weights are mapped"), std::string::npos) << log;
      EXPECT_EQ(first_logits(**cached), want);
    }
    std::filesystem::remove_all(folder_ / "cache");
  }

  void expect_error(const std::string& name,
                    const std::function<void(Tensors&, json::Object&)>& change,
                    std::initializer_list<const char*> parts) {
    const auto model = load(name, change);
    ASSERT_FALSE(model.ok());
    const std::string message = model.status().message();
    for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }

  // Logits of one token at position 0.
  static std::vector<float> first_logits(Model& model) {
    const KvCacheSpec spec = kv_cache_spec(model.spec(), ops::KvType::kF32);
    auto cache = KvStorage::allocate(spec, std::vector<int32_t>(spec.groups.size(), 1));
    FRESHET_CHECK(cache.ok() && model.reserve(1, 1, 16).ok(), "no memory");
    ForwardBatch batch{{5}, {}, {0}, {0, 1}, {1}, {}, {0}};
    for (size_t g = 0; g < spec.groups.size(); ++g) batch.tables.push_back({{0}, 1});
    std::vector<float> logits(static_cast<size_t>(model.spec().vocab_size));
    model.forward(batch, *cache, {logits.data()});
    return logits;
  }

  ThreadPool pool_{1, false};
  std::unique_ptr<ops::Ops> ops_;
  std::filesystem::path folder_;
};

template <class T>
void append(std::string& to, T v) {
  to.append(reinterpret_cast<const char*>(&v), sizeof v);
}

}  // namespace freshet
