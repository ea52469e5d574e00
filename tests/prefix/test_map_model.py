"""The prefix map against the plainest thing that could be right: a set of (holder, tier, hash) with deadlines."""

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from gateway.prefix.holders import Tier
from gateway.prefix.map import EXPECTED_SECONDS, PrefixMap

# A tree of blocks: chain i shares its first blocks with others.
LENGTH = 12
CHAINS = [
    [10_000 + each for each in range(LENGTH)],
    [10_000 + each for each in range(5)] + [20_000 + each for each in range(5, LENGTH)],
    [10_000 + each for each in range(5)]
    + [20_000 + each for each in range(5, 8)]
    + [30_000 + each for each in range(8, LENGTH)],
    [40_000 + each for each in range(LENGTH)],
]
PARENT = {child: parent for chain in CHAINS for parent, child in itertools.pairwise(chain)}

chains = st.sampled_from(CHAINS)
slow_tiers = st.sampled_from([Tier.L1, Tier.L2])
ttls = st.none() | st.sampled_from([0.5, 3.0])


def descendants(block):
    """A block and all that come after it."""
    found = {block}
    for child in sorted(PARENT):
        if PARENT[child] in found:
            found.add(child)
    return found


class Model:
    """What a holder has, by tier: hash to deadline or None."""

    def __init__(self, *, pool=False):
        self.pool = pool
        self.tiers = {tier: {} for tier in Tier}
        self.members = []

    def has(self, block, *tiers):
        return any(block in self.tiers[tier] for tier in tiers)


