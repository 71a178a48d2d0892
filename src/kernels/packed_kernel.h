// SPDX-License-Identifier: Apache-2.0
// Native functions `f(first, second)` that take all of their arguments in two structs, as Warp's
// kernels do on the CPU: the launch's extents, and the arguments.
//
// A program holds both structs of a call as the bytes of one block, with all but the addresses of
// the call's arrays, which are written into a copy of it on the stack of the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "callgate/kernel_abi.h"
#include "core/array_view.h"
#include "core/lifetime.h"

namespace callgate {

// Its maker keeps the function loaded.
struct PackedKernel {
  struct Address {
    std::size_t offset;  // in the block
    bool result;         // else an operand
    std::size_t index;   // which of them, counted flat
  };

  void (*function)(void* first, void* second);
  std::size_t second,
      bytes;  // where the second struct begins in the block, and where the block ends
  std::vector<Address> addresses;
  std::vector<std::size_t> zeroed;  // results that are set to zero first

  // A `callgate_function`; the call's user data is the PackedKernel, and its one attribute the
  // block. Any thread.
  static std::int32_t run(const callgate_call* call);
};

}  // namespace callgate
