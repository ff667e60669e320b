// Any bytes as each kind of benchmark workload file: no crash, and the parsed workload respects the
// limits.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "bench_client/dataset_files.h"
#include "bench_client/report.h"
#include "http/url.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  using namespace freshet::bench_client;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const auto& rows : {parse_azure(text), parse_mooncake(text)}) {
    if (!rows.ok()) continue;
    for (const TraceRow& row : *rows) {
      FRESHET_CHECK(row.time >= 0.0);
      FRESHET_CHECK(row.input_tokens >= 1 && row.input_tokens <= kMaxRowTokens);
      FRESHET_CHECK(row.output_tokens >= 1 && row.output_tokens <= kMaxRowTokens);
    }
  }
  for (const auto& rows : {parse_sharegpt(text), parse_custom(text)}) {
    if (!rows.ok()) continue;
    for (const TextRow& row : *rows) FRESHET_CHECK(!row.prompt.empty());
  }
  (void)parse_lines(text);
  (void)parse_spec_decode(text);
  if (const auto url = http::parse_url(text); url.ok()) {
    const auto again = http::parse_url(url->text());
    FRESHET_CHECK(again.ok() && again->host == url->host && again->port == url->port);
  }
  return 0;
}
