// Reconstructive GEMM with the weights on the rows of wgmma, Y^T = W * X^T; see unweight/kernels/gemm_recon.cuh.
#pragma once

#include "unweight/epilogue/store.cuh"
#include "unweight/kernels/gemm_recon/sources.cuh"
#include "unweight/ptx/mma.cuh"

namespace uw::gemm_recon::weight_rows {

constexpr u32 kMaxBatch = 256;  // rows of X in a task: the columns of one wgmma
constexpr u32 kXRows = 3 * kMaxBatch;
constexpr u32 kXSlots = kXRows / kTile;  // if a slot holds 64 rows

enum class NamedBarrier : u32 {
    kFirstWarpgroup = 1,
    kSecondWarpgroup = 2,
};

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem : SourceSizes<Config> {
    using Sizes = SourceSizes<Config>;
    static constexpr u32 kXBytes = kXRows * kTile * 2;

    static constexpr u32 kX = 0;
    static constexpr u32 kB = kX + kXBytes;
    static constexpr u32 kSign = kB + kBBuffers * Sizes::kBBytes;
    static constexpr u32 kExponent = kSign + Config::kStages * Sizes::kSignSlotBytes;
    static constexpr u32 kVerbatim = kExponent + Config::kStages * Sizes::kExponentSlotBytes;
    static constexpr u32 kMask = kVerbatim + Config::kStages * Sizes::kVerbatimSlotBytes;
    static constexpr u32 kSourceBarriers = kMask + Config::kStages * Sizes::kMaskSlotBytes;
    static constexpr u32 kXBarriers = kSourceBarriers + pipeline::Ring<Config::kStages>::kBarrierBytes;
    static constexpr u32 kBytes = kXBarriers + pipeline::Ring<kXSlots>::kBarrierBytes;

    static_assert(kB % smem::kSwizzlePeriodBytes == 0, "swizzled tiles are 1024-byte aligned");
};

template <class Config>
struct Kernel : SourceRing<Config, Smem<Config>> {
    using Args = GemmReconArgs;
    using S = Smem<Config>;
    using Base = SourceRing<Config, S>;
    using OutputTile = smem::Bf16Tile<kTile>;  // 64 rows of Y by the 64 features of a tile
    static constexpr u32 kProducerRegisters = 40;
    static constexpr u32 kConsumerRegisters = 232;
    static constexpr u32 kUnits = 2;  // blocks of 8 rows of W that a warp joins per step
    static_assert(Config::kNTiles == kConsumerWarpgroups, "a warpgroup owns a tile");
    using Base::args, Base::shared, Base::sources, Base::source_cursor, Base::kTaskColumns, Base::steps, Base::rotated;

    const pipeline::Ring<kXSlots> activations;
    u32 x_slot = 0, x_parity = 0;

    // Consumers only.
    u32 b_buffer = 0;

    UW_DEVICE Kernel(const Args& a, u32 shared_address)
        : Base(a, shared_address), activations{shared_address + S::kXBarriers} {}

    UW_DEVICE void setup() const {
        Base::setup_sources();
        activations.init(1, kConsumerWarpgroups);
    }

    // ---- tasks -----------------------------------------------------------------------------------------------------
    struct Task {
        u32 row, rows;  // of X; rows may be 0
        u32 column;     // of Y
    };

    // Rows of X in a slot: fixed for a launch, so that slots do not move. A small batch has more and smaller slots.
    UW_DEVICE u32 slot_rows() const { return args.m <= 64 ? 64 : args.m <= 128 ? 128 : kMaxBatch; }
    UW_DEVICE u32 slots() const { return kXRows / slot_rows(); }
    UW_DEVICE u32 slot_address(u32 slot) const { return shared + S::kX + slot * slot_rows() * (kTile * 2); }
    UW_DEVICE u32 next_slot(u32 slot) const { return slot + 1 == slots() ? 0 : slot + 1; }
    UW_DEVICE void advance_x() {
        x_slot = next_slot(x_slot);
        if (x_slot == 0) x_parity ^= 1;
    }

