#include "loader/gguf.h"

#include <gmock/gmock.h>

#include "loader/loader_test.h"

namespace freshet::loader {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A GGUF file written by hand, entry by entry.
class Bytes {
 public:
  Bytes(uint64_t tensors, uint64_t keys, uint32_t version = 3) : out_("GGUF") {
    num(version).num(tensors).num(keys);
  }
  template <class T>
  Bytes& num(T v) {
    out_.append(reinterpret_cast<const char*>(&v), sizeof v);
    return *this;
  }
  Bytes& str(std::string_view s) {
    num(static_cast<uint64_t>(s.size()));
    out_.append(s);
    return *this;
  }
  Bytes& tensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
                uint64_t offset) {
    str(name).num(static_cast<uint32_t>(dims.size()));
    for (const uint64_t d : dims) num(d);
    return num(type).num(offset);
  }
  Bytes& data(size_t n) {
    out_.resize((out_.size() + 31) / 32 * 32 + n);
    return *this;
  }
  std::string error() const {
    const auto f =
        GgufFile::parse({reinterpret_cast<const uint8_t*>(out_.data()), out_.size()}, "x");
    return f.ok() ? "" : f.status().message();
  }

 private:
  std::string out_;
};

TEST(Gguf, ReadsEveryMetadataType) {
  auto opened = GgufFile::open(data_path("model.gguf"));
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const GgufFile f = *std::move(opened);
  EXPECT_EQ(f.version(), 3u);
  EXPECT_EQ(f.get_string("general.architecture"), "llama");
  EXPECT_EQ(f.get_string("general.name"), "tiny ünï");
  EXPECT_EQ(f.get_int("t.u8"), 200);
  EXPECT_EQ(f.get_int("t.i8"), -100);
  EXPECT_EQ(f.get_int("t.u16"), 60000);
  EXPECT_EQ(f.get_int("t.i16"), -30000);
  EXPECT_EQ(f.get_u32("t.u32"), 4000000000u);
  EXPECT_EQ(f.get_int("t.i32"), -2000000000);
  EXPECT_EQ(f.get_int("t.i64"), -(int64_t{1} << 62));
  EXPECT_EQ(f.get_f32("t.f32"), 0.1f);
  EXPECT_EQ(f.get_f32("t.u8"), 200.0f);
  EXPECT_EQ(f.find("t.f64")->number_at(0), 1e300);
  EXPECT_EQ(f.get_bool("t.bool"), true);
  EXPECT_THAT(*f.get_strings("t.strings"), ElementsAre("", "a", "Ġthe", "日本"));
  EXPECT_THAT(*f.get_ints("t.ints"), ElementsAre(1, -2, 3));
  EXPECT_THAT(*f.get_floats("t.floats"), ElementsAre(0.5f, -1.25f));
  EXPECT_THAT(*f.get_ints("t.bools"), ElementsAre(1, 0));
}

TEST(Gguf, GivesNothingForAbsentOrUnfitValues) {
  const auto f = GgufFile::open(data_path("model.gguf"));
  ASSERT_TRUE(f.ok());
  EXPECT_EQ(f->get_int("absent"), std::nullopt);
  EXPECT_EQ(f->get_string("absent"), std::nullopt);
  EXPECT_EQ(f->get_strings("absent"), nullptr);
  EXPECT_EQ(f->get_ints("absent"), std::nullopt);
  EXPECT_EQ(f->get_int("t.u64"), std::nullopt);  // 2^63 + 5
  EXPECT_EQ(f->get_u32("t.i32"), std::nullopt);  // negative
  EXPECT_EQ(f->get_int("t.f32"), std::nullopt);  // 0.1
  EXPECT_EQ(f->get_int("t.f64"), std::nullopt);  // 1e300
  EXPECT_EQ(f->get_int("t.ints"), std::nullopt);
  EXPECT_EQ(f->get_int("general.name"), std::nullopt);
  EXPECT_EQ(f->get_f32("general.name"), std::nullopt);
  EXPECT_EQ(f->get_floats("t.strings"), std::nullopt);
  EXPECT_EQ(f->get_strings("general.name"), nullptr);
  EXPECT_EQ(f->get_string("t.u8"), std::nullopt);
}

