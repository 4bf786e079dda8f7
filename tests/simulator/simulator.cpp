// The simulator of simulator.hpp: what kernels share, compiled once and not with each of them.
#include "prelude.hpp"
#include "state.hpp"

namespace uw::cpu {

Simulator instance;
State state;

Simulator::~Simulator() {
    if (stacks) munmap(stacks, stack_bytes);
}

Clock::~Clock() {
    if (stores && --stores->owners == 0) delete stores;
}

[[noreturn]] void fail(const char* format, ...) {
    Simulator& m = simulator();
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    char where[64] = "";
    if (m.current) snprintf(where, sizeof where, "block %u thread %u: ", m.current->block->index, m.current->thread);
    state.error = std::string(where) + text;
    _longjmp(m.launch, 1);
}

u32 random_below(u32 limit) {
    u64& s = simulator().random;
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    return static_cast<u32>((s >> 11) % limit);
}

// ---- blocking ------------------------------------------------------------------------------------------------------
void to_scheduler() {
    Simulator& m = simulator();
    if (_setjmp(m.current->context) == 0) _longjmp(m.scheduler, 1);
}

void poll() {
    Fiber& f = self();
    f.polling = true;
    to_scheduler();
    f.polling = false;
}

// ---- shared memory -------------------------------------------------------------------------------------------------
Block& block_of(u32 address) {
    u32 rank = address >> kRankShift;
    Simulator& m = simulator();
    if (rank >= m.blocks.size())
        fail("shared address 0x%x names block %u of a cluster of %zu", address, rank, m.blocks.size());
    return *m.blocks[rank];
}

u32 offset_of(u32 address, u32 bytes, u32 alignment) {
    u32 local = address & ((1u << kRankShift) - 1);
    u32 limit = simulator().shared_bytes;
    if (local < kSharedBase || local - kSharedBase + u64(bytes) > limit)
        fail("shared access of %u bytes at offset %d is outside the block's %u bytes", bytes,
             int(local) - int(kSharedBase), limit);
    if (local % alignment != 0)
        fail("shared access of %u bytes at offset %u is not %u-byte aligned", bytes, local - kSharedBase, alignment);
    return local - kSharedBase;
}

u8* shared_at(u32 address, u32 bytes, u32 alignment) {
    return block_of(address).shared + offset_of(address, bytes, alignment);
}

void mark_unfenced(u32 address, u32 bytes) {
    Block& b = block_of(address);
    if (&b != self().block) return;
    u32 first = (address & ((1u << kRankShift) - 1)) - kSharedBase;
    for (u32 g = first / 16; g <= (first + bytes - 1) / 16; ++g) {
        b.unfenced[g] = 1;
        self().unfenced.push_back(g);
    }
}

void fence_own_writes() {
    Fiber& f = self();
    for (u32 g : f.unfenced) f.block->unfenced[g] = 0;
    f.unfenced.clear();
}

void check_fenced(Block& b, u32 offset, const char* reader) {
    if (b.unfenced[offset / 16])
        fail("%s reads shared offset %u, written by an ordinary store without fence.proxy.async", reader, offset);
}

void mark_read(u32 address, u32 bytes) {
    Block& b = block_of(address);
    Fiber& f = self();
    if (&b != f.block) return;
    u32 first = (address & ((1u << kRankShift) - 1)) - kSharedBase;
    ++f.loads;
    for (u32 g = first / 16; g <= (first + bytes - 1) / 16; ++g) {
        f.read_at.set(g, f.loads);
        b.readers.add(g, f.thread);
    }
}

void release_own_reads() { self().released = self().loads; }

void speak_for_reads(Mbarrier& barrier) {
    auto& spoken = barrier.spoken_for[barrier.phase];
    Fiber& own = self();
    for (Fiber* other : simulator().fibers) {
        if (other->block != own.block || other->released == other->loads) continue;
        u64 last = other == &own ? own.loads : other->warp == own.warp ? other->met_warp : 0;
        for (u32 id = 0; id < 16; ++id)
            if (other->met_barrier[id] > last && other->met_generation[id] <= own.met_generation[id])
                last = other->met_barrier[id];
        if (last > other->released) spoken.push_back({other, last});
    }
}

void release_spoken_for(Mbarrier& barrier, u32 parity) {
    for (auto& [fiber, last] : barrier.spoken_for[parity])
        if (last > fiber->released) fiber->released = last;
    barrier.spoken_for[parity].clear();
}

void check_refill(u32 address, u32 bytes, const char* writer) {
    Block& b = block_of(address);
    u32 first = offset_of(address, bytes, 1);
    for (Fiber* f : simulator().fibers) {
        if (f->block != &b || f->released == f->loads) continue;
        for (u32 g = first / 16; g <= (first + bytes - 1) / 16; ++g)
            if (f->read_at.of(g) > f->released)
                fail(
                    "%s refills shared offset %u, which thread %u has read with ordinary loads that no thread has "
                    "released (fence.proxy.async by every reader, or an arrival on an mbarrier and a wait for it)",
                    writer, g * 16, f->thread);
    }
    for (u32 g = first / 16; g <= (first + bytes - 1) / 16; ++g)
        if (b.unfenced[g])
            fail("%s refills shared offset %u, written by an ordinary store without fence.proxy.async", writer, g * 16);
    for (const Pending& p : state.pending)
        if (p.bytes != 0 && p.source < address + bytes && address < p.source + p.bytes)
            fail("%s refills shared offset %u, which a bulk store is still reading (cp_async_bulk_wait_group_read)",
                 writer, first);
}

void check_overwrite(u32 address, u32 bytes, const char* writer) {
    Block& b = block_of(address);
    Fiber& own = self();
    u32 first = offset_of(address, bytes, 1);
    const u32 end = (first + bytes - 1) / 16 + 1;
    u64 readers[Readers::kWords] = {};
    for (u32 g = first / 16; g < end; ++g)
        if (const u64* of = b.readers.of(g))
            for (u32 word = 0; word < Readers::kWords; ++word) readers[word] |= of[word];
    for (u32 thread = 0; thread < simulator().block_threads; ++thread) {
        if (!(readers[thread / 64] >> thread % 64 & 1)) continue;
        Fiber* other = simulator().fibers[fiber_of(b, thread)];
        if (other == &own) continue;
        // Most have met since: the barriers are asked last.
        u64 read = 0;
        for (u32 g = first / 16; g < end; ++g)
            if (other->read_at.of(g) > read) read = other->read_at.of(g);
        u64 last = other->warp == own.warp ? other->met_warp : 0;
        if (read <= last) continue;
        for (u32 id = 0; id < 16; ++id)
            if (other->met_barrier[id] > last && other->met_generation[id] <= own.met_generation[id])
                last = other->met_barrier[id];
        for (u32 g = first / 16; g < end; ++g)
            if (other->read_at.of(g) > last)
                fail("%s overwrites shared offset %u, which thread %u has read and not met since", writer, g * 16,
                     other->thread);
    }
}

// ---- global memory -------------------------------------------------------------------------------------------------
void check_global(const void* pointer, u64 bytes, u32 alignment, const char* what) {
    if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0)
        fail("%s: global address %p is not %u-byte aligned", what, pointer, alignment);
    if (state.allocations.empty() || bytes == 0) return;
    const char* p = static_cast<const char*>(pointer);
    auto it = state.allocations.upper_bound(p);
    if (it == state.allocations.begin())
        fail("%s: %llu bytes at %p are in no registered allocation", what, bytes, pointer);
    --it;
    const Allocation& a = it->second;
    if (p + bytes > a.begin + a.bytes)
        fail("%s: %llu bytes at offset %lld of `%s` end outside its %llu bytes", what, bytes,
             static_cast<long long>(p - a.begin), a.name.c_str(), a.bytes);
}

