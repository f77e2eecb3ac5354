"""Jitted functions that must not be loaded from jax's compilation cache."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

_LOCK = threading.Lock()


class UncachedJit:
    """A jitted function that is always compiled in this process.

    XLA's CPU programs lose the order of their collectives when they are loaded from the
    compilation cache (seen with jax 0.10.2). Devices then wait for each other in
    different collectives and deadlock. A pipeline runs several collectives at a time;
    a program compiled in this process keeps their order.
    """

    def __init__(self, jitted: Any):
        self._jitted = jitted
        self._compiled: dict[Any, Any] = {}

    def trace(self, *args: Any) -> Any:
        return self._jitted.trace(*args)

    def lower(self, *args: Any) -> "UncachedLowered":
        return UncachedLowered(self._jitted.lower(*args))

    def __call__(self, *args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        key = (treedef, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self._compiled:
            self._compiled[key] = self.lower(*args).compile()
        return self._compiled[key](*args)


class UncachedLowered:
    """A lowered function that is compiled without the cache."""

    def __init__(self, lowered: Any):
        self._lowered = lowered

    def as_text(self) -> str:
        return self._lowered.as_text()

    def compile(self, compiler_options: Any = None) -> Any:
        with _without_cache():
            return self._lowered.compile(compiler_options=compiler_options)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Disables the cache, also for what other threads compile in the meantime."""
    with _LOCK:
        before = jax.config.values["jax_enable_compilation_cache"]
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", before)
            compilation_cache.reset_cache()
