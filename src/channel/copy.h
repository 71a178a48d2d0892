// SPDX-License-Identifier: Apache-2.0
// Copies an array into a record's payload.
#pragma once

#include <cstddef>

#include "core/threads.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace callgate {

// Computed once, because the system reads a file to count the cores.
std::size_t half_of_the_cores() noexcept;

// One core mostly waits for memory, so up to `cores` of them copy large arrays.
void copy_leaf(char* to, const void* from, std::size_t bytes,
               std::size_t cores = half_of_the_cores()) noexcept;

}  // namespace callgate
