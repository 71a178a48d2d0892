#include "elementwise.h"

namespace vgpu::ptx {

std::span<const Opcode> half_opcodes() { return {}; }

}  // namespace vgpu::ptx
