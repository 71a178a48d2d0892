// SPDX-License-Identifier: Apache-2.0
// A statement's modifiers and operands. See decoder.h.
#include "decoder.h"

#include <algorithm>
#include <bit>

#include "machine.h"
#include "program.h"

namespace vgpu::ptx {
namespace {

template <typename To, typename From>
void widen(Warp& warp, const Instruction& instruction, Lanes lanes) {
  To* to = warp.row<To>(instruction.row[0]);
  const From* from = warp.row<From>(instruction.row[1]);
  each_lane(lanes, [&](std::uint32_t lane) { to[lane] = static_cast<To>(from[lane]); });
}

template <typename To>
Instruction::Run widen_from(Type from) {
  const bool keeps_sign = is_signed(from);
  switch (size_of(from)) {
    case 1: return keeps_sign ? widen<To, std::int8_t> : widen<To, std::uint8_t>;
    case 2: return keeps_sign ? widen<To, std::int16_t> : widen<To, std::uint16_t>;
    case 4: return keeps_sign ? widen<To, std::int32_t> : widen<To, std::uint32_t>;
    default: return widen<To, std::uint64_t>;
  }
}

// A row of `from` into one of so many bytes.
Instruction::Run move_between(std::uint32_t to_bytes, Type from) {
  switch (to_bytes) {
    case 1: return widen_from<std::uint8_t>(from);
    case 2: return widen_from<std::uint16_t>(from);
    case 4: return widen_from<std::uint32_t>(from);
    default: return widen_from<std::uint64_t>(from);
  }
}

std::uint64_t float_bits(double value, Type type) {
  if (size_of(type) == 8) return std::bit_cast<std::uint64_t>(value);
  return std::bit_cast<std::uint32_t>(static_cast<float>(value));
}

}  // namespace

void Decoder::fail(const std::string& what) const {
  throw Error("line " + std::to_string(statement_.line) + ": " + full_name() + ": " + what);
}

std::string Decoder::full_name() const {
  std::string name = statement_.name;
  for (const std::string& each : statement_.modifiers) name += "." + each;
  return name;
}

void Decoder::decode() {
  static const auto* opcodes = [] {
    auto* by_name = new std::multimap<std::string_view, const Opcode*>();
    for (const Opcode& each : all_opcodes()) by_name->emplace(each.name, &each);
    return by_name;
  }();
  auto [found, end] = opcodes->equal_range(statement_.name);
  if (found == end) fail("unknown instruction");
  while (found != end && found->second->fits != nullptr && !found->second->fits(statement_))
    ++found;
  if (found == end) fail("not for this type");
  Code& code = builder_.code();
  std::size_t first = code.instructions.size();
  found->second->compile(*this);
  if (!left_.empty()) fail("unknown modifier ." + left_.front());
  for (const Move& move : after_) emit(move.run, {move.to, move.from});
  for (std::size_t i = first; i < code.instructions.size(); ++i) {
    code.instructions[i].line = statement_.line;
    if (!statement_.guard) continue;
    const Register* guard = builder_.find_register(statement_.guard->predicate);
    if (guard == nullptr || guard->type != Type::kPred) {
      fail("no predicate " + statement_.guard->predicate);
    }
    code.instructions[i].guard = guard->row;
    code.instructions[i].guard_negated = statement_.guard->negated;
  }
}

bool Decoder::has(std::string_view modifier) const {
  return std::find(left_.begin(), left_.end(), modifier) != left_.end();
}
bool Decoder::take(std::string_view modifier) {
  auto it = std::find(left_.begin(), left_.end(), modifier);
  if (it == left_.end()) return false;
  left_.erase(it);
  return true;
}
void Decoder::ignore(std::initializer_list<std::string_view> modifiers) {
  for (std::string_view each : modifiers) take(each);
}
std::size_t Decoder::take_one(std::initializer_list<std::string_view> modifiers,
                              std::size_t otherwise) {
  std::size_t number = 0;
  for (std::string_view each : modifiers) {
    if (take(each)) return number;
    ++number;
  }
  return otherwise;
}
std::optional<Type> Decoder::maybe_type() {
  for (auto it = left_.begin(); it != left_.end(); ++it) {
    if (auto type = type_named(*it)) {
      left_.erase(it);
      return type;
    }
  }
  return std::nullopt;
}
Type Decoder::take_type() {
  if (auto type = maybe_type()) return *type;
  fail("expected a type");
}
Space Decoder::take_space() {
  for (auto it = left_.begin(); it != left_.end(); ++it) {
    if (auto space = space_named(*it)) {
      left_.erase(it);
      return *space;
    }
  }
  return Space::kGeneric;
}

const Operand& Decoder::operand(std::size_t index) const {
  if (index >= operands()) fail("expected " + std::to_string(index + 1) + " operands or more");
  return statement_.operands[index];
}
void Decoder::expect_operands(std::size_t least, std::size_t most) {
  if (operands() >= least && operands() <= most) return;
  fail("expected " + std::to_string(least) + " to " + std::to_string(most) + " operands, got " +
       std::to_string(operands()));
}

std::uint32_t Decoder::source(const Operand& operand, Type type) {
  switch (operand.kind) {
    case Operand::Kind::kInteger: {
      bool of_float =
          is_float(type) && size_of(type) >= 4 && type != Type::kF16x2 && type != Type::kBF16x2;
      std::uint64_t bits =
          of_float
              ? float_bits(static_cast<double>(static_cast<std::int64_t>(operand.integer)), type)
              : operand.integer;
      if (type == Type::kPred) bits = bits != 0 ? 1 : 0;
      bool negative = static_cast<std::int64_t>(operand.integer) < 0;
      return builder_.constant(size_of(type), bits, negative && size_of(type) == 16 ? ~0ULL : 0);
    }
    case Operand::Kind::kFloat:
      return builder_.constant(size_of(type), float_bits(operand.number, type));
    case Operand::Kind::kName: return name_source(operand, type);
    default: fail("expected a register or a number");
  }
}

std::uint32_t Decoder::name_source(const Operand& operand, Type type) {
  const std::uint32_t bytes = size_of(type);
  if (const Register* found = builder_.find_register(operand.name)) {
    if (operand.negated || operand.minus || operand.offset != 0) {
      if (!operand.negated || type != Type::kPred) fail("can't negate " + operand.name);
      std::uint32_t row = temporary(type);
      emit(
          [](Warp& warp, const Instruction& i, Lanes lanes) {
            auto* to = warp.row<std::uint8_t>(i.row[0]);
            const auto* from = warp.row<std::uint8_t>(i.row[1]);
            each_lane(lanes, [&](std::uint32_t lane) { to[lane] = from[lane] ^ 1U; });
          },
          {row, found->row});
      return row;
    }
    if ((found->type == Type::kPred) != (type == Type::kPred)) {
      fail(operand.name + " is " + std::string(name_of(found->type)) + ", expected " +
           std::string(name_of(type)));
    }
    if (size_of(found->type) == bytes) return found->row;
    if (size_of(found->type) < bytes) {
      fail(operand.name + " has " + std::to_string(size_of(found->type)) + " bytes, expected " +
           std::to_string(bytes));
    }
    std::uint32_t row = temporary(type);
    emit(move_between(bytes, found->type), {row, found->row});
    return row;
  }
  if (auto kind = special_named(operand.name)) return builder_.special(bytes, *kind);
  if (const Place* place = builder_.find_place(operand.name)) {
    auto offset = static_cast<std::uint64_t>(operand.offset);
    switch (place->space) {
      case Space::kShared:
        return builder_.special(bytes, SpecialKind::kSharedAddress, place->index | offset << 32);
      case Space::kLocal:
        return builder_.special(bytes, SpecialKind::kLocalAddress, place->index + offset);
      default: return builder_.constant(bytes, place->index + offset);
    }
  }
  ModuleState& module = builder_.program().module();
  if (const Global* global = module.global(operand.name)) {
    return builder_.constant(bytes, global->address + static_cast<std::uint64_t>(operand.offset));
  }
  if (const FunctionText* function = module.find(operand.name)) {
    return builder_.constant(bytes, kFunctionWindow + module.number_of(*function));
  }
  fail("no register or variable " + operand.name);
}

std::uint32_t Decoder::destination(const Operand& operand, Type type) {
  if (operand.kind == Operand::Kind::kSink) return builder_.sink();
  const Register* found =
      operand.kind == Operand::Kind::kName ? builder_.find_register(operand.name) : nullptr;
  if (found == nullptr) fail("expected a register, got " + operand.name);
  if ((found->type == Type::kPred) != (type == Type::kPred)) {
    fail(operand.name + " is " + std::string(name_of(found->type)) + ", expected " +
         std::string(name_of(type)));
  }
  if (size_of(found->type) == size_of(type)) return found->row;
  if (size_of(found->type) < size_of(type)) {
    fail(operand.name + " has " + std::to_string(size_of(found->type)) + " bytes, expected " +
         std::to_string(size_of(type)));
  }
  std::uint32_t row = temporary(type);
  after_.push_back({move_between(size_of(found->type), type), found->row, row});
  return row;
}

std::vector<std::uint32_t> Decoder::sources(std::size_t index, Type type) {
  const Operand& all = operand(index);
  if (all.kind != Operand::Kind::kVector) return {source(all, type)};
  std::vector<std::uint32_t> rows;
  for (const Operand& each : all.parts) rows.push_back(source(each, type));
  return rows;
}
std::vector<std::uint32_t> Decoder::destinations(std::size_t index, Type type) {
  const Operand& all = operand(index);
  if (all.kind != Operand::Kind::kVector) return {destination(all, type)};
  std::vector<std::uint32_t> rows;
  for (const Operand& each : all.parts) rows.push_back(destination(each, type));
  return rows;
}

Address Decoder::address(std::size_t index, Space space) {
  const Operand& all = operand(index);
  if (all.kind != Operand::Kind::kAddress || all.parts.size() != 1) fail("expected an address");
  const Operand& base = all.parts.front();
  Address result;
  result.offset = all.offset;
  result.space = space;
  if (base.kind == Operand::Kind::kInteger) return result;
  if (const Register* found = builder_.find_register(base.name)) {
    result.row = found->row;
    result.narrow = size_of(found->type) == 4;
    return result;
  }
  if (const Place* place = builder_.find_place(base.name)) {
    if (space == Space::kParam || space == Space::kGeneric) result.space = place->space;
    if (place->space == Space::kParam) {
      result.offset += static_cast<std::int64_t>(place->index);
      return result;
    }
  }
  result.row = source(base, Type::kB64);
  return result;
}

std::uint64_t Decoder::number(std::size_t index) const {
  const Operand& value = operand(index);
  if (value.kind != Operand::Kind::kInteger) fail("expected a number");
  return value.integer;
}

Type Decoder::register_type(const Operand& operand) const {
  const Register* found = builder_.find_register(operand.name);
  if (found == nullptr) fail("expected a register, got " + operand.name);
  return found->type;
}

Instruction& Decoder::emit(Instruction::Run run, std::initializer_list<std::uint32_t> rows) {
  Instruction& instruction = builder_.code().instructions.emplace_back();
  instruction.run = run;
  std::copy(rows.begin(), rows.end(), instruction.row.begin());
  return instruction;
}

void Decoder::jump(std::size_t slot, const std::string& label) {
  builder_.jump_to(builder_.code().instructions.size() - 1, slot, label);
}
std::uint32_t Decoder::new_cache() { return builder_.program().new_cache(); }

}  // namespace vgpu::ptx
