// Stands in for ptx.cuh on a host: the same names, each PTX instruction done in plain C++ as its manual describes it, so
// that a kernel's text compiles with g++ and its arithmetic, addresses and synchronisation can be checked without a GPU.
//
// A thread is a fibre that runs until a barrier. What a GPU leaves open is chosen by two switches, so that a missing
// barrier or a wrong count shows: LAZY copies of cp.async happen as late as the waits allow, otherwise at once; REVERSE
// lets the last threads run first. Tensors and shared memory end at a page that cannot be touched and begin as NaN.

#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

typedef unsigned long long uint64;

#if DTYPE_FP32
typedef float element;
#else
typedef unsigned short element;
#endif

constexpr int VECTOR = 16 / sizeof(element);

struct alignas(16) Packet {
    unsigned word[4];
};

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulator: %s\n", what);
    std::exit(3);
}

inline void require(bool holds, const char* what) {
    if (!holds) fail(what);
}

// ---- threads ---------------------------------------------------------------------------------------------------

struct Index {
    unsigned x;
};

struct Barrier {
    int expected = 0, arrived = 0;
    long phase = 0;
};

struct Copy {
    unsigned char* target;
    const unsigned char* source;
    int bytes;
    bool valid;
};

struct Exchange {
    unsigned word[2][32][6];
};

// A barrier in shared memory, whose phases end when all have arrived and all announced bytes have (emulated_hopper.h).
struct SharedBarrier {
    Barrier barrier;
    long bytes = 0;
};

struct Block {
    unsigned char* shared;
    Barrier barrier;
    Barrier named_barriers[16];
    std::map<unsigned, SharedBarrier> shared_barriers;
    int started = 0, finished = 0;
};

struct Warp {
    Barrier barrier;
    Exchange exchange;
};

struct Fibre {
    ucontext_t context;
    std::vector<char> stack;
    Index thread, block_index;
    Block* block;
    Warp* warp;
    int lane, turn = 0;
    Barrier* waits = nullptr;
    long waits_for = 0;
    long cluster_phase = 0;
    bool done = false;
    std::vector<std::vector<Copy>> groups = std::vector<std::vector<Copy>>(1);
};

static Fibre* current;
static ucontext_t scheduler;
static std::vector<Block> blocks_of_cluster;
static Barrier cluster_barrier;
static int shared_bytes;
static bool lazy, reverse;
static std::vector<std::function<void()>> late;  // what happens when no thread can go on without it
static long bank_conflicts = 0;

#define threadIdx (current->thread)
#define blockIdx (current->block_index)

inline void yield_until(Barrier& barrier, long phase) {
    current->waits = &barrier;
    current->waits_for = phase;
    if (barrier.phase < phase) swapcontext(&current->context, &scheduler);
    current->waits = nullptr;
}

inline long arrive(Barrier& barrier) {
    const long phase = barrier.phase + 1;
    if (++barrier.arrived == barrier.expected) {
        barrier.arrived = 0;
        barrier.phase++;
    }
    return phase;
}

inline void __syncthreads() { yield_until(current->block->barrier, arrive(current->block->barrier)); }

// Gives every lane what the 32 lanes of its warp brought. Two buffers alternate: no lane is more than one exchange ahead.
inline unsigned (*exchange(const unsigned* words, int count))[6] {
    unsigned(*buffer)[6] = current->warp->exchange.word[current->turn++ % 2];
    for (int i = 0; i < count; i++) buffer[current->lane][i] = words[i];
    yield_until(current->warp->barrier, arrive(current->warp->barrier));
    return buffer;
}

// ---- numbers ---------------------------------------------------------------------------------------------------

