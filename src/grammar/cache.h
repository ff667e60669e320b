// Compiled grammars, kept by what they were compiled from.
//
// Thread-safe. Compiling happens in the calling thread, outside the lock; two threads that ask for
// the same new grammar at once may both compile it, and one result is kept. The least recently used
// go when the total size passes the limit; those in use stay alive with their users.
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

  // `description` as Grammar::from_description takes it. Refusals are not kept.
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
  std::list<Entry> entries_;  // the last used first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
  size_t bytes_ = 0;
};

}  // namespace freshet::grammar
