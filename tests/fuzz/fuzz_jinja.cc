// Any bytes as a chat template, and after a NUL its context as JSON: no crash, no leak, no hang.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tokenizer/template/chat_template.h"

namespace {

const freshet::json::Value& default_context() {
  static const freshet::json::Value context =
      freshet::json::parse(
          R"({"messages":[{"role":"system","content":"Be <kind> & é"},{"role":"user","content":"Hi"},
              {"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",
               "function":{"name":"f","arguments":{"a":[1,2.5,true]}}}]},
              {"role":"tool","name":"f","content":"{}"}],
              "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],
              "add_generation_prompt":true,"bos_token":"<s>","eos_token":"</s>",
              "l":[3,1,2],"d":{"b":1,"a":2},"s":"Hello, World","x":2.5,"n":null})")
          .value();
  return context;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), input.size());
  TemplateLimits limits;
  limits.steps = 100'000;
  limits.memory_bytes = size_t{16} << 20;
  limits.output_bytes = size_t{1} << 20;
  limits.depth = 300;
  const auto compiled = ChatTemplate::compile(input.substr(0, end), limits);
  if (!compiled.ok()) {
    FRESHET_CHECK(!compiled.status().message().empty());
    return 0;
  }
  json::Value context = default_context();
  if (end < size) {
    auto given = json::parse(input.substr(end + 1));
    if (given.ok()) context = std::move(*given);
  }
  const ChatTemplate::Options noon{
      .now = std::chrono::local_seconds(std::chrono::seconds(1721997000))};
  const auto first = compiled->render(context, noon);
  const auto second = compiled->render(context, noon);
  FRESHET_CHECK(first.ok() == second.ok());
  if (first.ok()) {
    FRESHET_CHECK(*first == *second);
    FRESHET_CHECK(first->size() <= limits.output_bytes);
  }
  return 0;
}
