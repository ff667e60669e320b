// Finds the file or folder of the model that the user named, and downloads it if it has to.
//
// Thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "hub/download.h"
#include "hub/names.h"

namespace freshet::cli {

// `name` is a path, the name of a model in the cache folder or in the catalogue, a model of the hub
// (hf:ORG/REPO[:QUANT]) or a URL; "" (or "default") is the embedded model. Models of the hub are
// downloaded if they are not on this machine yet; if they are, no network is used. The error says
// where it looked and which name may have been meant.
Result<std::string> resolve_model(const std::string& name);

// Whether `text` means a model rather than a prompt: it names a model that exists or can be
// downloaded, or it looks like a path or like the name of a model.
bool looks_like_model(const std::string& text);

// The model of the hub that a name means: hf:..., a URL of the hub, or a catalogue name with or
// without ":QUANT". nullopt: the name means something else. An error: malformed.
Result<std::optional<hub::ModelRef>> hub_model(const std::string& name);

// Adds where else the model can be had, if the hub cannot be reached.
Status with_other_source(const Status& status, const std::string& name);

bool is_url(std::string_view text);

// The folder of models that do not come from the hub: "models" in the cache folder.
Result<std::string> model_folder();
// The names of the models there, and of those that can be put there.
std::vector<std::string> local_names();
// The file or folder of such a model; "" if it is not there.
std::string local_model(const std::string& name);

// Shows a download on standard error: a progress line on a terminal, and notes.
class DownloadView {
 public:
  DownloadView();
  ~DownloadView();
  const hub::Observer& observer() const { return observer_; }
  void clear() const;  // erases the progress line

 private:
  struct Line;
  std::unique_ptr<Line> line_;
  hub::Observer observer_;
};

}  // namespace freshet::cli
