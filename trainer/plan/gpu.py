"""Where a step on GPUs differs from one on TPUs, read off programs for H100s.

Memory, beside what TPUs need too:

  weights     are cast as they are gathered, one block at a time. Those whose gathered
              dimension is not their first are first copied whole, in float32, into an
              order in which it is
  head        its gradient is computed after all blocks', so the gradient of the logits
              and the head's input wait through the backward pass
  products    of weight gradients come last in a block, so their operands wait too; a
              product by cuBLAS has a workspace
  pipelines   have gradients of one microbatch for all weights of a stage at once, and
              copy gathered weights into another order
"""

from .arrays import Values, Weights, of_each
from .cutting import FLOAT32
from .memory import Part, outside_gradients, part
from .scenario import Case

Moments = dict[str, tuple[Part, ...]]


def gathers_of_head(case: Case) -> int:
    """An embedding that is the head too: GPUs gather it for each, TPUs once."""
    is_gpu = case.target.device.platform == "gpu"
    return 2 if is_gpu and case.costs.is_tied else 1


def on_gpu(case: Case, moments: Moments) -> Moments:
    """The moments of a step, with what GPUs do otherwise."""
    return _pipeline(case, moments) if case.pipeline else _scanned(case, moments)


def _scanned(case: Case, moments: Moments) -> Moments:
    size = {p.name: p for p in moments["backward"]}
    kept = tuple(p for p in moments["backward"] if p.name in ("gradient sums", "kept"))
    transposed = part(case, "weights, transposed", "of all blocks", *_transposed(case))
    stream, logits = case.costs.residual, case.costs.logits
    head = tuple(
        p for p in moments["head"] if p.name in ("logits", "weights, gathered")
    )
    blocks = Weights("gradients", "blocks", FLOAT32)
    gradients = part(case, "gradients", "of all blocks", blocks)
    return moments | {
        "head": (
            *kept,
            transposed,
            gradients,
            *head,
            part(
                case,
                "residual stream",
                "before and after the last norm",
                Values(stream, 2),
            ),
        ),
        "backward": (
            *kept,
            transposed,
            gradients,
            part(
                case,
                "logits",
                "gradient, and the head's input",
                Values(logits),
                Values(stream),
            ),
            size["weights, gathered"],
            part(
                case,
                "residual stream",
                "values and gradients of one block",
                Values(stream, 5),
            ),
            _working(case, size["working"]),
            _workspace(case),
        ),
    }


def _pipeline(case: Case, moments: Moments) -> Moments:
    if case.config.pipeline.gather == "microbatch":  # not compared with a compiler
        ends = (_workspace(case),)
        return {name: (*parts, *ends) for name, parts in moments.items()}
    size = case.itemsize
    whole, words = Weights("compute", itemsize=size), "of the stage and outside"
    outside = outside_gradients(case, size)
    summed = Weights("compute", case.costs.table, FLOAT32)  # of look-ups
    gradients = {
        "head": part(case, "gradients", "outside the blocks", *outside, summed),
        "backward": part(case, "gradients", "of one microbatch", whole, summed),
    }
    found = {}
    for moment in gradients:
        others = (
            p
            for p in moments[moment]
            if p.name not in ("weights, gathered", "gradients")
        )
        found[moment] = (
            part(case, "weights, gathered", words, whole),
            part(case, "weights, transposed", words, *_transposed(case)),
            gradients[moment],
            *others,
            _workspace(case),
        )
    return moments | found


def _transposed(case: Case) -> list[Weights]:
    """Of weights, those that are gathered along another dimension than their first.

    A loop over blocks copies them as they are stored. A pipeline gathers all, those of
    its blocks along with their layers, and copies what was gathered; of weights that
    stay cut, only those that are gathered along their last.
    """
    if case.costs.keeps_weights and not case.pipeline:
        return []  # gathered whole before the loop over blocks
    products = {p.weight for p in case.costs.products}
    found = []
    for stored, whole in zip(case.params.arrays, case.compute.arrays, strict=True):
        if not case.pipeline and stored.path not in products:
            continue
        later = 1 if case.pipeline or not case.is_block(stored.path) else 2
        if case.pipeline and any(d.mesh_axes for d in whole.dimensions[1:]):
            later = len(whole.dimensions) - 1
        dims = zip(stored.dimensions[later:], whole.dimensions[later:], strict=True)
        if any(a.mesh_axes != b.mesh_axes for a, b in dims):
            tree, size = (
                ("compute", case.itemsize) if case.pipeline else ("params", FLOAT32)
            )
            found.append(Weights(tree, stored.path, size))
    return found


def _workspace(case: Case) -> Part:
    return Part("workspace", round(case.target.device.workspace), "of cuBLAS")


def _working(case: Case, unfused: Part) -> Part:
    """What else is alive when a block's weight gradients are computed."""
    if not case.costs.waiting:
        return unfused
    return part(case, "working", "of one block", *of_each(case.costs.waiting))
