// SPDX-License-Identifier: Apache-2.0
// Python's handle on a thread for gates (core/named_thread.h).
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "core/lifetime.h"
#include "core/named_thread.h"

namespace callgate::bindings {

struct ThreadHandle : Immovable {
  explicit ThreadHandle(std::string name)
      : thread(std::make_shared<NamedThread>(std::move(name))) {}

  std::shared_ptr<NamedThread> thread;  // it also ends with its last gate
};

}  // namespace callgate::bindings
