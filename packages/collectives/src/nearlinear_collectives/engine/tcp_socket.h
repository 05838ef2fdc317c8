// Sockets of both transports: addresses as text, choice of an interface, options.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base.h"

namespace nlc::tcp {

// A socket that is closed in a forked child. A data loader's worker with a copy would keep the
// connection open when its parent is killed, and hide that death from the other nodes.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {
    if (fd_) Open::add(fd);
  }
  Socket(Socket &&) noexcept = default;
  Socket &operator=(Socket &&) noexcept = default;
  ~Socket() {
    if (fd_) Open::remove(fd_.get());
  }
  int get() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }

 private:
  struct Open {
    static void add(int fd) {
      static const int registered =
          ::pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); }, drop_all);
      (void)registered;
      const std::lock_guard<std::mutex> lock(mutex());
      fds().insert(fd);
    }
    static void remove(int fd) {
      const std::lock_guard<std::mutex> lock(mutex());
      fds().erase(fd);
    }
    // In the child. The descriptor numbers stay taken until their owner closes them.
    static void drop_all() {
      const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
      for (const int fd : fds()) ::dup3(nothing, fd, O_CLOEXEC);
      ::close(nothing);
      mutex().unlock();
    }
    static std::mutex &mutex() {
      static auto *const one = new std::mutex();
      return *one;
    }
    static std::set<int> &fds() {
      static auto *const all = new std::set<int>();
      return *all;
    }
  };

  Fd fd_;
};

struct Address {
  sockaddr_storage storage{};

  int family() const { return storage.ss_family; }
  sockaddr *raw() { return reinterpret_cast<sockaddr *>(&storage); }
  const sockaddr *raw() const { return reinterpret_cast<const sockaddr *>(&storage); }
  socklen_t bytes() const {
    return family() == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  }
  const void *host_bytes() const {
    if (family() == AF_INET6) return &reinterpret_cast<const sockaddr_in6 *>(&storage)->sin6_addr;
    return &reinterpret_cast<const sockaddr_in *>(&storage)->sin_addr;
  }
  in_port_t &port() {  // in network byte order
    if (family() == AF_INET6) return reinterpret_cast<sockaddr_in6 *>(&storage)->sin6_port;
    return reinterpret_cast<sockaddr_in *>(&storage)->sin_port;
  }
  bool same_host(const Address &other) const {
    return family() == other.family() &&
           std::memcmp(host_bytes(), other.host_bytes(), family() == AF_INET6 ? 16 : 4) == 0;
  }
};

inline std::string host_text(const Address &address) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(address.family(), address.host_bytes(), text, sizeof text);
  return text;
}

// "10.0.0.3:4711" or "[fd00::3]:4711".
inline std::string address_text(Address address) {
  const std::string host = host_text(address);
  const int port = ntohs(address.port());
  return format(address.family() == AF_INET6 ? "[%s]:%d" : "%s:%d", host.c_str(), port);
}

inline Address parse_address(const std::string &text) {
  const size_t colon = text.rfind(':');
  std::string host = text.substr(0, colon);
  const bool v6 = host.size() > 1 && host.front() == '[' && host.back() == ']';
  if (v6) host = host.substr(1, host.size() - 2);
  Address address;
  address.storage.ss_family = v6 ? AF_INET6 : AF_INET;
  const std::string digits = colon == std::string::npos ? "" : text.substr(colon + 1);
  char *end = nullptr;
  const long port = std::strtol(digits.c_str(), &end, 10);
  if (digits.empty() || *end != '\0' || port < 0 || port > 65535 ||
      inet_pton(address.family(), host.c_str(), const_cast<void *>(address.host_bytes())) != 1)
    throw Failure(NLC_BAD_ARGUMENT, "'" + text + "' is not a TCP address");
  address.port() = htons(static_cast<uint16_t>(port));
  return address;
}

// --- where peers reach this machine ------------------------------------------------------------

struct Interface {
  std::string name;
  Address address;  // port 0
  unsigned flags = 0;
};

