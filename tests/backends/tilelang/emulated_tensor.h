// What the CUDA C++ that TileLang writes for wgmma and tensor maps needs to run on a CPU, on top of emulated.h: every asynchronous
// copy and product is done at once, which is one of the orders the hardware may choose. Elements have 2 bytes. Threads of a warp keep
// together only where the instruction asks for it: the compiler's own producers, of which one thread counts, may lag behind and hang.
// Source of the layouts: PTX ISA 8.0, "wgmma: Register Fragments", "Matrix Descriptor Format", "stmatrix", and the swizzles of
// cuTensorMapEncodeTiled.
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

using std::min;
typedef unsigned int uint;
struct uint1 { uint x; };
struct alignas(8) uint2 { uint x, y; };
struct alignas(16) uint4 { uint x, y, z, w; };
inline uint4 make_uint4(uint x, uint y, uint z, uint w) { return {x, y, z, w}; }

#undef __shared__
#define __shared__ static
#define __grid_constant__

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint word;
    std::memcpy(&word, &value, 4);
    bits = (word + 0x7fff + (word >> 16 & 1)) >> 16;
  }
  operator float() const {
    const uint word = uint(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
};
struct __nv_bfloat162 { bfloat16_t x, y; };
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return {bfloat16_t(pair.x), bfloat16_t(pair.y)}; }
inline uint __pack_half2(bfloat16_t low, bfloat16_t high) { return low.bits | uint(high.bits) << 16; }
inline uint __pack_nv_bfloat162(bfloat16_t low, bfloat16_t high) { return __pack_half2(low, high); }

struct CUtensorMap {
  char *base;
  int rank;
  int64_t dims[5], strides[5];
  int box[5], swizzle_bytes;
};

static std::mutex meeting;
static std::condition_variable moved;

// a kernel that hangs ends here, after a minute
template <class Condition> void wait_until(std::unique_lock<std::mutex> &lock, Condition holds) {
  if (moved.wait_for(lock, std::chrono::minutes(1), holds)) return;
  std::fprintf(stderr, "thread %d of block %d waits for ever\n", threadIdx.x, blockIdx.x);
  std::abort();
}

// an mbarrier; the state is kept apart, since only 8 bytes are there
struct Barrier {
  uint64_t word;
  struct State { int expected, pending; int64_t bytes; uint phase; };
  static State &of(Barrier *barrier) { static std::map<Barrier *, State> states; return states[barrier]; }
  void init(int count) { std::lock_guard lock(meeting); of(this) = {count, count, 0, 0}; }
  void change(int arrivals, int64_t bytes) {
    std::lock_guard lock(meeting);
    State &state = of(this);
    state.pending -= arrivals, state.bytes += bytes;
    if (state.pending < 0) std::abort();
    if (state.pending == 0 && state.bytes == 0) { state.pending = state.expected; ++state.phase; moved.notify_all(); }
  }
  void arrive() { change(1, 0); }
  void expect_transaction(int bytes) { change(0, bytes); }
  void arrive_and_expect_tx(int bytes) { change(1, bytes); }
  void wait(int parity) { std::unique_lock lock(meeting); wait_until(lock, [&] { return int(of(this).phase & 1) != parity; }); }
};

// the 16 named barriers, and one for each warp
struct Meeting { int present = 0; uint round = 0; };
static Meeting named[16], warps[32];
inline void meet(Meeting &place, int count) {
  std::unique_lock lock(meeting);
  const uint round = place.round;
  if (++place.present == count) { place.present = 0; ++place.round; moved.notify_all(); }
  else wait_until(lock, [&] { return place.round != round; });
}

inline void __syncwarp() { meet(warps[threadIdx.x / 32], 32); }

inline void arrive_at(Meeting &place, int count) {
  std::lock_guard lock(meeting);
  if (++place.present == count) { place.present = 0; ++place.round; moved.notify_all(); }
}

inline size_t swizzled(size_t address, int span) { return address ^ (address >> 7 & (span / 16 - 1)) << 4; }

namespace tl {
enum class DataType { kBFloat16, kFloat32 };

// start in units of 16 bytes, bytes of a row, and the distances of groups of 8 rows and, where rows lie along the operand's columns, of
// spans, both in units of 16 bytes
struct GmmaDescriptor {
  uint start, span, stride, leading;
  operator uint64_t() const { return start | uint64_t(span) << 16 | uint64_t(stride) << 32 | uint64_t(leading) << 48; }
};
inline GmmaDescriptor operator+(GmmaDescriptor descriptor, int offset) { descriptor.start += offset; return descriptor; }
template <int layout, int leading, int stride> void initialize_wgmma_descriptor(GmmaDescriptor &descriptor, void *start) {
  static_assert(layout >= 1 && layout <= 3, "only swizzled tiles");
  descriptor = {uint((uchar *)start - buf_dyn_shmem) / 16, 256u >> layout, stride, leading};
}
template <class T> void increase_descriptor_offset(GmmaDescriptor &descriptor, T bytes) { descriptor.start += bytes >> 4; }

inline float element(uint64_t descriptor, int row, int depth) {
  const size_t start = (descriptor & 0xffff) * 16, span = descriptor >> 16 & 0xffff, stride = (descriptor >> 32 & 0xffff) * 16;
  return *(bfloat16_t *)(buf_dyn_shmem + swizzled(start + row / 8 * stride + row % 8 * span + depth * 2, span));
}

template <DataType, DataType, DataType, int m, int n, int k, bool, bool, int, int>
void wgmma_ss(uint64_t left, uint64_t right, uint32_t *sums, int keep) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int i = 0; i < n / 2; ++i) {
    const int row = warp * 16 + lane / 4 + (i / 2 % 2) * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = keep ? ((float *)sums)[i] : 0;
    for (int depth = 0; depth < k; ++depth) sum += element(left, row, depth) * element(right, column, depth);
    ((float *)sums)[i] = sum;
  }
}
// rows of the right operand that lie along its columns: `leading` apart are the spans of a swizzle
inline float transposed_element(uint64_t descriptor, int column, int depth) {
  const size_t start = (descriptor & 0xffff) * 16, span = descriptor >> 16 & 0xffff;
  const size_t stride = (descriptor >> 32 & 0xffff) * 16, leading = (descriptor >> 48) * 16;
  const size_t place = start + column * 2 / span * leading + depth / 8 * stride + depth % 8 * span + column * 2 % span;
  return *(bfloat16_t *)(buf_dyn_shmem + swizzled(place, span));
}

