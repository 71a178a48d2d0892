// SPDX-License-Identifier: Apache-2.0
// Native functions `f(first, second)` that take all arguments in two structs, as Warp's CPU kernels
// do: the launch's extents, and the arguments.
//
// A program holds both structs of a call as the bytes of one block, without the addresses of the
// call's arrays. These are written into a copy on the call's stack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "callgate/kernel_abi.h"
#include "core/array_view.h"
#include "core/lifetime.h"

namespace callgate {

// The creator keeps the function loaded.
struct PackedKernel {
  struct Address {
    std::size_t offset;  // in the block
    bool result;         // false for an operand
    std::size_t index;   // its index, counted flat
  };

  void (*function)(void* first, void* second);
  std::size_t second,
      bytes;  // the second struct's start in the block, and the block's end
  std::vector<Address> addresses;
  std::vector<std::size_t> zeroed;  // results that are set to zero first

  // A `callgate_function`. The call's user data is the PackedKernel, and its one attribute the
  // block. Thread-safe.
  static std::int32_t run(const callgate_call* call);
};

}  // namespace callgate
