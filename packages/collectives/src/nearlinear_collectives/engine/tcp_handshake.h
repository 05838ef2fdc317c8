// A new connection between two members of a group, and the proof of both that they hold its key.
//
// The key never crosses the network: each side sends a random challenge, and answers with an HMAC
// of both. Connections without a proof are dropped.
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
#include <cstring>
#include <string>
#include <utility>

#include "hmac.h"
#include "tcp_socket.h"
#include "transport.h"

namespace nlc::tcp {

enum Kind : uint16_t { kData = 0, kControl = 1, kMail = 2 };

struct Hello {
  uint32_t magic = 0x4e4c4354;
  uint16_t version = 2;
  uint16_t kind = 0;
  int32_t member = -1;
  int32_t members = 0;
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

// This side of all handshakes of a group. Members are nodes (data, control) or ranks (mail).
struct Party {
  Interface from;
  int me, members;
  Key key;

  Hello hello(Kind kind) const {
    Hello mine;
    mine.kind = kind;
    mine.member = me;
    mine.members = members;
    if (::getrandom(mine.challenge.data(), mine.challenge.size(), 0) !=
        static_cast<ssize_t>(mine.challenge.size()))
      throw system_failure("cannot get random bytes (getrandom)");
    return mine;
  }

  bool is_plausible(const Hello &theirs) const {
    const Hello expected;
    return theirs.magic == expected.magic && theirs.version == expected.version &&
           theirs.members == members && theirs.member >= 0 && theirs.member < members &&
           theirs.member != me;
  }
};

// The connecting side. It tries again until the other one answers.
class Call {
 public:
  Call(int member, Kind kind, std::string address)
      : member(member), kind(kind), address_(std::move(address)) {}

  const int member;
  const Kind kind;
  Socket fd{};

  Clock::time_point next() const { return next_; }  // time of the next attempt, without a socket
  short events() const { return greeted_ ? POLLIN : POLLOUT; }
  const std::string &trouble() const { return trouble_; }
  bool greeted() const { return greeted_; }  // the other side's kernel has accepted

  void dial(const Party &party) {
    Address to = parse_address(address_);
    fd = open_socket(to.family());
    greeted_ = false;
    got_ = 0;
    const Interface &from = party.from;
    if (from.address.family() == to.family() && !(from.flags & IFF_LOOPBACK)) {
      // Bind to the chosen interface; the port is assigned on connect.
      set_option(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
      (void)!::bind(fd.get(), from.address.raw(), from.address.bytes());
    }
    if (::connect(fd.get(), to.raw(), to.bytes()) != 0 && errno != EINPROGRESS)
      hang_up(errno, std::strerror(errno));
  }

  // Continue after an event; return true when the other side has answered. Throws LinkFailure if
  // its process is gone.
  bool advance(const Party &party) {
    if (!greeted_) {
      greet(party);
      return false;
    }
    const ssize_t n = ::recv(fd.get(), reinterpret_cast<char *>(&reply_) + got_,
                             sizeof reply_ - got_, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) {
      hang_up(0, "it closed the connection without an answer");
      return false;
    }
    got_ += static_cast<size_t>(n);
    if (got_ < sizeof reply_) return false;
    const Hello &theirs = reply_.hello;
    if (!party.is_plausible(theirs) || theirs.member != member || theirs.kind != kind) {
      hang_up(0, "another program answers there");
      return false;
    }
    if (!equal(reply_.proof, prove(party.key, 'A', mine_, theirs))) {
      hang_up(0, "it does not hold this group's key");
      return false;
    }
    const Key proof = prove(party.key, 'C', mine_, theirs);
    if (::send(fd.get(), proof.data(), proof.size(), MSG_NOSIGNAL) ==
        static_cast<ssize_t>(proof.size()))
      return true;
    hang_up(0, "it closed the connection before the proof");
    return false;
  }

 private:
  void greet(const Party &party) {
    int error = 0;
    socklen_t bytes = sizeof error;
    ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    mine_ = party.hello(kind);
    if (error == 0 && ::send(fd.get(), &mine_, sizeof mine_, MSG_NOSIGNAL) != sizeof mine_)
      error = errno;
    if (error != 0) return hang_up(error, std::strerror(error));
    greeted_ = true;
    trouble_ = "it accepted the connection, but has not answered";
  }

  // The attempt failed: try again soon. A port that refuses for a second has lost its process,
  // which had opened it before it published its address.
  void hang_up(int error, const std::string &trouble) {
    const Clock::time_point now = Clock::now();
    fd = Socket();
    trouble_ = trouble;
    next_ = now + pause_;
    pause_ = std::min(pause_ * 2, std::chrono::milliseconds(250));
    if (error != ECONNREFUSED)
      refused_since_ = {};
    else if (refused_since_ == Clock::time_point{})
      refused_since_ = now;
    else if (now - refused_since_ > std::chrono::seconds(1))
      throw LinkFailure(member, format("its process is gone: nothing listens at %s any more",
                                       address_.c_str()));
  }

  std::string address_;
  bool greeted_ = false;  // this side's hello is sent
  Hello mine_{};
  Answer reply_{};
  size_t got_ = 0;
  Clock::time_point next_{};
  Clock::time_point refused_since_{};
  std::chrono::milliseconds pause_{10};
  std::string trouble_ = "no answer";
};

// The accepting side.
class Guest {
 public:
  explicit Guest(Socket socket) : fd(std::move(socket)) {}

  Socket fd;  // closed when the connection was dropped

  const Hello &hello() const { return hello_; }

  // Continue after an event; return true when the other side has proved that it is a member, or was
  // dropped. may_enter(hello) tells if a connection of this kind of that member is expected.
  template <class MayEnter>
  bool listen(const Party &party, MayEnter may_enter) {
    constexpr size_t kHello = sizeof hello_, kAll = kHello + sizeof proof_;
    const bool greeting = got_ < kHello;
    char *to = greeting ? reinterpret_cast<char *>(&hello_) + got_
                        : reinterpret_cast<char *>(&proof_) + (got_ - kHello);
    const ssize_t n = ::recv(fd.get(), to, (greeting ? kHello : kAll) - got_, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n > 0) {
      got_ += static_cast<size_t>(n);
      if (got_ < kHello || (!greeting && got_ < kAll)) return false;
      if (party.is_plausible(hello_) && may_enter(hello_)) {
        if (greeting && answer(party)) return false;
        if (!greeting && equal(proof_, prove(party.key, 'C', hello_, mine_))) return true;
      }
    }
    fd = Socket();
    return true;
  }

 private:
  // Send this side's challenge and proof; return false if the connection is broken.
  bool answer(const Party &party) {
    mine_ = party.hello(static_cast<Kind>(hello_.kind));
    const Answer mine{mine_, prove(party.key, 'A', hello_, mine_)};
    return ::send(fd.get(), &mine, sizeof mine, MSG_NOSIGNAL) == sizeof mine;
  }

  Hello hello_{};
  Hello mine_{};
  Key proof_{};
  size_t got_ = 0;  // bytes of the hello and the proof
};

// Accept all waiting connections. Above 1024 guests, the oldest ones are dropped: they never said
// hello.
template <class Guests>
void accept_guests(int listener, Guests &guests) {
  for (;;) {
    Socket fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd && (errno == EMFILE || errno == ENFILE))
      throw system_failure("cannot accept the connections of other ranks (see ulimit -n)");
    if (!fd) return;
    if (guests.size() >= 1024) guests.pop_front();
    guests.emplace_back(std::move(fd));
  }
}

}  // namespace nlc::tcp
