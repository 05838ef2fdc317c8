// Selection of a provider, and an endpoint on it. Objects opened by libfabric are closed with their
// owner.
#pragma once

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_tagged.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "ofi_library.h"

namespace nlc::ofi {

struct Close {
  template <class Object>
  void operator()(Object *object) const {
    ::fi_close(&object->fid);
  }
};
template <class Object>
using Owned = std::unique_ptr<Object, Close>;

struct FreeInfo {
  void operator()(fi_info *info) const { Library::get().freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

// Find a provider with reliable, tagged messages between any two endpoints; nullptr if there is
// none. Sockets of providers that use IP bind to `host`.
inline Info find_provider(const std::string &provider, const std::string &host) {
  const Library &library = Library::get();
  // Providers that can manage memory registrations are left to do so: unlike this process, they are
  // notified of unmapped memory.
  for (const int mr_mode : {0, FI_MR_LOCAL | FI_MR_ALLOCATED}) {
    Info hints(library.dupinfo(nullptr));
    if (!hints) throw Failure(NLC_SYSTEM, "libfabric: out of memory");
    hints->caps = FI_TAGGED;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = mr_mode;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->fabric_attr->prov_name = ::strdup(provider.c_str());
    auto ask = [&](const char *node, uint64_t flags) {
      fi_info *found = nullptr;
      library.getinfo(kVersion, node, nullptr, flags, hints.get(), &found);
      return Info(found);
    };
    Info found = ask(nullptr, 0);
    if (!found) continue;
    const uint32_t format = found->addr_format;
    if (format == FI_SOCKADDR || format == FI_SOCKADDR_IN || format == FI_SOCKADDR_IN6)
      if (Info local = ask(host.c_str(), FI_SOURCE)) return local;
    return found;
  }
  return nullptr;
}

// A local endpoint: messages to all nodes leave from it, and one completion queue reports all
// events.
class Endpoint {
 public:
  Endpoint() = default;
  explicit Endpoint(Info found) : info_(std::move(found)) {
    const Library &library = Library::get();
    fid_fabric *fabric;
    library.check(library.fabric(info_->fabric_attr, &fabric, nullptr), "fabric");
    fabric_.reset(fabric);
    fid_domain *domain;
    library.check(::fi_domain(fabric, info_.get(), &domain, nullptr), "domain");
    domain_.reset(domain);
    fi_av_attr table{};
    table.type = FI_AV_UNSPEC;
    fid_av *addresses;
    library.check(::fi_av_open(domain, &table, &addresses, nullptr), "address vector");
    addresses_.reset(addresses);
    fi_cq_attr queue{};
    queue.format = FI_CQ_FORMAT_MSG;
    fid_cq *completions;
    library.check(::fi_cq_open(domain, &queue, &completions, nullptr), "completion queue");
    completions_.reset(completions);
    fid_ep *messages;
    library.check(::fi_endpoint(domain, info_.get(), &messages, nullptr), "endpoint");
    messages_.reset(messages);
    library.check(::fi_ep_bind(messages, &addresses->fid, 0), "endpoint");
    library.check(::fi_ep_bind(messages, &completions->fid, FI_TRANSMIT | FI_RECV), "endpoint");
    library.check(::fi_enable(messages), "endpoint");
  }

  const fi_info &info() const { return *info_; }
  const char *provider() const { return info_->fabric_attr->prov_name; }
  explicit operator bool() const { return static_cast<bool>(messages_); }
  fid_domain *domain() const { return domain_.get(); }
  fid_cq *completions() const { return completions_.get(); }
  fid_ep *messages() const { return messages_.get(); }

  // Address as text, for find() on other nodes.
  std::string name() const {
    char name[256];
    size_t bytes = sizeof name;
    Library::get().check(::fi_getname(&messages_->fid, name, &bytes), "name of the endpoint");
    std::string text;
    for (size_t i = 0; i < bytes; ++i) text += format("%02x", static_cast<unsigned char>(name[i]));
    return text;
  }

  // FI_ADDR_UNSPEC if the provider does not understand the name.
  fi_addr_t find(const std::string &name) const {
    std::string bytes;
    for (size_t i = 0; i + 1 < name.size(); i += 2)
      bytes += static_cast<char>(std::stoi(name.substr(i, 2), nullptr, 16));
    fi_addr_t address = FI_ADDR_UNSPEC;
    const int found = ::fi_av_insert(addresses_.get(), bytes.data(), 1, &address, 0, nullptr);
    return found == 1 ? address : FI_ADDR_UNSPEC;
  }

  // Close the endpoint; afterwards it does not access this process's memory.
  void stop() { messages_.reset(); }

  void close() {
    stop();
    completions_.reset();
    addresses_.reset();
    domain_.reset();
    fabric_.reset();
  }

  // Abandon everything without notifying the other side, in a forked child.
  void abandon() {
    (void)(messages_.release(), completions_.release(), addresses_.release());
    (void)(domain_.release(), fabric_.release());
  }

 private:
  Info info_;
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_av> addresses_;
  Owned<fid_cq> completions_;
  Owned<fid_ep> messages_;
};

}  // namespace nlc::ofi
