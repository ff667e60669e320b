// A JSON schema as a graph of numbered nodes, with its references resolved.
//
// A node is one (sub)schema with the JSON pointer that errors show for it. Besides the nodes of the
// document there are synthetic nodes written by the compiler (negations, parts of conditionals);
// they may use the kNot* keywords and refer to nodes by number. Not synchronised.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace freshet::grammar {

// Keywords of synthetic nodes only.
inline constexpr std::string_view kNotValues = "\x01not values";    // an array
inline constexpr std::string_view kNotPattern = "\x01not pattern";  // a pattern
inline constexpr std::string_view kNotMultiple = "\x01not multiple";
inline constexpr std::string_view kNotWhole = "\x01not whole";
// Keywords that apply another node too.
inline constexpr std::string_view kReferences[] = {"$ref", "$dynamicRef", "$recursiveRef"};

using NodeIds = std::vector<int>;

class SchemaDocument {
 public:
  static constexpr size_t kMaxNodes = 50'000;
  struct Node {
    const json::Value* schema;
    std::string pointer;
    std::string base;      // base URI for references
    bool written = false;  // synthetic: written by the compiler
  };

  explicit SchemaDocument(const json::Value& root);

  Status status() const { return status_; }
  int root() const { return 0; }
  const Node& node(int id) const { return nodes_[static_cast<size_t>(id)]; }
  const json::Value& schema(int id) const { return *node(id).schema; }
  // The value of a keyword; nullptr if absent, or if the node is a boolean.
  const json::Value* find(int id, std::string_view keyword) const {
    return schema(id).find(keyword);
  }
  // The node of a subschema of `parent`.
  int child(int parent, const json::Value& schema, std::string_view step);
  Result<int> resolve(int id, std::string_view keyword);
  // Whether a reference always leads to the same target, whatever the dynamic scope: false for some
  // $dynamicRef and $recursiveRef.
  bool is_static(int id, std::string_view keyword) const;
  // Whether $ref replaces its sibling keywords, as in drafts up to 7.
  bool ref_stands_alone() const { return old_draft_; }
  // In draft 4, 1.0 is not an integer.
  bool integers_have_no_fraction() const { return draft4_; }

  // Adds a synthetic node on behalf of `origin`. It may contain {"$ref": link(n)}.
  int write(int origin, json::Value schema);
  static json::Value link(int id);
  int negation(int id);  // {"not": id}, one per node

  // "JSON schema: '<keyword>' at <pointer> ..."
  Status error(int id, std::string_view keyword, std::string_view what) const;
  Status unsupported_keyword(int id, std::string_view keyword, std::string_view why = {}) const;

 private:
  void index(const json::Value& v, const std::string& pointer, const std::string& base, int depth);
  Result<const json::Value*> at_pointer(const json::Value& from, std::string_view pointer) const;
  int add(const json::Value& schema, std::string pointer, std::string base, bool written);
  std::string base_of(const json::Value& schema, const std::string& base) const;

  const json::Value& root_;
  Status status_;
  bool old_draft_ = false;
  bool draft4_ = false;
  std::vector<Node> nodes_;
  std::unordered_map<const json::Value*, int> by_value_;
  std::unordered_map<std::string, const json::Value*> by_uri_;
  std::unordered_map<const json::Value*, std::pair<std::string, std::string>> places_;
  std::unordered_map<std::string, int> dynamic_anchors_;  // number of places that define each
  std::unordered_map<int, int> negations_;
  std::deque<json::Value> written_;
};

}  // namespace freshet::grammar
