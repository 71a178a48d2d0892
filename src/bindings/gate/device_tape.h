// SPDX-License-Identifier: Apache-2.0
// Recordings of calls whose arrays stay on a GPU: the tape gets copies on the host. Waits for XLA's
// stream before and after the call.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "bindings/arrays/buffer.h"
#include "bindings/gate/tape.h"
#include "bindings/python/gil.h"
#include "core/call.h"
#include "cuda/copies.h"

namespace callgate::bindings {

// As on_tape(), for a call on a GPU. Under the GIL; also throws Error.
template <typename Make>
void on_tape_of_device(const std::string& gate, const SiteSpec& site, std::int64_t lane,
                       std::span<const ArrayView> operands, std::span<ArrayView> results,
                       const CallContext& context, DeviceCall& gpu, Make&& make) {
  auto wait = [&] { cuda::wait_for(*gpu.device, gpu.stream); };
  cuda::HostCopies copies(*gpu.device, operands, results);
  without_gil([&] {
    copies.fetch(gpu.stream);
    wait();
  });
  TapedCall taped(gate, site, lane, copies.operands(), copies.results(), context);
  if (taped.answered()) {
    return without_gil([&] {
      copies.publish(gpu.stream);
      wait();
    });
  }
  auto raised = raised_by(make);
  gpu.make_current();
  gpu.join_default_streams();
  cuda::HostCopies made(*gpu.device, results, {});
  without_gil([&] {
    if (!raised) made.fetch(gpu.stream);
    wait();
  });
  taped.made(made.operands(), raised);
  if (raised) throw *std::move(raised);
}

}  // namespace callgate::bindings
