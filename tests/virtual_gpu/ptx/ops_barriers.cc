#include "elementwise.h"

namespace vgpu::ptx {

std::span<const Opcode> barrier_opcodes() { return {}; }

}  // namespace vgpu::ptx
