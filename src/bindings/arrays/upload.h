// `_callgate.Upload`: an item of a feed on its way to a GPU.
#pragma once

#include "bindings/python/python.h"

namespace callgate::bindings {

void bind_upload(nb::module_& module);

}  // namespace callgate::bindings
