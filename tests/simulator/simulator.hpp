// The simulator that kernels run on when there is no GPU: fibers for threads, blocks, barriers, and an engine for
// everything asynchronous. It owns scheduling, blocking and error reporting; ptx.hpp maps the wrappers of
// include/unweight/ptx onto it.
//
//   launch ── cluster by cluster ── blocks of a cluster together ── one fiber per thread
//                                        │ a fiber runs until it must wait, then names what it waits for; all in turn,
//                                        │ or a group of warps ahead of the others, or left behind (seeded)
//                                        └ pending: bulk copies and wgmma, each completed at a random later point
//                                        (seeded)
//
// What it finds: deadlocks (with who waits for what), reads of data that has not arrived, wrong byte and arrival
// counts, buffers overwritten while an asynchronous reader still needs them, misaligned or out-of-bounds shared
// accesses, out-of-bounds global accesses through wrappers (when allocations are registered), generic writes that wgmma
// or a bulk store reads without fence.proxy.async, copies into shared memory that ordinary loads have read and no
// thread has released, partial sums that another block reads before they were handed over.
// What it cannot find: wgmma.fence left out, other weak memory ordering, register budgets, speed.
#pragma once

#include <algorithm>
#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <tuple>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

#include "unweight/abi.cuh"

namespace uw::cpu {

constexpr u32 kStackBytes = 256 * 1024;
constexpr u32 kSharedBase = 1024;  // address of the first byte of dynamic shared memory; 0 stays invalid
constexpr u32 kRankShift = 24;     // block rank in the cluster, above the 16 MiB window of one block
constexpr u32 kSpinLimit = 10000;  // passes in which fibers only polled

struct Block;
struct Warp;

// Of each thread of the grid (block x threads of a block + thread), how many of its stores to `partials` come before.
// Threads that have met share one.
class Clock {
public:
    Clock() = default;
    Clock(const Clock& other) : stores(other.stores) {
        if (stores) ++stores->owners;
    }
    Clock& operator=(Clock other) {
        std::swap(stores, other.stores);
        return *this;
    }
    ~Clock();
    u32 of(u32 thread) const { return stores ? stores->of[thread] : 0; }
    // Counts one more store of a thread; returns its number. `threads`: of the grid.
    u32 count(u32 thread, u64 threads);
    // What comes before `from` comes before this.
    void merge(const Clock& from);

private:
    struct Stores {
        std::vector<u32> of;
        u32 owners = 1;
    };
    explicit Clock(Stores* stores) : stores(stores) {}
    Stores* stores = nullptr;  // null: no stores
};

// What a fiber waits for. It is on the fiber's own stack. Its text is made only when a message needs it.
struct Wait {
    virtual bool ready() const = 0;
    virtual void told(char* text, u32 bytes) const = 0;
};

// What most fibers wait for: that a word changes. The scheduler asks these first, which are adjacent; the
// fibers and their stacks are far apart.
struct Watch {
    const u64* word = nullptr;  // nothing: the fiber is asked itself
    u64 value = 0;
    bool is_unchanged() const { return word != nullptr && *word == value; }
};

// Words for each 16-byte granule of shared memory. Pages come with the first use: most threads read little of what a
// block has.
template <u32 kWords>
class Granules {
public:
    u64* at(u32 granule) {
        const u32 page = granule / kPage;
        if (page >= pages.size()) pages.resize(page + 1);
        if (!pages[page]) pages[page].reset(new u64[kPage * kWords]());
        return &pages[page][granule % kPage * kWords];
    }
    // Nothing: all are 0.
    const u64* of(u32 granule) const {
        const u32 page = granule / kPage;
        return page < pages.size() && pages[page] ? &pages[page][granule % kPage * kWords] : nullptr;
    }

private:
    static constexpr u32 kPage = 64;
    std::vector<std::unique_ptr<u64[]>> pages;
};

// Of each granule the number of a thread's last load; 0: none.
class LastReads {
public:
    u64 of(u32 granule) const {
        const u64* load = granules.of(granule);
        return load ? *load : 0;
    }
    void set(u32 granule, u64 load) { *granules.at(granule) = load; }

private:
    Granules<1> granules;
};

// Of each granule, which threads of the block have ever loaded it: one bit per thread.
class Readers {
public:
    static constexpr u32 kWords = 1024 / 64;
    void add(u32 granule, u32 thread) { granules.at(granule)[thread / 64] |= u64(1) << thread % 64; }
    const u64* of(u32 granule) const { return granules.of(granule); }

private:
    Granules<kWords> granules;
};

struct Fiber {
    jmp_buf context;
    ucontext_t first;
    u8* stack = nullptr;
    bool started = false;
    bool done = false;
    u32 thread = 0;
    Block* block = nullptr;
    Warp* warp = nullptr;
    // Why it waits, asked before it runs again; nothing: it can run.
    const Wait* wait = nullptr;
    bool polling = false;
    // Bulk groups of this thread: copies still pending in each; the last one is open.
    std::vector<u32> bulk_groups{0};
    // Its groups of cp.async, likewise.
    std::vector<u32> async_groups{0};
    // wgmma: operations issued by this thread, and how many had been issued at each commit.
    u64 wgmma_issued = 0;
    std::vector<u64> wgmma_commits;
    u64 cluster_generation = 0;  // when this thread last arrived at the cluster barrier
    // Shared 16-byte granules written by ordinary stores since the thread's last proxy fence.
    std::vector<u32> unfenced;
    // Its ordinary loads from its own block, counted from the first: the number of its last load of each granule, and
    // up to which of them are released to the copy engine, were made when it last met its warp, and when it last met
    // each named barrier (with the barrier's generation then).
    u64 loads = 0, released = 0, met_warp = 0;
    u64 met_barrier[16] = {}, met_generation[16] = {};
    LastReads read_at;
    // Of what is handed over between blocks ("partials"): what comes before its next access, what came before its last
    // fence, and what the words of its atomics spoke for, which its next fence takes over.
    Clock clock, fenced, seen;
};

struct Warp {
    u32 arrived = 0;
    u64 generation = 0;
    const char* operation = nullptr;
    void* lanes[32] = {};
};

struct NamedBarrier {
    u32 arrived = 0;
    u32 expected = 0;
    u64 generation = 0;
    Clock coming, handed;  // of those that have arrived, and of those of the generation before
};

struct Mbarrier {
    u32 count = 0;    // arrivals per phase
    u32 pending = 0;  // arrivals still to come
    i32 bytes = 0;    // bytes still to land
    u64 phase = 0;    // parity of the running phase
    // By parity: whose loads, and up to which, the arrivals of that phase speak for. They are released to the threads
    // that wait for it.
    std::vector<std::pair<Fiber*, u64>> spoken_for[2];
};

struct WgmmaOperation {
    u32 n = 0;
    bool registers = false;
    u64 a_descriptor = 0;
    u64 b_descriptor = 0;
    u32 arrived = 0;
    float* d[128] = {};
    u32 a[128][4] = {};
};

struct Warpgroup {
    std::deque<WgmmaOperation> queue;  // front is operation number `executed`
    u64 executed = 0;
};

struct Block {
    u32 index = 0;
    u32 rank = 0;  // in its cluster
    u8* shared = nullptr;
    std::vector<u8> unfenced;  // per 16-byte granule
    Readers readers;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    NamedBarrier named[16];
    std::unordered_map<u32, Mbarrier> mbarriers;
};

struct Simulator {
    u32 grid = 0, block_threads = 0, shared_bytes = 0, cluster = 1;
    u64 random = 1;
    jmp_buf scheduler;
    jmp_buf launch;
    Fiber* current = nullptr;
    std::vector<Fiber*> fibers;
    std::vector<Watch> watches;  // of each of them
    std::vector<u32> members;    // of the turn
    std::vector<Block*> blocks;
    u32 cluster_arrived = 0;
    u64 cluster_generation = 0;
    bool partials = false;  // one of them is called so
    void (*entry)(const void*) = nullptr;
    const void* arguments = nullptr;
    // Of fibers, kept from launch to launch.
    u8* stacks = nullptr;
    u64 stack_bytes = 0;