inline float word_as_float(unsigned word) {
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

inline unsigned float_as_word(float value) {
    unsigned word;
    std::memcpy(&word, &value, 4);
    return word;
}

inline float half_as_float(unsigned bits) {
#if DTYPE_FP16
    const unsigned short raw = bits;
    _Float16 half;
    std::memcpy(&half, &raw, 2);
    return half;
#else
    return word_as_float(bits << 16);
#endif
}

inline unsigned float_as_half(float value) {
#if DTYPE_FP16
    const _Float16 half = value;
    unsigned short raw;
    std::memcpy(&raw, &half, 2);
    return raw;
#else
    const unsigned word = float_as_word(value);
    if (value != value) return 0x7fff;
    return (word + 0x7fff + (word >> 16 & 1)) >> 16;  // to nearest, ties to even
#endif
}

inline void unpack_pair(unsigned pair, float& first, float& second) {
    first = half_as_float(pair & 0xffff);
    second = half_as_float(pair >> 16);
}

inline unsigned pack_pair(float first, float second) { return float_as_half(first) | float_as_half(second) << 16; }

inline float exp2_fast(float x) { return std::exp2(x); }

inline float reciprocal_fast(float x) { return 1 / x; }

inline float exp_exact(float x) { return std::exp(x); }

inline int from_first_lane(int value) {
    const unsigned word = value;
    return exchange(&word, 1)[0][0];
}

inline float shuffle_xor(float value, int mask) {
    const unsigned word = float_as_word(value);
    return word_as_float(exchange(&word, 1)[current->lane ^ mask][0]);
}

// ---- memory ----------------------------------------------------------------------------------------------------

enum class Load { cached, stream, prefetch };
enum class Store { cached, stream };

inline void require_aligned(const void* address, int bytes) {
    require(reinterpret_cast<size_t>(address) % bytes == 0, "misaligned address");
}

template <Load>
inline Packet load_packet(const void* address) {
    require_aligned(address, 16);
    return *static_cast<const Packet*>(address);
}

template <Store>
inline void store_packet(void* address, const Packet& p) {
    require_aligned(address, 16);
    *static_cast<Packet*>(address) = p;
}

inline unsigned char* shared_memory() { return current->block->shared; }

inline unsigned shared_address(const void* pointer) { return static_cast<const unsigned char*>(pointer) - current->block->shared; }

inline unsigned char* at_shared(unsigned address, int bytes) {
    require(address % bytes == 0, "misaligned shared address");
    require(address + bytes <= unsigned(shared_bytes), "shared address out of range");
    return current->block->shared + address;
}

inline void store_shared(unsigned shared, const Packet& p) { std::memcpy(at_shared(shared, 16), &p, 16); }

inline void store_shared(unsigned shared, unsigned word) { std::memcpy(at_shared(shared, 4), &word, 4); }

inline void perform(const Copy& copy) {
    if (copy.valid) {
        std::memcpy(copy.target, copy.source, copy.bytes);
    } else {
        std::memset(copy.target, 0, copy.bytes);
    }
}

template <int BYTES>
inline void copy_async(unsigned shared, const void* global, bool valid) {
    require_aligned(global, BYTES);
    const Copy copy = {at_shared(shared, BYTES), static_cast<const unsigned char*>(global), BYTES, valid};
    if (lazy) {
        current->groups.back().push_back(copy);
    } else {
        perform(copy);
    }
}

inline void copy_async_commit() { current->groups.emplace_back(); }

template <int PENDING>
inline void copy_async_wait() {
    auto& groups = current->groups;  // the last one is not committed yet
    while (groups.size() > PENDING + 1) {
        for (const Copy& copy : groups.front()) perform(copy);
        groups.erase(groups.begin());
    }
}

// ---- tensor cores: element positions from the PTX ISA, not from the kernel -------------------------------------

inline void gather_matrices(unsigned (&words)[4], unsigned shared, bool transposed) {
    unsigned(*address)[6] = exchange(&shared, 1);
    for (int matrix = 0; matrix < 4; matrix++) {
        unsigned banks = 0;
        unsigned short element[8][8];
        for (int row = 0; row < 8; row++) {
            const unsigned start = address[matrix * 8 + row][0];
            std::memcpy(element[row], at_shared(start, 16), 16);
            if (current->lane == 0 && (banks & 1u << start / 16 % 8)) bank_conflicts++;
            banks |= 1u << start / 16 % 8;
        }
        const int slow = current->lane / 4, fast = current->lane % 4 * 2;
        const unsigned first = transposed ? element[fast][slow] : element[slow][fast];
        const unsigned second = transposed ? element[fast + 1][slow] : element[slow][fast + 1];
        words[matrix] = first | second << 16;
    }
}

inline void load_matrices(unsigned (&words)[4], unsigned shared) { gather_matrices(words, shared, false); }

inline void load_matrices_transposed(unsigned (&words)[4], unsigned shared) { gather_matrices(words, shared, true); }

inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    unsigned(*all)[6] = exchange(mine, 6);
    for (int i = 0; i < 4; i++) {
        const int row = current->lane / 4 + i / 2 * 8, column = current->lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const unsigned left = all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const unsigned right = all[column * 4 + k % 8 / 2][4 + k / 8];
            sum[i] += half_as_float(left >> k % 2 * 16 & 0xffff) * half_as_float(right >> k % 2 * 16 & 0xffff);
        }
    }
}

