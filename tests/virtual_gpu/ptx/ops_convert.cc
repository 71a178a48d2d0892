#include "elementwise.h"

namespace vgpu::ptx {

std::span<const Opcode> conversion_opcodes() { return {}; }

}  // namespace vgpu::ptx
