/* Streams and events: in-order queues, each with a thread that starts with the first thing that must wait. */
#define _GNU_SOURCE
#include "runtime.h"
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

enum task_kind { TASK_SHORT, TASK_LONG, TASK_RECORD, TASK_WAIT }; /* LONG runs also when the context is lost: it must clean up */
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

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct CUstream_st *streams, default_stream[MAX_DEVICES];
static unsigned long long next_id = 1000; /* above the ids of the default streams */

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void runtime_wake_waiters(void) {
  pthread_mutex_lock(&lock);
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

static struct CUstream_st *resolve(cudaStream_t stream) { /* 0, 1 and 2 mean the default streams: legacy, per thread */
  if ((uintptr_t)stream > 2) return stream;
  int ordinal = runtime_current();
  struct CUstream_st *s = &default_stream[ordinal];
  pthread_mutex_lock(&lock);
  if (!s->known) {
    s->known = 1;
    s->ordinal = ordinal;
    s->id = 1 + (unsigned)ordinal;
    s->next = streams;
    streams = s;
  }
  pthread_mutex_unlock(&lock);
  return s;
}

static void release_event(struct CUevent_st *event) { if (--event->references == 0) free(event); } /* lock held */

static void complete_event(struct CUevent_st *event, uint64_t sequence) { /* lock held */
  if (sequence > event->completed) {
    event->completed = sequence;
    event->completed_s = now_s();
  }
  release_event(event);
  pthread_cond_broadcast(&changed);
}

static int idle(const struct CUstream_st *s) { return !s->head && !s->running; } /* lock held */

static void run(struct task *t) { /* lock held, given up while the task's function runs */
  if (t->kind == TASK_RECORD) {
    complete_event(t->event, t->sequence);
  } else if (t->kind == TASK_WAIT) {
    while (t->event->completed < t->sequence && !runtime_poisoned()) pthread_cond_wait(&changed, &lock);
    release_event(t->event);
  } else if (t->kind == TASK_LONG || !runtime_poisoned()) {
    pthread_mutex_unlock(&lock);
    t->function(t->argument);
    pthread_mutex_lock(&lock);
  }
}

static void *stream_thread(void *argument) {
  struct CUstream_st *s = argument;
  sigset_t all;
  sigfillset(&all); /* signals belong to the program's own threads, but for those of this thread's own faults */
  sigdelset(&all, SIGSEGV);
  sigdelset(&all, SIGABRT);
  pthread_sigmask(SIG_BLOCK, &all, NULL);
  pthread_setname_np(pthread_self(), "fakegpu-stream");
  runtime_set_current(s->ordinal);
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!s->head || s->running) {
      if (!s->head && !s->running && s->destroyed) { free(s); pthread_mutex_unlock(&lock); return NULL; }
      pthread_cond_wait(&changed, &lock);
    }
    struct task *t = s->head;
    s->head = t->next;
    if (!s->head) s->tail = NULL;
    s->running = 1;
    run(t);
    s->running = 0;
    free(t);
    pthread_cond_broadcast(&changed);
  }
}

static void push(struct CUstream_st *s, struct task task) { /* lock held */
  struct task *t = malloc(sizeof *t);
  *t = task;
  t->next = NULL;
  if (s->tail) s->tail->next = t;
  else s->head = t;
  s->tail = t;
  if (!s->has_thread) {
    pthread_t thread;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_create(&thread, &detached, stream_thread, s);
    s->has_thread = 1;
  }
  pthread_cond_broadcast(&changed);
}

void runtime_enqueue(cudaStream_t stream, void (*function)(void *), void *argument) {
  struct CUstream_st *s = resolve(stream);
  pthread_mutex_lock(&lock);
  push(s, (struct task){.kind = TASK_LONG, .function = function, .argument = argument});
  pthread_mutex_unlock(&lock);
}

void runtime_submit(cudaStream_t stream, void (*function)(void *), void *argument) {
  struct CUstream_st *s = resolve(stream);
  pthread_mutex_lock(&lock);
  if (idle(s)) {
    s->running = 1;
    pthread_mutex_unlock(&lock);
    function(argument);
    pthread_mutex_lock(&lock);
    s->running = 0;
    pthread_cond_broadcast(&changed);
  } else {
    push(s, (struct task){.kind = TASK_SHORT, .function = function, .argument = argument});
  }
  pthread_mutex_unlock(&lock);
}