TEST(Gguf, ReadsTensorsWithShapesOutermostFirst) {
  for (const std::string name : {"model.gguf", "aligned.gguf", "writable.gguf"}) {
    const auto f = GgufFile::open(data_path(name));
    ASSERT_TRUE(f.ok()) << f.status().message();
    expect_tensors(f->tensors(), name);
    EXPECT_EQ(f->alignment(), name == "aligned.gguf" ? 128u : 32u);
    EXPECT_THAT(f->find_tensor("blk.0.ffn_gate_exps.weight")->shape, ElementsAre(2, 3, 5));
    EXPECT_EQ(f->find_tensor("absent"), nullptr);
  }
}

TEST(Gguf, ListsTypesItCannotDecodeAndRefusesThemInUse) {
  const auto f = GgufFile::open(data_path("model.gguf"));
  ASSERT_TRUE(f.ok());
  EXPECT_EQ(f->find_tensor("blk.1.odd.weight")->usable_format().status().message(),
            "tensor 'blk.1.odd.weight' has type Q8_K, which is not supported");
}

TEST(Gguf, ReadsVersion2) {
  auto bytes = read_bytes(data_path("model.gguf"));
  bytes[4] = 2;
  const auto f = GgufFile::parse(bytes, "v2");
  ASSERT_TRUE(f.ok()) << f.status().message();
  expect_tensors(f->tensors(), "model.gguf");
}

TEST(Gguf, RefusesOtherVersions) {
  EXPECT_EQ(Bytes(0, 0).error(), "");
  EXPECT_THAT(Bytes(0, 0, 1).error(), HasSubstr("version 1"));
  EXPECT_THAT(Bytes(0, 0, 4).error(), HasSubstr("version 4"));
  EXPECT_THAT(Bytes(0, 0, 0).error(), HasSubstr("version 0"));
  EXPECT_THAT(Bytes(0, 0, 0x03000000).error(), HasSubstr("big-endian"));
}

TEST(Gguf, ChecksCountsAgainstTheBytesThereAre) {
  const uint64_t huge = ~uint64_t{0};
  EXPECT_THAT(Bytes(huge, 0).error(), HasSubstr("tensors do not fit"));
  EXPECT_THAT(Bytes(0, huge).error(), HasSubstr("metadata keys do not fit"));
  EXPECT_THAT(Bytes(0, 1).num(huge).data(64).error(), HasSubstr("metadata key 0"));
  EXPECT_THAT(Bytes(0, 1).str("k").num(8u).num(huge).data(64).error(), HasSubstr("'k'"));
  // Counts whose product with the size of a value overflows.
  EXPECT_THAT(Bytes(0, 1).str("k").num(9u).num(4u).num(uint64_t{1} << 62).data(64).error(),
              HasSubstr("'k' claims"));
  EXPECT_THAT(Bytes(0, 1).str("k").num(9u).num(8u).num(uint64_t{1} << 61).data(64).error(),
              HasSubstr("'k' claims"));
}

TEST(Gguf, NamesTheKeyThatIsWrong) {
  EXPECT_THAT(Bytes(0, 1).str("k").num(13u).data(64).error(),
              HasSubstr("'k' has the unknown type 13"));
  EXPECT_THAT(Bytes(0, 1).str("k").num(9u).num(77u).num(uint64_t{0}).data(64).error(),
              HasSubstr("'k' has the unknown type 77"));
  EXPECT_THAT(Bytes(0, 1).str("k").num(9u).num(9u).num(uint64_t{1}).data(64).error(),
              HasSubstr("'k' is an array of arrays"));
  EXPECT_THAT(Bytes(0, 2).str("k").num(4u).num(1u).str("k").num(4u).num(1u).error(),
              HasSubstr("'k' occurs twice"));
  for (const uint32_t alignment : {0u, 3u, 48u, 0x80000000u}) {
    EXPECT_THAT(Bytes(0, 1).str("general.alignment").num(4u).num(alignment).error(),
                HasSubstr("general.alignment"));
  }
}

