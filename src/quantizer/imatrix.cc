#include "quantizer/imatrix.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/mapped_file.h"
#include "loader/gguf.h"

namespace freshet::quantizer {
namespace {

static_assert(std::endian::native == std::endian::little);

bool usable(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}
bool usable_squares(std::span<const float> values) {
  return usable(values) &&
         std::all_of(values.begin(), values.end(), [](float v) { return v >= 0.0f; });
}

Status check_entry(const std::string& file, const std::string& name, const Imatrix::Entry& e) {
  if (e.sum2.empty() || e.counts.empty() || e.sum2.size() % e.counts.size() != 0)
    return invalid_argument("{}: '{}' has {} sums for {} counts", file, name, e.sum2.size(),
                            e.counts.size());
  if (!e.sum.empty() && e.sum.size() != e.sum2.size())
    return invalid_argument("{}: '{}' has {} sums, but {} sums of squares", file, name,
                            e.sum.size(), e.sum2.size());
  if (!usable_squares(e.sum2) || !usable_squares(e.counts) || !usable(e.sum))
    return invalid_argument("{}: '{}' holds a negative sum of squares, a NaN or an infinity", file,
                            name);
  return {};
}

// Reads the old form from front to back.
class DatReader {
 public:
  DatReader(std::span<const uint8_t> bytes, const std::string& file) : rest_(bytes), file_(file) {}

  Result<Imatrix> read() {
    FRESHET_ASSIGN_OR_RETURN(const int32_t entries, number("the number of entries"));
    // Each entry takes more than 12 bytes.
    if (entries < 1 || static_cast<size_t>(entries) > rest_.size() / 12)
      return invalid_argument("{}: not an importance matrix (neither GGUF nor .dat)", file_);
    Imatrix out;
    for (int32_t i = 0; i < entries; ++i) FRESHET_RETURN_IF_ERROR(entry(out));
    if (rest_.empty()) return out;  // as the first versions wrote it
    FRESHET_ASSIGN_OR_RETURN(const int32_t chunks, number("the number of chunks"));
    out.chunk_count = static_cast<uint32_t>(std::max(0, chunks));
    if (rest_.empty()) return out;
    FRESHET_ASSIGN_OR_RETURN(std::string dataset, text("the data set"));
    if (!dataset.empty()) out.datasets.push_back(std::move(dataset));
    return out;
  }

 private:
  Status entry(Imatrix& out) {
    FRESHET_ASSIGN_OR_RETURN(const std::string name, text("a name"));
    FRESHET_ASSIGN_OR_RETURN(const int32_t calls, number("calls"));
    FRESHET_ASSIGN_OR_RETURN(const int32_t count, number("a number of values"));
    if (count < 1 || calls < 0)
      return invalid_argument("{}: '{}' has {} values of {} calls", file_, name, count, calls);
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    if (bytes > rest_.size()) return cut_off(fmt::format("the values of '{}'", name));
    Imatrix::Entry e;
    e.sum2.resize(static_cast<size_t>(count));
    std::memcpy(e.sum2.data(), rest_.data(), bytes);
    rest_ = rest_.subspan(bytes);
    // Values of no calls are taken as means.
    const auto chunk = static_cast<float>(out.chunk_size);
    for (float& v : e.sum2) v *= chunk;
    e.counts = {static_cast<float>(std::max(1, calls)) * chunk};
    FRESHET_RETURN_IF_ERROR(check_entry(file_, name, e));
    if (!out.entries.emplace(name, std::move(e)).second)
      return invalid_argument("{}: '{}' occurs twice", file_, name);
    return {};
  }

  Result<int32_t> number(const char* what) {
    if (rest_.size() < sizeof(int32_t)) return cut_off(what);
    int32_t v;
    std::memcpy(&v, rest_.data(), sizeof v);
    rest_ = rest_.subspan(sizeof v);
    return v;
  }

