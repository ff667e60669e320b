// Files of packed weights: bit-identical results with and without them, every dependency is
// checked, and damage, a concurrent writer or a full disk causes at most one log line.
#include "models/weight_cache.h"

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/log.h"
#include "tests/golden_cases.h"

namespace freshet::testing {
namespace {

namespace fs = std::filesystem;

class WeightCacheFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "freshet-weights-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    fs::copy(directory() + "llama", folder_ / "llama", fs::copy_options::recursive);
    set_log_sink(LogLevel::kInfo, [this](LogLevel level, std::string_view line) {
      log_ += fmt::format("{}: {}\n", name_of(level), line);
    });
  }
  void TearDown() override {
    set_log_sink(LogLevel::kOff, {});
    fs::remove_all(folder_);
  }

  // The files in the cache's folder.
  std::set<std::string> files() const {
    std::set<std::string> names;
    if (!fs::exists(folder_ / "cache")) return names;
    for (const auto& entry : fs::directory_iterator(folder_ / "cache"))
      names.insert(entry.path().string());
    return names;
  }
  std::string file() const {
    FRESHET_CHECK(files().size() == 1, "{} files", files().size());
    return *files().begin();
  }

  Result<std::vector<float>> logits(const std::string& model, bool cached, bool reference = false) {
    Runner::Options options;
    options.reference = reference;
    options.kv = reference ? ops::KvType::kF32 : ops::KvType::kF16;
    options.context = 64;
    if (cached) options.weight_cache = (folder_ / "cache").string();
    FRESHET_ASSIGN_OR_RETURN(const auto runner, Runner::open(model, options));
    return runner->run({{5, 9, 7, 1, 3, 3, 8}}, 0)[0];
  }
  std::string llama() const { return (folder_ / "llama").string(); }

  // Loads llama through the cache; the log must contain `line` and the logits must be right.
  void expect_load(const std::string& line) {
    log_.clear();
    const auto got = logits(llama(), true);
    ASSERT_TRUE(got.ok()) << got.status().message();
    EXPECT_NE(log_.find(line), std::string::npos) << log_;
    const auto want = logits(llama(), false);
    ASSERT_TRUE(want.ok());
    expect_same_bits(*got, *want, line);
  }
  void expect_rewritten(const std::string& why) {
    expect_load(why);
    EXPECT_NE(log_.find("packed weights are written: "), std::string::npos) << log_;
    expect_load("packed weights are mapped");
    EXPECT_EQ(log_.find("written"), std::string::npos) << log_;
  }

  fs::path folder_;
  std::string log_;
};

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

TEST_F(WeightCacheFiles, SameBitsForEveryModel) {
  for (const char* data : {"golden", "golden-variants", "golden-gguf", "golden-int8"}) {
    const std::string base = std::string(FRESHET_UNPACKED_DATA) + "/" + data + "/";
    for (const std::string& name : models(base)) {
      const bool gguf = std::string_view(data) == "golden-gguf";
      const std::string model = base + name + (gguf ? "/model.gguf" : "");
      for (const bool reference : {false, true}) {
        const auto plain = logits(model, false, reference);
        ASSERT_TRUE(plain.ok()) << name << ": " << plain.status().message();
        for (const bool first : {true, false}) {
          log_.clear();
          const auto cached = logits(model, true, reference);
          ASSERT_TRUE(cached.ok()) << name << ": " << cached.status().message();
          const bool written = log_.find("packed weights are written") != std::string::npos;
          EXPECT_EQ(written, first) << name << ": " << log_;
          EXPECT_NE(log_.find("packed weights are mapped"), std::string::npos) << log_;
          expect_same_bits(*cached, *plain, name);
        }
        fs::remove_all(folder_ / "cache");
      }
    }
  }
}

