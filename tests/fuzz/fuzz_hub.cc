// Any bytes as an answer of the hub, a model's name and a URL: no crash, and what is accepted is
// safe to use as a path.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "http/url.h"
#include "hub/catalogue.h"
#include "hub/listing.h"
#include "hub/names.h"
#include "hub/settings.h"

namespace {

void check_relative(const std::string& path) {
  FRESHET_CHECK(!path.empty() && path.front() != '/' && path.find('\\') == path.npos);
  FRESHET_CHECK(("/" + path + "/").find("/../") == path.npos);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  using namespace freshet::hub;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto listing = parse_listing(text); listing.ok()) {
    FRESHET_CHECK(is_commit(listing->commit));
    for (const RepoFile& f : listing->files) {
      check_relative(f.path);
      FRESHET_CHECK(f.blob.find('/') == f.blob.npos && f.size >= -1);
    }
    for (const char* quant : {"", "Q8_0", "safetensors"}) {
      const auto selection = select_files(listing->files, quant, "org/m");
      if (selection.ok()) (void)has_all_parts(*selection);
    }
  }
  if (const auto ref = parse_model_ref(text); ref.ok()) {
    check_relative(repo_folder(ref->repo));
    check_relative(ref->revision);
    FRESHET_CHECK(repo_folder(ref->repo).find('/') == std::string::npos);
    FRESHET_CHECK(parse_model_ref(ref->text()).ok());
  }
  if (const auto ref = ref_of_url(text, "https://huggingface.co"); ref && !ref->quant.empty())
    check_relative(ref->quant);
  if (const auto url = http::parse_resource_url(text); url.ok())
    FRESHET_CHECK(http::parse_resource_url(url->text()).ok());
  (void)closest_name(text, {});
  (void)names_a_family(text);
  (void)bypasses_proxy(text, "host", 443);
  return 0;
}
