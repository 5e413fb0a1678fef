// Attention of 128 queries, in the manner of CUTLASS's for SM100: warps 0-3 turn scores into probabilities, warps 4-7
// correct the sums, thread 256 loads and multiplies. The probabilities go back to tensor memory, where they are the A
// operand of the second product. Row statistics go from warp to warp there too, with an mbarrier and no wait::st.
struct alignas(64) Map {
  char bytes[128];
};
using Word = unsigned long long;
constexpr int ROWS = 128, KEYS = 64, SIZE = 64, BLOCKS = 3, ROW_BYTES = SIZE * 2;
constexpr int STATISTICS = 0, PROBABILITIES = 32, SUMS = 64, COLUMNS = 128;  // scores are in columns 0 to 63
constexpr int PRODUCT = 1 << 4 | SIZE / 8 << 17 | ROWS / 16 << 24, TRANSPOSED = 1 << 16;

__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(Word* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(bar)), "r"(count) : "memory");
}
__device__ void arrive(Word* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(bar)) : "memory");
}
__device__ void wait(Word* bar, int phase) {
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L; }"
               "tcgen05.fence::after_thread_sync;" ::"r"(at(bar)), "r"(phase & 1) : "memory");
}
__device__ void load(char* to, const Map& map, int row, Word* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {0, %2}], [%3];" ::"r"(at(to)), "l"(&map), "r"(row), "r"(at(bar)) : "memory");
}
__device__ void commit(Word* bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(at(bar)) : "memory");
}
__device__ Word matrix(const char* p) {  // 128-byte swizzle
  return at(p) >> 4 | 64ull << 32 | 1ull << 46 | 2ull << 61;
}
__device__ float load_cell(unsigned column) {
  float value;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=f"(value) : "r"(column) : "memory");
  return value;
}
__device__ void store_cell(unsigned column, float value) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(column), "f"(value) : "memory");
}
__device__ void loaded() {
  asm volatile("tcgen05.wait::ld.sync.aligned; tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ void stored() {
  asm volatile("tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ unsigned pair(float low, float high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

struct Barriers {
  Word inputs, scores, statistics, statistics_read, probabilities, corrected, sums;
};

__device__ void multiply(unsigned tmem, const char* q, const char* k, const char* v, Barriers* b) {
  wait(&b->inputs, 0);
  for (int block = 0; block < BLOCKS; block++) {
    if (block) wait(&b->statistics_read, block - 1);
    for (int step = 0; step < SIZE / 16; step++)
      asm volatile("{ .reg .pred p; setp.ne.u32 p, %4, 0;"
                   "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(tmem), "l"(matrix(q) + 2 * step),
                   "l"(matrix(k + block * KEYS * ROW_BYTES) + 2 * step), "r"(PRODUCT), "r"(step));
    commit(&b->scores);
    wait(&b->probabilities, block);
    wait(&b->corrected, block);
    for (int step = 0; step < KEYS / 16; step++)
      asm volatile("{ .reg .pred p; setp.ne.u32 p, %4, 0;"
                   "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p; }" ::"r"(tmem + SUMS),
                   "r"(tmem + PROBABILITIES + 8 * step), "l"(matrix(v + (block * KEYS + 16 * step) * ROW_BYTES)),
                   "r"(PRODUCT | TRANSPOSED), "r"(block + step));
    commit(&b->sums);
  }
}

__device__ void softmax(unsigned tmem, float scale, Barriers* b) {
  float top = __uint_as_float(0xFF800000), weight = 0, x[KEYS];
  for (int block = 0; block < BLOCKS; block++) {
    wait(&b->scores, block);
    float old = top;
    for (int i = 0; i < KEYS; i++) x[i] = load_cell(tmem + i) * scale;
    loaded();
    for (int i = 0; i < KEYS; i++) top = fmaxf(top, x[i]);
    store_cell(tmem + STATISTICS, exp2f(old - top));
    arrive(&b->statistics);
    weight *= exp2f(old - top);
    for (int i = 0; i < KEYS; i++) weight += x[i] = exp2f(x[i] - top);
    for (int i = 0; i < KEYS; i += 2)
      store_cell(tmem + PROBABILITIES + i / 2, __uint_as_float(pair(x[i], x[i + 1])));
    stored();
    arrive(&b->probabilities);
  }
  wait(&b->statistics_read, BLOCKS - 1);
  store_cell(tmem + STATISTICS, weight);
  arrive(&b->statistics);
}

__device__ void correct(unsigned tmem, float* out, Barriers* b) {
  for (int block = 0; block < BLOCKS; block++) {
    wait(&b->statistics, block);
    float shrink = load_cell(tmem + STATISTICS);
    loaded();
    arrive(&b->statistics_read);
    if (block) {
      wait(&b->sums, block - 1);
      for (int i = 0; i < SIZE; i++) store_cell(tmem + SUMS + i, load_cell(tmem + SUMS + i) * shrink);
      stored();
    }
    arrive(&b->corrected);
  }
  wait(&b->statistics, BLOCKS);
  float weight = load_cell(tmem + STATISTICS);
  wait(&b->sums, BLOCKS - 1);
  for (int i = 0; i < SIZE; i++) out[threadIdx.x % ROWS * SIZE + i] = load_cell(tmem + SUMS + i) / weight;
}

extern "C" __global__ void __launch_bounds__(288) attention(
    const __grid_constant__ Map Q, const __grid_constant__ Map K, const __grid_constant__ Map V, float* out,
    float scale) {
  extern __shared__ __align__(1024) char q[];
  char *k = q + ROWS * ROW_BYTES, *v = k + BLOCKS * KEYS * ROW_BYTES;
  __shared__ Barriers b;
  __shared__ unsigned tmem;
  int warp = threadIdx.x / 32;
  if (warp == 8)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(at(&tmem)), "n"(COLUMNS));
  if (threadIdx.x == 256) {
    for (Word* bar : {&b.inputs, &b.scores, &b.sums}) init(bar, 1);
    for (Word* bar : {&b.statistics, &b.statistics_read, &b.probabilities, &b.corrected}) init(bar, ROWS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(&b.inputs)),
                 "r"((ROWS + 2 * BLOCKS * KEYS) * ROW_BYTES) : "memory");
    load(q, Q, 0, &b.inputs);
    load(k, K, 0, &b.inputs);
    load(v, V, 0, &b.inputs);
  }
  __syncthreads();
  if (warp < 4) softmax(tmem, scale, &b);
  else if (warp < 8) correct(tmem, out, &b);
  else if (threadIdx.x == 256) multiply(tmem, q, k, v, &b);
  __syncthreads();
  if (warp == 8) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem), "n"(COLUMNS));
}
