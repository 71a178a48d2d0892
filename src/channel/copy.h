// SPDX-License-Identifier: Apache-2.0
// How an array gets into a record's payload.
#pragma once

#include <cstddef>

#include "core/threads.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace callgate {

// Asked once: the system reads a file to tell how many cores there are.
std::size_t half_of_the_cores() noexcept;

// One core waits for memory most of the time: up to `cores` of them copy what is large.
void copy_leaf(char* to, const void* from, std::size_t bytes,
               std::size_t cores = half_of_the_cores()) noexcept;

}  // namespace callgate
