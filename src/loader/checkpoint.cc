#include "loader/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>

#include "base/log.h"

namespace freshet::loader {
namespace {

namespace fs = std::filesystem;

// The parts of a shard name such as "name-00002-of-00003.gguf".
struct SplitName {
  std::string prefix;  // including the directory
  int count = 0;
  std::string part(int i) const { return fmt::format("{}-{:05}-of-{:05}.gguf", prefix, i, count); }
};

std::optional<SplitName> split_name(const std::string& path) {
  constexpr size_t kTail = std::string_view("-00001-of-00003.gguf").size();
  if (path.size() < kTail) return std::nullopt;
  const std::string_view tail = std::string_view(path).substr(path.size() - kTail);
  if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || tail.substr(15) != ".gguf") {
    return std::nullopt;
  }
  SplitName split{path.substr(0, path.size() - kTail)};
  int index = 0;
  const auto number = [](std::string_view s, int& v) {
    const auto r = std::from_chars(s.data(), s.data() + s.size(), v);
    return r.ec == std::errc() && r.ptr == s.data() + s.size();
  };
  if (!number(tail.substr(1, 5), index) || !number(tail.substr(10, 5), split.count)) {
    return std::nullopt;
  }
  if (index < 1 || index > split.count) return std::nullopt;
  return split;
}

Result<std::vector<std::string>> files_ending_in(const std::string& directory,
                                                 std::string_view suffix) {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(suffix) && !name.starts_with('.')) out.push_back(it->path().string());
  }
  if (error) return io_error("cannot list {}: {}", directory, error.message());
  std::sort(out.begin(), out.end());
  return out;
}

// The GGUF model in a directory; its shards count as one. A tower beside it does not count.
Result<std::string> only_gguf(const std::string& directory) {
  FRESHET_ASSIGN_OR_RETURN(std::vector<std::string> files, files_ending_in(directory, ".gguf"));
  std::vector<std::string> models;
  for (std::string& f : files) {
    const auto split = split_name(f);
    if (split && f != split->part(1)) continue;
    if (fs::path(f).filename().string().starts_with("mmproj") && files.size() > 1) continue;
    models.push_back(std::move(f));
  }
  if (models.size() == 1) return models[0];
  if (models.empty()) {
    return not_found("{} holds no model: neither config.json with *.safetensors nor a .gguf file",
                     directory);
  }
  return invalid_argument("{} holds {} GGUF models; name one, e.g. {}", directory, models.size(),
                          models[0]);
}

// The only complete set of numbered shards, "name-00001-of-00002.safetensors" etc.; empty if there
// is none, or more than one.
std::vector<std::string> numbered_set(const std::vector<std::string>& files) {
  // By name and count.
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> sets;
  for (const std::string& path : files) {
    const std::string name = fs::path(path).stem().string();
    const size_t of = name.rfind("-of-"), number = of == name.npos ? of : name.rfind('-', of - 1);
    if (of == name.npos || of == 0 || number == name.npos) continue;
    sets[{name.substr(0, number), name.substr(of + 4)}].push_back(path);
  }
  std::vector<std::string> complete;
  for (auto& [key, parts] : sets) {
    size_t count = 0;
    const char* end = key.second.data() + key.second.size();
    const auto r = std::from_chars(key.second.data(), end, count);
    if (r.ec != std::errc() || r.ptr != end || parts.size() != count) continue;
    if (!complete.empty()) return {};
    complete = std::move(parts);
  }
  return complete;
}

bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

Result<json::Value> read_config(const std::string& directory) {
  const std::string config = directory + "/config.json";
  FRESHET_ASSIGN_OR_RETURN(json::Value value, json::parse_file(config));
  if (!value.is_object()) return invalid_argument("{} is not a JSON object", config);
  return value;
}

// Null if there is none, or none that can be read: transformers ignores it as well.
json::Value read_generation_config(const std::string& directory) {
  const std::string path = directory + "/generation_config.json";
  if (!exists(path)) return {};
  auto parsed = json::parse_file(path);
  if (parsed.ok() && parsed->is_object()) return std::move(parsed).value();
  log_warning("{} is ignored: {}", path,
              parsed.ok() ? "it is not a JSON object" : parsed.status().message());
  return {};
}

// An index may only name files in its own directory.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

// The files that an index names, each once; none if the index is malformed.
std::vector<std::string> files_of_index(const json::Value& index) {
  std::vector<std::string> files;
  const json::Value* map = index.find("weight_map");
  if (map == nullptr || !map->is_object()) return files;
  for (const auto& [tensor, value] : map->as_object()) {
    if (!value.is_string() || !is_plain_name(value.as_string())) return {};
    files.push_back(value.as_string());
  }
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

}  // namespace

