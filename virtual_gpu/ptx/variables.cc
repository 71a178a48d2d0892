// SPDX-License-Identifier: Apache-2.0
// Declarations of variables and parameters. See parser.h.
#include "parser.h"
#include "ptx.h"

namespace vgpu::ptx {

bool Parser::at_variable() const {
  if (now().kind != TokenKind::kDirective) return false;
  return now().text == "reg" || space_named(now().text).has_value();
}

void Parser::variables(std::vector<Variable>& out, bool is_extern) {
  Variable head = variable_head();
  head.is_extern = is_extern;
  do {
    Variable each = head;
    variable_tail(each);
    out.push_back(std::move(each));
  } while (take_sign(","));
  expect_sign(";");
}

// Space, alignment, vector and type, in any order that PTX allows.
Variable Parser::variable_head() {
  Variable variable;
  variable.line = now().line;
  bool typed = false, pointer = false;
  for (; now().kind == TokenKind::kDirective; ++at_) {
    std::string_view word = now().text;
    if (word == "reg") {
      variable.is_register = true;
    } else if (auto space = space_named(word)) {
      if (!pointer) variable.space = *space;
    } else if (word == "align") {
      ++at_;
      if (now().kind != TokenKind::kInteger) fail("a number of bytes");
      if (!pointer) variable.alignment = static_cast<std::uint32_t>(now().integer);
    } else if (word == "v2" || word == "v4" || word == "v8") {
      variable.elements = static_cast<std::uint32_t>(word[1] - '0');
    } else if (auto type = type_named(word)) {
      variable.type = *type;
      typed = true;
    } else if (word == "ptr") {
      pointer = true;  // what follows is said of what it points to
    } else if (word == "managed") {
      continue;
    } else {
      fail("a type");
    }
  }
  if (!typed) fail("a type");
  return variable;
}

void Parser::variable_tail(Variable& variable) {
  if (now().kind == TokenKind::kName) variable.name = take_name();
  if (take_sign("<")) {
    variable.count = take_count();
    expect_sign(">");
  }
  dimensions(variable);
  if (take_sign("=")) initialiser(variable.initial);
}

void Parser::dimensions(Variable& variable) {
  while (take_sign("[")) {
    std::uint64_t length = at_sign("]") ? 0 : constant();
    variable.length = variable.is_array ? variable.length * length : length;
    variable.is_array = true;
    expect_sign("]");
  }
}

void Parser::initialiser(std::vector<Operand>& out) {
  if (!take_sign("{")) {
    out.push_back(expression());
    return;
  }
  for (bool first = true; !take_sign("}"); first = false) {
    if (!first) expect_sign(",");
    initialiser(out);
  }
}

std::vector<Variable> Parser::parameters() {
  std::vector<Variable> all;
  expect_sign("(");
  while (!take_sign(")")) {
    if (!all.empty()) expect_sign(",");
    Variable each = variable_head();
    variable_tail(each);
    all.push_back(std::move(each));
  }
  return all;
}

}  // namespace vgpu::ptx