// ---- what blocks hand over to each other in global memory -----------------------------------------------------------
u32 Clock::count(u32 thread, u64 threads) {
    if (!stores) stores = new Stores{std::vector<u32>(threads)};
    if (stores->owners > 1) {
        --stores->owners;
        stores = new Stores{stores->of};
    }
    return ++stores->of[thread];
}

void Clock::merge(const Clock& from) {
    if (!from.stores || stores == from.stores) return;
    bool has_less = !stores, has_more = false;
    const std::vector<u32>& others = from.stores->of;
    for (size_t i = 0; stores && i < others.size(); ++i) {
        has_less |= stores->of[i] < others[i];
        has_more |= stores->of[i] > others[i];
    }
    if (!has_less) return;
    if (!has_more) {
        *this = from;
        return;
    }
    std::vector<u32> both(others);
    for (size_t i = 0; i < both.size(); ++i) both[i] = std::max(both[i], stores->of[i]);
    *this = Clock(new Stores{std::move(both)});
}

bool is_partial(const void* p) {
    if (!simulator().partials) return false;
    auto& all = state.allocations;
    auto it = all.upper_bound(static_cast<const char*>(p));
    return it != all.begin() && (--it)->second.name == "partials";
}

void check_handed_over(const void* p, u64 bytes, const char* what) {
    Simulator& m = simulator();
    const Clock& own = self().clock;
    for (const char* word = static_cast<const char*>(p); word < static_cast<const char*>(p) + bytes; word += 4) {
        auto it = state.written.find(word);
        if (it == state.written.end()) {
            if (*what == 'l') fail("load of `partials` at %p, which no thread has written in this launch", word);
            continue;
        }
        auto [thread, store] = it->second;
        if (own.of(thread) < store)
            fail(
                "%s of `partials` at %p, which thread %u of block %u has written but not handed over (a meeting "
                "of its block, fence.acq_rel.gpu and an atomic; an atomic, fence.acq_rel.gpu and a meeting of this "
                "one)",
                what, word, thread % m.block_threads, thread / m.block_threads);
    }
}

