/* Events: marks in a stream that others wait for. */
#define _GNU_SOURCE
#include "stream.h"
#include <stdlib.h>
#include <time.h>

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void event_release(struct CUevent_st *event) {
  if (--event->references == 0) free(event);
} /* lock held */

void event_complete(struct CUevent_st *event, uint64_t sequence) { /* lock held */
  if (sequence > event->completed) {
    event->completed = sequence;
    event->completed_s = now_s();
  }
  event_release(event);
  pthread_cond_broadcast(&stream_changed);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  (void)flags;
  RETURN_IF(runtime_fail(runtime_poisoned()));
  struct CUstream_st *s = stream_resolve(stream);
  pthread_mutex_lock(&stream_lock);
  if (event->completed < event->recorded) {
    event->references++;
    stream_push(s, (struct task){.kind = TASK_WAIT, .event = event, .sequence = event->recorded});
  }
  pthread_mutex_unlock(&stream_lock);
  return 0;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  RETURN_IF(runtime_enter("eventcreate"));
  struct CUevent_st *event = calloc(1, sizeof *event);
  event->references = 1;
  event->flags = flags;
  event->ordinal = runtime_current();
  *out = event;
  return 0;
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  pthread_mutex_lock(&stream_lock);
  event_release(event);
  pthread_mutex_unlock(&stream_lock);
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  (void)flags;
  RETURN_IF(runtime_enter("eventrecord"));
  struct CUstream_st *s = stream_resolve(stream);
  pthread_mutex_lock(&stream_lock);
  event->recorded++;
  event->references++;
  if (stream_idle(s))
    event_complete(event, event->recorded);
  else
    stream_push(s, (struct task){.kind = TASK_RECORD, .event = event, .sequence = event->recorded});
  pthread_mutex_unlock(&stream_lock);
  return 0;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) { return cudaEventRecordWithFlags(event, s, 0); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
  RETURN_IF(runtime_enter("eventquery"));
  pthread_mutex_lock(&stream_lock);
  int done = event->completed >= event->recorded;
  pthread_mutex_unlock(&stream_lock);
  return runtime_fail(runtime_poisoned() ? runtime_poisoned() : done ? 0 : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RETURN_IF(runtime_enter("eventsync"));
  pthread_mutex_lock(&stream_lock);
  uint64_t sequence = event->recorded;
  while (event->completed < sequence && !runtime_poisoned()) pthread_cond_wait(&stream_changed, &stream_lock);
  pthread_mutex_unlock(&stream_lock);
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  RETURN_IF(runtime_fail(runtime_poisoned()));
  *milliseconds = (float)((to->completed_s - from->completed_s) * 1e3);
  return 0;
}
