#include "transport.h"

namespace nlc {

std::unique_ptr<Transport> make_tcp_transport();
std::unique_ptr<Transport> make_ofi_transport();

std::unique_ptr<Transport> make_transport(const std::string &name) {
  if (name == "tcp") return make_tcp_transport();
  if (name == "ofi") return make_ofi_transport();
  throw std::runtime_error("no transport '" + name +
                           "': NEARLINEAR_COLLECTIVES_TRANSPORT is tcp or ofi");
}

}  // namespace nlc
