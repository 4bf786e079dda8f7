// What only the simulator itself uses. Kernels are compiled without it: the headers of std::string and std::function
// take longer than many kernels.
#pragma once

// prelude.hpp hides what follows it; what these declare is elsewhere.
#pragma GCC visibility push(default)
#include <functional>
#include <map>
#include <string>
#include <sys/mman.h>
#include <unordered_map>
#include <vector>
#pragma GCC visibility pop

#include "simulator.hpp"

namespace uw::cpu {

struct Pending {
    std::function<void()> apply;
    bool is_load;
    // What a store reads: shared addresses.
    u32 source = 0, bytes = 0;
};

struct Allocation {
    const char* begin;
    u64 bytes;
    std::string name;
};

struct State {
    std::vector<Pending> pending;
    std::map<const char*, Allocation> allocations;
    // Of words of `partials`: who has written each in this launch, and which of that thread's stores it was. Of words
    // of atomics: what they speak for.
    std::unordered_map<const char*, std::pair<u32, u32>> written;
    std::unordered_map<const void*, Clock> spoken;
    std::string error;
};

extern State state;

}  // namespace uw::cpu
