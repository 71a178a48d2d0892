#include "elementwise.h"

namespace vgpu::ptx {

std::span<const Opcode> atomic_opcodes() { return {}; }

}  // namespace vgpu::ptx
