#include "hub/catalogue.h"

#include <algorithm>
#include <array>
#include <vector>

#include "hub/names.h"

namespace freshet::hub {
namespace {

constexpr CatalogueEntry kEntries[] = {
    {"smollm2", "bartowski/SmolLM2-135M-Instruct-GGUF", "Apache-2.0", "SmolLM2 135M Instruct",
     R"({"temperature": 0.2, "top_p": 0.9})"},
    {"smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF", "Apache-2.0",
     "SmolLM2 360M Instruct"},
    {"smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "Apache-2.0",
     "SmolLM2 1.7B Instruct", R"({"temperature": 0.2, "top_p": 0.9})"},
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct-GGUF", "Apache-2.0", "Qwen2.5 0.5B Instruct"},
    {"qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct-GGUF", "Apache-2.0", "Qwen2.5 1.5B Instruct"},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B-GGUF", "Apache-2.0", "Qwen3 0.6B"},
    {"qwen3-1.7b", "Qwen/Qwen3-1.7B-GGUF", "Apache-2.0", "Qwen3 1.7B"},
    {"qwen3-4b", "Qwen/Qwen3-4B-GGUF", "Apache-2.0", "Qwen3 4B"},
    {"qwen3-8b", "Qwen/Qwen3-8B-GGUF", "Apache-2.0", "Qwen3 8B"},
    {"llama3.2-1b", "bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama 3.2 Community License",
     "Llama 3.2 1B Instruct"},
    {"llama3.2-3b", "bartowski/Llama-3.2-3B-Instruct-GGUF", "Llama 3.2 Community License",
     "Llama 3.2 3B Instruct"},
    {"llama3.1-8b", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Llama 3.1 Community License",
     "Llama 3.1 8B Instruct"},
    {"gemma2-2b", "bartowski/gemma-2-2b-it-GGUF", "Gemma Terms of Use", "Gemma 2 2B it"},
    {"gemma3-1b", "ggml-org/gemma-3-1b-it-GGUF", "Gemma Terms of Use", "Gemma 3 1B it"},
    {"gemma3-4b", "ggml-org/gemma-3-4b-it-GGUF", "Gemma Terms of Use", "Gemma 3 4B it (text)"},
    {"granite3.3-2b", "ibm-granite/granite-3.3-2b-instruct-GGUF", "Apache-2.0",
     "Granite 3.3 2B Instruct"},
    {"mistral-7b", "bartowski/Mistral-7B-Instruct-v0.3-GGUF", "Apache-2.0",
     "Mistral 7B Instruct v0.3"},
};

// First syllables of published models; a digit, a hyphen, a dot or the end follows.
constexpr std::array kFamilies = {
    "llama",     "smollm",    "qwen",     "gemma", "mistral",   "mixtral", "ministral", "phi",
    "granite",   "deepseek",  "gpt-oss",  "gpt2",  "olmo",      "falcon",  "tinyllama", "codellama",
    "codestral", "starcoder", "stablelm", "glm",   "command-r", "vicuna",  "minilm",    "yi",
};

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
  return out;
}

// Letters and digits only: "Llama-3.2" and "llama3.2" are the same to a person.
std::string letters_of(std::string_view text) {
  std::string out;
  for (const char c : lower(text)) {
    if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')) out += c;
  }
  return out;
}

// The number of insertions, deletions and replacements between two words.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace

std::span<const CatalogueEntry> catalogue() {
  return kEntries;
}

const CatalogueEntry* find_in_catalogue(std::string_view name) {
  std::string wanted = lower(name);
  std::replace(wanted.begin(), wanted.end(), ':', '-');
  for (const CatalogueEntry& e : kEntries) {
    if (e.name == wanted) return &e;
  }
  return nullptr;
}

std::string_view name_of_repo(std::string_view repo) {
  for (const CatalogueEntry& e : kEntries) {
    if (e.repo == repo) return e.name;
  }
  return {};
}

std::string_view sampling_of_cached(std::string_view path) {
  for (size_t at = 0; at < path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    const std::string repo = repo_of_folder(path.substr(at, end - at));
    if (const auto* entry = find_in_catalogue(name_of_repo(repo))) return entry->sampling;
    at = end + 1;
  }
  return {};
}

std::string closest_name(std::string_view word, std::span<const std::string> others) {
  constexpr size_t kLongestWord = 100;
  if (word.size() > kLongestWord) return {};
  const std::string letters = letters_of(word.substr(word.rfind('/') + 1));
  std::vector<std::string> names(others.begin(), others.end());
  for (const CatalogueEntry& e : kEntries) names.emplace_back(e.name);
  std::string best;
  size_t best_distance = letters.size() / 3 + 1;
  for (const std::string& name : names) {
    const std::string plain = letters_of(name);
    size_t distance = edit_distance(letters, plain);
    // "llama3" and "llama-3.2-1b-instruct" go with "llama3.2-1b".
    if (letters.size() >= 4 && plain.starts_with(letters)) distance = std::min<size_t>(distance, 1);
    if (plain.size() >= 4 && letters.starts_with(plain)) distance = std::min<size_t>(distance, 1);
    if (distance < best_distance) {
      best = name;
      best_distance = distance;
    }
  }
  return best;
}

bool names_a_family(std::string_view word) {
  const std::string text = lower(word);
  for (const std::string_view family : kFamilies) {
    if (!text.starts_with(family)) continue;
    if (text.size() == family.size()) return true;
    const char next = text[family.size()];
    if ((next >= '0' && next <= '9') || next == '-' || next == '.' || next == '_' || next == ':')
      return true;
  }
  return false;
}

}  // namespace freshet::hub
