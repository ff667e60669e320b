#include "grammar/schema_text.h"

#include <algorithm>

#include "grammar/decimal_range.h"

namespace freshet::grammar {
namespace {

// An intersection of Languages; the first error is kept.
class Meet {
 public:
  void add(const Result<Language>& next, const Status& named) {
    if (!status_.ok()) return;
    auto both = next.ok() && so_far_ ? intersect(*so_far_, *next) : next;
    const bool says_where = !both.ok() && both.status().message().starts_with("JSON schema");
    if (!both.ok() && !says_where) both = both.status().with_context(named.message());
    apply(std::move(both));
  }
  void remove(const Result<Language>& next, const Language& all) {
    if (!status_.ok()) return;
    if (!next.ok()) {
      status_ = next.status();
      return;
    }
    apply(subtract(so_far_ ? *so_far_ : all, *next));
  }
  Result<std::optional<Language>> take() {
    if (!status_.ok()) return status_;
    return std::move(so_far_);
  }

 private:
  void apply(Result<Language> result) {
    if (result.ok()) {
      so_far_ = std::move(result).value();
    } else {
      status_ = result.status();
    }
  }
  std::optional<Language> so_far_;
  Status status_;
};

Status named(const SchemaDocument& document, int id, std::string_view keyword) {
  return invalid_argument("JSON schema: '{}' at {}", keyword, document.node(id).pointer);
}

// Every spelling of a number without an exponent.
Expression spellings(const Decimal& d) {
  const Expression zero = literal("0");
  return sequence(
      {d.is_zero() ? optional(literal("-")) : literal(d.negative ? "-" : ""), literal(d.whole),
       d.fraction.empty() ? optional(sequence({literal("."), repeat(zero, 1, -1)}))
                          : sequence({literal("." + d.fraction), repeat(zero, 0, -1)})});
}

// The value of a numeric keyword; an error if it is not a number or has far too many digits.
Result<Decimal> decimal(const SchemaDocument& document, int id, std::string_view keyword,
                        const json::Value& v) {
  if (!v.is_number()) return document.error(id, keyword, "must be a number");
  const auto d = parse_decimal(v.number_text());
  if (!d) return document.unsupported_keyword(id, keyword, "a number of more than 400 digits");
  return *d;
}

Status add_bounds(const SchemaDocument& document, int id, Meet& meet) {
  struct Bound {
    std::string_view keyword, exclusive;
    bool above, strict;
  };
  static constexpr Bound kBounds[] = {{"minimum", "exclusiveMinimum", true, false},
                                      {"maximum", "exclusiveMaximum", false, false},
                                      {"exclusiveMinimum", "", true, true},
                                      {"exclusiveMaximum", "", false, true}};
  for (const Bound& b : kBounds) {
    const json::Value* v = document.find(id, b.keyword);
    // In draft 4, a flag next to the bound.
    if (v == nullptr || (b.strict && v->is_bool())) continue;
    const json::Value* exclusive = b.exclusive.empty() ? nullptr : document.find(id, b.exclusive);
    const bool strict =
        b.strict || (exclusive != nullptr && exclusive->is_bool() && exclusive->as_bool());
    FRESHET_ASSIGN_OR_RETURN(const Decimal d, decimal(document, id, b.keyword, *v));
    meet.add(b.above ? decimals_above(d, strict) : decimals_below(d, strict),
             named(document, id, b.keyword));
  }
  return {};
}

}  // namespace

Result<CountRange> count_range(const SchemaDocument& document, const NodeIds& nodes,
                               std::string_view least, std::string_view most, int64_t largest) {
  CountRange range;
  for (const int id : nodes) {
    for (const std::string_view keyword : {least, most}) {
      const json::Value* v = document.find(id, keyword);
      if (v == nullptr) continue;
      const auto n = v->is_number() ? v->as_int64() : std::nullopt;
      if (!n || *n < 0) return document.error(id, keyword, "must be a natural number");
      if (keyword == least) {
        range.low = std::max(range.low, *n);
      } else {
        range.high = range.high < 0 ? *n : std::min(range.high, *n);
      }
      if (*n > (keyword == least ? kMaxCount : largest))
        return document.unsupported_keyword(
            id, keyword, fmt::format("more than {}", keyword == least ? kMaxCount : largest));
    }
  }
  return range;
}

Result<Language> pattern_language(const SchemaDocument& document, int id, std::string_view keyword,
                                  const std::string& pattern) {
  auto e = parse_search_regex(pattern);
  if (!e.ok()) return e.status().with_context(named(document, id, keyword).message());
  auto language = Language::search(*e);
  if (!language.ok()) return language.status().with_context(named(document, id, keyword).message());
  return language;
}

Result<std::optional<Language>> string_language(const SchemaDocument& document,
                                                const NodeIds& nodes, bool lengths) {
  Meet meet;
  const Language all = Language::of_length(0, -1);
  CountRange length;
  if (lengths) {
    FRESHET_ASSIGN_OR_RETURN(length, count_range(document, nodes, "minLength", "maxLength"));
  }
  if (length.none()) return std::optional<Language>(Language());
  for (const int id : nodes) {
    if (const json::Value* p = document.find(id, "pattern")) {
      if (!p->is_string()) return document.error(id, "pattern", "must be a string");
      meet.add(pattern_language(document, id, "pattern", p->as_string()),
               named(document, id, "pattern"));
    }
    if (const json::Value* f = document.find(id, "format")) {
      if (!f->is_string()) return document.error(id, "format", "must be a string");
      if (is_unsupported_format(f->as_string()))
        return document.unsupported_keyword(id, "format", "'" + f->as_string() + "'");
      if (const char* expression = format_expression(f->as_string())) {
        FRESHET_ASSIGN_OR_RETURN(const Expression e, parse_regex(expression));
        meet.add(Language::from(e), named(document, id, "format"));
      }
    }
    if (!document.node(id).written) continue;
    if (const json::Value* p = document.find(id, kNotPattern))
      meet.remove(pattern_language(document, id, "pattern", p->as_string()), all);
    if (const json::Value* values = document.find(id, kNotValues)) {
      std::vector<std::string> strings;
      for (const json::Value& v : values->as_array()) {
        if (v.is_string()) strings.push_back(v.as_string());
      }
      if (!strings.empty()) meet.remove(Language::of(strings), all);
    }
  }
  if (length.low > 0 || length.high >= 0) {
    meet.add(Language::of_length(length.low, length.high),
             invalid_argument("JSON schema: 'minLength' and 'maxLength' at {}",
                              document.node(nodes.front()).pointer));
  }
  return meet.take();
}

Result<std::optional<Language>> number_language(const SchemaDocument& document,
                                                const NodeIds& nodes, bool whole) {
  Meet meet;
  bool constrained = false;
  FRESHET_ASSIGN_OR_RETURN(const Language all, all_decimals());
  if (whole) meet.add(whole_decimals(!document.integers_have_no_fraction()), {});
  for (const int id : nodes) {
    for (const char* keyword :
         {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
      constrained = constrained || document.find(id, keyword) != nullptr;
    FRESHET_RETURN_IF_ERROR(add_bounds(document, id, meet));
    if (const json::Value* v = document.find(id, "multipleOf")) {
      FRESHET_ASSIGN_OR_RETURN(const Decimal d, decimal(document, id, "multipleOf", *v));
      meet.add(multiples_of(d), named(document, id, "multipleOf"));
    }
    if (!document.node(id).written) continue;
    if (const json::Value* v = document.find(id, kNotMultiple)) {
      constrained = true;
      FRESHET_ASSIGN_OR_RETURN(const Decimal d, decimal(document, id, "multipleOf", *v));
      meet.remove(multiples_of(d), all);
    }
    if (document.find(id, kNotWhole) != nullptr) {
      constrained = true;
      meet.remove(whole_decimals(), all);
    }
    if (const json::Value* values = document.find(id, kNotValues)) {
      std::vector<Expression> numbers;
      for (const json::Value& v : values->as_array()) {
        if (!v.is_number()) continue;
        FRESHET_ASSIGN_OR_RETURN(const Decimal d, decimal(document, id, "enum", v));
        numbers.push_back(spellings(d));
      }
      constrained = constrained || !numbers.empty();
      if (!numbers.empty()) meet.remove(Language::from(choice(std::move(numbers))), all);
    }
  }
  if (!constrained) return std::optional<Language>();
  return meet.take();
}

}  // namespace freshet::grammar