// ---- clusters --------------------------------------------------------------------------------------------------

inline void cluster_arrive() { current->cluster_phase = arrive(cluster_barrier); }

inline void cluster_wait() { yield_until(cluster_barrier, current->cluster_phase); }

inline void store_to_block(unsigned shared, int rank, float first, float second) {
    Block& target = blocks_of_cluster[rank];
    require(target.started > 0, "wrote to a block that had not started");
    require(target.finished == 0, "wrote to a block that had finished");
    at_shared(shared, 8);
    const float values[2] = {first, second};
    std::memcpy(target.shared + shared, values, 8);
}

// ---- packets and numbers, as in ptx.cuh ------------------------------------------------------------------------

inline void unpack(const Packet& p, float (&value)[VECTOR]) {
    for (int i = 0; i < 4; i++) {
        if constexpr (VECTOR == 4) {
            value[i] = word_as_float(p.word[i]);
        } else {
            unpack_pair(p.word[i], value[2 * i], value[2 * i + 1]);
        }
    }
}

inline Packet pack(const float (&value)[VECTOR]) {
    Packet p;
    for (int i = 0; i < 4; i++) {
        if constexpr (VECTOR == 4) {
            p.word[i] = float_as_word(value[i]);
        } else {
            p.word[i] = pack_pair(value[2 * i], value[2 * i + 1]);
        }
    }
    return p;
}

inline Packet greater(const Packet& a, const Packet& b) {
    float left[VECTOR], right[VECTOR];
    unpack(a, left);
    unpack(b, right);
    for (int i = 0; i < VECTOR; i++) left[i] = std::fmax(left[i], right[i]);
    return pack(left);
}

inline void set_element(Packet& p, int i, element value) { std::memcpy(reinterpret_cast<char*>(p.word) + i * sizeof(element), &value, sizeof(element)); }

inline element get_element(const Packet& p, int i) {
    element value;
    std::memcpy(&value, reinterpret_cast<const char*>(p.word) + i * sizeof(element), sizeof(element));
    return value;
}

// ---- running ---------------------------------------------------------------------------------------------------

