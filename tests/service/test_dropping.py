"""What is dropped is counted, for whoever says what was removed."""

import numpy as np

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.server.staging import Pool, Staging

LAYOUT = make_layout([Leaf("w", (8, 4), "float32", (None, None))], block_bytes=32)


def test_the_bytes_of_a_dead_incarnation_are_counted_and_used_again():
    pool = Pool()
    staging = Staging("run", LAYOUT, range(len(LAYOUT.blocks)), pool)
    box = LAYOUT.blocks[0].slabs[0].box
    piece = np.ones(box.shape, np.float32)
    for key in ((0, 1, 1), (1, 1, 1), (1, 1, 2)):
        staging.add(key, 0, 0, box.start, piece)
    assert staging.drop(1, 1, None) == 2 * piece.nbytes
    assert staging.keys() == [(0, 1, 1)]
    staging.add((1, 1, 3), 0, 0, box.start, piece)  # late: it is dead
    assert staging.keys() == [(0, 1, 1)] and staging.drop(1, 1, None) == 0
    made = pool.num_made
    staging.add((1, 2, 1), 0, 0, box.start, piece)
    assert pool.num_made == made
