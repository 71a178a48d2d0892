// SPDX-License-Identifier: Apache-2.0
// What a PTX text says, before it means anything: variables, functions, statements.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "types.h"

namespace vgpu::ptx {

struct Operand {
  enum class Kind : std::uint8_t {
    kName,  // a register, a special register, a variable, a function; `offset` is added
    kInteger,
    kFloat,
    kAddress,  // [parts[0] + offset]; tensors' have their coordinates as parts[1]
    kVector,   // {parts...}
    kList,     // (parts...)
    kPair,     // parts[0] | parts[1]
    kSink,     // _
  };
  Kind kind = Kind::kSink;
  std::string name;      // with a member: %tid.x
  bool negated = false;  // !p
  bool minus = false;    // -r
  std::int64_t offset = 0;
  std::uint64_t integer = 0;
  double number = 0;
  std::vector<Operand> parts;
};

struct Guard {
  std::string predicate;
  bool negated = false;
};

struct Statement {
  enum class Kind : std::uint8_t {
    kInstruction,
    kLabel,
    kOpen,
    kClose,
    kTargets,
    kPrototype,
    kDeclaration
  };
  Kind kind = Kind::kInstruction;
  std::uint32_t line = 0;
  std::optional<Guard> guard;
  std::string name;                    // the opcode without modifiers, or the label
  std::vector<std::string> modifiers;  // without dots
  std::vector<Operand> operands;
  std::size_t declared = 0;  // kDeclaration: which of the function's variables
};

// A variable: of the module, or of a function. Registers are variables in the space `reg`.
struct Variable {
  std::string name;
  bool is_register = false;
  std::uint32_t count = 0;  // %r<count>: registers name0 to name(count - 1)
  Space space = Space::kGlobal;
  Type type = Type::kB8;
  std::uint32_t elements = 1;  // of its vector type: .v4
  std::uint64_t length = 1;    // of its array; 0 for one without a size
  bool is_array = false;
  std::uint32_t alignment = 0;  // bytes; 0 for its type's
  bool is_extern = false;
  std::vector<Operand> initial;  // numbers and names, flattened
  std::uint32_t line = 0;

  std::uint64_t bytes() const { return std::uint64_t{size_of(type)} * elements * length; }
  std::uint32_t aligned() const { return alignment != 0 ? alignment : size_of(type) * elements; }
};

struct FunctionText {
  std::string name;
  bool is_entry = false, has_body = false;
  std::vector<Variable> results, parameters;
  std::vector<Variable> variables;  // all that its body declares
  std::vector<Statement> body;
  std::uint32_t max_threads[3] = {0, 0, 0};       // .maxntid
  std::uint32_t required_threads[3] = {0, 0, 0};  // .reqntid
  std::uint32_t required_cluster[3] = {0, 0, 0};  // .reqnctapercluster
  std::uint32_t line = 0;
};

struct ModuleText {
  std::string version, target;
  std::vector<Variable> variables;
  std::vector<std::unique_ptr<FunctionText>> functions;
};

// Throws Error.
ModuleText parse(std::string_view text);

}  // namespace vgpu::ptx
