"""Logical names for the dimensions of a tree's arrays, wherever they come from.

Three origins: names a tree carries itself (flax NNX variables), path patterns for trees
without names, and the parameters an optimizer's state belongs to.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .resolve import Axes


def path_name(path: Sequence[Any]) -> str:
    """A key path as "blocks/attention/query"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def is_named(leaf: Any) -> bool:
    """True for a variable that carries metadata, as flax NNX's do."""
    return hasattr(leaf, "get_metadata") and hasattr(leaf, "get_value")


def unwrap(leaf: Any) -> Any:
    """The array (or ShapeDtypeStruct) inside an NNX variable, or the leaf itself."""
    return leaf.get_value() if is_named(leaf) else leaf


def axes_of(tree: Any) -> Any:
    """The names a tree of NNX variables carries.

    Read from the variable's metadata `axes`, or from flax's own `out_sharding` (or
    `sharding_names`). A variable without either is an error: nothing is replicated
    because somebody forgot to name it.
    """
    missing = []

    def one(path, leaf):
        if not is_named(leaf):
            missing.append(path_name(path))
            return ()
        metadata = leaf.get_metadata()
        for key in ("axes", "out_sharding", "sharding_names"):
            if metadata.get(key) is not None:
                return tuple(metadata[key])
        missing.append(path_name(path))
        return ()

    axes = jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_named)
    if missing:
        raise ValueError(
            f"{len(missing)} arrays carry no logical axes: {_some(missing)}. Give the "
            "variable axes=(...) metadata, or pass axes=axes_from_paths(tree, {...})."
        )
    return axes


def axes_from_paths(tree: Any, patterns: Mapping[str, Axes]) -> Any:
    """Names for a tree that has none, by regular expressions on the paths.

    The first pattern that matches the whole path (as "blocks/0/query") gives the names.
    A path that no pattern matches, and a pattern that matches no path, are errors.
    """
    compiled = [(re.compile(pattern), axes) for pattern, axes in patterns.items()]
    fired: set[str] = set()
    unmatched = []

    def one(path, leaf):
        name = path_name(path)
        for pattern, axes in compiled:
            if pattern.fullmatch(name):
                fired.add(pattern.pattern)
                if len(axes) != unwrap(leaf).ndim:
                    raise ValueError(
                        f"{name}: pattern {pattern.pattern!r} names {len(axes)} "
                        f"dimensions {axes}, but its shape is "
                        f"{tuple(unwrap(leaf).shape)}"
                    )
                return tuple(axes)
        unmatched.append(name)
        return ()

    result = jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_named)
    if unmatched:
        raise ValueError(
            f"{len(unmatched)} paths match no pattern: {_some(unmatched)}. Add a "
            "pattern for them; (None, ...) leaves an array whole."
        )
    if idle := [pattern for pattern in patterns if pattern not in fired]:
        raise ValueError(
            f"{len(idle)} patterns match no path: {_some(idle)}. Remove them, or mend "
            "them: a pattern must match the whole path."
        )
    return result


def axes_for_state(state: Any, params: Any, params_axes: Any) -> Any:
    """Names for an optimizer's state, from the parameter each array belongs to.

    An array belongs to the parameter whose path ends its own path, so moments, masked
    and partitioned optimizers all resolve by structure. Its shape is the parameter's,
    or the parameter's with one dimension summed away (factored moments). Scalars and
    one-element placeholders have no names.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    owners = {
        tuple(map(_key, path)): (tuple(leaf.shape), tuple(names))
        for (path, leaf), names in zip(
            leaves, treedef.flatten_up_to(params_axes), strict=True
        )
    }

    def one(path, leaf):
        shape = tuple(leaf.shape)
        if leaf.size <= 1:
            return (None,) * leaf.ndim
        keys = tuple(map(_key, path))
        for start in range(len(keys)):
            owner = owners.get(keys[start:])
            if owner is not None and (names := _fit(shape, *owner)) is not None:
                return names
        raise ValueError(
            f"optimizer state {path_name(path)} of shape {shape} belongs to no "
            "parameter: no parameter's path ends its path with a shape that fits. Give "
            "its logical axes explicitly."
        )

    return jax.tree_util.tree_map_with_path(one, state)


def _fit(shape: tuple, owner_shape: tuple, names: Axes) -> Axes | None:
    if shape == owner_shape:
        return names
    for i in range(len(owner_shape)):
        if shape == owner_shape[:i] + owner_shape[i + 1 :]:
            return names[:i] + names[i + 1 :]
    return None


def _key(entry: Any) -> str:
    return path_name((entry,))


def _some(names: Sequence[str], limit: int = 8) -> str:
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
