// What a stress run needs in addition to the kernels under test. One entry is compiled at a time.

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef UW_COMPARE
// A block for each run: counts the runs whose output differs from `expected` anywhere, in 16-byte pieces.
extern "C" __global__ void __launch_bounds__(1024, 1)
    uw_stress_compare(const uint4* runs, const uint4* expected, u64 pieces, u32* differing) {
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
// Without shared words: streams memory, so that the copy engine and the second-level cache have other things to do.
// With them: keeps the multiprocessor's shared memory busy with loads of 32 words from one bank, so that the loads of
// its neighbour block stay in flight for long: what makes a race with the copy engine show.
extern "C" __global__ void __launch_bounds__(256, 1)
    uw_stress_load(uint4* memory, u64 pieces, u32 rounds, u32 shared_words) {
    extern __shared__ volatile u32 shared[];
    if (shared_words != 0) {
        for (u32 i = threadIdx.x; i < shared_words; i += blockDim.x) shared[i] = i * 2654435761u;
        __syncthreads();
        u32 sum = 0;
        for (u32 round = 0; round < rounds * 8; ++round) sum ^= shared[(threadIdx.x * 32 + round) % shared_words];
        if (sum == 0x12345678u) memory[threadIdx.x] = make_uint4(sum, sum, sum, sum);
        return;
    }
    u64 at = (u64(blockIdx.x) * 2654435761u + threadIdx.x) % pieces;
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (u32 round = 0; round < rounds; ++round) {
        const uint4 v = memory[at];
        sum.x ^= v.x;
        sum.y += v.y;
        at = (at + u64(gridDim.x) * blockDim.x) % pieces;
    }
    if (sum.x == 0x12345678u && sum.y == 0x9abcdef0u) memory[at] = sum;
}
#endif
