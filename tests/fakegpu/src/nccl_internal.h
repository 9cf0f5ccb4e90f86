/* A communicator of the fake NCCL and what its parts ask of one another. */
#pragma once
#include "fault.h"
#include "nccl_abi.h"
#include "node.h"
#include "runtime.h"
#include <pthread.h>
#include <stdatomic.h>

#define MAX_RANKS 64
#define SPLIT_SLOTS 16 /* splits of one communicator that may be under way at once */
#define PAIR_BYTES \
  (16u << 10) /* staging per ordered pair of ranks: 64 ranks then take 64 MiB of (sparse) shared memory */

enum operation { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV };
extern const char *const OPERATION_POINT[];

/* The shared memory of a communicator: this header, then one staging area per rank, then one channel per pair. */
struct member {
  _Atomic int attached, gone;
  int pid, gpu;
  char node[64];
};
struct split_slot {
  struct {
    _Atomic int set;
    int color, key;
  } member[MAX_RANKS];
  _Atomic int left;
};
struct signature {
  unsigned long long count;
  int operation, type, root;
}; /* what a rank is about to do */
struct segment {
  struct member member[MAX_RANKS];
  _Atomic int barrier_waiting;
  _Atomic unsigned barrier_generation;
  struct split_slot split[SPLIT_SLOTS];
  struct signature signature[MAX_RANKS];
};
struct channel {
  _Atomic unsigned full;
  unsigned bytes;
  char data[PAIR_BYTES];
};

struct ncclComm {
  unsigned magic;
  char name[64], path[192]; /* nccl-XXXXXX, and where it lies */
  struct segment *segment;
  char *staging;
  struct channel *channels;
  size_t stage_bytes, mapped_bytes;
  int rank, size, world_rank, device, gpu, blocking, splits, attached;
  volatile int aborted, state; /* state: the ncclResult_t that ncclCommGetAsyncError tells */
  unsigned long long launched, finished;
  pthread_mutex_t lock;
  pthread_cond_t changed;
};
#define COMM_MAGIC 0xfa4e0001u

/* nccl_log.c */
void nccl_warn(const ncclComm_t comm, const char *where, const char *format, ...) __attribute__((format(printf, 3, 4)));
void nccl_info(const ncclComm_t comm, const char *subsystem, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void nccl_version_banner(int rank);
void nccl_log_start(const ncclComm_t comm);
int nccl_log_network(const ncclComm_t comm); /* 0, or -1 when NCCL_SOCKET_IFNAME leaves no interface */
void nccl_log_connected(const ncclComm_t comm);
void nccl_log_complete(const ncclComm_t comm);
struct init_timings {
  double began_s, loaded_s, ready_s, met_s, done_s;
}; /* a monotonic clock: where each phase of an init ends */
void nccl_log_bootstrap(const ncclComm_t comm, const struct init_timings *t);
void nccl_log_timings(const ncclComm_t comm, const struct init_timings *t);
int nccl_version(void);

/* nccl_fault.c: -1 to go on, else the ncclResult_t to return. `wrong` is set when the result must be spoilt. */
int nccl_strike(ncclComm_t comm, const char *point, long long bytes, int peer, int *wrong);
int nccl_strike_pairs(ncclComm_t comm, const char *point);
/* The same where a kernel runs: nothing can be returned there, so an error becomes asynchronous. 1: do not run it. */
int nccl_strike_running(ncclComm_t comm, const char *point, long long bytes, int peer, int *wrong);
ncclResult_t nccl_cuda_failure(ncclComm_t comm, const char *where, int error);

/* nccl_comm.c */
ncclComm_t comm_make(const char *name, int size, int rank, int blocking);
ncclResult_t comm_begin(ncclComm_t comm, ncclComm_t *out); /* forms it, here or in a thread as `blocking` says */
ncclResult_t comm_form(ncclComm_t comm); /* returns when all ranks have met, or with the reason why not */
void comm_start_thread(void *(*function)(void *), void *argument);
int comm_blocking(const ncclConfig_t *config, int otherwise);
ncclResult_t comm_refuse(const char *function);
#define CHECK_COMM(c)                                                   \
  do {                                                                  \
    if (!(c) || (c)->magic != COMM_MAGIC) return comm_refuse(__func__); \
  } while (0)

/* nccl_queue.c */
int nccl_group_open(void);
void nccl_group_making(ncclComm_t comm);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* nccl_segment.c */
int segment_attach(ncclComm_t comm); /* 0; -1 with errno: cannot; 1: aborted; 2: a peer died */
void segment_detach(ncclComm_t comm);
int segment_barrier(ncclComm_t comm); /* 0, or -1: aborted, context lost, or a peer died */
int segment_lost(ncclComm_t comm);    /* 1 when waiting is pointless: aborted, context lost, or a peer died */
char *segment_stage(ncclComm_t comm, int rank);
struct channel *segment_channel(ncclComm_t comm, int from, int to);
void pause_between_looks(int *looks);

/* nccl_data.c */
struct request {
  enum operation operation;
  ncclComm_t comm;
  const char *send;
  char *receive;
  size_t count;
  int type, reduction, root; /* root: the peer for SEND and RECV */
  cudaStream_t stream;
};
size_t type_bytes(int type);
int run_collective(const struct request *request);
int run_pairwise(const struct request *requests, int count);
