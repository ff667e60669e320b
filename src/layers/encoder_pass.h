// The encoder of an encoder-decoder: runs it on whole inputs, outside the decoder's batch.
//
// Inputs are texts, or log-mel features for encoders with a stem. As many as fit run together; an
// output depends on its own input alone. Keys and values of the encoder's layers are in a separate
// cache, in F32 (F16 on a device), for one pass. Allocates in reserve() only, except for lists that
// grow to the size of the largest pass. Used by one thread.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "layers/decoder.h"

namespace freshet {

class EncoderPass {
 public:
  // `ends`: its embedding is used if `weights` has none. Both may be nullptr for plans.
  EncoderPass(std::shared_ptr<const ModelSpec> spec, std::shared_ptr<const ModelWeights> weights,
              std::shared_ptr<const ModelWeights> ends, ops::Ops& ops);

  int64_t positions() const;  // upper bound per pass
  Decoder::Workspace workspace() const;
  Status reserve();

  // Called for each pass: its inputs are [first, first + batch.sequences()) of the given ones, and
  // `states` are their outputs in order. Valid during the call.
  using Sink = FunctionRef<void(size_t first, const ForwardBatch& batch, const Matrix& states)>;
  void run(std::span<const EncoderInput> inputs, Sink sink);
  // On hosts, `between` is called between branches of layers. False: it returned false, or ran the
  // encoder meanwhile; then `sink` was not called for all inputs. Of the inputs of a pass, only
  // their lengths are read after its first call.
  bool run(std::span<const EncoderInput> inputs, Sink sink, FunctionRef<bool()> between);

 private:
  size_t stem_scratch() const;  // on a device
  size_t take(std::span<const EncoderInput> inputs);
  void hear(std::span<const EncoderInput> inputs);
  Matrix convolve(int which, int64_t rows, int64_t cols, float* to);

  std::shared_ptr<const ModelSpec> spec_;
  std::shared_ptr<const ModelWeights> weights_;
  ops::Ops& ops_;
  Decoder decoder_;
  KvStorage cache_;
  ForwardBatch batch_;
  uint64_t runs_ = 0;           // begun
  Buffer states_;               // [positions, hidden]
  Buffer fetched_, room_;       // on a device: host copies, and operands of convolutions
  Buffer stream_;               // audio: [positions, hidden], in memory that a device can read
  std::vector<float> columns_;  // of a convolution's input
  std::vector<float> heard_;
};

}  // namespace freshet
