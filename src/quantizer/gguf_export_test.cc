// Files made from golden checkpoints: where the rows of their tensors come from.
#include "quantizer/gguf_export.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "loader/gguf.h"

namespace freshet::quantizer {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

const std::string kLlama = FRESHET_UNPACKED_DATA "/golden/llama";

class GgufExport : public testing::Test {
 protected:
  GgufExport() : pool_(2) {
    std::string name = (fs::temp_directory_path() / "freshet-export-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~GgufExport() override { fs::remove_all(folder_); }

  ExportOptions options(const char* type, const char* file) const {
    ExportOptions o;
    o.output = folder_ + "/" + file;
    o.recipe = Recipe::by_name(type).value();
    o.name = "test";
    o.warn = [](const std::string&) {};
    return o;
  }
  Status exported(const std::string& model, const ExportOptions& o) {
    FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(model));
    return export_gguf(checkpoint, pool_, o);
  }

  ThreadPool pool_;
  std::string folder_;
};

std::vector<float> values(const loader::TensorSource& t) {
  std::vector<float> out(static_cast<size_t>(t.elements()));
  quant::info(*t.format).decode(t.data, out.data(), t.elements());
  return out;
}

// Encodes one tensor as the negative of its numbers.
class Negated : public RowSource {
 public:
  Result<bool> encode(const Planned& p, const Numbers& numbers, std::span<uint8_t> rows) override {
    seen.insert(p.name);
    if (p.name != "blk.1.attn_q.weight") return false;
    FRESHET_ASSIGN_OR_RETURN(const auto own, numbers());
    std::vector<float> negative(own.begin(), own.end());
    for (float& v : negative) v = -v;
    quant::info(p.format).encode(negative.data(), rows.data(), std::ssize(negative), nullptr);
    return true;
  }
  std::set<std::string> seen;
};

TEST_F(GgufExport, RowSourceSuppliesTheTensorsItWants) {
  ASSERT_TRUE(exported(kLlama, options("q8_0", "plain.gguf")).ok());
  Negated negated;
  ExportOptions o = options("q8_0", "hooked.gguf");
  o.rows = &negated;
  ASSERT_TRUE(exported(kLlama, o).ok());
  const auto plain = loader::GgufFile::open(folder_ + "/plain.gguf");
  const auto hooked = loader::GgufFile::open(folder_ + "/hooked.gguf");
  ASSERT_TRUE(plain.ok() && hooked.ok());
  for (const loader::TensorSource& t : plain->tensors()) {
    const loader::TensorSource* u = hooked->find_tensor(t.name);
    ASSERT_NE(u, nullptr);
    EXPECT_TRUE(negated.seen.contains(std::string(t.name))) << t.name;
    if (t.name != "blk.1.attn_q.weight") {
      ASSERT_EQ(t.bytes, u->bytes);
      EXPECT_EQ(std::memcmp(t.data, u->data, t.bytes), 0) << t.name;
      continue;
    }
    std::vector<float> want = values(t);
    for (float& v : want) v = -v;
    EXPECT_EQ(values(*u), want);
  }
}

TEST_F(GgufExport, ErrorOfARowSourceStopsTheExport) {
  struct Broken : RowSource {
    Result<bool> encode(const Planned&, const Numbers&, std::span<uint8_t>) override {
      return invalid_argument("no codes for this tensor");
    }
  } broken;
  ExportOptions o = options("q8_0", "broken.gguf");
  o.rows = &broken;
  EXPECT_THAT(exported(kLlama, o).message(), HasSubstr("no codes for this tensor"));
  EXPECT_FALSE(fs::exists(o.output));
}

}  // namespace
}  // namespace freshet::quantizer
