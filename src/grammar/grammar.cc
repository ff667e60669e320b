#include "grammar/grammar.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "grammar/json_schema.h"

namespace freshet::grammar {
namespace {

// Up to this many tokens a list is smaller and faster than a bit set.
constexpr size_t kFew = 512;
constexpr int kWideState = 64;       // states with this many bytes get their masks at compile time
constexpr size_t kEagerStates = 64;  // ... but at most this many states
// kMostVisits bounds the visits of a step. Further configurations are not followed: an absurdly
// ambiguous grammar then allows less than it could, but each answer is still a complete sentence.
// Up to this many are searched linearly; beyond, a table is faster.
constexpr size_t kListed = 32;
constexpr size_t kForgotten = 4096;  // this many unreferenced frames may accumulate
constexpr size_t kMostVisits = size_t{1} << 16;

int byte_count(const State& s) {
  int n = 0;
  for (const Transition& t : s.bytes) n += t.last - t.first + 1;
  return n;
}

}  // namespace

struct Grammar::Cache {
  explicit Cache(size_t states) : slots(states) {}
  ~Cache() {
    for (auto& slot : slots) delete slot.load();
  }
  std::vector<std::atomic<StateMask*>> slots;
};

Grammar::Grammar(std::shared_ptr<const TokenTrie> trie, Automaton automaton)
    : trie_(std::move(trie)),
      automaton_(std::move(automaton)),
      cache_(std::make_unique<Cache>(automaton_.states.size())) {}

Grammar::~Grammar() = default;

Result<std::shared_ptr<const Grammar>> Grammar::make(std::shared_ptr<const TokenTrie> trie,
                                                     const RuleSet& rules,
                                                     const CompileLimits& limits) {
  FRESHET_ASSIGN_OR_RETURN(Automaton automaton, build_automaton(rules, limits.automaton));
  std::shared_ptr<const Grammar> grammar(new Grammar(std::move(trie), std::move(automaton)));
  size_t eager = 0;
  for (size_t s = 0; s < grammar->automaton_.states.size() && eager < kEagerStates; ++s) {
    if (byte_count(grammar->automaton_.states[s]) < kWideState) continue;
    grammar->state_mask(static_cast<int32_t>(s));
    ++eager;
  }
  return grammar;
}

Result<std::shared_ptr<const Grammar>> Grammar::from_regex(std::shared_ptr<const TokenTrie> trie,
                                                           std::string_view pattern,
                                                           const CompileLimits& limits) {
  if (pattern.size() > limits.source_bytes)
    return resource_exhausted("the regular expression is longer than {} bytes",
                              limits.source_bytes);
  FRESHET_ASSIGN_OR_RETURN(Expression e, parse_regex(pattern));
  RuleSet rules;
  rules.define(0, std::move(e));
  return make(std::move(trie), rules, limits);
}

Result<std::shared_ptr<const Grammar>> Grammar::from_ebnf(std::shared_ptr<const TokenTrie> trie,
                                                          std::string_view text,
                                                          const CompileLimits& limits) {
  if (text.size() > limits.source_bytes)
    return resource_exhausted("the grammar is longer than {} bytes", limits.source_bytes);
  FRESHET_ASSIGN_OR_RETURN(const RuleSet rules, parse_ebnf(text));
  return make(std::move(trie), rules, limits);
}

Result<std::shared_ptr<const Grammar>> Grammar::from_json_schema(
    std::shared_ptr<const TokenTrie> trie, const json::Value& schema, const CompileLimits& limits,
    std::string_view before, std::string_view after) {
  if (json::write(schema).size() > limits.source_bytes) {
    return resource_exhausted("the schema is larger than {} bytes", limits.source_bytes);
  }
  FRESHET_ASSIGN_OR_RETURN(RuleSet rules, json_schema_rules(schema));
  if (!before.empty() || !after.empty()) {
    rules.define(0, sequence({literal(before), rules.body(0), literal(after)}));
  }
  return make(std::move(trie), rules, limits);
}

Result<std::shared_ptr<const Grammar>> Grammar::from_calls(std::shared_ptr<const TokenTrie> trie,
                                                           const json::Value& description,
                                                           const CompileLimits& limits) {
  const json::Value* calls = description.find("calls");
  if (calls == nullptr || !calls->is_array() || calls->as_array().empty())
    return invalid_argument("'calls' must be an array of tools");
  if (json::write(*calls).size() > limits.source_bytes)
    return resource_exhausted("the tools' parameters are larger than {} bytes",
                              limits.source_bytes);
  std::vector<CallableTool> tools;
  for (const json::Value& call : calls->as_array()) {
    const json::Value* parameters = call.find("parameters");
    if (parameters != nullptr && parameters->is_null()) parameters = nullptr;
    tools.push_back({call.get_string("name", ""), parameters});
  }
  const std::string key = description.get_string("arguments_key", "arguments");
  const std::string before = description.get_string("before", "");
  const std::string after = description.get_string("after", "");
  FRESHET_ASSIGN_OR_RETURN(RuleSet rules, tool_call_rules(tools, key));
  rules.define(0, sequence({literal(before), rules.body(0), literal(after)}));
  return make(std::move(trie), rules, limits);
}

Result<std::shared_ptr<const Grammar>> Grammar::from_choices(
    std::shared_ptr<const TokenTrie> trie, const std::vector<std::string>& choices) {
  if (choices.empty() || choices.size() > 4096)
    return invalid_argument("'choice' must hold 1 to 4096 strings");
  std::vector<Expression> parts;
  size_t bytes = 0;
  for (const std::string& c : choices) {
    bytes += c.size();
    parts.push_back(literal(c));
  }
  const CompileLimits limits;
  if (bytes > limits.source_bytes)
    return resource_exhausted("'choice' holds more than {} bytes", limits.source_bytes);
  RuleSet rules;
  rules.define(0, choice(std::move(parts)));
  return make(std::move(trie), rules, limits);
}

Result<std::shared_ptr<const Grammar>> Grammar::any_json_object(
    std::shared_ptr<const TokenTrie> trie) {
  json::Object schema;
  schema["type"] = "object";
  return from_json_schema(std::move(trie), json::Value(std::move(schema)));
}

Result<std::shared_ptr<const Grammar>> Grammar::from_description(
    std::shared_ptr<const TokenTrie> trie, const json::Value& description,
    const CompileLimits& limits) {
  if (const json::Value* schema = description.find("json")) {
    if (!schema->is_string()) {
      return from_json_schema(std::move(trie), *schema, limits,
                              description.get_string("before", ""),
                              description.get_string("after", ""));
    }
    FRESHET_ASSIGN_OR_RETURN(const json::Value parsed, json::parse(schema->as_string()));
    return from_json_schema(std::move(trie), parsed, limits);
  }
  if (description.find("calls") != nullptr) return from_calls(std::move(trie), description, limits);
  if (description.find("json_object") != nullptr) return any_json_object(std::move(trie));
  if (const json::Value* v = description.find("regex"); v != nullptr && v->is_string()) {
    return from_regex(std::move(trie), v->as_string(), limits);
  }
  if (const json::Value* v = description.find("grammar"); v != nullptr && v->is_string()) {
    return from_ebnf(std::move(trie), v->as_string(), limits);
  }
  if (const json::Value* v = description.find("choice"); v != nullptr && v->is_array()) {
    std::vector<std::string> choices;
    for (const json::Value& c : v->as_array()) {
      if (!c.is_string()) return invalid_argument("'choice' must hold strings");
      choices.push_back(c.as_string());
    }
    return from_choices(std::move(trie), choices);
  }
  return invalid_argument("structured output needs json, json_object, regex, choice or grammar");
}

size_t Grammar::bytes() const {
  size_t n = automaton_.bytes();
  for (const auto& slot : cache_->slots) {
    const StateMask* m = slot.load();
    if (m != nullptr)
      n +=
          m->allowed.size() * 4 + m->few.size() * 4 + m->escapes.size() * sizeof(StateMask::Escape);
  }
  return n;
}

const Grammar::StateMask& Grammar::state_mask(int32_t state) const {
  auto& slot = cache_->slots[static_cast<size_t>(state)];
  if (const StateMask* found = slot.load(std::memory_order_acquire)) return *found;
  auto fresh = std::make_unique<StateMask>();
  find_mask(state, *fresh);
  StateMask* expected = nullptr;
  if (slot.compare_exchange_strong(expected, fresh.get(), std::memory_order_acq_rel))
    return *fresh.release();
  return *expected;  // another thread was first; both results are equal
}

// Whether every plain character leads on, for as many characters as a plain token can have, without
// a way to leave: the inside of a string.
bool Grammar::takes_plain_tokens(int32_t state) const {
  for (int i = 0; i < TokenTrie::kPlainCharacters; ++i) {
    const int32_t next = automaton_.after_plain_character(state);
    if (next < 0) return false;
    if (next == state) return true;
    state = next;
  }
  return true;
}

// Walks a part of the trie with this one state. Calls are not entered: the matcher expands them
// into configurations of their own.
void Grammar::walk_alone(int32_t state, const TokenTrie::Part& trie, int32_t first, int32_t last,
                         StateMask& mask, std::vector<int32_t>& tokens) const {
  const bool not_plain = &trie == &trie_->not_plain();
  std::vector<std::pair<int32_t, int32_t>>
      open;  // (end of subtree, state on entry to its children)
  uint8_t first_byte = 0;
  for (int32_t i = first; i < last;) {
    while (!open.empty() && i >= open.back().first) open.pop_back();
    const int32_t current = open.empty() ? state : open.back().second;
    const TrieNode& node = trie.nodes[static_cast<size_t>(i)];
    if (open.empty()) first_byte = node.byte;
    const int32_t next = automaton_.states[static_cast<size_t>(current)].on(node.byte);
    if (next < 0) {
      i = node.end;
      continue;
    }
    const State& reached = automaton_.states[static_cast<size_t>(next)];
    for (int32_t t = node.tokens_first; t < node.tokens_last; ++t)
      tokens.push_back(trie.token_ids[static_cast<size_t>(t)]);
    // From here a caller or a called rule may continue with the rest of a token.
    if ((reached.final || !reached.calls.empty()) && node.end > i + 1)
      mask.escapes.push_back({i, next, not_plain, first_byte});
    open.emplace_back(node.end, next);
    ++i;
  }
}

// Most excluded property names differ from other texts by a few bytes only. If a byte leads to the
// same state as inside a string, the tokens that begin with it have the same result as there.
bool Grammar::find_mask_by_difference(int32_t state, StateMask& mask) const {
  const State& s = automaton_.states[static_cast<size_t>(state)];
  const int32_t inside = s.on(0x7f);
  if (inside < 0 || inside == state || automaton_.after_plain_character(inside) != inside)
    return false;
  const State& other = automaton_.states[static_cast<size_t>(inside)];
  std::vector<int32_t> tokens;
  std::vector<bool> differs(256, false);
  const StateMask& base = state_mask(inside);
  if (!base.plain) return false;
  mask.allowed = trie_->plain_mask();
  for (size_t w = 0; w < base.allowed.size(); ++w) mask.allowed[w] |= base.allowed[w];
  for (const int32_t t : base.few) mask.allowed[static_cast<size_t>(t) / 32] |= 1U << (t % 32);
  const TokenTrie::Part& trie = trie_->all();
  const int32_t count = static_cast<int32_t>(trie.nodes.size());
  for (int32_t i = 0; i < count; i = trie.nodes[static_cast<size_t>(i)].end) {
    const TrieNode& node = trie.nodes[static_cast<size_t>(i)];
    if (s.on(node.byte) == other.on(node.byte)) continue;
    differs[node.byte] = true;
    const int32_t end = node.end < count ? trie.nodes[static_cast<size_t>(node.end)].tokens_first
                                         : static_cast<int32_t>(trie.token_ids.size());
    for (int32_t t = node.tokens_first; t < end; ++t) {
      const int32_t id = trie.token_ids[static_cast<size_t>(t)];
      mask.allowed[static_cast<size_t>(id) / 32] &= ~(1U << (id % 32));
    }
    walk_alone(state, trie, i, node.end, mask, tokens);
  }
  for (const int32_t t : tokens) mask.allowed[static_cast<size_t>(t) / 32] |= 1U << (t % 32);
  for (const auto& escape : base.escapes) {
    if (!differs[escape.first]) mask.escapes.push_back(escape);
  }
  return true;
}

void Grammar::find_mask(int32_t state, StateMask& mask) const {
  if (find_mask_by_difference(state, mask)) return;
  mask.plain = takes_plain_tokens(state);
  const TokenTrie::Part& trie = mask.plain ? trie_->not_plain() : trie_->all();
  std::vector<int32_t> tokens;
  walk_alone(state, trie, 0, static_cast<int32_t>(trie.nodes.size()), mask, tokens);
  if (tokens.size() <= kFew) {
    mask.few = std::move(tokens);
    return;
  }
  mask.allowed.assign(mask_words(), 0);
  for (int32_t t : tokens) mask.allowed[static_cast<size_t>(t) / 32] |= 1U << (t % 32);
}

GrammarMatcher::GrammarMatcher(std::shared_ptr<const Grammar> grammar)
    : grammar_(std::move(grammar)) {
  Configs first;
  begin_step();
  expand(grammar_->automaton().starts[0], -1, first);
  history_.push_back({std::move(first), sizes()});
}

// Resets the visited set: all that follows happens at one position of the text.
void GrammarMatcher::begin_step() {
  first_of_step_ = frames_.size();
  seen_.clear();
  if (!seen_set_.empty()) seen_set_ = {};
  if (!frame_of_.empty()) frame_of_ = {};
}

bool GrammarMatcher::first_visit(const Config& config) {
  if (seen_.size() < kListed) {
    if (std::find(seen_.begin(), seen_.end(), config) != seen_.end()) return false;
    seen_.push_back(config);
    return true;
  }
  if (seen_set_.empty()) seen_set_.insert(seen_.begin(), seen_.end());
  return seen_set_.size() < kMostVisits && seen_set_.insert(config).second;
}

// The frame of a call made in this step that returns to `state`, with `below` below it.
int32_t GrammarMatcher::frame(int32_t state, int32_t below) {
  const int32_t fresh = static_cast<int32_t>(frames_.size());
  const int32_t known = known_frame(state);
  if (known < 0) {
    if (frames_.size() - first_of_step_ >= kListed) frame_of_.emplace(state, fresh);
    frames_.push_back({state, below});
    return fresh;
  }
  Frame& f = frames_[static_cast<size_t>(known)];
  if (f.below == below) return known;
  for (int32_t l = f.more_below; l >= 0; l = links_[static_cast<size_t>(l)].next) {
    if (links_[static_cast<size_t>(l)].below == below) return known;
  }
  links_.push_back({below, f.more_below});
  f.more_below = static_cast<int32_t>(links_.size()) - 1;
  // The other frames below were visited already.
  if (f.returned) to_visit_.push_back({state, below});
  return known;
}

int32_t GrammarMatcher::known_frame(int32_t state) const {
  const size_t listed = std::min(frames_.size(), first_of_step_ + kListed);
  for (size_t i = first_of_step_; i < listed; ++i) {
    if (frames_[i].state == state) return static_cast<int32_t>(i);
  }
  if (frame_of_.empty()) return -1;
  const auto it = frame_of_.find(state);
  return it != frame_of_.end() ? it->second : -1;
}

// Adds (state, parent) and everything reachable from it without consuming a byte, except what the
// step has already visited. Iterative, because chains of rules may be long.
void GrammarMatcher::expand(int32_t state, int32_t parent, Configs& out) {
  const Automaton& a = grammar_->automaton();
  to_visit_.clear();
  to_visit_.push_back({state, parent});
  while (!to_visit_.empty()) {
    const Config here = to_visit_.back();
    to_visit_.pop_back();
    if (!first_visit(here)) continue;
    const State& s = a.states[static_cast<size_t>(here.state)];
    if (!s.bytes.empty() || (s.final && here.parent < 0)) out.push_back(here);
    if (s.final && here.parent >= 0) {
      Frame& f = frames_[static_cast<size_t>(here.parent)];
      f.returned = true;
      to_visit_.push_back({f.state, f.below});
      for (int32_t l = f.more_below; l >= 0; l = links_[static_cast<size_t>(l)].next)
        to_visit_.push_back({f.state, links_[static_cast<size_t>(l)].below});
    }
    for (size_t i = s.calls.size(); i-- > 0;) {
      const Call& call = s.calls[i];
      const State& next = a.states[static_cast<size_t>(call.next)];
      // A tail call returns straight to our caller: right recursion needs no stack.
      const int32_t back = next.only_final ? here.parent : frame(call.next, here.parent);
      to_visit_.push_back({a.starts[static_cast<size_t>(call.rule)], back});
    }
  }
}

void GrammarMatcher::step(const Configs& from, uint8_t byte, Configs& out) {
  out.clear();
  begin_step();
  for (const Config& c : from) {
    const int32_t next = grammar_->automaton().states[static_cast<size_t>(c.state)].on(byte);
    if (next >= 0) expand(next, c.parent, out);
  }
}

bool GrammarMatcher::can_end() const {
  for (const Config& c : history_.back().configs) {
    if (c.parent < 0 && grammar_->automaton().states[static_cast<size_t>(c.state)].final)
      return true;
  }
  return false;
}

bool GrammarMatcher::accept_bytes(std::string_view bytes) {
  Configs current = history_.back().configs;
  Configs next;
  for (const char c : bytes) {
    step(current, static_cast<uint8_t>(c), next);
    if (next.empty()) {
      shrink(history_.back().sizes);
      return false;
    }
    std::swap(current, next);
  }
  history_.push_back({std::move(current), sizes()});
  return true;
}

bool GrammarMatcher::accept(int32_t id) {
  if (id < 0 || id >= grammar_->trie().vocab_size() || grammar_->trie().token(id).empty())
    return false;
  return accept_bytes(grammar_->trie().token(id));
}

void GrammarMatcher::rollback(int tokens) {
  FRESHET_CHECK(tokens >= 0 && tokens <= accepted());
  history_.resize(history_.size() - static_cast<size_t>(tokens));
  shrink(history_.back().sizes);
}

// Marks the tokens in nodes [first, last), siblings and their subtrees, that `configs` can consume.
void GrammarMatcher::walk(const TokenTrie::Part& trie, int32_t first, int32_t last,
                          const Configs& configs, std::span<uint32_t> mask, size_t depth) {
  if (levels_.size() <= depth) levels_.resize(depth + 1);
  const Sizes before = sizes();
  for (int32_t i = first; i < last;) {
    const TrieNode& node = trie.nodes[static_cast<size_t>(i)];
    Configs reached = std::move(levels_[depth]);
    step(configs, node.byte, reached);
    if (!reached.empty()) {
      for (int32_t t = node.tokens_first; t < node.tokens_last; ++t) {
        const int32_t id = trie.token_ids[static_cast<size_t>(t)];
        mask[static_cast<size_t>(id) / 32] |= 1U << (id % 32);
      }
      if (node.end > i + 1) walk(trie, i + 1, node.end, reached, mask, depth + 1);
    }
    levels_[depth] = std::move(reached);
    if (frames_.size() > before.frames + kForgotten) shrink(before);
    i = node.end;
  }
}

void GrammarMatcher::fill_mask(std::span<uint32_t> mask) {
  FRESHET_CHECK(mask.size() >= grammar_->mask_words());
  std::fill(mask.begin(), mask.end(), 0);
  const Configs now = history_.back().configs;
  if (now.size() > kListed) return fill_mask_together(now, mask);
  for (const Config& c : now) {
    const Grammar::StateMask& m = grammar_->state_mask(c.state);
    add_tokens(m, mask);
    if (!m.escapes.empty()) add_escapes(m, c, mask);
  }
}

// The tokens decided by the state alone.
void GrammarMatcher::add_tokens(const Grammar::StateMask& m, std::span<uint32_t> mask) const {
  for (size_t w = 0; w < m.allowed.size(); ++w) mask[w] |= m.allowed[w];
  for (int32_t t : m.few) mask[static_cast<size_t>(t) / 32] |= 1U << (t % 32);
  if (!m.plain) return;
  const auto& plain = grammar_->trie().plain_mask();
  for (size_t w = 0; w < plain.size(); ++w) mask[w] |= plain[w];
}

// Tokens that leave the rule of a configuration part of the way.
void GrammarMatcher::add_escapes(const Grammar::StateMask& m, const Config& c,
                                 std::span<uint32_t> mask) {
  // The continuation after an escape depends on the reached state only through its calls and
  // finality: compute it once per reached state.
  std::unordered_map<int32_t, Configs> way_out;
  for (const auto& [node, reached, not_plain, first] : m.escapes) {
    const TokenTrie::Part& trie = not_plain ? grammar_->trie().not_plain() : grammar_->trie().all();
    const TrieNode& n = trie.nodes[static_cast<size_t>(node)];
    auto [it, fresh] = way_out.try_emplace(reached);
    if (fresh) {
      begin_step();
      expand(reached, c.parent, it->second);
      std::erase(it->second, Config{reached, c.parent});
    }
    if (!it->second.empty()) walk(trie, node + 1, n.end, it->second, mask, 0);
  }
  shrink(history_.back().sizes);
}

// The same for many configurations: each state counts once, and all configurations that reach one
// node of the trie continue from there together, so shared continuations are followed once.
void GrammarMatcher::fill_mask_together(const Configs& now, std::span<uint32_t> mask) {
  std::unordered_set<int32_t> done;
  for (const Config& c : now) {
    if (done.insert(c.state).second) add_tokens(grammar_->state_mask(c.state), mask);
  }
  std::map<std::pair<bool, int32_t>, Configs> reached;
  for (const Config& c : now) {
    for (const auto& e : grammar_->state_mask(c.state).escapes)
      reached[{e.not_plain, e.node}].push_back({e.state, c.parent});
  }
  for (auto& [where, from] : reached) {
    const TokenTrie::Part& trie =
        where.first ? grammar_->trie().not_plain() : grammar_->trie().all();
    Configs out;
    begin_step();
    for (const Config& c : from) expand(c.state, c.parent, out);
    const std::unordered_set<Config, ConfigHash> known(from.begin(), from.end());
    std::erase_if(out, [&](const Config& c) { return known.contains(c); });
    const TrieNode& n = trie.nodes[static_cast<size_t>(where.second)];
    if (!out.empty()) walk(trie, where.second + 1, n.end, out, mask, 0);
    shrink(history_.back().sizes);
  }
}

}  // namespace freshet::grammar