Result<Checkpoint> Checkpoint::open_bare(const std::string& path) {
  Checkpoint c;
  c.path_ = path;
  if (constexpr std::string_view kConfig = "/config.json"; path.ends_with(kConfig)) {
    c.path_.resize(path.size() - kConfig.size());
    FRESHET_ASSIGN_OR_RETURN(c.config_, read_config(c.path_));
    c.generation_config_ = read_generation_config(c.path_);
    return c;
  }
  FRESHET_RETURN_IF_ERROR(c.open_files({path}));
  return c;
}

Result<Checkpoint> Checkpoint::open(const std::string& path, const std::string& tower) {
  FRESHET_ASSIGN_OR_RETURN(Checkpoint c, open_model(path));
  if (!tower.empty()) FRESHET_RETURN_IF_ERROR(c.open_tower(tower));
  return c;
}

Result<Checkpoint> Checkpoint::open_model(const std::string& path) {
  Checkpoint c;
  c.path_ = path;
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    if (path.ends_with(".safetensors")) {
      return invalid_argument("{}: give the directory, which also holds config.json", path);
    }
    FRESHET_RETURN_IF_ERROR(c.open_gguf(path));
    return c;
  }
  FRESHET_ASSIGN_OR_RETURN(const auto safetensors, files_ending_in(path, ".safetensors"));
  if (!safetensors.empty() || exists(path + "/model.safetensors.index.json")) {
    FRESHET_RETURN_IF_ERROR(c.open_hugging_face(path));
    return c;
  }
  FRESHET_ASSIGN_OR_RETURN(const std::string gguf, only_gguf(path));
  FRESHET_RETURN_IF_ERROR(c.open_gguf(gguf));
  return c;
}

bool is_kv_factor(std::string_view name) {
  return name.ends_with(".k_scale") || name.ends_with(".v_scale") ||
         name.ends_with(".k_channel_scale");
}

Status Checkpoint::open_hugging_face(const std::string& directory) {
  kind_ = Kind::kHuggingFace;
  if (!exists(directory + "/config.json")) {
    return not_found("{} holds safetensors but no config.json, which names the architecture",
                     directory);
  }
  FRESHET_ASSIGN_OR_RETURN(config_, read_config(directory));
  generation_config_ = read_generation_config(directory);
  FRESHET_RETURN_IF_ERROR(open_weights(directory));
  const std::string path = directory + "/kv_scales.safetensors";
  if (!exists(path)) return {};
  FRESHET_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::open(path));
  for (const TensorSource& t : file.tensors()) {
    if (!is_kv_factor(t.name))
      return invalid_argument("{}: tensor '{}' is no factor of keys or values", path, t.name);
    if (find(t.name) == nullptr) {
      FRESHET_RETURN_IF_ERROR(add(t));
    } else {
      replace(t);
    }
  }
  safetensors_.push_back(std::move(file));
  return {};
}

// As in transformers, a single model.safetensors takes precedence over an index. If an index names
// missing files, a complete set of numbered shards is used instead.
Status Checkpoint::open_weights(const std::string& directory) {
  const std::string index = directory + "/model.safetensors.index.json";
  const std::string single = directory + "/model.safetensors";
  FRESHET_ASSIGN_OR_RETURN(const auto files, files_ending_in(directory, ".safetensors"));
  const std::vector<std::string> numbered = numbered_set(files);
  if (!exists(index)) {
    if (exists(single)) return open_files({single});
    return open_files(numbered.empty() ? files : numbered);
  }
  auto parsed = json::parse_file(index);
  const std::vector<std::string> named =
      parsed.ok() ? files_of_index(*parsed) : std::vector<std::string>();
  const bool complete = !named.empty() && std::all_of(named.begin(), named.end(), [&](auto& name) {
    return exists(directory + "/" + name);
  });
  const bool names_single =
      std::find(named.begin(), named.end(), "model.safetensors") != named.end();
  if (exists(single) && !(complete && names_single)) {
    log_warning("{} is ignored: there is a model.safetensors", index);
    return open_files({single});
  }
  if (!named.empty() && !complete && !numbered.empty()) {
    log_warning(
        "{} is ignored: it names files that do not exist; {} and the rest of its set are read",
        index, fs::path(numbered.front()).filename().string());
    return open_files(numbered);
  }
  if (!parsed.ok()) return parsed.status();
  return open_index(directory, *parsed).with_context(index);
}

Status Checkpoint::open_files(const std::vector<std::string>& files) {
  for (const std::string& path : files) {
    FRESHET_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::open(path));
    for (const TensorSource& t : file.tensors()) FRESHET_RETURN_IF_ERROR(add(t).with_context(path));
    safetensors_.push_back(std::move(file));
  }
  return {};
}

