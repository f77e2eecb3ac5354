"""Logical axes for the arrays of a tree.

They come from one of three sources: the tree itself (NNX variables, Linen boxes), path
patterns for trees without names, or the parameters an optimizer state belongs to.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .resolve import Axes

# Optimizer state of at most this many elements that belongs to no parameter is
# replicated without being named.
SMALL = 1024


def path_name(path: Sequence[Any]) -> str:
    """Returns a key path as a string, for instance "blocks/attention/query"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def is_named(leaf: Any) -> bool:
    """Returns whether a leaf may carry axis names: NNX variables and Linen boxes."""
    return _is_variable(leaf) or _is_box(leaf)


def _is_variable(leaf: Any) -> bool:
    return hasattr(leaf, "get_metadata") and hasattr(leaf, "get_value")


def _is_box(leaf: Any) -> bool:
    """Returns whether a leaf is an nn.Partitioned or nn.LogicallyPartitioned."""
    return hasattr(leaf, "replace_boxed") and hasattr(leaf, "names")


def unwrap(leaf: Any) -> Any:
    """Returns the array or ShapeDtypeStruct inside a variable or box, or the leaf."""
    if _is_variable(leaf):
        return leaf.get_value()
    return leaf.value if _is_box(leaf) else leaf


def rewrap(leaf: Any, value: Any) -> Any:
    """Returns the variable or box with its array replaced by `value`."""
    if _is_variable(leaf):
        return leaf.replace(value)
    return leaf.replace_boxed(value) if _is_box(leaf) else value


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf has a shape and dtype; equinox trees hold other leaves."""
    array = unwrap(leaf)
    return hasattr(array, "shape") and hasattr(array, "dtype")


def axes_of(tree: Any) -> Any:
    """Returns the logical axes that a tree of NNX variables or Linen boxes carries.

    They are read from a variable's metadata `axes`, from flax's own `out_sharding` (or
    `sharding_names`), or from the `names` of a box. An array without them is an error,
    so no array is replicated because its names were forgotten. Scalars need no names.
    The axes of a leaf that is not an array are None.
    """
    missing = []

    def one(path, leaf):
        if not is_array(leaf):
            return None
        names = _carried(path, leaf)
        if names is None and unwrap(leaf).ndim:
            missing.append(path_name(path))
        return names or ()

    axes = jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_named)
    if missing:
        raise ValueError(
            f"{len(missing)} arrays have no logical axes: {_some(missing)}. Add "
            "axes=(...) metadata to the variables, or pass "
            "axes=axes_from_paths(tree, {...})."
        )
    return axes


def _carried(path: Sequence[Any], leaf: Any) -> Axes | None:
    if _is_box(leaf):
        return _names(leaf.names, f"{path_name(path)}: its box")
    metadata = leaf.get_metadata() if _is_variable(leaf) else {}
    for key in ("axes", "out_sharding", "sharding_names"):
        if metadata.get(key) is not None:
            return _names(metadata[key], f"{path_name(path)}: metadata {key}")
    return None


def axes_from_paths(tree: Any, patterns: Mapping[str, Axes]) -> Any:
    """Returns the logical axes of a tree, from regular expressions on its paths.

    The first pattern that matches the full path ("blocks/0/query") names the array. An
    array that no pattern matches keeps the names it carries (NNX, Linen). An array with
    neither, or a pattern that matches no array, is an error. The axes of a leaf that is
    not an array, such as a function in an equinox module, are None.
    """
    compiled = _compile(patterns)
    matched: set[str] = set()
    unmatched = []

    def one(path, leaf):
        if not is_array(leaf):
            return None
        name = path_name(path)
        for pattern, axes in compiled:
            if pattern.fullmatch(name):
                matched.add(pattern.pattern)
                if len(axes) != unwrap(leaf).ndim:
                    raise ValueError(
                        f"{name}: pattern {pattern.pattern!r} names {len(axes)} "
                        f"dimensions {axes}, but its shape is "
                        f"{tuple(unwrap(leaf).shape)}. Name each dimension."
                    )
                return axes
        carried = _carried(path, leaf)
        if carried is None:
            unmatched.append(name)
        return carried

    result = jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_named)
    if unmatched:
        raise ValueError(
            f"{len(unmatched)} paths match no pattern: {_some(unmatched)}. Add a "
            "pattern for them; (None, ...) replicates an array."
        )
    if unused := [pattern for pattern in patterns if pattern not in matched]:
        raise ValueError(
            f"{len(unused)} patterns match no array: {_some(unused)}. Remove or fix "
            "them: a pattern must match the full path, and only the first matching "
            "pattern applies."
        )
    return result


class UnknownState(ValueError):
    """Raised for an optimizer state array that belongs to no parameter.

    Attributes:
      problem: the array, and why no parameter owns it.
      pattern: the entry of `others` that would replicate it.
    """

    def __init__(self, message: str, *, problem: str, pattern: str):
        super().__init__(message)
        self.problem, self.pattern = problem, pattern


def axes_for_state(
    state: Any,
    params: Any,
    params_axes: Any,
    *,
    others: Mapping[str, Axes] | None = None,
) -> Any:
    """Returns the logical axes of an optimizer state, from those of the parameters.

    An array belongs to the parameter whose path is the longest suffix of its own path.
    This covers moments, masked and partitioned optimizers. Its shape must be that of
    the parameter, or that shape without one dimension (factored moments). Arrays of
    one element are replicated, and so are arrays of up to SMALL elements that belong to
    no parameter (counters, coefficients).

    Args:
      others: path patterns, as in `axes_from_paths`, for any other state. They take
        precedence.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_named)
    owners = {
        tuple(map(_key, path)): (tuple(unwrap(leaf).shape), tuple(names))
        for (path, leaf), names in zip(
            flat, treedef.flatten_up_to(params_axes), strict=True
        )
        if is_array(leaf)
    }
    compiled = _compile(others or {})

    def one(path, leaf):
        if not is_array(leaf):
            return None
        name, shape = path_name(path), tuple(unwrap(leaf).shape)
        for pattern, axes in compiled:
            if pattern.fullmatch(name):
                return axes
        if math.prod(shape) <= 1:
            return (None,) * len(shape)
        keys = tuple(map(_key, path))
        suffixes = (keys[start:] for start in range(len(keys) + 1))
        owner = next((suffix for suffix in suffixes if suffix in owners), None)
        if owner is not None and (names := _fit(shape, *owners[owner], keys)):
            return names
        # A tree that is one array has the empty path, a suffix of every path.
        if not owner and math.prod(shape) <= SMALL:
            return (None,) * len(shape)
        reason = "belongs to no parameter: no parameter's path is a suffix of its path"
        if owner:
            reason = (
                f"does not fit its parameter {'/'.join(owner)} of shape "
                f"{owners[owner][0]}"
            )
        pattern = f"{{{re.escape(name)!r}: {(None,) * len(shape)}}}"
        problem = f"optimizer state {name} of shape {shape} {reason}"
        raise UnknownState(
            f"{problem}. Name its dimensions: others={pattern} replicates it.",
            problem=problem,
            pattern=pattern,
        )

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=is_named)


