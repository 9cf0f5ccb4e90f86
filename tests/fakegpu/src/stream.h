/* Streams and events, as the files that implement them share them. */
#pragma once
#include "runtime.h"
#include <pthread.h>

enum task_kind {
  TASK_SHORT,
  TASK_LONG,
  TASK_RECORD,
  TASK_WAIT
}; /* LONG runs also when the context is lost: it must clean up */
struct task {
  struct task *next;
  enum task_kind kind;
  void (*function)(void *);
  void *argument;
  struct CUevent_st *event;
  uint64_t sequence;
};
struct CUstream_st {
  struct task *head, *tail;
  int running, has_thread, destroyed, ordinal, priority, known;
  unsigned flags;
  unsigned long long id;
  struct CUstream_st *next;
};
struct CUevent_st {
  int references, ordinal;
  unsigned flags;
  uint64_t recorded, completed; /* an event is done when these are equal */
  double completed_s;
};

/* One lock and one condition for all streams and events: they are few, and wait for one another. */
extern pthread_mutex_t stream_lock;
extern pthread_cond_t stream_changed;

struct CUstream_st *stream_resolve(
    cudaStream_t stream);                          /* the default streams have small numbers in place of addresses */
int stream_idle(const struct CUstream_st *stream); /* lock held */
void stream_push(struct CUstream_st *stream, struct task task);   /* lock held */
void event_complete(struct CUevent_st *event, uint64_t sequence); /* lock held */
void event_release(struct CUevent_st *event);                     /* lock held */
