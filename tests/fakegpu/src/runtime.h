/* What the parts of the fake CUDA runtime, and the fake NCCL on top of it, ask of one another. */
#pragma once
#include "cuda_abi.h"
#include "fault.h"
#include "node.h"

/* Entry of an API function: 0, or the error that it must return. `point` is its name in the fault language. */
int runtime_enter(const char *point);
int runtime_fail(int error);               /* notes it for cudaGetLastError; returns it */
int runtime_unsupported(const char *name); /* what every function does that is not written here */

void runtime_poison(int error); /* the context is lost: every later call returns `error` */
int runtime_poisoned(void);     /* that error, or 0 */

int runtime_visible_count(void);
int runtime_current(void); /* ordinal among the visible devices */
struct visible_device runtime_device(int ordinal);
int runtime_context(void); /* makes the current device's context, if it is not there; 0 or the error */
int runtime_attribute(int attribute, int ordinal);
int runtime_range(const void *pointer, void **base, size_t *bytes, int *ordinal); /* 1 when it is memory of ours */

/* Runs function(argument) after all that was queued on the stream before; it may block. */
void runtime_enqueue(cudaStream_t stream, void (*function)(void *), void *argument);
/* The same, on the calling thread at once when the stream is idle; it must not block. */
void runtime_submit(cudaStream_t stream, void (*function)(void *), void *argument);
int runtime_drain(cudaStream_t stream); /* waits; 0 or the sticky error */
void runtime_wake_waiters(void);
void runtime_set_current(int ordinal); /* for threads of our own */

#define RETURN_IF(error_expression)  \
  do {                               \
    int error_ = (error_expression); \
    if (error_) return error_;       \
  } while (0)
