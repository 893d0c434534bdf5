// A place in a ring of STAGES slots of shared memory, which a producer fills and consumers empty, each pass with the other parity of its
// barriers: tile i is in slot i % STAGES, and parity is that of i / STAGES.

struct Ring {
    int slot = 0, parity = 0;

    __device__ void advance() {
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
};
