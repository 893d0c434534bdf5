"""C text that the matrix products share: packing into panels, the register tile, and products of rows that are not packed.

Each follows `_vectors.prelude` and an enum of the sizes that it names.
"""

PACKING = """
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
// a loop to unroll altogether: gcc 12 keeps some tiles in memory where it decides for itself (a fifth of the speed)
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)
typedef float v4 __attribute__((vector_size(16)));
// four rows of W become W columns of four: 4 x 4 transposes in registers, half the time of storing lane by lane
INLINE void transpose(const element *from, int64_t pitch, float *to, int64_t lines) {
    vf rows[4];
    for (int i = 0; i < 4; i++) rows[i] = load(from + i * pitch);
    for (int q = 0; q < W / 4; q++) {
        v4 r[4];
        for (int i = 0; i < 4; i++) memcpy(&r[i], (float *)&rows[i] + 4 * q, sizeof(v4));
        v4 low = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), high = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
        v4 low2 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), high2 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
        v4 columns[4] = {__builtin_shufflevector(low, low2, 0, 1, 4, 5), __builtin_shufflevector(low, low2, 2, 3, 6, 7),
                         __builtin_shufflevector(high, high2, 0, 1, 4, 5), __builtin_shufflevector(high, high2, 2, 3, 6, 7)};
        for (int i = 0; i < 4; i++) memcpy(to + (4 * q + i) * lines, &columns[i], sizeof(v4));
    }
}
// rows of a matrix along k become a panel [depth][lines]; `count` rows exist, the others are zeros
INLINE void pack_rows(const element *from, int64_t pitch, int64_t count, int64_t lines, int64_t depth, int64_t padded, float *panel) {
    for (int64_t line = 0; line < lines;) {
        const element *row = from + line * pitch;
        int64_t step = line + 4 <= LEAST(count, lines) ? 4 : 1, p = 0;
        if (step == 4) for (; p + W <= depth; p += W) transpose(row + p, pitch, panel + p * lines + line, lines);
        for (; p < padded; p++)
            for (int64_t i = 0; i < step; i++)
                panel[p * lines + line + i] = line < count && p < depth ? load_part(row + i * pitch + p, 1, splat(0))[0] : 0;
        line += step;
    }
}
// columns of B [k, n] become a panel [depth][NR]; `count` columns exist
INLINE void pack_columns(const element *from, int64_t pitch, int64_t count, int64_t depth, int64_t padded, float *panel) {
    for (int64_t p = 0; p < padded; p++)
        for (int64_t j = 0; j < NR; j += W) {
            int64_t left = p < depth ? count - j : 0;
            const element *at = from + p * pitch + j;
            vf v = left >= W ? load(at) : left > 0 ? load_part(at, left, splat(0)) : splat(0);
            memcpy(panel + p * NR + j, &v, sizeof v);
        }
}
"""
"""Needs NR, the columns of a panel of B."""

TILE = """
// a partial sum goes to `sums` (C itself where C is fp32), the last one to C
INLINE void put(vf v, float *sums, element *c, int64_t count, int first, int last) {
    int64_t bytes = count * sizeof(float);
    vf before = splat(0);
    if (count >= W) {
        if (!first) { memcpy(&before, sums, sizeof v); v += before; }
        if (last) store(c, v); else memcpy(sums, &v, sizeof v);
    } else if (count > 0) {
        if (!first) { memcpy(&before, sums, bytes); v += before; }
        if (last) store_part(c, v, count); else memcpy(sums, &v, bytes);
    }
}
static void tile(const float *a, const float *b, float *sums, int64_t sums_pitch, element *c, int64_t pitch,
                 int64_t rows, int64_t columns, int64_t depth, int first, int last) {
    vf tile[MR][NV];
    for (int i = 0; i < MR; i++) for (int j = 0; j < NV; j++) tile[i][j] = splat(0);
    for (int i = 0; i < MR; i++) if (i < rows) __builtin_prefetch(sums + i * sums_pitch, 1);  // they are needed after the loop
    for (int64_t p = 0; p < depth; p += KU)
        for (int u = 0; u < KU; u++, a += MR, b += NR) {
            vf line[NV];
            for (int j = 0; j < NV; j++) memcpy(&line[j], b + j * W, sizeof(vf));
            for (int i = 0; i < MR; i++) for (int j = 0; j < NV; j++) tile[i][j] += a[i] * line[j];
        }
    for (int i = 0; i < MR; i++)
        if (i < rows)
            for (int j = 0; j < NV; j++)
                put(tile[i][j], sums + i * sums_pitch + j * W, c + i * pitch + j * W, columns - j * W, first, last);
}
"""
"""Needs MR, NV (NR = NV * W) and KU, the steps in one turn of the loop."""


ROWS = """
// a row as fp32 times a factor, filled up with zeros to `padded` elements (whole vectors)
INLINE void widen_row(const element *from, int64_t count, int64_t padded, float factor, float *to) {
    for (int64_t i = 0; i < padded; i += W) {
        vf v = i + W <= count ? load(from + i) : i < count ? load_part(from + i, count - i, splat(0)) : splat(0);
        v *= factor;
        memcpy(to + i, &v, sizeof v);
    }
}
"""
"""Needs no sizes."""

DOTS = """
// the sums of the lanes of four vectors
INLINE v4 sums_of_lanes(const vf *v) {
    v4 r[4];
    for (int i = 0; i < 4; i++) {
        v4 parts[W / 4];
        memcpy(parts, v + i, sizeof parts);
        r[i] = parts[0];
        for (int q = 1; q < W / 4; q++) r[i] += parts[q];
    }
    v4 one = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5) + __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
    v4 two = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5) + __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    return __builtin_shufflevector(one, two, 0, 1, 4, 5) + __builtin_shufflevector(one, two, 2, 3, 6, 7);
}
// DR rows of a, as `widen_row` makes them, times up to four rows of b that are read where they lie; four sums a row go to `sums`
static void dots(const float *a, int64_t a_pitch, const element *b, int64_t b_pitch, int64_t count, int64_t depth, float *sums,
                 int64_t pitch) {
    const element *line[4];
    EACH(j, 4) line[j] = b + LEAST(j, count - 1) * b_pitch;
    vf tile[DR][4];
    EACH(i, DR) EACH(j, 4) tile[i][j] = splat(0);
    for (int64_t p = 0; p < depth; p += W) {
        vf right[4];
        if (p + W <= depth) EACH(j, 4) right[j] = load(line[j] + p);
        else EACH(j, 4) right[j] = load_part(line[j] + p, depth - p, splat(0));
        EACH(i, DR) {
            vf left;
            memcpy(&left, a + i * a_pitch + p, sizeof left);
            EACH(j, 4) tile[i][j] += left * right[j];
        }
    }
    EACH(i, DR) {
        v4 sum = sums_of_lanes(tile[i]);
        memcpy(sums + i * pitch, &sum, sizeof sum);
    }
}
"""
"""Needs DR and follows `PACKING`."""
