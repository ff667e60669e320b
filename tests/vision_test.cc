// Models that read pictures against transformers' outputs (tools/golden_seeded.py), from the pixels
// on; and batch invariance: alone, together, in chunks.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/backend.h"
#include "backend/cuda/backend.h"
#include "layers/model.h"
#include "loader/checkpoint.h"
#include "loader/safetensors.h"
#include "models/registry.h"
#include "ops/device.h"
#include "runtime/picture_prompt.h"
#include "runtime/picture_settings.h"
#include "tests/mmproj_files.h"

namespace freshet {
namespace {

constexpr int kTableStride = 64;           // blocks
constexpr int64_t kDevicePositions = 512;  // of the largest picture here

struct PictureCase {
  std::vector<int32_t> ids;
  std::vector<media::Picture> pictures;
  std::vector<float> logits;  // [ids, vocab]
};

// exact: weights in F32. A GPU rounds inputs to BF16 where weights are BF16, which small random
// models amplify.
std::string folder_of(const std::string& name, bool exact = false) {
  return std::string(FRESHET_UNPACKED_DATA) + (exact ? "/seeded-f32/" : "/seeded/") + name;
}

std::vector<PictureCase> cases_of(const std::string& name) {
  auto file = loader::SafetensorsFile::open(folder_of(name) + "/golden.safetensors");
  FRESHET_CHECK(file.ok(), "{}", file.status().message());
  std::vector<PictureCase> cases;
  while (const auto* ids = file->find(fmt::format("ids_{}", cases.size()))) {
    const size_t i = cases.size();
    PictureCase& c = cases.emplace_back();
    for (int64_t t = 0; t < ids->elements(); ++t) {
      int64_t id;
      std::memcpy(&id, ids->data + static_cast<size_t>(t) * sizeof id, sizeof id);
      c.ids.push_back(static_cast<int32_t>(id));
    }
    while (const auto* image = file->find(fmt::format("image_{}_{}", i, c.pictures.size()))) {
      media::Picture picture(static_cast<int>(image->shape[1]), static_cast<int>(image->shape[0]));
      std::memcpy(picture.rgb.data(), image->data, image->bytes);
      c.pictures.push_back(std::move(picture));
    }
    const auto* logits = file->find(fmt::format("logits_{}", i));
    c.logits.resize(static_cast<size_t>(logits->elements()));
    std::memcpy(c.logits.data(), logits->data, logits->bytes);
  }
  return cases;
}

// A sequence on its way: its pictures are seen.
struct Seen {
  std::vector<int32_t> ids;
  runtime::PicturePrompt prompt;
  std::vector<VisionRows> rows;
  std::vector<float> cross;
  int64_t cross_rows = 0;
  std::vector<const VisionRows*> pointers() const {
    std::vector<const VisionRows*> out;
    for (const VisionRows& one : rows) out.push_back(&one);
    return out;
  }
  // Tokens that see one another are not taken apart.
  int32_t end(int32_t first, int32_t chunk) const {
    const int32_t end = std::min(first + chunk, static_cast<int32_t>(ids.size()));
    if (prompt.spans.empty() || end == 0) return end;
    return std::max(end, prompt.spans[static_cast<size_t>(end - 1)].end);
  }
};

class VisionRunner {
 public:
  VisionRunner(const std::string& name, bool reference)
      : VisionRunner(loader::Checkpoint::open(folder_of(name)).value(), reference) {}

  // device: nullptr for the host.
  VisionRunner(const loader::Checkpoint& checkpoint, bool reference,
               std::unique_ptr<ops::Device> device = nullptr)
      : pool_(2, false) {
    ops::OpsOptions options;
    options.reference = reference;
    host_ = std::move(ops::Ops::create(pool_, cpu::kernels(), cpu::detect(), options)).value();
    if (device != nullptr) device_ = ops::Ops::create(pool_, std::move(device));
    auto model = models::load_model_on(checkpoint, ops(), *host_, {}, "");
    FRESHET_CHECK(model.ok(), "{}", model.status().message());
    model_ = std::move(*model);
    const Status reserved = model_->reserve(256, 256, 256);
    FRESHET_CHECK(reserved.ok(), "{}", reserved.message());
    FRESHET_CHECK(model_->vision() != nullptr, "{} has no tower", checkpoint.path());
    settings_ = runtime::picture_settings(checkpoint).value();
    type_ = reference ? ops::KvType::kF32 : ops::KvType::kF16;
    if (device_ == nullptr) return;
    const Status fixed = model_->vision()->reserve(kDevicePositions);
    FRESHET_CHECK(fixed.ok(), "{}", fixed.message());
  }