TEST_F(WeightCacheFiles, ChangedModelIsPackedAnew) {
  expect_load("No such file");
  expect_load("packed weights are mapped");
  const std::string weights = llama() + "/model.safetensors";
  const auto changed = fs::last_write_time(weights);
  // A link to the model is the same model; a copy in another folder is another model with a file of
  // its own.
  fs::create_directory(folder_ / "elsewhere");
  fs::create_symlink(folder_ / "llama", folder_ / "elsewhere" / "llama");
  log_.clear();
  ASSERT_TRUE(logits((folder_ / "elsewhere" / "llama").string(), true).ok());
  EXPECT_EQ(log_.find("written"), std::string::npos) << log_;
  fs::remove(folder_ / "elsewhere" / "llama");
  const std::string first = file();
  fs::copy(folder_ / "llama", folder_ / "elsewhere" / "llama");
  fs::last_write_time(folder_ / "elsewhere" / "llama" / "model.safetensors", changed);
  log_.clear();
  ASSERT_TRUE(logits((folder_ / "elsewhere" / "llama").string(), true).ok());
  EXPECT_NE(log_.find("packed weights are written"), std::string::npos) << log_;
  EXPECT_EQ(files().size(), 2u);
  expect_load("packed weights are mapped from " + first);
  EXPECT_EQ(log_.find("written"), std::string::npos) << log_;
  for (const std::string& other : files()) {
    if (other != first) fs::remove(other);
  }

  fs::last_write_time(weights, changed + std::chrono::seconds(1));
  expect_rewritten("another 'file'");
  // Weights of the same size and age: another model.
  std::string bytes = read(weights);
  const size_t header = 8 + static_cast<size_t>(bytes[0] & 255) + 256 * (bytes[1] & 255);
  for (size_t i = header; i < bytes.size(); i += 2) bytes[i] = static_cast<char>(bytes[i] ^ 1);
  write(weights, bytes);
  fs::last_write_time(weights, changed + std::chrono::seconds(1));
  expect_rewritten("another 'file'");
  // A header entry that the loader does not read.
  std::string spaced = bytes;
  const size_t brace = spaced.rfind('}', header - 1);
  ASSERT_NE(brace, std::string::npos);
  if (spaced[header - 1] == ' ') {
    std::swap(spaced[brace], spaced[brace + 1]);
    write(weights, spaced);
    fs::last_write_time(weights, changed + std::chrono::seconds(1));
    expect_rewritten("another 'file'");
  }
  auto config = json::parse_file(llama() + "/config.json");
  ASSERT_TRUE(config.ok());
  config->as_object()["rms_norm_eps"] = json::Value(1e-4);
  write(llama() + "/config.json", json::write(*config));
  expect_rewritten("another 'config'");
  EXPECT_EQ(files().size(), 1u);
}

TEST_F(WeightCacheFiles, RefusesWhatAnotherProgramPacked) {
  expect_load("packed weights are written");
  const auto checkpoint = loader::Checkpoint::open(llama());
  ThreadPool pool(1, false);
  const auto ops = ops::Ops::create(pool, cpu::kernels(), cpu::detect(), {});
  ASSERT_TRUE(checkpoint.ok() && ops.ok());
  const std::string key = models::weight_cache_key(*checkpoint, **ops);
  ASSERT_TRUE(models::WeightCache::open(file(), key).ok());
  const auto expect_refused = [&](const std::string& other, const std::string& word) {
    const auto cache = models::WeightCache::open(file(), other);
    ASSERT_FALSE(cache.ok()) << word;
    EXPECT_NE(cache.status().message().find("another '" + word + "'"), std::string::npos)
        << cache.status().message();
  };
  const auto changed = [&](const std::string& from, const std::string& to) {
    const size_t at = key.find(from);
    FRESHET_CHECK(at != std::string::npos);
    return std::string(key).replace(at, from.size(), to);
  };
  expect_refused(changed("program ", "program 9"), "program");
  expect_refused(changed("packing ", "packing 9"), "packing");
  expect_refused(key + "file 3 bytes\n", "file");
  expect_refused(key.substr(0, key.find("file")), "file");
  expect_refused("", "program");
  const auto scalar = ops::Ops::create(pool, cpu::kernels(), {}, {});
  const std::string other_isa = models::weight_cache_key(*checkpoint, **scalar);
  if (cpu::detect().isa != ops::CpuIsa::kScalar) {
    expect_refused(other_isa, "isa");
    EXPECT_NE(models::weight_cache_path("x", *checkpoint, **scalar),
              models::weight_cache_path("x", *checkpoint, **ops));
  }
  ops::OpsOptions forced;
  forced.force_kernels = {fmt::format("matmul={}", (*scalar)->matmul_row(quant::Format::kQ4_0))};
  const auto rows = ops::Ops::create(pool, cpu::kernels(), cpu::detect(), forced);
  ASSERT_TRUE(rows.ok());
  if ((*rows)->matmul_row(quant::Format::kQ4_0) != (*ops)->matmul_row(quant::Format::kQ4_0))
    expect_refused(models::weight_cache_key(*checkpoint, **rows), "rows");
}

