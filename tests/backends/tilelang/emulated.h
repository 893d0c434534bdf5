// What the CUDA C++ that TileLang writes for float32 needs to run on a CPU: a thread for each CUDA thread, one block at a time.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

using std::max;
typedef unsigned char uchar;
struct dim3 { int x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __global__
#define __restrict__
#define __launch_bounds__(...)
#define __shared__
#define __align__(n)
#define CUDART_INF_F std::numeric_limits<float>::infinity()

alignas(1024) uchar buf_dyn_shmem[1 << 18];
static dim3 blockIdx, gridDim;
static thread_local dim3 threadIdx;
static std::unique_ptr<std::barrier<>> block_barrier;
static float exchanged[1024];

inline void __syncthreads() { block_barrier->arrive_and_wait(); }

namespace tl {
struct MaxOp { static float of(float a, float b) { return std::max(a, b); } };
struct SumOp { static float of(float a, float b) { return a + b; } };
template <int all> struct NamedBarrier {};

// every thread of the block meets here, whatever the width: the kernels under test reduce in all their threads or in none
template <class Op, int threads, int scale, int offset, class Barrier> struct AllReduce {
  static_assert(scale == 1 && offset == 0);
  static float run(float value, float * = nullptr) {
    exchanged[threadIdx.x] = value;
    __syncthreads();
    const int first = threadIdx.x / threads * threads;
    for (int width = threads / 2; width > 0; width /= 2) {
      const float other = exchanged[first + ((threadIdx.x - first) ^ width)];
      __syncthreads();
      value = Op::of(value, other);
      exchanged[threadIdx.x] = value;
      __syncthreads();
    }
    return value;
  }
};

// asynchronous copies are done at once, which is one of the orders the hardware may choose
template <int bytes> void cp_async_gs(void *target, const void *source) { std::memcpy(target, source, bytes); }
template <int bytes> void cp_async_gs_conditional(void *target, const void *source, bool valid) {
  if (valid) std::memcpy(target, source, bytes); else std::memset(target, 0, bytes);
}
inline void cp_async_commit() {}
template <int pending> void cp_async_wait() {}

// tiles in bands of `width` rows
template <int width> dim3 rasterization2DRow() {
  const int tile = blockIdx.x + blockIdx.y * gridDim.x;
  const int band = tile / (width * gridDim.x), inside = tile % (width * gridDim.x);
  const int height = std::min(width, gridDim.y - band * width);
  return {inside / height, band * width + inside % height, 0};
}
}  // namespace tl
