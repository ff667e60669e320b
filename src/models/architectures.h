// The architectures, one file each: <name>.cc. registry.cc lists them.
#pragma once

#include "models/architecture.h"

namespace freshet::models {

Architecture llama();
Architecture mistral();
Architecture mixtral();
Architecture qwen2();
Architecture qwen3();
Architecture qwen2_moe();
Architecture qwen3_moe();
Architecture gemma();
Architecture gemma2();
Architecture gemma3();
Architecture phi3();
Architecture gpt2();
Architecture gpt_neox();
Architecture opt();
Architecture olmo2();
Architecture granite();
Architecture starcoder2();
Architecture stablelm();
Architecture cohere();
Architecture glm4();
Architecture deepseek_v2();
Architecture deepseek_v3();
Architecture gpt_oss();
Architecture lfm2();
Architecture lfm2_moe();
Architecture mamba();
Architecture falcon_mamba();
Architecture mamba2();
Architecture qwen3_next();
Architecture falcon_h1();
Architecture granitemoehybrid();
Architecture bamba();
Architecture jamba();
Architecture nemotron_h();
Architecture minimax();

}  // namespace freshet::models