// Numbers of the header, by position.
enum : size_t { kFileBytes = 1, kIndexOffset, kIndexBytes, kKeyBytes, kWeights, kIndexHash, kHash };

uint64_t number_at(const std::string& bytes, size_t at) {
  uint64_t n;
  std::memcpy(&n, bytes.data() + at, sizeof n);
  return n;
}
void set_number(std::string& bytes, size_t at, uint64_t n) {
  std::memcpy(bytes.data() + at, &n, sizeof n);
}
// As an attacker would: with correct hashes.
void sign(std::string& bytes) {
  const size_t index = std::min<size_t>(number_at(bytes, 8 * kIndexOffset), bytes.size());
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  set_number(bytes, 8 * kIndexHash, hash_bytes({data + index, bytes.size() - index}));
  set_number(bytes, 8 * kHash, hash_bytes({data, 8 * kHash}));
}

TEST_F(WeightCacheFiles, DamageIsNoticed) {
  expect_load("packed weights are written");
  const std::string path = file();
  const std::string good = read(path);
  const size_t index = number_at(good, 8 * kIndexOffset);
  const std::string key = good.substr(index, number_at(good, 8 * kKeyBytes));
  const auto opens = [&](const std::string& bytes) {
    write(path, bytes);
    return models::WeightCache::open(path, key).ok();
  };
  ASSERT_TRUE(opens(good));
  for (size_t at = 0; at < good.size(); at += at + 1 == 64 ? index - 63 : 1) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (1 << at % 8));
    ASSERT_FALSE(opens(bad)) << "byte " << at;
  }
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{4096}, index, good.size() - 1})
    ASSERT_FALSE(opens(good.substr(0, size))) << size;
  ASSERT_FALSE(opens(good + "x"));
  ASSERT_FALSE(opens(std::string(1 << 16, '\0')));
  write(path, good.substr(0, index / 2));
  expect_rewritten("is damaged");
}

TEST_F(WeightCacheFiles, HostileFilesAreRefused) {
  expect_load("packed weights are written");
  const std::string path = file();
  const std::string good = read(path);
  const size_t index = number_at(good, 8 * kIndexOffset);
  const size_t first = index + number_at(good, 8 * kKeyBytes);
  const std::string key = good.substr(index, number_at(good, 8 * kKeyBytes));
  const size_t entry = first + 8 + number_at(good, first);  // after the first weight's name
  constexpr uint64_t kHuge[] = {uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{0} - 4095,
                                uint64_t{1} << 40, 0};
  const auto expect_refused = [&](size_t at, uint64_t value) {
    std::string bad = good;
    if (number_at(bad, at) == value) return;
    set_number(bad, at, value);
    sign(bad);
    write(path, bad);
    // Errors that the file alone does not reveal are found when the weight is requested.
    log_.clear();
    const auto got = logits(llama(), true);
    ASSERT_TRUE(got.ok()) << got.status().message();
    EXPECT_NE(log_.find("packed weights are written: "), std::string::npos)
        << "number at " << at << " is " << value << "\n"
        << log_;
  };
  for (const uint64_t value : kHuge) {
    for (size_t h = kFileBytes; h <= kWeights; ++h) expect_refused(8 * h, value);
    for (size_t n = 0; n < 5; ++n) expect_refused(entry + 8 * n, value);
    expect_refused(first, value);  // length of the name
  }
  expect_refused(entry + 24, 4096 + 64);                            // not page-aligned
  expect_refused(entry + 24, 0);                                    // inside the header
  expect_refused(entry + 32, number_at(good, entry + 32) - 64);     // too short
  expect_refused(8 * kWeights, number_at(good, 8 * kWeights) - 1);  // one too few
}