void mark_partial(const void* p, u64 bytes) {
    Simulator& m = simulator();
    Fiber& f = self();
    const u32 thread = f.block->index * m.block_threads + f.thread;
    const u32 store = f.clock.count(thread, u64(m.grid) * m.block_threads);
    for (const char* word = static_cast<const char*>(p); word < static_cast<const char*>(p) + bytes; word += 4)
        state.written[word] = {thread, store};
}

void fence_device() {
    Fiber& f = self();
    f.clock.merge(f.seen);
    f.fenced = f.clock;
}

void atomic_speaks(const void* p) {
    Fiber& f = self();
    Clock& spoken = state.spoken[p];
    f.seen.merge(spoken);
    spoken.merge(f.fenced);
}

// ---- barriers ------------------------------------------------------------------------------------------------------
void named_barrier(u32 id, u32 threads) {
    if (id >= 16) fail("named barrier %u: there are 16", id);
    if (threads % 32 != 0 || threads == 0) fail("named barrier %u: %u threads is not a multiple of 32", id, threads);
    NamedBarrier& b = self().block->named[id];
    if (b.arrived != 0 && b.expected != threads)
        fail("named barrier %u: %u threads expected here, %u by an earlier arrival", id, threads, b.expected);
    b.expected = threads;
    u64 generation = b.generation;
    b.coming.merge(self().clock);
    if (++b.arrived == threads) {
        b.arrived = 0;
        ++b.generation;
        b.handed = b.coming;
        b.coming = {};
    }
    self().met_barrier[id] = self().loads;
    self().met_generation[id] = generation + 1;
    wait_for_change(b.generation, generation, "named barrier %u (%u threads)", id, threads);
    // Of this generation, or of a later one that this thread has not met: threads that wait here arrived there, too.
    self().clock.merge(b.handed);
}

