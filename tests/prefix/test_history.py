from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prefix.history import History
from gateway.prefix.map import PrefixMap
from policies.base import NO_MATCH, Match


def chain(start, count):
    return list(range(start * 100, start * 100 + count))


def test_what_was_sent_to_a_worker_is_believed_and_said_to_be_history():
    prefix_map = PrefixMap(16)
    history = History("w", prefix_map)
    history.record(chain(1, 10))
    assert prefix_map.match(chain(1, 20)).of(history.holder) == Match(device=160, source="history")


def test_beyond_the_workers_capacity_the_prompt_used_longest_ago_goes_end_first():
    prefix_map = PrefixMap(16)
    history = History("w", prefix_map, capacity=10)
    history.record(chain(1, 5))
    history.record(chain(2, 5))
    history.record(chain(1, 5))
    history.record(chain(3, 3))
    held = prefix_map.match
    assert held(chain(1, 5)).of(history.holder).device == 80
    assert held(chain(2, 5)).of(history.holder).device == 32
    assert held(chain(3, 3)).of(history.holder).device == 48
    assert len(history) == len(prefix_map) == 10


def test_a_prompt_longer_than_the_capacity_leaves_its_beginning():
    prefix_map = PrefixMap(16)
    history = History("w", prefix_map, capacity=4)
    history.record(chain(1, 9))
    assert prefix_map.match(chain(1, 9)).of(history.holder).device == 64
    history.resize(2)
    assert prefix_map.match(chain(1, 9)).of(history.holder).device == 32


def test_a_restart_is_forgotten_and_a_worker_that_left_leaves_nothing():
    prefix_map = PrefixMap(16)
    history, other = History("w", prefix_map), History("o", prefix_map)
    history.record(chain(1, 5))
    other.record(chain(1, 2))
    history.forget()
    assert prefix_map.match(chain(1, 5)).of(history.holder) == NO_MATCH
    history.record(chain(1, 1))
    other.leave()
    assert prefix_map.match(chain(1, 5)).held() == {"w": Match(device=16, source="history")}


@settings(deadline=None)
@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=40))
def test_it_is_an_lru_of_blocks(capacity, prompts):
    prefix_map = PrefixMap(1)
    history = History("w", prefix_map, capacity)
    model = OrderedDict()
    for start, count in prompts:
        history.record(chain(start, count))
        for block in reversed(chain(start, count)[:capacity]):
            model.pop(block, None)
            model[block] = None
        while len(model) > capacity:
            model.popitem(last=False)
        assert list(history._blocks) == list(model)
        assert set(prefix_map._blocks) == set(model)
