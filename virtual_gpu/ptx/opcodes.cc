// SPDX-License-Identifier: Apache-2.0
// All that the interpreter knows, family by family. See decoder.h.
#include "decoder.h"

namespace vgpu::ptx {
namespace {

std::optional<Type> last_type(const Statement& statement) {
  for (auto it = statement.modifiers.rbegin(); it != statement.modifiers.rend(); ++it) {
    if (auto type = type_named(*it)) return type;
  }
  return std::nullopt;
}

}  // namespace

bool fits_integers(const Statement& statement) {
  auto type = last_type(statement);
  return type && !is_float(*type);
}
bool fits_floats(const Statement& statement) {
  auto type = last_type(statement);
  return type == Type::kF32 || type == Type::kF64;
}
bool fits_halves(const Statement& statement) {
  auto type = last_type(statement);
  return type == Type::kF16 || type == Type::kBF16 || type == Type::kF16x2 || type == Type::kBF16x2;
}

std::span<const Opcode> all_opcodes() {
  static const auto* all = [] {
    auto* joined = new std::vector<Opcode>();
    for (std::span<const Opcode> family :
         {carry_opcodes(), integer_opcodes(), bit_opcodes(), float_opcodes(), half_opcodes(),
          comparison_opcodes(), conversion_opcodes(), move_opcodes(), memory_opcodes(),
          atomic_opcodes(), control_opcodes(), warp_opcodes(), barrier_opcodes(),
          matrix_opcodes()}) {
      joined->insert(joined->end(), family.begin(), family.end());
    }
    return joined;
  }();
  return *all;
}

}  // namespace vgpu::ptx
