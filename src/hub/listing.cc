#include "hub/listing.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "base/json.h"
#include "hub/names.h"

namespace freshet::hub {
namespace {

constexpr size_t kMostFiles = 100'000;
constexpr int kMostParts = 10'000;

std::string upper(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - ('a' - 'A') : c);
  return out;
}

// "name-00002-of-00005.gguf": name, 2, 5, ".gguf".
struct NumberedName {
  std::string stem;
  int index = 0;
  int count = 0;
  std::string suffix;
  std::string part(int i) const {
    return fmt::format("{}-{:05}-of-{:05}{}", stem, i, count, suffix);
  }
};

std::optional<NumberedName> numbered(std::string_view path) {
  const size_t dot = path.rfind('.');
  constexpr size_t kTail = std::string_view("-00001-of-00003").size();
  if (dot == path.npos || dot < kTail) return std::nullopt;
  const std::string_view tail = path.substr(dot - kTail, kTail);
  NumberedName n{.stem = std::string(path.substr(0, dot - kTail)),
                 .suffix = std::string(path.substr(dot))};
  const auto number = [](std::string_view digits, int& value) {
    const auto r = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return r.ec == std::errc() && r.ptr == digits.data() + digits.size();
  };
  if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || !number(tail.substr(1, 5), n.index) ||
      !number(tail.substr(10, 5), n.count) || n.index < 1 || n.index > n.count ||
      n.count > kMostParts)
    return std::nullopt;
  return n;
}

const RepoFile* find_file(const std::vector<RepoFile>& files, std::string_view path) {
  for (const RepoFile& f : files) {
    if (f.path == path) return &f;
  }
  return nullptr;
}

bool is_separator(char c) {
  return c == '-' || c == '.' || c == '/' || c == '_';
}

// Whether `word` (upper case) stands in `path` between separators. '_' before it separates, '_'
// after it does not: Q4_K is not in Q4_K_M.
bool has_word(std::string_view path, std::string_view word) {
  const std::string text = upper(path);
  for (size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || is_separator(text[at - 1])) &&
        (end == text.size() || (is_separator(text[end]) && text[end] != '_')))
      return true;
  }
  return false;
}

// Projectors of pictures and calibration data are GGUF files, but no models.
bool is_gguf_model(std::string_view path) {
  const std::string name = upper(path.substr(path.rfind('/') + 1));
  return name.ends_with(".GGUF") && name.find("MMPROJ") == name.npos &&
         name.find("IMATRIX") == name.npos;
}

Result<Selection> selected_gguf(const std::vector<RepoFile>& files, const RepoFile& first,
                                std::string_view repo) {
  Selection s{.gguf = true, .main = first.path, .files = {}};
  const auto split = numbered(first.path);
  for (int i = 1; i <= (split ? split->count : 1); ++i) {
    const std::string part = split ? split->part(i) : first.path;
    const RepoFile* file = find_file(files, part);
    if (file == nullptr)
      return not_found("{}: {} is missing, part {} of {}", repo, part, i, split->count);
    s.files.push_back(*file);
  }
  return s;
}

bool is_root_file(std::string_view path) {
  return path.find('/') == path.npos && !path.starts_with('.');
}

// The weights in the order of preference of transformers: one file before shards.
std::vector<RepoFile> safetensors_weights(const std::vector<RepoFile>& files) {
  if (const RepoFile* single = find_file(files, "model.safetensors")) return {*single};
  std::vector<RepoFile> named, others;
  for (const RepoFile& f : files) {
    if (!is_root_file(f.path) || !f.path.ends_with(".safetensors")) continue;
    if (f.path.starts_with("model")) {
      named.push_back(f);
    } else if (!f.path.starts_with("consolidated") && !f.path.starts_with("adapter")) {
      others.push_back(f);
    }
  }
  return named.empty() ? others : named;
}

bool is_side_file(std::string_view path) {
  for (const char* suffix : {".json", ".model", ".jinja", ".tiktoken", ".txt"}) {
    if (path.ends_with(suffix)) return is_root_file(path);
  }
  return false;
}

