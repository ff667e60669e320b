#include "grammar/schema_document.h"

#include <algorithm>
#include <charconv>

namespace freshet::grammar {
namespace {

constexpr int kMaxNesting = 128;
constexpr std::string_view kLink = "\x01node ";

struct Uri {
  std::string scheme, authority, path, query;  // with their punctuation
};

// A reference without its fragment, split into the parts of RFC 3986.
Uri split_uri(std::string_view text) {
  Uri out;
  const size_t colon = text.find(':');
  if (colon != std::string_view::npos && colon > 0 && colon < text.find_first_of("/?")) {
    out.scheme = text.substr(0, colon + 1);
    text.remove_prefix(colon + 1);
  }
  if (text.starts_with("//")) {
    const size_t end = std::min(text.find_first_of("/?", 2), text.size());
    out.authority = text.substr(0, end);
    text.remove_prefix(end);
  }
  const size_t query = std::min(text.find('?'), text.size());
  out.path = text.substr(0, query);
  out.query = text.substr(query);
  return out;
}

// "/a/./b/../c" is "/a/c".
std::string without_dots(std::string_view path) {
  std::vector<std::string_view> steps;
  const bool rooted = path.starts_with('/');
  if (rooted) path.remove_prefix(1);
  bool open = false;  // ends with a slash
  for (;;) {
    const size_t end = std::min(path.find('/'), path.size());
    const std::string_view step = path.substr(0, end);
    open = step == "." || step == "..";
    if (step == ".." && !steps.empty()) steps.pop_back();
    if (!open) steps.push_back(step);
    if (end == path.size()) break;
    path.remove_prefix(end + 1);
  }
  std::string out = rooted ? "/" : "";
  for (size_t i = 0; i < steps.size(); ++i) {
    if (i > 0) out += '/';
    out += steps[i];
  }
  if (open && !steps.empty()) out += '/';
  return out;
}

std::string join_uri(const std::string& base, std::string_view reference) {
  if (reference.empty()) return base;
  const Uri from = split_uri(base);
  Uri to = split_uri(reference);
  if (to.scheme.empty()) {
    to.scheme = from.scheme;
    if (to.authority.empty()) {
      to.authority = from.authority;
      if (to.path.empty()) {
        to.path = from.path;
        if (to.query.empty()) to.query = from.query;
      } else if (to.path.front() != '/') {
        const bool at_root = !from.authority.empty() && from.path.empty();
        to.path = (at_root ? "/" : from.path.substr(0, from.path.rfind('/') + 1)) + to.path;
      }
    }
  }
  return to.scheme + to.authority + without_dots(to.path) + to.query;
}

std::string without_fragment(std::string_view uri) {
  return std::string(uri.substr(0, uri.find('#')));
}

std::string escaped_step(std::string_view name) {
  std::string out = "/";
  for (const char c : name) {
    if (c == '~') {
      out += "~0";
    } else if (c == '/') {
      out += "~1";
    } else {
      out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
  }
  return out;
}

int hex_digit(char c) {
  return c >= '0' && c <= '9'   ? c - '0'
         : c >= 'a' && c <= 'f' ? c - 'a' + 10
         : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                : -1;
}

std::string pointer_segment(std::string_view s) {
  std::string bytes;
  for (size_t i = 0; i < s.size(); ++i) {
    const bool percent =
        s[i] == '%' && i + 2 < s.size() && hex_digit(s[i + 1]) >= 0 && hex_digit(s[i + 2]) >= 0;
    bytes += percent ? static_cast<char>(hex_digit(s[i + 1]) * 16 + hex_digit(s[i + 2])) : s[i];
    if (percent) i += 2;
  }
  std::string out;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool escape =
        bytes[i] == '~' && i + 1 < bytes.size() && (bytes[i + 1] == '0' || bytes[i + 1] == '1');
    out += escape ? (bytes[++i] == '0' ? '~' : '/') : bytes[i];
  }
  return out;
}

}  // namespace

SchemaDocument::SchemaDocument(const json::Value& root) : root_(root) {
  const std::string dialect = root.get_string("$schema", "");
  for (const char* old : {"draft-03", "draft-04", "draft-06", "draft-07"})
    old_draft_ = old_draft_ || dialect.find(old) != std::string::npos;
  draft4_ = dialect.find("draft-04") != std::string::npos;
  if (dialect.find("draft-03") != std::string::npos)
    status_ = unsupported("JSON schema: '$schema' at #: draft 3 is not supported; use a later one");
  by_uri_.emplace("", &root_);
  index(root_, "#", "", 0);
  add(root_, "#", base_of(root_, ""), false);
}

std::string SchemaDocument::base_of(const json::Value& schema, const std::string& base) const {
  for (const char* keyword : {"$id", "id"}) {
    if (keyword[0] == 'i' && !old_draft_) continue;
    const json::Value* id = schema.find(keyword);
    if (id == nullptr || !id->is_string() || id->as_string().starts_with('#')) continue;
    // Before 2019-09 a reference hides its siblings, including $id.
    if (old_draft_ && schema.find("$ref") != nullptr) continue;
    return join_uri(base, without_fragment(id->as_string()));
  }
  return base;
}

// Visits every location in the document and records the identifiers found there. Values of enum and
// const are data: anything in them that looks like a schema is not one.
void SchemaDocument::index(const json::Value& v, const std::string& pointer,
                           const std::string& outer, int depth) {
  if (depth > kMaxNesting) {
    if (status_.ok()) status_ = invalid_argument("JSON schema: nested deeper than {}", kMaxNesting);
    return;
  }
  if (v.is_array()) {
    size_t i = 0;
    for (const json::Value& e : v.as_array())
      index(e, pointer + "/" + std::to_string(i++), outer, depth + 1);
  }
  if (!v.is_object()) {
    places_.try_emplace(&v, pointer, outer);
    return;
  }
  const std::string base = base_of(v, outer);
  places_.try_emplace(&v, pointer, base);
  if (base != outer) by_uri_.try_emplace(base, &v);
  for (const char* keyword : {"$anchor", "$dynamicAnchor"}) {
    const json::Value* a = v.find(keyword);
    if (a == nullptr || !a->is_string()) continue;
    by_uri_.try_emplace(base + "#" + a->as_string(), &v);
    if (keyword[1] == 'd') ++dynamic_anchors_[a->as_string()];
  }
  const json::Value* recursive = v.find("$recursiveAnchor");
  if (recursive != nullptr && *recursive == json::Value(true)) ++dynamic_anchors_["#"];
  for (const char* keyword : {"$id", "id"}) {
    const json::Value* id = v.find(keyword);
    if (old_draft_ && id != nullptr && id->is_string() && id->as_string().starts_with('#'))
      by_uri_.try_emplace(base + id->as_string(), &v);
  }
  for (const auto& [name, value] : v.as_object()) {
    if (name == "enum" || name == "const") {
      if (!value.is_object()) continue;  // perhaps a property of that name: in any case an object
      if (name == "const") {
        places_.try_emplace(&value, pointer + "/const", base);
        continue;
      }
    }
    index(value, pointer + escaped_step(name), base, depth + 1);
  }
}

int SchemaDocument::add(const json::Value& schema, std::string pointer, std::string base,
                        bool written) {
  const auto [it, fresh] = by_value_.try_emplace(&schema, static_cast<int>(nodes_.size()));
  if (fresh) nodes_.push_back({&schema, std::move(pointer), std::move(base), written});
  return it->second;
}

int SchemaDocument::child(int parent, const json::Value& schema, std::string_view step) {
  const Node& p = node(parent);
  if (p.written) {
    // A synthetic node uses the location of its origin; links lead to the other nodes.
    const json::Value* ref = schema.find("$ref");
    if (ref != nullptr && ref->is_string() && ref->as_string().starts_with(kLink))
      return static_cast<int>(std::atoll(ref->as_string().c_str() + kLink.size()));
    return add(schema, p.pointer, p.base, true);
  }
  const auto place = places_.find(&schema);
  if (place != places_.end()) return add(schema, place->second.first, place->second.second, false);
  return add(schema, p.pointer + escaped_step(step), p.base, false);
}

Result<const json::Value*> SchemaDocument::at_pointer(const json::Value& from,
                                                      std::string_view pointer) const {
  const json::Value* at = &from;
  while (!pointer.empty() && at != nullptr) {
    if (pointer.front() != '/') return invalid_argument("no such anchor");
    pointer.remove_prefix(1);
    const size_t end = std::min(pointer.find('/'), pointer.size());
    const std::string name = pointer_segment(pointer.substr(0, end));
    pointer.remove_prefix(end);
    if (at->is_array()) {
      size_t index = 0;
      const auto [last, error] = std::from_chars(name.data(), name.data() + name.size(), index);
      const bool good = error == std::errc() && last == name.data() + name.size();
      at = good && index < at->as_array().size() ? &at->as_array()[index] : nullptr;
    } else {
      at = at->find(name);
    }
  }
  if (at == nullptr) return invalid_argument("points to nothing");
  return at;
}

Result<int> SchemaDocument::resolve(int id, std::string_view keyword) {
  const json::Value* ref = find(id, keyword);
  if (!ref->is_string()) return error(id, keyword, "must be a string");
  const std::string& text = ref->as_string();
  if (node(id).written && text.starts_with(kLink)) return child(id, schema(id), "");
  const size_t hash = std::min(text.find('#'), text.size());
  const std::string uri = join_uri(node(id).base, text.substr(0, hash));
  const std::string fragment = hash < text.size() ? text.substr(hash + 1) : "";
  auto resource = by_uri_.find(uri);
  const json::Value* target = nullptr;
  if (const auto whole = by_uri_.find(uri + "#" + fragment);
      !fragment.empty() && whole != by_uri_.end()) {
    target = whole->second;
  } else if (resource == by_uri_.end() && hash == 0) {
    resource = by_uri_.find("");
  }
  if (target == nullptr && resource == by_uri_.end())
    return unsupported_keyword(id, keyword, "'" + text + "' leaves the document");
  if (target == nullptr) {
    const auto found = at_pointer(*resource->second, fragment);
    if (!found.ok()) return error(id, keyword, "'" + text + "' " + found.status().message());
    target = *found;
  }
  const auto place = places_.find(target);
  if (place == places_.end() || (!target->is_object() && !target->is_bool()))
    return error(id, keyword, "'" + text + "' points to something that is not a schema");
  return add(*target, place->second.first, place->second.second, false);
}

// A dynamic reference depends on the dynamic scope only if several locations have the anchor that
// it names.
bool SchemaDocument::is_static(int id, std::string_view keyword) const {
  const json::Value* ref = find(id, keyword);
  if (ref == nullptr || !ref->is_string()) return true;  // resolve() reports the error
  if (keyword == "$ref") return true;
  const std::string& text = ref->as_string();
  const size_t hash = std::min(text.find('#'), text.size());
  const auto anchor = dynamic_anchors_.find(keyword == "$recursiveRef" ? "#"
                                            : hash < text.size()       ? text.substr(hash + 1)
                                                                       : "");
  return anchor == dynamic_anchors_.end() || anchor->second < 2;
}

int SchemaDocument::write(int origin, json::Value schema) {
  written_.push_back(std::move(schema));
  const std::string pointer = node(origin).pointer;
  const std::string base = node(origin).base;
  return add(written_.back(), pointer, base, true);
}

json::Value SchemaDocument::link(int id) {
  json::Object o;
  o["$ref"] = std::string(kLink) + std::to_string(id);
  return json::Value(std::move(o));
}

int SchemaDocument::negation(int id) {
  const auto it = negations_.find(id);
  if (it != negations_.end()) return it->second;
  json::Object o;
  o["not"] = link(id);
  const int made = write(id, json::Value(std::move(o)));
  negations_.emplace(id, made);
  return made;
}

Status SchemaDocument::error(int id, std::string_view keyword, std::string_view what) const {
  return invalid_argument("JSON schema: '{}' at {} {}", keyword, node(id).pointer, what);
}

Status SchemaDocument::unsupported_keyword(int id, std::string_view keyword,
                                           std::string_view why) const {
  return unsupported("JSON schema: '{}' at {} is not supported{}{}", keyword, node(id).pointer,
                     why.empty() ? "" : ": ", why);
}

}  // namespace freshet::grammar
