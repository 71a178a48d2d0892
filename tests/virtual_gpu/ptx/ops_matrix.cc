#include "elementwise.h"

namespace vgpu::ptx {

std::span<const Opcode> matrix_opcodes() { return {}; }

}  // namespace vgpu::ptx
