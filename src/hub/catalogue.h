// Short names for models that run well here: instruct models of 0.1 to 8 billion parameters.
//
// Only the repository, the licence and, where the files recommend no sampling, that of the
// publisher's model card are written down. Sizes, hashes and formats are read from the hub when a
// model is pulled. Constant data; thread-safe.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace freshet::hub {

struct CatalogueEntry {
  std::string_view name;     // "qwen3-0.6b"
  std::string_view repo;     // "Qwen/Qwen3-0.6B-GGUF"
  std::string_view licence;  // of the model
  std::string_view about;    // the model's full name
  // As in generation_config.json: from the example in the publisher's model card.
  std::string_view sampling = "";
};

std::span<const CatalogueEntry> catalogue();

// The entry of a name in any case, also with a colon before the size ("qwen3:4b"); nullptr if there
// is none.
const CatalogueEntry* find_in_catalogue(std::string_view name);
// The name for a repository; "" if the catalogue does not have it.
std::string_view name_of_repo(std::string_view repo);
// CatalogueEntry::sampling of a file or folder in the hub's cache; "" if there is none.
std::string_view sampling_of_cached(std::string_view path);

// The name that a user most likely meant, among the catalogue and `others`; "" if none is close.
std::string closest_name(std::string_view word, std::span<const std::string> others);
// Whether the word begins like a family of models ("llama3", "qwen-7b").
bool names_a_family(std::string_view word);

}  // namespace freshet::hub
