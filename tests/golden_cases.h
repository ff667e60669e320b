// The golden models (tests/data/golden: tiny checkpoints with transformers' own outputs) as test
// cases for any device, and the batch invariance of one model.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "loader/safetensors.h"
#include "tests/golden_harness.h"

namespace freshet::testing {

inline std::string directory() {
  return FRESHET_UNPACKED_DATA "/golden/";
}

inline std::vector<std::string> models(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

struct Case {
  Ids ids;
  std::vector<float> logits;  // [ids, vocab]
  Ids greedy;
};

inline Ids read_ids(const loader::TensorSource& tensor) {
  Ids ids(static_cast<size_t>(tensor.elements()));
  for (size_t i = 0; i < ids.size(); ++i) {
    int64_t id;
    std::memcpy(&id, tensor.data + i * sizeof id, sizeof id);
    ids[i] = static_cast<int32_t>(id);
  }
  return ids;
}

inline std::vector<Case> read_cases(const std::string& name,
                                    const std::string& folder = directory()) {
  auto file = loader::SafetensorsFile::open(folder + name + "/golden.safetensors");
  FRESHET_CHECK(file.ok(), "{}", file.status().message());
  std::vector<Case> cases;
  for (int i = 0; i < 8; ++i) {
    const std::string number = std::to_string(i);
    const loader::TensorSource* ids = file->find("ids_" + number);
    if (ids == nullptr) continue;
    const loader::TensorSource* logits = file->find("logits_" + number);
    if (logits == nullptr) continue;  // no decoder
    Case c{read_ids(*ids), std::vector<float>(static_cast<size_t>(logits->elements())),
           read_ids(*file->find("greedy_" + number))};
    std::memcpy(c.logits.data(), logits->data, logits->bytes);
    cases.push_back(std::move(c));
  }
  return cases;
}

inline void expect_same_bits(const std::vector<float>& got, const std::vector<float>& want,
                             const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  if (got.empty()) return;
  EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0) << what;
}

// The wanted rows of `all`, the logits of every position.
inline std::vector<float> rows_of(const std::vector<float>& all, const Ids& ids,
                                  Runner::Wanted wanted) {
  const auto vocab = static_cast<int64_t>(all.size() / ids.size());
  std::vector<float> rows;
  for (int32_t p = 0; p < std::ssize(ids); ++p) {
    const auto row = all.begin() + p * vocab;
    if (wanted(ids, p)) rows.insert(rows.end(), row, row + vocab);
  }
  return rows;
}

// Alone, together, whole and in chunks; and with logits wanted for some tokens only, as in prefill:
// the last, the last three, and some in the middle.
inline void expect_batch_changes_no_bit(Runner& runner, const std::vector<Case>& cases,
                                        const std::string& what) {
  std::vector<Ids> sequences;
  std::vector<std::vector<float>> alone;
  for (const Case& c : cases) {
    sequences.push_back(c.ids);
    alone.push_back(runner.run({c.ids}, 0, 3)[0]);
  }
  for (const int chunk : {0, 1, 5, 16}) {
    const auto together = runner.run(sequences, chunk, static_cast<uint32_t>(20 + chunk));
    for (size_t s = 0; s < sequences.size(); ++s) {
      expect_same_bits(together[s], alone[s],
                       fmt::format("{}: sequence {} in chunks of {}", what, s, chunk));
    }
  }
  constexpr Runner::Wanted kSome[] = {
      [](const Ids& ids, int32_t p) { return p + 1 == std::ssize(ids); },
      [](const Ids& ids, int32_t p) { return p + 3 >= std::ssize(ids); },
      [](const Ids&, int32_t p) { return p % 4 == 1; },
  };
  for (const Runner::Wanted wanted : kSome) {
    for (const int chunk : {0, 5}) {
      const auto some = runner.run(sequences, chunk, static_cast<uint32_t>(40 + chunk), wanted);
      for (size_t s = 0; s < sequences.size(); ++s) {
        expect_same_bits(some[s], rows_of(alone[s], sequences[s], wanted),
                         fmt::format("{}: sequence {}'s logits {} in chunks of {}", what, s,
                                     &wanted - kSome, chunk));
      }
    }
  }
}

inline std::string test_name(const ::testing::TestParamInfo<std::string>& model) {
  std::string name = model.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace freshet::testing
