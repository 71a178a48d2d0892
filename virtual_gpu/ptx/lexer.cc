// SPDX-License-Identifier: Apache-2.0
// PTX as words. See lexer.h.
#include "lexer.h"

#include <bit>
#include <cctype>
#include <charconv>
#include <cstdlib>

#include "ptx.h"

namespace vgpu::ptx {
namespace {

bool is_start(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%';
}
bool is_part(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$';
}
bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}

  std::vector<Token> all() {
    std::vector<Token> tokens;
    for (;;) {
      std::size_t before = at_;
      skip();
      Token token;
      token.line = line_;
      token.glued = at_ == before;
      if (at_ < text_.size()) read(token);
      tokens.push_back(token);
      if (token.kind == TokenKind::kEnd) return tokens;
    }
  }

 private:
  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw Error("line " + std::to_string(line_) + ": " + what);
  }

  void skip() {
    while (at_ < text_.size()) {
      if (peek() == '\n') ++line_;
      if (std::isspace(static_cast<unsigned char>(peek())) != 0) {
        ++at_;
      } else if (peek() == '/' && peek(1) == '/') {
        while (at_ < text_.size() && peek() != '\n') ++at_;
      } else if (peek() == '/' && peek(1) == '*') {
        skip_comment();
      } else {
        return;
      }
    }
  }
  void skip_comment() {
    std::size_t end = text_.find("*/", at_ + 2);
    if (end == std::string_view::npos) fail("a comment that doesn't end");
    for (; at_ < end + 2; ++at_) line_ += peek() == '\n' ? 1U : 0U;
  }

  void read(Token& token) {
    char c = peek();
    if (is_digit(c)) return read_number(token);
    if (c == '"') return read_text(token);
    if (c == '.' && is_start(peek(1))) {
      ++at_;
      token.kind = TokenKind::kDirective;
      token.text = word(/*scoped=*/true);
    } else if (is_start(c)) {
      token.kind = TokenKind::kName;
      token.text = word(/*scoped=*/false);
    } else {
      read_sign(token);
    }
  }

  // Names, and the parts of modifiers such as shared::cta or cta_group::1.
  std::string_view word(bool scoped) {
    std::size_t begin = at_++;
    while (is_part(peek()) ||
           (scoped && peek() == ':' && peek(1) == ':' && (is_part(peek(2)) || peek(2) == ':')) ||
           (scoped && peek() == ':' && at_ > begin && text_[at_ - 1] == ':')) {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  void read_text(Token& token) {
    std::size_t end = text_.find('"', at_ + 1);
    if (end == std::string_view::npos) fail("a text that doesn't end");
    token.kind = TokenKind::kText;
    token.text = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
  }

  void read_sign(Token& token) {
    static constexpr std::string_view kPairs[] = {"<<", ">>", "==", "!=", "<=", ">=", "&&", "||"};
    std::size_t length = 1;
    for (std::string_view pair : kPairs) {
      if (text_.substr(at_, 2) == pair) length = 2;
    }
    token.kind = TokenKind::kSign;
    token.text = text_.substr(at_, length);
    at_ += length;
  }

  void read_number(Token& token) {
    std::size_t begin = at_;
    char second = peek(1);
    if (peek() == '0' && (second == 'f' || second == 'F') && is_hex(peek(2))) {
      token.number = std::bit_cast<float>(static_cast<std::uint32_t>(digits(2, 16)));
      token.kind = TokenKind::kFloat;
      token.float_bytes = 4;
    } else if (peek() == '0' && (second == 'd' || second == 'D') && is_hex(peek(2))) {
      token.number = std::bit_cast<double>(digits(2, 16));
      token.kind = TokenKind::kFloat;
    } else if (is_decimal_float()) {
      read_decimal(token);
    } else {
      read_integer(token);
    }
    token.text = text_.substr(begin, at_ - begin);
  }
  static bool is_hex(char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; }
  bool is_decimal_float() const {
    std::size_t ahead = 0;
    while (is_digit(peek(ahead))) ++ahead;
    return (peek(ahead) == '.' && is_digit(peek(ahead + 1))) || peek(ahead) == 'e' ||
           peek(ahead) == 'E' || (peek(ahead) == '.' && !is_start(peek(ahead + 1)));
  }
  void read_decimal(Token& token) {
    token.kind = TokenKind::kFloat;
    auto [end, status] =
        std::from_chars(text_.data() + at_, text_.data() + text_.size(), token.number);
    if (status != std::errc()) fail("a number that can't be read");
    at_ = static_cast<std::size_t>(end - text_.data());
  }
  void read_integer(Token& token) {
    token.kind = TokenKind::kInteger;
    char second = peek(1);
    if (peek() == '0' && (second == 'x' || second == 'X')) {
      token.integer = digits(2, 16);
    } else if (peek() == '0' && (second == 'b' || second == 'B')) {
      token.integer = digits(2, 2);
    } else if (peek() == '0' && is_digit(second)) {
      token.integer = digits(1, 8);
    } else {
      token.integer = digits(0, 10);
    }
    if (peek() == 'U' || peek() == 'u') ++at_;
  }
  std::uint64_t digits(std::size_t skipped, int base) {
    std::uint64_t value = 0;
    const char* begin = text_.data() + at_ + skipped;
    auto [end, status] = std::from_chars(begin, text_.data() + text_.size(), value, base);
    if (status != std::errc()) fail("a number that can't be read");
    at_ = static_cast<std::size_t>(end - text_.data());
    return value;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::uint32_t line_ = 1;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view text) { return Lexer(text).all(); }

}  // namespace vgpu::ptx
