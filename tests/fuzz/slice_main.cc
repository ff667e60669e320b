// usage: fuzz_NAME_slice CORPUS RUNS
// Runs a fuzz target without a fuzzer: on each file of a folder, and then on RUNS changed copies of
// them. The changes come from a fixed seed, so that each run is the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

void change(Bytes& bytes, const Bytes& other, std::mt19937& random) {
  const auto below = [&random](size_t n) { return n == 0 ? 0 : random() % n; };
  for (size_t changes = 1 + below(4); changes > 0; --changes) {
    const size_t at = below(bytes.size() + 1);
    const auto place = bytes.begin() + static_cast<ptrdiff_t>(at);
    switch (below(6)) {
      case 0:
        bytes.resize(at);
        break;
      case 1:
        bytes.insert(place, 1 + below(8), static_cast<uint8_t>(random()));
        break;
      case 2:
        bytes.erase(place, place + static_cast<ptrdiff_t>(below(bytes.size() - at + 1)));
        break;
      case 3: {
        const size_t from = below(other.size());
        const size_t count = std::min(other.size() - from, below(32));
        bytes.insert(place, other.begin() + static_cast<ptrdiff_t>(from),
                     other.begin() + static_cast<ptrdiff_t>(from + count));
        break;
      }
      case 4:
        if (at < bytes.size()) bytes[at] = below(2) == 0 ? 0xff : 0;
        break;
      default:
        if (at < bytes.size()) bytes[at] ^= static_cast<uint8_t>(1 << below(8));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1]))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> seeds;
  for (const auto& path : paths) {
    std::ifstream in(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    LLVMFuzzerTestOneInput(seeds.back().data(), seeds.back().size());
  }
  if (seeds.empty()) return 2;
  std::mt19937 random(30);
  for (int runs = std::atoi(argv[2]); runs > 0; --runs) {
    Bytes bytes = seeds[random() % seeds.size()];
    change(bytes, seeds[random() % seeds.size()], random);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%zu files and %s changed ones\n", seeds.size(), argv[2]);
  return 0;
}
