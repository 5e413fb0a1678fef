// Synchronisation without a library: threads that wait for one another's stores.
__device__ unsigned arrived, finished;
__device__ int lock, guarded;

// out[0]: the sum of x, added up by whichever block comes last. out[1]: how often the lock was taken.
// out[2 + block]: what a token reads after it has gone through the lanes of a warp.
extern "C" __global__ void meetings(const int* x, int* out, volatile int* partial) {
  __shared__ int sums[256];
  __shared__ bool last;
  const int t = threadIdx.x;
  sums[t] = x[blockIdx.x * 256 + t];
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (t < half) sums[t] += sums[t + half];
    __syncthreads();
  }
  if (t == 0) {
    partial[blockIdx.x] = sums[0];
    __threadfence();
    last = atomicInc(&finished, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && t == 0) {
    int total = 0;
    for (int block = 0; block < gridDim.x; block++) total += partial[block];
    out[0] = total;
  }
  if (t % 64 == 5) {  // one lane of every other warp
    while (atomicCAS(&lock, 0, 1)) __nanosleep(20);
    __threadfence();
    *(volatile int*)&guarded += 1;
    __threadfence();
    atomicExch(&lock, 0);
  }
  __syncthreads();
  if (t < 32) {
    volatile int* token = sums;
    token[t] = t == 0;
    __syncwarp();
    while (token[t] == 0) {
    }
    if (t < 31) token[t + 1] = token[t] + 1;
    if (t == 31) out[2 + blockIdx.x] = token[31];
  }
  __syncthreads();
  if (t == 0) {
    __threadfence();
    atomicAdd(&arrived, 1);
    while (*(volatile unsigned*)&arrived < gridDim.x) {
    }
    out[1] = *(volatile int*)&guarded;
  }
}

// A producer warp and a consumer warp hand two buffers to and fro with named barriers; every row comes out reversed.
extern "C" __global__ void named_barriers(const int* x, int* out, int rows) {
  __shared__ int buffer[2][32];
  const int lane = threadIdx.x % 32;
  auto arrive = [](int name) { asm volatile("bar.arrive %0, 64;" ::"r"(name) : "memory"); };
  auto sync = [](int name) { asm volatile("bar.sync %0, 64;" ::"r"(name) : "memory"); };
  if (threadIdx.x < 32) {
    for (int row = 0; row < rows; row++) {
      sync(2 + (row & 1));
      buffer[row & 1][lane] = x[row * 32 + lane];
      arrive(4 + (row & 1));
    }
  } else {
    arrive(2);
    arrive(3);
    for (int row = 0; row < rows; row++) {
      sync(4 + (row & 1));
      out[row * 32 + lane] = buffer[row & 1][31 - lane];
      if (row + 2 < rows) arrive(2 + (row & 1));
    }
  }
}
