// SPDX-License-Identifier: Apache-2.0
// Branches, calls and the end of threads.
#include "elementwise.h"
#include "host_functions.h"
#include "program.h"

namespace vgpu::ptx {
namespace {

void branch(Warp& warp, const Instruction& instruction, Lanes lanes) {
  warp.branch(lanes, instruction.target);
}
void bra(Decoder& decoder) {
  decoder.ignore({"uni"});
  decoder.expect_operands(1, 1);
  decoder.emit(branch, {}).control = true;
  decoder.jump(kNone, decoder.operand(0).name);
}

// By a number for each lane, from a list of labels.
void branch_by_index(Warp& warp, const Instruction& instruction, Lanes lanes) {
  const auto* index = warp.row<const std::uint32_t>(instruction.row[0]);
  while (lanes != 0) {
    const std::uint32_t first = index[std::countr_zero(lanes)];
    if (first >= instruction.list.size()) {
      throw Fault{Result::kIllegalInstruction,
                  "line " + std::to_string(instruction.line) + ": brx.idx with index " +
                      std::to_string(first) + " of " + std::to_string(instruction.list.size())};
    }
    Lanes same = 0;
    each_lane(lanes, [&](std::uint32_t lane) {
      if (index[lane] == first) same |= Lanes{1} << lane;
    });
    warp.branch(same, instruction.list[first]);
    lanes &= ~same;
  }
}
void brx(Decoder& decoder) {
  decoder.ignore({"uni"});
  if (!decoder.take("idx")) decoder.fail("only brx.idx");
  decoder.expect_operands(2, 2);
  const auto* targets = decoder.builder().find_targets(decoder.operand(1).name);
  if (targets == nullptr) decoder.fail("no .branchtargets " + decoder.operand(1).name);
  std::uint32_t index = decoder.source(0, Type::kU32);
  Instruction& jump = decoder.emit(branch_by_index, {index});
  jump.control = true;
  jump.list.resize(targets->size());
  for (std::size_t i = 0; i < targets->size(); ++i) decoder.jump(i, (*targets)[i].name);
}

void leave(Warp& warp, const Instruction&, Lanes lanes) { warp.leave(lanes); }
void ret(Decoder& decoder) {
  decoder.ignore({"uni"});
  decoder.emit(leave, {}).control = true;
}
void end(Warp& warp, const Instruction&, Lanes lanes) { warp.exit(lanes); }
void exit(Decoder& decoder) { decoder.emit(end, {}).control = true; }

void trap_now(Warp& warp, const Instruction& instruction, Lanes lanes) {
  auto lane = static_cast<std::uint32_t>(std::countr_zero(lanes));
  throw Fault{Result::kLaunchFailed, "trap at " + warp.where(instruction, lane)};
}
void trap(Decoder& decoder) { decoder.emit(trap_now, {}).control = true; }

void nothing(Warp&, const Instruction&, Lanes) {}
void nop(Decoder& decoder) {
  for (const std::string& each : decoder.statement().modifiers) decoder.ignore({each});
  decoder.emit(nothing, {});
}
void rest(Warp& warp, const Instruction&, Lanes) { warp.yield(); }
void nanosleep(Decoder& decoder) {
  decoder.take_type();
  decoder.emit(rest, {});
}

void call_known(Warp& warp, const Instruction& instruction, Lanes lanes) {
  warp.enter(*instruction.call->callee, *instruction.call, lanes);
}

// Lanes that hold the same function call it together; the others come to the call again.
void call_by_address(Warp& warp, const Instruction& instruction, Lanes lanes) {
  const auto* address = warp.row<const std::uint64_t>(instruction.row[0]);
  const std::uint64_t first = address[std::countr_zero(lanes)];
  const auto& known = warp.worker().grid().program->by_address;
  const std::uint64_t number = first & kWindowMask;
  if (first >> kWindowShift != kFunctionWindow >> kWindowShift || number >= known.size() ||
      known[number] == nullptr) {
    throw Fault{Result::kIllegalInstruction,
                "line " + std::to_string(instruction.line) + ": a call of what is no function"};
  }
  Lanes same = 0;
  each_lane(lanes, [&](std::uint32_t lane) {
    if (address[lane] == first) same |= Lanes{1} << lane;
  });
  if (same != lanes) {
    const auto* begin = warp.frame().code->instructions.data();
    warp.branch(lanes & ~same, static_cast<std::uint32_t>(&instruction - begin));
  }
  warp.enter(*known[number], *instruction.call, same);
}

// Where the .param variables of one of the call's lists lie.
void passed(Decoder& decoder, const Operand& list, std::vector<std::uint32_t>& offsets,
            std::vector<std::uint32_t>& bytes) {
  for (const Operand& each : list.parts) {
    const Place* place = decoder.builder().find_place(each.name);
    if (place == nullptr || place->space != Space::kLocal) {
      decoder.fail("expected a .param variable, got " + each.name);
    }
    offsets.push_back(static_cast<std::uint32_t>(place->index));
    bytes.push_back(static_cast<std::uint32_t>(place->bytes));
  }
}

void call(Decoder& decoder) {
  decoder.ignore({"uni"});
  auto site = std::make_shared<CallSite>();
  std::size_t at = 0;
  if (decoder.operand(0).kind == Operand::Kind::kList) {
    passed(decoder, decoder.operand(at++), site->results, site->result_bytes);
  }
  const Operand& callee = decoder.operand(at++);
  if (decoder.operands() > at && decoder.operand(at).kind == Operand::Kind::kList) {
    passed(decoder, decoder.operand(at), site->parameters, site->parameter_bytes);
  }
  ProgramBuilder& program = decoder.builder().program();
  Instruction::Run run = call_known;
  std::uint32_t address = kNone;
  if (decoder.builder().find_register(callee.name) != nullptr) {
    address = decoder.source(callee, Type::kB64);
    run = call_by_address;
    program.calls_by_address();
  } else if (const FunctionText* known = program.module().find(callee.name);
             known != nullptr && known->has_body) {
    site->callee = program.code_of(*known);
  } else if (Instruction::Run host = host_function(callee.name)) {
    run = host;
  } else {
    decoder.fail("no function " + callee.name);
  }
  Instruction& instruction = decoder.emit(run, {address});
  instruction.control = true;
  instruction.call = std::move(site);
  instruction.cache = decoder.new_cache();
}

constexpr Opcode kOpcodes[] = {
    {"bra", bra, "{.uni}"},
    {"brx", brx, ".idx{.uni}"},
    {"call", call,
     "{.uni} of functions and registers; vprintf, __assertfail, malloc, free, "
     "cudaGraphSetConditional"},
    {"ret", ret, "{.uni}"},
    {"exit", exit, ""},
    {"trap", trap, ""},
    {"brkpt", trap, ""},
    {"nanosleep", nanosleep, ".u32"},
    {"pmevent", nop, "{.mask}"},
    {"setmaxnreg", nop, ".{inc, dec}.sync.aligned.u32"},
    {"griddepcontrol", nop, ".{launch_dependents, wait}"},
    {"discard", nop, "{.global}.L2"},
    {"applypriority", nop, "{.global}.L2::evict_normal"},
    {"createpolicy", nop, ".fractional, .range"},
};

}  // namespace

std::span<const Opcode> control_opcodes() { return kOpcodes; }

}  // namespace vgpu::ptx
