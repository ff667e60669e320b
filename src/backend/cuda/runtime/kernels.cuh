// The plug-in's functions, by source file; plugin.cu puts them into the table (api.h documents
// them).
#pragma once

#include "backend/cuda/api.h"

namespace freshet::cuda {

// copy_lane.cu
int lane_open(const Context& ctx, void** lane, const LaneLayerView* layers, int32_t count);
int lane_close(const Context& ctx, void* lane);
int lane_follow(const Context& ctx, void* lane);
int lane_precede(const Context& ctx, void* lane);
int lane_copy(const Context& ctx, void* lane, int32_t first, int32_t count, const LaneUnits* units,
              int64_t longest, int32_t to_device);
int lane_wait(const Context& ctx, void* lane);
// gemm_sm80_small_m.cu
Order order_for(const Context& ctx, Code code, int64_t tokens);
int products(const Context& ctx, const ProductArgs* products, int count, int64_t tokens,
             const NextProducts* next);
int gated_fits(const Context& ctx, Code code, int64_t rows, int64_t cols, int64_t tokens);
int gated_products(const Context& ctx, const ProductArgs* gate_and_up, int64_t tokens,
                   const Activations* act);
int expert_products(const Context& ctx, const ExpertArgs* args);
// moe_gate_up_sm90_m1_8.cu
int few_experts_fit(const Context& ctx, const FewExpertsArgs* args);
int few_experts(const Context& ctx, const FewExpertsArgs* args);
// norm_route_sm90_m1_32.cu
int route_one_fits(const Context& ctx, const RouteOneArgs* args);
int route_one(const Context& ctx, const RouteOneArgs* args);
// pack.cu
int64_t packed_bytes(const Context& ctx, Code code, int64_t rows, int64_t cols);
int pack(const Context& ctx, Code code, uint8_t* packed, const uint8_t* raw, int64_t first,
         int64_t count, int64_t rows, int64_t cols);
int embed(const Context& ctx, const Rows* out, const WeightView* table, const int32_t* ids,
          int32_t offset, float scale);
// elementwise.cu
int64_t fragment_bytes(const Context&, int64_t rows, int64_t cols);
int encode(const Context& ctx, const Activations* act, const Rows* x, const int32_t* index,
           const float* weights, int64_t rows);
int rope_table(const Context& ctx, float* cos_sin, const int32_t* positions, const float* inv_freq,
               int64_t tokens, int64_t half, float scale, float gain, float interval);
int glu(const Context& ctx, const Rows* out, const Rows* gate, const Rows* up, const GluArgs* glu,
        const Activations* act);
int activation(const Context& ctx, const Rows* x, int activation);
int add(const Context& ctx, const Rows* out, const Rows* x, float scale);
int scale(const Context& ctx, const Rows* x, float scale);
int softcap(const Context& ctx, const Rows* x, float cap);
int gather(const Context& ctx, const Rows* out, const Rows* x, const int32_t* rows);
int sigmoid_gate(const Context& ctx, const Rows* x, const Rows* gate);
int sigmoid_product(const Context& ctx, const Rows* x, const Rows* gate);
int xielu(const Context& ctx, const Rows* x, float positive, float negative, float beta, float eps);
int split_columns(const Context& ctx, const Rows* kept, const Rows* apart, const Rows* x,
                  const int32_t* columns);
int argmax(const Context& ctx, const Rows* x, int32_t* ids);
// second_moments.cu
int add_moments(const Context& ctx, float* sums, const Rows* x);
// encode_int8.cu
int encode_int8(const Context& ctx, const Activations& act, const Rows& x);
int norm_int8(const Context& ctx, const Rows& x, const NormArgs& norm, const Activations& act);
int glu_int8(const Context& ctx, const Rows& gate, const Rows& up, const GluArgs& glu,
             const Activations& act);
// sampling_sm90.cu
int samples(const Context& ctx, int64_t cols);
int sample(const Context& ctx, const Rows* logits, const int32_t* words, const int32_t* tokens,
           int32_t* ids);
int take_ids(const Context& ctx, int32_t* ids, const int32_t* from, int64_t count,
             const int32_t* named, const int32_t* map);
// norm.cu
int norm(const Context& ctx, const Rows* out, const Rows* x, const NormArgs* norm,
         const Activations* act);
// qk_norm_rope_store.cu
int heads(const Context& ctx, const HeadsArgs* args);
// attention_sm80.cu
int64_t attention_partial_bytes(const Context&, int tokens, int heads, int value_dim,
                                int64_t context);
int attention(const Context& ctx, const AttentionArgs* args);
// rotated_heads.cu
int rotate_heads(const Context& ctx, const Rows* out, const Rows* x, int heads, int dim);
// stored_kv.cu
int key_scores(const Context& ctx, const KeyScoreArgs* args);
int move_slots(const Context& ctx, const MoveArgs* args);
int read_keys(const Context& ctx, float* keys, const CacheArgs* cache, const int32_t* blocks,
              int head, int slots);
// causal_conv.cu, selective_scan.cu, linear_scan.cu
int causal_conv(const Context& ctx, const CausalConvArgs* args);
int selective_scan(const Context& ctx, const SelectiveScanArgs* args);
int linear_scan(const Context& ctx, const LinearScanArgs* args);
int delta_scan(const Context& ctx, const DeltaScanArgs* args);
// moe_route.cu
int experts_fused(const Context& ctx, const ExpertsArgs* args);
int experts(const Context& ctx, const ExpertsArgs* args);
int route(const Context& ctx, const Rows* logits, const RoutingArgs* routing, int32_t* ids,
          float* weights);
int group(const Context& ctx, const GroupArgs* args);
int router(const Context& ctx, const ProductArgs* product, int64_t tokens,
           const RoutingArgs* routing, int32_t* ids, float* weights, const GroupArgs* groups);
int combine(const Context& ctx, const Rows* out, const void* y, int bf16, const GroupArgs* args,
            int weighted, int add);

}  // namespace freshet::cuda
