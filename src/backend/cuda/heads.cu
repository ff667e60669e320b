// What lies between the products of queries, keys and values and attention: norms of heads,
// rotation, and storing, in one pass. A warp takes one head of one token; the sums of its norm run
// in an order that the head's size fixes.
#include "backend/cuda/heads.cuh"
#include "backend/cuda/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kHeadWarps = 8;

struct Place {
  int sequence, position;
};

__device__ __forceinline__ Place place_of(const BatchArgs& b, int token) {
  int low = 0, high = b.sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (b.query_start[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {low, b.context_len[low] - (b.query_start[low + 1] - token)};
}

// Where a head goes in the cache; nullptr: nowhere.
__device__ __forceinline__ uint8_t* place_in_cache(const HeadsArgs& a, HeadsArgs::Store store,
                                                   int head, int token) {
  if (store == HeadsArgs::kNowhere) return nullptr;
  const Place place = place_of(a.batch, token);
  const int64_t block =
      a.batch.tables[place.sequence * a.batch.table_stride + place.position / kBlockTokens];
  const int slot = place.position % kBlockTokens;
  return store == HeadsArgs::kKeys
             ? keys_at(a.cache, block, head) + slot_at(a.cache.type, slot, a.cache.key_dim)
             : values_at(a.cache, block, head) + slot_at(a.cache.type, slot, a.cache.value_dim);
}

// Blocks [token, kHeadWarps heads of all parts].
__global__ void __launch_bounds__(kHeadWarps * 32)
    heads_kernel(const __grid_constant__ HeadsArgs a, int room) {
  extern __shared__ __align__(16) float rooms[];
  let_next_start();
  const int token = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int h = static_cast<int>(blockIdx.y) * kHeadWarps + warp, p = 0;
  while (p < a.count && h >= a.of[p].heads) h -= a.of[p++].heads;
  if (p == a.count) return;
  const HeadsArgs::Part& part = a.of[p];
  // Tables came by a copy before the step's first kernel.
  uint8_t* to = place_in_cache(a, part.store, h, token);
  float* x = part.x + token * part.stride + static_cast<int64_t>(h) * part.head_dim;
  const int dim = part.head_dim;
  const bool whole = dim % 4 == 0 && whole_rows(part.x, part.stride);
  float* head = rooms + warp * room;
  const float* table = a.cos_sin + static_cast<int64_t>(token) * part.rotary_dim;
  wait();
  Turn turn = turn_at(part, table, lane * 4);  // on its way while the head is
  for (int c = lane * 4; c < dim; c += 128) {
    *reinterpret_cast<float4*>(head + c) = load_four(x, c, dim, whole);
  }
  if (part.normed != 0) {
    norm_head(head, dim, part.norm, part.norm_per_head != 0 ? static_cast<int64_t>(h) * dim : 0);
  }
  __syncwarp();
  for (int c = lane * 4; c < dim; c += 128) {
    if (c >= 128) turn = turn_at(part, table, c);
    const float4 v = rotate_four(head, c, dim, part, table, turn);
    if (part.rotary_dim != 0 || part.normed != 0) {
      if (whole) {
        *reinterpret_cast<float4*>(x + c) = v;
      } else {
        const float values[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 4 && c + i < dim; ++i) x[c + i] = values[i];
      }
    }
    if (to != nullptr) store_four(a.cache.type, to, c, dim, v);  // heads there are multiples of 8
  }
}

}  // namespace

int heads(const HeadsArgs* args) {
  int count = 0, longest = 0;
  for (int i = 0; i < args->count; ++i) {
    count += args->of[i].heads;
    longest = args->of[i].head_dim > longest ? args->of[i].head_dim : longest;
  }
  const int room = static_cast<int>(ceil_div(longest, 4)) * 4;
  const dim3 grid(static_cast<unsigned>(args->tokens),
                  static_cast<unsigned>(ceil_div(count, kHeadWarps)));
  return launch(heads_kernel, grid, dim3(kHeadWarps * 32),
                static_cast<size_t>(kHeadWarps * room) * sizeof(float), *args, room);
}

}  // namespace freshet::cuda