  const ModelSpec& spec() const { return model_->spec(); }
  ops::Ops& ops() const { return device_ != nullptr ? *device_ : *host_; }

  Seen see(const PictureCase& c) {
    Seen seen;
    seen.ids = c.ids;
    if (c.pictures.empty()) return seen;
    const VisionSpec& vision = *spec().vision;
    std::vector<runtime::PictureLayout> layouts;
    for (const media::Picture& picture : c.pictures) {
      auto input = media::image_input(picture, settings_);
      FRESHET_CHECK(input.ok(), "{}", input.status().message());
      const Status fits = runtime::check_picture(*input, vision);
      FRESHET_CHECK(fits.ok(), "{}", fits.message());
      layouts.push_back(runtime::picture_layout(*input, vision));
      const VisionInput given = runtime::vision_input(*input, vision);
      const Status reserved = model_->vision()->reserve(VisionTower::positions(vision, given));
      FRESHET_CHECK(reserved.ok(), "{}", reserved.message());
      seen.rows.push_back(model_->vision()->run(given));
      FRESHET_CHECK(seen.rows.back().rows == layouts.back().rows, "other rows than planned");
    }
    auto prompt = runtime::place_pictures(spec(), c.ids, layouts);
    FRESHET_CHECK(prompt.ok(), "{}", prompt.status().message());
    seen.prompt = std::move(*prompt);
    if (!vision.cross) return seen;
    seen.cross = runtime::cross_rows(seen.pointers());
    seen.cross_rows = std::ssize(seen.cross) / vision.width;
    return seen;
  }

  // The logits of all positions of each, in steps of `chunk` tokens of every sequence.
  std::vector<std::vector<float>> run(const std::vector<Seen>& all, int chunk) {
    const KvCacheSpec cache_spec = kv_cache_spec(spec(), type_);
    const auto blocks = static_cast<int32_t>(all.size()) * kTableStride;
    const KvStorage cache =
        std::move(KvStorage::allocate(cache_spec,
                                      std::vector<int32_t>(cache_spec.groups.size(), blocks),
                                      ops().memory()))
            .value();
    const auto vocab = static_cast<size_t>(spec().vocab_size);
    std::vector<std::vector<float>> logits(all.size());
    std::vector<int32_t> done(all.size(), 0);
    while (true) {
      const ForwardBatch batch = batch_of(all, cache_spec, chunk, done);
      if (batch.tokens() == 0) return logits;
      std::vector<float> rows(batch.logit_rows.size() * vocab);
      model_->forward(batch, cache, {rows.data()});
      const float* row = rows.data();
      for (size_t s = 0; s < order_.size(); ++s) {
        const auto count =
            static_cast<size_t>(batch.query_start[s + 1] - batch.query_start[s]) * vocab;
        std::vector<float>& to = logits[order_[s]];
        to.insert(to.end(), row, row + count);
        row += count;
      }
    }
  }