    UW_DEVICE u32 m_tasks() const { return (args.m + slot_rows() - 1) / slot_rows(); }
    UW_DEVICE u32 whole_tasks() const { return m_tasks() * (args.n / kTaskColumns); }
    UW_DEVICE u32 tasks_in_rounds() const { return whole_tasks() - whole_tasks() % ptx::nctaid(); }
    // Tasks that do not fill a wave of the grid are cut in two or four along m if the pieces still fit one wave.
    UW_DEVICE u32 pieces() const {
        const u32 left = whole_tasks() % ptx::nctaid();
#pragma unroll
        for (u32 count = kMaxBatch / kTile; count > 1; count /= 2) {
            if (left * count <= ptx::nctaid() && slot_rows() >= kTile * count) return count;
        }
        return 1;
    }
    UW_DEVICE u32 tasks() const { return tasks_in_rounds() + whole_tasks() % ptx::nctaid() * pieces(); }
    UW_DEVICE Task task_at(u32 index) const {
        const u32 even = tasks_in_rounds();
        const u32 count = index < even ? 1 : pieces(), over = index < even ? 0 : index - even;
        const u32 whole = index < even ? index : even + over / count;
        const u32 rows = slot_rows() / count;
        const u32 row = whole % m_tasks() * slot_rows() + over % count * rows;
        const u32 left = row < args.m ? args.m - row : 0;
        return {row, left < rows ? left : rows, whole / m_tasks() * kTaskColumns};
    }

    // ---- load ------------------------------------------------------------------------------------------------------
    UW_DEVICE void load(u32 index, u32 warp) {
        const Task t = task_at(index);
        if (t.rows == 0) return;
        if (warp == 0) Base::load_sources(t.column, m_tasks() == 1 && pieces() == 1);
        if (warp == 1) load_activations(t);
    }

    UW_DEVICE void load_activations(const Task& t) {
        const bool leader = ptx::elect_sync();
        const u64 policy = ptx::createpolicy_l2(L2::kEvictLast);
        const u32 boxes = (t.rows + kTile - 1) / kTile;
        for (u32 step = 0; step < steps(); ++step) {
            // The wgmma that read the slot are complete in both warpgroups.
            ptx::mbarrier_wait_parity(activations.empty(x_slot), x_parity ^ 1);
            if (leader) {
                const u32 barrier = activations.full(x_slot), slot = slot_address(x_slot),
                          k_step = rotated(step, t.column);
                ptx::mbarrier_arrive_expect_tx(barrier, boxes * S::kBoxBytes);
                for (u32 i = 0; i < boxes; ++i) {
                    ptx::tma_load_2d(slot + i * S::kBoxBytes, args.x, k_step * kTile, t.row + i * kTile, barrier,
                                     policy);
                }
            }
            ptx::bar_warp_sync();  // reconverges the warp; the slot's mbarriers order shared memory
            advance_x();
        }
    }

    // ---- compute ---------------------------------------------------------------------------------------------------
    // What a lane joins in one step: 16 weights of each of its warp's blocks.
    struct Staged {
        U32x4 sign_mantissa[kUnits];
        U32x4 exponents[kPaletteSource<Config> ? 1 : kUnits];
        U32x2 indices[kPaletteSource<Config> ? kUnits : 1];
        u32 verbatim[S::kHasVerbatim ? kUnits : 1];  // bit r: row r of the block is verbatim
    };

    struct Place {
        u32 thread, warp, lane;  // within the warpgroup
        u32 tile;                // the warpgroup, and its tile of W
        u32 b_first, b_second;   // offsets of the lane's two chunks in a block

        UW_DEVICE Place() {
            const u32 consumer_warp = ptx::uniform_warp_index() - pipeline::kWarpgroupWarps;
            lane = ptx::laneid();
            warp = consumer_warp % pipeline::kWarpgroupWarps;
            tile = consumer_warp / pipeline::kWarpgroupWarps;
            thread = warp * 32 + lane;
            // Lane l joins bytes 16*(l%4).. of row l/4: eight lanes store to two rows of opposite swizzle parity, so no
            // banks collide.
            b_first = OutputTile::offset(lane / 4, lane % 4 * 2);
            b_second = OutputTile::offset(lane / 4, lane % 4 * 2 + 1);
        }
        UW_DEVICE u32 block(u32 unit) const { return warp * kUnits + unit; }
    };

    // One named barrier per warpgroup, each with a literal id: an id chosen at run time makes the compiler serialize
    // wgmma.
    UW_DEVICE void sync_warpgroup(const Place& p) const {
        if (p.tile == 0) {
            ptx::bar_sync(NamedBarrier::kFirstWarpgroup, pipeline::kWarpgroupThreads);
        } else {
            ptx::bar_sync(NamedBarrier::kSecondWarpgroup, pipeline::kWarpgroupThreads);
        }
    }

