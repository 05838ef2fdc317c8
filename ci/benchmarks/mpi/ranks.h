/* Ranks without MPI: forked processes that share some memory and a barrier in it. */
#ifndef NEARLINEAR_BENCH_RANKS_H
#define NEARLINEAR_BENCH_RANKS_H

#include <stddef.h>

/* Forks `ranks` processes, each of which runs `body` with the same `bytes` of zeroed shared
 * memory, and waits for them. When one fails the others are ended. The exit status. */
int run_ranks(int ranks, size_t bytes, int (*body)(int rank, int ranks, void *shared));

/* For use in a body. */
void ranks_barrier(void);
void ranks_maximum(double *values, int count); /* over ranks, element by element, on all */

#endif
