// Methods of dicts, sequences, loops and cyclers, and the global functions.
//
// The mutating methods of dict and list are here too, to report that templates may not use them.
#include <algorithm>
#include <array>
#include <ctime>

#include "tokenizer/template/builtins.h"
#include "tokenizer/template/loop.h"

namespace freshet::jinja {
namespace {

Value refuse(Runtime&, const Value& v, Args&) {
  fail("this method would change a '{}' object, which templates may not do", type_name(v));
}

Value do_get(Runtime& rt, const Value& v, const Bound& a) {
  if (a[0]->is_string()) rt.charge(a[0]->text().size());
  if (const Value* found = v.dict().find(*a[0])) return *found;
  return a.has(1) ? *a[1] : Value();
}

Value do_items(Runtime& rt, const Value& v, const Bound&) {
  std::vector<Value> pairs;
  for (const auto& [key, value] : v.dict().items) pairs.push_back(rt.pair(key, value));
  return rt.list(std::move(pairs), Kind::kView);
}

Value do_keys(Runtime& rt, const Value& v, const Bound&) {
  std::vector<Value> out;
  for (const auto& [key, value] : v.dict().items) out.push_back(key);
  return rt.list(std::move(out), Kind::kView);
}

Value do_values(Runtime& rt, const Value& v, const Bound&) {
  std::vector<Value> out;
  for (const auto& [key, value] : v.dict().items) out.push_back(value);
  return rt.list(std::move(out), Kind::kView);
}

Value do_copy(Runtime&, const Value& v, const Bound&) {
  return v;
}

Value do_index(Runtime& rt, const Value& v, const Bound& a) {
  const Items items(rt, v);
  for (size_t i = 0; i < items.size(); ++i) {
    if (equals(rt, items[i], *a[0])) return Value(static_cast<int64_t>(i));
  }
  fail("the value is not in the {}", type_name(v));
}

Value do_count(Runtime& rt, const Value& v, const Bound& a) {
  const Items items(rt, v);
  return Value(static_cast<int64_t>(std::count_if(
      items.begin(), items.end(), [&](const Value& item) { return equals(rt, item, *a[0]); })));
}

Value do_next(Runtime&, const Value& v, const Bound&) {
  auto& cycler = v.as<CyclerRep>();
  const size_t at = cycler.next;
  cycler.next = (at + 1) % cycler.items.size();
  return cycler.items[at];
}

Value do_reset(Runtime&, const Value& v, const Bound&) {
  v.as<CyclerRep>().next = 0;
  return {};
}

Value do_cycle(Runtime& rt, const Value& v, Args& args) {
  return loop_cycle(rt, v, args);
}
Value do_changed(Runtime& rt, const Value& v, Args& args) {
  return loop_changed(rt, v, args);
}

// ---------------------------------------------------------------------------------------- globals

constexpr int64_t kMaxRange = 100'000;  // same limit as in Jinja's sandbox

Value make_range(Runtime& rt, const Value&, Args& args) {
  const auto& p = args.positional;
  if (p.empty() || p.size() > 3 || !args.named.empty()) fail("range() takes one to three integers");
  auto rep = std::make_unique<RangeRep>();
  rep->start = p.size() > 1 ? need_int(p[0], "range's start") : 0;
  rep->stop = need_int(p[p.size() > 1 ? 1 : 0], "range's stop");
  rep->step = p.size() > 2 ? need_int(p[2], "range's step") : 1;
  if (rep->step == 0) fail("range() arg 3 must not be zero");
  if (rep->size() > kMaxRange) fail("a range is limited to {} items", kMaxRange);
  return rt.adopt(Kind::kRange, std::move(rep), 0, 0);
}

// dict(mapping or pairs, key=value...); also used for namespaces.
std::vector<std::pair<Value, Value>> dict_items(Runtime& rt, const Args& args) {
  std::vector<std::pair<Value, Value>> items;
  if (args.positional.size() > 1)
    fail("dict expected at most 1 argument, got {}", args.positional.size());
  for (const Value& from : args.positional) {
    if (from.is_dict()) {
      items = from.dict().items;
      continue;
    }
    for (const Value& item : Items(rt, from)) {
      const Items pair(rt, item);
      if (pair.size() != 2) fail("dict() needs pairs, got {} values", pair.size());
      items.emplace_back(pair[0], pair[1]);
    }
  }
  for (const auto& [key, value] : args.named) items.emplace_back(rt.str(key), value);
  return items;
}

Value make_dict(Runtime& rt, const Value&, Args& args) {
  return rt.dict(dict_items(rt, args));
}

Value make_namespace(Runtime& rt, const Value&, Args& args) {
  const Value dict = rt.dict(dict_items(rt, args));
  auto rep = std::make_unique<NamespaceRep>();
  for (const auto& [key, value] : dict.dict().items) {
    rep->attributes.emplace_back(need_string(key, "a namespace's key"), value);
  }
  const size_t bytes = rep->attributes.size() * 64;
  // A namespace is retained and cleared later, so it ends every recursion down a value.
  return rt.retain(rt.adopt(Kind::kNamespace, std::move(rep), bytes, 0));
}

Value make_cycler(Runtime& rt, const Value&, Args& args) {
  if (args.positional.empty() || !args.named.empty()) fail("at least one item has to be provided");
  auto rep = std::make_unique<CyclerRep>();
  rep->items = args.positional;
  return rt.adopt(Kind::kCycler, std::move(rep), args.positional.size() * sizeof(Value),
                  depth_of(args.positional));
}

Value make_joiner(Runtime& rt, const Value&, const Bound& a) {
  auto rep = std::make_unique<JoinerRep>();
  rep->separator = a.has(0) ? *a[0] : rt.str(", ");
  const int depth = rep->separator.depth();
  return rt.adopt(Kind::kJoiner, std::move(rep), 0, depth);
}

Value raise_exception(Runtime& rt, const Value&, const Bound& a) {
  fail("{}", str_of(rt, *a[0]));
}

// Defaults of Python's datetime: no time zone, and microseconds, which our time does not have.
std::string naive_format(std::string_view format) {
  std::string out;
  for (size_t i = 0; i < format.size(); ++i) {
    const char next = format[i] == '%' && i + 1 < format.size() ? format[i + 1] : '\0';
    if (next == 'f') out += "000000";
    if (next == '%') out += "%%";
    if (next == 'f' || next == 'z' || next == 'Z' || next == '%') {
      ++i;
    } else {
      out += format[i];
    }
  }
  return out;
}

Value strftime_now(Runtime& rt, const Value&, const Bound& a) {
  const std::string& wanted = need_string(*a[0], "strftime_now's format");
  if (wanted.size() > 256) fail("strftime_now's format is limited to 256 bytes");
  // A width such as %999999999Y would make a text of that length.
  int digits = 0;
  for (const char c : wanted) {
    digits = c >= '0' && c <= '9' ? digits + 1 : 0;
    if (digits > 4) fail("strftime_now's format has a number that is too large");
  }
  const std::string format = naive_format(wanted);
  if (format.empty()) return rt.str("");
  using std::chrono::days;
  const auto day = std::chrono::floor<days>(rt.now());
  const std::chrono::year_month_day date(day);
  const std::chrono::hh_mm_ss time(rt.now() - day);
  std::tm tm{};
  tm.tm_year = static_cast<int>(date.year()) - 1900;
  tm.tm_mon = static_cast<int>(static_cast<unsigned>(date.month())) - 1;
  tm.tm_mday = static_cast<int>(static_cast<unsigned>(date.day()));
  tm.tm_hour = static_cast<int>(time.hours().count());
  tm.tm_min = static_cast<int>(time.minutes().count());
  tm.tm_sec = static_cast<int>(time.seconds().count());
  tm.tm_wday = static_cast<int>(std::chrono::weekday(day).c_encoding());
  const std::chrono::local_days new_year(date.year() / std::chrono::January / 1);
  tm.tm_yday = static_cast<int>((day - new_year).count());
  std::array<char, 4096> buffer;
  const size_t n = std::strftime(buffer.data(), buffer.size(), format.c_str(), &tm);
  return rt.str(std::string(buffer.data(), n));
}

constexpr Builtin kDictMethods[] = {
    {"get", "key default", 1, do_get},
    {"items", "", 0, do_items},
    {"keys", "", 0, do_keys},
    {"values", "", 0, do_values},
    {"copy", "", 0, do_copy},
    {"clear", "", 0, nullptr, refuse},
    {"pop", "", 0, nullptr, refuse},
    {"popitem", "", 0, nullptr, refuse},
    {"setdefault", "", 0, nullptr, refuse},
    {"update", "", 0, nullptr, refuse},
};

constexpr Builtin kSequenceMethods[] = {
    {"index", "value", 1, do_index},    {"count", "value", 1, do_count},
    {"copy", "", 0, do_copy},           {"append", "", 0, nullptr, refuse},
    {"clear", "", 0, nullptr, refuse},  {"extend", "", 0, nullptr, refuse},
    {"insert", "", 0, nullptr, refuse}, {"pop", "", 0, nullptr, refuse},
    {"remove", "", 0, nullptr, refuse}, {"reverse", "", 0, nullptr, refuse},
    {"sort", "", 0, nullptr, refuse},
};

constexpr Builtin kLoopMethods[] = {
    {"cycle", "", 0, nullptr, do_cycle},
    {"changed", "", 0, nullptr, do_changed},
};

constexpr Builtin kCyclerMethods[] = {
    {"next", "", 0, do_next},
    {"reset", "", 0, do_reset},
};

constexpr Builtin kFunctions[] = {
    {"range", "", 0, nullptr, make_range},
    {"dict", "", 0, nullptr, make_dict},
    {"namespace", "", 0, nullptr, make_namespace},
    {"cycler", "", 0, nullptr, make_cycler},
    {"joiner", "sep", 0, make_joiner},
    {"raise_exception", "message", 1, raise_exception},
    {"strftime_now", "format", 1, strftime_now},
};

}  // namespace

std::span<const Builtin> dict_methods() {
  return kDictMethods;
}
std::span<const Builtin> sequence_methods() {
  return kSequenceMethods;
}
std::span<const Builtin> loop_methods() {
  return kLoopMethods;
}
std::span<const Builtin> cycler_methods() {
  return kCyclerMethods;
}
std::span<const Builtin> global_functions() {
  return kFunctions;
}

}  // namespace freshet::jinja