    UW_DEVICE void fetch(Staged& s, const Place& p) const {
        sources.wait_full(source_cursor);
        const u32 slot = source_cursor.slot;
        const u32 sign = shared + S::kSign + slot * S::kSignSlotBytes + p.tile * S::kSignTileBytes;
        const u32 exponent = shared + S::kExponent + slot * S::kExponentSlotBytes + p.tile * S::kExponentTileBytes;
#pragma unroll
        for (u32 u = 0; u < kUnits; ++u) {
            const u32 piece = p.block(u) * 32 + p.lane;
            s.sign_mantissa[u] = ptx::ld_shared_x4(sign + piece * 16);
            if constexpr (kPaletteSource<Config>) {
                s.indices[u] = ptx::ld_shared_x2(exponent + piece * 8);
            } else {
                s.exponents[u] = ptx::ld_shared_x4(exponent + piece * 16);
            }
            if constexpr (S::kHasVerbatim) s.verbatim[u] = ptx::ld_shared_u8(mask_address(p) + p.block(u));
        }
    }

    UW_DEVICE u32 mask_address(const Place& p) const {
        return shared + S::kMask + source_cursor.slot * S::kMaskSlotBytes + p.tile * 8;
    }

    UW_DEVICE void put(u32 block, const Place& p, const mma::Bf16x16& w) const {
        ptx::st_shared_x4(block + p.b_first, w.low);
        ptx::st_shared_x4(block + p.b_second, w.high);
    }

    // Rewrites this lane's chunk if its row is verbatim. Rare: one 64-element row in two hundred.
    UW_DEVICE void patch_verbatim(const Staged& s, u32 u, u32 block, const Place& p) const {
        if ((s.verbatim[u] >> (p.lane / 4) & 1) == 0) return;
        const u32 index = Base::verbatim_index(ptx::ld_shared_x2(mask_address(p)), p.block(u) * 8 + p.lane / 4);
        if (index >= Config::kVerbatimRows) return;
        const u32 rows =
            shared + S::kVerbatim + source_cursor.slot * S::kVerbatimSlotBytes + p.tile * S::kVerbatimTileBytes;
        put(block, p,
            mma::join_exponents(s.sign_mantissa[u], ptx::ld_shared_x4(rows + index * kTile + p.lane % 4 * 16)));
    }

    UW_DEVICE u32 b_tile(u32 buffer, const Place& p) const {
        return shared + S::kB + buffer * S::kBBytes + p.tile * S::kBoxBytes;
    }

    UW_DEVICE void join(const Staged& s, const mma::PaletteTable& palette, const Place& p) const {
#pragma unroll
        for (u32 u = 0; u < kUnits; ++u) {
            const u32 block = b_tile(b_buffer, p) + p.block(u) * (8 * smem::kSwizzleBytes);
            if constexpr (kPaletteSource<Config>) {
                put(block, p, palette.join(s.sign_mantissa[u], s.indices[u]));
                if constexpr (S::kHasVerbatim) {
                    if (s.verbatim[u] != 0) patch_verbatim(s, u, block, p);
                }
            } else {
                put(block, p, mma::join_exponents(s.sign_mantissa[u], s.exponents[u]));
            }
        }
    }

    // kBatch: columns of wgmma, at least t.rows. Columns past the batch hold stale data of X's slot and are not stored.
    template <u32 kBatch>
    UW_DEVICE void multiply(const Task& t, const Place& p) {
        float accumulators[kBatch / 2];
#pragma unroll
        for (u32 i = 0; i < kBatch / 2; ++i) accumulators[i] = 0.0f;
        const mma::PaletteTable palette(kPaletteSource<Config> ? ptx::ld_global_nc_x4(args.palette)
                                                               : U32x4{0, 0, 0, 0});
        const u32 last_steps = steps();
        u32 released = x_slot;
        Staged staged;
        fetch(staged, p);
        for (u32 step = 0; step < last_steps; ++step) {
            join(staged, palette, p);
            ptx::bar_warp_sync();  // orders the lanes' loads of the slot before the arrival that releases it
            if (p.lane == 0) sources.release(source_cursor.slot);
            source_cursor.advance();
            if (step + 1 < last_steps) fetch(staged, p);
            ptx::fence_proxy_async_shared();
            ptx::wgmma_wait_group<1>();
            sync_warpgroup(p);
            if (step >= 2) {
                if (p.thread == 0) activations.release(released);
                released = next_slot(released);
            }
            ptx::mbarrier_wait_parity(activations.full(x_slot), x_parity);
            const u64 w_descriptor = mma::k_major_descriptor(b_tile(b_buffer, p)),
                      x_descriptor = mma::k_major_descriptor(slot_address(x_slot));
            ptx::wgmma_fence();
#pragma unroll
            for (u32 k16 = 0; k16 < kTile / 16; ++k16) {
                ptx::wgmma(accumulators, w_descriptor + k16 * mma::kDescriptorStepK16,
                           x_descriptor + k16 * mma::kDescriptorStepK16);
            }
            ptx::wgmma_commit_group();
            advance_x();
            b_buffer = b_buffer + 1 == kBBuffers ? 0 : b_buffer + 1;
        }
        ptx::wgmma_wait_group<0>();
        sync_warpgroup(p);
        if (p.thread == 0) {
            for (u32 left = last_steps < 2 ? last_steps : 2; left > 0; --left) {
                activations.release(released);
                released = next_slot(released);
            }
        }
#pragma unroll
        for (u32 group = 0; group < kBatch / kTile; ++group) store(accumulators, group, t, p);
    }

