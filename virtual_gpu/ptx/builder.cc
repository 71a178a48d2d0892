// SPDX-License-Identifier: Apache-2.0
// A function's statements become instructions: scopes, registers, variables, labels. See decoder.h.
#include <algorithm>

#include "decoder.h"
#include "machine.h"
#include "program.h"

namespace vgpu::ptx {
namespace {

std::uint32_t round_up(std::uint64_t value, std::uint32_t alignment) {
  return static_cast<std::uint32_t>((value + alignment - 1) / alignment * alignment);
}

[[noreturn]] void fail(std::uint32_t line, const std::string& what) {
  throw Error("line " + std::to_string(line) + ": " + what);
}

void fall_off(Warp& warp, const Instruction&, Lanes lanes) { warp.leave(lanes); }

}  // namespace

void Builder::build() {
  code_.name = text_.name;
  scopes_.emplace_back();
  scopes_.back().number = next_scope_++;
  std::uint64_t offset = 0;
  for (const Variable& each : text_.parameters) {
    if (text_.is_entry) {  // the launch's bytes, each at its alignment
      offset = round_up(offset, each.aligned());
      scopes_.back().places[each.name] = {Space::kParam, offset, each.bytes()};
      offset += each.bytes();
    } else {
      declare(each);
      code_.parameter_offsets.push_back(
          static_cast<std::uint32_t>(scopes_.back().places[each.name].index));
    }
  }
  for (const Variable& each : text_.results) {
    declare(each);
    code_.result_offsets.push_back(
        static_cast<std::uint32_t>(scopes_.back().places[each.name].index));
  }
  collect_targets();
  for (const Statement& each : text_.body) {
    line_ = each.line;
    switch (each.kind) {
      case Statement::Kind::kOpen:
        scopes_.emplace_back();
        scopes_.back().number = next_scope_++;
        break;
      case Statement::Kind::kClose: scopes_.pop_back(); break;
      case Statement::Kind::kLabel:
        labels_[{scopes_.back().number, each.name}] =
            static_cast<std::uint32_t>(code_.instructions.size());
        break;
      case Statement::Kind::kDeclaration: declare(text_.variables[each.declared]); break;
      case Statement::Kind::kInstruction: Decoder(*this, each).decode(); break;
      case Statement::Kind::kTargets:
      case Statement::Kind::kPrototype: break;
    }
  }
  Instruction& last = code_.instructions.emplace_back();  // the end of the text returns
  last.run = fall_off;
  last.control = true;
  last.line = line_;
  resolve_jumps();
}

void Builder::collect_targets() {
  for (const Statement& each : text_.body) {
    if (each.kind == Statement::Kind::kTargets) targets_[each.name] = each.operands;
  }
}
const std::vector<Operand>* Builder::find_targets(const std::string& name) const {
  auto found = targets_.find(name);
  return found == targets_.end() ? nullptr : &found->second;
}

std::uint64_t Builder::local(std::uint64_t bytes, std::uint32_t alignment) {
  std::uint32_t at = round_up(code_.local_bytes, std::min<std::uint32_t>(alignment, 16));
  code_.local_bytes = static_cast<std::uint32_t>(at + bytes);
  return at;
}

void Builder::declare(const Variable& variable) {
  Scope& scope = scopes_.back();
  if (variable.is_register) {
    if (variable.count > 0) {
      scope.ranges[variable.name] = variable;
    } else {
      scope.registers[variable.name] = {new_row(size_of(variable.type)), variable.type};
    }
    return;
  }
  Place place{variable.space, 0, variable.bytes()};
  switch (variable.space) {
    case Space::kShared:
      place.index = program_.shared_index(
          variable, text_.name + "/" + std::to_string(scope.number) + "/" + variable.name);
      break;
    case Space::kLocal:
    case Space::kParam:
      place.space = Space::kLocal;
      place.index = local(variable.bytes(), variable.aligned());
      break;
    default: fail(variable.line, "a variable of this space in a function: " + variable.name);
  }
  scope.places[variable.name] = place;
}

const Register* Builder::find_register(const std::string& name) {
  std::size_t digits = name.find_last_not_of("0123456789") + 1;
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    if (auto found = scope->registers.find(name); found != scope->registers.end()) {
      return &found->second;
    }
    if (digits == name.size()) continue;
    auto range = scope->ranges.find(name.substr(0, digits));
    if (range == scope->ranges.end()) continue;
    if (std::stoul(name.substr(digits)) >= range->second.count) continue;
    Type type = range->second.type;
    return &(scope->registers[name] = {new_row(size_of(type)), type});
  }
  return nullptr;
}

const Place* Builder::find_place(const std::string& name) const {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    if (auto found = scope->places.find(name); found != scope->places.end()) return &found->second;
  }
  const Variable* variable = program_.module().shared(name);
  if (variable == nullptr) return nullptr;
  Place place{Space::kShared, program_.shared_index(*variable, name), variable->bytes()};
  return &const_cast<Builder*>(this)->scopes_.front().places.emplace(name, place).first->second;
}

std::uint32_t Builder::new_row(std::uint32_t bytes) {
  std::uint32_t row = round_up(code_.register_bytes, 16);
  code_.register_bytes = row + bytes * kLanes;
  return row;
}

std::uint32_t Builder::constant(std::uint32_t bytes, std::uint64_t low, std::uint64_t high) {
  if (bytes < 8) low &= (std::uint64_t{1} << (8 * bytes)) - 1;
  if (bytes < 16) high = 0;
  auto [found, is_new] = constants_.try_emplace({bytes, low, high}, 0);
  if (is_new) {
    found->second = new_row(bytes);
    code_.constants.push_back({found->second, bytes, low, high});
  }
  return found->second;
}

std::uint32_t Builder::special(std::uint32_t bytes, SpecialKind kind, std::uint64_t index) {
  auto [found, is_new] = specials_.try_emplace({bytes, kind, index}, 0);
  if (is_new) {
    found->second = new_row(bytes);
    code_.specials.push_back({found->second, bytes, kind, index});
  }
  return found->second;
}

void Builder::jump_to(std::size_t instruction, std::size_t slot, const std::string& label) {
  Jump jump{instruction, slot, label, {}, line_};
  for (const Scope& each : scopes_) jump.scopes.push_back(each.number);
  jumps_.push_back(std::move(jump));
}

void Builder::resolve_jumps() {
  for (const Jump& jump : jumps_) {
    std::uint32_t place = kNone;
    for (auto scope = jump.scopes.rbegin(); scope != jump.scopes.rend() && place == kNone;
         ++scope) {
      auto found = labels_.find({*scope, jump.label});
      if (found != labels_.end()) place = found->second;
    }
    if (place == kNone) fail(jump.line, "no label " + jump.label);
    Instruction& instruction = code_.instructions[jump.instruction];
    (jump.slot == kNone ? instruction.target : instruction.list[jump.slot]) = place;
  }
}

}  // namespace vgpu::ptx
