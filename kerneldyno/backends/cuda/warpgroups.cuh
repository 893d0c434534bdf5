// The tiles of a product C = A @ B that a block works through with wgmma: what gemm and moe_gemm share. Constants: N, K,
// B_TRANSPOSED (true: B is [n, k]; false: [k, n]), TILES_M, BLOCK_M, BLOCK_N, BLOCK_K, CONSUMERS, STAGES, C_SLABS, GROUP_M,
// BLOCKS, PRODUCER_REGISTERS, CONSUMER_REGISTERS, C_CLIPPED (the map of C ends where the last rows of its tiles do).
// Macro C_MAPPED: 1 where C's rows allow a tensor map.
//
// One warp copies tiles of A and B by tensor map into STAGES slots, which two barriers a slot pass back and forth, and runs
// ahead into the next tile of C while the last is written. CONSUMERS warpgroups each multiply HIGH rows, with one group of
// products in flight: a slot is given back when the products of the next are queued. They write C through C_SLABS slabs of
// 64 x 64 elements each, by tensor map, so that the writes of one slab run beside the conversion of the next.
// Source of the schedule: CUTLASS, include/cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp.

constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int HIGH = BLOCK_M / CONSUMERS, PARTS = HIGH / 64;  // rows of a warpgroup, and how many products high they are
constexpr int TILES_N = (N + BLOCK_N - 1) / BLOCK_N, TILES = TILES_M * TILES_N;
constexpr int K_TILES = (K + BLOCK_K - 1) / BLOCK_K, STEPS = BLOCK_K / 16, K_SLABS = BLOCK_K / 64, N_SLABS = BLOCK_N / 64;
constexpr int A_SLAB = BLOCK_M * SWIZZLE_ROW, HIGH_SLAB = HIGH * SWIZZLE_ROW;  // bytes of 64 columns of A, and of a warpgroup's part of them
constexpr int B_SLAB = (B_TRANSPOSED ? BLOCK_N : BLOCK_K) * SWIZZLE_ROW;       // 64 elements of each row of B's tile
constexpr int A_BYTES = K_SLABS * A_SLAB, B_BYTES = BLOCK_N * BLOCK_K * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int C_SLAB = 64 * SWIZZLE_ROW, C_BYTES = C_SLABS * C_SLAB;  // of one warpgroup
constexpr int C_AT = STAGES * STAGE_BYTES, BARRIERS_AT = C_AT + CONSUMERS * C_BYTES;

enum SlotBarrier { FULL, EMPTY = FULL + STAGES, BARRIERS = EMPTY + STAGES };
enum NamedBarrier { WRITE = 1 };  // one a warpgroup

typedef float Sums[PARTS][BLOCK_N / 8][4];

// A tile of C: the matrix of B that it takes, its rows [first_row, end_row), of which it has at most BLOCK_M, and its first
// column. One without rows is passed over.
struct Tile {
    int matrix, first_row, end_row, first_column;

    __device__ bool needed() const { return first_row < end_row; }
};

// Row and column of a tile among the tiles: those that run together share GROUP_M rows of tiles, so that their parts of A
// and B stay in L2.
struct Place {
    int row, column;

    __device__ Place(int tile) {
        const int first = tile / (GROUP_M * TILES_N) * GROUP_M, rows = TILES_M - first < GROUP_M ? TILES_M - first : GROUP_M;
        const int place = tile % (GROUP_M * TILES_N);
        row = first + place % rows;
        column = place / rows;
    }
};