template <DataType, DataType, DataType, int m, int n, int k, bool, bool transposed, int, int>
void wgmma_rs(const uint32_t *left, uint64_t right, uint32_t *sums, int keep) {
  static bfloat16_t rows[32][16][k];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = 0; i < k / 2; ++i)
    rows[warp][lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2] = ((const bfloat16_t *)left)[i];
  meet(warps[warp], 32);
  for (int i = 0; i < n / 2; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = keep ? ((float *)sums)[i] : 0;
    for (int depth = 0; depth < k; ++depth)
      sum += float(rows[warp][row][depth]) * (transposed ? transposed_element : element)(right, column, depth);
    ((float *)sums)[i] = sum;
  }
  meet(warps[warp], 32);
}
// lanes that are `threads` apart or less meet in their warp alone
template <class Op, int offset, class Barrier> struct AllReduce<Op, 4, 1, offset, Barrier> {
  static float run(float value, float * = nullptr) {
    static float exchanged[32][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int width = 2; width > 0; width /= 2) {
      exchanged[warp][lane] = value;
      meet(warps[warp], 32);
      const float other = exchanged[warp][lane ^ width];
      meet(warps[warp], 32);
      value = Op::of(value, other);
    }
    return value;
  }
};

template <class T> void warpgroup_fence_operand(T *, int) {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
// one lane speaks for its warp afterwards
template <int> void warpgroup_wait() { __syncwarp(); }
template <int> void wait_wgmma() { __syncwarp(); }
template <int> void warpgroup_reg_alloc() {}
template <int> void warpgroup_reg_dealloc() {}
inline void fence_proxy_async() {}
inline void fence_barrier_init() {}
template <int threads> bool tl_shuffle_elect() { return threads ? threadIdx.x % threads == 0 : threadIdx.x == 0; }
inline void __sync_thread_partial(int barrier, int threads) { meet(named[barrier], threads); }
inline void __named_barrier_arrive(int barrier, int threads) { arrive_at(named[barrier], threads); }
inline void mbarrier_cp_async_arrive_noinc(Barrier &barrier) { barrier.arrive(); }
inline void prefetch_tma_descriptor(const CUtensorMap &) {}

// calls visit(where the element is in global memory, or null outside the tensor; where in shared memory)
template <class Visit> void visit_box(const CUtensorMap &map, void *tile, std::vector<int> at, Visit visit) {
  size_t count = 1;
  for (int dim = 0; dim < map.rank; ++dim) count *= map.box[dim];
  for (size_t i = 0; i < count; ++i) {
    size_t rest = i;
    char *place = map.base;
    for (int dim = 0; dim < map.rank; ++dim) {
      const int64_t position = at[dim] + int64_t(rest % map.box[dim]);
      rest /= map.box[dim];
      if (position < 0 || position >= map.dims[dim]) place = nullptr;
      if (place) place += position * map.strides[dim];
    }
    const size_t offset = (uchar *)tile - buf_dyn_shmem + i * 2;
    visit(place, buf_dyn_shmem + (map.swizzle_bytes ? swizzled(offset, map.swizzle_bytes) : offset));
  }
}
template <class... Ints> void tma_load(const CUtensorMap &map, Barrier &barrier, void *tile, Ints... at) {
  int64_t bytes = 0;
  visit_box(map, tile, {at...}, [&](char *from, uchar *to) {
    if (from) std::memcpy(to, from, 2); else std::memset(to, 0, 2);
    bytes += 2;
  });
  barrier.change(0, -bytes);
}
template <class... Ints> void tma_store(const CUtensorMap &map, void *tile, Ints... at) {
  visit_box(map, tile, {at...}, [&](char *to, uchar *from) { if (to) std::memcpy(to, from, 2); });
}
inline void tma_store_arrive() {}
template <int, bool> void tma_store_wait() {}

inline void ptx_stmatrix_m8n8_x4(void *row, uint a, uint b, uint c, uint d) {
  static uint parts[32][32][4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint mine[4] = {a, b, c, d};
  std::memcpy(parts[warp][lane], mine, 16);
  __syncwarp();
  for (int part = 0; part < 4; ++part) ((uint *)row)[part] = parts[warp][lane % 8 * 4 + part][lane / 8];
  __syncwarp();
}
}  // namespace tl
