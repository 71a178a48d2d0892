// SPDX-License-Identifier: Apache-2.0
// Sums, differences and products with a carry: add.cc, addc, sub.cc, subc, mad.cc, madc.
//
// The condition code is the warp's: a byte for each lane. A difference borrows: its carry is one
// where the subtrahend was larger.
#include <algorithm>

#include "elementwise.h"

namespace vgpu::ptx {
namespace {

using u128 = unsigned __int128;
using s128 = __int128;

enum Option : std::uint32_t { kCarryIn = 1, kCarryOut = 2, kSubtract = 4 };

template <typename T>
void carry(Warp& warp, const Instruction& instruction, Lanes lanes) {
  T* to = warp.row<T>(instruction.row[0]);
  const T* a = warp.row<const T>(instruction.row[1]);
  const T* b = warp.row<const T>(instruction.row[2]);
  each_lane(lanes, [&](std::uint32_t lane) {
    const u128 in = (instruction.option & kCarryIn) != 0 ? warp.carry[lane] : 0U;
    const u128 sum = (instruction.option & kSubtract) != 0 ? u128{a[lane]} - b[lane] - in
                                                           : u128{a[lane]} + b[lane] + in;
    to[lane] = static_cast<T>(sum);
    if ((instruction.option & kCarryOut) != 0) warp.carry[lane] = (sum >> (8 * sizeof(T))) & 1U;
  });
}

// Rows: the product. Immediate 1: the upper half.
template <typename T>
void product(Warp& warp, const Instruction& instruction, Lanes lanes) {
  using U = std::make_unsigned_t<T>;
  U* to = warp.row<U>(instruction.row[0]);
  const T* a = warp.row<const T>(instruction.row[1]);
  const T* b = warp.row<const T>(instruction.row[2]);
  each_lane(lanes, [&](std::uint32_t lane) {
    const auto whole = std::is_signed_v<T>
                           ? static_cast<u128>(s128{a[lane]} * s128{b[lane]})
                           : u128{static_cast<U>(a[lane])} * static_cast<U>(b[lane]);
    to[lane] = static_cast<U>(instruction.immediate != 0 ? whole >> (8 * sizeof(T)) : whole);
  });
}

std::uint32_t sum_of(Decoder& decoder, Type type, std::uint32_t a, std::uint32_t b,
                     std::uint32_t option) {
  std::uint32_t to = decoder.destination(0, type);
  if (size_of(type) != 4 && size_of(type) != 8) decoder.fail("expected 32 or 64 bits");
  decoder.emit(size_of(type) == 4 ? carry<std::uint32_t> : carry<std::uint64_t>, {to, a, b})
      .option = option;
  return to;
}

template <std::uint32_t kOption>
void add_or_subtract(Decoder& decoder) {
  decoder.expect_operands(3, 3);
  std::uint32_t option = kOption | (decoder.take("cc") ? kCarryOut : 0U);
  Type type = decoder.take_type();
  std::uint32_t a = decoder.source(1, type), b = decoder.source(2, type);
  sum_of(decoder, type, a, b, option);
}

template <std::uint32_t kOption>
void multiply_add(Decoder& decoder) {
  decoder.expect_operands(4, 4);
  std::uint32_t option = kOption | (decoder.take("cc") ? kCarryOut : 0U);
  std::size_t part = decoder.take_one({"lo", "hi"}, 2);
  if (part == 2) decoder.fail("expected .lo or .hi");
  Type type = decoder.take_type();
  std::uint32_t a = decoder.source(1, type), b = decoder.source(2, type),
                c = decoder.source(3, type), row = decoder.temporary(type);
  with_integer(decoder, type, [&]<typename T>(std::type_identity<T>) {
    decoder.emit(product<T>, {row, a, b}).immediate = static_cast<std::int64_t>(part);
  });
  sum_of(decoder, type, row, c, option);
}

bool gives_carry(const Statement& statement) {
  return std::find(statement.modifiers.begin(), statement.modifiers.end(), "cc") !=
         statement.modifiers.end();
}

constexpr Opcode kOpcodes[] = {
    {"add", add_or_subtract<0>, ".cc.{u32, s32, u64, s64}", gives_carry},
    {"addc", add_or_subtract<kCarryIn>, "{.cc}.{u32, s32, u64, s64}"},
    {"sub", add_or_subtract<kSubtract>, ".cc.{u32, s32, u64, s64}", gives_carry},
    {"subc", add_or_subtract<kSubtract | kCarryIn>, "{.cc}.{u32, s32, u64, s64}"},
    {"mad", multiply_add<0>, ".{lo, hi}.cc.{u32, s32, u64, s64}", gives_carry},
    {"madc", multiply_add<kCarryIn>, ".{lo, hi}{.cc}.{u32, s32, u64, s64}"},
};

}  // namespace

std::span<const Opcode> carry_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
