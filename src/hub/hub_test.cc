#include <csignal>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "http/url.h"
#include "hub/blob_writer.h"
#include "hub/cache.h"
#include "hub/catalogue.h"
#include "hub/listing.h"
#include "hub/names.h"
#include "hub/settings.h"

namespace freshet::hub {
namespace {

using testing::IsEmpty;

TEST(ModelRef, TakesNamesApart) {
  const ModelRef a = parse_model_ref("hf:org/name").value();
  EXPECT_EQ(a.repo, "org/name");
  EXPECT_EQ(a.revision, "main");
  EXPECT_EQ(a.quant, "");
  const ModelRef b = parse_model_ref("HF://org/name@v1.0:Q4_K_M").value();
  EXPECT_EQ(b.repo, "org/name");
  EXPECT_EQ(b.revision, "v1.0");
  EXPECT_EQ(b.quant, "Q4_K_M");
  EXPECT_EQ(b.text(), "hf:org/name@v1.0:Q4_K_M");
  const ModelRef c = parse_model_ref("gpt2@refs/pr/1:dir/a.gguf").value();
  EXPECT_EQ(c.repo, "gpt2");
  EXPECT_EQ(c.revision, "refs/pr/1");
  EXPECT_EQ(c.quant, "dir/a.gguf");
  for (const char* bad :
       {"hf:", "hf:/", "hf:a/", "hf:/a", "hf:a/b/c", "hf:..", "hf:a/..", "hf:a--b", "hf:a/b@",
        "hf:a/b@..", "hf:a/b@x//y", "hf:a/b@/x", "hf:a/b:", "hf:a/b:/x", "hf:a/b:../x", "hf:a b/c",
        "hf:.a/b", "hf:-a/b", "hf:a/b\n"}) {
    EXPECT_FALSE(parse_model_ref(bad).ok()) << bad;
  }
}

TEST(ModelRef, UrlsOfTheHub) {
  const std::string hub = "https://huggingface.co";
  EXPECT_EQ(ref_of_url(hub + "/org/m", hub)->text(), "hf:org/m");
  EXPECT_EQ(ref_of_url(hub + "/org/m/tree/v2?x=1", hub)->text(), "hf:org/m@v2");
  EXPECT_EQ(ref_of_url(hub + "/org/m/blob/main/a%20b/c.gguf", hub)->text(), "hf:org/m:a b/c.gguf");
  EXPECT_EQ(ref_of_url(hub + "/org/m/resolve/v1/x.gguf?download=true#y", hub)->text(),
            "hf:org/m@v1:x.gguf");
  for (const char* other :
       {"/org", "", "/org/m/resolve/main/..%2f..%2fx", "/org/m/commits/main", "/datasets/a/b"}) {
    EXPECT_FALSE(ref_of_url(hub + other, hub)) << other;
  }
  EXPECT_FALSE(ref_of_url("https://huggingface.co.evil.example/org/m", hub));
}

TEST(Names, Folders) {
  EXPECT_EQ(repo_folder("org/na-me.x"), "models--org--na-me.x");
  EXPECT_EQ(repo_of_folder("models--org--na-me.x"), "org/na-me.x");
  EXPECT_EQ(repo_of_folder("models--gpt2"), "gpt2");
  EXPECT_EQ(repo_of_folder("datasets--a--b"), "");
  EXPECT_EQ(repo_of_folder("models--..--b"), "");
  EXPECT_EQ(etag_text("W/\"abc\""), "abc");
  EXPECT_EQ(etag_text("\"abc\""), "abc");
  EXPECT_EQ(etag_text("abc"), "abc");
}

// "path size": a file of the listing.
std::vector<RepoFile> repo_of(std::initializer_list<const char*> paths) {
  std::vector<RepoFile> files;
  for (const char* p : paths) files.push_back({.path = p, .size = 1, .blob = {}});
  return files;
}

std::string chosen(const std::vector<RepoFile>& files, std::string_view quant) {
  const auto s = select_files(files, quant, "org/m");
  return s.ok() ? (s->gguf ? s->main : "folder") : "error: " + s.status().message();
}

TEST(Listing, ChoosesOneModel) {
  const auto both = repo_of({"config.json", "model.safetensors", "x-F16.gguf", "x-Q8_0.gguf"});
  EXPECT_EQ(chosen(both, ""), "folder");  // the default quantisation is not among them
  EXPECT_EQ(chosen(both, "Q8_0"), "x-Q8_0.gguf");
  const auto many = repo_of({"config.json", "model.safetensors", "x-Q4_K_M.gguf"});
  EXPECT_EQ(chosen(many, ""), "x-Q4_K_M.gguf");
  EXPECT_EQ(chosen(many, "safetensors"), "folder");
  const auto names = repo_of({"a.IQ4_XS.gguf", "a.UD-Q4_K_XL.gguf", "q4_k_m/b-00001-of-00002.gguf",
                              "q4_k_m/b-00002-of-00002.gguf"});
  EXPECT_EQ(chosen(names, ""), "q4_k_m/b-00001-of-00002.gguf");
  EXPECT_EQ(chosen(names, "iq4_xs"), "a.IQ4_XS.gguf");
  EXPECT_EQ(chosen(names, "UD-Q4_K_XL"), "a.UD-Q4_K_XL.gguf");
  EXPECT_EQ(chosen(names, "q4_k_m/b-00002-of-00002.gguf"), "q4_k_m/b-00001-of-00002.gguf");
  EXPECT_THAT(chosen(names, "Q4"), testing::HasSubstr("there is"));
  EXPECT_EQ(gguf_bytes(names, gguf_models(names).back()), 2);
}

TEST(Listing, Quantisations) {
  EXPECT_EQ(quant_of("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf"), "Q4_K_M");
  EXPECT_EQ(quant_of("dir/Llama-3.2-1B.BF16.gguf"), "BF16");
  EXPECT_EQ(quant_of("x-IQ3_XXS.gguf"), "IQ3_XXS");
  EXPECT_EQ(quant_of("gpt-oss-20b-mxfp4.gguf"), "MXFP4");
  EXPECT_EQ(quant_of("model.gguf"), "");
}

TEST(Listing, FoldersAreCompleteWithAllShards) {
  auto files = repo_of({"config.json", "model-00001-of-00002.safetensors"});
  EXPECT_FALSE(has_all_parts(select_files(files, "", "r").value()));
  files.push_back({.path = "model-00002-of-00002.safetensors", .size = 1, .blob = {}});
  EXPECT_TRUE(has_all_parts(select_files(files, "", "r").value()));
  EXPECT_FALSE(has_tokenizer(select_files(files, "", "r").value()));
  files.push_back({.path = "tokenizer.json", .size = 1, .blob = {}});
  EXPECT_TRUE(has_tokenizer(select_files(files, "", "r").value()));
}

TEST(Settings, HostsWithoutAProxy) {
  EXPECT_TRUE(bypasses_proxy("localhost, .example.com", "a.example.com", 443));
  EXPECT_TRUE(bypasses_proxy("example.com", "example.com", 443));
  EXPECT_TRUE(bypasses_proxy("*.example.com:8080", "a.example.com", 8080));
  EXPECT_TRUE(bypasses_proxy("*", "x", 1));
  EXPECT_FALSE(bypasses_proxy("example.com", "badexample.com", 443));
  EXPECT_FALSE(bypasses_proxy("example.com:8080", "example.com", 443));
  EXPECT_FALSE(bypasses_proxy("", "x", 1));
}

TEST(Catalogue, NamesAreDistinctAndSafe) {
  for (const CatalogueEntry& e : catalogue()) {
    EXPECT_EQ(find_in_catalogue(e.name), &e);
    EXPECT_TRUE(parse_model_ref(e.repo).ok()) << e.repo;
    EXPECT_EQ(name_of_repo(e.repo), e.name);
    EXPECT_TRUE(names_a_family(e.name)) << e.name;
  }
}

TEST(Catalogue, ClosestNames) {
  const std::vector<std::string> own = {"mymodel"};
  EXPECT_EQ(closest_name("smolm2", own), "smollm2");
  EXPECT_EQ(closest_name("Qwen3-0.6", own), "qwen3-0.6b");
  EXPECT_EQ(closest_name("meta-llama/Llama-3.2-1B", own), "llama3.2-1b");
  EXPECT_EQ(closest_name("mymodl", own), "mymodel");
  EXPECT_EQ(closest_name("Hello", own), "");
  EXPECT_EQ(closest_name("", own), "");
}

TEST(Url, Resources) {
  const auto url = http::parse_resource_url("https://cdn.example/a/b%20c?sig=1&x#f").value();
  EXPECT_EQ(url.server.origin(), "https://cdn.example");
  EXPECT_EQ(url.target, "/a/b%20c?sig=1&x");
  EXPECT_EQ(http::parse_resource_url("http://h:81").value().target, "/");
  EXPECT_EQ(http::parse_resource_url("http://h?q").value().target, "/?q");
  EXPECT_EQ(http::resolve_location(url, "/z?1").value().text(), "https://cdn.example/z?1");
  EXPECT_EQ(http::resolve_location(url, "//other/z").value().text(), "https://other/z");
  EXPECT_EQ(http::resolve_location(url, "http://o:9/").value().text(), "http://o:9/");
  for (const char* bad : {"", "x", "relative/path", "ftp://x/", "http://", "http://u:p@h/",
                          "http://h/a b", "http://h/\r\nX: y"}) {
    EXPECT_FALSE(http::parse_resource_url(bad).ok()) << bad;
  }
  EXPECT_EQ(http::escape_path("a b/ü%.gguf"), "a%20b/%C3%BC%25.gguf");
  EXPECT_EQ(http::unescape(http::escape_path("a b/ü%.gguf")), "a b/ü%.gguf");
  EXPECT_EQ(http::unescape("%4%zz%"), "%4%zz%");
}

class BlobWriterTest : public testing::Test {
 protected:
  // Tests of this class may run at the same time.
  std::string path_ = testing::TempDir() + "freshet_blob_" +
                      testing::UnitTest::GetInstance()->current_test_info()->name();
  void SetUp() override { std::filesystem::remove(path_); }
  void TearDown() override { std::filesystem::remove(path_); }
  std::string contents() {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
};

// The first two hashes are from FIPS 180-4's examples, the others from `git hash-object`.
TEST_F(BlobWriterTest, Hashes) {
  EXPECT_EQ(sha256_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  auto writer = BlobWriter::open(path_).value();
  EXPECT_EQ(git_hash_of_file(path_).value(), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(writer->write(std::string(1000, 'a')));
  EXPECT_EQ(writer->size(), 1'000'000);
  EXPECT_EQ(writer->finish().value(),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_TRUE(writer->restart().ok());
  EXPECT_TRUE(writer->write("hello\n"));
  (void)writer->finish().value();
  EXPECT_EQ(git_hash_of_file(path_).value(), "ce013625030ba8dba906f756967f9e9ca394464a");
}

TEST_F(BlobWriterTest, GoesOnBehindWhatIsThere) {
  {
    EXPECT_TRUE(BlobWriter::open(path_).value()->write("ab"));
  }
  auto writer = BlobWriter::open(path_).value();
  EXPECT_EQ(writer->size(), 2);
  EXPECT_TRUE(writer->write("c"));
  EXPECT_EQ(writer->finish().value(), sha256_of("abc"));
  EXPECT_EQ(contents(), "abc");
}

TEST_F(BlobWriterTest, ReportsAFullDisk) {
  // A limit on the size of files stands in for the full disk.
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{.rlim_cur = 3 << 20, .rlim_max = old_limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  auto writer = BlobWriter::open(path_).value();
  bool written = true;
  for (int i = 0; i < 100 && written; ++i) written = writer->write(std::string(1 << 20, 'a'));
  EXPECT_FALSE(written);
  EXPECT_THAT(writer->status().message(), testing::HasSubstr("File too large"));
  EXPECT_FALSE(writer->finish().ok());
  setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
}

class CacheTest : public testing::Test {
 protected:
  std::string root_ = testing::TempDir() + "freshet_hub_cache";
  Cache cache_{root_};
  std::string commit_ = std::string(40, 'a');
  void SetUp() override { std::filesystem::remove_all(root_); }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void add(const std::string& path, const std::string& blob) {
    ASSERT_TRUE(cache_.prepare("o/m").ok());
    std::ofstream(cache_.blob_path("o/m", blob)) << path;
    ASSERT_TRUE(cache_.link("o/m", commit_, path, blob).ok());
  }
};

TEST_F(CacheTest, FindsWhatIsComplete) {
  const ModelRef ref{.repo = "o/m"};
  EXPECT_FALSE(cache_.locate(ref));
  add("sub/m-Q4_K_M.gguf", "b1");
  EXPECT_FALSE(cache_.locate(ref));  // no ref yet
  ASSERT_TRUE(cache_.write_ref("o/m", "main", commit_).ok());
  EXPECT_EQ(cache_.locate(ref)->path, cache_.snapshot_dir("o/m", commit_) + "/sub/m-Q4_K_M.gguf");
  EXPECT_FALSE(cache_.locate({.repo = "o/m", .revision = "other"}));
  EXPECT_TRUE(cache_.locate({.repo = "o/m", .revision = commit_}));
  std::filesystem::remove(cache_.blob_path("o/m", "b1"));
  EXPECT_FALSE(cache_.locate(ref));
  EXPECT_THAT(cache_.list(), IsEmpty());
}

TEST_F(CacheTest, LocksAreExclusive) {
  ASSERT_TRUE(cache_.prepare("o/m").ok());
  bool waited = false;
  {
    const auto lock = BlobLock::take(cache_, "o/m", "b", [&] { waited = true; });
    EXPECT_TRUE(lock.ok());
  }
  const auto lock = BlobLock::take(cache_, "o/m", "b", [&] { waited = true; });
  EXPECT_TRUE(lock.ok());
  EXPECT_FALSE(waited);
}

}  // namespace
}  // namespace freshet::hub
