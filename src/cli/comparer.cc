#include "cli/comparer.h"

#include <utility>

#include "cli/model_path.h"

namespace freshet::cli {

Result<eval::Comparer> open_comparer(eval::Comparer::Options options, const std::string& base,
                                     const RunOptions& run, ProgressLine& progress) {
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(base));
  options.base = session_options(run, path);
  options.base_name = base;
  options.base.on_progress = [&progress](const std::string& stage, double done) {
    progress.update(stage, done);
  };
  options.open = [&run, &progress](const eval::SessionOptions& s) {
    return open_on_device(run, progress, s, eval::Session::open);
  };
  return eval::Comparer::make(std::move(options));
}

}  // namespace freshet::cli
