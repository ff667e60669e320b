// The state of one rendering: its limits, and the factories of its values.
//
// Everything that takes time or memory in proportion to its input charges it here. Not
// synchronised.
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/template/chat_template.h"
#include "tokenizer/template/value.h"

namespace freshet::jinja {

struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

class Runtime {
 public:
  Runtime(const TemplateLimits& limits, std::chrono::local_seconds now)
      : limits_(limits), now_(now), steps_(limits.steps) {
    budget_.left = limits.memory_bytes;
  }
  Runtime(const Runtime&) = delete;
  virtual ~Runtime();

  void step(int64_t n = 1) {
    if ((steps_ -= n) < 0) fail_limit("steps");
  }
  // Charges work on this many bytes.
  void charge(size_t bytes) { step(1 + static_cast<int64_t>(bytes / 32)); }
  // Call before allocating `count` times `size` bytes.
  void expect(size_t count, size_t size = 1) {
    if (size != 0 && count > budget_.left / size) fail_limit("memory");
  }
  const TemplateLimits& limits() const { return limits_; }
  std::chrono::local_seconds now() const { return now_; }
  Budget& budget() { return budget_; }

  Value str(std::string text, bool markup = false);
  Value big_int(std::string decimal);  // of an integer beyond 64 bits
  Value list(std::vector<Value> items, Kind kind = Kind::kList);
  Value tuple(std::vector<Value> items) { return list(std::move(items), Kind::kTuple); }
  Value pair(Value a, Value b);
  Value generator(std::vector<Value> items);
  Value dict(std::vector<std::pair<Value, Value>> items);
  Value undefined(std::string message);
  // Adopts a Rep whose fields are set, charges `bytes` in addition to its own size and records the
  // depth.
  template <class T>
  Value adopt(Kind kind, std::unique_ptr<T> rep, size_t bytes, int children_depth) {
    if (children_depth >= kMaxValueDepth) fail_limit("the nesting of values");
    bytes += sizeof(T) + 16;
    budget_.take(bytes);
    charge(bytes);
    rep->bytes = bytes;
    rep->budget = &budget_;
    rep->depth = children_depth + 1;
    return Value(kind, rep.release());
  }
  // Keeps a mutable value, which may be part of a cycle, until the end of the rendering and clears
  // it then.
  Value retain(Value v) {
    retained_.push_back(v);
    return v;
  }
  void clear_retained();

  virtual Value call(const Value& function, Args& args) = 0;
  Value filter(std::string_view name, const Value& input, Args& args);
  bool test(std::string_view name, const Value& input, Args& args);

  // Guards one level of C++ recursion.
  class Level {
   public:
    explicit Level(Runtime& rt) : rt_(rt) {
      if (++rt_.depth_ > rt_.limits_.depth) {
        --rt_.depth_;
        fail_limit("recursion");
      }
    }
    Level(const Level&) = delete;
    ~Level() { --rt_.depth_; }

   private:
    Runtime& rt_;
  };

 private:
  const TemplateLimits& limits_;
  std::chrono::local_seconds now_;
  int64_t steps_;
  int depth_ = 0;
  Budget budget_;
  std::vector<Value> retained_;
};

int depth_of(std::span<const Value> items);

}  // namespace freshet::jinja