class MapMachine(RuleBasedStateMachine):
    workers = Bundle("workers")
    pools = Bundle("pools")

    def __init__(self):
        super().__init__()
        self.map = PrefixMap(16)
        self.expectations = []
        self.now = 100.0
        self.models = {}
        self.names = 0

    # -- operations, done to both -----------------------------------------------------------------------------------

    @rule(target=workers, source=st.sampled_from(["event", "history"]))
    def join(self, source):
        self.names += 1
        holder = self.map.join(f"w{self.names}", source=source)
        self.models[holder] = Model()
        return holder

    @rule(target=pools)
    def join_pool(self):
        holder = self.map.join_pool("pool")
        self.models[holder] = Model(pool=True)
        return holder

    @rule(pool=pools, data=st.data())
    def set_members(self, pool, data):
        workers = [holder for holder, model in self.models.items() if not model.pool]
        members = data.draw(st.lists(st.sampled_from(workers), unique=True)) if workers else []
        self.map.set_members(pool, members)
        self.models[pool].members = members

    @rule(holder=workers | pools)
    def clear(self, holder):
        self.map.clear(holder)
        self.models[holder].tiers = {tier: {} for tier in Tier}

    @rule(holder=consumes(workers) | consumes(pools))
    def leave(self, holder):
        self.map.leave(holder)
        del self.models[holder]
        for model in self.models.values():
            model.members = [each for each in model.members if each is not holder]

    @rule(holder=workers, chain=chains, count=st.integers(1, LENGTH))
    def store_on_device(self, holder, chain, count):
        self.map.store(holder, chain[:count])
        model = self.models[holder]
        for block in chain[:count]:
            model.tiers[Tier.DEVICE][block] = None
            model.tiers[Tier.EXPECTED].pop(block, None)

    @rule(holder=workers, chain=chains, place=st.integers(0, LENGTH - 1))
    def evict_from_device_end_first(self, holder, chain, place):
        gone = descendants(chain[place])
        self.map.remove(holder, gone)
        for block in gone:
            self.models[holder].tiers[Tier.DEVICE].pop(block, None)

    @rule(
        holder=workers,
        chain=chains,
        tier=slow_tiers,
        start=st.integers(0, LENGTH),
        count=st.integers(1, LENGTH),
        ttl=ttls,
    )
    def store_in_slow_tier(self, holder, chain, tier, start, count, ttl):
        self._store(holder, chain[start : start + count], tier, ttl)

    @rule(holder=pools, chain=chains, start=st.integers(0, LENGTH), count=st.integers(1, LENGTH), ttl=ttls)
    def store_in_pool(self, holder, chain, start, count, ttl):
        self._store(holder, chain[start : start + count], Tier.L2, ttl)

    def _store(self, holder, blocks, tier, ttl):
        expires = None if ttl is None else self.now + ttl
        self.map.store(holder, blocks, tier, expires=expires)
        held = self.models[holder].tiers[tier]
        for block in blocks:
            before = held.get(block)
            # A time limit prolongs another one; without one it is for good; but one that comes later than "for good" ends it.
            held[block] = expires if expires is None or before is None else max(expires, before)

    @rule(holder=workers | pools, tier=slow_tiers, chain=chains, places=st.sets(st.integers(0, LENGTH - 1)))
    def remove_from_slow_tier(self, holder, tier, chain, places):
        blocks = [chain[place] for place in places]
        self.map.remove(holder, blocks, tier)
        for block in blocks:
            self.models[holder].tiers[tier].pop(block, None)

    @rule(holder=workers, chain=chains, count=st.integers(1, LENGTH))
    def expect(self, holder, chain, count):
        blocks = [block for block in chain[:count] if not self.models[holder].has(block, Tier.DEVICE, Tier.L1, Tier.L2)]
        self.expectations.append((holder, blocks, self.map.expect(holder, blocks), holder.generation))
        for block in blocks:
            self.models[holder].tiers[Tier.EXPECTED][block] = None

    @precondition(lambda self: self.expectations)
    @rule(data=st.data())
    def settle(self, data):
        place = data.draw(st.integers(0, len(self.expectations) - 1))
        holder, blocks, expectation, generation = self.expectations.pop(place)
        expectation.settle(self.now)
        if generation != holder.generation or holder not in self.models:
            return
        expected = self.models[holder].tiers[Tier.EXPECTED]
        for block in blocks:
            if block in expected:
                expected[block] = max(expected[block] or 0.0, self.now + EXPECTED_SECONDS)

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.5]))
    def pass_time(self, seconds):
        self.now += seconds
        self.map.expire(self.now)
        for model in self.models.values():
            for tier, held in model.tiers.items():
                model.tiers[tier] = {block: end for block, end in held.items() if end is None or end > self.now}

    @rule(limit=st.integers(1, 30))
    def sweep(self, limit):
        self.map.sweep(limit)

    @rule(chain=chains, count=st.integers(0, LENGTH))
    def touch(self, chain, count):
        self.map.touch(chain, count)

    # -- what must hold then ----------------------------------------------------------------------------------------

    def run(self, holder, chain, *tiers):
        """Leading blocks held in any of these tiers; pools count with l2."""
        pools = [model for model in self.models.values() if holder in model.members] if Tier.L2 in tiers else []
        for depth, block in enumerate(chain):
            if not self.models[holder].has(block, *tiers) and not any(pool.has(block, Tier.L2) for pool in pools):
                return depth
        return len(chain)

    @invariant()
    def every_worker_has_the_runs_that_the_model_has(self):
        for chain in CHAINS:
            for blocks in (None, 7):
                matches = self.map.match(chain, blocks)
                held = matches.held()
                seen = set()
                for holder, model in self.models.items():
                    if model.pool:
                        continue
                    match = matches.of(holder)
                    assert held.get(holder.name, match) == match
                    seen |= {holder.name} if match.tokens else set()
                    part = chain[:blocks]
                    device = self.run(holder, part, Tier.DEVICE)
                    l1 = self.run(holder, part, Tier.DEVICE, Tier.L1)
                    l2 = self.run(holder, part, Tier.DEVICE, Tier.L1, Tier.L2)
                    most = self.run(holder, part, *Tier)
                    expected = match.tokens // 16 - l2
                    assert (match.l1, match.l2) == ((l1 - device) * 16, (l2 - l1) * 16)
                    assert match.device == (device + expected) * 16
                    assert match.source == ("expected" if expected else holder.source if l2 else "")
                    # Expected blocks may stand behind something evicted since: never less, and never beyond the last one.
                    deepest = max(
                        (depth + 1 for depth, block in enumerate(part) if model.has(block, Tier.EXPECTED)), default=0
                    )
                    assert most <= l2 + expected <= max(most, deepest)
                assert seen == set(held)

    @invariant()
    def each_block_is_in_the_tiers_of_the_model(self):
        for holder, model in self.models.items():
            for block in {block for chain in CHAINS for block in chain}:
                assert self.map.tiers(holder, block) == {tier for tier in Tier if model.has(block, tier)}

    @invariant()
    def knowing_whether_there_are_workers_agrees_with_counting_them(self):
        assert self.map.has_workers == (self.map.workers > 0)

    @precondition(lambda self: not self.models)
    @invariant()
    def without_holders_a_sweep_leaves_nothing(self):
        while self.map.unswept:
            self.map.sweep(1000)
        assert len(self.map) == 0
        assert self.map.sets == 0


TestMapAgainstModel = MapMachine.TestCase
TestMapAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
