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
Architecture smollm3();
Architecture olmo3();
Architecture olmoe();
Architecture cohere2();
Architecture exaone4();
Architecture glm4_moe();
Architecture ernie4_5();
Architecture ernie4_5_moe();
Architecture hunyuan_dense();
Architecture seed_oss();
Architecture apertus();
Architecture arcee();
Architecture nemotron();
Architecture phi();
Architecture phimoe();
Architecture falcon();
Architecture minimax_m2();
Architecture granitemoe();
Architecture gpt_bigcode();
Architecture gptj();
Architecture llama4();
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
