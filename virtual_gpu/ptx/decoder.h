// SPDX-License-Identifier: Apache-2.0
// What turns a statement into instructions: one Builder for a function, one Decoder for a
// statement.
//
// An opcode's function takes the modifiers that it knows, asks for its operands as rows of a type,
// and emits. What it leaves is an error, so that nothing is run that is not understood.
#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "code.h"
#include "syntax.h"

namespace vgpu::ptx {

class ModuleState;
class ProgramBuilder;

// Where an access goes: the row of its base (8 or 4 bytes wide; kNone for 0) and what is added.
struct Address {
  std::uint32_t row = kNone;
  bool narrow = false;  // the row has 4 bytes
  std::int64_t offset = 0;
  Space space = Space::kGeneric;
};

struct Register {
  std::uint32_t row = 0;
  Type type = Type::kB32;
};

// Where a variable of a function lies.
struct Place {
  Space space;
  std::uint64_t index;  // shared: of the program's variables; local: bytes in the frame
  std::uint64_t bytes;
};

class Builder {
 public:
  Builder(ProgramBuilder& program, const FunctionText& text, Code& code)
      : program_(program), text_(text), code_(code) {}
  void build();

  // For Decoder.
  std::uint32_t new_row(std::uint32_t bytes);
  std::uint32_t constant(std::uint32_t bytes, std::uint64_t low, std::uint64_t high = 0);
  std::uint32_t special(std::uint32_t bytes, SpecialKind kind, std::uint64_t index = 0);
  std::uint32_t sink() { return sink_ == kNone ? sink_ = new_row(16) : sink_; }
  const Register* find_register(const std::string& name);
  // Null where the name is none of a variable that the function can see.
  const Place* find_place(const std::string& name) const;
  Code& code() { return code_; }
  ProgramBuilder& program() { return program_; }
  const FunctionText& text() const { return text_; }
  void jump_to(std::size_t instruction, std::size_t slot, const std::string& label);
  const std::vector<Operand>* find_targets(const std::string& name) const;

 private:
  struct Scope {
    std::size_t number = 0;
    std::map<std::string, Register> registers;
    std::map<std::string, Variable> ranges;  // %r<10>, by the name before the number
    std::map<std::string, Place> places;
  };
  struct Jump {
    std::size_t instruction, slot;  // slot kNone: its target; else an entry of its list
    std::string label;
    std::vector<std::size_t> scopes;
    std::uint32_t line;
  };
  void declare(const Variable& variable);
  void collect_targets();
  void resolve_jumps();
  std::uint64_t local(std::uint64_t bytes, std::uint32_t alignment);

  ProgramBuilder& program_;
  const FunctionText& text_;
  Code& code_;
  std::vector<Scope> scopes_;
  std::size_t next_scope_ = 0;
  std::map<std::pair<std::size_t, std::string>, std::uint32_t> labels_;
  std::map<std::string, std::vector<Operand>> targets_;
  std::vector<Jump> jumps_;
  std::map<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>, std::uint32_t> constants_;
  std::map<std::tuple<std::uint32_t, SpecialKind, std::uint64_t>, std::uint32_t> specials_;
  std::uint32_t sink_ = kNone, line_ = 0;
};

class Decoder {
 public:
  Decoder(Builder& builder, const Statement& statement)
      : builder_(builder), statement_(statement), left_(statement.modifiers) {}
  // Throws Error with the statement's line.
  void decode();

  // Modifiers. take() says whether it stands there, anywhere, and takes one of it.
  bool take(std::string_view modifier);
  void ignore(std::initializer_list<std::string_view> modifiers);
  std::optional<Type> maybe_type();  // the first modifier left that is a type
  Type take_type();
  Space take_space();  // kGeneric where none is named
  // The one of these that stands there; its number, or `otherwise`.
  std::size_t take_one(std::initializer_list<std::string_view> modifiers, std::size_t otherwise);
  bool has(std::string_view modifier) const;

  // Operands.
  std::size_t operands() const { return statement_.operands.size(); }
  const Operand& operand(std::size_t index) const;
  void expect_operands(std::size_t least, std::size_t most);
  // Rows of lanes of the type. Registers that are wider are cut or extended as ld, st and cvt do.
  std::uint32_t source(const Operand& operand, Type type);
  std::uint32_t destination(const Operand& operand, Type type);
  std::uint32_t source(std::size_t index, Type type) { return source(operand(index), type); }
  std::uint32_t destination(std::size_t index, Type type) {
    return destination(operand(index), type);
  }
  std::vector<std::uint32_t> sources(std::size_t index, Type type);  // {a, b} or one
  std::vector<std::uint32_t> destinations(std::size_t index, Type type);
  Address address(std::size_t index, Space space);
  std::uint64_t number(std::size_t index) const;  // an immediate
  Type register_type(const Operand& operand) const;
  std::uint32_t constant(std::uint32_t bytes, std::uint64_t low) {
    return builder_.constant(bytes, low);
  }
  std::uint32_t temporary(Type type) { return builder_.new_row(size_of(type)); }

  // The reference is valid until the next one.
  Instruction& emit(Instruction::Run run, std::initializer_list<std::uint32_t> rows);
  void jump(std::size_t slot, const std::string& label);  // of the instruction emitted last
  std::uint32_t new_cache();

  [[noreturn]] void fail(const std::string& what) const;
  std::string full_name() const;
  Builder& builder() { return builder_; }
  const Statement& statement() const { return statement_; }

 private:
  std::uint32_t name_source(const Operand& operand, Type type);

  Builder& builder_;
  const Statement& statement_;
  std::vector<std::string> left_;
  struct Move {
    Instruction::Run run;
    std::uint32_t to, from;
  };
  std::vector<Move> after_;  // extend what was written
};

// An opcode, and what of it is known: for the table of instructions.
struct Opcode {
  std::string_view name;
  void (*compile)(Decoder& decoder);
  std::string_view forms;  // modifiers and types, as the manual writes them
  // Several may have one name, for different types: the first that fits is taken. Null fits all.
  bool (*fits)(const Statement& statement) = nullptr;
};
std::span<const Opcode> all_opcodes();
// By the last of the statement's modifiers that is a type.
bool fits_integers(const Statement& statement);  // and untyped bits
bool fits_floats(const Statement& statement);    // f32, f64
bool fits_halves(const Statement& statement);    // f16, bf16 and pairs of them

// One for each ops_*.cc.
std::span<const Opcode> carry_opcodes();
std::span<const Opcode> integer_opcodes();
std::span<const Opcode> bit_opcodes();
std::span<const Opcode> float_opcodes();
std::span<const Opcode> half_opcodes();
std::span<const Opcode> comparison_opcodes();
std::span<const Opcode> conversion_opcodes();
std::span<const Opcode> memory_opcodes();
std::span<const Opcode> atomic_opcodes();
std::span<const Opcode> control_opcodes();
std::span<const Opcode> warp_opcodes();
std::span<const Opcode> barrier_opcodes();
std::span<const Opcode> matrix_opcodes();
std::span<const Opcode> move_opcodes();

// The kind of a special register, and whether it has 64 bits.
struct SpecialName {
  std::string_view name;
  SpecialKind kind;
};
std::optional<SpecialKind> special_named(std::string_view name);

}  // namespace vgpu::ptx
