#include "tokenizer/template/runtime.h"

#include <algorithm>
#include <bit>

#include "tokenizer/template/text.h"

namespace freshet::jinja {

int depth_of(std::span<const Value> items) {
  int depth = 0;
  for (const Value& v : items) depth = std::max(depth, v.depth());
  return depth;
}

Runtime::~Runtime() {
  clear_retained();
}

void Runtime::clear_retained() {
  // Frees the items one by one while the list still holds the rest: long chains must not be freed
  // recursively.
  for (Value& v : retained_) v.rep()->clear();
  retained_.clear();
}

Value Runtime::str(std::string text, bool markup) {
  auto rep = std::make_unique<StringRep>();
  const size_t bytes = text.size();
  rep->ascii = is_ascii(text);
  rep->text = std::move(text);
  rep->markup = markup;
  return adopt(Kind::kString, std::move(rep), bytes, 0);
}

Value Runtime::big_int(std::string decimal) {
  auto rep = std::make_unique<StringRep>();
  const size_t bytes = decimal.size();
  rep->text = std::move(decimal);
  return adopt(Kind::kBigInt, std::move(rep), bytes, 0);
}

Value Runtime::list(std::vector<Value> items, Kind kind) {
  auto rep = std::make_unique<ListRep>();
  const size_t bytes = items.size() * sizeof(Value);
  const int depth = depth_of(items);
  rep->items = std::move(items);
  return adopt(kind, std::move(rep), bytes, depth);
}

Value Runtime::pair(Value a, Value b) {
  std::vector<Value> items;
  items.reserve(2);
  items.push_back(std::move(a));
  items.push_back(std::move(b));
  return tuple(std::move(items));
}

Value Runtime::generator(std::vector<Value> items) {
  auto rep = std::make_unique<GeneratorRep>();
  const size_t bytes = items.size() * sizeof(Value);
  const int depth = depth_of(items);
  rep->items = std::move(items);
  return adopt(Kind::kGenerator, std::move(rep), bytes, depth);
}

Value Runtime::dict(std::vector<std::pair<Value, Value>> items) {
  int depth = 0;
  size_t key_bytes = 0;
  for (const auto& [key, value] : items) {
    depth = std::max({depth, key.depth(), value.depth()});
    if (key.is_string()) key_bytes += key.text().size();
    if (key.is(Kind::kTuple)) key_bytes += key.items().size() * sizeof(Value);
  }
  charge(key_bytes * static_cast<size_t>(std::bit_width(items.size())));
  auto rep = std::make_unique<DictRep>();
  rep->items = std::move(items);
  rep->seal();
  const size_t bytes = rep->items.size() * (2 * sizeof(Value) + sizeof(uint32_t));
  return adopt(Kind::kDict, std::move(rep), bytes, depth);
}

Value Runtime::undefined(std::string message) {
  auto rep = std::make_unique<UndefinedRep>();
  const size_t bytes = message.size();
  rep->message = std::move(message);
  return adopt(Kind::kUndefined, std::move(rep), bytes, 0);
}

}  // namespace freshet::jinja
