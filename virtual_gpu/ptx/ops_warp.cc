// SPDX-License-Identifier: Apache-2.0
// What lanes of a warp do with each other: shfl, vote, match, redux, elect.
//
// The lanes that an instruction names do it together, wherever the program's branches had them: a
// group that comes first waits for the others (Warp::together).
#include <bit>

#include "elementwise.h"

namespace vgpu::ptx {
namespace {

// The membermask's row holds the same in all lanes that take part; row kNone is for instructions of
// old, which concern the lanes that happen to be together.
bool all_here(Warp& warp, const Instruction& instruction, std::uint32_t mask_row, Lanes lanes) {
  if (mask_row == kNone) return true;
  const Lanes needed = warp.row<const Lanes>(mask_row)[std::countr_zero(lanes)];
  const Lanes passed_over = warp.group().lanes & ~lanes;  // by the guard: they don't come
  return warp.together(needed & ~passed_over, instruction);
}

// Which lane's value a lane gets, and whether that lies in its segment.
struct Choice {
  std::uint32_t lane;
  bool inside;
};
Choice chosen(std::uint32_t mode, std::uint32_t lane, std::uint32_t b, std::uint32_t c) {
  const std::uint32_t segment = (c >> 8) & 31U, clamp = c & 31U;
  const std::uint32_t highest = (lane & segment) | (clamp & ~segment);
  const std::uint32_t lowest = lane & segment;
  b &= 31U;
  switch (mode) {
    case 0: return lane < b || lane - b < highest ? Choice{lane, false} : Choice{lane - b, true};
    case 1: return lane + b > highest ? Choice{lane, false} : Choice{lane + b, true};
    case 2: return (lane ^ b) > highest ? Choice{lane, false} : Choice{lane ^ b, true};
    default: {
      std::uint32_t from = lowest | (b & ~segment);
      return from > highest ? Choice{lane, false} : Choice{from, true};
    }
  }
}

// Rows: result, predicate, value, b, c, mask.
void shuffle(Warp& warp, const Instruction& instruction, Lanes lanes) {
  if (!all_here(warp, instruction, instruction.row[5], lanes)) return;
  const auto* value = warp.row<const std::uint32_t>(instruction.row[2]);
  const auto* b = warp.row<const std::uint32_t>(instruction.row[3]);
  const auto* c = warp.row<const std::uint32_t>(instruction.row[4]);
  std::uint32_t before[kLanes];
  std::memcpy(before, value, sizeof(before));
  auto* to = warp.row<std::uint32_t>(instruction.row[0]);
  auto* inside = warp.row<std::uint8_t>(instruction.row[1]);
  each_lane(lanes, [&](std::uint32_t lane) {
    Choice choice = chosen(instruction.option, lane, b[lane], c[lane]);
    inside[lane] = choice.inside ? 1 : 0;
    to[lane] = before[choice.lane];
  });
}
void shfl(Decoder& decoder) {
  const bool sync = decoder.take("sync");
  decoder.expect_operands(sync ? 5 : 4, sync ? 5 : 4);
  std::size_t mode = decoder.take_one({"up", "down", "bfly", "idx"}, 4);
  if (mode == 4) decoder.fail("expected .up, .down, .bfly or .idx");
  decoder.take_type();
  const Operand& result = decoder.operand(0);
  const bool pair = result.kind == Operand::Kind::kPair;
  std::uint32_t to = decoder.destination(pair ? result.parts[0] : result, Type::kB32);
  std::uint32_t inside =
      pair ? decoder.destination(result.parts[1], Type::kPred) : decoder.temporary(Type::kPred);
  std::uint32_t value = decoder.source(1, Type::kB32), b = decoder.source(2, Type::kB32),
                c = decoder.source(3, Type::kB32),
                mask = sync ? decoder.source(4, Type::kB32) : kNone;
  Instruction& instruction = decoder.emit(shuffle, {to, inside, value, b, c, mask});
  instruction.option = static_cast<std::uint32_t>(mode);
  instruction.control = true;
}

// Rows: result, predicate, mask. Options: all, any, uni, ballot.
void vote_now(Warp& warp, const Instruction& instruction, Lanes lanes) {
  if (!all_here(warp, instruction, instruction.row[2], lanes)) return;
  const Lanes yes = true_lanes(warp.row<const std::uint8_t>(instruction.row[1])) & lanes;
  if (instruction.option == 3) {
    auto* to = warp.row<std::uint32_t>(instruction.row[0]);
    each_lane(lanes, [&](std::uint32_t lane) { to[lane] = yes; });
    return;
  }
  const bool all = yes == lanes, any = yes != 0;
  const bool result = instruction.option == 0 ? all : instruction.option == 1 ? any : all || !any;
  auto* to = warp.row<std::uint8_t>(instruction.row[0]);
  each_lane(lanes, [&](std::uint32_t lane) { to[lane] = result ? 1 : 0; });
}
void vote(Decoder& decoder) {
  const bool sync = decoder.take("sync");
  std::size_t mode = decoder.take_one({"all", "any", "uni", "ballot"}, 4);
  if (mode == 4) decoder.fail("expected .all, .any, .uni or .ballot");
  Type type = decoder.take_type();
  std::uint32_t to = decoder.destination(0, type), predicate = decoder.source(1, Type::kPred),
                mask = sync ? decoder.source(2, Type::kB32) : kNone;
  Instruction& instruction = decoder.emit(vote_now, {to, predicate, mask});
  instruction.option = static_cast<std::uint32_t>(mode);
  instruction.control = true;
}

// Rows: result, predicate, value, mask. Option 1: all must be the same.
template <typename T>
void match_now(Warp& warp, const Instruction& instruction, Lanes lanes) {
  if (!all_here(warp, instruction, instruction.row[3], lanes)) return;
  const T* value = warp.row<const T>(instruction.row[2]);
  auto* to = warp.row<std::uint32_t>(instruction.row[0]);
  auto* same_in_all = warp.row<std::uint8_t>(instruction.row[1]);
  Lanes found[kLanes] = {};
  each_lane(lanes, [&](std::uint32_t lane) {
    each_lane(lanes, [&](std::uint32_t other) {
      if (value[other] == value[lane]) found[lane] |= Lanes{1} << other;
    });
  });
  each_lane(lanes, [&](std::uint32_t lane) {
    const bool all = found[lane] == lanes;
    same_in_all[lane] = all ? 1 : 0;
    to[lane] = instruction.option != 0 && !all ? 0 : found[lane];
  });
}
void match(Decoder& decoder) {
  decoder.take("sync");
  std::size_t mode = decoder.take_one({"any", "all"}, 2);
  if (mode == 2) decoder.fail("expected .any or .all");
  Type type = decoder.take_type();
  const Operand& result = decoder.operand(0);
  const bool pair = result.kind == Operand::Kind::kPair;
  std::uint32_t to = decoder.destination(pair ? result.parts[0] : result, Type::kB32);
  std::uint32_t all =
      pair ? decoder.destination(result.parts[1], Type::kPred) : decoder.temporary(Type::kPred);
  std::uint32_t value = decoder.source(1, type), mask = decoder.source(2, Type::kB32);
  Instruction& instruction =
      decoder.emit(size_of(type) == 8 ? match_now<std::uint64_t> : match_now<std::uint32_t>,
                   {to, all, value, mask});
  instruction.option = static_cast<std::uint32_t>(mode);
  instruction.control = true;
}

void active(Warp& warp, const Instruction& instruction, Lanes lanes) {
  auto* to = warp.row<std::uint32_t>(instruction.row[0]);
  each_lane(lanes, [&](std::uint32_t lane) { to[lane] = lanes; });
}
void activemask(Decoder& decoder) {
  decoder.take_type();
  decoder.emit(active, {decoder.destination(0, Type::kB32)});
}

// Rows: result, value, mask. Options: add, min, max, and, or, xor.
template <typename T>
void reduce(Warp& warp, const Instruction& instruction, Lanes lanes) {
  if (!all_here(warp, instruction, instruction.row[2], lanes)) return;
  const T* value = warp.row<const T>(instruction.row[1]);
  T result = value[std::countr_zero(lanes)];
  each_lane(lanes & (lanes - 1), [&](std::uint32_t lane) {
    const T each = value[lane];
    const auto a = static_cast<std::uint32_t>(result), b = static_cast<std::uint32_t>(each);
    switch (instruction.option) {
      case 0: result = static_cast<T>(a + b); break;
      case 1: result = each < result ? each : result; break;
      case 2: result = result < each ? each : result; break;
      case 3: result = static_cast<T>(a & b); break;
      case 4: result = static_cast<T>(a | b); break;
      default: result = static_cast<T>(a ^ b); break;
    }
  });
  T* to = warp.row<T>(instruction.row[0]);
  each_lane(lanes, [&](std::uint32_t lane) { to[lane] = result; });
}
void redux(Decoder& decoder) {
  decoder.take("sync");
  std::size_t mode = decoder.take_one({"add", "min", "max", "and", "or", "xor"}, 6);
  if (mode == 6) decoder.fail("expected an operation");
  Type type = decoder.take_type();
  if (is_float(type)) decoder.fail("only for integers");
  std::uint32_t to = decoder.destination(0, type), value = decoder.source(1, type),
                mask = decoder.source(2, Type::kB32);
  Instruction& instruction = decoder.emit(
      is_signed(type) ? reduce<std::int32_t> : reduce<std::uint32_t>, {to, value, mask});
  instruction.option = static_cast<std::uint32_t>(mode);
  instruction.control = true;
}

// The lowest lane of the mask; its predicate alone holds.
void elect_now(Warp& warp, const Instruction& instruction, Lanes lanes) {
  if (!all_here(warp, instruction, instruction.row[2], lanes)) return;
  const auto leader = static_cast<std::uint32_t>(std::countr_zero(lanes));
  auto* to = warp.row<std::uint32_t>(instruction.row[0]);
  auto* is_leader = warp.row<std::uint8_t>(instruction.row[1]);
  each_lane(lanes, [&](std::uint32_t lane) {
    to[lane] = leader;
    is_leader[lane] = lane == leader ? 1 : 0;
  });
}
void elect(Decoder& decoder) {
  decoder.take("sync");
  const Operand& result = decoder.operand(0);
  if (result.kind != Operand::Kind::kPair) decoder.fail("expected d|p");
  std::uint32_t to = decoder.destination(result.parts[0], Type::kB32),
                predicate = decoder.destination(result.parts[1], Type::kPred),
                mask = decoder.source(1, Type::kB32);
  decoder.emit(elect_now, {to, predicate, mask}).control = true;
}

constexpr Opcode kOpcodes[] = {
    {"shfl", shfl, "{.sync}.{up, down, bfly, idx}.b32; d|p"},
    {"vote", vote, "{.sync}.{all, any, uni}.pred, {.sync}.ballot.b32"},
    {"match", match, ".{any, all}.sync.{b32, b64}; d|p"},
    {"activemask", activemask, ".b32"},
    {"redux", redux, ".sync.{add, min, max}.{u32, s32}, .sync.{and, or, xor}.b32"},
    {"elect", elect, ".sync"},
};

}  // namespace

std::span<const Opcode> warp_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
