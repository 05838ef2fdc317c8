// Makes two connections to every other node, one for data and one for control.
//
// Each node connects one of the two and accepts the other (the lower index connects data), so that
// both sides of a pair notice when the other's process is gone: its port refuses the connection.
// Both prove that they hold the group's key, which never crosses the network: each side sends a
// random challenge, and answers with an HMAC of both. Connections without a proof are dropped.
//
//   connecting side                    accepting side
//   hello with challenge          ->
//                                 <-   hello with challenge, proof of "A"
//   proof of "C"                  ->
//
// All messages have a fixed size. A stranger's bytes therefore cause no allocation.
#pragma once

#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <list>
#include <string>
#include <vector>

#include "hmac.h"
#include "tcp_socket.h"
#include "transport.h"

namespace nlc::tcp {

enum Kind : uint16_t { kData = 0, kControl = 1 };

struct Hello {
  uint32_t magic = 0x4e4c4354;
  uint16_t version = 2;
  uint16_t kind = 0;
  int32_t node = -1;
  int32_t nodes = 0;
  std::array<uint8_t, 16> challenge{};
};
static_assert(sizeof(Hello) == 32);

struct Answer {
  Hello hello{};
  Key proof{};
};
static_assert(sizeof(Answer) == 64);

// Return the proof of one side ('C' connects, 'A' accepts) that it holds `key`.
inline Key prove(const Key &key, char side, const Hello &connecting, const Hello &accepting) {
  std::string text(1, side);
  text.append(reinterpret_cast<const char *>(&connecting), sizeof connecting);
  text.append(reinterpret_cast<const char *>(&accepting), sizeof accepting);
  return hmac_sha256(text_of(key), text);
}

class Mesh {
 public:
  struct Connection {
    int node;
    Kind kind;
    Socket fd;
  };

  Mesh(int listener, const Interface &from, const std::vector<std::string> &addresses, int my_node,
       const Key &key)
      : listener_(listener),
        from_(from),
        addresses_(addresses),
        me_(my_node),
        key_(key),
        answered_(addresses.size(), false) {
    answered_[at(me_)] = true;
    for (int node = 0; node < nodes(); ++node)
      if (node != me_) calls_.push_back({node, node > me_ ? kData : kControl, addresses[at(node)]});
  }

  bool complete() const {
    return calls_.empty() && std::count(answered_.begin(), answered_.end(), false) == 0;
  }

