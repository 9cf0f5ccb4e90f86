/* Streams: in-order queues, each with a thread that starts with the first thing that must wait. */
#define _GNU_SOURCE
#include "stream.h"
#include <signal.h>
#include <stdlib.h>

pthread_mutex_t stream_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t stream_changed = PTHREAD_COND_INITIALIZER;
static struct CUstream_st *streams, default_stream[MAX_DEVICES];
static unsigned long long next_id = 1000; /* above the ids of the default streams */

void runtime_wake_waiters(void) {
  pthread_mutex_lock(&stream_lock);
  pthread_cond_broadcast(&stream_changed);
  pthread_mutex_unlock(&stream_lock);
}

struct CUstream_st *stream_resolve(cudaStream_t stream) { /* 0, 1 and 2 mean the default streams: legacy, per thread */
  if ((uintptr_t)stream > 2) return stream;
  int ordinal = runtime_current();
  struct CUstream_st *s = &default_stream[ordinal];
  pthread_mutex_lock(&stream_lock);
  if (!s->known) {
    s->known = 1;
    s->ordinal = ordinal;
    s->id = 1 + (unsigned)ordinal;
    s->next = streams;
    streams = s;
  }
  pthread_mutex_unlock(&stream_lock);
  return s;
}

int stream_idle(const struct CUstream_st *s) { return !s->head && !s->running; } /* lock held */

static void run(struct task *t) { /* lock held, given up while the task's function runs */
  if (t->kind == TASK_RECORD) {
    event_complete(t->event, t->sequence);
  } else if (t->kind == TASK_WAIT) {
    while (t->event->completed < t->sequence && !runtime_poisoned()) pthread_cond_wait(&stream_changed, &stream_lock);
    event_release(t->event);
  } else if (t->kind == TASK_LONG || !runtime_poisoned()) {
    pthread_mutex_unlock(&stream_lock);
    t->function(t->argument);
    pthread_mutex_lock(&stream_lock);
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
  pthread_mutex_lock(&stream_lock);
  for (;;) {
    while (!s->head || s->running) {
      if (!s->head && !s->running && s->destroyed) {
        free(s);
        pthread_mutex_unlock(&stream_lock);
        return NULL;
      }
      pthread_cond_wait(&stream_changed, &stream_lock);
    }
    struct task *t = s->head;
    s->head = t->next;
    if (!s->head) s->tail = NULL;
    s->running = 1;
    run(t);
    s->running = 0;
    free(t);
    pthread_cond_broadcast(&stream_changed);
  }
}

void stream_push(struct CUstream_st *s, struct task task) { /* lock held */
  struct task *t = malloc(sizeof *t);
  *t = task;
  t->next = NULL;
  if (s->tail)
    s->tail->next = t;
  else
    s->head = t;
  s->tail = t;
  if (!s->has_thread) {
    pthread_t thread;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_create(&thread, &detached, stream_thread, s);
    s->has_thread = 1;
  }
  pthread_cond_broadcast(&stream_changed);
}

void runtime_enqueue(cudaStream_t stream, void (*function)(void *), void *argument) {
  struct CUstream_st *s = stream_resolve(stream);
  pthread_mutex_lock(&stream_lock);
  stream_push(s, (struct task){.kind = TASK_LONG, .function = function, .argument = argument});
  pthread_mutex_unlock(&stream_lock);
}

void runtime_submit(cudaStream_t stream, void (*function)(void *), void *argument) {
  struct CUstream_st *s = stream_resolve(stream);
  pthread_mutex_lock(&stream_lock);
  if (stream_idle(s)) {
    s->running = 1;
    pthread_mutex_unlock(&stream_lock);
    function(argument);
    pthread_mutex_lock(&stream_lock);
    s->running = 0;
    pthread_cond_broadcast(&stream_changed);
  } else {
    stream_push(s, (struct task){.kind = TASK_SHORT, .function = function, .argument = argument});
  }
  pthread_mutex_unlock(&stream_lock);
}

int runtime_drain(cudaStream_t stream) {
  struct CUstream_st *s = stream_resolve(stream);
  pthread_mutex_lock(&stream_lock);
  while (!stream_idle(s) && !runtime_poisoned()) pthread_cond_wait(&stream_changed, &stream_lock);
  pthread_mutex_unlock(&stream_lock);
  return runtime_poisoned();
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  RETURN_IF(runtime_enter("streamcreate"));
  struct CUstream_st *s = calloc(1, sizeof *s);
  s->ordinal = runtime_current();
  s->flags = flags;
  s->priority = priority;
  pthread_mutex_lock(&stream_lock);
  s->id = next_id++;
  s->next = streams;
  streams = s;
  pthread_mutex_unlock(&stream_lock);
  *out = s;
  return 0;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t s) {
  pthread_mutex_lock(&stream_lock);
  for (struct CUstream_st **p = &streams; *p; p = &(*p)->next)
    if (*p == s) {
      *p = s->next;
      break;
    }
  s->destroyed = 1;
  if (!s->has_thread) free(s);
  pthread_cond_broadcast(&stream_changed);
  pthread_mutex_unlock(&stream_lock);
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  RETURN_IF(runtime_enter("streamsync"));
  return runtime_fail(runtime_drain(s));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  RETURN_IF(runtime_enter("streamquery"));
  struct CUstream_st *s = stream_resolve(stream);
  pthread_mutex_lock(&stream_lock);
  int done = stream_idle(s);
  pthread_mutex_unlock(&stream_lock);
  return runtime_fail(done ? runtime_poisoned() : cudaErrorNotReady);
}

cudaError_t cudaStreamGetPriority(cudaStream_t s, int *out) {
  *out = stream_resolve(s)->priority;
  return 0;
}
cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned *out) {
  *out = stream_resolve(s)->flags;
  return 0;
}
cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long *out) {
  *out = stream_resolve(s)->id;
  return 0;
}
cudaError_t cudaStreamGetDevice(cudaStream_t s, int *out) {
  *out = stream_resolve(s)->ordinal;
  return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { /* as on data-centre GPUs */
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return 0;
}

cudaError_t cudaDeviceSynchronize(void) {
  RETURN_IF(runtime_enter("devsync"));
  pthread_mutex_lock(&stream_lock);
  for (int busy = 1; busy && !runtime_poisoned();) {
    busy = 0;
    for (struct CUstream_st *s = streams; s; s = s->next) busy |= s->ordinal == runtime_current() && !stream_idle(s);
    if (busy) pthread_cond_wait(&stream_changed, &stream_lock);
  }
  pthread_mutex_unlock(&stream_lock);
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, void (*function)(void *), void *argument) {
  RETURN_IF(runtime_fail(runtime_poisoned()));
  runtime_enqueue(s, function, argument);
  return 0;
}

struct callback {
  void (*function)(cudaStream_t, cudaError_t, void *);
  cudaStream_t stream;
  void *data;
};

static void run_callback(void *argument) {
  struct callback *c = argument;
  c->function(c->stream, runtime_poisoned(), c->data);
  free(c);
}

cudaError_t cudaStreamAddCallback(cudaStream_t s, void (*function)(cudaStream_t, cudaError_t, void *), void *data,
                                  unsigned flags) {
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

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, int *status, unsigned long long *id, void *graph, void *nodes,
                                     void *edges, size_t *n) {
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
