#include "models/seq2seq_config.h"

#include <memory>
#include <utility>

namespace freshet::models {
namespace {

constexpr int kMaxLayers = 4096;

BranchSpec branch_of(const Stack& stack, BranchBody body) {
  BranchSpec branch{{}, std::move(body)};
  (stack.norm_before ? branch.norms.in : branch.norms.after) = stack.norm;
  return branch;
}

}  // namespace

int read_layers(Config& c, std::initializer_list<std::string_view> keys, int otherwise) {
  const int layers = c.size(keys, otherwise);
  if (layers <= kMaxLayers) return layers;
  c.fail(invalid_argument("the configuration asks for {} layers", layers));
  return 1;
}

ModelSpec stack_spec(const ModelSpec& like, const Stack& stack) {
  ModelSpec spec = like;
  spec.layers.assign(static_cast<size_t>(stack.layers),
                     {{branch_of(stack, stack.attention), branch_of(stack, stack.mlp)}});
  if (stack.norm_before) spec.final_norm = stack.norm;
  return spec;
}

void join(ModelSpec& decoder, ModelSpec encoder, const Stack& stack) {
  encoder.generates = false;
  for (LayerSpec& layer : encoder.layers) layer.attention().two_way = true;
  CrossAttentionSpec cross;
  cross.heads = stack.attention.heads;
  cross.head_dim = stack.attention.head_dim;
  cross.scale = stack.attention.scale;
  cross.qkv_bias = stack.attention.qkv_bias;
  cross.key_bias = stack.attention.key_bias;
  cross.out_bias = stack.attention.out_bias;
  cross.encoder_size = encoder.hidden_size;
  cross.encoder_length = static_cast<int>(encoder.max_context);
  for (LayerSpec& layer : decoder.layers) {
    layer.branches.insert(layer.branches.begin() + 1, branch_of(stack, cross));
  }
  decoder.encoder = std::make_shared<const ModelSpec>(std::move(encoder));
}

}  // namespace freshet::models
