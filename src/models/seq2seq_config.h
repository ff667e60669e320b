// What the encoder-decoders have in common: two stacks of layers from one configuration.
#pragma once

#include <initializer_list>
#include <string_view>

#include "layers/spec.h"
#include "models/config.h"

namespace freshet::models {

// Layers of attention and an MLP, each with a norm before the branch, or behind the residual sum.
struct Stack {
  int layers = 0;
  AttentionSpec attention;
  MlpSpec mlp;
  NormSpec norm;
  bool norm_before = true;
};

// The number of layers under a key. More than any model has are an error.
int read_layers(Config& config, std::initializer_list<std::string_view> keys, int otherwise);

// Sizes and vocabulary are those of `like`.
ModelSpec stack_spec(const ModelSpec& like, const Stack& stack);

// Makes `decoder` attend to `encoder` in every layer, between its attention and its MLP. The
// encoder's attention is made two-way, and it gets no head.
void join(ModelSpec& decoder, ModelSpec encoder, const Stack& stack);

}  // namespace freshet::models
