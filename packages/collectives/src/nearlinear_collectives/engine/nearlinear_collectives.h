/* C interface of the engine: collectives and messages over host memory, independent of torch.
 *
 * A group is created in three steps, so that the caller chooses the rendezvous:
 *   1. nlc_group_open() creates this rank's shared segment and listening socket, and writes
 *      their addresses to a peer info of NLC_PEER_INFO_BYTES plain bytes;
 *   2. the caller exchanges the peer infos by any means (a c10d Store, MPI, a file);
 *   3. nlc_group_connect() maps the neighbours' memory and connects the nodes.
 *
 * Functions return 0 or another code of nlc_status; nlc_error() returns the message of the calling
 * thread's last failure. A group runs one collective at a time, in call order: nlc_run() on the
 * caller's thread, nlc_start() on an engine thread. Messages do not wait for collectives.
 */
#ifndef NEARLINEAR_COLLECTIVES_H
#define NEARLINEAR_COLLECTIVES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NLC_ABI_VERSION 4
#define NLC_PEER_INFO_BYTES 512
#define NLC_ANY_TIMEOUT (-1) /* the group's own timeout */

typedef enum {
  NLC_OK = 0,
  NLC_BAD_ARGUMENT = 1, /* the call itself is wrong; the group stays usable */
  NLC_PEER_DIED = 2,    /* a rank's process ended or its connection closed */
  NLC_TIMEOUT = 3,      /* a rank made no progress in time */
  NLC_MISMATCH = 4,     /* ranks called different operations, sizes or dtypes */
  NLC_ABORTED = 5,      /* nlc_group_abort() here, or an earlier error of this group */
  NLC_SYSTEM = 6        /* an operating system call failed */
} nlc_status;

typedef enum {
  NLC_ALL_GATHER = 1,
  NLC_REDUCE_SCATTER = 2,
  NLC_ALL_REDUCE = 3,
  NLC_BROADCAST = 4,
  NLC_BARRIER = 5,
  NLC_ALL_TO_ALL = 6,
  NLC_GATHER = 7,
  NLC_SCATTER = 8,
  NLC_REDUCE = 9,
  NLC_ALL_GATHER_UNEVEN = 10,
  NLC_REDUCE_SCATTER_UNEVEN = 11,
  NLC_SEND = 12, /* for nlc_post() */
  NLC_RECEIVE = 13
} nlc_kind;

typedef enum {
  NLC_UINT8 = 0,
  NLC_INT8,
  NLC_INT16,
  NLC_INT32,
  NLC_INT64,
  NLC_FLOAT16,
  NLC_BFLOAT16,
  NLC_FLOAT32,
  NLC_FLOAT64,
  NLC_BOOL,
  NLC_DTYPES
} nlc_dtype;

typedef enum {
  NLC_SUM = 0,
  NLC_AVG,
  NLC_PRODUCT,
  NLC_MIN,
  NLC_MAX,
  NLC_BAND,
  NLC_BOR,
  NLC_BXOR,
  NLC_REDUCES
} nlc_reduce;

typedef struct {
  void *data;
  uint64_t count; /* elements */
} nlc_part;

#define NLC_ANY_RANK (-1)

/* One collective or message. Operations that do not reduce only move bytes: they use dtype for the
 * size of an element and to check that all ranks agree. all_to_all, gather, scatter and the
 * operations on uneven parts take the parts that this rank sends to and receives from every rank; a
 * part may be empty, and those of two ranks must agree in size. */
