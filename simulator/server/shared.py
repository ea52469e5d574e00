"""What simulated workers of one process have in common: an l2 that all of them read and write, and the way to each other's memory."""

from typing import TYPE_CHECKING

from simulator.engine import Tier

if TYPE_CHECKING:
    from simulator.server.worker import BlockOrigin, SimulatedWorker


class SharedMemory:
    """Give one to each of several `SimulatedWorker`; their blocks must be of one size.

    Attributes:
        l2: theirs together. Whoever stores or evicts a block there announces it.
        origins: where blocks' tokens are, by digest: what one has computed, another can announce.
        workers: by host and port, once they have started.
    """

    def __init__(self, l2_blocks: int) -> None:
        """`l2_blocks`: what the l2 holds; 0: there is none."""
        self.l2 = Tier(l2_blocks)
        self.origins: dict[bytes, BlockOrigin] = {}
        self.workers: dict[str, SimulatedWorker] = {}
