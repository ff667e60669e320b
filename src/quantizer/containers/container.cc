#include "quantizer/containers/container.h"

#include "base/nearest.h"
#include "quantizer/containers/rows.h"

namespace freshet::quantizer {

std::span<const Container> containers() {
  // Best first: the first one that can hold a scheme is its default.
  static const Container kAll[] = {
      kCompressedTensorsContainer, kGptqContainer,        kAwqContainer, kFp8Container,
      kModelOptContainer,          kBitsAndBytesContainer};
  return kAll;
}

Result<const Container*> container_by_name(std::string_view name) {
  std::vector<std::string> names;
  for (const Container& c : containers()) {
    if (c.name == name) return &c;
    names.emplace_back(c.name);
  }
  const std::string close = nearest(name, names);
  return invalid_argument("format '{}' is unknown{}; there are {}", name,
                          close.empty() ? "" : fmt::format(": did you mean {}?", close),
                          fmt::join(names, ", "));
}

Result<const Container*> container_for(const Scheme& scheme) {
  for (const Container& c : containers()) {
    if (c.supports(scheme).ok()) return &c;
  }
  return unsupported("no format of a Hugging Face folder can hold scheme {}", scheme.name);
}

std::string describe(const Loader& loader) {
  if (!loader.loads) return fmt::format("{}: does not load: {}", loader.engine, loader.note);
  return loader.note.empty() ? fmt::format("{}: loads", loader.engine)
                             : fmt::format("{}: loads ({})", loader.engine, loader.note);
}

}  // namespace freshet::quantizer
