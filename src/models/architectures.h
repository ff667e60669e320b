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
Architecture bert();
Architecture roberta();
Architecture xlm_roberta();
Architecture camembert();
Architecture nomic_bert();
Architecture modernbert();
Architecture t5();
Architecture mt5();
Architecture bart();
Architecture mbart();
Architecture whisper();
Architecture gte();
Architecture gte_new();

}  // namespace freshet::models