Mbarrier& mbarrier_at(u32 address) {
    shared_at(address, 8, 8);
    Block& b = block_of(address);
    auto it = b.mbarriers.find(address & ((1u << kRankShift) - 1));
    if (it == b.mbarriers.end())
        fail("mbarrier at shared offset %u was never initialised", (address & ((1u << kRankShift) - 1)) - kSharedBase);
    return it->second;
}

static void mbarrier_settle(Mbarrier& b) {
    if (b.pending == 0 && b.bytes == 0) {
        b.phase ^= 1;
        b.pending = b.count;
        b.spoken_for[b.phase].clear();  // of two phases ago: no thread waited for it
    }
}

void mbarrier_arrive_at(u32 address, u32 bytes) {
    Mbarrier& b = mbarrier_at(address);
    if (b.pending == 0)
        fail("mbarrier at shared offset %u: more than %u arrivals in one phase", address - kSharedBase, b.count);
    b.bytes += static_cast<i32>(bytes);
    --b.pending;
    mbarrier_settle(b);
}

void mbarrier_bytes_landed(u32 address, u32 bytes) {
    Mbarrier& b = mbarrier_at(address);
    b.bytes -= static_cast<i32>(bytes);
    mbarrier_settle(b);
}

void warp_collective(const char* operation, void* lane_data, void (*finish)(void**)) {
    Fiber& f = self();
    Warp& w = *f.warp;
    if (w.arrived != 0 && w.operation != operation && strcmp(w.operation, operation) != 0)
        fail("warp %u is not converged: lane %u executes %s while others wait in %s", f.thread / 32, f.thread % 32,
             operation, w.operation);
    w.operation = operation;
    w.lanes[f.thread % 32] = lane_data;
    u64 generation = w.generation;
    if (++w.arrived == 32) {
        finish(w.lanes);
        w.arrived = 0;
        ++w.generation;
    } else {
        wait_for_change(w.generation, generation, "warp-wide %s", operation);
    }
}

// ---- wgmma ---------------------------------------------------------------------------------------------------------
// Address of element (row, column) of a K-major operand in the 128-byte swizzle. The swizzle acts on address bits.
static u32 operand_offset(const Block& block, u64 descriptor, u32 row, u32 column) {
    if (descriptor >> 62 != 1) fail("wgmma descriptor 0x%llx: only the 128-byte swizzle is known here", descriptor);
    if ((descriptor >> 49 & 7) != 0) fail("wgmma descriptor 0x%llx: a base offset is not supported", descriptor);
    u32 start = static_cast<u32>(descriptor & 0x3fff) << 4;
    u32 stride = static_cast<u32>(descriptor >> 32 & 0x3fff) << 4;
    u32 address = start + row / 8 * stride + row % 8 * 128 + column * 2;
    address ^= (address >> 7 & 7) << 4;
    (void)block;
    return offset_of(address, 2, 2);
}

static void wgmma_check_fenced(Block& b, const WgmmaOperation& op) {
    for (u32 half = 0; half < 2; ++half) {
        for (u32 row = 0; row < op.n; ++row)
            check_fenced(b, operand_offset(b, op.b_descriptor, row, half * 8), "wgmma (B)");
        if (!op.registers)
            for (u32 row = 0; row < 64; ++row)
                check_fenced(b, operand_offset(b, op.a_descriptor, row, half * 8), "wgmma (A)");
    }
}

