"""Guards `TorchConfig`s that know nothing of the guard: one property of Ray's class is replaced in the process that calls fit()."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from typing import Any

from ray.train.torch.config import TorchConfig, _TorchBackend

from ray_nccl_guard.ray_train.backend import GuardedBackend
from ray_nccl_guard.ray_train.resolve import settings_from
from ray_nccl_guard.ray_train.settings import Mode

log = logging.getLogger("ray.train.nccl_guard")

_MARK = "_nccl_guard_original"


def install() -> None:
    """Guard every plain `TorchConfig` of this process, and its subclasses that keep Ray's torch backend.

    Ray reads `backend_cls` when fit() is called (V2: in the driver; V1: in the trial's actor, where `_arrive` installs the
    same). The class itself stays what it is, so what scripts compare or subclass does not change. Configs whose backend
    is not Ray's torch backend (TorchFT, XLA) are left alone. May be called more than once.
    """
    if hasattr(TorchConfig, _MARK):
        return
    backend_cls = TorchConfig.__dict__["backend_cls"]
    setattr(TorchConfig, _MARK, backend_cls)
    TorchConfig.backend_cls = property(lambda self: _backend_of(self, backend_cls.fget(self)))
    if not _is_v2():
        TorchConfig.__reduce_ex__ = _leave
        _name_the_default()


def _backend_of(config: Any, ray_backend: Any) -> Any:
    return GuardedBackend if ray_backend is _TorchBackend and _settle(config) else ray_backend


def _settle(config: Any) -> bool:
    """Give a plain config the guard's settings, from this environment; False leaves it to Ray."""
    if getattr(config, "guard", None) is None:
        try:
            config.guard = settings_from(os.environ, asked_backend=config.backend)
        except Exception as error:  # whoever wrote the script did not ask for the guard: it must not cost them the run
            log.warning("nccl_guard: this run is NOT guarded: %s", error)
            return False
    return config.guard.mode is not Mode.OFF


def _leave(config: Any, protocol: Any) -> Any:
    """How a config is pickled on V1: with its settings, and so that this is installed where it arrives."""
    plain = object.__reduce_ex__(config, protocol)
    if config.backend_cls is not GuardedBackend:
        return plain
    return _arrive, (object.__reduce_ex__(config, protocol),)


def _arrive(reduced: tuple[Any, ...]) -> Any:
    install()
    function, arguments, state = reduced[:3]
    config = function(*arguments)
    config.__dict__.update(state or {})
    return config


def _name_the_default() -> None:
    """V1 sends the trainer's arguments to the trial and makes it anew there: a default must be among them to arrive guarded."""
    from ray.train.torch.torch_trainer import TorchTrainer

    original = TorchTrainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if "torch_config" in inspect.signature(type(self).__init__).parameters:
            if self._param_dict.get("torch_config") is None:
                self._param_dict["torch_config"] = self._backend_config

    TorchTrainer.__init__ = init


def _is_v2() -> bool:
    """Whether Ray Train V2 is in use (2.51 and later by default, and by RAY_TRAIN_V2_ENABLED)."""
    try:
        from ray.train.v2._internal.constants import is_v2_enabled
    except ImportError:
        return False
    return bool(is_v2_enabled())