def _fit(
    shape: tuple, owner_shape: tuple, names: Axes, keys: Sequence[str]
) -> Axes | None:
    if shape == owner_shape:
        return names
    fits = {
        i: names[:i] + names[i + 1 :]
        for i in range(len(owner_shape))
        if shape == owner_shape[:i] + owner_shape[i + 1 :]
    }
    if not fits:
        return None
    # Dimensions of one size leave a choice. optax factors the two largest dimensions in
    # this order: row statistics lack the largest and column statistics the other.
    if len(owner_shape) > 1:
        *_, second, largest = np.argsort(owner_shape).tolist()
        lacking = largest if "v_row" in keys else second if "v_col" in keys else None
        if lacking in fits:
            return fits[lacking]
    choices = list(fits.values())
    return choices[-1] if "v_row" in keys else choices[0]


def _compile(patterns: Mapping[str, Axes]) -> list[tuple[re.Pattern[str], Axes]]:
    result = []
    for pattern, axes in patterns.items():
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"path pattern {pattern!r} is not a regular expression: {error}"
            ) from None
        result.append((compiled, _names(axes, f"path pattern {pattern!r}")))
    return result


def _names(value: Any, where: str) -> Axes:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(
            f"{where}: logical axes must be a tuple with one name per dimension, got "
            f"{value!r}"
        )
    return tuple(value)


def _key(entry: Any) -> str:
    return path_name((entry,))


def _some(names: Sequence[str], limit: int = 8) -> str:
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
