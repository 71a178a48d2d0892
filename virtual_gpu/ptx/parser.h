// SPDX-License-Identifier: Apache-2.0
// The parser: one cursor over the words, and what each part of the grammar makes of them.
//
// variables.cc reads declarations, operands.cc operands, parser.cc modules, functions, statements.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lexer.h"
#include "syntax.h"

namespace vgpu::ptx {

class Parser {
 public:
  explicit Parser(std::string_view text) : tokens_(tokens_of(text)) {}
  ModuleText module();

 private:
  // The cursor.
  const Token& now() const { return tokens_[at_]; }
  const Token& next(std::size_t ahead = 1) const;
  bool at_sign(std::string_view sign) const;
  bool at_directive(std::string_view name) const;
  bool take_sign(std::string_view sign);
  bool take_directive(std::string_view name);
  void expect_sign(std::string_view sign);
  std::string take_name();
  std::uint32_t take_count();
  [[noreturn]] void fail(const std::string& expected) const;
  void skip_line();  // .file, .loc and their like
  void skip_past(std::string_view sign);
  void skip_block();  // { ... }, nested

  // Operands.
  Operand operand();
  Operand single();
  Operand parts_until(std::string_view close, Operand::Kind kind);
  Operand address();
  Operand name_operand();
  Operand number();
  Operand expression();      // of an initialiser: numbers, names, generic(name) + 4
  std::uint64_t constant();  // an integer; * + - << over them and brackets

  // Variables.
  bool at_variable() const;
  // `.reg`, `.global` and so on, one or several: `.reg .b32 a, b;`
  void variables(std::vector<Variable>& out, bool is_extern);
  Variable variable_head();
  void variable_tail(Variable& variable);
  void dimensions(Variable& variable);
  void initialiser(std::vector<Operand>& out);
  std::vector<Variable> parameters();

  // Functions.
  void top_level(ModuleText& module);
  void function(ModuleText& module, bool is_entry);
  void performance(FunctionText& function);
  void body(FunctionText& function);
  void statement(FunctionText& function);
  void instruction(Statement& statement);
  void targets(FunctionText& function, const std::string& label);
  void prototype(FunctionText& function, const std::string& label);

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
};

}  // namespace vgpu::ptx
