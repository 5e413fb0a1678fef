// Asynchronous copies through libcu++: a barrier that counts bytes, a pipeline of two stages, a tensor map.
struct alignas(64) CUtensorMap_st {
  unsigned long long opaque[16];
};
typedef struct CUtensorMap_st CUtensorMap;
#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda/pipeline>

namespace device = cuda::device::experimental;
using Barrier = cuda::barrier<cuda::thread_scope_block>;
constexpr int THREADS = 128;

// out[i] = x[i] with neighbouring elements exchanged, tile after tile of 128 elements by one bulk copy each.
extern "C" __global__ void bulk_copies(const float4* x, float4* out, int tiles) {
  __shared__ alignas(128) float4 stage[2][THREADS];
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ Barrier barrier[2];
  if (threadIdx.x == 0) {
    init(&barrier[0], THREADS);
    init(&barrier[1], THREADS);
    device::fence_proxy_async_shared_cta();
  }
  __syncthreads();
  auto load = [&](int tile) {
    Barrier& filled = barrier[tile & 1];
    if (threadIdx.x != 0) return filled.arrive();
    device::cp_async_bulk_global_to_shared(stage[tile & 1], x + tile * THREADS, sizeof(stage[0]), filled);
    return cuda::device::barrier_arrive_tx(filled, 1, sizeof(stage[0]));
  };
  auto token = load(0);
  for (int tile = 0; tile < tiles; tile++) {
    barrier[tile & 1].wait(std::move(token));
    out[tile * THREADS + threadIdx.x] = stage[tile & 1][threadIdx.x ^ 1];
    __syncthreads();
    if (tile + 1 < tiles) token = load(tile + 1);
  }
}

// out = x with every tile of 128 reversed, through a pipeline of two stages.
extern "C" __global__ void staged_copies(const int* x, int* out, int tiles) {
  __shared__ alignas(16) int stage[2][THREADS];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  auto block = cooperative_groups::this_thread_block();
  auto pipeline = cuda::make_pipeline(block, &state);
  auto load = [&](int tile) {
    pipeline.producer_acquire();
    auto size = cuda::aligned_size_t<16>(sizeof(stage[0]));
    cuda::memcpy_async(block, stage[tile & 1], x + tile * THREADS, size, pipeline);
    pipeline.producer_commit();
  };
  for (int tile = 0; tile < 2 && tile < tiles; tile++) load(tile);
  for (int tile = 0; tile < tiles; tile++) {
    pipeline.consumer_wait();
    out[tile * THREADS + threadIdx.x] = stage[tile & 1][THREADS - 1 - threadIdx.x];
    pipeline.consumer_release();
    if (tile + 2 < tiles) load(tile + 2);
  }
}

// out = in + 1 in one box of 16 rows by 32 columns.
extern "C" __global__ void tensor_copies(
    const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap out, int x, int y) {
  __shared__ alignas(128) int box[16][32];
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    init(&barrier, blockDim.x);
    device::fence_proxy_async_shared_cta();
  }
  __syncthreads();
  Barrier::arrival_token token;
  if (threadIdx.x == 0) {
    device::cp_async_bulk_tensor_2d_global_to_shared(&box, &in, x, y, barrier);
    token = cuda::device::barrier_arrive_tx(barrier, 1, sizeof(box));
  } else {
    token = barrier.arrive();
  }
  barrier.wait(std::move(token));
  for (int i = threadIdx.x; i < 512; i += blockDim.x) box[i / 32][i % 32] += 1;
  device::fence_proxy_async_shared_cta();
  __syncthreads();
  if (threadIdx.x == 0) {
    device::cp_async_bulk_tensor_2d_shared_to_global(&out, x, y, &box);
    device::cp_async_bulk_commit_group();
    device::cp_async_bulk_wait_group_read<0>();
  }
}