  Result<std::string> text(const char* what) {
    FRESHET_ASSIGN_OR_RETURN(const int32_t length, number(what));
    if (length < 0 || static_cast<size_t>(length) > rest_.size()) return cut_off(what);
    std::string v(reinterpret_cast<const char*>(rest_.data()), static_cast<size_t>(length));
    rest_ = rest_.subspan(static_cast<size_t>(length));
    return v;
  }

  Status cut_off(std::string_view what) const {
    return invalid_argument("{}: the importance matrix ends within {}", file_, what);
  }

  std::span<const uint8_t> rest_;
  const std::string& file_;
};

Result<std::vector<float>> f32_values(const loader::TensorSource& t, const std::string& file) {
  if (t.format != quant::Format::kF32)
    return invalid_argument("{}: tensor '{}' is {}, not F32", file, t.name, t.dtype);
  std::vector<float> out(static_cast<size_t>(t.elements()));
  std::memcpy(out.data(), t.data, out.size() * sizeof(float));
  return out;
}

Result<Imatrix> read_gguf(const loader::GgufFile& f, const std::string& file) {
  if (const auto type = f.get_string("general.type"); type && *type != "imatrix")
    return invalid_argument("{}: a GGUF file of type '{}', not an importance matrix", file, *type);
  Imatrix out;
  if (const auto* sets = f.get_strings("imatrix.datasets"))
    out.datasets.assign(sets->begin(), sets->end());
  out.chunk_count = f.get_u32("imatrix.chunk_count").value_or(0);
  out.chunk_size = std::max(1u, f.get_u32("imatrix.chunk_size").value_or(512));
  for (const loader::TensorSource& t : f.tensors()) {
    static constexpr std::pair<std::string_view, std::vector<float> Imatrix::Entry::*> kParts[] = {
        {".in_sum2", &Imatrix::Entry::sum2},
        {".in_sum", &Imatrix::Entry::sum},
        {".counts", &Imatrix::Entry::counts}};
    for (const auto& [suffix, member] : kParts) {
      if (!t.name.ends_with(suffix)) continue;
      const std::string name = t.name.substr(0, t.name.size() - suffix.size());
      FRESHET_ASSIGN_OR_RETURN(out.entries[name].*member, f32_values(t, file));
    }
  }
  if (out.entries.empty())
    return invalid_argument("{}: a GGUF file without an importance matrix", file);
  for (const auto& [name, e] : out.entries) FRESHET_RETURN_IF_ERROR(check_entry(file, name, e));
  return out;
}

void add_to(std::vector<float>& to, std::span<const float> from) {
  for (size_t i = 0; i < to.size(); ++i)
    to[i] = static_cast<float>(static_cast<double>(to[i]) + static_cast<double>(from[i]));
}

Status merge_entry(const std::string& name, Imatrix::Entry& to, const Imatrix::Entry& from) {
  if (to.sum2.size() != from.sum2.size())
    return invalid_argument(
        "cannot merge importance matrices: '{}' has {} inputs in one and {} in "
        "the other",
        name, to.sum2.size(), from.sum2.size());
  std::vector<float> counts = from.counts;
  if (to.counts.size() != counts.size()) {
    // One count for all experts, as from a .dat.
    if (to.counts.size() == 1) to.counts.assign(counts.size(), to.counts[0]);
    if (counts.size() == 1) counts.assign(to.counts.size(), counts[0]);
    if (to.counts.size() != counts.size())
      return invalid_argument(
          "cannot merge importance matrices: '{}' has {} experts in one and {} "
          "in the other",
          name, to.counts.size(), counts.size());
  }
  add_to(to.sum2, from.sum2);
  add_to(to.counts, counts);
  if (to.sum.size() == from.sum.size())
    add_to(to.sum, from.sum);
  else
    to.sum.clear();
  return check_entry("merged", name, to);
}

std::vector<float> means_of(const Imatrix::Entry& e) {
  const size_t cols = e.sum2.size() / e.counts.size();
  std::vector<double> all(cols);
  double tokens = 0;
  for (size_t i = 0; i < e.sum2.size(); ++i) {
    if (e.counts[i / cols] > 0) all[i % cols] += static_cast<double>(e.sum2[i]);
  }
  for (const float n : e.counts) tokens += static_cast<double>(n);
  if (tokens <= 0) return {};
  std::vector<float> means(e.sum2.size());
  for (size_t i = 0; i < means.size(); ++i) {
    const float n = e.counts[i / cols];
    means[i] = n > 0 ? e.sum2[i] / n : static_cast<float>(all[i % cols] / tokens);
  }
  return means;
}

}  // namespace

Result<Imatrix> Imatrix::parse(std::span<const uint8_t> bytes, const std::string& name) {
  if (bytes.size() >= 4 && std::memcmp(bytes.data(), "GGUF", 4) == 0) {
    FRESHET_ASSIGN_OR_RETURN(const loader::GgufFile f, loader::GgufFile::parse(bytes, name));
    return read_gguf(f, name);
  }
  return DatReader(bytes, name).read();
}

Result<Imatrix> Imatrix::load(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  return parse(file.bytes(), path);
}

Status Imatrix::merge(const Imatrix& other) {
  const uint64_t tokens = uint64_t{chunk_count} * chunk_size;
  const uint64_t more = uint64_t{other.chunk_count} * other.chunk_size;
  for (const auto& [name, from] : other.entries) {
    const auto [to, is_new] = entries.try_emplace(name, from);
    if (!is_new) FRESHET_RETURN_IF_ERROR(merge_entry(name, to->second, from));
  }
  for (const std::string& set : other.datasets) {
    if (std::find(datasets.begin(), datasets.end(), set) == datasets.end()) datasets.push_back(set);
  }
  chunk_count = static_cast<uint32_t>((tokens + more + chunk_size - 1) / chunk_size);
  return {};
}

Result<std::vector<std::string>> Imatrix::missing(std::span<const Tensor> tensors) const {
  std::vector<std::string> out;
  size_t found = 0;
  for (const Tensor& t : tensors) {
    const auto e = entries.find(t.name);
    if (e == entries.end()) {
      out.push_back(t.name);
      continue;
    }
    ++found;
    const auto counts = std::ssize(e->second.counts), sums = std::ssize(e->second.sum2);
    if (sums != t.experts * t.cols || (counts != 1 && counts != t.experts))
      return invalid_argument(
          "the importance matrix has {} sums and {} counts for '{}', which has {} inputs{}: it was "
          "made for another model",
          sums, counts, t.name, t.cols,
          t.experts > 1 ? fmt::format(" and {} experts", t.experts) : std::string());
    const std::vector<float>& n = e->second.counts;
    if (std::all_of(n.begin(), n.end(), [](float c) { return c == 0.0f; })) out.push_back(t.name);
  }
  if (found == 0 && !tensors.empty())
    return invalid_argument(
        "the importance matrix has no entry for this model (its first is '{}', "
        "the model's '{}')",
        entries.empty() ? "" : entries.begin()->first, tensors.front().name);
  return out;
}

Importance::Importance(const Imatrix& imatrix) {
  for (const auto& [name, e] : imatrix.entries) {
    std::vector<float> means = means_of(e);
    if (!means.empty()) means_.emplace(name, std::move(means));
  }
}

std::span<const float> Importance::of(std::string_view name, int64_t expert, int64_t cols) const {
  const auto e = means_.find(name);
  if (e == means_.end()) return {};
  const std::span<const float> all(e->second);
  if (expert < 0 || cols <= 0 || (expert + 1) * cols > std::ssize(all)) return {};
  return all.subspan(static_cast<size_t>(expert * cols), static_cast<size_t>(cols));
}

}  // namespace freshet::quantizer
