// What a stress run needs beside the kernels under test. One entry is compiled at a time.

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef UW_COMPARE
// A block for each run: counts the runs whose output differs from `expected` anywhere, in 16-byte pieces.
extern "C" __global__ void __launch_bounds__(1024, 1) uw_stress_compare(const uint4* runs, const uint4* expected, u64 pieces, u32* differing) {
    const uint4* run = runs + blockIdx.x * pieces;
    int differs = 0;
    for (u64 i = threadIdx.x; i < pieces; i += blockDim.x) {
        const uint4 a = run[i], b = expected[i];
        differs |= a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
    }
    if (__syncthreads_or(differs) && threadIdx.x == 0) atomicAdd(differing, 1);
}
#endif

#ifdef UW_LOAD
// Keeps device memory, the second-level cache and shared memory busy: what makes a race between copies and loads show.
extern "C" __global__ void __launch_bounds__(256, 1) uw_stress_load(uint4* memory, u64 pieces, u32 rounds, u32 shared_pieces) {
    extern __shared__ uint4 shared[];
    u64 at = (u64(blockIdx.x) * 2654435761u + threadIdx.x) % pieces;
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (u32 round = 0; round < rounds; ++round) {
        const uint4 v = memory[at];
        sum.x ^= v.x;
        sum.y += v.y;
        if (shared_pieces != 0) {
            shared[(threadIdx.x + round) % shared_pieces] = v;
            __syncthreads();
            sum.z ^= shared[(threadIdx.x * 7 + round) % shared_pieces].z;
        }
        at = (at + u64(gridDim.x) * blockDim.x) % pieces;
    }
    if (sum.x == 0x12345678u && sum.y == 0x9abcdef0u) memory[at] = sum;
}
#endif
