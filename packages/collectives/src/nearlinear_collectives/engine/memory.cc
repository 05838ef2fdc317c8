#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>

namespace nlc {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

Mapping::~Mapping() {
  if (base_) munmap(base_, bytes_);
}

Fd make_memory(const char *name, size_t bytes) {
  Fd fd(memfd_create(name, MFD_CLOEXEC));
  if (!fd) throw system_failure("cannot create shared memory (memfd_create)");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    throw system_failure(format("cannot size shared memory to %s", bytes_text(bytes).c_str()));
  return fd;
}

Mapping map_memory(int fd, size_t bytes, bool writable, size_t offset) {
  // Reserve slightly more than needed and keep the part that starts on a huge page.
  const size_t reserve = bytes + kHugePage;
  void *room =
      mmap(nullptr, reserve, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) throw system_failure("cannot reserve address space for shared memory");
  char *start = static_cast<char *>(room);
  char *base = start + (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  if (mmap(base, bytes, protection, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) ==
      MAP_FAILED) {
    const Failure failure =
        system_failure(format("cannot map %s of shared memory", bytes_text(bytes).c_str()));
    munmap(room, reserve);
    throw failure;
  }
  if (base > start) munmap(start, static_cast<size_t>(base - start));
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  char *end = base + (bytes + page - 1) / page * page;
  if (end < start + reserve) munmap(end, static_cast<size_t>(start + reserve - end));
  madvise(base, bytes, MADV_HUGEPAGE);  // best effort
  return Mapping(base, bytes);
}

Fd open_memory_of(int pid, int fd) {
  const std::string path = format("/proc/%d/fd/%d", pid, fd);
  Fd opened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (opened) return opened;
  if (errno == ENOENT || errno == ESRCH)
    throw Failure(NLC_PEER_DIED, format("process %d has closed its shared memory", pid));
  throw system_failure(
      format("cannot open the shared memory of process %d: ranks on one node must run "
             "as the same user, with the same capabilities",
             pid));
}

}  // namespace nlc