    // Stores 64 rows of Y, transposed in one of the warpgroup's B buffers; groups alternate between buffers.
    template <u32 kRegisters>
    UW_DEVICE void store(float (&accumulators)[kRegisters], u32 group, const Task& t, const Place& p) const {
        const u32 staging = b_tile(group % 2, p);
        const u32 first = group * kTile, rows = t.rows > first ? t.rows - first : 0;
        u16* y = static_cast<u16*>(args.y) + u64(t.row + first) * args.n + t.column + p.tile * kTile;
        constexpr u32 kChunks = kTile * kTile * 2 / smem::kChunkBytes / pipeline::kWarpgroupThreads;  // per thread
        const u32 chunk = p.thread % 8;
        if constexpr (kStoreAdd<Config>) {
#pragma unroll
            for (u32 i = 0; i < kChunks; ++i) {
                const u32 row = i * 16 + p.thread / 8;
                if (row < rows)
                    ptx::st_shared_x4(staging + OutputTile::offset(row, chunk),
                                      ptx::ld_global_x4(y + u64(row) * args.n + chunk * 8));
            }
            sync_warpgroup(p);
        }
        // A fragment is 16 features by 8 batch rows. Order of the transposed matrices: features 0..7 and 8..15 of one
        // fragment, then of the next.
        const u32 matrix_row = p.lane % 8 + p.lane / 16 * 8, matrix_chunk = p.warp * 2 + p.lane / 8 % 2;
#pragma unroll
        for (u32 g = 0; g < kTile / 16; ++g) {
            const u32 address = staging + OutputTile::offset(g * 16 + matrix_row, matrix_chunk);
            float* d = accumulators + group * (kTile / 2) + g * 8;
            if constexpr (kStoreAdd<Config>) {
                const U32x4 old = ptx::ldmatrix_x4_trans(address);
                epilogue::add_pair(d[0], d[1], old.x);
                epilogue::add_pair(d[2], d[3], old.y);
                epilogue::add_pair(d[4], d[5], old.z);
                epilogue::add_pair(d[6], d[7], old.w);
            }
            ptx::stmatrix_x4_trans(address, {ptx::cvt_rn_bf16x2(d[0], d[1]), ptx::cvt_rn_bf16x2(d[2], d[3]),
                                             ptx::cvt_rn_bf16x2(d[4], d[5]), ptx::cvt_rn_bf16x2(d[6], d[7])});
        }
        sync_warpgroup(p);
#pragma unroll
        for (u32 i = 0; i < kChunks; ++i) {
            const u32 row = i * 16 + p.thread / 8;
            if (row < rows)
                ptx::st_global_x4(y + u64(row) * args.n + chunk * 8,
                                  ptx::ld_shared_x4(staging + OutputTile::offset(row, chunk)));
        }
        // The group after next reuses this buffer, and the next group's barrier is in between. The next task's weights
        // have no such barrier.
        if (group + 1 == kRegisters * 2 / kTile) sync_warpgroup(p);
    }

    UW_DEVICE void compute(u32 index) {
        const Task t = task_at(index);
        if (t.rows == 0) return;
        const Place p;
        if (t.rows <= 64) {
            multiply<64>(t, p);
        } else if (t.rows <= 128) {
            multiply<128>(t, p);
        } else {
            multiply<256>(t, p);
        }
    }

    // Done by `multiply`, whose accumulators have the size of the task.
    UW_DEVICE void finish(u32) {}
};

}  // namespace uw::gemm_recon::weight_rows
