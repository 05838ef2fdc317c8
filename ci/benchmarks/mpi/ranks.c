#define _GNU_SOURCE
#include "ranks.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_RANKS = 64, MAX_VALUES = 1024 };

struct meeting {
  pthread_barrier_t barrier;
  double values[MAX_RANKS][MAX_VALUES];
};

static struct meeting *meeting;
static int my_rank, all_ranks;

void ranks_barrier(void) { pthread_barrier_wait(&meeting->barrier); }

void ranks_maximum(double *values, int count) {
  if (count > MAX_VALUES) {
    fprintf(stderr, "more than %d values to compare\n", MAX_VALUES);
    exit(1);
  }
  for (int i = 0; i < count; i++) meeting->values[my_rank][i] = values[i];
  ranks_barrier();
  for (int rank = 0; rank < all_ranks; rank++)
    for (int i = 0; i < count; i++)
      if (meeting->values[rank][i] > values[i]) values[i] = meeting->values[rank][i];
  ranks_barrier();
}

static void *shared_memory(size_t bytes) {
  void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) {
    perror("mmap");
    exit(1);
  }
  return found;
}

int run_ranks(int ranks, size_t bytes, int (*body)(int rank, int ranks, void *shared)) {
  if (ranks < 1 || ranks > MAX_RANKS) {
    fprintf(stderr, "the number of ranks must lie between 1 and %d\n", MAX_RANKS);
    return 2;
  }
  pthread_barrierattr_t attribute;
  pthread_barrierattr_init(&attribute);
  pthread_barrierattr_setpshared(&attribute, PTHREAD_PROCESS_SHARED);
  meeting = shared_memory(sizeof *meeting);
  pthread_barrier_init(&meeting->barrier, &attribute, ranks);
  void *shared = bytes ? shared_memory(bytes) : NULL;
  all_ranks = ranks;

  const pid_t parent = getpid();
  pid_t children[MAX_RANKS];
  for (int rank = 0; rank < ranks; rank++) {
    children[rank] = fork();
    if (children[rank] < 0) {
      perror("fork");
      exit(1); /* PR_SET_PDEATHSIG ends the other ranks */
    }
    if (children[rank] == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      my_rank = rank;
      exit(body(rank, ranks, shared));
    }
  }
  int result = 0, status;
  for (int left = ranks; left > 0; left--) {
    const pid_t ended = wait(&status);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    for (int rank = 0; rank < ranks; rank++) {
      if (children[rank] == ended) children[rank] = 0;
      if (code && !result && children[rank]) kill(children[rank], SIGKILL);
    }
    if (code && !result) result = code;
  }
  return result;
}