typedef struct {
  int32_t kind;         /* nlc_kind */
  int32_t dtype;        /* nlc_dtype */
  int32_t reduce;       /* nlc_reduce */
  int32_t root;         /* broadcast, gather, scatter, reduce: a rank of the group; send, receive:
                           the other rank, or NLC_ANY_RANK to receive from any */
  uint64_t count;       /* elements, equal on all ranks: per rank for all_gather, reduce_scatter,
                           gather and scatter, else in total; all_to_all: sent by this rank */
  double scale;         /* factor of the reduced value (floating dtypes only; 1.0 for none) */
  const void *input;    /* all_gather: count; reduce_scatter: size * count; all_reduce: count */
  void *output;         /* all_gather: size * count; reduce_scatter: count; else count, in place
                           (of reduce only the root's changes) */
  void *const *outputs; /* all_gather only: if not NULL, one pointer per rank replaces output */
  const nlc_part *sends, *receives; /* one per rank, see above; uneven reduce_scatter: sends and
                                       output */
  int64_t timeout_ms;   /* of this call, or NLC_ANY_TIMEOUT */
  int64_t tag;          /* send, receive: not negative; their data is `output` */
} nlc_call;

typedef struct nlc_group nlc_group;
typedef struct nlc_transfer nlc_transfer;

typedef struct {
  int32_t rank, size;
  int64_t timeout_ms;
  const char *name;            /* shown in errors and traces */
  const int64_t *global_ranks; /* size entries for error messages; NULL for 0, 1, ... */
} nlc_options;

typedef void (*nlc_done)(void *context, int32_t status, const char *error);

/* Groups. nlc_group_connect() may be called once, with the peer infos in rank order. */
int32_t nlc_group_open(const nlc_options *options, unsigned char peer_info[NLC_PEER_INFO_BYTES],
                       nlc_group **group);
int32_t nlc_group_connect(nlc_group *group, const unsigned char *peer_infos, int64_t timeout_ms);
void nlc_group_abort(nlc_group *group, const char *reason); /* all waiting calls fail */
void nlc_group_close(nlc_group *group); /* returns in bounded time; frees the group */
void nlc_group_set_timeout(nlc_group *group, int64_t timeout_ms);

/* Return 1 if the process of this peer is known to be dead, 0 if alive or on another node. */
int32_t nlc_peer_is_dead(const unsigned char peer_info[NLC_PEER_INFO_BYTES]);

/* Collectives. */
int32_t nlc_run(nlc_group *group, const nlc_call *call);
int32_t nlc_start(nlc_group *group, const nlc_call *call, nlc_done done, void *context);

/* Messages. A receive matches the first message of its rank and tag that no earlier receive has
 * matched; count and dtype must agree. The data stays in use until `done` is called, on any thread
 * that drives the group's messages; for a send, the receiver has the data by then. An engine thread
 * drives messages that nobody waits for. nlc_transfer_wait() returns after the end, or after
 * timeout_ms (0: no limit); the status is that of `done`, or NLC_OK before the end. */
int32_t nlc_post(nlc_group *group, const nlc_call *call, nlc_done done, void *context,
                 nlc_transfer **transfer);
int32_t nlc_transfer_wait(nlc_transfer *transfer, int64_t timeout_ms);
int32_t nlc_transfer_rank(const nlc_transfer *transfer); /* the other rank; after the end */
void nlc_transfer_free(nlc_transfer *transfer);

/* Memory shared with the ranks of this node: collectives on it copy less. NULL if none is left. */
void *nlc_pool_allocate(size_t bytes);
void nlc_pool_free(void *memory);
int32_t nlc_pool_contains(const void *memory);

/* Memory for the output of an in-place all_gather of `bytes_per_rank`, which exists once on the
 * node: a rank writes its own part and may only read the others'. All ranks must allocate the same
 * outputs in the same order. NULL if not available (several nodes, small gathers, ranks that do not
 * agree); use any other memory then. */
void *nlc_shared_allocate(nlc_group *group, size_t bytes_per_rank);
void nlc_shared_free(void *memory);

/* Diagnostics: write JSON to the buffer (truncated to capacity) and return its full length. */
size_t nlc_describe(nlc_group *group, char *text, size_t capacity); /* topology, transport, paths */
size_t nlc_trace(char *text, size_t capacity); /* last operations, all groups */

const char *nlc_error(void);
int32_t nlc_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif
