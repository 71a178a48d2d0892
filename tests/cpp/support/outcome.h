// SPDX-License-Identifier: Apache-2.0
// The outcome of a call, as a value: success, or the error that it threw.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "core/error.h"

namespace callgate {

class [[nodiscard]] Outcome {
 public:
  struct Failure {
    ErrorCode code;
    std::string message;
  };

  static Outcome success() { return {}; }
  static Outcome failure(ErrorCode code, std::string message) {
    Outcome outcome;
    outcome.failure_ = Failure{code, std::move(message)};
    return outcome;
  }

  // The outcome of `body`.
  template <typename Body>
  static Outcome of(Body&& body) {
    try {
      body();
      return success();
    } catch (const Error& error) {
      return failure(error.code(), error.what());
    }
  }

  bool ok() const noexcept { return !failure_; }
  const Failure& error() const noexcept { return *failure_; }
  void raise() const {
    if (failure_) throw Error::verbatim(failure_->code, failure_->message);
  }

 private:
  std::optional<Failure> failure_;
};

}  // namespace callgate