TEST_F(WeightCacheFiles, OneWritesAtATime) {
  expect_load("packed weights are written");
  const std::string path = file();
  fs::remove(path);
  {
    auto rival = models::WeightCacheWriter::create(path);
    ASSERT_TRUE(rival.ok()) << rival.status().message();
    EXPECT_EQ(models::WeightCacheWriter::create(path).status().code(),
              StatusCode::kResourceExhausted);
    expect_load("another process is writing");
    EXPECT_EQ(log_.find("warning"), std::string::npos) << log_;
    EXPECT_FALSE(fs::exists(path));
  }
  EXPECT_TRUE(files().empty());
  // A file left behind by a killed process.
  write(path + ".tmp", std::string(1 << 20, 'x'));
  expect_load("packed weights are written");
  EXPECT_EQ(files(), std::set<std::string>{path});
  // A file in use is never written to, only replaced.
  const auto checkpoint = loader::Checkpoint::open(llama());
  auto used = MappedFile::open(path);
  ASSERT_TRUE(checkpoint.ok() && used.ok());
  const uint64_t before = hash_bytes(used->bytes());
  fs::last_write_time(llama() + "/model.safetensors", fs::file_time_type::clock::now());
  expect_load("another 'file'");
  EXPECT_EQ(hash_bytes(used->bytes()), before);
}

TEST_F(WeightCacheFiles, ManyStartAtOnce) {
  const auto want = logits(llama(), false);
  ASSERT_TRUE(want.ok());
  for (int round = 0; round < 8; ++round) {
    fs::remove_all(folder_ / "cache");
    std::vector<std::thread> threads;
    std::vector<std::vector<float>> got(4);
    for (auto& g : got)
      threads.emplace_back([&] {
        const auto l = logits(llama(), true);
        if (l.ok()) g = *l;
      });
    for (std::thread& t : threads) t.join();
    for (const auto& g : got) expect_same_bits(g, *want, "a start among others");
    EXPECT_EQ(files().size(), 1u);
    expect_load("packed weights are mapped");
    EXPECT_EQ(log_.find("warning"), std::string::npos) << log_;
  }
}

TEST_F(WeightCacheFiles, FullDiskIsAWarning) {
  // A file size limit stands in for a full disk: at the first weight, in the middle, at the index.
  expect_load("packed weights are written");
  const size_t whole = fs::file_size(file());
  fs::remove_all(folder_ / "cache");
  const auto signal_before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  for (const size_t room : {size_t{100}, whole / 2, whole - 10}) {
    rlimit limit = before;
    limit.rlim_cur = room;
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    expect_load("warning: packed weights are not kept: cannot write");
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_TRUE(files().empty()) << *files().begin();
  }
  // Weights are written in large chunks: a weight larger than a chunk, in the middle.
  ThreadPool pool(1, false);
  const auto ops = ops::Ops::create(pool, cpu::kernels(), {}, {});
  ASSERT_TRUE(ops.ok());
  const std::vector<float> row(1 << 16, 1.0f);
  const std::vector rows(16, reinterpret_cast<const uint8_t*>(row.data()));
  const auto large = (*ops)->pack(quant::Format::kF32, rows, 1 << 16);
  ASSERT_TRUE(large.ok());
  const std::string path = (folder_ / "cache" / "large.weights").string();
  for (const size_t room : {size_t{1} << 30, size_t{3} << 20, size_t{1} << 20}) {
    rlimit limit = before;
    limit.rlim_cur = room;
    auto writer = models::WeightCacheWriter::create(path);
    ASSERT_TRUE(writer.ok());
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    const Status added = writer->add("large", *large);
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_EQ(added.ok(), room == size_t{1} << 30);
    EXPECT_EQ(writer->status().ok(), added.ok());
  }
  EXPECT_TRUE(files().empty());
  std::signal(SIGXFSZ, signal_before);
  fs::remove_all(folder_ / "cache");
  write((folder_ / "cache").string(), "not a folder");
  Runner::Options options;
  options.weight_cache = (folder_ / "cache").string();
  log_.clear();
  EXPECT_TRUE(Runner::open(llama(), options).ok());
  EXPECT_NE(log_.find("warning: packed weights are not kept: cannot write"), std::string::npos);
}

