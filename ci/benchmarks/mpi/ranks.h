/* Ranks without MPI: forked processes with shared memory and a barrier in it. */
#ifndef NEARLINEAR_BENCH_RANKS_H
#define NEARLINEAR_BENCH_RANKS_H

#include <stddef.h>

/* Fork `ranks` processes that run `body` on the same `bytes` of zeroed shared memory, wait for
 * them and return the exit status. If one fails, the others are killed. */
int run_ranks(int ranks, size_t bytes, int (*body)(int rank, int ranks, void *shared));

/* For use in `body`. */
void ranks_barrier(void);
void ranks_maximum(double *values, int count); /* over ranks, element by element, on all */

#endif
