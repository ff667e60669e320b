#include "models/weight_cache.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/json.h"

namespace freshet::models {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMagic = 0x3153'5448'4757'5246;  // "FRWGHTS1" in little-endian order
constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = uint64_t{2} << 20;

struct Header {
  uint64_t magic = kMagic;
  uint64_t file_bytes = 0;
  uint64_t index_offset = 0;
  uint64_t index_bytes = 0;  // the key, then the weights
  uint64_t key_bytes = 0;
  uint64_t weights = 0;
  uint64_t index_hash = 0;
  uint64_t header_hash = 0;  // of all fields before
};
static_assert(sizeof(Header) == 64);

uint64_t hash_of(const Header& header) {
  return hash_bytes({reinterpret_cast<const uint8_t*>(&header), offsetof(Header, header_hash)});
}

uint64_t hash_text(std::string_view text, uint64_t seed = 0) {
  return hash_bytes({reinterpret_cast<const uint8_t*>(text.data()), text.size()}, seed);
}

// The index as bytes: numbers of 8, names with their length.
void put(std::string& out, uint64_t number) {
  out.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// Reads the index back; after the end, everything is zero.
class IndexReader {
 public:
  explicit IndexReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  uint64_t number() {
    uint64_t value = 0;
    if (const auto from = take(sizeof value); !from.empty())
      std::memcpy(&value, from.data(), sizeof value);
    return value;
  }
  std::string text(uint64_t size) {
    const auto from = take(size);
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  bool ok() const { return ok_; }

 private:
  std::span<const uint8_t> take(uint64_t size) {
    ok_ = ok_ && size <= bytes_.size();
    if (!ok_) return {};
    const auto piece = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return piece;
  }
  std::span<const uint8_t> bytes_;
  bool ok_ = true;
};

// How many pages of a file's weights are hashed: further training changes all pages.
constexpr uint64_t kSamples = 16;

// A path with its links resolved, as far as it exists.
std::string real_path(const std::string& path) {
  std::error_code error;
  const fs::path real = fs::weakly_canonical(path, error);
  return error ? path : real.string();
}

std::string describe(const MappedFile& file, uint64_t header) {
  const std::span<const uint8_t> bytes = file.bytes();
  uint64_t samples = 0;
  const uint64_t rest = bytes.size() - header;
  for (uint64_t i = 0; i < kSamples && rest > 0; ++i) {
    const uint64_t size = std::min(rest, kPage);
    samples = hash_bytes(bytes.subspan(header + (rest - size) / (kSamples - 1) * i, size), samples);
  }
  return fmt::format("file at {:016x}, {} bytes, changed {}, header {:016x}, samples {:016x}\n",
                     hash_text(real_path(file.path())), bytes.size(), file.changed_ns(),
                     hash_bytes(bytes.first(header)), samples);
}

// The offset of a file's tensors: names, types and shapes are in front of them.
uint64_t header_of(const MappedFile& file, const loader::Checkpoint& checkpoint) {
  uint64_t first = file.bytes().size();
  for (const loader::TensorSource& t : checkpoint.tensors()) {
    if (t.file == &file) first = std::min<uint64_t>(first, t.file_offset);
  }
  return first;
}

// The first line in which two keys differ, named by its first word.
std::string first_difference(std::string_view a, std::string_view b) {
  const size_t size = std::min(a.size(), b.size());
  const size_t at =
      static_cast<size_t>(std::mismatch(a.begin(), a.begin() + size, b.begin()).first - a.begin());
  const std::string_view longer = a.size() > b.size() ? a : b;
  const size_t line = longer.substr(0, at).rfind('\n') + 1;
  const size_t word = longer.find_first_of(" \n", line);
  return std::string(longer.substr(line, word == std::string_view::npos ? word : word - line));
}

Status damaged(const std::string& path, std::string_view what) {
  return invalid_argument("{} is damaged: {}", path, what);
}

}  // namespace

std::string weight_cache_key(const loader::Checkpoint& checkpoint, const ops::Ops& ops) {
  std::string key = fmt::format("program {}\npacking {}\nisa {}\nrows", FRESHET_VERSION,
                                ops::kPackedVersion, ops::name_of(ops.capabilities().isa));
  for (const quant::FormatInfo& f : quant::all_formats())
    key += fmt::format(" {}", ops.matmul_row(f.format));
  key += fmt::format("\nconfig {:016x}\n", hash_text(json::write(checkpoint.config())));
  for (const MappedFile* file : checkpoint.files())
    key += describe(*file, header_of(*file, checkpoint));
  return key;
}

std::string weight_cache_path(const std::string& folder, const loader::Checkpoint& checkpoint,
                              const ops::Ops& ops) {
  const bool folder_model = checkpoint.gguf() == nullptr;
  const fs::path model =
      fs::path(folder_model ? checkpoint.path() + "/" : checkpoint.gguf()->file()->path())
          .lexically_normal();
  std::string name = (folder_model ? model.parent_path().filename() : model.stem()).string();
  if (name.empty() || name == "." || name == "..") name = "model";
  constexpr size_t kLongest = 128;  // of a file's 255 bytes
  return (fs::path(folder) /
          fmt::format("{}-{}-{:016x}.weights", name.substr(0, kLongest),
                      ops.reference() ? "reference" : ops::name_of(ops.capabilities().isa),
                      hash_text(real_path(model.string()))))
      .string();
}

Result<WeightCache> WeightCache::open(const std::string& path, std::string_view key) {
  FRESHET_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::open(path));
  const std::span<const uint8_t> bytes = mapped.bytes();
  Header h;
  if (bytes.size() < sizeof h) return damaged(path, "it has no header");
  std::memcpy(&h, bytes.data(), sizeof h);
  if (h.magic != kMagic) return damaged(path, "it is no file of packed weights");
  if (h.header_hash != hash_of(h)) return damaged(path, "its header's hash differs");
  if (h.file_bytes != bytes.size()) return damaged(path, "it has another size than it states");
  if (h.index_offset > bytes.size() || h.index_bytes != bytes.size() - h.index_offset)
    return damaged(path, "its index is not at its end");
  const std::span<const uint8_t> index = bytes.subspan(h.index_offset);
  if (h.index_hash != hash_bytes(index)) return damaged(path, "its index's hash differs");

  IndexReader reader(index);
  const std::string written_for = reader.text(h.key_bytes);
  if (!reader.ok()) return damaged(path, "its index ends too soon");
  if (written_for != key) {
    return invalid_argument("{} was written for another '{}'", path,
                            first_difference(written_for, key));
  }
  WeightCache cache;
  for (uint64_t i = 0; i < h.weights; ++i) {
    CachedWeight w;
    w.name = reader.text(reader.number());
    w.format = static_cast<quant::Format>(reader.number());
    w.rows = static_cast<int64_t>(reader.number());
    w.cols = static_cast<int64_t>(reader.number());
    w.offset = reader.number();
    w.bytes = reader.number();
    if (!reader.ok()) return damaged(path, "its index ends too soon");
    if (w.offset % kPage != 0 || w.offset < kPage || w.offset > h.index_offset ||
        w.bytes > h.index_offset - w.offset)
      return damaged(path, fmt::format("weight {} lies outside of it", i));
    cache.weights_.push_back(std::move(w));
  }
  mapped.use_huge_pages();
  cache.file_ = std::make_shared<const MappedFile>(std::move(mapped));
  return cache;
}

Result<ops::Weight> WeightCache::next(ops::Ops& ops, const std::string& name, quant::Format format,
                                      int64_t rows, int64_t cols) {
  const CachedWeight* w = at_end() ? nullptr : &weights_[next_];
  if (w == nullptr || w->name != name || w->format != format || w->rows != rows || w->cols != cols)
    return damaged(file_->path(), fmt::format("weight {} is not '{}'", next_, name));
  ++next_;
  return ops.adopt(format, rows, cols,
                   Buffer::part_of(file_->bytes().subspan(w->offset, w->bytes), file_));
}

Result<WeightCacheWriter> WeightCacheWriter::create(const std::string& path) {
  const std::string temporary = path + ".tmp";
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  WeightCacheWriter w;
  w.fd_ = ::open(temporary.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (w.fd_ < 0)
    return io_error("cannot write {}: {}", temporary, std::generic_category().message(errno));
  const auto busy = [&] { return resource_exhausted("another process is writing {}", path); };
  if (::flock(w.fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return busy();
    return io_error("cannot lock {}: {}", temporary, std::generic_category().message(errno));
  }
  // Its writer may have finished between our two calls: then this is the finished file.
  struct stat ours{}, there{};
  if (::fstat(w.fd_, &ours) != 0 || ::stat(temporary.c_str(), &there) != 0 ||
      ours.st_ino != there.st_ino || ours.st_dev != there.st_dev)
    return busy();
  w.path_ = path;
  if (::ftruncate(w.fd_, 0) != 0)
    return io_error("cannot write {}: {}", temporary, std::generic_category().message(errno));
  w.rest_.resize(kPage);  // the header's place
  w.end_ = kPage;
  return w;
}

WeightCacheWriter::WeightCacheWriter(WeightCacheWriter&& other) noexcept
    : path_(std::exchange(other.path_, {})),
      fd_(std::exchange(other.fd_, -1)),
      end_(other.end_),
      rest_(std::move(other.rest_)),
      weights_(std::move(other.weights_)),
      error_(std::move(other.error_)) {}

WeightCacheWriter::~WeightCacheWriter() {
  if (!path_.empty()) ::unlink((path_ + ".tmp").c_str());
  if (fd_ >= 0) ::close(fd_);
}

Status WeightCacheWriter::write(const uint8_t* from, size_t bytes, uint64_t offset) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = ::pwrite(fd_, from + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      return io_error("cannot write {}: {}", path_,
                      std::generic_category().message(n < 0 ? errno : ENOSPC));
    done += static_cast<size_t>(n);
  }
  return {};
}

Status WeightCacheWriter::flush() {
  FRESHET_RETURN_IF_ERROR(write(rest_.data(), rest_.size(), end_ - rest_.size()));
  rest_.clear();
  return {};
}

Status WeightCacheWriter::append(std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const uint64_t whole = rest_.empty() ? bytes.size() / kHugePage * kHugePage : 0;
    if (whole > 0) {
      FRESHET_RETURN_IF_ERROR(write(bytes.data(), whole, end_));
    }
    const size_t taken = whole > 0 ? whole : std::min(bytes.size(), kHugePage - rest_.size());
    if (whole == 0) rest_.insert(rest_.end(), bytes.begin(), bytes.begin() + taken);
    end_ += taken;
    bytes = bytes.subspan(taken);
    if (rest_.size() == kHugePage) FRESHET_RETURN_IF_ERROR(flush());
  }
  return {};
}

Status WeightCacheWriter::add(const std::string& name, const ops::Weight& weight) {
  constexpr uint8_t kZeros[kPage] = {};
  const size_t bytes = weight.packed.size();
  weights_.push_back({name, weight.format, weight.rows, weight.cols, end_, bytes});
  error_ = append({weight.packed.data(), bytes});
  if (error_.ok()) error_ = append({kZeros, (kPage - end_ % kPage) % kPage});
  return error_;
}

Status WeightCacheWriter::commit(std::string_view key) {
  std::string index(key);
  for (const CachedWeight& w : weights_) {
    put(index, w.name.size());
    index += w.name;
    for (const uint64_t number : {static_cast<uint64_t>(w.format), static_cast<uint64_t>(w.rows),
                                  static_cast<uint64_t>(w.cols), w.offset, w.bytes})
      put(index, number);
  }
  Header h;
  h.file_bytes = end_ + index.size();
  h.index_offset = end_;
  h.index_bytes = index.size();
  h.key_bytes = key.size();
  h.weights = weights_.size();
  h.index_hash = hash_text(index);
  h.header_hash = hash_of(h);
  FRESHET_RETURN_IF_ERROR(append({reinterpret_cast<const uint8_t*>(index.data()), index.size()}));
  FRESHET_RETURN_IF_ERROR(flush());
  FRESHET_RETURN_IF_ERROR(write(reinterpret_cast<const uint8_t*>(&h), sizeof h, 0));
  const auto failed = [this] {
    return io_error("cannot write {}: {}", path_, std::generic_category().message(errno));
  };
  if (::fsync(fd_) != 0) return failed();
  if (::rename((path_ + ".tmp").c_str(), path_.c_str()) != 0) return failed();
  const std::string folder = fs::path(path_).parent_path().string();
  path_.clear();
  // The name too. If the folder cannot be synced, a crash loses the name at most.
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd >= 0) {
    ::fsync(fd);
    ::close(fd);
  }
  return {};
}

}  // namespace freshet::models