 private:
  // `done`: tokens of each sequence; moves on.
  ForwardBatch batch_of(const std::vector<Seen>& all, const KvCacheSpec& cache, int chunk,
                        std::vector<int32_t>& done) {
    ForwardBatch b;
    b.query_start.push_back(0);
    b.tables.resize(cache.groups.size());
    for (BlockTables& table : b.tables) table.stride = kTableStride;
    order_.clear();
    const int axes = position_axes(spec());
    for (size_t s = 0; s < all.size(); ++s) {
      const Seen& seen = all[s];
      const int32_t first = done[s], end = seen.end(first, chunk);
      if (first == end) continue;
      runtime::add_picture_tokens(seen.prompt, seen.pointers(), axes, first, end - first, b);
      for (int32_t p = first; p < end; ++p) {
        b.logit_rows.push_back(static_cast<int32_t>(b.token_ids.size()));
        b.token_ids.push_back(seen.ids[static_cast<size_t>(p)]);
        b.positions.push_back(p);
      }
      EncoderInput input;
      input.sequence = static_cast<int>(order_.size());
      input.states = seen.cross.data();
      input.state_rows = seen.cross_rows;
      if (first == 0 && seen.cross_rows > 0) b.encoder_inputs.push_back(input);
      b.query_start.push_back(static_cast<int32_t>(b.token_ids.size()));
      b.context_len.push_back(end);
      for (size_t g = 0; g < cache.groups.size(); ++g) {
        for (int32_t i = 0; i < kTableStride; ++i)
          b.tables[g].ids.push_back(static_cast<int32_t>(s) * kTableStride + i);
        if (cache.groups[g].cross > 0)
          b.tables[g].context_len.push_back(static_cast<int32_t>(seen.cross_rows));
      }
      order_.push_back(s);
      done[s] = end;
    }
    runtime::complete_picture_tokens(axes, b);
    return b;
  }

