#include "quantizer/part_results.h"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "quantizer/method_set.h"

namespace freshet::quantizer {
namespace {

TEST(PartResults, KeepsWholePartsUntilTheKeyChanges) {
  const std::string folder = testing::TempDir() + "part_results";
  std::filesystem::remove_all(folder);
  auto results = PartResults::open(folder, "one");
  ASSERT_TRUE(results.ok()) << results.status().message();
  EXPECT_FALSE(results->has(3));
  json::Object record;
  record["answer"] = 42;
  const StoredTensor tensors[] = {{"a|codes", "U8", {2, 3}, {1, 2, 3, 4, 5, 6}},
                                  {"b", "F32", {1}, {0, 0, 128, 63}}};
  ASSERT_TRUE(results->write(3, tensors, json::Value(record)).ok());
  auto again = PartResults::open(folder, "one");
  ASSERT_TRUE(again.ok());
  ASSERT_TRUE(again->has(3));
  const auto part = again->read(3);
  ASSERT_TRUE(part.ok()) << part.status().message();
  EXPECT_EQ(part->record.get_int("answer", 0), 42);
  const loader::TensorSource* a = part->file.find("a|codes");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(std::vector<uint8_t>(a->data, a->data + a->bytes), tensors[0].bytes);
  // A file that was cut off is an error, not a result.
  std::filesystem::resize_file(folder + "/part-00003.safetensors", 60);
  EXPECT_FALSE(again->read(3).ok());
  const auto other = PartResults::open(folder, "two");
  ASSERT_TRUE(other.ok());
  EXPECT_FALSE(other->has(3));
}

TEST(PartResults, ErrorsNameTheFolder) {
  const auto failed = PartResults::open("/proc/nothing/here.partial", "key");
  ASSERT_FALSE(failed.ok());
  EXPECT_NE(failed.status().message().find("/proc/nothing/here.partial"), std::string::npos);
}

TEST(MethodSet, NamesAreParsedAndWritten) {
  for (const char* name : {"rtn", "imatrix", "gptq", "awq", "smoothquant", "awq+gptq",
                           "smoothquant+gptq", "imatrix+gptq"}) {
    const auto set = MethodSet::parse(name);
    ASSERT_TRUE(set.ok()) << name;
    EXPECT_EQ(set->name(), name);
  }
  EXPECT_EQ(MethodSet::parse("gptq+awq")->name(), "awq+gptq");
  EXPECT_EQ(MethodSet::parse("awq+rtn")->name(), "awq");
  for (const char* name : {"", "gptq+", "hqq", "awq+smoothquant", "rtn+gptq"})
    EXPECT_FALSE(MethodSet::parse(name).ok()) << name;
}

}  // namespace
}  // namespace freshet::quantizer