template <typename TileAt>
__device__ inline void produce(const TileAt& tile_at, unsigned shared, const TensorMap& a, const TensorMap& b) {
    Ring ring;
#pragma unroll 1
    for (int index = blockIdx.x; index < TILES; index += BLOCKS) {
        const Tile tile = tile_at(index);
        if (!tile.needed()) continue;
        const int high = tile.end_row - tile.first_row;
        int bytes = B_BYTES;
#pragma unroll
        for (int consumer = 0; consumer < CONSUMERS; consumer++) bytes += consumer * HIGH < high ? K_SLABS * HIGH_SLAB : 0;
#pragma unroll 1
        for (int k_tile = 0; k_tile < K_TILES; k_tile++) {
            const unsigned stage = shared + ring.slot * STAGE_BYTES, full = shared + BARRIERS_AT + (FULL + ring.slot) * 8;
            barrier_wait(shared + BARRIERS_AT + (EMPTY + ring.slot) * 8, ring.parity ^ 1);
            barrier_expect(full, bytes);
#pragma unroll
            for (int consumer = 0; consumer < CONSUMERS; consumer++) {
                if (consumer * HIGH >= high) break;  // no rows for this warpgroup
#pragma unroll
                for (int slab = 0; slab < K_SLABS; slab++) {
                    copy_box(stage + slab * A_SLAB + consumer * HIGH_SLAB, a, full, k_tile * BLOCK_K + slab * 64, tile.first_row + consumer * HIGH, 0, 0);
                }
            }
#pragma unroll
            for (int slab = 0; slab < B_BYTES / B_SLAB; slab++) {
                const int x = B_TRANSPOSED ? k_tile * BLOCK_K + slab * 64 : tile.first_column + slab * 64;
                copy_box(stage + A_BYTES + slab * B_SLAB, b, full, x, B_TRANSPOSED ? tile.first_column : k_tile * BLOCK_K, tile.matrix, 0);
            }
            ring.advance();
        }
    }
}

// Queues the products of one slot, which are added to the sums or, where FIRST, replace them.
template <bool FIRST>
__device__ inline void multiply_slot(Sums& sum, unsigned a_at, unsigned b_at) {
    const uint64 a = rows_descriptor(hold_register(a_at));
    const uint64 b = B_TRANSPOSED ? rows_descriptor(hold_register(b_at)) : columns_descriptor(hold_register(b_at), B_SLAB);
#pragma unroll
    for (int part = 0; part < PARTS; part++) hold_registers(sum[part]);
    warpgroup_fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const uint64 b_step = descriptor_after(b, B_TRANSPOSED ? step / 4 * B_SLAB + step % 4 * 32 : step * 2 * SWIZZLE_ATOM);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const uint64 a_step = descriptor_after(a, step / 4 * A_SLAB + part * 64 * SWIZZLE_ROW + step % 4 * 32);
            if (FIRST && step == 0) {
                multiply_shared<BLOCK_N, false, !B_TRANSPOSED>(sum[part], a_step, b_step);
            } else {
                multiply_shared<BLOCK_N, true, !B_TRANSPOSED>(sum[part], a_step, b_step);
            }
        }
    }
    warpgroup_commit();
}

// Multiplies all slots of a tile of C and gives them back.
__device__ inline void multiply_tile(Sums& sum, Ring& ring, unsigned shared, int consumer) {
    const bool arrives = threadIdx.x % 32 == 0;
    const unsigned a_at = shared + consumer * HIGH_SLAB, b_at = shared + A_BYTES, barriers = shared + BARRIERS_AT;
    const auto give_back = [&](int slot) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) hold_registers(sum[part]);
        if (arrives) barrier_arrive(barriers + (EMPTY + slot) * 8);
    };
    barrier_wait(barriers + (FULL + ring.slot) * 8, ring.parity);
    multiply_slot<true>(sum, a_at + ring.slot * STAGE_BYTES, b_at + ring.slot * STAGE_BYTES);
#pragma unroll 1
    for (int k_tile = 1; k_tile < K_TILES; k_tile++) {
        const int before = ring.slot;
        ring.advance();
        barrier_wait(barriers + (FULL + ring.slot) * 8, ring.parity);
        multiply_slot<false>(sum, a_at + ring.slot * STAGE_BYTES, b_at + ring.slot * STAGE_BYTES);
        warpgroup_wait<1>();
        give_back(before);
    }
    warpgroup_wait<0>();
    give_back(ring.slot);
    ring.advance();
}

// Gives all slots of a tile of C back, for a warpgroup that has no rows in it.
__device__ inline void wait_out(Ring& ring, unsigned shared) {
#pragma unroll 1
    for (int k_tile = 0; k_tile < K_TILES; k_tile++) {
        barrier_wait(shared + BARRIERS_AT + (FULL + ring.slot) * 8, ring.parity);
        if (threadIdx.x % 32 == 0) barrier_arrive(shared + BARRIERS_AT + (EMPTY + ring.slot) * 8);
        ring.advance();
    }
}

