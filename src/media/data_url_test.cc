#include "media/data_url.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace freshet::media {
namespace {

std::string decoded(std::string_view text, size_t limit = 1000) {
  const auto bytes = decode_base64(text, limit);
  if (!bytes.ok()) return "error: " + bytes.status().message();
  return {bytes->begin(), bytes->end()};
}

// The vectors of RFC 4648, section 10.
TEST(Base64, VectorsOfTheStandard) {
  EXPECT_EQ(decoded(""), "");
  EXPECT_EQ(decoded("Zg=="), "f");
  EXPECT_EQ(decoded("Zm8="), "fo");
  EXPECT_EQ(decoded("Zm9v"), "foo");
  EXPECT_EQ(decoded("Zm9vYg=="), "foob");
  EXPECT_EQ(decoded("Zm9vYmE="), "fooba");
  EXPECT_EQ(decoded("Zm9vYmFy"), "foobar");
  EXPECT_EQ(decoded("+/+/"), "\xfb\xff\xbf");
}

TEST(Base64, RefusesWhatIsNotExact) {
  for (const char* text : {"Zg", "Zg=", "Z===", "====", "Zm9v\n", "Zm 9", "Zm-_",
                           "Zh==", "Zm9=", "Zg==Zg==", "Z=g=", "Zm9v====", "Zm9%"}) {
    EXPECT_THAT(decoded(text), testing::StartsWith("error: ")) << text;
  }
  EXPECT_EQ(decoded("Zm9vYmFy", 5), "error: the data has 6 bytes; the limit is 5");
  EXPECT_EQ(decoded("Zm9vYmFy", 6), "foobar");
}

TEST(DataUrl, Reads) {
  auto url = decode_data_url("data:image/png;base64,Zm9v", 10);
  ASSERT_TRUE(url.ok());
  EXPECT_EQ(url->media_type, "image/png");
  EXPECT_EQ(url->bytes, (std::vector<uint8_t>{'f', 'o', 'o'}));
  url = decode_data_url("DATA:Audio/WAV;charset=x;Base64,", 10);
  ASSERT_TRUE(url.ok());
  EXPECT_EQ(url->media_type, "audio/wav");
  EXPECT_TRUE(url->bytes.empty());
  EXPECT_TRUE(decode_data_url("data:;base64,Zg==", 10).ok());
}

TEST(DataUrl, RefusesInOneLine) {
  const auto error = [](std::string_view text) {
    return decode_data_url(text, 4).status().message();
  };
  EXPECT_EQ(error("https://example.org/a.png"), "\"https://example.org/a.png\" is no data: URL");
  EXPECT_EQ(error("data:image/png;base64"), "the data: URL has no comma before its data");
  EXPECT_EQ(error("data:image/png,abc"),
            "the data: URL must be base64: \"data:image/png;base64,...\"");
  EXPECT_EQ(error("data:image/png;base64,Zm9vYmFy"),
            "data: URL: the data has 6 bytes; the limit is 4");
  EXPECT_EQ(error("data:image/png;base64,Zm\nv"), "data: URL: base64 has no character '?' (at 2)");
}

TEST(MediaPolicy, AllowsDataAloneByDefault) {
  EXPECT_EQ(*check_media_url("data:image/png;base64,", {}), UrlKind::kData);
  for (const char* url :
       {"https://example.org/", "http://169.254.169.254/", "file:///etc/passwd"}) {
    EXPECT_FALSE(check_media_url(url, {}).ok()) << url;
  }
}

TEST(MediaPolicy, AllowsExactHosts) {
  const MediaPolicy policy{.allowed_hosts = {"example.org"}};
  EXPECT_EQ(*check_media_url("https://example.org/a.png?b#c", policy), UrlKind::kFetch);
  EXPECT_EQ(*check_media_url("HTTPS://Example.ORG", policy), UrlKind::kFetch);
  for (const char* url :
       {"http://example.org/", "https://www.example.org/", "https://example.org.evil.net/",
        "https://evil.net/https://example.org/", "https://example.org@evil.net/",
        "https://evil.net#@example.org/", "https://example.org:22/",
        "https://evil.net\\example.org/", "https://[::1]/", "https:///", "https://",
        "ftp://example.org/", "https://example.org\n/"}) {
    EXPECT_FALSE(check_media_url(url, policy).ok()) << url;
  }
}

TEST(MediaPolicy, AllowsPortsAndPlainHttpWhereTheyAreNamed) {
  const MediaPolicy policy{.allowed_hosts = {"example.org:8443", "http://127.0.0.1:9000"}};
  EXPECT_EQ(*check_media_url("https://example.org:8443/a", policy), UrlKind::kFetch);
  EXPECT_EQ(*check_media_url("http://127.0.0.1:9000/a", policy), UrlKind::kFetch);
  for (const char* url : {"https://example.org/a", "http://example.org:8443/a",
                          "https://127.0.0.1:9000/", "http://127.0.0.1/", "http://127.0.0.1:9001/",
                          "http://127.0.0.1:9000@evil.net/", "http://127.0.0.1:9000%2f@x/"}) {
    EXPECT_FALSE(check_media_url(url, policy).ok()) << url;
  }
  for (const char* host : {"a.b", "a.b:1", "http://a.b", "http://a.b:1"})
    EXPECT_TRUE(check_media_host(host).ok()) << host;
  for (const char* host : {"", "a.b/", "a.b:", "a.b:x", "u@a.b", "https://a.b", "http://"})
    EXPECT_FALSE(check_media_host(host).ok()) << host;
}

TEST(MediaPolicy, AllowsFilesOfAFolder) {
  const MediaPolicy policy{.local_folder = "/pictures"};
  EXPECT_EQ(*check_media_url("file:///pictures/a.png", policy), UrlKind::kFile);
  EXPECT_FALSE(check_media_url("file://host/pictures/a.png", policy).ok());
  EXPECT_FALSE(check_media_url("https://example.org/", policy).ok());
}

}  // namespace
}  // namespace freshet::media
