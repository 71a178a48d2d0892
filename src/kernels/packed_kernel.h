// SPDX-License-Identifier: Apache-2.0
// Native functions `f(first, second)` that take all of their arguments in two structs, as Warp's
// kernels do on the CPU: the launch's extents, and the arguments.
//
// A program holds both structs of a call as the bytes of one block, with all but the addresses of
// the call's arrays, which are written into a copy of it on the stack of the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "callgate/kernel_abi.h"
#include "core/array_view.h"
#include "core/lifetime.h"

namespace callgate {

// Who has made it keeps the function loaded.
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
  static std::int32_t run(const callgate_call* call) {
    const auto& kernel = *static_cast<const PackedKernel*>(call->user_data);
    const callgate_attribute& held = call->attributes[0];
    if (held.count != kernel.bytes) [[unlikely]] {  // a program of another version of the library
      call->services->fail(call, ("expected arguments of " + std::to_string(kernel.bytes) +
                                  " bytes, got " + std::to_string(held.count))
                                     .c_str());
      return 1;
    }
    SmallBuffer<std::byte, 1024> block(kernel.bytes);
    std::memcpy(block.data(), held.data, kernel.bytes);
    for (const auto& [offset, result, index] : kernel.addresses) {
      void* data = (result ? call->results : call->operands)[index].data;
      std::memcpy(block.data() + offset, static_cast<const void*>(&data), sizeof(data));
    }
    for (std::size_t index : kernel.zeroed) {
      const callgate_array& array = call->results[index];
      std::size_t size = storage_bytes(static_cast<DType>(array.dtype), 1);
      for (std::int32_t axis = 0; axis < array.rank; ++axis)
        size *= static_cast<std::size_t>(array.dims[axis]);
      if (size != 0) std::memset(array.data, 0, size);
    }
    kernel.function(block.data(), block.data() + kernel.second);
    return 0;
  }
};

}  // namespace callgate
