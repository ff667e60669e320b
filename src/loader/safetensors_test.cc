#include "loader/safetensors.h"

#include <gmock/gmock.h>

#include "loader/loader_test.h"

namespace freshet::loader {
namespace {

using testing::HasSubstr;

std::vector<uint8_t> file_of(std::string_view header, size_t data_size) {
  const uint64_t n = header.size();
  std::vector<uint8_t> out(8 + header.size() + data_size, 7);
  std::memcpy(out.data(), &n, 8);
  std::copy(header.begin(), header.end(), out.begin() + 8);
  return out;
}

std::string error_of(std::string_view header, size_t data_size) {
  const auto bytes = file_of(header, data_size);
  const auto r = SafetensorsFile::parse(bytes, "x");
  return r.ok() ? "" : r.status().message();
}

TEST(Safetensors, ReadsWhatThePackageWrote) {
  auto f = SafetensorsFile::open(data_path("single/model.safetensors"));
  ASSERT_TRUE(f.ok()) << f.status().message();
  const SafetensorsFile moved = *std::move(f);
  expect_tensors(moved.tensors(), "single");
  EXPECT_EQ(moved.metadata().at("format"), "pt");
  EXPECT_EQ(moved.metadata().at("note"), "ünï");
  ASSERT_NE(moved.find("a.f16"), nullptr);
  EXPECT_EQ(*moved.find("a.f16")->usable_format(), quant::Format::kF16);
  EXPECT_EQ(moved.find("absent"), nullptr);
}

TEST(Safetensors, ListsTypesItCannotDecodeAndRefusesThemInUse) {
  const auto f = SafetensorsFile::open(data_path("single/model.safetensors"));
  ASSERT_TRUE(f.ok());
  const auto format = f->find("fp8")->usable_format();
  ASSERT_FALSE(format.ok());
  EXPECT_EQ(format.status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(format.status().message(), "tensor 'fp8' has type F8_E4M3, which is not supported");
}

TEST(Safetensors, ListsTypesOfTheFuture) {
  const auto bytes = file_of(R"({"a":{"dtype":"F3_NEW","shape":[5],"data_offsets":[0,2]}})", 2);
  const auto f = SafetensorsFile::parse(bytes, "x");
  ASSERT_TRUE(f.ok()) << f.status().message();
  EXPECT_FALSE(f->tensors()[0].usable_format().ok());
}

TEST(Safetensors, NamesWhatIsWrong) {
  const auto entry = [](std::string_view dtype, std::string_view shape, std::string_view offsets) {
    return fmt::format(R"({{"w":{{"dtype":"{}","shape":{},"data_offsets":{}}}}})", dtype, shape,
                       offsets);
  };
  EXPECT_EQ(error_of(entry("F32", "[2]", "[0,8]"), 8), "");
  EXPECT_THAT(error_of(entry("F32", "[2]", "[0,8]"), 7), HasSubstr("x: tensor 'w' ends at byte 8"));
  EXPECT_THAT(error_of(entry("F32", "[2]", "[0,8]"), 9), HasSubstr("1 bytes at the end"));
  EXPECT_THAT(error_of(entry("F32", "[2]", "[1,9]"), 9), HasSubstr("belong to no tensor"));
  EXPECT_THAT(error_of(entry("F32", "[3]", "[0,8]"), 8), HasSubstr("does not match its shape"));
  EXPECT_THAT(error_of(entry("F4", "[3]", "[0,1]"), 1), HasSubstr("does not match its shape"));
  EXPECT_THAT(error_of(entry("F32", "[2]", "[8,0]"), 8), HasSubstr("data_offsets"));
  EXPECT_THAT(error_of(entry("F32", "[2]", "[0,8,9]"), 8), HasSubstr("data_offsets"));
  EXPECT_THAT(error_of(entry("F32", "[2]", "[-8,0]"), 8), HasSubstr("data_offsets"));
  EXPECT_THAT(error_of(entry("F32", "[2]", "[0,8.5]"), 8), HasSubstr("data_offsets"));
  EXPECT_THAT(error_of(entry("F32", "[2]", "[0,18446744073709551616]"), 8),
              HasSubstr("data_offsets"));
  EXPECT_THAT(error_of(entry("F32", "[-2]", "[0,8]"), 8), HasSubstr("shape"));
  EXPECT_THAT(error_of(entry("F32", "\"2\"", "[0,8]"), 8), HasSubstr("shape"));
  // 2^32 * 2^32 wraps to 0 in 64 bits; a zero dimension must not hide that.
  EXPECT_THAT(error_of(entry("F32", "[4294967296,4294967296]", "[0,0]"), 0), HasSubstr("shape"));
  EXPECT_THAT(error_of(entry("F32", "[0,4294967296,4294967296]", "[0,0]"), 0), HasSubstr("shape"));
  // 2^62 numbers of 32 bits wrap to 0 bytes.
  EXPECT_THAT(error_of(entry("F32", "[4611686018427387904]", "[0,0]"), 0),
              HasSubstr("does not match its shape"));
  EXPECT_THAT(error_of(R"({"w":{"shape":[1],"data_offsets":[0,4]}})", 4), HasSubstr("no dtype"));
  EXPECT_THAT(error_of(R"({"w":[]})", 0), HasSubstr("no dtype"));
  EXPECT_THAT(error_of("[]", 0), HasSubstr("not a JSON object"));
  EXPECT_THAT(error_of("{", 0), HasSubstr("header"));
  EXPECT_THAT(error_of(R"({"__metadata__":3})", 0), HasSubstr("__metadata__"));
  EXPECT_THAT(error_of(std::string(100000, '['), 0), HasSubstr("header"));
}

TEST(Safetensors, RefusesTwoClaimsToTheSameBytesOrName) {
  EXPECT_THAT(error_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                       6),
              HasSubstr("tensor 'b' overlaps another"));
  EXPECT_THAT(error_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                       R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                       4),
              HasSubstr("names 'a' twice"));
}

TEST(Safetensors, RefusesImpossibleHeaderLengths) {
  for (const uint64_t n : {uint64_t{100}, uint64_t{100'000'001}, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    std::vector<uint8_t> bytes = file_of("{}", 0);
    std::memcpy(bytes.data(), &n, 8);
    EXPECT_FALSE(SafetensorsFile::parse(bytes, "x").ok()) << n;
  }
  EXPECT_FALSE(SafetensorsFile::parse({}, "x").ok());
  EXPECT_EQ(SafetensorsFile::open(data_path("absent")).status().code(), StatusCode::kNotFound);
}

TEST(Safetensors, RefusesEveryTruncation) {
  const auto whole = read_bytes(data_path("single/model.safetensors"));
  for (size_t n = 0; n < whole.size(); ++n) {
    const std::vector<uint8_t> part(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(n));
    EXPECT_FALSE(SafetensorsFile::parse(part, "x").ok()) << n;
  }
}

TEST(Safetensors, StaysInsideADamagedFile) {
  auto bytes = read_bytes(data_path("single/model.safetensors"));
  for (uint8_t& b : bytes) {
    const uint8_t good = b;
    for (const int bad : {0, 255, good ^ 1, good ^ 16, int{'9'}, int{'"'}}) {
      b = static_cast<uint8_t>(bad);
      const auto f = SafetensorsFile::parse(bytes, "x");
      if (f.ok()) expect_inside(f->tensors(), bytes);
    }
    b = good;
  }
}

}  // namespace
}  // namespace freshet::loader
