// What a CUDA graph that is being captured needs for as long as it lives.
#pragma once

#include <memory>

#include "cuda/types.h"

namespace callgate::cuda {

// Gives `kept` to the graph that `stream` is captured into, and to its copies: it dies with the
// last of them, on a thread of the driver's, and must not call CUDA then. False where the driver
// can't: then it is still the caller's.
bool give_to_graph(Stream stream, const std::shared_ptr<void>& kept);

}  // namespace callgate::cuda