Status Checkpoint::open_index(const std::string& directory, const json::Value& index) {
  const json::Value* map = index.find("weight_map");
  if (map == nullptr || !map->is_object()) return invalid_argument("it has no weight_map");
  std::map<std::string, size_t> shards;  // file name -> position in safetensors_
  for (const auto& [tensor, value] : map->as_object()) {
    if (!value.is_string() || !is_plain_name(value.as_string())) {
      return invalid_argument(
          "tensor '{}' is mapped to something other than a file name in this folder", tensor);
    }
    const std::string& name = value.as_string();
    auto shard = shards.find(name);
    if (shard == shards.end()) {
      FRESHET_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::open(directory + "/" + name));
      safetensors_.push_back(std::move(file));
      shard = shards.emplace(name, safetensors_.size() - 1).first;
    }
    if (const TensorSource* t = safetensors_[shard->second].find(tensor)) {
      FRESHET_RETURN_IF_ERROR(add(*t));
    }
  }
  // As in transformers: read all tensors of the files that an index names.
  for (const SafetensorsFile& file : safetensors_) {
    for (const TensorSource& t : file.tensors()) {
      if (find(t.name) == nullptr) FRESHET_RETURN_IF_ERROR(add(t));
    }
  }
  for (const auto& [tensor, value] : map->as_object()) {
    if (find(tensor) == nullptr)
      return invalid_argument("tensor '{}' is not in {}", tensor, value.as_string());
  }
  return {};
}

Status Checkpoint::open_gguf(const std::string& path) {
  kind_ = Kind::kGguf;
  const auto split = split_name(path);
  const int parts = split ? split->count : 1;
  for (int i = 1; i <= parts; ++i) {
    const std::string part = split ? split->part(i) : path;
    FRESHET_ASSIGN_OR_RETURN(GgufFile file, GgufFile::open(part));
    const int64_t said = file.get_int("split.count").value_or(0);
    if (said > 1 && said != parts) {
      return invalid_argument(
          "{}: the file says that it is one of {} parts; their names must end in "
          "-00001-of-{:05}.gguf and so on",
          part, said, said);
    }
    for (const TensorSource& t : file.tensors()) FRESHET_RETURN_IF_ERROR(add(t).with_context(part));
    gguf_.push_back(std::move(file));
  }
  const auto expected = gguf_.front().get_int("split.tensors.count");
  if (split && expected && *expected != static_cast<int64_t>(tensors_.size())) {
    return invalid_argument("{}: the parts hold {} of {} tensors", path, tensors_.size(),
                            *expected);
  }
  return {};
}

Status Checkpoint::open_tower(const std::string& path) {
  if (kind_ != Kind::kGguf) {
    return invalid_argument(
        "{} has its tower for pictures with it: leave out --mmproj, which is for GGUF files",
        path_);
  }
  FRESHET_ASSIGN_OR_RETURN(GgufFile file, GgufFile::open(path));
  if (file.get_string("general.architecture") != "clip") {
    return invalid_argument(
        "{} is no tower for pictures: --mmproj takes the mmproj file that belongs to the model",
        path);
  }
  for (const TensorSource& t : file.tensors()) FRESHET_RETURN_IF_ERROR(add(t).with_context(path));
  gguf_.push_back(std::move(file));
  has_tower_ = true;
  return {};
}

Status Checkpoint::add(const TensorSource& tensor) {
  if (!index_.emplace(tensor.name, tensors_.size()).second) {
    return invalid_argument("tensor '{}' is in more than one file", tensor.name);
  }
  tensors_.push_back(tensor);
  total_bytes_ += tensor.bytes;
  return {};
}

Status Checkpoint::override_config(const json::Value& overrides) {
  if (!overrides.is_object()) return invalid_argument("must be a JSON object");
  if (!config_.is_object())
    return invalid_argument("{} has no config.json, whose keys they replace", path_);
  const auto merge = [](const auto& self, const json::Value& from, json::Value& to) -> void {
    for (const auto& [key, value] : from.as_object()) {
      json::Value& old = to.as_object()[key];
      if (value.is_object() && old.is_object())
        self(self, value, old);
      else
        old = value;
    }
  };
  merge(merge, overrides, config_);
  return {};
}

void Checkpoint::replace(const TensorSource& tensor) {
  const auto it = index_.find(tensor.name);
  FRESHET_CHECK(it != index_.end(), "no tensor '{}' to replace", tensor.name);
  tensors_[it->second] = tensor;
}

const TensorSource* Checkpoint::find(std::string_view name) const {
  const auto it = index_.find(std::string(name));
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

std::vector<const MappedFile*> Checkpoint::files() const {
  std::vector<const MappedFile*> files;
  for (const SafetensorsFile& f : safetensors_) files.push_back(f.file());
  for (const GgufFile& f : gguf_) files.push_back(f.file());
  return files;
}

void Checkpoint::prefetch() const {
  for (const MappedFile* f : files()) f->prefetch(0, f->bytes().size());
}

}  // namespace freshet::loader
