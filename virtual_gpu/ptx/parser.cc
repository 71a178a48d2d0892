// SPDX-License-Identifier: Apache-2.0
// Modules, functions and statements. See parser.h.
#include "parser.h"

#include <algorithm>
#include <utility>

#include "ptx.h"

namespace vgpu::ptx {

ModuleText Parser::module() {
  ModuleText module;
  while (now().kind != TokenKind::kEnd) top_level(module);
  return module;
}

void Parser::top_level(ModuleText& module) {
  if (now().kind != TokenKind::kDirective) fail("a directive");
  if (take_directive("version")) {
    module.version = std::string(tokens_[at_++].text);
  } else if (take_directive("target")) {
    module.target = take_name();
    while (take_sign(",")) ++at_;
  } else if (take_directive("address_size")) {
    if (constant() != 64) fail("addresses of 64 bits");
  } else if (at_directive("file") || at_directive("loc") || at_directive("alias")) {
    skip_line();
  } else if (take_directive("pragma")) {
    skip_past(";");
  } else if (take_directive("section")) {
    while (!at_sign("{")) ++at_;
    skip_block();
  } else {
    bool is_extern = false;
    while (at_directive("visible") || at_directive("extern") || at_directive("weak") ||
           at_directive("common")) {
      is_extern |= at_directive("extern");
      ++at_;
    }
    if (take_directive("entry")) return function(module, /*is_entry=*/true);
    if (take_directive("func")) return function(module, /*is_entry=*/false);
    if (!at_variable()) fail("a variable or a function");
    variables(module.variables, is_extern);
  }
}

void Parser::function(ModuleText& module, bool is_entry) {
  auto owned = std::make_unique<FunctionText>();
  FunctionText& function = *owned;
  function.is_entry = is_entry;
  function.line = now().line;
  if (!is_entry && at_sign("(")) function.results = parameters();
  function.name = take_name();
  if (at_sign("(")) function.parameters = parameters();
  performance(function);
  if (at_sign("{")) {
    function.has_body = true;
    body(function);
  } else {
    take_sign(";");
  }
  // A declaration may come before its definition, and again.
  auto known = std::find_if(module.functions.begin(), module.functions.end(),
                            [&](const auto& each) { return each->name == function.name; });
  if (known == module.functions.end()) {
    module.functions.push_back(std::move(owned));
  } else if (function.has_body) {
    *known = std::move(owned);
  }
}

// .maxntid and its like; what only a compiler would care for is passed over.
void Parser::performance(FunctionText& function) {
  auto numbers = [this](std::uint32_t (&out)[3]) {
    std::fill(std::begin(out), std::end(out), 1U);
    for (std::uint32_t& each : out) {
      each = take_count();
      if (!take_sign(",")) return;
    }
  };
  // XLA's own kernels leave the semicolon behind a declaration out.
  auto begins_another = [this] {
    return at_directive("visible") || at_directive("extern") || at_directive("weak") ||
           at_directive("entry") || at_directive("func") || at_directive("global");
  };
  while (now().kind == TokenKind::kDirective && !begins_another()) {
    std::string word(tokens_[at_++].text);
    if (word == "maxntid") {
      numbers(function.max_threads);
    } else if (word == "reqntid") {
      numbers(function.required_threads);
    } else if (word == "reqnctapercluster") {
      numbers(function.required_cluster);
    } else if (word == "pragma") {
      skip_past(";");
    } else if (now().kind == TokenKind::kInteger) {  // .minnctapersm 2, .maxnreg 64, ...
      take_count();
      while (take_sign(",")) take_count();
    }
  }
}

void Parser::body(FunctionText& function) {
  expect_sign("{");
  for (int depth = 1; depth > 0;) {
    if (now().kind == TokenKind::kEnd) fail("'}'");
    if (at_sign("{") || at_sign("}")) {
      depth += at_sign("{") ? 1 : -1;
      Statement scope;
      scope.line = now().line;
      scope.kind = at_sign("{") ? Statement::Kind::kOpen : Statement::Kind::kClose;
      ++at_;
      if (depth > 0) function.body.push_back(std::move(scope));
    } else {
      statement(function);
    }
  }
}

void Parser::statement(FunctionText& function) {
  if (at_directive("loc") || at_directive("file")) return skip_line();
  if (take_directive("pragma")) return skip_past(";");
  if (take_sign(";")) return;
  Statement statement;
  statement.line = now().line;
  if (at_variable()) {
    std::size_t first = function.variables.size();
    variables(function.variables, /*is_extern=*/false);
    statement.kind = Statement::Kind::kDeclaration;
    for (std::size_t i = first; i < function.variables.size(); ++i) {
      statement.declared = i;
      function.body.push_back(statement);
    }
    return;
  }
  bool label =
      now().kind == TokenKind::kName && next().kind == TokenKind::kSign && next().text == ":";
  if (label) {
    std::string name = take_name();
    expect_sign(":");
    if (take_directive("branchtargets") || take_directive("calltargets")) {
      return targets(function, name);
    }
    if (take_directive("callprototype")) return prototype(function, name);
    statement.kind = Statement::Kind::kLabel;
    statement.name = std::move(name);
  } else {
    instruction(statement);
  }
  function.body.push_back(std::move(statement));
}

void Parser::instruction(Statement& statement) {
  if (take_sign("@")) {
    Guard guard;
    guard.negated = take_sign("!");
    guard.predicate = take_name();
    statement.guard = std::move(guard);
  }
  statement.name = take_name();
  while (now().kind == TokenKind::kDirective) {
    statement.modifiers.emplace_back(tokens_[at_++].text);
  }
  while (!take_sign(";")) {
    if (!statement.operands.empty()) expect_sign(",");
    statement.operands.push_back(operand());
  }
}

void Parser::targets(FunctionText& function, const std::string& label) {
  Statement statement;
  statement.kind = Statement::Kind::kTargets;
  statement.line = now().line;
  statement.name = label;
  do {
    statement.operands.push_back(name_operand());
  } while (take_sign(","));
  expect_sign(";");
  function.body.push_back(std::move(statement));
}

// Only how much the results and parameters hold counts, and that the callee knows.
void Parser::prototype(FunctionText& function, const std::string& label) {
  Statement statement;
  statement.kind = Statement::Kind::kPrototype;
  statement.line = now().line;
  statement.name = label;
  skip_past(";");
  function.body.push_back(std::move(statement));
}

ModuleText parse(std::string_view text) {
  std::size_t end = text.find('\0');  // texts from C end with a zero
  return Parser(text.substr(0, end)).module();
}

}  // namespace vgpu::ptx