static void wgmma_execute(Block& b, const WgmmaOperation& op) {
    // By k, then by row: each sum in the order of k, adjacent rows, for the compiler's vectors.
    float a[16][64];
    for (u32 row = 0; row < 64; ++row) {
        for (u32 k = 0; k < 16; ++k) {
            u16 bits;
            if (op.registers) {
                // a[0]: (g, 2q), a[1]: (g+8, 2q), a[2]: (g, 2q+8), a[3]: (g+8, 2q+8)
                u32 lane = row % 8 * 4 + k % 8 / 2;
                bits = static_cast<u16>(op.a[row / 16 * 32 + lane][row % 16 / 8 + k / 8 * 2] >> (k % 2 * 16));
            } else {
                memcpy(&bits, b.shared + operand_offset(b, op.a_descriptor, row, k), 2);
            }
            a[k][row] = bf16_to_float(bits);
        }
    }
    for (u32 column = 0; column < op.n; ++column) {
        float w[16];
        for (u32 k = 0; k < 16; ++k) {
            u16 bits;
            memcpy(&bits, b.shared + operand_offset(b, op.b_descriptor, column, k), 2);
            w[k] = bf16_to_float(bits);
        }
        float sums[64] = {};
        for (u32 k = 0; k < 16; ++k)
            for (u32 row = 0; row < 64; ++row) sums[row] += a[k][row] * w[k];
        for (u32 row = 0; row < 64; ++row) {
            u32 thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
            op.d[thread][column / 8 * 4 + row % 16 / 8 * 2 + column % 2] += sums[row];
        }
    }
}

void wgmma_issue(u32 n, float* d, const u32* a_registers, u64 a_descriptor, u64 b_descriptor) {
    Fiber& f = self();
    Warpgroup& g = f.block->warpgroups[f.thread / 128];
    u64 slot = f.wgmma_issued++ - g.executed;
    if (slot >= g.queue.size()) {
        g.queue.emplace_back();
        WgmmaOperation& fresh = g.queue.back();
        fresh.n = n;
        fresh.registers = a_registers != nullptr;
        fresh.a_descriptor = a_descriptor;
        fresh.b_descriptor = b_descriptor;
    }
    WgmmaOperation& op = g.queue[slot];
    if (op.n != n || op.b_descriptor != b_descriptor || op.a_descriptor != a_descriptor ||
        op.registers != (a_registers != nullptr))
        fail("wgmma: the threads of a warpgroup disagree about operands");
    op.d[f.thread % 128] = d;
    if (a_registers) memcpy(op.a[f.thread % 128], a_registers, 16);
    if (++op.arrived == 128) wgmma_check_fenced(*f.block, op);
}

void wgmma_commit() { self().wgmma_commits.push_back(self().wgmma_issued); }

void wgmma_wait(u32 pending_groups) {
    Fiber& f = self();
    Warpgroup& g = f.block->warpgroups[f.thread / 128];
    if (f.wgmma_commits.size() <= pending_groups) return;
    u64 target = f.wgmma_commits[f.wgmma_commits.size() - 1 - pending_groups];
    wait_until([&g, target] { return g.executed >= target; }, "wgmma group (operation %llu)", target);
}

