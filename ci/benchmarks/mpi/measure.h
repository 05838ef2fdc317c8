/* The measuring program shared by all contenders: sizes, data and its verification, blocks of
 * back-to-back calls, the maximum over ranks, and output.
 *
 * A contender provides synchronization of its ranks (barrier, maximum) and the collective call.
 */
#ifndef NEARLINEAR_BENCH_MEASURE_H
#define NEARLINEAR_BENCH_MEASURE_H

#include <stddef.h>

enum operation { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, OPERATIONS };

/* One collective over float32. `count` is the number of elements per rank for all_gather and
 * reduce_scatter, and the total for all_reduce, which works in place on `output`. */
struct collective {
  enum operation operation;
  size_t count;
  const float *input;
  float *output;
};

struct contender {
  int rank, ranks;
  int moves_data; /* 0: no data to verify, time only */
  void (*barrier)(void);
  void (*maximum)(double *values, int count); /* over ranks, element by element, on all */
  void (*run)(const struct collective *);     /* ends the process on an error */
  void *(*allocate)(size_t bytes);            /* NULL: page-aligned private memory */
  void (*release)(void *memory);
};

/* Measure as requested on the command line, print on rank 0 and return the exit status. */
int measure(const struct contender *contender, int argc, char **argv);

#endif