TEST(Gguf, NamesTheTensorThatIsWrong) {
  EXPECT_EQ(Bytes(1, 0).tensor("w", {32, 2}, 2, 0).data(36).error(), "");
  EXPECT_THAT(Bytes(1, 0).tensor("w", {32, 2}, 2, 0).data(35).error(),
              HasSubstr("'w' (36 bytes at 0)"));
  EXPECT_THAT(Bytes(1, 0).tensor("w", {32, 2}, 2, 32).data(36).error(),
              HasSubstr("'w' (36 bytes at 32)"));
  EXPECT_THAT(Bytes(1, 0).tensor("w", {31, 2}, 2, 0).data(64).error(),
              HasSubstr("'w' has rows of 31"));
  EXPECT_THAT(Bytes(1, 0).tensor("w", {}, 2, 0).data(64).error(), HasSubstr("'w' has rows of 1"));
  EXPECT_THAT(Bytes(1, 0).tensor("w", {32}, 2, 8).data(64).error(), HasSubstr("alignment"));
  EXPECT_THAT(Bytes(1, 0).tensor("w", {32}, 99, 0).data(64).error(),
              HasSubstr("'w' has the unknown type 99"));
  EXPECT_THAT(Bytes(1, 0).tensor("w", {1, 1, 1, 1, 1}, 0, 0).data(64).error(),
              HasSubstr("'w' has 5 dimensions"));
  EXPECT_THAT(
      Bytes(1, 0).tensor("w", {uint64_t{1} << 32, uint64_t{1} << 32}, 0, 0).data(64).error(),
      HasSubstr("'w' has an impossible shape"));
  EXPECT_THAT(Bytes(1, 0).tensor("w", {~uint64_t{0}}, 0, 0).data(64).error(),
              HasSubstr("'w' has an impossible shape"));
  EXPECT_THAT(Bytes(1, 0).tensor("w", {uint64_t{1} << 62}, 28, 0).data(64).error(),
              HasSubstr("'w' has an impossible shape"));
  EXPECT_THAT(Bytes(1, 0).tensor("w", {8}, 0, ~uint64_t{31}).data(64).error(),
              HasSubstr("truncated"));
  EXPECT_THAT(Bytes(2, 0).tensor("w", {8}, 0, 0).tensor("w", {8}, 0, 32).data(64).error(),
              HasSubstr("'w' is listed twice"));
  EXPECT_THAT(Bytes(2, 0).tensor("v", {16}, 0, 0).tensor("w", {8}, 0, 32).data(64).error(),
              HasSubstr("'v' and 'w' overlap"));
}

TEST(Gguf, RefusesEveryTruncationOfItsTables) {
  const auto whole = read_bytes(data_path("model.gguf"));
  const auto f = GgufFile::open(data_path("model.gguf"));
  size_t end = 0;  // after the last tensor; the rest is padding
  for (const TensorSource& t : f->tensors()) end = std::max(end, t.file_offset + t.bytes);
  ASSERT_LE(end, whole.size());
  for (size_t n = 0; n < end; ++n) {
    const std::vector<uint8_t> part(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(n));
    EXPECT_FALSE(GgufFile::parse(part, "x").ok()) << n;
  }
}

TEST(Gguf, StaysInsideADamagedFile) {
  auto bytes = read_bytes(data_path("model.gguf"));
  for (uint8_t& b : bytes) {
    const uint8_t good = b;
    for (const int bad : {0, 1, 127, 128, 255, good ^ 1, good ^ 16}) {
      b = static_cast<uint8_t>(bad);
      const auto f = GgufFile::parse(bytes, "x");
      if (f.ok()) expect_inside(f->tensors(), bytes);
    }
    b = good;
  }
}

}  // namespace
}  // namespace freshet::loader