// Runs the oldest complete operation of some warpgroup; false if there is none.
static bool wgmma_progress() {
    for (Block* b : simulator().blocks) {
        for (Warpgroup& g : b->warpgroups) {
            if (g.queue.empty() || g.queue.front().arrived != 128) continue;
            wgmma_execute(*b, g.queue.front());
            g.queue.pop_front();
            ++g.executed;
            return true;
        }
    }
    return false;
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------
static void complete_one_copy() {
    u32 i = random_below(static_cast<u32>(state.pending.size()));
    Pending p = std::move(state.pending[i]);
    state.pending[i] = std::move(state.pending.back());
    state.pending.pop_back();
    p.apply();
}

// ---- scheduler -----------------------------------------------------------------------------------------------------
static void fiber_main() {
    Simulator& m = simulator();
    m.entry(m.arguments);
    m.current->done = true;
    _longjmp(m.scheduler, 1);
}

[[noreturn]] static void report_deadlock(const char* kind) {
    Simulator& m = simulator();
    std::map<std::string, std::vector<u32>> waits;
    for (Fiber* f : m.fibers)
        if (!f->done) {
            char text[160] = "polls";
            if (f->wait) f->wait->told(text, sizeof text);
            waits[text].push_back(f->thread);
        }
    std::string text = kind;
    for (auto& [what, threads] : waits) {
        text += "\n  " + std::to_string(threads.size()) + " threads (" + std::to_string(threads.front()) + ".." +
                std::to_string(threads.back()) + ") wait for " + what;
    }
    for (Block* b : m.blocks)
        for (auto& [address, bar] : b->mbarriers)
            if (bar.pending != bar.count || bar.bytes != 0)
                text += "\n  mbarrier at offset " + std::to_string(address - kSharedBase) + ": " +
                        std::to_string(bar.pending) + " of " + std::to_string(bar.count) + " arrivals and " +
                        std::to_string(bar.bytes) + " bytes outstanding";
    m.current = nullptr;
    fail("%s", text.c_str());
}

// Who runs in the coming passes: all fibers but [begin, end), or only these; all fibers if there are none.
struct Turn {
    u32 begin = 0, end = 0, passes = 1;
    bool others = true;

    bool everybody() const { return begin == end; }
    bool has(u32 fiber) const { return (begin <= fiber && fiber < end) != others; }
};

static Turn next_turn(u32 fibers) {
    // Groups of 32, 64, ... threads, less than all.
    u32 sizes = 0;
    while (32u << sizes < fibers) ++sizes;
    if (sizes == 0 || random_below(4) == 0) return {};
    const u32 size = 32u << random_below(sizes), begin = random_below((fibers + size - 1) / size) * size;
    return {begin, begin + size, 16u << random_below(6), random_below(2) == 0};
}

static void run_blocks() {
    Simulator& m = simulator();
    const u32 count = static_cast<u32>(m.fibers.size());
    u32 left = count, spins = 0;
    Turn turn;
    std::vector<u32>& members = m.members;
    members.clear();
    for (u32 i = 0; i < count; ++i) members.push_back(i);
    while (left > 0) {
        if (turn.passes-- == 0) {
            turn = next_turn(count);
            members.clear();
            for (u32 i = 0; i < count; ++i)
                if (turn.has(i) && !m.fibers[i]->done) members.push_back(i);
            continue;
        }
        bool progressed = false, polled = false;
        const u32 all = static_cast<u32>(members.size());
        u32 next = all == 0 ? 0 : random_below(all);
        for (u32 i = 0; i < all; ++i) {
            const u32 member = members[next];
            next = next + 1 == all ? 0 : next + 1;
            if (m.watches[member].is_unchanged()) continue;
            Fiber* f = m.fibers[member];
            if (f->done || (f->wait && !f->wait->ready())) continue;
            (f->polling ? polled : progressed) = true;
            m.current = f;
            if (_setjmp(m.scheduler) == 0) {
                if (f->started) _longjmp(f->context, 1);
                f->started = true;
                setcontext(&f->first);
            }
            m.current = nullptr;
            if (f->done) --left;
        }
        if (!turn.everybody()) {
            // As far as they can go; no copy completes meanwhile.
            if (progressed) spins = 0;
            else turn.passes = 0;
            continue;
        }
        // Asynchronous work completes late: at random, or when nothing else can move.
        bool stuck = !progressed;
        while (!state.pending.empty() && (stuck || random_below(3) == 0)) {
            // Of many, several: one a pass would be thousands of passes over threads that wait.
            for (size_t due = 1 + state.pending.size() / 16; due > 0; --due) complete_one_copy();
            progressed = true;
            stuck = false;
        }
        if (stuck || random_below(3) == 0) progressed |= wgmma_progress();
        if (progressed) {
            spins = 0;
        } else if (!polled) {
            report_deadlock("deadlock: every thread waits");
        } else if (++spins > kSpinLimit) {
            report_deadlock("livelock: threads poll and nothing changes");
        }
    }
    for (Pending& p : state.pending)
        if (p.is_load) fail("the block ended while a bulk load was in flight");
    while (!state.pending.empty()) complete_one_copy();
    for (Block* b : m.blocks)
        for (Warpgroup& g : b->warpgroups)
            if (!g.queue.empty()) fail("the block ended with wgmma operations that no thread waited for");
}

static void drop_blocks() {
    Simulator& m = simulator();
    for (Fiber* f : m.fibers) delete f;
    m.fibers.clear();
    m.watches.clear();
    for (Block* b : m.blocks) {
        free(b->shared);
        delete b;
    }
    m.blocks.clear();
}

int run_grid(u32 grid, u32 threads, u32 shared_bytes, u32 cluster, u64 seed, void (*entry)(const void*),
             const void* arguments) {
    Simulator& m = simulator();
    m.grid = grid;
    m.block_threads = threads;
    m.shared_bytes = shared_bytes;
    m.cluster = cluster == 0 ? 1 : cluster;
    m.random = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
    if (m.random == 0) m.random = 1;
    m.entry = entry;
    m.arguments = arguments;
    state.error.clear();
    m.current = nullptr;
    state.pending.clear();
    state.written.clear();
    state.spoken.clear();
    if (threads == 0 || threads % 32 != 0 || threads > 1024 || grid % m.cluster != 0) {
        state.error = "a block has 32..1024 threads, a multiple of 32, and the grid is a multiple of the cluster";
        return 1;
    }
    volatile int result = 0;
    u32 fibers = threads * m.cluster;
    u64 stack_total = u64(fibers) * kStackBytes;
    if (m.stack_bytes < stack_total) {
        if (m.stacks) munmap(m.stacks, m.stack_bytes);
        const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* stacks = mmap(nullptr, stack_total, PROT_READ | PROT_WRITE, kind, -1, 0);
        m.stacks = stacks == MAP_FAILED ? nullptr : static_cast<u8*>(stacks);
        m.stack_bytes = m.stacks ? stack_total : 0;
        if (!m.stacks) {
            state.error = "no memory for the fibers' stacks";
            return 1;
        }
    }
    if (_setjmp(m.launch) == 0) {
        for (u32 first = 0; first < grid; first += m.cluster) {
            for (u32 r = 0; r < m.cluster; ++r) {
                Block* b = new Block;
                b->index = first + r;
                b->rank = r;
                b->shared = static_cast<u8*>(aligned_alloc(1024, (shared_bytes + 2047) / 1024 * 1024));
                memset(b->shared, 0xFF, shared_bytes);  // garbage, as on the device: NaN, where it is taken for numbers
                b->unfenced.assign(shared_bytes / 16 + 2, 0);
                b->warps.resize(threads / 32);
                b->warpgroups.resize((threads + 127) / 128);
                m.blocks.push_back(b);
                for (u32 t = 0; t < threads; ++t) {
                    Fiber* f = new Fiber;
                    f->thread = t;
                    f->block = b;
                    f->warp = &b->warps[t / 32];
                    f->stack = m.stacks + u64(r * threads + t) * kStackBytes;
                    getcontext(&f->first);
                    f->first.uc_stack.ss_sp = f->stack;
                    // Tops in different lines of a cache: the scheduler reads there what each fiber waits for.
                    f->first.uc_stack.ss_size = kStackBytes - t % 64 * 64;
                    f->first.uc_link = nullptr;
                    makecontext(&f->first, fiber_main, 0);
                    m.fibers.push_back(f);
                    m.watches.push_back({});
                }
            }
            m.cluster_arrived = 0;
            run_blocks();
            drop_blocks();
        }
    } else {
        result = 1;
        drop_blocks();
        state.pending.clear();
        m.current = nullptr;
    }
    return result;
}

}  // namespace uw::cpu

// ---- C ABI of a library ---------------------------------------------------------------------------------------------
const char* uw_cpu_last_error() { return uw::cpu::state.error.c_str(); }
void uw_cpu_register(const void* begin, unsigned long long bytes, const char* name) {
    const char* p = static_cast<const char*>(begin);
    uw::cpu::state.allocations[p] = {p, bytes, name};
    uw::cpu::simulator().partials |= strcmp(name, "partials") == 0;
}
void uw_cpu_clear_registered() {
    uw::cpu::state.allocations.clear();
    uw::cpu::simulator().partials = false;
}
