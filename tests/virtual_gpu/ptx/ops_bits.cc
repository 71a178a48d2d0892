#include "elementwise.h"

namespace vgpu::ptx {

std::span<const Opcode> bit_opcodes() { return {}; }

}  // namespace vgpu::ptx