std::optional<Selection> selected_safetensors(const std::vector<RepoFile>& files) {
  const std::vector<RepoFile> weights = safetensors_weights(files);
  if (weights.empty() || find_file(files, "config.json") == nullptr) return std::nullopt;
  Selection s;
  for (const RepoFile& f : files) {
    const bool stale =
        f.path == "model.safetensors.index.json" && weights.front().path == "model.safetensors";
    if (is_side_file(f.path) && !stale) s.files.push_back(f);
  }
  s.files.insert(s.files.end(), weights.begin(), weights.end());
  return s;
}

bool is_pickle(std::string_view path) {
  for (const char* suffix : {".bin", ".pt", ".pth", ".ckpt", ".pkl"}) {
    if (path.ends_with(suffix)) return true;
  }
  return false;
}

Status no_model(const std::vector<RepoFile>& files, std::string_view repo) {
  for (const RepoFile& f : files) {
    if (!is_pickle(f.path)) continue;
    return unsupported(
        "{} has its weights only as pickle ({}), which can run code when it is read: look for a "
        "version of this model in safetensors or GGUF",
        repo, f.path);
  }
  return unsupported("{} holds no model: neither config.json with safetensors nor a .gguf file",
                     repo);
}

// The GGUF model that `quant` means; the shortest path if several match.
const RepoFile* matching_gguf(const std::vector<RepoFile>& models, std::string_view quant) {
  const std::string wanted = upper(quant);
  const RepoFile* best = nullptr;
  for (const RepoFile& m : models) {
    const bool named =
        m.path == quant || upper(m.path) == wanted || upper(m.path) == wanted + ".GGUF";
    if (named) return &m;
    if (has_word(m.path, wanted) && (best == nullptr || m.path.size() < best->path.size()))
      best = &m;
  }
  if (best != nullptr) return best;
  // A part of a split model.
  const auto part = numbered(quant);
  return part ? find_file(models, part->part(1)) : nullptr;
}

std::string quants_text(const std::vector<RepoFile>& models) {
  std::set<std::string> names;
  for (const RepoFile& m : models) {
    const std::string quant = quant_of(m.path);
    names.insert(quant.empty() ? m.path : quant);
  }
  std::string text;
  for (const std::string& n : names) text += (text.empty() ? "" : ", ") + n;
  return text;
}

std::string licence_of(const json::Value& answer) {
  if (const json::Value* card = answer.find("cardData")) {
    // "other" comes with the licence's name.
    const std::string name = card->get_string("license_name", "");
    const std::string id = card->get_string("license", "");
    if (!id.empty()) return id == "other" && !name.empty() ? name : id;
  }
  const json::Value* tags = answer.find("tags");
  if (tags == nullptr || !tags->is_array()) return {};
  constexpr std::string_view kTag = "license:";
  for (const json::Value& tag : tags->as_array()) {
    if (tag.is_string() && tag.as_string().starts_with(kTag))
      return tag.as_string().substr(kTag.size());
  }
  return {};
}

Result<RepoFile> file_of(const json::Value& entry) {
  RepoFile f;
  f.path = entry.get_string("rfilename", "");
  FRESHET_RETURN_IF_ERROR(check_file_path(f.path));
  f.size = entry.get_int("size", -1);
  f.blob = entry.get_string("blobId", "");
  if (const json::Value* lfs = entry.find("lfs"); lfs != nullptr && lfs->is_object()) {
    f.blob = lfs->get_string("sha256", "");
    f.size = lfs->get_int("size", f.size);
  }
  if (!f.blob.empty() && !is_blob_name(f.blob))
    return invalid_argument("the hub gives {} a hash that is none", f.path);
  f.size = std::max<int64_t>(f.size, -1);
  return f;
}

}  // namespace