  ThreadPool pool_;
  std::unique_ptr<ops::Ops> host_, device_;
  std::unique_ptr<Model> model_;
  media::ImageSettings settings_;
  ops::KvType type_ = ops::KvType::kF32;
  std::vector<size_t> order_;  // the sequences of the last batch
};

// The golden cases within the bounds of both paths.
void expect_golden(VisionRunner& runner, const std::vector<PictureCase>& cases, bool reference) {
  const float fast = runner.ops().device() != nullptr ? 2e-2f : 1e-2f;
  for (const PictureCase& c : cases) {
    const std::vector<float> got = runner.run({runner.see(c)}, 256)[0];
    ASSERT_EQ(got.size(), c.logits.size());
    float largest = 0, worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      largest = std::max(largest, std::fabs(c.logits[i]));
      const float off = std::fabs(got[i] - c.logits[i]);
      if (!(off <= worst)) worst = off;
    }
    EXPECT_LE(worst, (reference ? 2e-4f : fast) * largest)
        << (reference ? "reference" : "fast") << ", " << c.pictures.size() << " pictures";
  }
}

class VisionGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(VisionGolden, LogitsAreThoseOfTransformers) {
  const std::vector<PictureCase> cases = cases_of(GetParam());
  ASSERT_GE(cases.size(), 2u);
  ASSERT_FALSE(cases.back().pictures.empty());
  for (const bool reference : {true, false}) {
    VisionRunner runner(GetParam(), reference);
    expect_golden(runner, cases, reference);
  }
}

// Alone, together and in chunks; and the pictures of one more sequence are others.
void expect_same_bits(VisionRunner& runner, std::vector<PictureCase> cases) {
  cases.push_back(cases.back());
  std::swap(cases.back().ids.front(), cases.back().ids.back());
  for (media::Picture& picture : cases.back().pictures)
    std::reverse(picture.rgb.begin(), picture.rgb.end());
  std::vector<Seen> all;
  for (const PictureCase& c : cases) all.push_back(runner.see(c));
  std::vector<std::vector<float>> alone;
  for (const Seen& one : all) alone.push_back(runner.run({one}, 256)[0]);
  EXPECT_NE(alone[1], alone[2]) << "the pictures change nothing";
  for (const int chunk : {256, 1, 7}) {
    const auto together = runner.run(all, chunk);
    for (size_t s = 0; s < all.size(); ++s) {
      ASSERT_EQ(together[s].size(), alone[s].size());
      EXPECT_EQ(std::memcmp(together[s].data(), alone[s].data(), alone[s].size() * sizeof(float)),
                0)
          << "sequence " << s << " in chunks of " << chunk;
    }
  }
}

TEST_P(VisionGolden, TheBatchChangesNoBit) {
  for (const bool reference : {true, false}) {
    VisionRunner runner(GetParam(), reference);
    expect_same_bits(runner, cases_of(GetParam()));
  }
}

TEST_P(VisionGolden, PromptsHaveAsManyImageTokensAsPicturesNeed) {
  const std::vector<PictureCase> cases = cases_of(GetParam());
  const VisionRunner runner(GetParam(), true);
  const auto placed = runtime::place_pictures(runner.spec(), cases.back().ids, {});
  ASSERT_FALSE(placed.ok());
  EXPECT_NE(placed.status().message().find("image tokens"), std::string::npos)
      << placed.status().message();
}

INSTANTIATE_TEST_SUITE_P(Models, VisionGolden,
                         ::testing::Values("llava", "llava-next", "pixtral", "mistral3", "qwen2-vl",
                                           "qwen2-5-vl", "qwen3-vl", "qwen3-vl-moe",
                                           "qwen3-5-vision", "gemma3-vision", "idefics3", "mllama"),
                         [](const auto& of) {
                           std::string name = of.param;
                           std::erase(name, '-');
                           return name;
                         });

class VisionCuda : public VisionGolden {};
TEST_P(VisionCuda, IsNearTransformersInAnyBatch) {
  auto device = cuda::open(std::string("auto"));
  ASSERT_TRUE(device.ok()) << device.status().message();
  if (*device == nullptr) GTEST_SKIP() << "no GPU here";
  const auto checkpoint = loader::Checkpoint::open(folder_of(GetParam(), true));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  VisionRunner runner(*checkpoint, false, std::move(*device));
  expect_golden(runner, cases_of(GetParam()), false);
  expect_same_bits(runner, cases_of(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Models, VisionCuda,
                         ::testing::Values("llava", "qwen2-vl", "qwen2-5-vl", "qwen3-vl",
                                           "gemma3-vision", "idefics3"),
                         [](const auto& of) {
                           std::string name = of.param;
                           std::erase(name, '-');
                           return name;
                         });

// A model and its tower as GGUF files, which are removed at the end.
class MmprojGolden : public ::testing::TestWithParam<const char*> {
 protected:
  MmprojGolden() {
    std::string name = (std::filesystem::temp_directory_path() / "freshet-mmproj-XXXXXX").string();
    out_ = ::mkdtemp(name.data());
  }
  ~MmprojGolden() override { std::filesystem::remove_all(out_); }

  std::string out_;
};

TEST_P(MmprojGolden, LogitsAreThoseOfTransformers) {
  const std::vector<PictureCase> cases = cases_of(GetParam());
  for (const bool swapped : {false, true}) {
    const auto files = write_mmproj_files(folder_of(GetParam()), out_, swapped);
    ASSERT_TRUE(files.ok()) << files.status().message();
    const auto checkpoint = loader::Checkpoint::open(files->model, files->tower);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    EXPECT_EQ(runtime::picture_settings(*checkpoint).value().fingerprint(),
              media::load_image_settings(folder_of(GetParam())).value().fingerprint());
    VisionRunner runner(*checkpoint, !swapped);
    expect_golden(runner, cases, !swapped);
  }
}

TEST_P(MmprojGolden, ReadsTextWithoutTheTower) {
  const auto files = write_mmproj_files(folder_of(GetParam()), out_);
  ASSERT_TRUE(files.ok()) << files.status().message();
  const auto alone = loader::Checkpoint::open(out_ + "/text.gguf");
  ASSERT_TRUE(alone.ok()) << alone.status().message();
  EXPECT_EQ(read_spec(*alone).value().vision, nullptr);
  const auto tower = loader::Checkpoint::open(files->tower);
  ASSERT_TRUE(tower.ok()) << tower.status().message();
  EXPECT_NE(read_spec(*tower).status().message().find("--mmproj"), std::string::npos);
  const auto folder = loader::Checkpoint::open(folder_of(GetParam()), files->tower);
  EXPECT_NE(folder.status().message().find("leave out --mmproj"), std::string::npos);
  const auto twice = loader::Checkpoint::open(files->model, files->model);
  EXPECT_NE(twice.status().message().find("no tower for pictures"), std::string::npos);
  // In a folder, the tower is not taken for a second model.
  std::filesystem::remove(out_ + "/text.gguf");
  EXPECT_TRUE(loader::Checkpoint::open(out_).ok());
}

INSTANTIATE_TEST_SUITE_P(Models, MmprojGolden,
                         ::testing::Values("llava", "qwen2-vl", "qwen2-5-vl", "qwen3-vl",
                                           "gemma3-vision", "idefics3"),
                         [](const auto& of) {
                           std::string name = of.param;
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace freshet
