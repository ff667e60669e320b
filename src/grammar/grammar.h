// Structured output: which tokens may come next.
//
// Grammar is a compiled language over a tokenizer's vocabulary: immutable, shared by all requests
// that ask for it, safe from many threads (the masks it finds on the way are cached inside).
// GrammarMatcher follows one sequence: fill_mask() says which tokens keep the output a prefix of
// the language, accept() moves on, rollback() takes tokens back (for speculation). The pushdown
// automaton is that of automaton.h; masks are split, as XGrammar does (Dong et al., 2024), into
// what a rule's own state decides, which is cached, and what depends on the callers, which is
// walked each time.
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
  // Each compiles off the step loop; errors name what is wrong or not supported.
  static Result<std::shared_ptr<const Grammar>> from_regex(std::shared_ptr<const TokenTrie> trie,
                                                           std::string_view pattern,
                                                           const CompileLimits& limits = {});
  static Result<std::shared_ptr<const Grammar>> from_ebnf(std::shared_ptr<const TokenTrie> trie,
                                                          std::string_view text,
                                                          const CompileLimits& limits = {});
  // `before` and `after` are texts that must stand around the JSON.
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
  // {"json"|"json_object"|"regex"|"choice"|"grammar": ...}, as the server's requests say it, or
  // what from_calls() takes; "json" may have "before" and "after" beside it.
  static Result<std::shared_ptr<const Grammar>> from_description(
      std::shared_ptr<const TokenTrie> trie, const json::Value& description,
      const CompileLimits& limits = {});
  ~Grammar();

  const Automaton& automaton() const { return automaton_; }
  const TokenTrie& trie() const { return *trie_; }
  size_t mask_words() const { return (static_cast<size_t>(trie_->vocab_size()) + 31) / 32; }
  size_t bytes() const;

  // What a state alone decides: tokens that stay inside its rule, and trie nodes at which the rule
  // may end with more of a token to come.
  struct StateMask {
    std::vector<uint32_t> allowed;  // bit set of tokens; empty when only a few are allowed:
    std::vector<int32_t> few;       // then these
    struct Escape {
      int32_t node;
      int32_t state;   // reached after the node's byte
      bool not_plain;  // the node is of the trie without plain tokens
      uint8_t first;   // byte on the way to the node
    };
    std::vector<Escape> escapes;
    bool plain = false;  // inside a string: all plain tokens too
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

  // Clears and fills mask (mask_words() words): bit id set when token `id` may come next.
  // End-of-text tokens are the caller's: they may come when can_end().
  void fill_mask(std::span<uint32_t> mask);
  // Whether the output so far is a whole sentence of the language.
  bool can_end() const;
  // False when `id` is not allowed; nothing changes then.
  bool accept(int32_t id);
  bool accept_bytes(std::string_view bytes);
  void rollback(int tokens);  // REQUIRES: tokens <= accepted()
  int accepted() const { return static_cast<int>(history_.size()) - 1; }

 private:
  // A stack of states to return to, shared by all that have the same top: a frame is a state and
  // the frames below it, which are several where several ways led to one call at one place. So an
  // ambiguous grammar has few frames, though its stacks, written out, would multiply with each
  // byte. -1 is the bottom.
  struct Frame {
    int32_t state;
    int32_t below;
    int32_t more_below = -1;  // a list in links_
    bool returned = false;    // to `state`, in the step that made the frame
  };
  struct Link {
    int32_t below;
    int32_t next;
  };
  // A place in the language: a state, and the frame to return to.
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
  using Configs = std::vector<Config>;  // distinct; all have bytes to consume, or end the sentence
  struct Sizes {  // of frames_ and links_: those behind are forgotten together
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
  size_t first_of_step_ = 0;     // frames from here on are this step's, and may get more below them
  std::vector<Entry> history_;   // after each accepted token
  std::vector<Configs> levels_;  // work space of walk(), one a depth
  // What a step has made and visited: the first few are looked through, the rest are found here.
  std::unordered_map<int32_t, int32_t> frame_of_;  // by state
  std::vector<Config> seen_;
  std::unordered_set<Config, ConfigHash> seen_set_;
  std::vector<Config> to_visit_;
};

}  // namespace freshet::grammar
