// The control channel of every transport: one idle TCP connection per pair of nodes.
//
// It does the rendezvous of the nodes (tcp_mesh.h), carries the reason for which a node gives up,
// and detects the death of a node independent of the data transport: a process that ends closes it,
// and a machine or network that vanishes stops answering keepalives. A node that leaves in order
// announces it first, and is then an error only for nodes that still wait for it.
#pragma once

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#include <string>
#include <thread>
#include <vector>

#include "tcp_mesh.h"

namespace nlc::tcp {

class Control {
 public:
  static constexpr size_t kMaxText = 300;

  Control()
      : interface_(choose_interface()),
        epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        listener_(listen_on(interface_)) {
    if (!epoll_) throw system_failure("cannot create an epoll descriptor");
  }

  const std::string &address() const { return listener_.address; }
  const Interface &interface() const { return interface_; }
  bool connected() const { return connected_; }
  int nodes() const { return static_cast<int>(peers_.size()); }
  int my_node() const { return me_; }

  // Return the data connections, by node.
  std::vector<Socket> connect(const std::vector<std::string> &addresses, int my_node,
                              const Key &key, int64_t timeout_ms) {
    const Clock::time_point deadline = after_ms(timeout_ms);
    me_ = my_node;
    peers_.resize(addresses.size());
    for (size_t node = 0; node < addresses.size(); ++node) peers_[node].address = addresses[node];
    std::vector<Socket> data(addresses.size());
    Mesh mesh(listener_.fd.get(), interface_, addresses, my_node, key);
    while (!mesh.complete()) {
      for (Mesh::Connection &made : mesh.step(50)) {
        set_liveness(made.fd.get());
        if (made.kind == kControl)
          adopt(made.node, std::move(made.fd));
        else
          data[static_cast<size_t>(made.node)] = std::move(made.fd);
      }
      wait(0, [](int, uint32_t) {});
      // Without a control connection, only its data connection tells that a node has died.
      for (int node = 0; node < nodes(); ++node)
        if (!peer(node).fd && has_ended(data[static_cast<size_t>(node)])) data_ended(node, "");
      try {
        check([](int) { return false; });
      } catch (const LinkFailure &failure) {
        if (peer(failure.node).gave_up) throw;
        throw LinkFailure(failure.node, failure.what() + (" while waiting for " + mesh.missing()));
      }
      if (!mesh.complete() && Clock::now() >= deadline)
        throw std::runtime_error(
            format("no connection to %s after %.3g s. Check that these processes are running, that "
                   "NEARLINEAR_COLLECTIVES_INTERFACE (here %s) names the network between the "
                   "nodes, and that no firewall blocks it",
                   mesh.missing().c_str(), static_cast<double>(timeout_ms) / 1000,
                   interface_.name.c_str()));
    }
    listener_.fd = Socket();
    connected_ = true;
    return data;
  }

  // --- waiting: one epoll set for control, data and the caller's eventfd -------------------------

  void watch_data(int node, int fd) { watch(fd, event_of(node, kData)); }

