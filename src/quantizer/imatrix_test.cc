// Importance matrices: files written by the gguf package and by hand, both forms back and forth,
// merging, and files that lie. quant/imatrix.{gguf,dat} have the same contents.
#include "quantizer/imatrix.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace freshet::quantizer {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

const std::string kData = FRESHET_UNPACKED_DATA "/quant/imatrix";
constexpr const char* kDense = "blk.0.attn_q.weight";
constexpr const char* kExperts = "blk.0.ffn_up_exps.weight";

std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

Result<Imatrix> parse(const std::string& bytes) {
  return Imatrix::parse({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, "test");
}

std::vector<float> mean(const Imatrix& m, const char* name, int expert, int cols) {
  const Importance importance(m);
  const auto v = importance.of(name, expert, cols);
  return {v.begin(), v.end()};
}

class ImatrixFiles : public testing::Test {
 protected:
  ImatrixFiles() {
    std::string name = (fs::temp_directory_path() / "freshet-imatrix-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~ImatrixFiles() override { fs::remove_all(folder_); }
  std::string folder_;
};

TEST_F(ImatrixFiles, ReadsGguf) {
  const auto m = Imatrix::load(kData + ".gguf");
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_THAT(m->datasets, ElementsAre("calibration.txt", "more.txt"));
  EXPECT_EQ(m->chunk_count, 2U);
  EXPECT_EQ(m->chunk_size, 512U);
  ASSERT_EQ(m->entries.size(), 2U);
  EXPECT_THAT(m->entries.at(kDense).sum, ElementsAre(-1024, 0, 1024, 2048));
  EXPECT_THAT(m->entries.at(kExperts).counts, ElementsAre(512, 0, 256));
  EXPECT_THAT(m->entries.at(kExperts).sum2, ElementsAre(512, 1024, 0, 0, 768, 64));
  EXPECT_THAT(mean(*m, kDense, 0, 4), ElementsAre(0.5f, 1, 2, 4));
  EXPECT_THAT(mean(*m, kExperts, 2, 2), ElementsAre(3, 0.25f));
  // No token reached this one: all tokens of the tensor stand in.
  EXPECT_THAT(mean(*m, kExperts, 1, 2), ElementsAre(1280.0f / 768, 1088.0f / 768));
  EXPECT_TRUE(mean(*m, kExperts, 3, 2).empty());
  EXPECT_TRUE(mean(*m, "blk.1.attn_q.weight", 0, 4).empty());
}

TEST_F(ImatrixFiles, ReadsTheOldForm) {
  const auto m = Imatrix::load(kData + ".dat");
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_THAT(m->datasets, ElementsAre("calibration.txt"));
  EXPECT_EQ(m->chunk_count, 2U);
  EXPECT_THAT(mean(*m, kDense, 0, 4), ElementsAre(0.5f, 1, 2, 4));
  EXPECT_THAT(mean(*m, kExperts, 1, 2), ElementsAre(1, 1));
  EXPECT_THAT(mean(*m, kExperts, 2, 2), ElementsAre(3, 0.25f));
  EXPECT_THAT(m->entries.at(kDense).counts, ElementsAre(1024));
}

TEST_F(ImatrixFiles, WritesBothForms) {
  const auto m = Imatrix::load(kData + ".gguf");
  ASSERT_TRUE(m->save_gguf(folder_ + "/m.gguf").ok());
  const auto again = Imatrix::load(folder_ + "/m.gguf");
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->datasets, m->datasets);
  for (const auto& [name, e] : m->entries) {
    EXPECT_EQ(again->entries.at(name).sum2, e.sum2);
    EXPECT_EQ(again->entries.at(name).sum, e.sum);
    EXPECT_EQ(again->entries.at(name).counts, e.counts);
  }
  auto one_set = *m;
  one_set.datasets.pop_back();
  ASSERT_TRUE(one_set.save_dat(folder_ + "/m.dat").ok());
  EXPECT_EQ(read_all(folder_ + "/m.dat"), read_all(kData + ".dat"));
  EXPECT_THAT(m->save_dat(folder_ + "/no/such/folder/m.dat").message(), HasSubstr("cannot write"));
}

TEST_F(ImatrixFiles, MergesSumsAndCounts) {
  auto m = Imatrix::load(kData + ".gguf").value();
  const auto dat = Imatrix::load(kData + ".dat").value();
  Imatrix other = m;
  other.entries.at(kExperts).counts = {0, 128, 0};
  other.entries.at(kExperts).sum2 = {0, 0, 128, 256, 0, 0};
  other.datasets = {"third.txt"};
  ASSERT_TRUE(m.merge(other).ok());
  EXPECT_THAT(m.entries.at(kExperts).counts, ElementsAre(512, 128, 256));
  EXPECT_THAT(mean(m, kExperts, 1, 2), ElementsAre(1, 2));
  EXPECT_THAT(m.entries.at(kDense).counts, ElementsAre(2048));
  EXPECT_EQ(m.chunk_count, 4U);
  EXPECT_THAT(m.datasets, ElementsAre("calibration.txt", "more.txt", "third.txt"));
  // A .dat has one count for all experts and no plain sums.
  ASSERT_TRUE(m.merge(dat).ok());
  EXPECT_THAT(m.entries.at(kExperts).counts, ElementsAre(1024, 640, 768));
  EXPECT_TRUE(m.entries.at(kDense).sum.empty());
  other.entries.at(kDense).sum2.pop_back();
  EXPECT_THAT(m.merge(other).message(), HasSubstr(kDense));
}

TEST_F(ImatrixFiles, KnowsWhatIsMissing) {
  const auto m = Imatrix::load(kData + ".gguf").value();
  const std::vector<Imatrix::Tensor> tensors = {
      {kDense, 1, 4}, {kExperts, 3, 2}, {"blk.1.attn_q.weight", 1, 4}};
  EXPECT_THAT(m.missing(tensors).value(), ElementsAre("blk.1.attn_q.weight"));
  const std::vector<Imatrix::Tensor> wide = {{kDense, 1, 8}};
  EXPECT_THAT(m.missing(wide).status().message(), HasSubstr("made for another model"));
  const std::vector<Imatrix::Tensor> other = {{"blk.7.attn_q.weight", 1, 4}};
  EXPECT_THAT(m.missing(other).status().message(), HasSubstr("no entry for this model"));
  auto unseen = m;
  unseen.entries.at(kExperts).counts = {0, 0, 0};
  EXPECT_THAT(unseen.missing(tensors).value(), ElementsAre(kExperts, "blk.1.attn_q.weight"));
  EXPECT_TRUE(mean(unseen, kExperts, 0, 2).empty());
}

TEST_F(ImatrixFiles, DamagedFilesAreRefused) {
  const std::string whole = read_all(kData + ".dat");
  ASSERT_TRUE(parse(whole).ok());
  const size_t entries_end = whole.size() - 8 - std::strlen("calibration.txt");
  for (size_t n = 0; n < whole.size(); ++n) {
    const auto m = parse(whole.substr(0, n));
    EXPECT_EQ(m.ok(), n == entries_end || n == entries_end + 4) << n;
    if (m.ok()) continue;
    EXPECT_THAT(m.status().message(), HasSubstr("test: ")) << n;
  }
  const auto with = [&](size_t at, auto value) {
    std::string bytes = whole;
    std::memcpy(bytes.data() + at, &value, sizeof value);
    return parse(bytes).status().message();
  };
  const size_t calls = 8 + std::strlen(kDense), first = calls + 8;
  EXPECT_THAT(with(0, -1), HasSubstr("not an importance matrix"));
  EXPECT_THAT(with(0, 1 << 30), HasSubstr("not an importance matrix"));
  EXPECT_THAT(with(4, 1 << 30), HasSubstr("ends within"));
  EXPECT_THAT(with(calls, -2), HasSubstr("calls"));
  EXPECT_THAT(with(calls + 4, 1 << 30), HasSubstr("ends within"));
  EXPECT_THAT(with(first, std::numeric_limits<float>::quiet_NaN()), HasSubstr("NaN"));
  EXPECT_THAT(with(first, -1.0f), HasSubstr("negative"));
  EXPECT_THAT(with(first, std::numeric_limits<float>::max()), HasSubstr("infinity"));
  const std::string gguf = read_all(kData + ".gguf");
  // The last bytes pad a tensor.
  for (size_t n = 0; n + 32 < gguf.size(); n += 7) EXPECT_FALSE(parse(gguf.substr(0, n)).ok()) << n;
}

}  // namespace
}  // namespace freshet::quantizer
