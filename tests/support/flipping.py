"""The command line, on a machine where a bit of a weight flips at step 15."""

import sys

import jax
import numpy as np

from meshloom.trainer.run import replica_check


def flipped(x: jax.Array, *devices: int) -> jax.Array:
    """The array with one bit changed in the copies of some devices."""
    pieces = []
    for shard in x.addressable_shards:
        piece = np.array(shard.data)
        if shard.device.id in devices:
            piece.view(np.uint8).reshape(-1)[5] ^= 1
        pieces.append(jax.device_put(piece, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


def at_step(fault_step: int, device_of):
    """The check of replicas, on a state whose embedding differs on one device."""
    check = replica_check.CheckReplicas.__call__

    def with_fault(self, step, state):
        if step == fault_step:
            embedding = flipped(state.params["embedding"], device_of().id)
            state = state._replace(params=dict(state.params, embedding=embedding))
        check(self, step, state)

    return with_fault


if __name__ == "__main__":
    from meshloom.trainer.cli import main

    last = at_step(15, lambda: jax.devices()[-1])
    replica_check.CheckReplicas.__call__ = last
    sys.exit(main(sys.argv[1:]))
