// libfabric, loaded when it is asked for: a machine without it loses nothing but this transport.
//
// Its headers call everything through tables of function pointers that the library fills in; only
// the functions named here are looked up.
#pragma once

#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_tagged.h>

#include <memory>
#include <string>
#include <vector>

#include "base.h"

namespace nlc::ofi {

// The oldest interface that has what is needed; newer libraries keep it.
constexpr uint32_t kVersion = FI_VERSION(1, 14);

struct Library {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;
  decltype(&::fi_version) version;

  // Loaded once and kept: providers do not like to be unloaded.
  static const Library &get() {
    static const Library library;
    return library;
  }

  std::string error(int64_t code) const {
    return strerror(static_cast<int>(code < 0 ? -code : code));
  }
  void check(int64_t code, const char *what) const {
    if (code < 0) throw Failure(NLC_SYSTEM, format("libfabric: %s: %s", what, error(code).c_str()));
  }

 private:
  Library() {
    const std::string wish = setting("LIBFABRIC");
    void *handle = nullptr;
    std::string tried;
    std::vector<std::string> places{wish};
    if (wish.empty())
      places = {"libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1",
                "/opt/amazon/efa/lib/libfabric.so.1"};
    for (const std::string &path : places) {
      if ((handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))) break;
      const char *why = ::dlerror();
      tried += (tried.empty() ? "" : "; ") + std::string(why ? why : path.c_str());
    }
    if (!handle)
      throw Failure(NLC_SYSTEM,
                    "libfabric cannot be loaded (" + tried + "): install it (Debian: libfabric1, "
                    "AWS: the EFA installer) or set NEARLINEAR_COLLECTIVES_LIBFABRIC to its path");
    find(handle, "fi_getinfo", &getinfo);
    find(handle, "fi_freeinfo", &freeinfo);
    find(handle, "fi_dupinfo", &dupinfo);
    find(handle, "fi_fabric", &fabric);
    find(handle, "fi_strerror", &strerror);
    find(handle, "fi_version", &version);
    if (FI_VERSION_LT(version(), kVersion))
      throw Failure(NLC_SYSTEM, format("libfabric %u.%u is too old: 1.14 or newer is needed",
                                       FI_MAJOR(version()), FI_MINOR(version())));
  }

  template <class Function>
  static void find(void *handle, const char *name, Function *function) {
    *function = reinterpret_cast<Function>(::dlsym(handle, name));
    if (!*function) throw Failure(NLC_SYSTEM, std::string("this libfabric has no ") + name);
  }
};

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

// Reliable, tagged messages between any two endpoints, by one provider; nullptr if it has none.
// Sockets of a provider that uses IP go to `host`.
inline Info find_provider(const std::string &provider, const std::string &host) {
  const Library &library = Library::get();
  // Providers that can look after their registrations themselves are left to it: they hear of
  // memory that is given back, which a user of theirs does not.
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

}  // namespace nlc::ofi
