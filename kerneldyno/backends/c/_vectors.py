"""C text that the kernels share: vectors of fp32, their loads and stores for each dtype, and exp."""

_TYPES = """\
#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum {{ BYTES = {vector_bytes}, W = BYTES / 4 }};  // bytes and fp32 lanes of a vector
typedef float vf __attribute__((vector_size({vector_bytes})));
typedef int32_t vi __attribute__((vector_size({vector_bytes})));
typedef uint32_t vu __attribute__((vector_size({vector_bytes})));
typedef uint16_t vs __attribute__((vector_size({half_bytes})));
"""

_ELEMENT = {
    "fp32": """
typedef float element;
typedef vf packed;
INLINE vf widen(packed v) { return v; }
INLINE packed narrow(vf v) { return v; }
""",
    "bf16": """
typedef uint16_t element;
typedef vs packed;
INLINE vf widen(packed v) { return (vf)(__builtin_convertvector(v, vu) << 16); }
INLINE packed narrow(vf v) {  // to nearest, ties to even; a NaN stays one
    vu bits = (vu)v, nan = (vu)(v != v);
    vu near = bits + 0x7fff + ((bits >> 16) & 1);
    return __builtin_convertvector(((near & ~nan) | ((bits | 0x400000) & nan)) >> 16, vs);
}
""",
    # integers, since gcc 12 converts _Float16 vectors lane by lane and clang 14 has no _Float16 on x86-64
    "fp16": """
typedef uint16_t element;
typedef vs packed;
INLINE vf widen(packed v) {
    vu bits = __builtin_convertvector(v, vu), size = (bits & 0x7fff) << 13;
    vu value = (vu)((vf)size * 0x1p112f);  // moves the exponent's bias from 15 to 127, and is exact for subnormals
    vu special = (vu)(size >= 0x7c00u << 13);
    return (vf)(value | (0x7f800000 & special) | (bits & 0x8000) << 16);
}
INLINE packed narrow(vf v) {  // to nearest, ties to even; a NaN stays one
    vu bits = (vu)v, size = bits & 0x7fffffff;
    vu normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    vu tiny = (vu)((vf)size + 0.5f) - 0x3f000000;  // the unit in the last place of 0.5 is fp16's smallest subnormal
    vu small = (vu)(size < 113u << 23), large = (vu)(size >= 143u << 23), nan = (vu)(size > 0x7f800000);
    vu value = (tiny & small) | (((normal & ~large) | (0x7c00 & large)) & ~small) | (0x200 & nan);
    return __builtin_convertvector(value | (bits >> 16 & 0x8000), vs);
}
""",
}

_MEMORY = """
INLINE vf load(const element *p) { packed v; memcpy(&v, p, sizeof v); return widen(v); }
INLINE void store(element *p, vf v) { packed h = narrow(v); memcpy(p, &h, sizeof h); }
INLINE vf load_part(const element *p, int64_t count, vf fill) {  // the first lanes from memory, the others from fill
    packed v = narrow(fill);
    memcpy(&v, p, count * sizeof(element));
    return widen(v);
}
INLINE void store_part(element *p, vf v, int64_t count) { packed h = narrow(v); memcpy(p, &h, count * sizeof(element)); }
INLINE void stream(element *p, vf v) {  // past the caches where p is aligned, which saves reading the line first
    packed h = narrow(v);
    if ((uintptr_t)p % sizeof h) { memcpy(p, &h, sizeof h); return; }
#if defined(__clang__)
    __builtin_nontemporal_store(h, (packed *)p);
#elif defined(__AVX__)
    typedef long long v32 __attribute__((vector_size(32)));  // builtins, since immintrin.h alone compiles for 0.5 s
    v32 parts[(sizeof h + 31) / 32];
    memcpy(parts, &h, sizeof h);
    if (sizeof h < 32) memcpy(p, &h, sizeof h);
    else for (unsigned i = 0; i < sizeof h / 32; i++) __builtin_ia32_movntdq256((v32 *)p + i, parts[i]);
#else
    memcpy(p, &h, sizeof h);
#endif
}
INLINE void fence(void) {  // streamed stores become visible to other threads
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#else
    __sync_synchronize();
#endif
}
INLINE vf splat(float s) { return (vf){0} + s; }
"""

EXP = """
INLINE vf larger(vf a, vf b) {  // b where a is NaN; a loop over lanes would be scalar code with gcc 12
    vi first = a > b;
    return (vf)(((vi)a & first) | ((vi)b & ~first));
}
INLINE float sum_lanes(vf v) { float s = 0; for (int i = 0; i < W; i++) s += v[i]; return s; }
INLINE float largest_lane(vf v) { float s = v[0]; for (int i = 1; i < W; i++) s = v[i] > s ? v[i] : s; return s; }
// e^x for x <= 0, within 2 ulp; 0 below -86.5 (2.7e-38), so that 2^count needs no subnormal. Cephes expf.c (Moshier):
// x = count ln 2 + r, |r| <= ln 2 / 2, ln 2 in two parts, minimax polynomial of degree 5 for (e^r - 1 - r) / r^2
INLINE vf exp_vector(vf x) {
    const float round = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
    vf shifted = x * 1.44269504088896341f + round, count = shifted - round;
    vf r = x - count * 0.693359375f + count * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vf)(((vi)p + ((vi)shifted << 23)) & ~(vi)(x < -86.5f));
}
"""


def prelude(vector_bytes: int, dtype: str) -> str:
    """Return the C text for vectors of `vector_bytes` bytes of fp32 and for `element`, the type in memory.

    It gives `vf`, `W` (lanes), `load`, `store`, `load_part`, `store_part`, `stream`, `fence` and `splat`.

    Args:
        vector_bytes: Bytes of a vector of fp32: 16, 32 or 64.
        dtype: fp32, fp16 or bf16.
    """
    return _TYPES.format(vector_bytes=vector_bytes, half_bytes=vector_bytes // 2) + _ELEMENT[dtype] + _MEMORY
