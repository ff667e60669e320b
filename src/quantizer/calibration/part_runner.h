// Runs the parts of a model over windows of calibration text, one part in memory at a time.
//
// The stream behind a part replaces that in front of it. Windows are independent sequences; several
// form a step, always the same ones, so that results depend on the windows alone. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/parts.h"
#include "models/registry.h"
#include "quantizer/calibration/input_collector.h"
#include "quantizer/calibration/stream_store.h"
#include "runtime/compute.h"

namespace freshet::quantizer {

using Windows = std::vector<std::vector<int32_t>>;  // token ids

class PartRunner {
 public:
  struct Options {
    size_t memory = size_t{1} << 30;  // of activations; beyond that they are on disk
    std::string folder;               // for those
    std::function<bool()> stop;       // asked between steps; may be empty
    ops::Device* device = nullptr;    // as InputCollector takes it; must outlive what is collected
  };
  // References must outlive the runner. `checkpoint` may change between calls
  // (Checkpoint::replace).
  static Result<std::unique_ptr<PartRunner>> create(std::shared_ptr<runtime::Compute> compute,
                                                    const loader::Checkpoint& checkpoint,
                                                    const models::Description& model,
                                                    const Windows& windows, const Options& options);

  int64_t tokens() const { return tokens_; }  // of all windows
  // After the last advance(): the stream of a window, [its tokens, hidden].
  Status read(int64_t window, float* rows) const { return streams_.read(window, rows); }
  // Takes the streams of another runner with the same windows.
  Status copy_streams(const PartRunner& from);
  bool on_disk() const { return streams_.on_disk(); }

  // A projection's statistics by the name of its tensor. `occurrence` counts the projections with
  // one name: the experts of a stacked tensor, in order.
  struct Collected {
    std::unique_ptr<InputCollector> collector;
    std::vector<Model::WeightInfo> weights;  // by Weight::id
    // nullptr: no token came by.
    InputStats* find(const std::string& tensor, int64_t occurrence = 0) const;
    // The same for a matrix as the checkpoint stores it; nullptr also where no projection reads it
    // as it is.
    InputStats* of(const models::LinearTensor& t, const models::WeightReader& reader) const;
  };
  // Runs the part. moves_on: the streams are replaced, as by advance().
  Result<Collected> collect(const models::Part& part, const InputCollector::Wants& wants,
                            bool moves_on = false);
  // Statistics of matrices that layers share (Part::shared), over all their uses: runs the parts in
  // front of the last use, and that, and replaces the streams.
  Result<Collected> collect_uses(const models::Part& shared, InputCollector::Wants wants,
                                 const models::WeightReader& reader);
  // Runs the part and replaces the streams.
  Status advance(const models::Part& part);

 private:
  PartRunner(std::shared_ptr<runtime::Compute> compute, const loader::Checkpoint& checkpoint,
             const models::Description& model, const Windows& windows, const Options& options,
             StreamStore streams);
  // Runs a part that is loaded, with hooks.
  Status observe(Model& part, bool reads_ids, InputCollector& collector, bool moves_on);
  std::unique_ptr<InputCollector> new_collector(const InputCollector::Wants& wants);
  Status run(Model& part, bool reads_ids, InputCollector* collector, bool moves_on);
  struct Step {
    int64_t first = 0, last = 0;  // windows
    int64_t blocks = 0;           // of cache, for all of them
  };
  void plan_steps();
  Status step(Model& part, const KvStorage& cache, const Step& step, bool reads_ids, bool moves_on);
  Result<std::unique_ptr<Model>> load(const models::Part& part);

  std::shared_ptr<runtime::Compute> compute_;
  const loader::Checkpoint& checkpoint_;
  const models::Description& model_;
  const Windows& windows_;
  Options options_;
  StreamStore streams_;
  int64_t tokens_ = 0;
  int64_t longest_ = 0;
  int64_t step_tokens_ = 0;
  std::vector<Step> steps_;
  std::vector<float> in_, out_;  // [step_tokens, hidden]
};

}  // namespace freshet::quantizer