    ~Simulator();
};

extern Simulator instance;
inline Simulator& simulator() { return instance; }
inline Fiber& self() { return *simulator().current; }
// The position of a thread among all fibers.
inline u32 fiber_of(const Block& block, u32 thread) { return block.rank * simulator().block_threads + thread; }

// Ends the launch with an error. Fibers are dropped where they stand.
[[noreturn]] void fail(const char* format, ...);

u32 random_below(u32 limit);

// ---- blocking ------------------------------------------------------------------------------------------------------
void to_scheduler();

template <class Ready, class... Words>
void wait_until(Ready ready, const char* format, Words... words) {
    if (ready() && random_below(8) != 0) return;  // now and then let the others run first
    struct Own final : Wait {
        Own(Ready test, const char* format, Words... words) : test(test), format(format), words(words...) {}
        bool ready() const override { return test(); }
        void told(char* text, u32 bytes) const override {
            std::apply([&](Words... each) { snprintf(text, bytes, format, each...); }, words);
        }
        Ready test;
        const char* format;
        std::tuple<Words...> words;
    };
    const Own wait(ready, format, words...);
    self().wait = &wait;
    to_scheduler();
    self().wait = nullptr;
}

// Waits until a word has another value.
template <class... Words>
void wait_for_change(const u64& word, u64 value, const char* format, Words... words) {
    Watch& watch = simulator().watches[fiber_of(*self().block, self().thread)];
    watch = {&word, value};
    wait_until([&word, value] { return word != value; }, format, words...);
    watch = {};
}

// One turn of a polling loop: lets all other fibers run.
void poll();

// ---- shared memory -------------------------------------------------------------------------------------------------
Block& block_of(u32 address);

u32 offset_of(u32 address, u32 bytes, u32 alignment);

u8* shared_at(u32 address, u32 bytes, u32 alignment);

// Marks an ordinary store into the thread's own block, for the check that a proxy fence follows it.
void mark_unfenced(u32 address, u32 bytes);
void fence_own_writes();
void check_fenced(Block& b, u32 offset, const char* reader);

// Ordinary loads. What a thread has loaded may still be in flight until it is released: by a proxy fence of the
// thread's own, or by an arrival on an mbarrier, its own or of a thread that it has met since, for whose phase a
// thread has waited. A copy into bytes with such loads is a race that a GPU shows a few times in a hundred launches.
// Loads from other blocks of the cluster are not followed.
void mark_read(u32 address, u32 bytes);
void release_own_reads();
// An arrival speaks for the thread's own loads, and for those that others had made when they met it: their warp, or a
// named barrier that it has passed as well.
void speak_for_reads(Mbarrier& barrier);
// By a thread that has waited for the phase of this parity.
void release_spoken_for(Mbarrier& barrier, u32 parity);
void check_refill(u32 address, u32 bytes, const char* writer);

// A thread's own copy (cp.async) into bytes that others have read: it must have met them since, its warp or at a
// barrier.
void check_overwrite(u32 address, u32 bytes, const char* writer);

template <class T>
T read_shared(u32 address) {
    T value;
    memcpy(&value, shared_at(address, sizeof(T), sizeof(T)), sizeof(T));
    mark_read(address, sizeof(T));
    return value;
}
template <class T>
void write_shared(u32 address, T value) {
    memcpy(shared_at(address, sizeof(T), sizeof(T)), &value, sizeof(T));
    mark_unfenced(address, sizeof(T));
}

// ---- global memory -------------------------------------------------------------------------------------------------
void check_global(const void* pointer, u64 bytes, u32 alignment, const char* what);

// ---- what blocks hand over to each other in global memory -----------------------------------------------------------
// Of a buffer that is registered as `partials`: a thread that reads or overwrites a word must follow the thread that
// wrote it, by meetings of threads of one block, and between blocks by fence.acq_rel.gpu and an atomic on one side, an
// atomic on the same word and a fence on the other (or st.release and ld.acquire). A fiber sees every store at once; a
// GPU does not.
bool is_partial(const void* p);
void check_handed_over(const void* p, u64 bytes, const char* what);
void mark_partial(const void* p, u64 bytes);
void fence_device();
void atomic_speaks(const void* p);

template <class T>
T read_global(const void* p) {
    check_global(p, sizeof(T), sizeof(T), "load");
    if (is_partial(p)) check_handed_over(p, sizeof(T), "load");
    T value;
    memcpy(&value, p, sizeof(T));
    return value;
}
template <class T>
void write_global(void* p, T value) {
    check_global(p, sizeof(T), sizeof(T), "store");
    if (is_partial(p)) {
        check_handed_over(p, sizeof(T), "store");
        mark_partial(p, sizeof(T));
    }
    memcpy(p, &value, sizeof(T));
}

// ---- barriers ------------------------------------------------------------------------------------------------------
void named_barrier(u32 id, u32 threads);

Mbarrier& mbarrier_at(u32 address);
void mbarrier_arrive_at(u32 address, u32 bytes);
void mbarrier_bytes_landed(u32 address, u32 bytes);

// All 32 lanes meet; the last one computes for all.
void warp_collective(const char* operation, void* lane_data, void (*finish)(void**));

// ---- wgmma ---------------------------------------------------------------------------------------------------------
inline float bf16_to_float(u16 bits) {
    u32 wide = u32(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

void wgmma_issue(u32 n, float* d, const u32* a_registers, u64 a_descriptor, u64 b_descriptor);
void wgmma_commit();
void wgmma_wait(u32 pending_groups);

// ---- asynchronous copies -------------------------------------------------------------------------------------------

// ---- scheduler -----------------------------------------------------------------------------------------------------

// 0 = success; otherwise simulator().error says what happened.
int run_grid(u32 grid, u32 threads, u32 shared_bytes, u32 cluster, u64 seed, void (*entry)(const void*),
             const void* arguments);

}  // namespace uw::cpu
