// Compiles JSON schemas and walks instances through their token masks.
//
//   grammar_bench TOKENIZER DIRECTORY [--list | --sample N]
//
// DIRECTORY holds files in MaskBench's form: {"schema": ..., "tests": [{"data": ..., "valid":
// ...}]}. Times are the CPU time of this thread. --list names each refusal and each disagreement;
// --sample prints N random sentences per schema, to be checked by another implementation.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/json.h"
#include "grammar/grammar.h"
#include "tokenizer/tokenizer.h"

namespace freshet {
namespace {

double now_us() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

class Times {
 public:
  void add(double us) { all_.push_back(us); }
  void print(const char* name, double unit, const char* unit_name) {
    if (all_.empty()) return;
    std::sort(all_.begin(), all_.end());
    const auto at = [&](double q) {
      return all_[static_cast<size_t>(q * static_cast<double>(all_.size() - 1))] / unit;
    };
    double sum = 0;
    for (const double t : all_) sum += t;
    std::printf("%s (%s), %zu: median %.2f, mean %.2f, p95 %.2f, p99 %.2f, max %.2f\n", name,
                unit_name, all_.size(), at(0.5), sum / unit / static_cast<double>(all_.size()),
                at(0.95), at(0.99), at(1));
  }

 private:
  std::vector<double> all_;
};

// Follows a value, with members in any order that the grammar accepts.
class Placer {
 public:
  Placer(grammar::GrammarMatcher& matcher, const json::Value& schema) : matcher_(matcher) {
    rank(schema);
  }
  // On success, leaves the accepted tokens in place; on failure, nothing.
  bool place(const json::Value& v) {
    const int before = matcher_.accepted();
    if (place_value(v)) return true;
    matcher_.rollback(matcher_.accepted() - before);
    return false;
  }

 private:
  bool place_value(const json::Value& v) {
    if (v.is_array()) {
      if (!matcher_.accept_bytes("[")) return false;
      bool first = true;
      for (const json::Value& item : v.as_array()) {
        if (!first && !matcher_.accept_bytes(", ")) return false;
        if (!place(item)) return false;
        first = false;
      }
      return matcher_.accept_bytes("]");
    }
    if (!v.is_object()) return matcher_.accept_bytes(json::write(v));
    std::vector<const json::Object::Member*> rest;
    for (const auto& m : v.as_object()) rest.push_back(&m);
    const auto at = [&](const json::Object::Member* m) {
      const auto found = ranks_.find(m->first);
      return found == ranks_.end() ? ranks_.size() : found->second;
    };
    std::stable_sort(rest.begin(), rest.end(), [&](auto* a, auto* b) { return at(a) < at(b); });
    return matcher_.accept_bytes("{") && place_members(rest, true);
  }

  bool place_members(const std::vector<const json::Object::Member*>& rest, bool first) {
    if (rest.empty()) return matcher_.accept_bytes("}");
    for (size_t i = 0; i < rest.size(); ++i) {
      if (--budget_ < 0) return false;
      const int before = matcher_.accepted();
      const std::string key = (first ? "" : ", ") + json::write(json::Value(rest[i]->first)) + ": ";
      if (matcher_.accept_bytes(key) && place(rest[i]->second)) {
        auto others = rest;
        others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
        if (place_members(others, false)) return true;
      }
      matcher_.rollback(matcher_.accepted() - before);
    }
    return false;
  }

  // Tries names in the order of the schema first.
  void rank(const json::Value& schema) {
    if (schema.is_array()) {
      for (const json::Value& e : schema.as_array()) rank(e);
    }
    if (!schema.is_object()) return;
    if (const json::Value* p = schema.find("properties"); p != nullptr && p->is_object()) {
      for (const auto& [name, value] : p->as_object()) ranks_.try_emplace(name, ranks_.size());
    }
    for (const auto& [name, value] : schema.as_object()) rank(value);
  }

  grammar::GrammarMatcher& matcher_;
  std::map<std::string, size_t> ranks_;
  int budget_ = 20'000;
};

struct Bench {
  const tokenizer::Tokenizer& tokenizer;
  std::shared_ptr<const grammar::TokenTrie> trie;
  bool list = false;
  int samples = 0;  // random sentences to print per schema
  std::mt19937 random{1};
  Times compile, mask;
  std::map<std::string, int> refusals;
  int schemas = 0, refused = 0, instances = 0, reordered = 0;
  int wrongly_accepted = 0, wrongly_refused = 0;

