#include "hub/download.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <optional>

#include <sys/stat.h>
#include <unistd.h>

#include "hub/blob_writer.h"
#include "hub/names.h"

namespace freshet::hub {
namespace {

constexpr std::chrono::milliseconds kShowEvery{200};
constexpr std::chrono::seconds kRateWindow{1};

// "bytes 100-199/300": 100 and 300 (-1 for "*").
struct ContentRange {
  int64_t begin = -1;
  int64_t total = -1;
};

ContentRange parse_content_range(std::string_view text) {
  ContentRange range;
  constexpr std::string_view kUnit = "bytes ";
  const size_t slash = text.find('/');
  if (!text.starts_with(kUnit) || slash == text.npos) return range;
  const char* const end = text.data() + text.size();
  if (std::from_chars(text.data() + kUnit.size(), end, range.begin).ec != std::errc())
    range.begin = -1;
  if (std::from_chars(text.data() + slash + 1, end, range.total).ec != std::errc())
    range.total = -1;
  return range;
}

int64_t content_length(const Answer& a) {
  const std::string_view text = a.head.header("content-length");
  int64_t size = -1;
  if (std::from_chars(text.data(), text.data() + text.size(), size).ec != std::errc()) return -1;
  return size;
}

class Downloader {
 public:
  Downloader(HubClient& client, const DownloadJob& job, Meter& meter, const Observer& observer,
             BlobWriter& writer)
      : client_(client), job_(job), meter_(meter), observer_(observer), writer_(writer) {}

  Status run();

 private:
  // One request. Ok: the file is complete. `again_` tells whether another try makes sense.
  Status try_once();
  Status judge(const Result<Answer>& answer);
  bool accept(const Answer& a, int64_t offset);
  bool take(std::string_view bytes);
  Status empty_file();

