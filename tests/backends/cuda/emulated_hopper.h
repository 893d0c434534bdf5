// Stands in for tma.cuh and wgmma.cuh on a host, after emulated_ptx.h: the same names, done as the PTX ISA describes them.
// Where operands lie is taken from the descriptors and tensor maps alone. LAZY: copies by tensor map arrive when no thread
// can go on without them, products are done when they are waited for; otherwise both happen at once.

#define __grid_constant__

// ---- barriers in shared memory ---------------------------------------------------------------------------------

inline SharedBarrier& shared_barrier(Block* block, unsigned address) {
    require(block->shared_barriers.count(address) == 1, "a barrier that was not initialised");
    return block->shared_barriers[address];
}

inline void end_phase(SharedBarrier& shared) {
    require(shared.barrier.arrived <= shared.barrier.expected, "too many arrivals in a phase");
    if (shared.barrier.arrived < shared.barrier.expected || shared.bytes != 0) return;
    shared.barrier.arrived = 0;
    shared.barrier.phase++;
}

inline void barrier_init(unsigned barrier, int arrivals) {
    at_shared(barrier, 8);
    require(current->block->shared_barriers.count(barrier) == 0, "a barrier was initialised twice");
    current->block->shared_barriers[barrier] = {{arrivals, 0, 0}, 0};
}

inline void barrier_init_fence() {}

inline void barrier_expect(unsigned barrier, int bytes) {
    SharedBarrier& shared = shared_barrier(current->block, barrier);
    shared.bytes += bytes;
    shared.barrier.arrived++;
    end_phase(shared);
}

inline void barrier_arrive(unsigned barrier) { barrier_expect(barrier, 0); }

inline void barrier_wait(unsigned barrier, int parity) {
    require(parity == 0 || parity == 1, "a parity is 0 or 1");
    Barrier& phases = shared_barrier(current->block, barrier).barrier;
    if ((phases.phase & 1) == parity) yield_until(phases, phases.phase + 1);
}

// ---- copies by tensor map --------------------------------------------------------------------------------------

struct TensorMap {
    unsigned char* base;
    long sizes[4], strides[4];  // elements; bytes
    int box[4];                 // elements
};

