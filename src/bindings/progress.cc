// SPDX-License-Identifier: Apache-2.0
// The board of progress bars. Programs reach the board through the callee that is registered here
// for the life of the process; they take the GIL only to wake whoever draws, once for many bars.
#include <nanobind/stl/string.h>

#include <memory>

#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "cells/progress_callee.h"
#include "core/call.h"
#include "core/lifetime.h"

namespace callgate::bindings {
namespace {

nb::list poll() {
  nb::list bars;
  for (const ProgressState& state : ProgressBoard::instance().poll()) {
    using enum ProgressState::Phase;
    const char* phase = state.phase == kLive ? "live" : state.phase == kFailed ? "failed" : "ended";
    bars.append(nb::make_tuple(state.handle, state.bar, state.spec, state.run, state.total,
                               state.count, static_cast<double>(state.age_ns) * 1e-9,
                               static_cast<double>(state.elapsed_ns) * 1e-9, phase, state.lane,
                               state.first, state.last, state.at));
  }
  return bars;
}

}  // namespace

void bind_progress(nb::module_& module) {
  static ProgressBoard& board = ProgressBoard::instance();
  struct Registered {  // for the life of the process, as the board
    std::shared_ptr<Callee> callee = std::make_shared<ProgressCallee>(board);
  };
  Registry::instance().add(immortal<Registered>().callee);
  module.def(
      "progress_set_wake",
      [](nb::callable wake) {
        board.set_wake([function = wake.release().ptr()] {  // likewise
          GilScope gil;
          call_unraisable(function, nullptr);
        });
      },
      nb::arg("wake"), "Called by the first bar that begins while nobody draws.");
  module.def("progress_poll", &poll,
             "(handle, bar, text, run, total, count, age, seconds, phase, lane, first, last, at) "
             "of all.");
  module.def("progress_release", [](std::int32_t handle) { board.release(handle); });
  module.def(
      "progress_retire", [] { return board.retire(); },
      "Stops drawing, unless there are bars: then False.");
  // A program without callgate's runtime comes by way of JAX's callbacks.
  module.def(
      "progress_begin",
      [](const std::string& text, std::int64_t every, std::int64_t total, std::int64_t lane,
         float first, float last) {
        const ProgressStart start{0, every, total, lane, first, last};
        return without_gil([&] { return board.begin(text, start, {}); });  // waking takes it again
      },
      nb::arg("text"), nb::arg("every"), nb::arg("total"), nb::arg("lane"), nb::arg("first"),
      nb::arg("last"));
  module.def("progress_update", [](std::int32_t handle, std::int32_t count, float at) {
    return board.update(handle, static_cast<std::uint32_t>(count), at);
  });
  module.def("progress_end", [](std::int32_t handle, std::int32_t count, float at) {
    board.end(handle, static_cast<std::uint32_t>(count), at);
  });
}

}  // namespace callgate::bindings
