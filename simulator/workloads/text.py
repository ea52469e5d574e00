"""Made-up text as content ids: what grows, what is shared and what is new."""

from simulator.workloads.runs import Ids, Runs


class Text:
    """A text of so many tokens, each of its runs of `block_tokens` tokens with a content id.

    Texts that grew from one another share the ids of the runs that were whole then: a run that two texts continue
    differently differs. That is exact for every worker whose blocks are whole runs.
    """

    __slots__ = ("_block_tokens", "_ids", "_ranges", "_tail", "tokens")

    def __init__(self, ids: Ids, block_tokens: int) -> None:
        self._ids = ids
        self._block_tokens = block_tokens
        self._ranges: tuple[range, ...] = ()
        self._tail = range(0)
        self.tokens = 0

    def grown(self, tokens: int) -> "Text":
        """This text with `tokens` new tokens behind it, which no other text has."""
        text = Text(self._ids, self._block_tokens)
        text.tokens = self.tokens + tokens
        if not tokens:
            text._ranges, text._tail = self._ranges, self._tail
            return text
        whole = text.tokens // self._block_tokens - self.tokens // self._block_tokens
        text._ranges = (*self._ranges, self._ids.fresh(whole))
        text._tail = self._ids.fresh(1 if text.tokens % self._block_tokens else 0)
        return text

    @property
    def blocks(self) -> Runs:
        """All ids; the last one may be of a short run."""
        return Runs((*self._ranges, self._tail))

    def blocks_after(self, prompt: "Text") -> Runs:
        """Ids of the whole runs that end behind `prompt`, from which this text has grown (`WorkRequest.output_blocks`)."""
        return Runs(self._ranges).part(prompt.tokens // self._block_tokens)