int runtime_drain(cudaStream_t stream) {
  struct CUstream_st *s = resolve(stream);
  pthread_mutex_lock(&lock);
  while (!idle(s) && !runtime_poisoned()) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return runtime_poisoned();
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  RETURN_IF(runtime_enter("streamcreate"));
  struct CUstream_st *s = calloc(1, sizeof *s);
  s->ordinal = runtime_current();
  s->flags = flags;
  s->priority = priority;
  pthread_mutex_lock(&lock);
  s->id = next_id++;
  s->next = streams;
  streams = s;
  pthread_mutex_unlock(&lock);
  *out = s;
  return 0;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t s) {
  pthread_mutex_lock(&lock);
  for (struct CUstream_st **p = &streams; *p; p = &(*p)->next) if (*p == s) { *p = s->next; break; }
  s->destroyed = 1;
  if (!s->has_thread) free(s);
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  RETURN_IF(runtime_enter("streamsync"));
  return runtime_fail(runtime_drain(s));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  RETURN_IF(runtime_enter("streamquery"));
  struct CUstream_st *s = resolve(stream);
  pthread_mutex_lock(&lock);
  int done = idle(s);
  pthread_mutex_unlock(&lock);
  return runtime_fail(done ? runtime_poisoned() : cudaErrorNotReady);
}

cudaError_t cudaStreamGetPriority(cudaStream_t s, int *out) { *out = resolve(s)->priority; return 0; }
cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned *out) { *out = resolve(s)->flags; return 0; }
cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long *out) { *out = resolve(s)->id; return 0; }
cudaError_t cudaStreamGetDevice(cudaStream_t s, int *out) { *out = resolve(s)->ordinal; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { /* as on data-centre GPUs */
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return 0;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  (void)flags;
  RETURN_IF(runtime_fail(runtime_poisoned()));
  struct CUstream_st *s = resolve(stream);
  pthread_mutex_lock(&lock);
  if (event->completed < event->recorded) {
    event->references++;
    push(s, (struct task){.kind = TASK_WAIT, .event = event, .sequence = event->recorded});
  }
  pthread_mutex_unlock(&lock);
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
  pthread_mutex_lock(&lock);
  release_event(event);
  pthread_mutex_unlock(&lock);
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  (void)flags;
  RETURN_IF(runtime_enter("eventrecord"));
  struct CUstream_st *s = resolve(stream);
  pthread_mutex_lock(&lock);
  event->recorded++;
  event->references++;
  if (idle(s)) complete_event(event, event->recorded);
  else push(s, (struct task){.kind = TASK_RECORD, .event = event, .sequence = event->recorded});
  pthread_mutex_unlock(&lock);
  return 0;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) { return cudaEventRecordWithFlags(event, s, 0); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
  RETURN_IF(runtime_enter("eventquery"));
  pthread_mutex_lock(&lock);
  int done = event->completed >= event->recorded;
  pthread_mutex_unlock(&lock);
  return runtime_fail(runtime_poisoned() ? runtime_poisoned() : done ? 0 : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RETURN_IF(runtime_enter("eventsync"));
  pthread_mutex_lock(&lock);
  uint64_t sequence = event->recorded;
  while (event->completed < sequence && !runtime_poisoned()) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  RETURN_IF(runtime_fail(runtime_poisoned()));
  *milliseconds = (float)((to->completed_s - from->completed_s) * 1e3);
  return 0;
}

cudaError_t cudaDeviceSynchronize(void) {
  RETURN_IF(runtime_enter("devsync"));
  pthread_mutex_lock(&lock);
  for (int busy = 1; busy && !runtime_poisoned();) {
    busy = 0;
    for (struct CUstream_st *s = streams; s; s = s->next) busy |= s->ordinal == runtime_current() && !idle(s);
    if (busy) pthread_cond_wait(&changed, &lock);
  }
  pthread_mutex_unlock(&lock);
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, void (*function)(void *), void *argument) {
  RETURN_IF(runtime_fail(runtime_poisoned()));
  runtime_enqueue(s, function, argument);
  return 0;
}

struct callback { void (*function)(cudaStream_t, cudaError_t, void *); cudaStream_t stream; void *data; };

static void run_callback(void *argument) {
  struct callback *c = argument;
  c->function(c->stream, runtime_poisoned(), c->data);
  free(c);
}

cudaError_t cudaStreamAddCallback(cudaStream_t s, void (*function)(cudaStream_t, cudaError_t, void *), void *data, unsigned flags) {
  (void)flags;
  RETURN_IF(runtime_fail(runtime_poisoned()));
  struct callback *c = malloc(sizeof *c);
  *c = (struct callback){function, s, data};
  runtime_enqueue(s, run_callback, c);
  return 0;
}

/* No graph is ever captured: torch asks before most things it does. */
cudaError_t cudaStreamIsCapturing(cudaStream_t s, int *status) {
  (void)s;
  *status = 0;
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, int *status, unsigned long long *id, void *graph, void *nodes, void *edges, size_t *n) {
  (void)s, (void)graph, (void)nodes, (void)edges;
  *status = 0;
  if (id) *id = 0;
  if (n) *n = 0;
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
  static __thread int current;
  int previous = current;
  current = *mode;
  *mode = previous;
  return 0;
}