  void wake_on(int eventfd) {
    if (wake_ >= 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, wake_, nullptr);
    wake_ = eventfd;
    if (wake_ < 0) return;
    ::fcntl(wake_, F_SETFL, ::fcntl(wake_, F_GETFL) | O_NONBLOCK);  // drained without polling first
    epoll_event event{EPOLLIN, {}};
    event.data.u64 = kWake;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_, &event) != 0)
      throw system_failure("cannot wait for the eventfd");
  }

  // Wait up to timeout_us for events and process those of control connections; on_data(node,
  // events) gets those of data connections. Returns true if the eventfd was written.
  template <class OnData>
  bool wait(int64_t timeout_us, OnData on_data) {
    epoll_event events[64];
    bool woken = false;
    int n;
    do {  // a full batch may be followed by more
      n = collect(events, timeout_us);
      for (int i = 0; i < n; ++i) {
        const uint64_t tag = events[i].data.u64;
        if (tag == kWake) {
          uint64_t count;
          (void)!::read(wake_, &count, sizeof count);
          woken = true;
        } else if ((tag & 1) == kControl) {
          if (events[i].events & EPOLLOUT) flush(peer(static_cast<int>(tag >> 1)));
          take_in(peer(static_cast<int>(tag >> 1)));
        } else {
          on_data(static_cast<int>(tag >> 1), events[i].events);
        }
      }
      timeout_us = 0;
    } while (n == 64);
    return woken;
  }

  // --- ends ------------------------------------------------------------------------------------

  // Record that no more data can move between this node and that one, and that the received bytes
  // were read. `why` is empty if the other side just closed.
  void data_ended(int node, const std::string &why) {
    Peer &lost = peer(node);
    if (lost.data_ended) return;
    lost.data_ended = true;
    note(lost, why);
  }

  bool has_left(int node) const { return peers_[static_cast<size_t>(node)].left; }
  bool others_stay() const {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const Peer &one) { return one.fd && !one.left && !one.closed; });
  }

  // Record that bytes of a node arrived, which postpones giving up on a vanished node.
  void heard_from(int node) {
    if (troubled_ && peer(node).since != Clock::time_point{}) peer(node).since = Clock::now();
  }

  // Throw LinkFailure if a node gave up, or if all its data has arrived and needed(node) says that
  // requests still wait for it. A node that vanished without a message is always reported, but
  // after a delay: its last messages may let this node's last collective complete.
  template <class Needed>
  void check(Needed needed) {
    if (!troubled_) return;
    const Clock::time_point now = Clock::now();
    const int64_t grace_ms = connected_ ? kGraceMs : kStartGraceMs;
    const Peer *first = nullptr;
    for (const Peer &one : peers_) {
      if (one.since == Clock::time_point{}) continue;
      const bool missed = one.data_ended && (one.left || one.closed) && needed(index_of(one));
      const bool late = now - one.since >= std::chrono::milliseconds(grace_ms);
      if (!one.gave_up && !missed && (one.left || !late)) continue;
      // Prefer failures with a reason, and earlier ones to their consequences.
      if (!first || std::pair(!one.gave_up, one.since) < std::pair(!first->gave_up, first->since))
        first = &one;
    }
    if (!first) return;
    if (first->gave_up) throw LinkFailure(index_of(*first), first->text);
    const int node = index_of(*first);
    const std::string who = format("node %d (%s)", node, first->address.c_str());
    throw LinkFailure(node, first->why.empty() ? "connection closed by " + who
                                               : "connection with " + who + " lost: " + first->why);
  }

  // Empty for errors that only mean that the other side closed.
  static std::string error_text(int error) {
    return error == 0 || error == ECONNRESET || error == EPIPE ? "" : std::strerror(error);
  }

  // Longest wait before check() must be called again.
  int64_t poll_timeout_us(int64_t timeout_us) const {
    return troubled_ ? std::min<int64_t>(timeout_us, kGraceMs * 100) : timeout_us;
  }

  void give_up(const std::string &reason) {
    if (gave_up_) return;
    gave_up_ = true;
    for (Peer &one : peers_) say(one, kGiveUp, reason.substr(0, kMaxText));
  }

  // Exchange of awaited nodes before a timeout, so that all nodes blame the stuck one instead of
  // nodes that wait for it.
  void tell_awaited(int node) {
    for (Peer &one : peers_) say(one, kAwait, std::to_string(node));
  }
  int stuck_behind(int node) const {
    for (size_t steps = 0; steps < peers_.size(); ++steps) {
      const int next = peers_[static_cast<size_t>(node)].awaits;
      if (next < 0 || next == node || next == me_ || next >= nodes()) break;
      node = next;
    }
    return node;
  }

  // Flush bytes for at most half a second; with in_order, announce the departure first. A forked
  // child has the same sockets and must not close the parent's.
  void leave(bool in_order, const std::vector<int> &data) {
    if (::getpid() != pid_) return;
    std::vector<int> open = gave_up_ ? std::vector<int>() : data;
    const Clock::time_point deadline = after_ms(500);
    for (Peer &one : peers_) {
      if (in_order && !gave_up_) say(one, kLeave, "");
      if (one.fd && !one.closed) open.push_back(one.fd.get());
    }
    for (bool shut = false; !open.empty() && Clock::now() < deadline;) {
      bool queued = false;
      for (Peer &one : peers_) queued |= !flush(one);
      if (!queued && !shut) {
        for (const int fd : open) ::shutdown(fd, SHUT_WR);
        shut = true;
      }
      std::erase_if(open, [](int fd) {
        int left = 0;
        return ::ioctl(fd, SIOCOUTQ, &left) != 0 || left == 0;
      });
      if (!open.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  enum Word : uint8_t { kGiveUp = 1, kLeave = 2, kAwait = 3 };
  struct Frame {
    uint8_t word;
    uint8_t unused = 0;
    uint16_t bytes;
  };
  struct Peer {
    std::string address;
    Socket fd{};
    std::string in{}, out{};
    std::string text{};  // reason for giving up
    int awaits = -1;     // node that it reported to wait for
    bool gave_up = false, left = false, closed = false, data_ended = false;
    std::string why{};          // error of a broken connection; empty if it was closed
    Clock::time_point since{};  // time of the first sign of its end
  };

  static constexpr uint64_t kWake = ~uint64_t{0};
  static constexpr int64_t kGraceMs = 500;
  // A node that finds another one dead closes its connections, too. By then, the refused port of
  // the dead one must be noticed (Call), which takes a second.
  static constexpr int64_t kStartGraceMs = 1500;

  static uint64_t event_of(int node, Kind kind) { return static_cast<uint64_t>(node) << 1 | kind; }
  Peer &peer(int node) { return peers_[static_cast<size_t>(node)]; }
  int index_of(const Peer &one) const { return static_cast<int>(&one - peers_.data()); }

  // Edge-triggered: unread bytes without a posted receive must not keep poll() from sleeping.
  void watch(int fd, uint64_t tag) {
    epoll_event event{EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, {}};
    event.data.u64 = tag;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      throw system_failure("cannot wait for a connection");
  }

  static bool has_ended(const Socket &one) {
    char byte;
    if (!one) return false;
    const ssize_t n = ::recv(one.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
  }

  void adopt(int node, Socket fd) {
    set_option(fd.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, 10'000);
    watch(fd.get(), event_of(node, kControl));
    peer(node).fd = std::move(fd);
  }

  int collect(epoll_event *events, int64_t timeout_us) {
    int n = -1;
#ifdef SYS_epoll_pwait2
    if (fine_waits_ && timeout_us > 0) {
      const timespec limit{timeout_us / 1'000'000, timeout_us % 1'000'000 * 1000};
      n = static_cast<int>(
          ::syscall(SYS_epoll_pwait2, epoll_.get(), events, 64, &limit, nullptr, 0));
      if (n >= 0 || errno == EINTR) return n;
      fine_waits_ = false;  // before Linux 5.11, or forbidden
    }
#endif
    return ::epoll_wait(epoll_.get(), events, 64, static_cast<int>((timeout_us + 999) / 1000));
  }

  void note(Peer &one, const std::string &why) {
    if (one.why.empty() && !one.closed) one.why = why;
    if (one.since == Clock::time_point{}) one.since = Clock::now();
    troubled_ = true;
  }

  void take_in(Peer &from) {
    char bytes[1024];
    while (!from.closed) {
      const ssize_t n = ::recv(from.fd.get(), bytes, sizeof bytes, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return;
      if (n > 0) {
        from.in.append(bytes, static_cast<size_t>(n));
        read_words(from);
        continue;
      }
      // This end knows more than that of the data connection.
      from.why = n < 0 ? error_text(errno) : "";
      from.closed = true;
      note(from, "");
    }
  }

  void read_words(Peer &from) {
    Frame frame;
    while (from.in.size() >= sizeof frame) {
      std::memcpy(&frame, from.in.data(), sizeof frame);
      if (from.in.size() < sizeof frame + frame.bytes) return;
      const std::string text = from.in.substr(sizeof frame, frame.bytes);
      from.in.erase(0, sizeof frame + frame.bytes);
      if (frame.word == kAwait) {
        from.awaits = std::atoi(text.c_str());
        continue;
      }
      if (frame.word == kLeave) from.left = true;
      if (frame.word == kGiveUp && !from.gave_up) {
        from.gave_up = true;
        from.text = text;
      }
      note(from, "");
    }
  }

  void say(Peer &to, Word word, const std::string &text) {
    if (!to.fd || to.closed) return;
    const Frame frame{word, 0, static_cast<uint16_t>(text.size())};
    to.out.append(reinterpret_cast<const char *>(&frame), sizeof frame);
    to.out += text;
    flush(to);
  }

  // Return true if nothing is left to send.
  bool flush(Peer &to) {
    while (!to.out.empty() && !to.closed) {
      const ssize_t n = ::send(to.fd.get(), to.out.data(), to.out.size(), MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno != EAGAIN;
      to.out.erase(0, static_cast<size_t>(n));
    }
    return true;
  }

  Interface interface_;
  Fd epoll_;
  Listener listener_;
  std::vector<Peer> peers_;
  int me_ = -1;
  int wake_ = -1;
  int pid_ = ::getpid();
  bool connected_ = false;
  bool troubled_ = false;
  bool gave_up_ = false;
  bool fine_waits_ = true;
};

// Return the busy link that was inactive for longest, by node, or -1.
template <class Links>
int quietest(const Links &links) {
  int found = -1;
  for (size_t node = 0; node < links.size(); ++node) {
    if (links[node].idle()) continue;
    if (found < 0 || links[node].active < links[static_cast<size_t>(found)].active)
      found = static_cast<int>(node);
  }
  return found;
}

}  // namespace nlc::tcp
