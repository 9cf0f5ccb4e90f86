"""A canary: names and signatures of Ray that the seam uses. It says clearly when a future Ray changes one."""

from __future__ import annotations

import inspect
import sys

import pytest

ray = pytest.importorskip("ray", reason="ray is not installed")


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_backend_seam_is_as_we_use_it():
    from ray.train.torch.config import TorchConfig, _TorchBackend

    assert parameters(_TorchBackend.on_start) == ["self", "worker_group", "backend_config"]
    assert parameters(_TorchBackend.on_shutdown) == ["self", "worker_group", "backend_config"]
    assert isinstance(TorchConfig.backend_cls, property)
    assert [f for f in TorchConfig.__dataclass_fields__] == ["backend", "init_method", "timeout_s"]


def test_the_worker_group_answers_the_calls_that_we_make():
    from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus
    from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

    for name in ("execute_single_async", "get_worker_group_state", "get_worker_group_context", "get_latest_poll_status"):
        assert callable(getattr(WorkerGroup, name)), name
    assert parameters(WorkerGroup.execute_single_async)[1:3] == ["rank", "fn"], "both are given by position"
    assert isinstance(WorkerGroupPollStatus.errors, property)
    assert "_storage_context" in inspect.getsource(WorkerGroup.__init__)


def test_only_startup_failures_are_answered_with_fresh_workers():
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
    from ray.train.v2._internal.execution.failure_handling import default

    from ray_nccl_guard.ray_train.errors import GuardRestart

    assert issubclass(GuardRestart, WorkerGroupStartupFailedError)
    assert WorkerGroupStartupFailedError in default.RETRYABLE_CONTROLLER_ERRORS


def test_a_worker_group_tells_its_callbacks_what_the_watch_over_training_needs():
    from ray.train.v2._internal.callbacks.nccl_ras import NCCLRASCallback
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

    assert parameters(WorkerGroupCallback.after_worker_group_poll_status) == ["self", "worker_group_status"]
    assert parameters(WorkerGroupCallback.before_worker_group_abort) == ["self", "worker_group_context"]
    assert "self._callbacks = [" in inspect.getsource(WorkerGroup.__init__)
    assert "after_worker_group_poll_status" in inspect.getsource(WorkerGroup.poll_status)
    ras = NCCLRASCallback()
    assert ras.comm_deadlock_count == {} and ras._confirm_poll_counts > 0


def test_what_is_appended_to_an_error_is_in_what_ray_raises_from_it():
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
    from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

    from ray_nccl_guard.ray_train import flight_publish
    from ray_nccl_guard.ray_train.flight_callback import append

    user = UserExceptionWithTraceback(ValueError("bad"), "Traceback\n" + "x" * 2000 + "\nValueError: bad\n")
    gone = WorkerHealthCheckFailedError("A worker health check failed.", RuntimeError("it died"))
    errors = (user, gone, None)
    status = WorkerGroupPollStatus({rank: WorkerStatus(running=False, error=error) for rank, error in enumerate(errors)})
    words = "y" * flight_publish._BRIEF
    append(status, words)
    raised = status.get_worker_group_error()
    assert str(raised).count(words) == 2, "once for each kind of error, and Ray has cut neither"
    assert "ValueError: bad" in str(raised) and "it died" in str(raised)
    assert raised.worker_failures.keys() == {0, 1} and isinstance(raised.worker_failures[0], ValueError)
    if sys.version_info >= (3, 11):
        assert raised.worker_failures[0].__notes__ == [words]


def test_train_v1_ends_a_failed_group_by_its_shutdown_while_it_handles_the_error():
    from ray.train import trainer
    from ray.train._internal import utils
    from ray.train._internal.backend_executor import BackendExecutor
    from ray.train._internal.worker_group import WorkerGroup

    assert parameters(WorkerGroup.shutdown) == ["self", "patience_s"]
    assert "self.worker_group.shutdown(" in inspect.getsource(BackendExecutor.shutdown)
    handled = inspect.getsource(trainer.TrainingIterator.__next__).partition("except StartTraceback")[2]
    assert "_backend_executor.shutdown(graceful_termination=False)" in handled
    assert utils.StartTracebackWithWorkerRank(worker_rank=1).worker_rank == 1
