// The plug-in's functions, by source; plugin.cu puts them into the table (api.h says what they do).
#pragma once

#include "backend/cuda/api.h"

namespace freshet::cuda {

// gemm_sm80_small_m.cu
Order order_for(Code code, int64_t tokens);
int products(const ProductArgs* products, int count, int64_t tokens, const NextProducts* next);
int gated_fits(Code code, int64_t rows, int64_t cols, int64_t tokens);
int gated_products(const ProductArgs* gate_and_up, int64_t tokens, const Activations* act);
int expert_products(const ExpertArgs* args);
// moe_gate_up_sm90_m1_8.cu
int few_experts_fit(const FewExpertsArgs* args);
int few_experts(const FewExpertsArgs* args);
// norm_route_sm90_m1_32.cu
int route_one_fits(const RouteOneArgs* args);
int route_one(const RouteOneArgs* args);
// pack.cu
int64_t packed_bytes(Code code, int64_t rows, int64_t cols);
int pack(Code code, uint8_t* packed, const uint8_t* raw, int64_t first, int64_t count, int64_t rows,
         int64_t cols);
int embed(const Rows* out, const WeightView* table, const int32_t* ids, int32_t offset,
          float scale);
// elementwise.cu
int64_t fragment_bytes(int64_t rows, int64_t cols);
int encode(const Activations* act, const Rows* x, const int32_t* index, const float* weights,
           int64_t rows);
int rope_table(float* cos_sin, const int32_t* positions, const float* inv_freq, int64_t tokens,
               int64_t half, float scale);
int glu(const Rows* out, const Rows* gate, const Rows* up, const GluArgs* glu,
        const Activations* act);
int activation(const Rows* x, int activation);
int add(const Rows* out, const Rows* x, float scale);
int scale(const Rows* x, float scale);
int softcap(const Rows* x, float cap);
int gather(const Rows* out, const Rows* x, const int32_t* rows);
int sigmoid_gate(const Rows* x, const Rows* gate);
int argmax(const Rows* x, int32_t* ids);
// encode_int8.cu
int encode_int8(const Activations& act, const Rows& x);
int norm_int8(const Rows& x, const NormArgs& norm, const Activations& act);
int glu_int8(const Rows& gate, const Rows& up, const GluArgs& glu, const Activations& act);
// sampling_sm90.cu
int samples(int64_t cols);
int sample(const Rows* logits, const int32_t* words, const int32_t* tokens, int32_t* ids);
int take_ids(int32_t* ids, const int32_t* from, int64_t count, const int32_t* named);
// norm.cu
int norm(const Rows* out, const Rows* x, const NormArgs* norm, const Activations* act);
// qk_norm_rope_store.cu
int heads(const HeadsArgs* args);
// attention_sm80.cu
int64_t attention_partial_bytes(int sequences, int heads, int value_dim, int64_t context);
int attention(const AttentionArgs* args);
// moe_route.cu
int experts_fused(const ExpertsArgs* args);
int experts(const ExpertsArgs* args);
int route(const Rows* logits, const RoutingArgs* routing, int32_t* ids, float* weights);
int group(const GroupArgs* args);
int router(const ProductArgs* product, int64_t tokens, const RoutingArgs* routing, int32_t* ids,
           float* weights, const GroupArgs* groups);
int combine(const Rows* out, const void* y, int bf16, const GroupArgs* args, int weighted, int add);

}  // namespace freshet::cuda
