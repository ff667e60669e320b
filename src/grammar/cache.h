// A cache of compiled grammars, keyed by their descriptions.
//
// Thread-safe. Compilation happens in the calling thread, outside the lock; if two threads ask for
// the same new grammar at once, both may compile it, and one result is kept. The least recently
// used grammars are evicted when the total size exceeds the limit; those in use stay alive with
// their users.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "grammar/grammar.h"

namespace freshet::grammar {

class GrammarCache {
 public:
  GrammarCache(std::shared_ptr<const TokenTrie> trie, size_t max_bytes)
      : trie_(std::move(trie)), max_bytes_(max_bytes) {}

  // `description` as in Grammar::from_description. Errors are not cached.
  Result<std::shared_ptr<const Grammar>> get(const json::Value& description);

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<const Grammar> grammar;
    size_t bytes = 0;
  };

  const std::shared_ptr<const TokenTrie> trie_;
  const size_t max_bytes_;
  std::mutex mutex_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
  size_t bytes_ = 0;
};

}  // namespace freshet::grammar
