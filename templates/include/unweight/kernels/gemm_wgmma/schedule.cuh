// Assignment of tiles of Y, or ranges of their k steps, to blocks: data-parallel tiles, stream-K ranges, shares of a
// cluster; see unweight/kernels/gemm_wgmma.cuh.
#pragma once

#include "unweight/abi.cuh"
#include "unweight/ptx/barrier.cuh"

namespace uw::gemm_wgmma {

// A range of k steps of one tile of Y.
struct Segment {
    u32 tile, first, last;  // empty if first == last
    UW_DEVICE bool exists() const { return first != last; }
};

// The segments that a block processes, in order. Without kStreamK, tiles of Y are assigned round-robin to the blocks of
// the grid.
//
// With kStreamK, a work unit is a set of blocks, one per batch tile, which read the same weights at the same time. Rows
// of tiles are data-parallel, one row per unit at a time. If the last wave of rows is not full, the last two waves are
// concatenated instead and cut into ranges of k steps of equal length, one per unit. Such a range begins with the end
// of one row and ends with the beginning of another, or is inside one row. Units whose ranges share a tile of Y are
// peers. A tile is reduced by those peers that do not continue into another tile, each reducing its own pieces, so no
// block waits for one that has more to do. The other peers store their partial tile in the workspace and continue.
//
// With kCluster, a cluster has one tile. Its blocks share the k steps evenly and each reduces its pieces. The blocks
// are the units of that tile.
template <class Config>
struct Schedule {
    u32 batch_tiles;
    u32 steps;                        // k steps per tile
    u32 data_parallel;                // rows of tiles that units take whole; without kStreamK: tiles
    u32 stream_k_steps;               // k steps of all other rows
    u32 units;                        // units of the grid; without kStreamK: blocks
    u32 unit, batch_tile;             // of this block; in a cluster: its rank, and 0
    u32 next_data_parallel, at, end;  // the next whole row; the rest of the range of k steps

    UW_DEVICE Schedule(const GemmPackedArgs& a, u32 rows, u32 batches)
        : batch_tiles(batches),
          steps(a.tile_cols),
          data_parallel(rows * batches),
          stream_k_steps(0),
          units(ptx::nctaid()),
          unit(0),
          batch_tile(0),
          next_data_parallel(ptx::ctaid()),
          at(0),
          end(0) {
        if constexpr (Config::kStreamK) {
            data_parallel = rows;
            units = ptx::nctaid() / batches;
            if (units > rows * steps) units = rows * steps;
            unit = ptx::ctaid() / batches;
            batch_tile = ptx::ctaid() % batches;
            next_data_parallel = unit;
            if (unit >= units) {
                next_data_parallel = rows;
            } else if (rows % units != 0) {
                data_parallel = rows > units ? rows - rows % units - units : 0;
                stream_k_steps = (rows - data_parallel) * steps;
                at = unit_begin(unit);
                end = unit_begin(unit + 1);
            }
        }
        if constexpr (Config::kCluster > 1) {
            unit = ptx::cluster_ctarank();
            next_data_parallel = ptx::ctaid() / Config::kCluster;
        }
    }
    // The first k step of a unit's range.
    UW_DEVICE u32 unit_begin(u32 u) const { return static_cast<u32>(u64(u) * stream_k_steps / units); }

    UW_DEVICE Segment next() {
        if (Config::kCluster > 1 && next_data_parallel < data_parallel) {
            const Segment s{next_data_parallel, unit * steps / Config::kCluster, (unit + 1) * steps / Config::kCluster};
            next_data_parallel = data_parallel;
            return s;
        }
        if (next_data_parallel < data_parallel) {
            const Segment s{Config::kStreamK ? next_data_parallel * batch_tiles + batch_tile : next_data_parallel, 0,
                            steps};
            next_data_parallel += units;
            return s;
        }
        if (Config::kStreamK && at < end) {
            const u32 row = at / steps, first = at - row * steps;
            const u32 left = end - at, last = steps - first < left ? steps : first + left;
            at += last - first;
            return {(data_parallel + row) * batch_tiles + batch_tile, first, last};
        }
        return {0, 0, 0};
    }

    // The units first..last share a tile of Y; the first `reducing` of them reduce it.
    struct Peers {
        u32 first, last, reducing;
    };
    UW_DEVICE Peers peers_of(const Segment& s) const {
        if constexpr (Config::kCluster > 1) return {0, Config::kCluster - 1, Config::kCluster};
        if (!Config::kStreamK || (s.first == 0 && s.last == steps)) return {unit, unit, 1};
        const u32 begin = (s.tile / batch_tiles - data_parallel) * steps;
        Peers peers{unit, unit, 0};
        while (unit_begin(peers.first) > begin) --peers.first;
        while (unit_begin(peers.last + 1) < begin + steps) ++peers.last;
        peers.reducing = peers.last - peers.first + (unit_begin(peers.last + 1) == begin + steps);
        return peers;
    }
};

}  // namespace uw::gemm_wgmma
