// All that the interpreter knows, family by family. See decoder.h.
#include "decoder.h"

namespace vgpu::ptx {

std::span<const Opcode> all_opcodes() {
  static const auto* all = [] {
    auto* joined = new std::vector<Opcode>();
    for (std::span<const Opcode> family :
         {integer_opcodes(), bit_opcodes(), float_opcodes(), half_opcodes(), comparison_opcodes(),
          conversion_opcodes(), move_opcodes(), memory_opcodes(), atomic_opcodes(),
          control_opcodes(), warp_opcodes(), barrier_opcodes(), matrix_opcodes()}) {
      joined->insert(joined->end(), family.begin(), family.end());
    }
    return joined;
  }();
  return *all;
}

}  // namespace vgpu::ptx
