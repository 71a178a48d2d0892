#include "elementwise.h"

namespace vgpu::ptx {

std::span<const Opcode> float_opcodes() { return {}; }

}  // namespace vgpu::ptx
