// A plain name for each instruction of the asynchronous pipeline on sm_90: copies by tensor map, barriers in shared memory,
// registers that warpgroups give each other. Source: PTX ISA, "mbarrier", "cp.async.bulk.tensor", "setmaxnreg", "bar".

// What cuTensorMapEncodeTiled makes: the address, sizes and strides of a tensor, the box that one copy moves.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

// ---- barriers in shared memory: a phase ends when all arrivals and all announced bytes have come -----------------

__device__ inline void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to copies by tensor map.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void barrier_arrive(unsigned barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Arrives and announces bytes that copies will bring in this phase.
__device__ inline void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity; phases count from 0, and the one before the first has ended.
__device__ inline void barrier_wait(unsigned barrier, int parity) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

// ---- copies by tensor map: coordinates of the box's first element, fastest dimension first ------------------------

__device__ inline void tensor_map_prefetch(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// What lies outside the tensor becomes zero, and counts among the bytes.
__device__ inline void copy_box(unsigned shared, const TensorMap& map, unsigned barrier, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// The opposite way; what lies outside the tensor is not written. `store_box_wait` ends a group of them.
__device__ inline void store_box(const TensorMap& map, unsigned shared, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(&map), "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Waits until this thread's stores have been read from shared memory, which may then go away.
__device__ inline void store_box_wait() {
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// The same in two steps: ends a group of stores; waits until at most PENDING of this thread's newest groups have yet to be read.
__device__ inline void store_boxes_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ inline void store_boxes_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Between ordinary writes to shared memory and a copy from there.
__device__ inline void copy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warpgroups ----------------------------------------------------------------------------------------------------

// The most registers a thread of this warpgroup may have from here on: given back, or taken when others have given.
template <int COUNT>
__device__ inline void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ inline void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Barrier 1 to 15 of the block for some of its threads: wait for the others, or arrive without waiting.
__device__ inline void threads_sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

__device__ inline void threads_arrive(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
