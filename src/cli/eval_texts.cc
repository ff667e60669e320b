#include "cli/eval_texts.h"

#include "base/mapped_file.h"
#include "base/utf8.h"

namespace freshet::cli {
namespace {

int64_t count_characters(std::string_view text) {
  int64_t count = 0;
  for (size_t at = 0; at < text.size(); ++count) at += decode_utf8(text.substr(at, 4)).size;
  return count;
}

}  // namespace

std::string_view first_characters(std::string_view text, int64_t count) {
  size_t at = 0;
  for (int64_t i = 0; i < count && at < text.size(); ++i)
    at += decode_utf8(text.substr(at, 4)).size;
  return text.substr(0, at);
}

Result<std::vector<std::string>> read_texts(const std::vector<std::string>& files,
                                            int64_t max_chars) {
  std::vector<std::string> texts;
  int64_t left = max_chars;
  for (const std::string& name : files) {
    if (max_chars > 0 && left == 0) break;
    FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(name));
    std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
    if (max_chars > 0) {
      text = first_characters(text, left);
      left -= count_characters(text);
    }
    texts.emplace_back(text);
  }
  return texts;
}

}  // namespace freshet::cli
