"""Logical names for the dimensions of a tree's arrays, wherever they come from.

Three origins: names a tree carries itself (NNX variables, Linen's boxes), path patterns
for trees without names, and the parameters an optimizer's state belongs to.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from .resolve import Axes

# The most elements an array of no parameter may have to be replicated unasked.
SMALL = 1024


def path_name(path: Sequence[Any]) -> str:
    """A key path as "blocks/attention/query"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def is_named(leaf: Any) -> bool:
    """True for what carries names beside an array: NNX variables, Linen's boxes."""
    return _is_variable(leaf) or _is_box(leaf)


def _is_variable(leaf: Any) -> bool:
    return hasattr(leaf, "get_metadata") and hasattr(leaf, "get_value")


def _is_box(leaf: Any) -> bool:
    """True for flax's nn.Partitioned and nn.LogicallyPartitioned."""
    return hasattr(leaf, "replace_boxed") and hasattr(leaf, "names")


def unwrap(leaf: Any) -> Any:
    """Returns the array (or ShapeDtypeStruct) in a variable or box, or the leaf."""
    if _is_variable(leaf):
        return leaf.get_value()
    return leaf.value if _is_box(leaf) else leaf


def rewrap(leaf: Any, value: Any) -> Any:
    """Returns the variable or box with another array in it."""
    if _is_variable(leaf):
        return leaf.replace(value)
    return leaf.replace_boxed(value) if _is_box(leaf) else value


def is_array(leaf: Any) -> bool:
    """True for arrays and their shapes; trees of equinox hold functions and numbers."""
    array = unwrap(leaf)
    return hasattr(array, "shape") and hasattr(array, "dtype")


def axes_of(tree: Any) -> Any:
    """Returns the names that a tree of NNX variables or Linen's boxes carries.

    Read from a variable's metadata `axes`, or from flax's own `out_sharding` (or
    `sharding_names`), or from the `names` of a box. An array without them is an error:
    nothing is replicated because somebody forgot to name it. A scalar has no dimension
    to name, and what is not an array has the names None.
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
            f"{len(missing)} arrays carry no logical axes: {_some(missing)}. Give the "
            "variable axes=(...) metadata, or pass axes=axes_from_paths(tree, {...})."
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
    """Returns names for a tree that has none, by regular expressions on the paths.

    The first pattern that matches the whole path (as "blocks/0/query") gives the names.
    An array that no pattern matches keeps the names it carries (NNX, Linen); one that
    carries none, and a pattern that matches no array, are errors. What is not an array
    (a function or a number in a tree of equinox) has the names None.
    """
    compiled = _compile(patterns)
    fired: set[str] = set()
    unmatched = []

    def one(path, leaf):
        if not is_array(leaf):
            return None
        name = path_name(path)
        for pattern, axes in compiled:
            if pattern.fullmatch(name):
                fired.add(pattern.pattern)
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
    if idle := [pattern for pattern in patterns if pattern not in fired]:
        raise ValueError(
            f"{len(idle)} patterns match no path of an array: {_some(idle)}. Remove "
            "them, or fix them: a pattern must match the whole path, and the first "
            "that does takes it."
        )
    return result


class UnknownState(ValueError):
    """An array of an optimizer's state that belongs to no parameter.

    Attributes:
      found: what it is; pattern: how to leave it replicated, as `others` takes it.
    """

    def __init__(self, message: str, *, found: str, pattern: str):
        super().__init__(message)
        self.found, self.pattern = found, pattern


def axes_for_state(
    state: Any,
    params: Any,
    params_axes: Any,
    *,
    others: Mapping[str, Axes] | None = None,
) -> Any:
    """Names for an optimizer's state, from the parameter each array belongs to.

    An array belongs to the parameter with the longest path that ends its own path, so
    moments, masked and partitioned optimizers all resolve by structure. Its shape is
    the parameter's, or the parameter's with one dimension summed away (factored
    moments). One-element placeholders have no names, nor have arrays of no parameter
    up to SMALL elements (counters, coefficients).

    Args:
      others: path patterns, as in `axes_from_paths`, for state that follows neither
        form. They come first.
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
        ends = (keys[start:] for start in range(len(keys) + 1))
        owner = next((end for end in ends if end in owners), None)
        if owner is not None and (names := _fit(shape, *owners[owner], keys)):
            return names
        # A tree that is one array has the empty path, which ends every path.
        if not owner and math.prod(shape) <= SMALL:
            return (None,) * len(shape)
        found = "belongs to no parameter: no parameter's path ends its path"
        if owner:
            whose = owners[owner][0]
            found = f"does not fit its parameter {'/'.join(owner)} of shape {whose}"
        pattern = f"{{{re.escape(name)!r}: {(None,) * len(shape)}}}"
        found = f"optimizer state {name} of shape {shape} {found}"
        raise UnknownState(
            f"{found}. Name its dimensions: others={pattern} replicates it.",
            found=found,
            pattern=pattern,
        )

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=is_named)


def _fit(
    shape: tuple, owner_shape: tuple, names: Axes, keys: Sequence[str]
) -> Axes | None:
    if shape == owner_shape:
        return names
    fits = [
        names[:i] + names[i + 1 :]
        for i in range(len(owner_shape))
        if shape == owner_shape[:i] + owner_shape[i + 1 :]
    ]
    if not fits:
        return None
    # Of a square matrix both sums have one shape. Row statistics keep the first of the
    # two dimensions, column statistics the second.
    return fits[-1] if "v_row" in keys else fits[0]


def _compile(patterns: Mapping[str, Axes]) -> list[tuple[re.Pattern[str], Axes]]:
    result = []
    for pattern, axes in patterns.items():
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"path pattern {pattern!r} is no regular expression: {error}"
            ) from None
        result.append((compiled, _names(axes, f"path pattern {pattern!r}")))
    return result


def _names(value: Any, where: str) -> Axes:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(
            f"{where}: logical axes must be a tuple with a name for each dimension, "
            f"got {value!r}"
        )
    return tuple(value)


def _key(entry: Any) -> str:
    return path_name((entry,))


def _some(names: Sequence[str], limit: int = 8) -> str:
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
