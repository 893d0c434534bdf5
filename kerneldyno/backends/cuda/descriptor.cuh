// Descriptors of operands of wgmma in shared memory, as TMA leaves them with the 128-byte swizzle: rows of 64 elements
// (128 bytes), of which 8 (1024 bytes, aligned) are one pattern in which row r has its 16-byte chunks permuted by an
// exclusive or with r. Plain arithmetic. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout".

constexpr int SWIZZLE_ROW = 128, SWIZZLE_ATOM = 1024;  // bytes

// Bits 0-13: address; 16-29: leading offset; 32-45: stride offset, each in units of 16 bytes; 62-63: 1 for the 128-byte swizzle.
__device__ inline uint64 swizzled_descriptor(unsigned shared, int leading_bytes, int stride_bytes) {
    return uint64((shared & 0x3ffff) >> 4) | uint64(leading_bytes >> 4) << 16 | uint64(stride_bytes >> 4) << 32 | uint64(1) << 62;
}

// An operand whose rows run along the summed dimension, of which one row holds 64 elements: the next 8 rows follow after one
// pattern. The leading offset is not used. A step of 16 elements along a row is 32 bytes.
__device__ inline uint64 rows_descriptor(unsigned shared) { return swizzled_descriptor(shared, 16, SWIZZLE_ATOM); }

// An operand whose rows run along the other dimension (transposed): the next 8 summed elements follow after one pattern, the
// next 64 columns after `columns_bytes`. A step of 16 summed elements is two patterns.
__device__ inline uint64 columns_descriptor(unsigned shared, int columns_bytes) { return swizzled_descriptor(shared, columns_bytes, SWIZZLE_ATOM); }

// The same operand further on. Addresses end below 2^18, so that the sum stays in the address's 14 bits.
__device__ inline uint64 descriptor_after(uint64 descriptor, int bytes) {
    return (descriptor & 0xffffffff00000000ull) | (static_cast<unsigned>(descriptor) + (bytes >> 4));
}

// Where an element's 4 or more bytes lie in a tile of rows of 128 bytes that begins on a pattern.
__device__ inline unsigned swizzled_place(int row, int byte) { return row * SWIZZLE_ROW + (byte ^ row % 8 * 16); }
