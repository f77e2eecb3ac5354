"""The blocks of one job that one server holds, without any network.

Commit n makes version n from version n - 1, out of place: a version never changes, and
can be read as long as it is kept. `merge` computes the mean of a set of contributions,
`apply` updates the parameters with it; both can be repeated.

`commit_lock` lets one commit, drop, load or move of blocks happen at a time.
"""

import functools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..blocks.box import Box
from ..blocks.dtypes import dtype_of
from ..blocks.layout import Layout
from ..wire import codecs
from ..wire.errors import Refused
from . import block_files
from .chain import Chain
from .merging import Addend, mean_of, sum_of_squares
from .staging import Key, Pool, Staged, Staging, key_of
from .update import Axes, Compiled, MakeUpdate, no_optimizers, update_of
from .versions import Version, Versions, read_only


class Merged(NamedTuple):
    """The mean of the contributions of a commit that is not applied yet."""

    version: int
    mean: dict[int, list[np.ndarray]]


class BlockStore:
    """Blocks of the parameters with their optimizer state and staged contributions.

    Attributes:
      layout: of the job.
      owned: indices of the blocks that are held here.
      counted: those of them that count in sums over all servers: each block once.
      accepted: those of which pieces are staged: also some that are yet to come.
      versions: of the blocks.
      opt_states: of the blocks, of the newest version.
      staging: contributions that are not committed yet.
      push_codec: how their pieces are packed.
      chain: of the versions, which are what was published of exact parameters.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        owned: Iterable[int] | None = None,
        *,
        make_update: MakeUpdate = no_optimizers,
        version: int | None = None,
    ):
        """Args:
        spec: JSON of the job: all but what concerns data and config is used here.
        owned: indices of the blocks held here; all by default.
        make_update: makes the update of kind "optimizer".
        version: the newest one, for a store without blocks that will get some.
        """
        self.layout = Layout.from_json(spec["layout"])
        everything = range(len(self.layout.blocks))
        self.owned = tuple(sorted(everything if owned is None else set(owned)))
        self.counted = frozenset(self.owned)
        self.accepted = set(self.owned)  # changed in place: staging looks at it
        self._name = str(spec["job"])
        self._compensation = float(spec["policy"].get("compensation", 0.0))
        self.push_codec = codecs.of_job(spec, "push")
        self.chain = Chain(codecs.of_job(spec, "pull"), self.layout)
        self._update = Compiled(update_of(spec, make_update))
        self.commit_lock = threading.RLock()
        self._pool = Pool()
        self.staging = Staging(self._name, self.layout, self.accepted, self._pool)
        self._merged: Merged | None = None
        self.versions = Versions(self._name, self.layout)
        self.opt_states: dict[int, Any] = {}
        if not self.owned:  # few blocks and many servers: nothing will ever arrive
            self.versions.reset(version or 0, {})

    @property
    def newest(self) -> int | None:
        """The newest version; None until the initial parameters have arrived."""
        return self.versions.newest

    def stage(
        self,
        learner: int,
        incarnation: int,
        round: int,
        block: int,
        slab: int,
        start: Sequence[int],
        array: np.ndarray,
    ) -> None:
        """Adds a piece of a contribution. The same piece again changes nothing.

        Round 0 is the initial parameters: the first learner whose pieces are complete
        makes version 0. Later pieces of round 0 are ignored.

        Args:
          start: of the piece in the coordinates of its leaf.
        """
        key = (learner, incarnation, round)
        if round == 0 and self.newest is not None:
            return
        self.staging.add(key, block, slab, start, array)
        if round == 0 and self.is_complete(*key):
            self._initialize(key)

    def is_complete(
        self, learner: int, incarnation: int, round: int, fragment: int | None = None
    ) -> bool:
        """Returns whether all pieces for this server arrived (None: of all blocks)."""
        if round == 0 and self.newest is not None:
            return True
        staged = self.staging.get((learner, incarnation, round))
        blocks = self._blocks_of(fragment)
        return not blocks or (staged is not None and staged.missing(blocks) is None)

    def merge(
        self,
        version: int,
        fragment: int,
        contributions: Sequence[Mapping[str, Any]],
        divisor: float,
    ) -> dict[str, Any]:
        """Computes the mean for the commit that makes `version`.

        Args:
          contributions: each with learner, incarnation, round, base (version), and
            coefficient; with compensation also weight.

        Returns:
          The sum of squares over the blocks that count, and whether it is finite.
        """
        with self.commit_lock:
            newest = self._check_next(version, "merge")
            self._release_merged()
            blocks = self._blocks_of(fragment)
            found = []
            if blocks:
                in_order = sorted(contributions, key=key_of)
                found = [
                    (c, self.staging.complete(key_of(c), blocks)) for c in in_order
                ]
            means: dict[int, list[np.ndarray]] = {}
            total = 0.0
            for block in blocks:
                means[block] = mean_of(
                    [self._addend(block, c, staged) for c, staged in found],
                    divisor,
                    self.chain.exact(block, self.versions[newest][block]),
                    self._pool,
                    compensation=self._compensation,
                )
                if block in self.counted:
                    total += sum(map(sum_of_squares, means[block]))
            self._merged = Merged(version, means)
        return {"sum_of_squares": total, "finite": math.isfinite(total)}

    def apply(
        self,
        version: int,
        scale: float,
        step: int,
        share: float,
        keep: Iterable[int] = (),
        drop: Iterable[Sequence[int | None]] = (),
    ) -> dict[str, Any]:
        """Makes `version` from the merged mean; again, it changes nothing.

        Args:
          scale: of the mean; 0 skips the update: parameters and optimizer state stay.
          step: index for the learning-rate schedule.
          share: of a full update.
          keep: versions that stay readable, besides the newest.
          drop: (learner, incarnation, round) of contributions that are done with; a
            round of None means all of that incarnation.
        """
        with self.commit_lock:
            if self.newest is None or version > self.newest:
                newest = self._check_next(version, "apply")
                new = dict(self.versions[newest])
                if scale != 0:
                    new |= self._apply_merged(version, new, scale, step, share)
                self.versions.add(version, new)
                self._release_merged()
            self.versions.forget_except(keep)
            self.drop(drop)
            return {"version": self.newest}

    def drop(self, keys: Iterable[Sequence[Any]]) -> int:
        """Forgets staged contributions, as `apply` does; returns their bytes."""
        with self.commit_lock:
            return sum(self.staging.drop(*key) for key in keys)

    def read(self, version: int, leaf: int, box: Box) -> np.ndarray:
        """Returns the elements of a box, read-only."""
        return self.versions.read(version, leaf, box)

    def digest_lanes(self, version: int) -> dict[str, list[int]]:
        """Returns {path: [sum, sum]} over the blocks that count; see blocks/digest."""
        return self.versions.digest_lanes(version, sorted(self.counted))

    def save(self, folder: str | Path, version: int) -> dict[str, Any]:
        """Writes the newest version and the optimizer state, one file for each block.

        Servers of one job save into one folder; commits go on meanwhile. Blocks that do
        not count are written by another server: here, only their CRC32C is computed.

        Returns:
          {"crcs": {block: CRC32C of parameters and optimizer state}}.
        """
        with self.commit_lock:
            if version != self.newest:
                raise Refused(
                    f"save of version {version} of job {self._name!r}: the newest is "
                    f"{self.newest}, and only its optimizer state is there"
                )
            blocks = self.versions[version]
            opt_states = self.chain.states(blocks, self.opt_states)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        crcs = {}
        for block in self.owned:
            params = dict(zip(self._axes(block), blocks[block], strict=True))
            where = folder if block in self.counted else None
            crcs[block] = block_files.write_state(
                where, block, self._facts(version), params, opt_states[block]
            )
        return {"crcs": crcs}

    def load(self, folder: str | Path, version: int) -> None:
        """Reads what servers saved, however many; forgets what was here before."""
        blocks: Version = {}
        opt_states: dict[int, Any] = {}
        for block in self.owned:
            axes = self._axes(block)
            params, opt_states[block] = block_files.read_state(
                Path(folder),
                block,
                self._facts(version),
                axes,
                self.chain.template(functools.partial(self._update.init, axes=axes)),
            )
            blocks[block] = tuple(map(read_only, params.values()))
        with self.commit_lock:
            self._release_merged()
            self.staging.clear()
            self.opt_states = self.chain.begin(version, opt_states)
            self.versions.reset(version, blocks)

    def place(self, blocks: Iterable[int], counted: Iterable[int]) -> None:
        """Says which blocks belong here: others are removed, new ones may arrive.

        Args:
          counted: those that count in sums over all servers.
        """
        wanted = set(blocks)
        with self.commit_lock:
            gone = [block for block in self.owned if block not in wanted]
            self.owned = tuple(block for block in self.owned if block in wanted)
            self.counted = frozenset(counted)
            self.accepted |= wanted
            self.accepted &= wanted
            self.versions.remove_blocks(gone)
            self.chain.remove_blocks(gone)
            for block in gone:
                self.opt_states.pop(block, None)

    def adopt(
        self,
        block: int,
        versions: dict[int, tuple[np.ndarray, ...]],
        opt_state: list[np.ndarray],
        exact: tuple[np.ndarray, ...],
    ) -> None:
        """Takes over a block of another server, with all that belongs to it.

        Args:
          exact: the newest parameters, if what was published of them differs.
        """
        newest = self.newest
        assert newest in versions, (newest, versions.keys())
        axes = self._axes(block)
        params = dict(zip(axes, versions[newest], strict=True))
        structure = jax.tree.structure(self._update.init(params, axes))
        leaves = map(jax.numpy.asarray, opt_state)
        self.opt_states[block] = jax.tree.unflatten(structure, leaves)
        self.chain.add_block(newest, block, exact)
        self.versions.add_block(block, versions)
        self.owned = tuple(sorted({*self.owned, block}))

    def status(self) -> dict[str, Any]:
        """Returns what the store holds, for people and for the coordinator."""
        return {
            "job": self._name,
            "version": self.newest,
            "versions": self.versions.numbers(),
            "blocks": len(self.owned),
            "held": list(self.owned),
            "bytes": sum(map(self.layout.block_bytes, self.owned)),
            "staged": [list(key) for key in self.staging.keys()],
        }

    def _blocks_of(self, fragment: int | None) -> list[int]:
        fragments = self.layout.fragments
        return [b for b in self.owned if fragment is None or fragments[b] == fragment]

    def _axes(self, block: int) -> Axes:
        leaves = (self.layout.leaves[s.leaf] for s in self.layout.blocks[block].slabs)
        return {leaf.path: leaf.axes for leaf in leaves}

    def _facts(self, version: int) -> dict[str, Any]:
        return {"version": version, "layout": self.layout.digest}

    def _check_next(self, version: int, verb: str) -> int:
        """Returns the newest version; refuses any but the one after it."""
        if self.newest is None:
            raise Refused(
                f"{verb} of version {version} of job {self._name!r}: the initial "
                "parameters (round 0) have not arrived"
            )
        if version != self.newest + 1:
            raise Refused(
                f"{verb} of version {version} of job {self._name!r}: the newest here "
                f"is {self.newest}, so only {self.newest + 1} can follow"
            )
        return self.newest

    def _initialize(self, key: Key) -> None:
        """Makes version 0 of the staged parameters."""
        with self.commit_lock:
            staged = self.staging.get(key)
            if staged is None or self.newest is not None:
                return
            version: Version = {}
            for block in self.owned:
                slabs = self.layout.blocks[block].slabs
                dtypes = [dtype_of(self.layout.leaves[s.leaf].dtype) for s in slabs]
                version[block] = tuple(
                    read_only(array.astype(dtype))
                    for array, dtype in zip(staged.arrays(block), dtypes, strict=True)
                )
                axes = self._axes(block)
                params = dict(zip(axes, version[block], strict=True))
                self.opt_states[block] = self._update.init(params, axes)
            self.versions.reset(0, version)
            self.staging.clear(round=0)

    def _addend(self, block: int, facts: Mapping[str, Any], staged: Staged) -> Addend:
        arrays, coefficient = staged.arrays(block), facts["coefficient"]
        if not self._compensation or facts["base"] == self.newest:
            return Addend(arrays, coefficient)
        base = self.versions[facts["base"]][block]
        return Addend(arrays, coefficient, base, facts["weight"])

    def _apply_merged(
        self, version: int, old: Version, scale: float, step: int, share: float
    ) -> Version:
        """Updates the blocks of the merged fragment; returns them."""
        if self._merged is None or self._merged.version != version:
            raise Refused(
                f"apply of version {version} of job {self._name!r}: its contributions "
                "are not merged here; merge first"
            )
        results = {}
        for block, arrays in self._merged.mean.items():
            axes = self._axes(block)
            results[block] = self._update.update(
                dict(zip(axes, arrays, strict=True)),
                self.opt_states[block],
                dict(zip(axes, self.chain.exact(block, old[block]), strict=True)),
                axes,
                scale=scale,
                step=step,
                share=share,
            )
        jax.block_until_ready(results)  # the buffers of the mean are used again
        new: Version = {}
        for block, (params, opt_state) in results.items():
            # By path: jax sorts dictionaries, slabs are in the order of the block.
            exact = (read_only(np.asarray(params[path])) for path in self._axes(block))
            new[block] = self.chain.publish(version, block, old[block], tuple(exact))
            self.opt_states[block] = opt_state
        return new

    def _release_merged(self) -> None:
        merged, self._merged = self._merged, None
        if merged is not None:
            for array in (x for arrays in merged.mean.values() for x in arrays):
                self._pool.give(array)
