"""A workload's content ids to the block hashes that engines and the prefix map know.

The hashes are a chain of the gateway's own `Hasher` over content ids in place of token ids. Where a worker's blocks are as
long as the workload's runs, or a multiple, a block's hash is that of the ids in it. Where they are shorter, a run's blocks
are numbered upward from its hash with the low bits cleared: they depend on the run and on all before it, as a chain's
blocks do, and cost no hashing.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Final

from gateway.prompt.blocks import HASH_BYTES, Chain, Hasher
from simulator.workloads.workload import WorkRequest

_ID_TOKENS: Final = 2
"""A content id is hashed as two 32-bit tokens."""
_ID_BYTES: Final = 8
_MAX_KEPT: Final = 2_000_000
"""Hashes kept for sessions' next turns: 80 MB at most."""


class RequestKeys:
    """The keys of one request.

    Attributes:
        chain: of the prompt, as the gateway makes it.
        blocks: of all full blocks of prompt and answer, as the engine wants them.
        known: how many of `blocks`, from the start, somebody else may ask for.
    """

    __slots__ = ("blocks", "chain", "known")

    def __init__(self, chain: Chain, blocks: list[int], known: int) -> None:
        self.chain = chain
        self.blocks = blocks
        self.known = known


class KeyMaker:
    """Makes the keys of a workload's requests for workers of one block size.

    A session's next turn costs what is new in it. Answers whose content the workload does not know get keys above all hashes,
    never used twice.
    """

    def __init__(self, hasher: Hasher, *, run_tokens: int, block_size: int) -> None:
        """`run_tokens`: tokens per content id of the workload.

        Raises:
            ValueError: neither is a multiple of the other.
        """
        if run_tokens % block_size and block_size % run_tokens:
            raise ValueError(
                f"blocks of {block_size} tokens neither divide the workload's runs of {run_tokens} tokens nor are a multiple "
                f"of them; choose a block size that does"
            )
        self._hasher = hasher
        self._run_tokens = run_tokens
        self._block_size = block_size
        self._per_run = max(1, run_tokens // block_size)  # blocks in a run, a power of two or not
        self._per_block = max(1, block_size // run_tokens)  # runs in a block
        self._low = -1 << (self._per_run - 1).bit_length()
        self._roots: dict[str, int] = {}
        self._sessions: OrderedDict[tuple[str, str], tuple[bytes, list[int]]] = OrderedDict()
        self._kept = 0
        self._unique = 1 << 8 * HASH_BYTES

    def keys(self, request: WorkRequest) -> RequestKeys:
        """The keys of one request."""
        size = self._block_size
        prompt, total = request.prompt_tokens, request.prompt_tokens + request.output_tokens
        ids = array("q", request.blocks)
        covered = prompt
        if request.output_blocks:
            whole = prompt // self._run_tokens
            ids = ids[:whole]
            ids.extend(request.output_blocks)
            covered = min(total, max(prompt, len(ids) * self._run_tokens))
        hashes = self._hashes(request, ids)
        if self._per_run == 1:
            known = min(covered // size, len(hashes))
            blocks = hashes[:known]
        else:
            known = covered // size
            low, per_run = self._low, self._per_run
            blocks = list(chain.from_iterable([range(each & low, (each & low) + per_run) for each in hashes]))
            del blocks[known:]
        unknown = total // size - known
        if unknown > 0:
            blocks.extend(range(self._unique, self._unique + unknown))
            self._unique += unknown
        return RequestKeys(Chain(size, blocks[: prompt // size], prompt), blocks, known)

    def _hashes(self, request: WorkRequest, ids: Sequence[int]) -> list[int]:
        """The chain over `ids`, from where the session's last turn differs."""
        packed = array("q", ids).tobytes()
        unit = self._per_block * _ID_BYTES
        key = request.model, request.session
        before, hashes = self._sessions.pop(key, (b"", []))
        self._kept -= len(hashes)
        same = _common(before, packed) // unit
        parent = hashes[same - 1] if same else self._root(request.model)
        new = self._hasher.blocks(parent, packed[same * unit :], self._per_block * _ID_TOKENS)
        hashes = hashes[:same] + new
        self._sessions[key] = packed, hashes
        self._kept += len(hashes)
        while self._kept > _MAX_KEPT:
            _, (_, dropped) = self._sessions.popitem(last=False)
            self._kept -= len(dropped)
        return hashes

    def _root(self, model: str) -> int:
        root = self._roots.get(model)
        if root is None:
            root = self._roots[model] = self._hasher.root(model)
        return root


def _common(first: bytes, second: bytes) -> int:
    """How many leading bytes are the same."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
