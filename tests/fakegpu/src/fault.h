/* The fault language of FAKE_FAULT: where something goes wrong, how, and under which conditions (README.md, "Faults"). */
#pragma once
#include <stdint.h>

enum fault_action {
  FAULT_NONE = 0,
  FAULT_HANG,
  FAULT_HANG_GIL,
  FAULT_SPIN,
  FAULT_ERROR,
  FAULT_CUDA,
  FAULT_WRONG,
  FAULT_OOM,
  FAULT_ABORT,
  FAULT_SEGV,
  FAULT_KILL,
  FAULT_EXIT,
  FAULT_DELAY,
  FAULT_ASYNC,
  FAULT_PRESET,
};

/* What is known at the place that asks. -1 (or NULL) means unknown there: a condition on it is then not met. */
struct fault_site {
  const char *point; /* "init", "allreduce", "malloc" ... */
  int rank, world;   /* of the communicator; unknown: RANK and WORLD_SIZE of the environment */
  long long bytes;   /* payload per rank */
  int gpu;           /* physical index of the GPU in use on this node */
  int peer;          /* send and recv: the other rank */
  int (*has_rank)(const void *comm, int rank);                 /* NULL: members not known yet */
  int (*has_gpu)(const void *comm, const char *node, int gpu); /* node NULL: any node */
  const void *comm;
  int only_pairs; /* a second look, when the members are known: other faults have had their turn */
};

struct fault {
  enum fault_action action;
  long number;     /* error=N, cudaN, exit=N, delay=ms, async=N */
  char preset[24]; /* preset=NAME */
  int chatty;      /* delay: keep writing NCCL log lines meanwhile */
};

/* A site that knows only its name. */
struct fault_site fault_site_at(const char *point);
/* 1 and *struck filled when a fault strikes here, else 0. Counts the visit. */
int fault_strikes(const struct fault_site *site, struct fault *struck);
/* The actions that need no knowledge of the place: delay, hang, abort, segv, kill, exit. Others return at once. */
void fault_act(const struct fault *fault);
/* Replaces the faults of this process; NULL returns to FAKE_FAULT. */
void fakegpu_set_faults(const char *text);
/* 0 when `text` parses, else -1 and the reason in `why`. */
int fakegpu_check_faults(const char *text, char *why, int why_bytes);
