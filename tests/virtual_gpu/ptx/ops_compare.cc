#include "elementwise.h"

namespace vgpu::ptx {

std::span<const Opcode> comparison_opcodes() { return {}; }

}  // namespace vgpu::ptx
