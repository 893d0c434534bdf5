// The vocabulary of the kernels: element types, packets of 16 bytes, and a plain name for each PTX instruction used.
// Everything that only a GPU can do is in this file, so that the kernels below it are ordinary C++.

typedef unsigned long long uint64;

#if DTYPE_FP32
typedef float element;
#else
typedef unsigned short element;  // the bits of an fp16 or bf16 number
#endif

constexpr int VECTOR = 16 / sizeof(element);  // elements in a packet

struct alignas(16) Packet {
    unsigned word[4];
};

// ---- conversion: 16-bit numbers travel in pairs, the first in the low half -------------------------------------

__device__ inline void unpack_pair(unsigned pair, float& first, float& second) {
#if DTYPE_FP16
    asm("{ .reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }" : "=f"(first), "=f"(second) : "r"(pair));
#else
    first = __uint_as_float(pair << 16);  // bf16 is the upper half of fp32
    second = __uint_as_float(pair & 0xffff0000u);
#endif
}

__device__ inline unsigned pack_pair(float first, float second) {
    unsigned pair;
#if DTYPE_FP16
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(first), "f"(second));
#else
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(first), "f"(second));
#endif
    return pair;
}

__device__ inline float word_as_float(unsigned word) { return __uint_as_float(word); }

__device__ inline unsigned float_as_word(float value) { return __float_as_uint(value); }

// ---- arithmetic ------------------------------------------------------------------------------------------------

// 2^x with an error of 2 units in the last place (PTX ISA, ex2.approx.ftz.f32): ample for a 16-bit result.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x with an error of 1 unit in the last place.
__device__ inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float exp_exact(float x) { return expf(x); }

__device__ inline int from_first_lane(int value) { return __shfl_sync(0xffffffffu, value, 0); }

__device__ inline float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// ---- global memory ---------------------------------------------------------------------------------------------

enum class Load { cached, stream, prefetch };
enum class Store { cached, stream };

template <Load HINT>
__device__ inline Packet load_packet(const void* address) {
    Packet p;
    if constexpr (HINT == Load::cached) {
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3]) : "l"(address));
    } else if constexpr (HINT == Load::stream) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3]) : "l"(address));
    } else {
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3]) : "l"(address));
    }
    return p;
}

template <Store HINT>
__device__ inline void store_packet(void* address, const Packet& p) {
    if constexpr (HINT == Store::cached) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(p.word[0]), "r"(p.word[1]), "r"(p.word[2]), "r"(p.word[3]) : "memory");
    } else {
        asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(p.word[0]), "r"(p.word[1]), "r"(p.word[2]), "r"(p.word[3]) : "memory");
    }
}

// ---- shared memory ---------------------------------------------------------------------------------------------

__device__ inline unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
    return dynamic_shared_memory;
}

__device__ inline unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

__device__ inline void store_shared(unsigned shared, const Packet& p) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(p.word[0]), "r"(p.word[1]), "r"(p.word[2]), "r"(p.word[3]) : "memory");
}

__device__ inline void store_shared(unsigned shared, unsigned word) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(word) : "memory"); }

// Starts a copy of 4, 8 or 16 bytes from global to shared memory; fills with zeros, and reads nothing, where not valid.
template <int BYTES>
__device__ inline void copy_async(unsigned shared, const void* global, bool valid) {
    const int bytes = valid ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES), "r"(bytes) : "memory");
    }
}

__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's newest groups of copies are unfinished.
template <int PENDING>
__device__ inline void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- tensor cores ----------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8, and receives of each
// matrix the elements (l / 4, l % 4 * 2) and the one after it.
__device__ inline void load_matrices(unsigned (&words)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(shared) : "memory");
}

// The same, each matrix transposed.
__device__ inline void load_matrices_transposed(unsigned (&words)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(shared) : "memory");
}

// sum[16x8] += a[16x16] @ b[16x8]. Fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16".
__device__ inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if DTYPE_FP16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- thread-block clusters -------------------------------------------------------------------------------------

__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }

__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Writes two floats into the shared memory of the cluster's block `rank`, at the place that `shared` has in this block.
__device__ inline void store_to_block(unsigned shared, int rank, float first, float second) {
    asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; st.shared::cluster.v2.f32 [remote], {%2, %3}; }"
                 ::"r"(shared), "r"(rank), "f"(first), "f"(second) : "memory");
}

// ---- packets and numbers ---------------------------------------------------------------------------------------

__device__ inline void unpack(const Packet& p, float (&value)[VECTOR]) {
    if constexpr (VECTOR == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] = word_as_float(p.word[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) unpack_pair(p.word[i], value[2 * i], value[2 * i + 1]);
    }
}

__device__ inline Packet pack(const float (&value)[VECTOR]) {
    Packet p;
    if constexpr (VECTOR == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) p.word[i] = float_as_word(value[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) p.word[i] = pack_pair(value[2 * i], value[2 * i + 1]);
    }
    return p;
}

__device__ inline unsigned element_bits(element value) {
#if DTYPE_FP32
    return float_as_word(value);
#else
    return value;
#endif
}

// The greater of each two elements, in packed form; a NaN gives way to a number.
__device__ inline Packet greater(const Packet& a, const Packet& b) {
    Packet p;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if DTYPE_FP32
        p.word[i] = float_as_word(fmaxf(word_as_float(a.word[i]), word_as_float(b.word[i])));
#elif DTYPE_FP16
        asm("max.f16x2 %0, %1, %2;" : "=r"(p.word[i]) : "r"(a.word[i]), "r"(b.word[i]));
#else
        asm("max.bf16x2 %0, %1, %2;" : "=r"(p.word[i]) : "r"(a.word[i]), "r"(b.word[i]));
#endif
    }
    return p;
}

// Puts element number i (a constant after unrolling) into a packet.
__device__ inline void set_element(Packet& p, int i, element value) {
    const unsigned bits = element_bits(value);
    if constexpr (VECTOR == 4) {
        p.word[i] = bits;
    } else {
        p.word[i / 2] = i % 2 ? (p.word[i / 2] & 0xffffu) | bits << 16 : (p.word[i / 2] & 0xffff0000u) | bits;
    }
}

// Takes element number i (a constant after unrolling) out of a packet.
__device__ inline element get_element(const Packet& p, int i) {
#if DTYPE_FP32
    return word_as_float(p.word[i]);
#else
    return static_cast<element>(i % 2 ? p.word[i / 2] >> 16 : p.word[i / 2] & 0xffffu);
#endif
}
