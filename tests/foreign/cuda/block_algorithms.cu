// Library algorithms over a block: CUB's reduction, scan and radix sort; tiles and groups of cooperative groups.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

namespace cg = cooperative_groups;
constexpr int THREADS = 128, ITEMS = 4;

extern "C" __global__ void block_algorithms(const int* x, int* sum, int* scanned, unsigned* sorted) {
  using Reduce = cub::BlockReduce<int, THREADS>;
  using Scan = cub::BlockScan<int, THREADS>;
  using Sort = cub::BlockRadixSort<unsigned, THREADS, ITEMS>;
  __shared__ union {
    Reduce::TempStorage reduce;
    Scan::TempStorage scan;
    Sort::TempStorage sort;
  } storage;
  int items[ITEMS], inclusive[ITEMS];
  unsigned keys[ITEMS];
  const int first = threadIdx.x * ITEMS;
  for (int i = 0; i < ITEMS; i++) keys[i] = items[i] = x[first + i];
  const int total = Reduce(storage.reduce).Sum(items);
  if (threadIdx.x == 0) *sum = total;
  __syncthreads();
  Scan(storage.scan).InclusiveSum(items, inclusive);
  __syncthreads();
  Sort(storage.sort).Sort(keys);
  for (int i = 0; i < ITEMS; i++) {
    scanned[first + i] = inclusive[i];
    sorted[first + i] = keys[i];
  }
}

// out (threads, 4): sum over the warp, maximum and inclusive sum over eight lanes, rank among the warp's odd values.
extern "C" __global__ void groups(const int* x, int* out, int* classes) {
  auto block = cg::this_thread_block();
  auto warp = cg::tiled_partition<32>(block);
  auto tile = cg::tiled_partition<8>(block);
  const int value = x[block.thread_rank()];
  int* mine = out + 4 * block.thread_rank();
  mine[0] = cg::reduce(warp, value, cg::plus<int>());
  mine[1] = cg::reduce(tile, value, cg::greater<int>());
  mine[2] = cg::inclusive_scan(tile, value);
  mine[3] = -1;
  if (value & 1) {
    auto odd = cg::coalesced_threads();
    mine[3] = odd.thread_rank();
  }
  auto same = cg::labeled_partition(warp, value % 3);
  if (same.thread_rank() == 0) atomicAdd(classes + value % 3, same.size());
}

// Every CTA of a cluster of four adds its values into CTA 0, and copies those of its neighbour.
extern "C" __global__ void __cluster_dims__(4, 1, 1) distributed(const int* x, int* neighbour, int* sums) {
  __shared__ int values[64], total[16];
  auto cluster = cg::this_cluster();
  const int t = threadIdx.x, rank = cluster.block_rank(), place = blockIdx.x * 64 + t;
  values[t] = x[place];
  if (t < 16) total[t] = 0;
  cluster.sync();
  atomicAdd(cluster.map_shared_rank(total, 0) + t % 16, values[t]);
  neighbour[place] = cluster.map_shared_rank(values, (rank + 1) % 4)[t];
  cluster.sync();
  if (rank == 0 && t < 16) sums[blockIdx.x / 4 * 16 + t] = total[t];
}
