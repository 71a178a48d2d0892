// SPDX-License-Identifier: Apache-2.0
// The cursor over the words, and operands. See parser.h.
#include <utility>

#include "parser.h"
#include "ptx.h"

namespace vgpu::ptx {

const Token& Parser::next(std::size_t ahead) const {
  return tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
}
bool Parser::at_sign(std::string_view sign) const {
  return now().kind == TokenKind::kSign && now().text == sign;
}
bool Parser::at_directive(std::string_view name) const {
  return now().kind == TokenKind::kDirective && now().text == name;
}
bool Parser::take_sign(std::string_view sign) {
  if (!at_sign(sign)) return false;
  ++at_;
  return true;
}
bool Parser::take_directive(std::string_view name) {
  if (!at_directive(name)) return false;
  ++at_;
  return true;
}
void Parser::expect_sign(std::string_view sign) {
  if (!take_sign(sign)) fail("'" + std::string(sign) + "'");
}
std::string Parser::take_name() {
  if (now().kind != TokenKind::kName) fail("a name");
  return std::string(tokens_[at_++].text);
}
std::uint32_t Parser::take_count() { return static_cast<std::uint32_t>(constant()); }

void Parser::fail(const std::string& expected) const {
  std::string got = now().kind == TokenKind::kEnd ? "the end" : "'" + std::string(now().text) + "'";
  throw Error("line " + std::to_string(now().line) + ": expected " + expected + ", got " + got);
}

void Parser::skip_line() {
  for (std::uint32_t line = now().line; now().kind != TokenKind::kEnd && now().line == line;) ++at_;
}
void Parser::skip_past(std::string_view sign) {
  while (!at_sign(sign) && now().kind != TokenKind::kEnd) ++at_;
  expect_sign(sign);
}
void Parser::skip_block() {
  expect_sign("{");
  for (int depth = 1; depth > 0; ++at_) {
    if (now().kind == TokenKind::kEnd) fail("'}'");
    if (at_sign("{")) ++depth;
    if (at_sign("}")) --depth;
  }
}

Operand Parser::operand() {
  Operand first = single();
  if (!take_sign("|")) return first;
  Operand pair;
  pair.kind = Operand::Kind::kPair;
  pair.parts.push_back(std::move(first));
  pair.parts.push_back(single());
  return pair;
}

Operand Parser::single() {
  if (take_sign("{")) return parts_until("}", Operand::Kind::kVector);
  if (take_sign("(")) return parts_until(")", Operand::Kind::kList);
  if (take_sign("[")) return address();
  if (take_sign("!")) {
    Operand negated = name_operand();
    negated.negated = true;
    return negated;
  }
  if (now().kind == TokenKind::kName) return name_operand();
  if (at_sign("-") && next().kind == TokenKind::kName) {
    ++at_;
    Operand minus = name_operand();
    minus.minus = true;
    return minus;
  }
  return number();
}

Operand Parser::parts_until(std::string_view close, Operand::Kind kind) {
  Operand all;
  all.kind = kind;
  while (!take_sign(close)) {
    if (!all.parts.empty()) expect_sign(",");
    all.parts.push_back(operand());
  }
  return all;
}

Operand Parser::address() {
  Operand result;
  result.kind = Operand::Kind::kAddress;
  result.parts.push_back(single());
  Operand& base = result.parts.front();
  result.offset = std::exchange(base.offset, 0);
  if (base.kind == Operand::Kind::kInteger) {
    result.offset += static_cast<std::int64_t>(std::exchange(base.integer, 0));
  }
  while (take_sign(",")) result.parts.push_back(single());
  expect_sign("]");
  return result;
}

Operand Parser::name_operand() {
  Operand result;
  result.kind = Operand::Kind::kName;
  result.name = take_name();
  if (result.name == "_") result.kind = Operand::Kind::kSink;
  while (now().kind == TokenKind::kDirective && now().glued) {  // %tid.x
    result.name += "." + std::string(tokens_[at_++].text);
  }
  if (at_sign("[")) {  // name[4], as initialisers may have it
    ++at_;
    result.offset += static_cast<std::int64_t>(constant());
    expect_sign("]");
  }
  if (at_sign("+") || at_sign("-")) {
    bool minus = take_sign("-");
    if (!minus) ++at_;
    bool again = take_sign("-");  // name+-8
    auto distance = static_cast<std::int64_t>(constant());
    result.offset += minus != again ? -distance : distance;
  }
  return result;
}

Operand Parser::number() {
  Operand result;
  bool minus = at_sign("-") && next().kind == TokenKind::kFloat;
  if (minus) ++at_;
  if (now().kind == TokenKind::kFloat) {
    result.kind = Operand::Kind::kFloat;
    result.number = minus ? -now().number : now().number;
    ++at_;
    return result;
  }
  result.kind = Operand::Kind::kInteger;
  result.integer = constant();
  return result;
}

Operand Parser::expression() {
  if (now().kind != TokenKind::kName) return number();
  if (now().text == "generic" || now().text == "mask") {
    if (now().text == "mask") fail("a number or a name");
    ++at_;
    expect_sign("(");
    Operand inner = name_operand();
    expect_sign(")");
    if (take_sign("+")) inner.offset += static_cast<std::int64_t>(constant());
    inner.negated = true;  // the generic address, which is the same here
    return inner;
  }
  return name_operand();
}

std::uint64_t Parser::constant() {
  auto factor = [this](auto&& self) -> std::uint64_t {
    if (take_sign("-")) return 0 - self(self);
    if (take_sign("+")) return self(self);
    if (take_sign("~")) return ~self(self);
    if (take_sign("(")) {
      std::uint64_t inner = constant();
      expect_sign(")");
      return inner;
    }
    if (now().kind != TokenKind::kInteger) fail("a number");
    return tokens_[at_++].integer;
  };
  auto product = [&] {
    std::uint64_t value = factor(factor);
    while (take_sign("*")) value *= factor(factor);
    return value;
  };
  auto sum = [&] {
    std::uint64_t value = product();
    for (;;) {
      if (take_sign("+")) {
        value += product();
      } else if (take_sign("-")) {
        value -= product();
      } else {
        return value;
      }
    }
  };
  std::uint64_t value = sum();
  while (take_sign("<<")) value <<= sum() & 63U;
  return value;
}

}  // namespace vgpu::ptx