TEST_F(WeightCacheFiles, LargeWeightsComeBack) {
  ThreadPool pool(1, false);
  const auto ops = ops::Ops::create(pool, cpu::kernels(), {}, {});
  ASSERT_TRUE(ops.ok());
  const std::string path = (folder_ / "cache" / "large.weights").string();
  auto writer = models::WeightCacheWriter::create(path);
  ASSERT_TRUE(writer.ok());
  // Before, at, after and far beyond the 2 MiB chunks in which a file is written.
  std::vector<ops::Weight> weights;
  for (const int64_t cols : {32, 32704, 32, 32768, 36, 98304, 4000, 65536, 28672, 32}) {
    std::vector<float> row(static_cast<size_t>(cols));
    for (size_t i = 0; i < row.size(); ++i)
      row[i] = static_cast<float>(weights.size() * 1000000 + i);
    const std::vector rows(16, reinterpret_cast<const uint8_t*>(row.data()));
    auto w = (*ops)->pack(quant::Format::kF32, rows, cols);
    ASSERT_TRUE(w.ok() && writer->add("w", *w).ok());
    weights.push_back(std::move(*w));
  }
  ASSERT_TRUE(writer->commit("key").ok());
  auto cache = models::WeightCache::open(path, "key");
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  for (const ops::Weight& w : weights) {
    const auto got = cache->next(**ops, "w", w.format, w.rows, w.cols);
    ASSERT_TRUE(got.ok()) << got.status().message();
    EXPECT_EQ(std::memcmp(got->packed.data(), w.packed.data(), w.packed.size()), 0) << w.cols;
  }
  EXPECT_TRUE(cache->at_end());
}

TEST_F(WeightCacheFiles, ModelsOwnErrorsStayTheirs) {
  auto config = json::parse_file(llama() + "/config.json");
  ASSERT_TRUE(config.ok());
  config->as_object()["num_hidden_layers"] = json::Value(int64_t{9});
  write(llama() + "/config.json", json::write(*config));
  const auto got = logits(llama(), true);
  ASSERT_FALSE(got.ok());
  EXPECT_NE(got.status().message().find("is missing"), std::string::npos);
  EXPECT_EQ(log_.find("warning"), std::string::npos) << log_;
  EXPECT_TRUE(files().empty());
}