inline unsigned swizzle_128(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// Calls visit(global, shared) for each element of a box: global is null outside the tensor, shared the swizzled place.
template <typename Visit>
inline void visit_box(const TensorMap& map, unsigned shared, const int (&first)[4], const Visit& visit) {
    require(map.box[0] * 2 == 128, "a row of a box is one row of the swizzle");
    require(shared % 1024 == 0, "a box begins on a pattern of the swizzle");
    for (int i = 0; i < 4; i++) require(map.box[i] <= 256, "a box is at most 256 long");
    for (int i = 0; i < 4; i++) require(map.strides[i] % (i == 0 ? 2 : 16) == 0, "strides of a tensor map are multiples of 16 bytes");
    unsigned place = shared;
    for (int w = 0; w < map.box[3]; w++) {
        for (int z = 0; z < map.box[2]; z++) {
            for (int y = 0; y < map.box[1]; y++) {
                for (int x = 0; x < map.box[0]; x++, place += 2) {
                    const long at[4] = {first[0] + x, first[1] + y, first[2] + z, first[3] + w};
                    bool inside = true;
                    long offset = 0;
                    for (int i = 0; i < 4; i++) {
                        inside = inside && at[i] >= 0 && at[i] < map.sizes[i];
                        offset += at[i] * map.strides[i];
                    }
                    visit(inside ? map.base + offset : nullptr, swizzle_128(place));
                }
            }
        }
    }
}

inline void tensor_map_prefetch(const TensorMap&) {}

inline void copy_box(unsigned shared, const TensorMap& map, unsigned barrier, int x, int y, int z, int w) {
    Block* const block = current->block;
    const auto arrive = [=] {
        visit_box(map, shared, {x, y, z, w}, [&](const unsigned char* global, unsigned place) {
            require(place + 2 <= unsigned(shared_bytes), "a box reaches past shared memory");
            std::memset(block->shared + place, 0, 2);
            if (global) std::memcpy(block->shared + place, global, 2);
        });
        SharedBarrier& full = shared_barrier(block, barrier);
        full.bytes -= map.box[0] * map.box[1] * map.box[2] * map.box[3] * 2;
        end_phase(full);
    };
    if (lazy) {
        late.push_back(arrive);
    } else {
        arrive();
    }
}

static std::map<Fibre*, std::vector<std::vector<std::function<void()>>>> stores;  // of each thread its groups; the last is not committed yet

inline void store_box(const TensorMap& map, unsigned shared, int x, int y, int z, int w) {
    Block* const block = current->block;
    const auto store = [=] {
        visit_box(map, shared, {x, y, z, w}, [&](unsigned char* global, unsigned place) {
            if (global) std::memcpy(global, block->shared + place, 2);
        });
    };
    auto& groups = stores[current];
    if (groups.empty()) groups.emplace_back();
    if (lazy) {
        groups.back().push_back(store);
    } else {
        store();
    }
}

inline void store_boxes_commit() {
    auto& groups = stores[current];
    groups.resize(groups.empty() ? 2 : groups.size() + 1);
}

template <int PENDING>
inline void store_boxes_wait() {
    auto& groups = stores[current];
    while (groups.size() > PENDING + 1) {
        for (const auto& store : groups.front()) store();
        groups.erase(groups.begin());
    }
}

inline void store_box_wait() {
    store_boxes_commit();
    store_boxes_wait<0>();
}

inline void copy_fence() {}

// ---- warpgroups ------------------------------------------------------------------------------------------------

template <int COUNT>
inline void registers_give() {
    static_assert(COUNT >= 24 && COUNT <= 256 && COUNT % 8 == 0);
}

template <int COUNT>
inline void registers_take() {
    static_assert(COUNT >= 24 && COUNT <= 256 && COUNT % 8 == 0);
}

inline long named_arrive(int barrier, int threads) {
    require(barrier > 0 && barrier < 16, "named barriers are 1 to 15");
    require(threads % 32 == 0, "named barriers count whole warps");
    current->block->named_barriers[barrier].expected = threads;
    return arrive(current->block->named_barriers[barrier]);
}

inline void threads_sync(int barrier, int threads) { yield_until(current->block->named_barriers[barrier], named_arrive(barrier, threads)); }

inline void threads_arrive(int barrier, int threads) { named_arrive(barrier, threads); }

// ---- products --------------------------------------------------------------------------------------------------

struct Product {
    float (*sum)[4];
    int n;
    bool accumulate, b_transposed, a_shared;
    uint64 a, b;
    const unsigned* a_registers[32];
};

static std::map<Fibre*, std::vector<std::vector<Product>>> products;  // of each thread its groups; the last is not committed yet

inline float shared_element(unsigned address) {
    const unsigned place = swizzle_128(address);
    require(place + 2 <= unsigned(shared_bytes), "a descriptor reaches past shared memory");
    unsigned short bits;
    std::memcpy(&bits, current->block->shared + place, 2);
    return half_as_float(bits);
}

// Element (other, k) of an operand, from its descriptor.
inline float operand(uint64 descriptor, int other, int k, bool transposed) {
    require(descriptor >> 62 == 1, "the descriptor's swizzle is not that of 128 bytes");
    require((descriptor >> 49 & 7) == 0, "the descriptor has a base offset");
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    if (transposed) return shared_element(start + other / 64 * leading + k / 8 * stride + k % 8 * 128 + other % 64 * 2);
    return shared_element(start + other / 8 * stride + other % 8 * 128 + k * 2);
}

inline void perform(const Product& product) {
    const int warp_row = current->thread.x / 32 % 4 * 16, thread_row = current->lane / 4, thread_column = current->lane % 4 * 2;
    float a[2][16];
    for (int half = 0; half < 2; half++) {
        for (int k = 0; k < 16; k++) {
            const unsigned pair = product.a_shared ? 0 : product.a_registers[thread_row * 4 + k % 8 / 2][half + k / 8 * 2];
            a[half][k] = product.a_shared ? operand(product.a, warp_row + thread_row + half * 8, k, false) : half_as_float(pair >> k % 2 * 16 & 0xffff);
        }
    }
    for (int j = 0; j < product.n / 8; j++) {
        for (int column = 0; column < 2; column++) {
            float b[16];
            for (int k = 0; k < 16; k++) b[k] = operand(product.b, j * 8 + thread_column + column, k, product.b_transposed);
            for (int half = 0; half < 2; half++) {
                float& sum = product.sum[j][half * 2 + column];
                if (!product.accumulate) sum = 0;
                for (int k = 0; k < 16; k++) sum += a[half][k] * b[k];
            }
        }
    }
}

inline void warp_rendezvous() {
    const unsigned nothing = 0;
    exchange(&nothing, 1);
}

inline void start(const Product& product) {
    auto& groups = products[current];
    if (groups.empty()) groups.emplace_back();
    if (lazy) {
        groups.back().push_back(product);
    } else {
        perform(product);
        warp_rendezvous();
    }
}

inline void warpgroup_fence() {}

inline void warpgroup_commit() { products[current].emplace_back(); }

template <int PENDING>
inline void warpgroup_wait() {
    auto& groups = products[current];
    warp_rendezvous();
    while (groups.size() > PENDING + 1) {
        for (const Product& product : groups.front()) perform(product);
        groups.erase(groups.begin());
    }
    warp_rendezvous();
}

template <int COUNT>
inline void hold_registers(float (&)[COUNT][4]) {}

inline unsigned hold_register(unsigned address) { return address; }

inline void stay_before(float, unsigned) {}

template <int N, bool ACCUMULATE, bool B_TRANSPOSED>
inline void multiply_shared(float (&sum)[N / 8][4], uint64 a, uint64 b) {
    start({sum, N, ACCUMULATE, B_TRANSPOSED, true, a, b, {}});
}

template <int N, bool ACCUMULATE, bool B_TRANSPOSED>
inline void multiply_registers(float (&sum)[N / 8][4], const unsigned (&a)[4], uint64 b) {
    Product product = {sum, N, ACCUMULATE, B_TRANSPOSED, false, 0, b, {}};
    const uint64 mine = reinterpret_cast<uint64>(&a[0]);
    const unsigned words[2] = {unsigned(mine), unsigned(mine >> 32)};
    unsigned(*all)[6] = exchange(words, 2);
    for (int lane = 0; lane < 32; lane++) product.a_registers[lane] = reinterpret_cast<const unsigned*>(all[lane][0] | uint64(all[lane][1]) << 32);
    start(product);
}

inline void store_matrices(unsigned shared, const unsigned (&words)[4]) {
    unsigned(*address)[6] = exchange(&shared, 1);
    for (int matrix = 0; matrix < 4; matrix++) {
        unsigned banks = 0;
        for (int row = 0; row < 8; row++) {
            const unsigned start = address[matrix * 8 + row][0];
            at_shared(start, 16);
            if (current->lane == 0 && (banks & 1u << start / 16 % 8)) bank_conflicts++;
            banks |= 1u << start / 16 % 8;
        }
        std::memcpy(at_shared(address[matrix * 8 + current->lane / 4][0] + current->lane % 4 * 4, 4), &words[matrix], 4);
    }
}
