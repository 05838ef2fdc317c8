/* What every contender's program shares, so that all are measured alike: sizes, data and its
 * check, blocks of back-to-back calls, the maximum over ranks, the lines that are printed.
 *
 * A contender says how its ranks meet (barrier, maximum) and how one collective is called.
 */
#ifndef NEARLINEAR_BENCH_MEASURE_H
#define NEARLINEAR_BENCH_MEASURE_H

#include <stddef.h>

enum operation { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, OPERATIONS };

/* One collective over float32: `count` elements per rank for all_gather and reduce_scatter, in
 * all for all_reduce, which works in place on `output` (as torch.distributed's does). */
struct collective {
  enum operation operation;
  size_t count;
  const float *input;
  float *output;
};

struct contender {
  int rank, ranks;
  int moves_data; /* 0: only the time counts, nothing to check */
  void (*barrier)(void);
  void (*maximum)(double *values, int count); /* over ranks, element by element, on all */
  void (*run)(const struct collective *);     /* ends the process on an error */
  void *(*allocate)(size_t bytes);            /* NULL: page-aligned private memory */
  void (*release)(void *memory);
};

/* Measures what the command line asks for and prints on rank 0. The exit status. */
int measure(const struct contender *contender, int argc, char **argv);

#endif
