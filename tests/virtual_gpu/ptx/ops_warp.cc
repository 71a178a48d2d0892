#include "elementwise.h"

namespace vgpu::ptx {

std::span<const Opcode> warp_opcodes() { return {}; }

}  // namespace vgpu::ptx
