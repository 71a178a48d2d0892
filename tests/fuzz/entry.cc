// SPDX-License-Identifier: Apache-2.0
// The function that libFuzzer calls. Compiled once for each target, whose name is
// CALLGATE_FUZZ_TARGET.
#include <cstddef>
#include <cstdint>

#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  callgate::fuzz::CALLGATE_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}