// Where C goes: by map where there is one and the rows of a slab are all the tile's, else row by row.
struct Output {
    const TensorMap* map;
    element* rows;
};

// `next` is the slab that is free first: they are filled in turn, however many a tile needs.
__device__ inline void write_sums(const Output& c, const Sums& sum, unsigned char* shared, const Tile& tile, int consumer, int& next) {
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    // of the four 8 x 8 parts that a warp writes at once, two above each other and two beside these, the row that is this lane's
    const unsigned lane_place = swizzled_place(thread / 32 * 16 + lane % 16, lane / 16 * 16);
    unsigned char* const room = shared + C_AT + consumer * C_BYTES;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int first_row = tile.first_row + consumer * HIGH + part * 64;
        const bool mapped = C_MAPPED && (C_CLIPPED || first_row + 64 <= tile.end_row);
        if (first_row >= tile.end_row) break;
#pragma unroll
        for (int slab = 0; slab < N_SLABS; slab++) {
            const int first_column = tile.first_column + slab * 64;
            if (N % BLOCK_N != 0 && first_column >= N) break;
            unsigned char* const place = room + next * C_SLAB;
            const unsigned at = shared_address(place);
            if (thread == 0) store_boxes_wait<C_SLABS - 1>();
            threads_sync(WRITE + consumer, 128);  // the slab's last contents have been read
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                unsigned words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float(&pairs)[4] = sum[part][slab * 8 + j + i / 2];
                    words[i] = pack_pair(pairs[i % 2 * 2], pairs[i % 2 * 2 + 1]);
                }
                store_matrices(at + (lane_place ^ j * 16), words);
            }
            if constexpr (C_MAPPED) copy_fence();
            threads_sync(WRITE + consumer, 128);
            if (mapped) {
                if (thread == 0) store_box(*c.map, at, first_column, first_row, 0, 0);
            } else if (!C_MAPPED || !C_CLIPPED) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = thread / 8 + i * 16, chunk = thread % 8;
                    if (first_row + row >= tile.end_row) break;
                    const Packet& packet = *reinterpret_cast<const Packet*>(place + swizzled_place(row, chunk * 16));
                    store_chunk<N, BLOCK_N>(c.rows + static_cast<long long>(first_row + row) * N, first_column + chunk * 8, packet);
                }
            }
            if (thread == 0) store_boxes_commit();
            next = (next + 1) % C_SLABS;
        }
    }
}

template <typename TileAt>
__device__ inline void consume(const TileAt& tile_at, unsigned char* shared, int consumer, const Output& c) {
    Ring ring;
    Sums sum;
    int next = 0;
#pragma unroll 1
    for (int index = blockIdx.x; index < TILES; index += BLOCKS) {
        const Tile tile = tile_at(index);
        if (!tile.needed()) continue;
        if (tile.first_row + consumer * HIGH < tile.end_row) {
            multiply_tile(sum, ring, shared_address(shared), consumer);
            write_sums(c, sum, shared, tile, consumer, next);
        } else {
            wait_out(ring, shared_address(shared));
        }
    }
    if (threadIdx.x % 128 == 0) store_boxes_wait<0>();
}

// The whole kernel: gives each warpgroup of the block its role.
template <typename TileAt>
__device__ inline void multiply_tiles(const TileAt& tile_at, const TensorMap& a, const TensorMap& b, const Output& c) {
    unsigned char* const shared = shared_memory();
    const unsigned barriers = shared_address(shared) + BARRIERS_AT;
    if (threadIdx.x == 0) {
        tensor_map_prefetch(a);
        tensor_map_prefetch(b);
        // a slot is full when the copying thread has arrived and all bytes have, empty when every warp that multiplies has
        for (int index = 0; index < BARRIERS; index++) barrier_init(barriers + index * 8, index < EMPTY ? 1 : CONSUMERS * 4);
        barrier_init_fence();
    }
    __syncthreads();
    const int role = from_first_lane(threadIdx.x / 128);  // the compiler then knows it to be the same in a warp
    if (role == 0) {
        registers_give<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(tile_at, shared_address(shared), a, b);
    } else {
        registers_take<CONSUMER_REGISTERS>();
        consume(tile_at, shared, role - 1, c);
    }
}
