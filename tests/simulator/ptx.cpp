// What wrappers of ptx.hpp do that is more than a line or two: compiled once and not with each kernel.
#include "prelude.hpp"
#include "state.hpp"

namespace uw::ptx {

// ---- core.cuh ------------------------------------------------------------------------------------------------------
namespace detail {
struct Exchange {
    u32 in, argument, out;
};
static u32 exchange(const char* operation, u32 value, u32 argument, void (*finish)(void**)) {
    Exchange e{value, argument, 0};
    cpu::warp_collective(operation, &e, finish);
    return e.out;
}
template <class Source>
void pick(void** lanes, Source source) {
    for (u32 l = 0; l < 32; ++l) {
        Exchange* e = static_cast<Exchange*>(lanes[l]);
        e->out = static_cast<Exchange*>(lanes[source(l, e->argument) % 32])->in;
    }
}
}  // namespace detail

void bar_warp_sync() {
    cpu::self().met_warp = cpu::self().loads;
    cpu::Clock all = cpu::self().clock;
    cpu::warp_collective("bar_warp_sync", &all, [](void** lanes) {
        cpu::Clock& first = *static_cast<cpu::Clock*>(lanes[0]);
        for (u32 l = 1; l < 32; ++l) first.merge(*static_cast<cpu::Clock*>(lanes[l]));
        for (u32 l = 1; l < 32; ++l) *static_cast<cpu::Clock*>(lanes[l]) = first;
    });
    cpu::self().clock.merge(all);
}
u32 shfl_sync_idx(u32 value, u32 source_lane) {
    return detail::exchange("shfl_sync_idx", value, source_lane,
                            [](void** l) { detail::pick(l, [](u32, u32 a) { return a; }); });
}
u32 shfl_sync_bfly(u32 value, u32 lane_mask) {
    return detail::exchange("shfl_sync_bfly", value, lane_mask,
                            [](void** l) { detail::pick(l, [](u32 i, u32 a) { return i ^ a; }); });
}
u32 shfl_sync_up(u32 value, u32 delta) {
    return detail::exchange("shfl_sync_up", value, delta,
                            [](void** l) { detail::pick(l, [](u32 i, u32 a) { return i < a ? i : i - a; }); });
}
u32 vote_sync_ballot(bool predicate) {
    return detail::exchange("vote_sync_ballot", predicate, 0, [](void** lanes) {
        u32 bits = 0;
        for (u32 l = 0; l < 32; ++l) bits |= static_cast<detail::Exchange*>(lanes[l])->in << l;
        for (u32 l = 0; l < 32; ++l) static_cast<detail::Exchange*>(lanes[l])->out = bits;
    });
}
u32 match_any_sync(u32 value) {
    return detail::exchange("match_any_sync", value, 0, [](void** lanes) {
        for (u32 l = 0; l < 32; ++l) {
            detail::Exchange* e = static_cast<detail::Exchange*>(lanes[l]);
            for (u32 o = 0; o < 32; ++o) e->out |= u32(static_cast<detail::Exchange*>(lanes[o])->in == e->in) << o;
        }
    });
}
u32 redux_sync_max(u32 value) {
    return detail::exchange("redux_sync_max", value, 0, [](void** lanes) {
        u32 most = 0;
        for (u32 l = 0; l < 32; ++l) {
            const u32 in = static_cast<detail::Exchange*>(lanes[l])->in;
            most = in > most ? in : most;
        }
        for (u32 l = 0; l < 32; ++l) static_cast<detail::Exchange*>(lanes[l])->out = most;
    });
}
u32 redux_sync_min(u32 value) {
    return detail::exchange("redux_sync_min", value, 0, [](void** lanes) {
        u32 least = ~0u;
        for (u32 l = 0; l < 32; ++l) {
            const u32 in = static_cast<detail::Exchange*>(lanes[l])->in;
            least = in < least ? in : least;
        }
        for (u32 l = 0; l < 32; ++l) static_cast<detail::Exchange*>(lanes[l])->out = least;
    });
}
// ---- memory.cuh ----------------------------------------------------------------------------------------------------
u32 cvta_to_shared(const void* pointer) {
    cpu::Block& b = *cpu::self().block;
    long long offset = static_cast<const u8*>(pointer) - b.shared;
    if (offset < 0 || offset > cpu::simulator().shared_bytes)
        cpu::fail("cvta_to_shared: %p is not in dynamic shared memory (static __shared__ has no address here)",
                  pointer);
    return b.rank << cpu::kRankShift | (cpu::kSharedBase + static_cast<u32>(offset));
}
void st_release_global_u64(u64* p, u64 v) {
    cpu::state.spoken[p] = cpu::self().clock;
    cpu::write_global(p, v);
}
void st_release_global(u32* p, u32 v) {
    cpu::state.spoken[p] = cpu::self().clock;
    cpu::write_global(p, v);
}
u32 ld_acquire_global(const u32* p) {
    u32 v = cpu::read_global<u32>(p);
    cpu::self().clock.merge(cpu::state.spoken[p]);
    cpu::poll();
    return v;
}
u64 ld_acquire_global_u64(const u64* p) {
    u64 v = cpu::read_global<u64>(p);
    cpu::self().clock.merge(cpu::state.spoken[p]);
    cpu::poll();
    return v;
}
// ---- barrier.cuh ---------------------------------------------------------------------------------------------------
void barrier_cluster_arrive() {
    cpu::Simulator& m = cpu::simulator();
    cpu::self().cluster_generation = m.cluster_generation;
    if (++m.cluster_arrived == m.cluster * m.block_threads) {
        m.cluster_arrived = 0;
        ++m.cluster_generation;
    }
}
void barrier_cluster_wait() {
    cpu::wait_for_change(cpu::simulator().cluster_generation, cpu::self().cluster_generation, "cluster barrier");
}
// ---- mbarrier.cuh --------------------------------------------------------------------------------------------------
void mbarrier_init(u32 barrier, u32 arrivals) {
    cpu::shared_at(barrier, 8, 8);
    cpu::block_of(barrier).mbarriers[barrier & ((1u << cpu::kRankShift) - 1)] = cpu::Mbarrier{arrivals, arrivals, 0, 0};
}
void mbarrier_arrive(u32 barrier) {
    cpu::speak_for_reads(cpu::mbarrier_at(barrier));
    cpu::mbarrier_arrive_at(barrier, 0);
}
bool mbarrier_try_wait_parity(u32 barrier, u32 parity) {
    if (cpu::mbarrier_at(barrier).phase == parity) cpu::poll();
    return mbarrier_test_wait_parity(barrier, parity);
}
bool mbarrier_test_wait_parity(u32 barrier, u32 parity) {
    cpu::Mbarrier& b = cpu::mbarrier_at(barrier);
    if (b.phase == parity) return false;
    cpu::release_spoken_for(b, parity);
    return true;
}
void mbarrier_wait_parity(u32 barrier, u32 parity) {
    cpu::Mbarrier& b = cpu::mbarrier_at(barrier);
    cpu::wait_for_change(b.phase, parity, "mbarrier at offset %u, parity %u",
                         (barrier & ((1u << cpu::kRankShift) - 1)) - cpu::kSharedBase, parity);
    cpu::release_spoken_for(b, parity);
}
// ---- fence.cuh -----------------------------------------------------------------------------------------------------
void fence_proxy_async_shared() {
    cpu::fence_own_writes();
    cpu::release_own_reads();
}
// ---- bulk.cuh ------------------------------------------------------------------------------------------------------
namespace detail {
// What tests/simulator puts in the 128 opaque bytes of a map.
struct Map {
    static constexpr u64 kMagic = 0x70616d2d75706375ull;
    u64 magic;
    u8* base;
    u64 columns, rows, row_bytes;
    u32 box_columns, box_rows, element_bytes, swizzle_bytes;
};
static_assert(sizeof(Map) <= sizeof(TensorMap));
static Map map_of(const TensorMap& opaque) {
    Map map;
    memcpy(&map, &opaque, sizeof map);
    if (map.magic != Map::kMagic) cpu::fail("tensor map: not made by tensor_map_2d");
    return map;
}
// Calls visit(shared pointer, global pointer or null when outside, bytes) for each 16 bytes (or element) of a box.
template <class Visit>
void each_piece(const Map& map, u32 column, u32 row, u32 shared, Visit visit) {
    u32 box_row_bytes = map.box_columns * map.element_bytes;
    for (u32 r = 0; r < map.box_rows; ++r) {
        for (u32 b = 0; b < box_row_bytes; b += map.element_bytes) {
            u32 address = shared + r * box_row_bytes + b;
            if (map.swizzle_bytes != 0) address ^= (address >> 7 & (map.swizzle_bytes / 16 - 1)) << 4;
            u64 c = int64_t(i32(column)) + b / map.element_bytes, y = int64_t(i32(row)) + r;
            bool inside = c < map.columns && y < map.rows;
            visit(cpu::shared_at(address, map.element_bytes, map.element_bytes),
                  inside ? map.base + y * map.row_bytes + c * map.element_bytes : nullptr, map.element_bytes);
        }
    }
}
static void start_store(u32 source, u32 bytes, std::function<void()> apply) {
    cpu::Fiber* f = &cpu::self();
    u32 group = static_cast<u32>(f->bulk_groups.size()) - 1;
    ++f->bulk_groups[group];
    cpu::state.pending.push_back({[f, group, apply] {
                                            apply();
                                            --f->bulk_groups[group];
                                        },
                                        false, source, bytes});
}
static u32 map_box_bytes(const Map& m) { return m.box_columns * m.box_rows * m.element_bytes; }
static void check_map_address(const Map& m, u32 shared, const char* what) {
    u32 alignment = m.swizzle_bytes != 0 ? 8 * m.swizzle_bytes : 128;  // where the swizzle repeats
    cpu::shared_at(shared, map_box_bytes(m), alignment);
    (void)what;
}
// Until of a thread's groups all but the last `pending` closed ones are done.
static void wait_for_groups(const std::vector<u32>& groups, u32 pending, const char* what) {
    u64 closed = groups.size() - 1;
    u64 must_finish = closed > pending ? closed - pending : 0;
    cpu::wait_until(
        [&groups, must_finish] {
            for (u64 i = 0; i < must_finish; ++i)
                if (groups[i] != 0) return false;
            return true;
        },
        "%s", what);
}
}  // namespace detail

void cp_async_bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, u64) {
    if (bytes == 0 || bytes % 16 != 0)
        cpu::fail("cp_async_bulk_load: %u bytes is not a positive multiple of 16", bytes);
    cpu::check_global(source, bytes, 16, "cp_async_bulk_load");
    u8* to = cpu::shared_at(destination, bytes, 16);
    cpu::check_refill(destination, bytes, "cp_async_bulk_load");
    cpu::mbarrier_at(barrier);
    cpu::state.pending.push_back({[to, source, bytes, barrier] {
                                            memcpy(to, source, bytes);
                                            cpu::mbarrier_bytes_landed(barrier, bytes);
                                        },
                                        true});
}
void cp_async_bulk_store(void* destination, u32 source, u32 bytes) {
    if (bytes == 0 || bytes % 16 != 0)
        cpu::fail("cp_async_bulk_store: %u bytes is not a positive multiple of 16", bytes);
    cpu::check_global(destination, bytes, 16, "cp_async_bulk_store");
    const u8* from = cpu::shared_at(source, bytes, 16);
    u32 first = cpu::offset_of(source, bytes, 16);
    for (u32 o = 0; o < bytes; o += 16) cpu::check_fenced(*cpu::self().block, first + o, "cp_async_bulk_store");
    detail::start_store(source, bytes, [=] { memcpy(destination, from, bytes); });
}
void tma_load_2d(u32 destination, const TensorMap& opaque, u32 column, u32 row, u32 barrier, u64) {
    detail::Map map = detail::map_of(opaque);
    detail::check_map_address(map, destination, "tma_load_2d");
    cpu::check_refill(destination, detail::map_box_bytes(map), "tma_load_2d");
    cpu::mbarrier_at(barrier);
    cpu::state.pending.push_back({[=] {
                                            detail::each_piece(map, column, row, destination,
                                                               [](u8* s, u8* g, u32 bytes) {
                                                                   if (g) memcpy(s, g, bytes);
                                                                   else memset(s, 0, bytes);
                                                               });
                                            cpu::mbarrier_bytes_landed(barrier, detail::map_box_bytes(map));
                                        },
                                        true});
}
void tma_store_2d(const TensorMap& opaque, u32 column, u32 row, u32 source) {
    detail::Map map = detail::map_of(opaque);
    detail::check_map_address(map, source, "tma_store_2d");
    detail::start_store(source, detail::map_box_bytes(map), [=] {
        detail::each_piece(map, column, row, source, [](u8* s, u8* g, u32 bytes) {
            if (g) memcpy(g, s, bytes);
        });
    });
}
void tma_reduce_add_2d(const TensorMap& opaque, u32 column, u32 row, u32 source) {
    detail::Map map = detail::map_of(opaque);
    detail::check_map_address(map, source, "tma_reduce_add_2d");
    if (map.element_bytes != 2 && map.element_bytes != 4) cpu::fail("tma_reduce_add_2d: bf16 or fp32 only");
    detail::start_store(source, detail::map_box_bytes(map), [=] {
        detail::each_piece(map, column, row, source, [](u8* s, u8* g, u32 bytes) {
            if (!g) return;
            if (bytes == 4) {
                float a, b;
                memcpy(&a, s, 4);
                memcpy(&b, g, 4);
                a += b;
                memcpy(g, &a, 4);
            } else {
                u16 a, b;
                memcpy(&a, s, 2);
                memcpy(&b, g, 2);
                u16 sum = static_cast<u16>(bf16_bits(cpu::bf16_to_float(a) + cpu::bf16_to_float(b)));
                memcpy(g, &sum, 2);
            }
        });
    });
}
void cp_async_bulk_commit_group() { cpu::self().bulk_groups.push_back(0); }
void cp_async_bulk_wait_group(u32 pending) {
    detail::wait_for_groups(cpu::self().bulk_groups, pending, "bulk store groups");
}
// ---- async.cuh -----------------------------------------------------------------------------------------------------
void cp_async_x4(u32 destination, const void* source, bool used) {
    if (used) cpu::check_global(source, 16, 16, "cp_async_x4");
    u8* to = cpu::shared_at(destination, 16, 16);
    cpu::check_overwrite(destination, 16, "cp_async_x4");
    cpu::Fiber* f = &cpu::self();
    u32 group = static_cast<u32>(f->async_groups.size()) - 1;
    ++f->async_groups[group];
    cpu::state.pending.push_back({[=] {
                                            if (used) memcpy(to, source, 16);
                                            else memset(to, 0, 16);
                                            --f->async_groups[group];
                                        },
                                        true});
}
void cp_async_commit_group() { cpu::self().async_groups.push_back(0); }
void cp_async_wait_group(u32 pending) {
    detail::wait_for_groups(cpu::self().async_groups, pending, "its own asynchronous copies");
}
// ---- mma.cuh -------------------------------------------------------------------------------------------------------
namespace detail {
struct MmaLane {
    float* d;
    const u32* a;
    const u32* b;
};
struct MatrixLane {
    u32 address;
    u32* values;
};
static u16 half_of(u32 word, u32 high) { return static_cast<u16>(word >> (16 * high)); }
template <bool kTransposed, bool kStore>
void move_matrices(void** lanes) {
    for (u32 matrix = 0; matrix < 4; ++matrix) {
        for (u32 row = 0; row < 8; ++row) {
            u32 address = static_cast<MatrixLane*>(lanes[matrix * 8 + row])->address;
            u8* p = cpu::shared_at(address, 16, 16);
            if (kStore) cpu::mark_unfenced(address, 16);
            for (u32 column = 0; column < 8; ++column) {
                u32 r = kTransposed ? column : row, c = kTransposed ? row : column;
                u32& word = static_cast<MatrixLane*>(lanes[r * 4 + c / 2])->values[matrix];
                u16 bits;
                if (kStore) {
                    bits = half_of(word, c % 2);
                    memcpy(p + column * 2, &bits, 2);
                } else {
                    memcpy(&bits, p + column * 2, 2);
                    word = (word & ~(0xffffu << (16 * (c % 2)))) | u32(bits) << (16 * (c % 2));
                }
            }
        }
    }
}
template <bool kTransposed>
U32x4 load_matrices(u32 address) {
    u32 v[4] = {};
    MatrixLane lane{address, v};
    cpu::shared_at(address, 16, 16);
    cpu::mark_read(address, 16);
    cpu::warp_collective("ldmatrix", &lane, move_matrices<kTransposed, false>);
    return {v[0], v[1], v[2], v[3]};
}
template <bool kTransposed>
void store_matrices(u32 address, U32x4 x) {
    u32 v[4] = {x.x, x.y, x.z, x.w};
    MatrixLane lane{address, v};
    cpu::warp_collective("stmatrix", &lane, move_matrices<kTransposed, true>);
}
}  // namespace detail

