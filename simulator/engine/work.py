"""What the device is busy with."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.profiles.profile import Profile
from simulator.engine.request import ActiveRequest


@dataclass(slots=True)
class PrefillChunk:
    """So many tokens of a request's prompt, and how many that is after padding."""

    request: ActiveRequest
    tokens: int
    padded: int


@dataclass(slots=True, kw_only=True)
class Work:
    """Equal steps, one after another.

    Attributes:
        start: when the first one began.
        duration: seconds per step.
        steps: how many; may be cut while they run.
        first_step: the engine's count of decode steps before the first.
        decodes: whether the steps are decode steps (too).
        streams: how many decode in it.
        prefills: chunks that end with the (then only) step.
        chunk_ends: seconds from the start at which the runs of one exclusive prefill end.
    """

    start: float
    duration: float
    steps: int = 1
    first_step: int
    decodes: bool = False
    streams: int = 0
    prefills: list[PrefillChunk] = field(default_factory=list)
    chunk_ends: list[float] = field(default_factory=list)

    def time(self, step: int) -> float:
        """When step `step` (from 1) ends."""
        return self.start + step * self.duration

    @property
    def end(self) -> float:
        """When the last step ends."""
        return self.time(self.steps)

    def done(self, now: float) -> int:
        """How many steps have ended at `now`."""
        if self.end <= now:
            return self.steps
        done = min(int((now - self.start) / self.duration), self.steps - 1)
        # The division may round to either side of what `time` says.
        while self.time(done) > now:
            done -= 1
        while self.time(done + 1) <= now:
            done += 1
        return done

    def cut(self, step: int) -> None:
        """End with the step after the engine's decode step `step`. Only a run of decodes can be cut."""
        if self.decodes:
            self.steps = min(self.steps, step - self.first_step + 1)

    def drop(self, request: ActiveRequest, now: float) -> None:
        """`request` is gone: its chunk comes to nothing, and an exclusive prefill ends with the run under way."""
        kept = [chunk for chunk in self.prefills if chunk.request is not request]
        if len(kept) < len(self.prefills) and self.chunk_ends:
            # When `now` is the exact end of a run, the next one has begun.
            run = bisect_left(self.chunk_ends, True, key=lambda end: self.start + end > now)
            self.duration = self.chunk_ends[min(run, len(self.chunk_ends) - 1)]
        self.prefills = kept


def prefill_work(profile: Profile, request: ActiveRequest, sizes: Sequence[int], start: float, step: int) -> Work:
    """The whole exclusive prefill of an admitted request, in runs of the padded `sizes`: load, overhead, compute."""
    ends: list[float] = []
    at = request.load_time + profile.overhead - profile.chunk_overhead
    for size in sizes:
        at += profile.chunk_overhead + size / profile.prefill_rate
        ends.append(at)
    chunk = PrefillChunk(request, request.target - request.cached, sum(sizes))
    return Work(start=start, duration=at, first_step=step, prefills=[chunk], chunk_ends=ends)
