// Shared by the kernels of recurrent layers: where a sequence's tokens and states are, and the
// functions of the step sizes.
//
// Each kernel processes a sequence's tokens in order with the state in registers. Prompts, chunks
// and single tokens run the same code, so results don't depend on how a prompt was chunked.
#pragma once

#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

// A sequence's tokens of the step. `begins`: the first of them starts the sequence.
struct StepTokens {
  int first, last;
  bool begins;
  int slot;
};
// Tables were copied before the step's first kernel, so this needs no wait().
__device__ __forceinline__ StepTokens step_tokens(const StateArgs& s, int sequence) {
  const int first = s.query_start[sequence], last = s.query_start[sequence + 1];
  return {first, last, s.context_len[sequence] == last - first, s.slots[sequence * s.slot_stride]};
}
__device__ __forceinline__ float* state_at(const StateArgs& s, int slot) {
  return reinterpret_cast<float*>(s.data + slot * s.slot_bytes);
}
// The slot that saves the state after a token; -1: none.
__device__ __forceinline__ int saved_at(const StateArgs& s, int token) {
  return s.saves != nullptr ? s.saves[token] : -1;
}

__device__ __forceinline__ float softplus(float x) {
  return __fadd_rn(fmaxf(x, 0.0f), log1pf(expf(-fabsf(x))));
}

}  // namespace freshet::cuda
