// SPDX-License-Identifier: Apache-2.0
// Functions that every kernel may call and none defines: vprintf, __assertfail, malloc, free, and
// what sets a conditional node of a CUDA graph.
#pragma once

#include <string_view>

#include "machine.h"

namespace vgpu::ptx {

// Its instruction reads parameters by the call site. Null where the name is none of them.
Instruction::Run host_function(std::string_view name);

}  // namespace vgpu::ptx
