"""Programs that must not come from jax's cache of compiled programs."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

_LOCK = threading.Lock()


class CompiledAnew:
    """A jitted function that is compiled in this process, whatever the cache holds.

    XLA's CPU programs lose the order of their collectives when they come from there
    (seen with jax 0.10.2): devices then wait for one another in different ones, for
    ever. A pipeline has several at a time; a program compiled here keeps their order.
    """

    def __init__(self, jitted: Any):
        self._jitted = jitted
        self._compiled: dict[Any, Any] = {}

    def trace(self, *args: Any) -> Any:
        return self._jitted.trace(*args)

    def lower(self, *args: Any) -> "Lowered":
        return Lowered(self._jitted.lower(*args))

    def __call__(self, *args: Any) -> Any:
        leaves, form = jax.tree.flatten(args)
        key = (form, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self._compiled:
            self._compiled[key] = self.lower(*args).compile()
        return self._compiled[key](*args)


class Lowered:
    """As jax lowers a function, but compiled without the cache."""

    def __init__(self, lowered: Any):
        self._lowered = lowered

    def as_text(self) -> str:
        return self._lowered.as_text()

    def compile(self, compiler_options: Any = None) -> Any:
        with _without_cache():
            return self._lowered.compile(compiler_options=compiler_options)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Compiles without the cache; what another thread compiles meanwhile, too."""
    with _LOCK:
        before = jax.config.values["jax_enable_compilation_cache"]
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", before)
            compilation_cache.reset_cache()
