// A plain name for each wgmma instruction: products of a warpgroup (128 threads), asynchronous, of operands that lie in
// shared memory, the left one also in registers. sm_90a. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// Thread t of a warpgroup holds of a 64 x N sum the rows t / 32 * 16 + t % 32 / 4 (sum[j][0], sum[j][1]) and that plus 8
// (sum[j][2], sum[j][3]), of these the columns j * 8 + t % 4 * 2 and the one after it.

#if DTYPE_FP16
#define WGMMA_TYPES "k16.f32.f16.f16"
#else
#define WGMMA_TYPES "k16.f32.bf16.bf16"
#endif

// Before the first product, and after registers that products read or add to were written.
__device__ inline void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the newest groups of products are unfinished.
template <int PENDING>
__device__ inline void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads and writes of a sum across this place: it does not know when a product writes it.
template <int COUNT>
__device__ inline void hold_registers(float (&sum)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        asm volatile("" : "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])::"memory");
    }
}

// Keeps the compiler from computing what follows from an address before this place, once for a whole loop, for which there
// are no registers.
__device__ inline unsigned hold_register(unsigned address) {
    asm volatile("" : "+r"(address));
    return address;
}

// Keeps the computation of `value`, which is never negative, before what waits after this place. ptxas moves a wait up over
// arithmetic, but not over a store: this one never happens.
__device__ inline void stay_before(float value, unsigned shared) {
    asm volatile("{ .reg .pred never; setp.lt.f32 never, %0, 0f00000000; @never st.shared.f32 [%1], %0; }" ::"f"(value), "r"(shared) : "memory");
}

// clang-format off
#define WGMMA_SUM(i) "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
#define WGMMA_TEXT_8 "%0, %1, %2, %3"
#define WGMMA_SUMS_8 WGMMA_SUM(0)
#define WGMMA_TEXT_16 WGMMA_TEXT_8 ", %4, %5, %6, %7"
#define WGMMA_SUMS_16 WGMMA_SUMS_8, WGMMA_SUM(1)
#define WGMMA_TEXT_32 WGMMA_TEXT_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_SUMS_32 WGMMA_SUMS_16, WGMMA_SUM(2), WGMMA_SUM(3)
#define WGMMA_TEXT_64 WGMMA_TEXT_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_SUMS_64 WGMMA_SUMS_32, WGMMA_SUM(4), WGMMA_SUM(5), WGMMA_SUM(6), WGMMA_SUM(7)
#define WGMMA_TEXT_80 WGMMA_TEXT_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_SUMS_80 WGMMA_SUMS_64, WGMMA_SUM(8), WGMMA_SUM(9)
#define WGMMA_TEXT_96 WGMMA_TEXT_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_SUMS_96 WGMMA_SUMS_80, WGMMA_SUM(10), WGMMA_SUM(11)
#define WGMMA_TEXT_112 WGMMA_TEXT_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_SUMS_112 WGMMA_SUMS_96, WGMMA_SUM(12), WGMMA_SUM(13)
#define WGMMA_TEXT_128 WGMMA_TEXT_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_SUMS_128 WGMMA_SUMS_112, WGMMA_SUM(14), WGMMA_SUM(15)
#define WGMMA_TEXT_144 WGMMA_TEXT_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_SUMS_144 WGMMA_SUMS_128, WGMMA_SUM(16), WGMMA_SUM(17)
#define WGMMA_TEXT_160 WGMMA_TEXT_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_SUMS_160 WGMMA_SUMS_144, WGMMA_SUM(18), WGMMA_SUM(19)
#define WGMMA_TEXT_176 WGMMA_TEXT_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_SUMS_176 WGMMA_SUMS_160, WGMMA_SUM(20), WGMMA_SUM(21)
#define WGMMA_TEXT_192 WGMMA_TEXT_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_SUMS_192 WGMMA_SUMS_176, WGMMA_SUM(22), WGMMA_SUM(23)
#define WGMMA_TEXT_208 WGMMA_TEXT_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_SUMS_208 WGMMA_SUMS_192, WGMMA_SUM(24), WGMMA_SUM(25)
#define WGMMA_TEXT_224 WGMMA_TEXT_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_SUMS_224 WGMMA_SUMS_208, WGMMA_SUM(26), WGMMA_SUM(27)
#define WGMMA_TEXT_240 WGMMA_TEXT_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_SUMS_240 WGMMA_SUMS_224, WGMMA_SUM(28), WGMMA_SUM(29)
#define WGMMA_TEXT_256 WGMMA_TEXT_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_SUMS_256 WGMMA_SUMS_240, WGMMA_SUM(30), WGMMA_SUM(31)

// the numbers are those of the operands after the sum's N / 2
#define WGMMA(N, I0, I1, I2, I3, I4, I5, I6)                                                                                             \
    template <bool ACCUMULATE, bool B_TRANSPOSED>                                                                                        \
    struct Warpgroup<N, ACCUMULATE, B_TRANSPOSED> {                                                                                      \
        __device__ static void shared(float (&sum)[N / 8][4], uint64 a, uint64 b) {                                                      \
            asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #I2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N WGMMA_TYPES              \
                         " {" WGMMA_TEXT_##N "}, %" #I0 ", %" #I1 ", add, 1, 1, 0, %" #I3 "; }"                                          \
                         : WGMMA_SUMS_##N : "l"(a), "l"(b), "n"(int(ACCUMULATE)), "n"(int(B_TRANSPOSED)));                               \
        }                                                                                                                                \
        __device__ static void registers(float (&sum)[N / 8][4], const unsigned (&a)[4], uint64 b) {                                     \
            asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #I5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N WGMMA_TYPES              \
                         " {" WGMMA_TEXT_##N "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", add, 1, 1, %" #I6 "; }"             \
                         : WGMMA_SUMS_##N                                                                                                \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ACCUMULATE)), "n"(int(B_TRANSPOSED)));            \
        }                                                                                                                                \
    };

template <int N, bool ACCUMULATE, bool B_TRANSPOSED>
struct Warpgroup;

WGMMA(8, 4, 5, 6, 7, 8, 9, 10)
WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

// Starts sum[64 x N] (+)= a[64 x 16] @ b[16 x N]; where not ACCUMULATE the sum is overwritten. The operands are descriptors
// of shared memory (descriptor.cuh) or, for a in registers, the fragments of m16n8k16. B_TRANSPOSED: b lies as [16, N] with N
// fastest, not as [N, 16].
template <int N, bool ACCUMULATE, bool B_TRANSPOSED>
__device__ inline void multiply_shared(float (&sum)[N / 8][4], uint64 a, uint64 b) {
    Warpgroup<N, ACCUMULATE, B_TRANSPOSED>::shared(sum, a, b);
}

template <int N, bool ACCUMULATE, bool B_TRANSPOSED>
__device__ inline void multiply_registers(float (&sum)[N / 8][4], const unsigned (&a)[4], uint64 b) {
    Warpgroup<N, ACCUMULATE, B_TRANSPOSED>::registers(sum, a, b);
}

// The opposite of load_matrices (ptx.cuh): lane l gives the address of row l % 8 of matrix l / 8, and brings of each matrix the
// elements (l / 4, l % 4 * 2) and the one after it.
__device__ inline void store_matrices(unsigned shared, const unsigned (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}
