// SPDX-License-Identifier: Apache-2.0
// Barriers: of a warp, of a block, of a cluster, and mbarrier objects in shared memory.
#include <bit>

#include "elementwise.h"

namespace vgpu::ptx {
namespace {

std::string at_line(const Instruction& instruction) {
  return "line " + std::to_string(instruction.line) + ": ";
}

// bar.warp.sync: rows: mask.
void warp_sync(Warp& warp, const Instruction& instruction, Lanes lanes) {
  const Lanes needed = warp.row<const Lanes>(instruction.row[0])[std::countr_zero(lanes)];
  const Lanes passed_over = warp.group().lanes & ~lanes;
  warp.together(needed & ~passed_over, instruction);
}

// -- Of a block: bar.sync a{, b} and its like
// ------------------------------------------------------

// Rows: barrier, threads (or kNone), a reduction's result, its predicate. Options: 0 sync,
// 1 arrive, 2 popc, 3 and, 4 or.
void block_barrier(Warp& warp, const Instruction& instruction, Lanes lanes) {
  const auto first = static_cast<std::uint32_t>(std::countr_zero(lanes));
  const std::uint32_t number = warp.row<const std::uint32_t>(instruction.row[0])[first];
  if (number >= 16) {
    throw Fault{Result::kIllegalInstruction,
                at_line(instruction) + "barrier " + std::to_string(number) + " of 16"};
  }
  const std::uint32_t expected =
      instruction.row[1] == kNone ? 0 : warp.row<const std::uint32_t>(instruction.row[1])[first];
  if (expected % kLanes != 0) {
    throw Fault{Result::kIllegalInstruction, at_line(instruction) + "a barrier of " +
                                                 std::to_string(expected) +
                                                 " threads, expected a multiple of 32"};
  }
  Block& block = warp.block();
  BlockBarrier& barrier = block.barrier(number);
  if (instruction.option >= 2) {
    const Lanes yes = true_lanes(warp.row<const std::uint8_t>(instruction.row[3])) & lanes;
    barrier.count += static_cast<std::uint32_t>(std::popcount(yes));
    barrier.all = barrier.all && yes == lanes;
    barrier.any = barrier.any || yes != 0;
    barrier.asked.push_back(
        {&warp, &warp.frame(), instruction.row[2], instruction.option - 2, lanes});
  }
  // With a number of threads, a warp counts whole: the last one may have fewer lanes.
  const std::uint32_t threads = expected != 0 && lanes == warp.alive()
                                    ? kLanes
                                    : static_cast<std::uint32_t>(std::popcount(lanes));
  if (instruction.option != 1) warp.wait(Waiting::kBarrier, number, lanes);
  block.arrive(number, threads, expected);
}

void bar(Decoder& decoder) {
  decoder.ignore({"cta", "aligned"});
  if (decoder.take("warp")) {
    decoder.take("sync");
    std::uint32_t mask = decoder.source(0, Type::kB32);
    decoder.emit(warp_sync, {mask}).control = true;
    return;
  }
  const bool reduces = decoder.take("red");
  std::size_t what = decoder.take_one({"sync", "arrive", "popc", "and", "or"}, 5);
  if (what == 5 || reduces != (what >= 2)) decoder.fail("expected .sync, .arrive or .red");
  std::uint32_t result = kNone, predicate = kNone;
  std::size_t at = 0, end = decoder.operands();
  if (reduces) {
    Type type = decoder.take_type();
    result = decoder.destination(0, what == 2 ? type : Type::kPred);
    predicate = decoder.source(--end, Type::kPred);
    at = 1;
  }
  std::uint32_t number = decoder.source(at, Type::kB32);
  std::uint32_t threads = at + 1 < end ? decoder.source(at + 1, Type::kB32) : kNone;
  if (what == 1 && threads == kNone) decoder.fail("expected a number of threads");
  Instruction& instruction = decoder.emit(block_barrier, {number, threads, result, predicate});
  instruction.option = static_cast<std::uint32_t>(what);
  instruction.control = true;
}

// -- Of a cluster ---------------------------------------------------------------------------------

void cluster_arrive(Warp& warp, const Instruction&, Lanes lanes) {
  Cluster& cluster = warp.block().cluster();
  warp.cluster_phase = cluster.phase();
  cluster.arrive(static_cast<std::uint32_t>(std::popcount(lanes)));
}
void cluster_wait(Warp& warp, const Instruction&, Lanes lanes) {
  if (warp.block().cluster().phase() == warp.cluster_phase) {
    warp.wait(Waiting::kCluster, 0, lanes);
  }
}
void barrier(Decoder& decoder) {
  if (!decoder.take("cluster")) return bar(decoder);
  decoder.ignore({"aligned", "release", "acquire", "relaxed"});
  bool arrives = decoder.take("arrive");
  if (!arrives && !decoder.take("wait")) decoder.fail("expected .arrive or .wait");
  decoder.emit(arrives ? cluster_arrive : cluster_wait, {}).control = true;
}

// -- mbarrier: an object of 64 bits in shared memory ----------------------------------------------
//
// What a phase still expects, what each phase expects, how many bytes are on their way, and the
// phase's parity. Programs may not look inside.
struct Object {
  std::uint64_t pending : 20;
  std::uint64_t expected : 20;
  std::uint64_t bytes : 23;
  std::uint64_t phase : 1;
};
static_assert(sizeof(Object) == 8);

// Rows: result, address, count or state or parity. Narrow: row 5 is not kNone.
std::byte* object_at(Warp& warp, const Instruction& instruction, std::uint32_t lane) {
  std::uint64_t address = 0;
  if (instruction.row[1] != kNone) {
    address = instruction.row[5] != kNone ? warp.row<const std::uint32_t>(instruction.row[1])[lane]
                                          : warp.row<const std::uint64_t>(instruction.row[1])[lane];
  }
  address += static_cast<std::uint64_t>(instruction.immediate);
  const auto space = static_cast<Space>(instruction.list[0]);
  return warp.resolve(space, address, 8, lane, instruction);
}
template <typename Change>
void change(Warp& warp, const Instruction& instruction, Lanes lanes, Change&& how) {
  each_lane(lanes, [&](std::uint32_t lane) {
    std::byte* at = object_at(warp, instruction, lane);
    Object object{};
    std::memcpy(&object, at, sizeof(object));
    how(object, lane);
    std::memcpy(at, &object, sizeof(object));
  });
}
std::uint32_t number_in(Warp& warp, const Instruction& instruction, std::size_t slot,
                        std::uint32_t lane, std::uint32_t otherwise) {
  if (instruction.row[slot] == kNone) return otherwise;
  return warp.row<const std::uint32_t>(instruction.row[slot])[lane];
}
void complete(Object& object) {
  if (object.pending != 0 || object.bytes != 0) return;
  object.pending = object.expected;
  object.phase = object.phase == 0 ? 1 : 0;
}

void init(Warp& warp, const Instruction& instruction, Lanes lanes) {
  change(warp, instruction, lanes, [&](Object& object, std::uint32_t lane) {
    const std::uint32_t count = number_in(warp, instruction, 2, lane, 1);
    object = {};
    object.pending = count & 0xFFFFFU;
    object.expected = count & 0xFFFFFU;
  });
}
void forget(Warp&, const Instruction&, Lanes) {}
void expect_bytes(Warp& warp, const Instruction& instruction, Lanes lanes) {
  change(warp, instruction, lanes, [&](Object& object, std::uint32_t lane) {
    object.bytes = (object.bytes + number_in(warp, instruction, 2, lane, 0)) & 0x7FFFFFU;
  });
}
void complete_bytes(Warp& warp, const Instruction& instruction, Lanes lanes) {
  change(warp, instruction, lanes, [&](Object& object, std::uint32_t lane) {
    object.bytes = (object.bytes - number_in(warp, instruction, 2, lane, 0)) & 0x7FFFFFU;
    complete(object);
  });
}
// Options: 1 the count is of bytes to expect; 2 drops: later phases expect fewer.
void arrive(Warp& warp, const Instruction& instruction, Lanes lanes) {
  change(warp, instruction, lanes, [&](Object& object, std::uint32_t lane) {
    const bool bytes = (instruction.option & 1U) != 0;
    const std::uint32_t number = number_in(warp, instruction, 2, lane, bytes ? 0 : 1);
    const std::uint32_t count = bytes ? 1 : number;
    if (count > object.pending) {
      throw Fault{Result::kIllegalInstruction, "mbarrier.arrive of " + std::to_string(count) +
                                                   " at " + warp.where(instruction, lane) +
                                                   ", the phase expects " +
                                                   std::to_string(object.pending)};
    }
    if (instruction.row[0] != kNone) {
      std::memcpy(warp.row<std::uint64_t>(instruction.row[0]) + lane, &object, sizeof(object));
    }
    if (bytes) object.bytes = (object.bytes + number) & 0x7FFFFFU;
    if ((instruction.option & 2U) != 0) object.expected = (object.expected - count) & 0xFFFFFU;
    object.pending = (object.pending - count) & 0xFFFFFU;
    complete(object);
  });
}
// Options: 1 by parity; 2 try_wait. What is not complete lets others go first.
void test_wait(Warp& warp, const Instruction& instruction, Lanes lanes) {
  bool failed = false;
  each_lane(lanes, [&](std::uint32_t lane) {
    Object object{}, state{};
    std::memcpy(&object, object_at(warp, instruction, lane), sizeof(object));
    std::uint64_t phase = 0;
    if ((instruction.option & 1U) != 0) {
      phase = number_in(warp, instruction, 2, lane, 0) & 1U;
    } else {
      std::memcpy(&state, warp.row<const std::uint64_t>(instruction.row[2]) + lane, sizeof(state));
      phase = state.phase;
    }
    const bool done = object.phase != phase;
    failed |= !done;
    warp.row<std::uint8_t>(instruction.row[0])[lane] = done ? 1 : 0;
  });
  if (failed) warp.yield();
}
void pending_count(Warp& warp, const Instruction& instruction, Lanes lanes) {
  each_lane(lanes, [&](std::uint32_t lane) {
    Object state{};
    std::memcpy(&state, warp.row<const std::uint64_t>(instruction.row[2]) + lane, sizeof(state));
    warp.row<std::uint32_t>(instruction.row[0])[lane] = static_cast<std::uint32_t>(state.pending);
  });
}

void emit_on(Decoder& decoder, Instruction::Run run, std::size_t at, std::uint32_t result,
             std::uint32_t value, std::uint32_t option, Space space) {
  Address address = decoder.address(at, space);
  Instruction& instruction = decoder.emit(run, {result, address.row, value});
  if (address.narrow) instruction.row[5] = 0;
  instruction.immediate = address.offset;
  instruction.list = {static_cast<std::uint32_t>(address.space)};
  instruction.option = option;
  instruction.cache = decoder.new_cache();
}

void mbarrier_wait(Decoder& decoder, bool tries, Space space) {
  const bool parity = decoder.take("parity");
  decoder.take_type();
  std::uint32_t result = decoder.destination(0, Type::kPred);
  std::uint32_t value = decoder.source(2, parity ? Type::kB32 : Type::kB64);
  emit_on(decoder, test_wait, 1, result, value, (parity ? 1U : 0U) | (tries ? 2U : 0U), space);
}

void mbarrier_arrive(Decoder& decoder, bool drops, Space space) {
  const bool bytes = decoder.take("expect_tx");
  decoder.take("noComplete");
  decoder.take_type();
  // The state is left out for another block's object: then the first operand is the address.
  const bool has_state = decoder.operand(0).kind != Operand::Kind::kAddress;
  const std::size_t at = has_state ? 1 : 0;
  std::uint32_t result = kNone;
  if (has_state && decoder.operand(0).kind != Operand::Kind::kSink) {
    result = decoder.destination(0, Type::kB64);
  }
  std::uint32_t count = decoder.operands() > at + 1 ? decoder.source(at + 1, Type::kB32) : kNone;
  emit_on(decoder, arrive, at, result, count, (bytes ? 1U : 0U) | (drops ? 2U : 0U), space);
}

void mbarrier(Decoder& decoder) {
  decoder.ignore({"release", "acquire", "relaxed", "cta", "cluster"});
  Space space = decoder.take_space();
  // `arrive` stands before `expect_tx`, which is an operation of its own too.
  switch (decoder.take_one({"init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx",
                            "test_wait", "try_wait", "pending_count"},
                           9)) {
    case 0:
      decoder.take_type();
      return emit_on(decoder, init, 0, kNone, decoder.source(1, Type::kB32), 0, space);
    case 1: decoder.take_type(); return emit_on(decoder, forget, 0, kNone, kNone, 0, space);
    case 2: return mbarrier_arrive(decoder, /*drops=*/false, space);
    case 3: return mbarrier_arrive(decoder, /*drops=*/true, space);
    case 4:
      decoder.take_type();
      return emit_on(decoder, expect_bytes, 0, kNone, decoder.source(1, Type::kB32), 0, space);
    case 5:
      decoder.take_type();
      return emit_on(decoder, complete_bytes, 0, kNone, decoder.source(1, Type::kB32), 0, space);
    case 6: return mbarrier_wait(decoder, /*tries=*/false, space);
    case 7: return mbarrier_wait(decoder, /*tries=*/true, space);
    case 8: {
      decoder.take_type();
      std::uint32_t to = decoder.destination(0, Type::kB32), state = decoder.source(1, Type::kB64);
      decoder.emit(pending_count, {to, kNone, state});
      return;
    }
    default: decoder.fail("unknown operation");
  }
}

constexpr std::string_view kBlockForms =
    "{.sync, .arrive}{.aligned} with a barrier and a number of threads; .red.popc.u32, "
    ".red.{and, or}.pred; .warp.sync";

constexpr Opcode kOpcodes[] = {
    {"bar", bar, kBlockForms},
    {"barrier", barrier, "{.cta} as bar; .cluster.{arrive, wait}{.aligned}"},
    {"mbarrier", mbarrier,
     ".{init, inval, expect_tx, complete_tx, arrive{.expect_tx}, arrive_drop{.expect_tx}, "
     "test_wait{.parity}, try_wait{.parity}, pending_count}{.shared}.b64"},
};

}  // namespace

std::span<const Opcode> barrier_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
