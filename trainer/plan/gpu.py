"""Where the memory of a step on GPUs differs from that on TPUs.

weights     are cast as they are gathered, one block at a time. Those that are not
            gathered along their first dimension are first transposed, in float32, so
            that they are
head        its gradient is computed after all blocks', so the gradient of the logits
            and the head's input wait through the backward pass
products    of weight gradients come last in a block, so their operands wait too; a
            product by cuBLAS has a workspace
pipelines   hold gradients of one microbatch for all weights of a stage at once, and
            transpose gathered weights
"""

from .arrays import Values, Weights, of_each
from .memory import Moments, Part
from .sharded import FLOAT32


class GpuMoments(Moments):
    def scanned(self) -> dict[str, tuple[Part, ...]]:
        stream, logits = self.costs.residual, self.costs.logits
        blocks = Weights("gradients", "blocks", FLOAT32)
        common = (
            *self.sums(),
            *self.kept(),
            self.part("weights, transposed", "of all blocks", *self._transposed()),
            self.part("gradients", "of all blocks", blocks),
        )
        waiting = Values(logits), Values(stream)
        late = self.part("logits", "gradient, and the head's input", *waiting)
        if self.case.head_blocks > 1:
            gradient = Weights("gradients", self.costs.head.weight, self.case.itemsize)
            late = self.part("gradients", "of the head", gradient)
        words = "values and gradients"
        streams = Values(stream, self.fitted.block_streams)
        return {
            "head": (*common, *self.head()),
            "backward": (
                *common,
                late,
                self.gathered_block(),
                self.part("residual stream", f"{words} of one block", streams),
                self.working(),
                self._workspace(),
            ),
            "update": (*self.sums(), self.all_gradients()),
        }

    def pipelined(self) -> dict[str, tuple[Part, ...]]:
        moments, workspace = super().pipelined(), self._workspace()
        if self.late:  # has not been compared with a compiler
            return {name: (*parts, workspace) for name, parts in moments.items()}
        size, words = self.case.itemsize, "of the stage and outside"
        whole = Weights("compute", itemsize=size)
        table = (
            [Weights("compute", self.costs.table, FLOAT32)] if self.costs.table else []
        )
        # Gradients of look-ups are summed in float32.
        outside = (*self.outside_gradients(size), *table)
        gradients = {
            "head": self.part("gradients", "outside the blocks", *outside),
            "backward": self.part("gradients", "of one microbatch", whole, *table),
        }
        for name, gradient in gradients.items():
            replaced = ("weights, gathered", "gradients")
            moments[name] = (
                self.part("weights, gathered", words, whole),
                self.part("weights, transposed", words, *self._transposed()),
                gradient,
                *(p for p in moments[name] if p.name not in replaced),
                workspace,
            )
        return moments

    def working(self) -> Part:
        """Returns what else is alive when a block's weight gradients are computed."""
        if self.case.pipeline or not self.costs.waiting:
            return super().working()
        return self.part("working", "of one block", *of_each(self.costs.waiting))

    def _transposed(self) -> list[Weights]:
        """Returns the weights that are not gathered along their first dimension.

        A loop over blocks transposes them as they are stored. A pipeline gathers all,
        those of its blocks along with their layers, and transposes the result; of
        weights that stay sharded, only those that are gathered along their last.
        """
        case = self.case
        if self.costs.keeps_weights and not case.pipeline:
            return []  # gathered before the loop over blocks
        products = {p.weight for p in self.costs.products}
        found = []
        for path, weight in case.sharded.weights.items():
            if not case.pipeline and path not in products:
                continue
            stored, whole = weight.stored.dimensions, weight.whole.dimensions
            later = 1 if case.pipeline or not case.is_block(path) else 2
            if case.pipeline and any(d.mesh_axes for d in whole[1:]):
                later = len(whole) - 1
            dims = zip(stored[later:], whole[later:], strict=True)
            if any(a.mesh_axes != b.mesh_axes for a, b in dims):
                found.append(
                    Weights("compute", path, case.itemsize)
                    if case.pipeline
                    else Weights("params", path, FLOAT32)
                )
        return found

    def _workspace(self) -> Part:
        size = round(self.case.target.device.workspace)
        return Part("workspace", size, "of cuBLAS")
