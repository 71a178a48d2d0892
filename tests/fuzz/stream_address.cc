// SPDX-License-Identifier: Apache-2.0
// The address of a stream.
#include "channel/stream_address.h"

#include <string>
#include <string_view>

#include "core/error.h"
#include "targets.h"

namespace callgate::fuzz {

void stream_address(std::string_view bytes) {
  StreamAddress address;
  try {
    address = parse_stream_address(bytes);
  } catch (const Error&) {
    return;
  }
  const StreamAddress again = parse_stream_address(address.text());
  require(again.transport == address.transport && again.path == address.path &&
              again.host == address.host && again.port == address.port,
          "an address's text is read as that address");
  require(
      address.path.find('\0') == std::string::npos && address.host.find('\0') == std::string::npos,
      "no address is cut by a zero");
}

}  // namespace callgate::fuzz
