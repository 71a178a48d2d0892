// SPDX-License-Identifier: Apache-2.0
// A call of a function that takes two structs.
#include "kernels/packed_kernel.h"

#include <cstring>
#include <string>

namespace callgate {

std::int32_t PackedKernel::run(const callgate_call* call) {
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

}  // namespace callgate
