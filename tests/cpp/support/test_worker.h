// SPDX-License-Identifier: Apache-2.0
// A pool whose workers are this test program, started again: a worker runs what the definition of
// its site says, a word and a number: "double", "pid", "sleep 0.1", "exit 3", "kill 11", "raise",
// "wait" until it is interrupted, "meet FOLDER" waits for a lane on another worker.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "workers/message.h"
#include "workers/pool.h"

namespace callgate::fake {

// `start` is what each worker is started with: "" or "fail", "exit".
std::shared_ptr<Pool> make_pool(std::size_t workers, const std::string& start = "");

// A new definition, that nothing builds on.
Definition make_definition(const std::string& text);

}  // namespace callgate::fake
