// Errors in two forms: `Error` is thrown by set-up code and says what was expected, what came and
// where; `Outcome` is what a call returns, free of cost and of allocation when it succeeds.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace callgate {

// Kinds of failure, by the names of the absl status codes that XLA reports them as.
enum class ErrorCode {
  kInvalidArgument,
  kNotFound,
  kAlreadyExists,
  kDeadlineExceeded,
  kAborted,
  kInternal,
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& where, const std::string& expected,
        const std::string& got)
      : std::runtime_error("callgate: " + where + ": expected " + expected + ", got " + got),
        code_(code) {}
  Error(ErrorCode code, const std::string& message)
      : std::runtime_error("callgate: " + message), code_(code) {}

  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

struct Failure {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};

// The result of a call: success, or one failure with its message.
class [[nodiscard]] Outcome {
 public:
  static Outcome success() noexcept { return Outcome(); }
  static Outcome failure(ErrorCode code, std::string message) {
    Outcome outcome;
    outcome.failure_ = std::make_unique<Failure>(Failure{code, std::move(message)});
    return outcome;
  }

  bool ok() const noexcept { return failure_ == nullptr; }
  const Failure& error() const noexcept { return *failure_; }

 private:
  std::unique_ptr<Failure> failure_;
};

}  // namespace callgate