void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    detail::MmaLane lane{d, a, b};
    cpu::warp_collective("mma", &lane, [](void** lanes) {
        auto at = [&](u32 l) { return static_cast<detail::MmaLane*>(lanes[l]); };
        // Each sum in the order of k; adjacent columns, for the compiler's vectors.
        float w[16][8];
        for (u32 k = 0; k < 16; ++k)
            for (u32 column = 0; column < 8; ++column)
                w[k][column] = cpu::bf16_to_float(detail::half_of(at(column * 4 + k % 8 / 2)->b[k / 8], k % 2));
        for (u32 row = 0; row < 16; ++row) {
            float sums[8] = {};
            for (u32 k = 0; k < 16; ++k) {
                const u32 word = at(row % 8 * 4 + k % 8 / 2)->a[row / 8 + k / 8 * 2];
                const float x = cpu::bf16_to_float(detail::half_of(word, k % 2));
                for (u32 column = 0; column < 8; ++column) sums[column] += x * w[k][column];
            }
            for (u32 column = 0; column < 8; ++column)
                at(row % 8 * 4 + column / 2)->d[row / 8 * 2 + column % 2] += sums[column];
        }
    });
}
U32x4 ldmatrix_x4(u32 a) { return detail::load_matrices<false>(a); }
U32x4 ldmatrix_x4_trans(u32 a) { return detail::load_matrices<true>(a); }
void stmatrix_x4(u32 a, U32x4 v) { detail::store_matrices<false>(a, v); }
void stmatrix_x4_trans(u32 a, U32x4 v) { detail::store_matrices<true>(a, v); }

}  // namespace uw::ptx

void uw_cpu_tensor_map_2d(void* map, void* base, unsigned element_bytes, unsigned long long columns,
                          unsigned long long rows, unsigned long long row_bytes, unsigned box_columns,
                          unsigned box_rows, unsigned swizzle_bytes) {
    uw::ptx::detail::Map m{uw::ptx::detail::Map::kMagic,
                           static_cast<uw::u8*>(base),
                           columns,
                           rows,
                           row_bytes,
                           box_columns,
                           box_rows,
                           element_bytes,
                           swizzle_bytes};
    memset(map, 0, sizeof(uw::TensorMap));
    memcpy(map, &m, sizeof m);
}
