// The first byte selects the notation; the rest is a regular expression, a GBNF grammar or a JSON
// schema. For any input: no crash, memory and time within the limits; and a grammar that compiles
// gives masks that agree with accept(), without dead ends.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "grammar/grammar.h"

namespace {

using namespace freshet;

std::shared_ptr<const grammar::TokenTrie> vocabulary() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  for (const char* t : {"\"}", "\":", "{\"", "\", \"", "ab", "abc", "12", "0.", "true", "],", "\\u",
                        "\xc3\xa9", "\xe2\x82", "  ", "\n  ", "null", "-1"})
    tokens.emplace_back(t);
  return std::make_shared<grammar::TokenTrie>(tokens);
}

// A few steps through the language, guided by the bytes of the input.
void walk(const std::shared_ptr<const grammar::Grammar>& g, std::string_view seed) {
  grammar::GrammarMatcher matcher(g);
  std::vector<uint32_t> mask(g->mask_words());
  for (size_t step = 0; step < 16; ++step) {
    matcher.fill_mask(mask);
    std::vector<int32_t> allowed;
    for (int32_t id = 0; id < g->trie().vocab_size(); ++id) {
      const bool in_mask = (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
      const bool taken = matcher.accept(id);
      FRESHET_CHECK(taken == in_mask, "token {} at step {}", id, step);
      if (!taken) continue;
      matcher.rollback(1);
      allowed.push_back(id);
    }
    if (allowed.empty()) {
      FRESHET_CHECK(matcher.can_end(), "a dead end at step {}", step);
      return;
    }
    const size_t pick = seed.empty() ? step : static_cast<unsigned char>(seed[step % seed.size()]);
    FRESHET_CHECK(matcher.accept(allowed[pick % allowed.size()]));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto trie = vocabulary();
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  grammar::CompileLimits limits;
  limits.automaton.states = 20'000;
  limits.automaton.nfa_states = 100'000;
  const auto begin = std::chrono::steady_clock::now();
  Result<std::shared_ptr<const grammar::Grammar>> g = invalid_argument("no grammar");
  switch (data[0] % 3) {
    case 0:
      g = grammar::Grammar::from_regex(trie, text, limits);
      break;
    case 1:
      g = grammar::Grammar::from_ebnf(trie, text, limits);
      break;
    default: {
      const auto schema = json::parse(text);
      if (!schema.ok()) return 0;
      g = grammar::Grammar::from_json_schema(trie, *schema, limits);
    }
  }
  FRESHET_CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20),
                "too long to compile");
  if (g.ok()) {
    walk(*g, text);
  } else {
    FRESHET_CHECK(!g.status().message().empty());
  }
  return 0;
}
