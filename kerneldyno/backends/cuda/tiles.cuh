// Tiles of 16-bit elements: from global to shared memory with cp.async, from there to the fragments of mma.sync, and back
// to global memory. Sizes are template arguments, so that kernels of several tile shapes share them.

// Largest access, in bytes, that is aligned in every row of a contiguous tensor with rows of `pitch` 16-bit elements.
constexpr int access_bytes(long long pitch) { return pitch % 8 == 0 ? 16 : pitch % 4 == 0 ? 8 : pitch % 2 == 0 ? 4 : 2; }

// Place in bytes of a 16-byte chunk in a tile of COLUMNS elements a row. The chunks of a row are permuted by an exclusive
// or with the row, so that both the 8 chunks of a row and one chunk of 8 rows lie in the 32 banks without conflict.
// Where a row is not a power of two of chunks, only its aligned groups of 8 (or 4, or 2) chunks are permuted.
template <int COLUMNS>
__device__ inline unsigned swizzled(int row, int chunk) {
    constexpr int CHUNKS = COLUMNS / 8, GROUP = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
    const int key = row / (8 / GROUP) % GROUP;
    return (row * CHUNKS + (chunk ^ key)) * 16;
}

// One row of a tensor: where it begins, and whether it is there at all; a row that is not reads as zeros.
struct Row {
    const element* start;
    bool valid;
};

constexpr int copies_per_thread(int threads, int rows, int columns) { return (rows * (columns / 8) + threads - 1) / threads; }

// The row of a ROWS x COLUMNS tile that the i-th copy of this thread belongs to; for i below copies_per_thread.
template <int THREADS, int COLUMNS>
__device__ inline int copied_row(int i) {
    constexpr int CHUNKS = COLUMNS / 8;
    // where THREADS is a multiple of CHUNKS, the second form leaves all but a constant to be computed once
    return THREADS % CHUNKS == 0 ? threadIdx.x / CHUNKS + i * (THREADS / CHUNKS) : (threadIdx.x + i * THREADS) / CHUNKS;
}

// Rows that lie PITCH elements apart, as the source of a tile of COLUMNS elements a row. CHECK where `count`, the rows that are
// there from the tile's first on, may be less than the tile's.
template <int THREADS, int COLUMNS, long long PITCH, bool CHECK>
struct EvenRows {
    static constexpr int CHUNKS = COLUMNS / 8;
    static constexpr bool EVEN = THREADS % CHUNKS == 0;  // then a thread's rows are a constant apart: one address serves them all
    const element* mine;
    int count;

    __device__ EvenRows(const element* first, int count) : mine(EVEN ? first + threadIdx.x / CHUNKS * PITCH : first), count(count) {}

    // The same for the tile that begins `rows` rows later.
    __device__ EvenRows after(int rows) const {
        EvenRows later = *this;
        later.mine += rows * PITCH;
        later.count -= rows;
        return later;
    }

    __device__ Row operator()(int i, int local_row) const {
        return {mine + (EVEN ? i * (THREADS / CHUNKS) * PITCH : local_row * PITCH), !CHECK || local_row < count};
    }
};

// Starts copying chunks PART, PART + PARTS, ... of each thread of a ROWS x COLUMNS tile into its swizzled place. The tile
// begins at column `first_column` of rows WIDTH elements long; row_of(i, row) gives the Row of the thread's i-th copy,
// which is the tile's row `row`. What lies outside becomes zero.
template <int THREADS, int ROWS, int COLUMNS, int WIDTH, int PARTS, typename RowOf>
__device__ inline void copy_tile(unsigned shared, const RowOf& row_of, int first_column, int part) {
    constexpr int CHUNKS = COLUMNS / 8, TOTAL = ROWS * CHUNKS, ACCESS = access_bytes(WIDTH);
#pragma unroll
    for (int i = 0; i < copies_per_thread(THREADS, ROWS, COLUMNS); i++) {
        const int index = threadIdx.x + i * THREADS;
        if (i % PARTS != part || (TOTAL % THREADS != 0 && index >= TOTAL)) continue;
        const int local_row = copied_row<THREADS, COLUMNS>(i);
        const int chunk = THREADS % CHUNKS == 0 ? threadIdx.x % CHUNKS : index % CHUNKS;
        const int column = first_column + chunk * 8;
        const Row row = row_of(i, local_row);
        const element* source = row.start + column;
        const unsigned target = shared + swizzled<COLUMNS>(local_row, chunk);
        if constexpr (ACCESS >= 4) {
#pragma unroll
            for (int piece = 0; piece < 8; piece += ACCESS / 2) {
                const bool valid = row.valid && (WIDTH % COLUMNS == 0 || column + piece < WIDTH);
                copy_async<ACCESS>(target + piece * 2, source + piece, valid);  // what is not valid is not read, wherever it points
            }
        } else {  // cp.async copies no less than 4 aligned bytes
            Packet p = {};
#pragma unroll
            for (int piece = 0; piece < 8; piece++) {
                if (row.valid && column + piece < WIDTH) set_element(p, piece, source[piece]);
            }
            store_shared(target, p);
        }
    }
}

// A 16x16 operand A of multiply_add from a tile of rows; `step` counts 16 columns.
template <int COLUMNS>
__device__ inline void load_a(unsigned (&words)[4], unsigned tile, int first_row, int step, int lane) {
    load_matrices(words, tile + swizzled<COLUMNS>(first_row + lane % 16, step * 2 + lane / 16));
}

// Two 16x8 operands B from a tile whose rows are the columns of B ("nt"): words 0 and 1 for 8 of them, 2 and 3 for the next.
template <int COLUMNS>
__device__ inline void load_b_rows(unsigned (&words)[4], unsigned tile, int first_row, int step, int lane) {
    load_matrices(words, tile + swizzled<COLUMNS>(first_row + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
}

// The same from a tile whose rows are the rows of B ("nn"): `step` counts 16 rows.
template <int COLUMNS>
__device__ inline void load_b_columns(unsigned (&words)[4], unsigned tile, int first_column, int step, int lane) {
    load_matrices_transposed(words, tile + swizzled<COLUMNS>(step * 16 + lane % 16, first_column / 8 + lane / 16));
}

// Writes two neighbours of a row that is WIDTH elements long; COLUMNS says which tiles end exactly at the row's end.
template <int WIDTH, int COLUMNS>
__device__ inline void store_pair(element* row, int column, unsigned pair) {
    element* target = row + column;
    if constexpr (WIDTH % 2 == 0) {
        if (WIDTH % COLUMNS == 0 || column < WIDTH) *reinterpret_cast<unsigned*>(target) = pair;
    } else {
        if (column < WIDTH) target[0] = static_cast<element>(pair & 0xffffu);
        if (column + 1 < WIDTH) target[1] = static_cast<element>(pair >> 16);
    }
}

// Writes 8 neighbours of a row, in accesses as wide as the rows allow.
template <int WIDTH, int COLUMNS>
__device__ inline void store_chunk(element* row, int column, const Packet& p) {
    constexpr int ACCESS = access_bytes(WIDTH);
    element* target = row + column;
    if constexpr (ACCESS == 16) {
        if (WIDTH % COLUMNS == 0 || column < WIDTH) store_packet<Store::cached>(target, p);
    } else if constexpr (ACCESS >= 4) {
#pragma unroll
        for (int word = 0; word < 4; word++) {
            if (column + word * 2 < WIDTH) *reinterpret_cast<unsigned*>(target + word * 2) = p.word[word];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (column + i < WIDTH) target[i] = get_element(p, i);
        }
    }
}