Result<Listing> parse_listing(std::string_view text) {
  const auto refuse = [](const char* why) {
    return invalid_argument("the hub's answer is not the description of a model: {}", why);
  };
  auto parsed = json::parse(text);
  if (!parsed.ok()) return refuse(parsed.status().message().c_str());
  Listing listing;
  listing.commit = parsed->get_string("sha", "");
  if (!is_commit(listing.commit)) return refuse("it has no commit");
  const json::Value* siblings = parsed->find("siblings");
  if (siblings == nullptr || !siblings->is_array()) return refuse("it has no list of files");
  if (siblings->as_array().size() > kMostFiles) return refuse("it has too many files");
  for (const json::Value& entry : siblings->as_array()) {
    FRESHET_ASSIGN_OR_RETURN(RepoFile file, file_of(entry));
    listing.files.push_back(std::move(file));
  }
  const json::Value* gated = parsed->find("gated");  // false, "auto" or "manual"
  listing.gated =
      gated != nullptr && (gated->is_string() || (gated->is_bool() && gated->as_bool()));
  listing.licence = licence_of(*parsed);
  return listing;
}

int64_t Selection::bytes() const {
  int64_t sum = 0;
  for (const RepoFile& f : files) sum += std::max<int64_t>(f.size, 0);
  return sum;
}

Result<Selection> select_files(const std::vector<RepoFile>& files, std::string_view quant,
                               std::string_view repo) {
  const std::vector<RepoFile> models = gguf_models(files);
  const std::optional<Selection> folder = selected_safetensors(files);
  if (upper(quant) == "SAFETENSORS") {
    if (folder) return *folder;
    return not_found("{} has no config.json with safetensors", repo);
  }
  if (!quant.empty()) {
    if (const RepoFile* m = matching_gguf(models, quant)) return selected_gguf(files, *m, repo);
    if (models.empty() && !folder) return no_model(files, repo);
    return not_found("{} has no '{}': {}", repo, quant,
                     models.empty() ? "it has no GGUF file, only safetensors"
                                    : "there is " + quants_text(models));
  }
  if (const RepoFile* m = matching_gguf(models, "Q4_K_M")) return selected_gguf(files, *m, repo);
  if (folder) return *folder;
  if (models.empty()) return no_model(files, repo);
  const RepoFile* m = matching_gguf(models, "Q8_0");
  return selected_gguf(files, m != nullptr ? *m : models.front(), repo);
}

bool has_all_parts(const Selection& selection) {
  for (const RepoFile& f : selection.files) {
    const auto n = numbered(f.path);
    for (int i = 1; n && i <= n->count; ++i) {
      if (find_file(selection.files, n->part(i)) == nullptr) return false;
    }
  }
  return selection.gguf || find_file(selection.files, "config.json") != nullptr;
}

bool has_tokenizer(const Selection& selection) {
  return selection.gguf ||
         std::any_of(selection.files.begin(), selection.files.end(), [](const RepoFile& f) {
           return f.path.starts_with("tokenizer") || f.path.starts_with("vocab") ||
                  f.path.ends_with(".model") || f.path.ends_with(".tiktoken");
         });
}

std::string quant_of(std::string_view path) {
  const std::string name = upper(path.substr(path.rfind('/') + 1));
  std::string found;
  for (size_t at = 0; at < name.size();) {
    size_t end = at;
    while (end < name.size() && (name[end] == '_' || !is_separator(name[end]))) ++end;
    const std::string word = name.substr(at, end - at);
    const size_t q = word.find_first_of("0123456789");
    for (const char* kind : {"Q", "IQ", "TQ", "F", "BF", "MXFP", "FP"}) {
      if (q != word.npos && word.substr(0, q) == kind) found = word;
    }
    at = end + 1;
  }
  return found;
}

std::vector<RepoFile> gguf_models(const std::vector<RepoFile>& files) {
  std::vector<RepoFile> models;
  for (const RepoFile& f : files) {
    const auto n = numbered(f.path);
    if (is_gguf_model(f.path) && (!n || n->index == 1)) models.push_back(f);
  }
  std::sort(models.begin(), models.end(),
            [](const RepoFile& a, const RepoFile& b) { return a.path < b.path; });
  return models;
}

int64_t gguf_bytes(const std::vector<RepoFile>& files, const RepoFile& first) {
  const auto n = numbered(first.path);
  if (!n) return std::max<int64_t>(first.size, 0);
  int64_t sum = 0;
  for (int i = 1; i <= n->count; ++i) {
    if (const RepoFile* f = find_file(files, n->part(i))) sum += std::max<int64_t>(f->size, 0);
  }
  return sum;
}

}  // namespace freshet::hub
