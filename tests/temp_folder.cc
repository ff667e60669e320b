// Linked into every test: each process has a temporary folder of its own, since tests of one
// program run at the same time, each in a process. testing::TempDir() and temp_directory_path()
// give it. It is removed at exit.
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include <unistd.h>

namespace freshet {
namespace {

class TempFolder {
 public:
  TempFolder() : owner_(::getpid()) {
    std::error_code error;
    path_ = (std::filesystem::temp_directory_path(error) / "freshet-test-XXXXXX").string();
    if (::mkdtemp(path_.data()) == nullptr) {
      path_.clear();
      return;
    }
    ::setenv("TEST_TMPDIR", path_.c_str(), 1);
    ::setenv("TMPDIR", path_.c_str(), 1);
  }
  ~TempFolder() {
    std::error_code ignored;
    if (!path_.empty() && ::getpid() == owner_) std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

 private:
  const pid_t owner_;  // its children must leave the folder alone
  std::string path_;
};

const TempFolder kFolder;

}  // namespace
}  // namespace freshet
