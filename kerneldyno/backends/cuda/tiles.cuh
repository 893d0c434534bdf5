// Tiles of 16-bit elements: from global to shared memory with cp.async, from there to the fragments of mma.sync, and back
// to global memory. Sizes are template arguments, so that kernels of several tile shapes share them.

// Largest access, in bytes, that is aligned in every row of a contiguous tensor with rows of `pitch` 16-bit elements.
constexpr int access_bytes(long long pitch) { return pitch % 8 == 0 ? 16 : pitch % 4 == 0 ? 8 : pitch % 2 == 0 ? 4 : 2; }

// Places, in bytes, of the 16-byte chunks of a tile of COLUMNS elements a row. The chunks of a row are permuted, each aligned
// group of 8 (or 4, or 2, where no more divide the row) by an exclusive or with the row, so that both the 8 chunks of a row
// and one chunk of 8 rows lie in the 32 banks without conflict.
template <int COLUMNS>
struct Swizzle {
    static constexpr int CHUNKS = COLUMNS / 8, GROUP = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;

    __device__ static constexpr int key(int row) { return row / (8 / GROUP) % GROUP; }

    __device__ static unsigned place(int row, int chunk) { return (row * CHUNKS + (chunk ^ key(row))) * 16; }

    // The address `rows` rows and `chunks` chunks on from that of a place: with constants, an exclusive or and an offset. The
    // bits of `chunks` must be 0 in the place's chunk, those of `rows` in its row (or a multiple of 8), and the tile must
    // begin at a multiple of 128 bytes.
    __device__ static unsigned moved(unsigned address, int rows, int chunks) {
        return (address ^ ((chunks % GROUP) ^ key(rows)) * 16) + (rows * CHUNKS + chunks / GROUP * GROUP) * 16;
    }
};

constexpr bool power_of_two(int x) { return (x & (x - 1)) == 0; }

// Which chunks of a ROWS x COLUMNS tile each of THREADS threads copies: the i-th is chunk index threadIdx.x + i * THREADS.
template <int THREADS, int ROWS, int COLUMNS>
struct Copies {
    static constexpr int CHUNKS = COLUMNS / 8, TOTAL = ROWS * CHUNKS, EACH = (TOTAL + THREADS - 1) / THREADS;
    static constexpr bool EVEN = THREADS % CHUNKS == 0;  // a thread's chunks lie below each other, STEP rows apart
    static constexpr int STEP = THREADS / CHUNKS;
    static constexpr bool MOVED = EVEN && power_of_two(STEP);  // one address serves them all

    __device__ static int row(int i) { return EVEN ? threadIdx.x / CHUNKS + i * STEP : (threadIdx.x + i * THREADS) / CHUNKS; }
    __device__ static int chunk(int i) { return EVEN ? threadIdx.x % CHUNKS : (threadIdx.x + i * THREADS) % CHUNKS; }
    __device__ static bool mine(int i) { return TOTAL % THREADS == 0 || threadIdx.x + i * THREADS < TOTAL; }

    // What `target` of copy_tile counts from: the place of the first copy where that serves them all.
    __device__ static unsigned first_place() { return MOVED ? Swizzle<COLUMNS>::place(row(0), chunk(0)) : 0; }
    __device__ static unsigned target(unsigned first, int i) {
        return MOVED ? Swizzle<COLUMNS>::moved(first, i * STEP, 0) : first + Swizzle<COLUMNS>::place(row(i), chunk(i));
    }
};

// Where a copy comes from, in the tile's first column; `valid` says whether that row is there at all. One that is not reads
// as zeros.
struct Source {
    const element* start;
    bool valid;
};

// The sources of Copies from rows that lie PITCH elements apart. CHECK where `count`, the rows that are there from the tile's
// first on, may be less than the tile's.
template <typename Each, long long PITCH, bool CHECK>
struct EvenRows {
    const element* mine;
    int count;

    __device__ EvenRows(const element* first, int count) : mine(Each::EVEN ? first + Each::row(0) * PITCH + Each::chunk(0) * 8 : first), count(count) {}

    // The same for the tile that begins `rows` rows later.
    __device__ EvenRows after(int rows) const {
        EvenRows later = *this;
        later.mine += rows * PITCH;
        later.count -= rows;
        return later;
    }

    __device__ Source operator()(int i) const {
        return {mine + (Each::EVEN ? i * Each::STEP * PITCH : Each::row(i) * PITCH + Each::chunk(i) * 8), !CHECK || Each::row(i) < count};
    }
};

// Starts this thread's copies number PART, PART + PARTS, ... of a tile, which begins at column `first_column` of rows WIDTH
// elements long. `target` is the tile's address plus Each::first_place(); source_of(i) gives the Source of a copy. What lies
// outside becomes zero.
template <typename Each, int WIDTH, int PARTS, typename SourceOf>
__device__ inline void copy_tile(unsigned target, const SourceOf& source_of, int first_column, int part) {
    constexpr int ACCESS = access_bytes(WIDTH);
    constexpr bool WHOLE = WIDTH % (Each::CHUNKS * 8) == 0;
#pragma unroll
    for (int i = 0; i < Each::EACH; i++) {
        if (i % PARTS != part || !Each::mine(i)) continue;
        const Source source = source_of(i);
        const element* start = source.start + first_column;
        const int column = first_column + Each::chunk(i) * 8;
        const unsigned place = Each::target(target, i);
        if constexpr (ACCESS >= 4) {
#pragma unroll
            for (int piece = 0; piece < 8; piece += ACCESS / 2) {
                // what is not valid is not read, wherever it points
                copy_async<ACCESS>(place + piece * 2, start + piece, source.valid && (WHOLE || column + piece < WIDTH));
            }
        } else {  // cp.async copies no less than 4 aligned bytes
            Packet p = {};
#pragma unroll
            for (int piece = 0; piece < 8; piece++) {
                if (source.valid && column + piece < WIDTH) set_element(p, piece, start[piece]);
            }
            store_shared(place, p);
        }
    }
}

// Operands of multiply_add from a tile of COLUMNS elements a row. Each has a place for this lane, counted from the tile's
// start, and loads from the address of that place, moved on by a multiple of 16 rows and of 16 columns (2 chunks).

// A, 16x16: rows `first_row` to + 15, 16 columns.
template <int COLUMNS>
__device__ inline unsigned place_a(int first_row) {
    const int lane = threadIdx.x % 32;
    return Swizzle<COLUMNS>::place(first_row + lane % 16, lane / 16);
}

// B, twice 16x8, of a tile whose rows are the columns of B ("nt"): words 0 and 1 for rows `first_row` to + 7, 2 and 3 for the next 8.
template <int COLUMNS>
__device__ inline unsigned place_b_rows(int first_row) {
    const int lane = threadIdx.x % 32;
    return Swizzle<COLUMNS>::place(first_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// The same of a tile whose rows are the rows of B ("nn"): columns `first_column` to + 7, and the next 8.
template <int COLUMNS>
__device__ inline unsigned place_b_columns(int first_row, int first_column) {
    const int lane = threadIdx.x % 32;
    return Swizzle<COLUMNS>::place(first_row + lane % 16, first_column / 8 + lane / 16);
}

template <int COLUMNS>
__device__ inline void load_operand(unsigned (&words)[4], unsigned address, int rows, int columns) {
    load_matrices(words, Swizzle<COLUMNS>::moved(address, rows, columns / 8));
}

template <int COLUMNS>
__device__ inline void load_operand_transposed(unsigned (&words)[4], unsigned address, int rows, int columns) {
    load_matrices_transposed(words, Swizzle<COLUMNS>::moved(address, rows, columns / 8));
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
