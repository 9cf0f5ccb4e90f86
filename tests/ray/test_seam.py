"""A canary: names and signatures of Ray that the seam uses. It says clearly when a future Ray changes one."""

from __future__ import annotations

import inspect

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
