// libfabric, loaded on demand: a machine without it lacks only this transport.
//
// Its headers call everything through tables of function pointers that the library fills in; only
// the functions named here are looked up.
#pragma once

#include <dlfcn.h>
#include <rdma/fabric.h>

#include <string>
#include <vector>

#include "base.h"

namespace nlc::ofi {

// Oldest interface version with the required functions; newer libraries keep it.
constexpr uint32_t kVersion = FI_VERSION(1, 14);

struct Library {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;
  decltype(&::fi_version) version;

  // Loaded once and kept, because providers do not support unloading well.
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
    const std::string requested = setting("LIBFABRIC");
    void *handle = nullptr;
    std::string tried;
    std::vector<std::string> places{requested};
    if (requested.empty())
      places = {"libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1",
                "/opt/amazon/efa/lib/libfabric.so.1"};
    for (const std::string &path : places) {
      if ((handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))) break;
      const char *why = ::dlerror();
      tried += (tried.empty() ? "" : "; ") + std::string(why ? why : path.c_str());
    }
    if (!handle)
      throw Failure(
          NLC_SYSTEM,
          "libfabric cannot be loaded (" + tried +
              "): install it (Debian: libfabric1, "
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

}  // namespace nlc::ofi