// Packed weights are stored in files: a change of the packing must raise ops::kPackedVersion.
TEST(PackedBytes, AreThoseOfThisVersion) {
  ASSERT_EQ(ops::kPackedVersion, 1) << "new version: write down the new hashes";
  const std::map<std::string_view, std::pair<uint64_t, uint64_t>> known = {
      // format, by the backend, by the reference
      {"f32", {0x45e77db0da7a1b81, 0xaa3bbf6b6cf1c106}},
      {"f16", {0x7e9ca7557c5a23c9, 0x4bf86bfe4db9cd02}},
      {"bf16", {0x7200508d8db28950, 0x4bf86bfe4db9cd02}},
      {"fp8", {0x3e9fa2fbeaca5678, 0x20d71dd8c6ccc459}},
      {"q4_0", {0xe461088e9a9fbb22, 0x81212bd4ba7fb65d}},
      {"q4_1", {0xb8fe9555b776a71a, 0x3c4a88aff8af1989}},
      {"q5_0", {0xd427d6500b74fcff, 0xdacb77ceffa9efc4}},
      {"q5_1", {0x179933042cddf452, 0xcb8b8134ef65be8a}},
      {"q8_0", {0x3663a67522ede1bc, 0xe22fc79dc9661fb6}},
      {"q2_k", {0x0a16be5ad6bee13b, 0x4c4310e2cbe31c76}},
      {"q3_k", {0x29436fd67a48f776, 0xaab187ad6e3a0c4d}},
      {"q4_k", {0x8c523535354618a9, 0x81212bd4ba7fb65d}},
      {"q5_k", {0x2a31125088b918b7, 0xdacb77ceffa9efc4}},
      {"q6_k", {0x32acc8c737070c40, 0x7c9fe6fb2c448537}},
      {"iq4_nl", {0xe461088e9a9fbb22, 0x81212bd4ba7fb65d}},
      {"iq4_xs", {0x547a6bdc4df43be7, 0xfabb27a9920edff9}},
      {"mxfp4", {0x726d7b8fb9284f06, 0xfabb27a9920edff9}},
      {"int8", {0x3feca2537db7d050, 0x99c763d9c77b4b0c}},
      {"int4_g128", {0x0d4499ff22a7f22c, 0xe57a87211b300e24}},
      {"int4_g32", {0xd0657265c77297d5, 0x137382d1ee1675d8}},
      {"mxfp8", {0xae0effbd597fae67, 0x20d71dd8c6ccc459}},
      {"fp8_g32", {0x520b5542cc8e0456, 0xc5facd7c142ef192}},
      {"nf4", {0x5dc90b2ded54021e, 0x81212bd4ba7fb65d}},
      {"fp4", {0x5dc90b2ded54021e, 0x81212bd4ba7fb65d}},
      {"nvfp4", {0x163ced591bade1f8, 0x4ec551711f886cba}},
      {"int2_g128", {0x199e28fb3d37c341, 0x980e5115b816e279}},
      {"int2_g32", {0xa32e3ad35ae8191c, 0x6e2be2117c2019b7}},
      {"int3_g128", {0x702c38a6c6e03c9e, 0x10fd075038d2e7b7}},
      {"int3_g32", {0x94caef26e789a455, 0x627ef86ff7b6fee9}},
      {"int8_g128", {0x77e2be96e2669cdd, 0x20d71dd8c6ccc459}},
      {"int8_g32", {0x58d8512a6966e760, 0xc5facd7c142ef192}},
      {"iq1_s", {0x8c43f461fe4a97a3, 0xaa4515ee2509b0e2}},
      {"iq1_m", {0x4ec5f702fe88c4f9, 0x51e6b6c3bd214e35}},
      {"iq2_xxs", {0x9061b584f4753cb1, 0xfc2f1368d2c4a25a}},
      {"iq2_xs", {0x9c819380c3feb174, 0xa5e4f5af676a9ccf}},
      {"iq2_s", {0x5bba4b9044150925, 0xfa7fe05cae0b00b6}},
      {"iq3_xxs", {0x121b7f73637507bc, 0xc88f62b64420f87b}},
      {"iq3_s", {0x7991cb12e64b7f1a, 0xaab187ad6e3a0c4d}},
      {"tq1_0", {0x2b9ee8b0f36b7870, 0x16730415b66fe3f8}},
      {"tq2_0", {0xa7125d7f4c6d2160, 0xfc2f1368d2c4a25a}},
  };
  ThreadPool pool(1, false);
  const auto fast = ops::Ops::create(pool, cpu::kernels(), {}, {});
  const auto plain = ops::Ops::create(pool, ops::reference_kernels(), {}, {.reference = true});
  ASSERT_TRUE(fast.ok() && plain.ok());
  for (const quant::FormatInfo& f : quant::all_formats()) {
    constexpr int64_t kRows = 21, kCols = 512;
    std::vector<uint8_t> bytes(kRows * quant::row_bytes(f.format, kCols));
    uint64_t state = 1;
    for (uint8_t& b : bytes) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      b = static_cast<uint8_t>(state >> 56);
    }
    std::vector<const uint8_t*> rows;
    for (int64_t r = 0; r < kRows; ++r)
      rows.push_back(bytes.data() + static_cast<size_t>(r) * quant::row_bytes(f.format, kCols));
    const auto hash = [&](ops::Ops& ops) {
      const auto w = ops.pack(f.format, rows, kCols);
      return hash_bytes({w->packed.data(), w->packed.size()});
    };
    const auto at = known.find(f.name);
    const std::pair got{hash(**fast), hash(**plain)};
    EXPECT_TRUE(at != known.end() && at->second == got)
        << fmt::format("{{\"{}\", {{0x{:016x}, 0x{:016x}}}}},", f.name, got.first, got.second);
  }
}

}  // namespace
}  // namespace freshet::testing