  HubClient& client_;
  const DownloadJob& job_;
  Meter& meter_;
  const Observer& observer_;
  BlobWriter& writer_;
  Status problem_;    // found while the answer arrives
  int64_t skip_ = 0;  // bytes of the answer that the file has already
  bool received_ = false;
  bool again_ = false;
  double wait_ = 0.0;
  int failures_ = 0;
};

// Looks at the headers of a success; problem_ has what is wrong with them.
bool Downloader::accept(const Answer& a, int64_t offset) {
  if (a.status != 200 && a.status != 206) return false;
  int64_t total = content_length(a);
  skip_ = offset;
  if (a.status == 206) {
    const ContentRange range = parse_content_range(a.head.header("content-range"));
    total = range.total;
    skip_ = offset - range.begin;
    if (range.begin < 0 || skip_ < 0)
      problem_ = io_error("{}: the server sent another part than the one asked for", job_.what);
  }
  if (job_.size >= 0 && total >= 0 && total != job_.size) {
    problem_ = io_error("{}: the server's file has {} bytes, but the hub lists {}", job_.what,
                        total, job_.size);
  }
  const bool comparable = is_commit(a.etag) || a.etag.size() == 64;
  if (comparable && a.etag.size() == job_.blob.size() && a.etag != job_.blob) {
    problem_ = io_error("{}: the server has another version of the file (hash {}, expected {})",
                        job_.what, a.etag, job_.blob);
  }
  return true;
}

bool Downloader::take(std::string_view bytes) {
  if (!problem_.ok()) return false;
  const auto dropped =
      static_cast<size_t>(std::min<int64_t>(skip_, static_cast<int64_t>(bytes.size())));
  skip_ -= static_cast<int64_t>(dropped);
  bytes.remove_prefix(dropped);
  if (bytes.empty()) return true;
  const auto count = static_cast<int64_t>(bytes.size());
  if (job_.size >= 0 && writer_.size() + count > job_.size) {
    problem_ = io_error("{}: the server sent more than the {} bytes that the hub lists", job_.what,
                        job_.size);
    return false;
  }
  received_ = true;
  meter_.received(count);
  return writer_.write(bytes);
}

Status Downloader::empty_file() {
  meter_.have(-writer_.size());
  return writer_.restart();
}

Status Downloader::judge(const Result<Answer>& answer) {
  FRESHET_RETURN_IF_ERROR(writer_.status());
  again_ = true;
  if (!problem_.ok()) return problem_;
  if (!answer.ok()) {
    again_ = answer.status().code() == StatusCode::kIo;
    return answer.status();
  }
  wait_ = retry_after(failures_ + 1, &*answer);
  if (answer->status == 200 || answer->status == 206) {
    if (job_.size < 0 || writer_.size() == job_.size) return {};
    return io_error("{}: the server ended the file after {} of {} bytes", job_.what, writer_.size(),
                    job_.size);
  }
  if (answer->status == 416) {  // the file has shrunk, or we have more than there is
    FRESHET_RETURN_IF_ERROR(empty_file());
    return io_error("{}: the server has no bytes at this position", job_.what);
  }
  again_ = may_succeed_later(*answer);
  return failure_of(*answer, job_.what, client_.settings());
}

Status Downloader::try_once() {
  const int64_t offset = writer_.size();
  problem_ = {};
  skip_ = 0;
  received_ = false;
  again_ = false;
  wait_ = retry_after(failures_ + 1, nullptr);
  HubClient::Fetch f{.url = job_.url, .offset = offset, .on_answer = {}, .sink = {}};
  f.on_answer = [&](const Answer& a) { return accept(a, offset); };
  f.sink = [&](std::string_view bytes) { return take(bytes); };
  return judge(client_.fetch(f));
}

Status Downloader::run() {
  const int most = client_.settings().retries;
  if (job_.size >= 0 && writer_.size() > job_.size) FRESHET_RETURN_IF_ERROR(empty_file());
  while (job_.size < 0 || writer_.size() < job_.size) {
    const Status status = try_once();
    if (status.ok()) return {};
    if (!again_) return status;
    if (received_) failures_ = 0;
    if (++failures_ > most)
      return io_error("{}; gave up after {} tries. The same command resumes the download",
                      status.message(), failures_);
    observer_.note(fmt::format("{}: trying again in {:.1f} s", status.message(), wait_));
    sleep_for(wait_);
  }
  return {};
}

// Compares the complete file with the hash that the hub promises.
Status check_hash(const DownloadJob& job, BlobWriter& writer) {
  FRESHET_ASSIGN_OR_RETURN(std::string found, writer.finish());
  if (job.blob.size() == 40) {
    FRESHET_ASSIGN_OR_RETURN(found, git_hash_of_file(job.partial));
  } else if (job.blob.size() != 64) {
    return {};
  }
  if (found == job.blob) return {};
  return invalid_argument("{}: the file is damaged or another one: its hash is {}, expected {}",
                          job.what, found, job.blob);
}

}  // namespace

void Meter::received(int64_t bytes) {
  const auto now = Clock::now();
  if (window_ == Clock::time_point()) window_ = now;  // the first bytes start the clock
  state_.done += bytes;
  window_bytes_ += bytes;
  if (now - shown_ < kShowEvery) return;
  shown_ = now;
  if (now - window_ >= kRateWindow) {
    const double seconds = std::chrono::duration<double>(now - window_).count();
    state_.bytes_per_second = static_cast<double>(window_bytes_) / seconds;
    window_ = now;
    window_bytes_ = 0;
  }
  state_.seconds_left = -1.0;
  if (state_.bytes_per_second > 0.0 && state_.total >= state_.done)
    state_.seconds_left = static_cast<double>(state_.total - state_.done) / state_.bytes_per_second;
  observer_.progress(state_);
}

Status download(HubClient& client, const DownloadJob& job, Meter& meter, const Observer& observer) {
  // A second round only if the first began with bytes that an earlier command left.
  for (bool resumed = true; resumed;) {
    {
      FRESHET_ASSIGN_OR_RETURN(const auto writer, BlobWriter::open(job.partial));
      resumed = writer->size() > 0;
      meter.have(writer->size());
      FRESHET_RETURN_IF_ERROR(Downloader(client, job, meter, observer, *writer).run());
      const Status hash = check_hash(job, *writer);
      if (hash.ok()) break;
      if (hash.code() == StatusCode::kIo) return hash;
      meter.have(-writer->size());
      ::unlink(job.partial.c_str());
      if (!resumed) return hash;
    }
    observer.note(
        fmt::format("{}: what an earlier download left is damaged: starting again", job.what));
  }
  if (std::rename(job.partial.c_str(), job.final.c_str()) != 0)
    return io_error("cannot rename {} to {}", job.partial, job.final);
  return {};
}

}  // namespace freshet::hub