// Addresses of interfaces that are up, IPv4 first. Link-local IPv6 addresses are excluded: they
// have no meaning to another machine without the name of its interface.
inline std::vector<Interface> interfaces() {
  std::vector<Interface> found;
  ifaddrs *list = nullptr;
  if (getifaddrs(&list) != 0) return found;
  for (const ifaddrs *entry = list; entry; entry = entry->ifa_next) {
    const int family = entry->ifa_addr ? entry->ifa_addr->sa_family : AF_UNSPEC;
    if ((family != AF_INET && family != AF_INET6) || !(entry->ifa_flags & IFF_UP)) continue;
    Interface one{entry->ifa_name, {}, entry->ifa_flags};
    std::memcpy(&one.address.storage, entry->ifa_addr,
                family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
    one.address.port() = 0;
    if (family == AF_INET6 &&
        IN6_IS_ADDR_LINKLOCAL(static_cast<const in6_addr *>(one.address.host_bytes())))
      continue;
    found.push_back(one);
  }
  freeifaddrs(list);
  std::stable_sort(found.begin(), found.end(), [](const Interface &a, const Interface &b) {
    return a.address.family() == AF_INET && b.address.family() != AF_INET;
  });
  return found;
}

// The address this machine would use for a packet to a distant one; nothing is sent.
inline std::optional<Address> routed_address() {
  for (const char *far : {"203.0.113.1:9", "[2001:db8::1]:9"}) {  // reserved for documentation
    const Address to = parse_address(far);
    const Fd probe(::socket(to.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
    Address from;
    socklen_t bytes = sizeof from.storage;
    if (probe && ::connect(probe.get(), to.raw(), to.bytes()) == 0 &&
        ::getsockname(probe.get(), from.raw(), &bytes) == 0) {
      from.port() = 0;
      return from;
    }
  }
  return std::nullopt;
}

// The requested interface (this package's variable, or gloo's), else that of the default route,
// else any non-loopback one, else loopback.
inline Interface choose_interface() {
  const std::vector<Interface> all = interfaces();
  const char *gloo = std::getenv("GLOO_SOCKET_IFNAME");
  const std::string ours = setting("INTERFACE");
  const std::string requested = !ours.empty() ? ours : gloo ? gloo : "";
  for (size_t at = 0; at < requested.size();) {  // gloo's variable may be a list
    const size_t end = std::min(requested.find(',', at), requested.size());
    for (const Interface &one : all)
      if (one.name == requested.substr(at, end - at)) return one;
    at = end + 1;
  }
  if (!requested.empty()) {
    std::string names;
    for (const Interface &one : all)
      if (names.find(one.name) == std::string::npos)
        names += (names.empty() ? "" : ", ") + one.name;
    throw Failure(NLC_BAD_ARGUMENT,
                  format("%s: no interface '%s' with an address is up here; there are: %s",
                         ours.empty() ? "GLOO_SOCKET_IFNAME" : "NEARLINEAR_COLLECTIVES_INTERFACE",
                         requested.c_str(), names.empty() ? "none" : names.c_str()));
  }
  if (const std::optional<Address> routed = routed_address())
    for (const Interface &one : all)
      if (one.address.same_host(*routed)) return one;
  for (const Interface &one : all)
    if ((one.flags & IFF_RUNNING) && !(one.flags & IFF_LOOPBACK)) return one;
  for (const Interface &one : all)
    if (one.flags & IFF_LOOPBACK) return one;
  return {"lo", parse_address("127.0.0.1:0"), IFF_LOOPBACK};
}

// --- options -----------------------------------------------------------------------------------

inline void set_option(int fd, int level, int option, int value) {
  ::setsockopt(fd, level, option, &value, sizeof value);  // best effort: no option is vital
}

// The largest segment of a connection, or 0 if it is unknown.
inline int segment_bytes(int fd) {
  int bytes = 0;
  socklen_t size = sizeof bytes;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &bytes, &size) == 0 ? bytes : 0;
}

inline Socket open_socket(int family) {
  Socket fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw system_failure("cannot create a socket");
  return fd;
}

struct Listener {
  Socket fd{};
  std::string address{};  // with the port
};

inline Listener listen_on(const Interface &interface) {
  Address bound = interface.address;
  Listener made{open_socket(bound.family())};
  socklen_t bytes = sizeof bound.storage;
  if (::bind(made.fd.get(), bound.raw(), bound.bytes()) != 0 ||
      ::listen(made.fd.get(), SOMAXCONN) != 0 ||
      ::getsockname(made.fd.get(), bound.raw(), &bytes) != 0)
    throw system_failure("cannot listen on " + host_text(interface.address) + " of " +
                         interface.name);
  made.address = address_text(bound);
  return made;
}

// Detect a dead network within 3 + 3 * 2 seconds, also while nothing is being sent.
inline void set_liveness(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 3);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

}  // namespace nlc::tcp
