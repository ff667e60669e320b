// Structured output: which tokens may come next.
//
// Grammar is a language compiled for a tokenizer's vocabulary: immutable, shared by all requests
// that ask for it, safe from many threads (masks are computed on demand and cached inside).
// GrammarMatcher follows one sequence: fill_mask() says which tokens keep the output a prefix of
// the language, accept() advances, rollback() takes tokens back (for speculation). The pushdown
// automaton is that of automaton.h. As in XGrammar (Dong et al., 2024), masks are split into a part
// that depends only on the state within its rule, which is cached, and a part that depends on the
// callers, which is walked each time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "grammar/automaton.h"
#include "grammar/token_trie.h"

namespace freshet::grammar {

struct CompileLimits {
  size_t source_bytes = 256 << 10;
  AutomatonLimits automaton;
};

class Grammar {
 public:
  // All of these compile outside the step loop; errors name the problem or the unsupported feature.
  static Result<std::shared_ptr<const Grammar>> from_regex(std::shared_ptr<const TokenTrie> trie,
                                                           std::string_view pattern,
                                                           const CompileLimits& limits = {});
  static Result<std::shared_ptr<const Grammar>> from_ebnf(std::shared_ptr<const TokenTrie> trie,
                                                          std::string_view text,
                                                          const CompileLimits& limits = {});
  // `before` and `after` are literal texts that must surround the JSON.
  static Result<std::shared_ptr<const Grammar>> from_json_schema(
      std::shared_ptr<const TokenTrie> trie, const json::Value& schema,
      const CompileLimits& limits = {}, std::string_view before = {}, std::string_view after = {});
  // A call of one of the tools in {"calls": [{"name", "parameters"?}], "arguments_key", "before"?,
  // "after"?}.
  static Result<std::shared_ptr<const Grammar>> from_calls(std::shared_ptr<const TokenTrie> trie,
                                                           const json::Value& description,
                                                           const CompileLimits& limits = {});
  static Result<std::shared_ptr<const Grammar>> from_choices(
      std::shared_ptr<const TokenTrie> trie, const std::vector<std::string>& choices);
  static Result<std::shared_ptr<const Grammar>> any_json_object(
      std::shared_ptr<const TokenTrie> trie);
  // {"json"|"json_object"|"regex"|"choice"|"grammar": ...}, as in the server's requests, or a
  // description for from_calls(); "json" may be accompanied by "before" and "after".
  static Result<std::shared_ptr<const Grammar>> from_description(
      std::shared_ptr<const TokenTrie> trie, const json::Value& description,
      const CompileLimits& limits = {});
  ~Grammar();

  const Automaton& automaton() const { return automaton_; }
  const TokenTrie& trie() const { return *trie_; }
  size_t mask_words() const { return (static_cast<size_t>(trie_->vocab_size()) + 31) / 32; }
  size_t bytes() const;

  // The context-independent part of a mask: tokens that stay inside the rule of the state, and trie
  // nodes at which the rule may end before the token does.
  struct StateMask {
    std::vector<uint32_t> allowed;  // bit set of tokens; empty if only a few are allowed,
    std::vector<int32_t> few;       // which are then listed here
    struct Escape {
      int32_t node;
      int32_t state;   // reached after the node's byte
      bool not_plain;  // the node belongs to the trie without plain tokens
      uint8_t first;   // first byte on the path to the node
    };
    std::vector<Escape> escapes;
    bool plain = false;  // inside a string: all plain tokens are allowed too
  };
  const StateMask& state_mask(int32_t state) const;

 private:
  Grammar(std::shared_ptr<const TokenTrie> trie, Automaton automaton);
  static Result<std::shared_ptr<const Grammar>> make(std::shared_ptr<const TokenTrie> trie,
                                                     const RuleSet& rules,
                                                     const CompileLimits& limits);
  void find_mask(int32_t state, StateMask& mask) const;
  bool find_mask_by_difference(int32_t state, StateMask& mask) const;
  void walk_alone(int32_t state, const TokenTrie::Part& trie, int32_t first, int32_t last,
                  StateMask& mask, std::vector<int32_t>& tokens) const;
  bool takes_plain_tokens(int32_t state) const;

