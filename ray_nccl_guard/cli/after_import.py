"""Calls a function once a module has been imported by somebody else, without importing it earlier than they do."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call `call` when the module `name` has been executed, or now if it has been. An error of it is said, never raised."""
    if name in sys.modules:
        _guarded(call)
    else:
        sys.meta_path.insert(0, _Finder(name, call))


def _guarded(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # the import that we listen to belongs to somebody else's program
        print(f"ray-nccl-guard: this process is NOT guarded: {type(error).__name__}: {error}", file=sys.stderr)


class _Finder(MetaPathFinder):
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name, self.call = name, call

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.call)
        return spec


class _Loader(Loader):
    """The module's own loader, and the call after it."""

    def __init__(self, loader: Any, call: Callable[[], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # from here on the module looks as if nobody had listened
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _guarded(self._call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
