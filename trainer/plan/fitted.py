"""Every number that the closed form owes to compiled programs, in one table.

All else in the closed form follows from shapes, rules and schedules. These numbers say
what a compiler makes of them: how many copies of the residual stream it stores at a
peak, how often arrays pass through HBM, what it overlaps. They hold for one version of
a compiler, so each row says which, on which programs, and what error was left, and
`make tpu-test` compiles a small step to see whether they still do
(tests/plan/test_fitted.py).

benchmarks/fitted.py shows on which of them the order of a search, or what fits,
depends. A number that changes neither, nor keeps a forecast of docs/plan.md within 10 %
of the compiler, has no place here.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The numbers of one platform.

    Where they come from:
      programs: the programs of `compiler` that they were read off.
      peak_error, step_error: the largest relative error left, over the tables of
        docs/plan.md; of memory against the compiler's peak, of time against the walk
        over the program.

    Memory, in arrays of the shape of the residual stream:
      head_streams: at the head.
      block_streams: while a block runs backward.
      stage_streams: between the stages of a pipeline; `split_streams` more where heads
        are sharded and blocks are recomputed.

    Memory, otherwise:
      block_logits: arrays of the shape of a block's logits, of a head in blocks.
      loop_devices: a ring over more devices than this is a loop, whose operands are
        stored; a shorter one is unrolled.

    Time, in passes through HBM:
      stream_passes: of the residual stream in norms and sums of a block.
      working_passes: of what else a block's backward pass has alive.
      gather_passes: of gathered weights, to reorder them.
      gradient_passes: of a stage's float32 gradients, each time they are added.
      score_passes: of stored attention scores; `repeated_score_passes` more where they
        are recomputed.

    Overlap:
      gathering_devices: whose gathers of weights overlap with products; () for none,
        None for all.
      hidden_sums: the share of tensor-parallel sums that overlaps with products.
    """

    compiler: str
    programs: str
    peak_error: float
    step_error: float
    head_streams: int
    block_streams: int
    stream_passes: float
    working_passes: float
    gather_passes: float
    gradient_passes: float
    gathering_devices: tuple[str, ...] | None
    hidden_sums: float
    block_logits: int = 2
    stage_streams: int = 4
    split_streams: int = 4
    loop_devices: int = 4
    score_passes: float = 5
    repeated_score_passes: float = 2

    def overlaps_gathers(self, device: str) -> bool:
        return self.gathering_devices is None or device in self.gathering_devices


TPU = Fitted(
    compiler="libtpu 0.0.51",
    programs="gpt2, 1b, 3b, 7b and 8b on v5e, v5p and v6e, 16 to 256 chips: 22 without "
    "and 20 with `sequence`, and 6 of `gather`, slices and time",
    peak_error=0.094,
    step_error=0.04,
    head_streams=3,
    block_streams=3,
    stream_passes=16,
    working_passes=2,
    gather_passes=0,
    gradient_passes=4,
    gathering_devices=("v5e",),
    hidden_sums=0,
    block_logits=3,
)
GPU = Fitted(
    compiler="XLA of jax-cuda12-plugin 0.10.2 with cuDNN 9.27",
    programs="gpt2, 1b, 7b and 8b on 16 and 64 H100s and 16 A100s: 22, none with "
    "`sequence`, of which a 23rd was 19 % off; time off nine of 64 H100s",
    peak_error=0.079,
    step_error=0.086,
    head_streams=2,
    block_streams=5,
    stream_passes=36,
    working_passes=0,
    gather_passes=2,
    gradient_passes=12,
    gathering_devices=None,
    hidden_sums=0.22,
)


def fitted_to(platform: str) -> Fitted:
    """Returns the numbers of a platform; a CPU's step is modelled as a TPU's."""
    return GPU if platform == "gpu" else TPU