// Memory of NaN that begins on a 16-byte boundary and ends, within 15 bytes, at a page that cannot be touched.
inline unsigned char* guarded(size_t bytes) {
    constexpr size_t PAGE = 4096;
    const size_t rounded = (bytes + 15) / 16 * 16, pages = (rounded + PAGE - 1) / PAGE + 1;
    void* start = mmap(nullptr, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require(start != MAP_FAILED, "out of memory");
    unsigned char* end = static_cast<unsigned char*>(start) + (pages - 1) * PAGE;
    mprotect(end, PAGE, PROT_NONE);
    std::memset(start, 0xff, (pages - 1) * PAGE);
    return end - rounded;
}

// Where a tensor lies; becomes a pointer of whatever type the kernel's parameter has.
struct Address {
    unsigned char* bytes;

    template <typename T>
    operator T*() const {
        return reinterpret_cast<T*>(bytes);
    }
};

struct Tensor {
    unsigned char* bytes;
    size_t size;
};

struct Launch {
    int blocks, threads, cluster, shared_bytes;
    void (*kernel)();
};

static std::vector<Tensor> tensors;
static const Launch* launch;

inline Address tensor(int index) { return {tensors[index].bytes}; }

inline void fibre_main() {
    current->block->started++;
    launch->kernel();
    current->block->finished++;
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

inline void run_cluster(int first_block, std::vector<Fibre>& fibres, std::vector<Warp>& warps) {
    const int cluster = launch->cluster, threads = launch->threads;
    for (Block& block : blocks_of_cluster) {
        std::memset(block.shared, 0xff, shared_bytes);
        block.barrier = {threads, 0, 0};
        for (Barrier& barrier : block.named_barriers) barrier = {};
        block.shared_barriers.clear();
        block.started = block.finished = 0;
    }
    cluster_barrier = {cluster * threads, 0, 0};
    for (Warp& warp : warps) warp.barrier = {32, 0, 0};
    for (int i = 0; i < int(fibres.size()); i++) {
        Fibre& fibre = fibres[i];
        fibre.thread = {unsigned(i % threads)};
        fibre.block_index = {unsigned(first_block + i / threads)};
        fibre.block = &blocks_of_cluster[i / threads];
        fibre.warp = &warps[i / 32];
        fibre.lane = i % 32;
        fibre.done = false;
        fibre.groups.assign(1, {});
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.data();
        fibre.context.uc_stack.ss_size = fibre.stack.size();
        fibre.context.uc_link = nullptr;
        makecontext(&fibre.context, fibre_main, 0);
    }
    int left = fibres.size();
    while (left > 0) {
        bool moved = false;
        for (int i = 0; i < int(fibres.size()); i++) {
            Fibre& fibre = fibres[reverse ? fibres.size() - 1 - i : i];
            if (fibre.done || (fibre.waits && fibre.waits->phase < fibre.waits_for)) continue;
            moved = true;
            current = &fibre;
            swapcontext(&scheduler, &fibre.context);
            if (fibre.done) left--;
        }
        if (moved) continue;
        require(!late.empty(), "deadlock: every thread waits at a barrier");
        late.front()();
        late.erase(late.begin());
    }
}

inline void run_launch(const Launch& next) {
    launch = &next;
    shared_bytes = next.shared_bytes;
    require(next.blocks % next.cluster == 0, "the blocks are not a multiple of the cluster");
    std::vector<Fibre> fibres(next.cluster * next.threads);
    std::vector<Warp> warps(next.cluster * ((next.threads + 31) / 32));
    for (Fibre& fibre : fibres) fibre.stack.resize(96 * 1024);
    blocks_of_cluster.assign(next.cluster, {});
    for (Block& block : blocks_of_cluster) block.shared = guarded(shared_bytes);
    for (int block = 0; block < next.blocks; block += next.cluster) run_cluster(block, fibres, warps);
}

// Arguments: lazy, reverse, then for each tensor its file and its size in bytes. Every tensor is read before the launches,
// which run one after another, and written back after them.
inline int emulate(int count, char** words, const std::vector<Launch>& launches) {
    lazy = std::atoi(words[1]);
    reverse = std::atoi(words[2]);
    for (int i = 3; i + 1 < count; i += 2) {
        const size_t bytes = std::strtoull(words[i + 1], nullptr, 10);
        tensors.push_back({guarded(bytes), bytes});
        FILE* file = std::fopen(words[i], "rb");
        require(file && std::fread(tensors.back().bytes, 1, bytes, file) == bytes, "cannot read a tensor");
        std::fclose(file);
    }
    for (const Launch& next : launches) run_launch(next);
    for (int i = 3; i + 1 < count; i += 2) {
        const Tensor& tensor = tensors[(i - 3) / 2];
        for (size_t byte = tensor.size; byte % 16 != 0; byte++) require(tensor.bytes[byte] == 0xff, "wrote past the end of a tensor");
        FILE* file = std::fopen(words[i], "wb");
        require(file && std::fwrite(tensor.bytes, 1, tensor.size, file) == tensor.size, "cannot write a tensor");
        std::fclose(file);
    }
    std::printf("%ld\n", bank_conflicts);
    return 0;
}