  // Goes token by token; returns the place where a token was not allowed, or npos.
  size_t walk(const std::shared_ptr<const grammar::Grammar>& g, const std::string& text,
              bool& ended) {
    grammar::GrammarMatcher matcher(g);
    std::vector<uint32_t> words(g->mask_words());
    size_t bytes = 0;
    for (const int32_t id :
         tokenizer.encode(text, {.add_special = false, .parse_special = false})) {
      const double begin = now_us();
      matcher.fill_mask(words);
      mask.add(now_us() - begin);
      const bool allowed = (words[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
      if (allowed != matcher.accept(id)) std::printf("MASK DISAGREES in %s\n", text.c_str());
      if (!allowed) return bytes;
      bytes += tokenizer.token_bytes(id).size();
    }
    ended = matcher.can_end();
    return std::string::npos;
  }

  void instance(const std::string& name, const json::Value& schema,
                const std::shared_ptr<const grammar::Grammar>& g, const json::Value& test) {
    ++instances;
    const json::Value& data = *test.find("data");
    const bool valid = test.get_bool("valid", false);
    const std::string text = json::write(data, {.spaces = true});
    bool ended = false;
    const size_t stop = walk(g, text, ended);
    bool matched = stop == std::string::npos && ended;
    if (!matched) {
      grammar::GrammarMatcher matcher(g);
      matched = Placer(matcher, schema).place(data) && matcher.can_end();
      if (matched && valid) ++reordered;
    }
    if (matched == valid) return;
    ++(valid ? wrongly_refused : wrongly_accepted);
    if (list) {
      std::printf("%s: %s: %s\n", name.c_str(), valid ? "valid, refused" : "invalid, accepted",
                  stop == std::string::npos ? text.substr(0, 100).c_str()
                                            : text.substr(stop < 60 ? 0 : stop - 60, 80).c_str());
    }
  }

  // A random walk along the masks, which heads for the end after a while; returned as a line of
  // JSON.
  void sample(const std::string& name, const std::shared_ptr<const grammar::Grammar>& g) {
    grammar::GrammarMatcher matcher(g);
    std::vector<uint32_t> words(g->mask_words());
    std::string text;
    for (int step = 0; step < 1500; ++step) {
      const bool may_end = matcher.can_end();
      matcher.fill_mask(words);
      const bool may_go_on =
          std::any_of(words.begin(), words.end(), [](uint32_t w) { return w != 0; });
      if (may_end && (!may_go_on || step > 60 || random() % 3 == 0)) {
        json::Object line;
        line["schema"] = name;
        line["text"] = text;
        std::printf("SAMPLE %s\n", json::write(json::Value(std::move(line))).c_str());
        return;
      }
      std::vector<int32_t> allowed, closing;
      for (int32_t id = 0; id < trie->vocab_size(); ++id) {
        if ((words[static_cast<size_t>(id) / 32] >> (id % 32) & 1) == 0) continue;
        allowed.push_back(id);
        if (trie->token(id).find_first_of("\"}]") != std::string::npos) closing.push_back(id);
      }
      if (allowed.empty()) {
        std::printf("DEAD END in %s after %s\n", name.c_str(), text.c_str());
        return;
      }
      const bool close = !closing.empty() && (step > 60 || random() % 4 == 0);
      const auto& from = close ? closing : allowed;
      // Short tokens are as likely as all others together.
      int32_t id = from[random() % from.size()];
      for (int i = 0; i < 4; ++i) {
        const int32_t other = from[random() % from.size()];
        if (trie->token(other).size() < trie->token(id).size()) id = other;
      }
      if (!matcher.accept(id))
        std::printf("MASK DISAGREES in %s: '%s' after '%s'\n", name.c_str(),
                    trie->token(id).c_str(), text.c_str());
      text += trie->token(id);
    }
  }

  void file(const std::filesystem::path& path) {
    const auto parsed = json::parse_file(path.string());
    if (!parsed.ok() || parsed->find("schema") == nullptr) return;
    ++schemas;
    const double begin = now_us();
    const auto g = grammar::Grammar::from_json_schema(trie, *parsed->find("schema"));
    compile.add(now_us() - begin);
    const std::string name = path.filename().string();
    if (!g.ok()) {
      ++refused;
      const std::string why = g.status().message();
      const size_t quote = std::min(why.find('\''), why.size());
      ++refusals[why.substr(quote, why.find('\'', quote + 1) - quote + 1)];
      if (list) std::printf("%s: refused: %s\n", name.c_str(), why.c_str());
      return;
    }
    for (int i = 0; i < samples; ++i) sample(name, *g);
    const json::Value* tests = parsed->find("tests");
    if (tests == nullptr || !tests->is_array()) return;
    for (const json::Value& test : tests->as_array())
      instance(name, *parsed->find("schema"), *g, test);
  }
};

int run(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: grammar_bench TOKENIZER DIRECTORY [--list | --sample N]\n");
    return 2;
  }
  const auto tokenizer = tokenizer::Tokenizer::load(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().message().c_str());
    return 1;
  }
  std::vector<std::string> tokens(static_cast<size_t>(tokenizer->vocab_size()));
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    if (!tokenizer->is_special(id)) tokens[static_cast<size_t>(id)] = tokenizer->token_bytes(id);
  }
  const double begin = now_us();
  Bench bench{*tokenizer, std::make_shared<grammar::TokenTrie>(tokens)};
  std::printf("%zu tokens; trie in %.1f ms\n", tokens.size(), (now_us() - begin) / 1000);
  bench.list = argc > 3 && std::strcmp(argv[3], "--list") == 0;
  if (argc > 4 && std::strcmp(argv[3], "--sample") == 0) bench.samples = std::atoi(argv[4]);
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(argv[2])) {
    if (entry.path().extension() == ".json") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) bench.file(path);
  std::printf(
      "%d schemas, %d refused; %d instances: %d wrongly accepted, %d wrongly refused, "
      "%d accepted in another order of members\n",
      bench.schemas, bench.refused, bench.instances, bench.wrongly_accepted, bench.wrongly_refused,
      bench.reordered);
  for (const auto& [keyword, count] : bench.refusals)
    std::printf("  %d refused for %s\n", count, keyword.c_str());
  bench.compile.print("compile", 1000, "ms");
  bench.mask.print("mask", 1, "us");
  return 0;
}

}  // namespace
}  // namespace freshet

int main(int argc, char** argv) {
  return freshet::run(argc, argv);
}