  std::shared_ptr<const TokenTrie> trie_;
  Automaton automaton_;
  struct Cache;
  std::unique_ptr<Cache> cache_;
};

// Follows one sequence. Not synchronised.
class GrammarMatcher {
 public:
  explicit GrammarMatcher(std::shared_ptr<const Grammar> grammar);

  // Clears and fills mask (mask_words() words): bit id is set if token `id` may come next.
  // End-of-text tokens are up to the caller: they may come if can_end().
  void fill_mask(std::span<uint32_t> mask);
  // Whether the output so far is a complete sentence of the language.
  bool can_end() const;
  // Returns false and changes nothing if `id` is not allowed.
  bool accept(int32_t id);
  bool accept_bytes(std::string_view bytes);
  void rollback(int tokens);  // REQUIRES: tokens <= accepted()
  int accepted() const { return static_cast<int>(history_.size()) - 1; }

 private:
  // A frame of a shared stack of return states (a graph-structured stack): a state and the frames
  // below it. There are several frames below if several paths made the same call at the same
  // position. So an ambiguous grammar needs few frames, although its explicit stacks would multiply
  // with each byte. -1 is the bottom.
  struct Frame {
    int32_t state;
    int32_t below;
    int32_t more_below = -1;  // head of a list in links_
    bool returned = false;    // a return to `state` happened in the step that made the frame
  };
  struct Link {
    int32_t below;
    int32_t next;
  };
  // A position in the language: a state, and the frame to return to.
  struct Config {
    int32_t state;
    int32_t parent;
    bool operator==(const Config&) const = default;
  };
  struct ConfigHash {
    size_t operator()(const Config& f) const {
      return (static_cast<size_t>(static_cast<uint32_t>(f.state)) * 0x9e3779b97f4a7c15ULL) ^
             (static_cast<size_t>(static_cast<uint32_t>(f.parent)) * 0xc2b2ae3d27d4eb4fULL);
    }
  };
  using Configs = std::vector<Config>;  // distinct; all can consume a byte or end the sentence
  struct Sizes {                        // of frames_ and links_, for truncating both together
    size_t frames;
    size_t links;
  };
  struct Entry {
    Configs configs;
    Sizes sizes;
  };

  Sizes sizes() const { return {frames_.size(), links_.size()}; }
  void shrink(const Sizes& to) {
    if (frames_.size() > to.frames) frames_.resize(to.frames);
    if (links_.size() > to.links) links_.resize(to.links);
  }
  void begin_step();
  void expand(int32_t state, int32_t parent, Configs& out);
  int32_t frame(int32_t state, int32_t below);
  int32_t known_frame(int32_t state) const;
  bool first_visit(const Config& config);
  void step(const Configs& from, uint8_t byte, Configs& out);
  void walk(const TokenTrie::Part& trie, int32_t first, int32_t last, const Configs& configs,
            std::span<uint32_t> mask, size_t depth);
  void add_tokens(const Grammar::StateMask& m, std::span<uint32_t> mask) const;
  void add_escapes(const Grammar::StateMask& m, const Config& c, std::span<uint32_t> mask);
  void fill_mask_together(const Configs& now, std::span<uint32_t> mask);

  std::shared_ptr<const Grammar> grammar_;
  std::vector<Frame> frames_;
  std::vector<Link> links_;
  // Frames from here on belong to this step and may get more frames below.
  size_t first_of_step_ = 0;
  std::vector<Entry> history_;   // after each accepted token
  std::vector<Configs> levels_;  // scratch of walk(), one per depth
  // Frames made and configurations visited in a step: the first few are searched linearly, the rest
  // are found through these maps.
  std::unordered_map<int32_t, int32_t> frame_of_;  // by state
  std::vector<Config> seen_;
  std::unordered_set<Config, ConfigHash> seen_set_;
  std::vector<Config> to_visit_;
};

}  // namespace freshet::grammar
