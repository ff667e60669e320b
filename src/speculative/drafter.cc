#include "speculative/drafter.h"

#include <algorithm>

namespace freshet::speculative {

int32_t DraftRequest::depth() const {
  size_t longest = draft.size();
  for (const std::vector<int32_t>& branch : branches) longest = std::max(longest, branch.size());
  return static_cast<int32_t>(longest);
}

int32_t DraftRequest::rows() const {
  size_t rows = draft.size();
  for (const std::vector<int32_t>& branch : branches) rows += 1 + branch.size();
  return static_cast<int32_t>(rows);
}

void DraftRequest::shorten(int32_t most_of_a_path) {
  const auto most = static_cast<size_t>(std::max(0, most_of_a_path));
  if (draft.size() > most) draft.resize(most);
  if (most == 0) branches.clear();
  for (std::vector<int32_t>& branch : branches) {
    if (branch.size() > most) branch.resize(most);
  }
}

}  // namespace freshet::speculative