  // Wait up to timeout_ms for progress; return the connections that are complete. Throws
  // LinkFailure for a node whose process is gone.
  std::vector<Connection> step(int timeout_ms) {
    const Clock::time_point start = Clock::now();
    Clock::time_point until = start + std::chrono::milliseconds(timeout_ms);
    for (Call &call : calls_) {
      if (!call.fd && call.next <= start) dial(call);
      if (!call.fd) until = std::min(until, call.next);
    }
    std::vector<pollfd> waits{{listener_, POLLIN, 0}};
    for (const Call &call : calls_)
      waits.push_back({call.fd.get(), static_cast<short>(call.greeted ? POLLIN : POLLOUT), 0});
    for (const Guest &guest : guests_) waits.push_back({guest.fd.get(), POLLIN, 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (::poll(waits.data(), waits.size(), static_cast<int>(std::max<int64_t>(left, 0))) <= 0)
      return {};

    std::vector<Connection> made;
    size_t i = 1;
    for (auto call = calls_.begin(); call != calls_.end();) {
      const bool done = waits[i++].revents && advance(*call);
      if (done) made.push_back({call->node, call->kind, std::move(call->fd)});
      call = done ? calls_.erase(call) : std::next(call);
    }
    for (auto guest = guests_.begin(); guest != guests_.end();) {
      const bool done = waits[i++].revents && listen_to(*guest);
      if (done && guest->fd)
        made.push_back(
            {guest->hello.node, static_cast<Kind>(guest->hello.kind), std::move(guest->fd)});
      guest = done ? guests_.erase(guest) : std::next(guest);
    }
    if (waits[0].revents) accept_guests();
    return made;
  }

  // Missing nodes with their state, for an error: "node 3 (10.0.0.4:4711: no answer)".
  std::string missing() const {
    std::string text;
    for (int node = 0; node < nodes(); ++node) {
      std::string why = answered_[at(node)] ? "" : "its connection has not arrived here";
      for (const Call &call : calls_)
        if (call.node == node) why = call.trouble;
      if (why.empty()) continue;
      text += format("%snode %d (%s: %s)", text.empty() ? "" : ", ", node,
                     addresses_[at(node)].c_str(), why.c_str());
    }
    return text;
  }

 private:
  struct Call {
    int node;
    Kind kind;
    std::string address;
    Socket fd{};
    bool greeted = false;  // this side's hello is sent
    Hello mine{};
    Answer reply{};
    size_t got = 0;
    Clock::time_point next{};  // time of the next attempt
    Clock::time_point refused_since{};
    std::chrono::milliseconds pause{10};
    std::string trouble = "no answer";
  };
  struct Guest {
    Socket fd;
    Hello hello{};
    Hello mine{};
    Key proof{};
    size_t got = 0;  // bytes of the hello and the proof
  };

  static size_t at(int node) { return static_cast<size_t>(node); }
  int nodes() const { return static_cast<int>(addresses_.size()); }

  Hello hello(Kind kind) const {
    Hello mine;
    mine.kind = kind;
    mine.node = me_;
    mine.nodes = nodes();
    if (::getrandom(mine.challenge.data(), mine.challenge.size(), 0) !=
        static_cast<ssize_t>(mine.challenge.size()))
      throw system_failure("cannot get random bytes (getrandom)");
    return mine;
  }

  bool is_plausible(const Hello &theirs) const {
    const Hello expected;
    return theirs.magic == expected.magic && theirs.version == expected.version &&
           theirs.nodes == nodes() && theirs.kind <= kControl && theirs.node >= 0 &&
           theirs.node < nodes();
  }

  void dial(Call &call) {
    Address to = parse_address(call.address);
    call.fd = open_socket(to.family());
    call.greeted = false;
    call.got = 0;
    if (from_.address.family() == to.family() && !(from_.flags & IFF_LOOPBACK)) {
      // Bind to the chosen interface; the port is assigned on connect.
      set_option(call.fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
      (void)!::bind(call.fd.get(), from_.address.raw(), from_.address.bytes());
    }
    if (::connect(call.fd.get(), to.raw(), to.bytes()) != 0 && errno != EINPROGRESS)
      hang_up(call, errno, std::strerror(errno));
  }

  // The attempt failed: try again soon. A port that refuses for a second has lost its process,
  // which had opened it before it published its address.
  void hang_up(Call &call, int error, const std::string &trouble) {
    const Clock::time_point now = Clock::now();
    call.fd = Socket();
    call.trouble = trouble;
    call.next = now + call.pause;
    call.pause = std::min(call.pause * 2, std::chrono::milliseconds(250));
    if (error != ECONNREFUSED)
      call.refused_since = {};
    else if (call.refused_since == Clock::time_point{})
      call.refused_since = now;
    else if (now - call.refused_since > std::chrono::seconds(1))
      throw LinkFailure(call.node, format("node %d is gone: nothing listens at %s any more",
                                          call.node, call.address.c_str()));
  }

  // Return true when the other side has answered.
  bool advance(Call &call) {
    if (!call.greeted) {
      int error = 0;
      socklen_t bytes = sizeof error;
      ::getsockopt(call.fd.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
      call.mine = hello(call.kind);
      if (error == 0 &&
          ::send(call.fd.get(), &call.mine, sizeof call.mine, MSG_NOSIGNAL) != sizeof call.mine)
        error = errno;
      if (error != 0) {
        hang_up(call, error, std::strerror(error));
      } else {
        call.greeted = true;
        call.trouble = "it accepted the connection, but has not answered";
      }
      return false;
    }
    const ssize_t n = ::recv(call.fd.get(), reinterpret_cast<char *>(&call.reply) + call.got,
                             sizeof call.reply - call.got, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) {
      hang_up(call, 0, "it closed the connection without an answer");
      return false;
    }
    call.got += static_cast<size_t>(n);
    if (call.got < sizeof call.reply) return false;
    const Hello &theirs = call.reply.hello;
    if (!is_plausible(theirs) || theirs.node != call.node || theirs.kind != call.kind) {
      hang_up(call, 0, "another program answers there");
      return false;
    }
    if (!equal(call.reply.proof, prove(key_, 'A', call.mine, theirs))) {
      hang_up(call, 0, "it does not hold this group's key");
      return false;
    }
    const Key proof = prove(key_, 'C', call.mine, theirs);
    if (::send(call.fd.get(), proof.data(), proof.size(), MSG_NOSIGNAL) ==
        static_cast<ssize_t>(proof.size()))
      return true;
    hang_up(call, 0, "it closed the connection before the proof");
    return false;
  }

  void accept_guests() {
    for (;;) {
      Socket fd(::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd && (errno == EMFILE || errno == ENFILE))
        throw system_failure("cannot accept the other nodes' connections (see ulimit -n)");
      if (!fd) return;
      if (guests_.size() >= 1024) guests_.pop_front();  // drop connections that never said hello
      guests_.push_back({std::move(fd)});
    }
  }

  // Return true if this connection is done: it became a member, or was dropped.
  bool listen_to(Guest &guest) {
    constexpr size_t kHello = sizeof guest.hello, kAll = kHello + sizeof guest.proof;
    const bool greeting = guest.got < kHello;
    char *to = greeting ? reinterpret_cast<char *>(&guest.hello) + guest.got
                        : reinterpret_cast<char *>(&guest.proof) + (guest.got - kHello);
    const ssize_t n = ::recv(guest.fd.get(), to, (greeting ? kHello : kAll) - guest.got, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n > 0) {
      guest.got += static_cast<size_t>(n);
      if (guest.got < kHello || (!greeting && guest.got < kAll)) return false;
      if (greeting && may_enter(guest.hello) && answer(guest)) return false;
      const int node = guest.hello.node;
      if (!greeting && may_enter(guest.hello) &&
          equal(guest.proof, prove(key_, 'C', guest.hello, guest.mine))) {
        answered_[at(node)] = true;
        return true;
      }
    }
    guest.fd = Socket();
    return true;
  }

  // Return true if a connection of this kind of that node is still missing.
  bool may_enter(const Hello &theirs) const {
    return is_plausible(theirs) && theirs.node != me_ && !answered_[at(theirs.node)] &&
           theirs.kind == (theirs.node < me_ ? kData : kControl);
  }

  // Send this side's challenge and proof; return false if the connection is broken.
  bool answer(Guest &guest) {
    guest.mine = hello(static_cast<Kind>(guest.hello.kind));
    const Answer mine{guest.mine, prove(key_, 'A', guest.hello, guest.mine)};
    return ::send(guest.fd.get(), &mine, sizeof mine, MSG_NOSIGNAL) == sizeof mine;
  }

  int listener_;
  Interface from_;
  std::vector<std::string> addresses_;
  int me_;
  Key key_;
  std::vector<bool> answered_;  // nodes whose outgoing connection is complete
  std::list<Call> calls_;
  std::list<Guest> guests_;
};

}  // namespace nlc::tcp
