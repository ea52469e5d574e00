"""What workers tell about what they can do reaches their records, over real sockets."""

import msgspec
import pytest
from structlog.testing import capture_logs

from backends.profiles import PROFILES
from gateway.config.schema import Capabilities, Config, Model
from gateway.config.schema import Worker as WorkerConfig
from gateway.fleet.asking import open_session
from gateway.fleet.fleet import Fleets
from gateway.prefix.discovery import discover
from simulator.server import SimulatedWorker, WorkerOptions
from simulator.tokenizer import WorkerTokenizer

METRICS = (
    'vllm:cache_config_info{{block_size="{size}",enable_prefix_caching="True",engine="0",num_gpu_blocks="64"}} 1.0\n'
    "process_start_time_seconds {started}\n"
)


@pytest.fixture(scope="module")
def tokenizer():
    return WorkerTokenizer()


@pytest.fixture
async def simulated(tokenizer):
    """Starts a simulated worker of a profile; it is stopped at the end."""
    workers = []

    async def start(profile):
        worker = SimulatedWorker(WorkerOptions(model="m", profile=profile, speed=1000.0), tokenizer=tokenizer)
        await worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        await worker.stop()


@pytest.mark.parametrize("name", ["trn2-70b", "trn1-8b", "inf2-8b"])
async def test_a_neuron_worker_tells_the_numbers_of_its_profile(simulated, build, monitored, until, name):
    profile = PROFILES[name]
    worker = await simulated(name)
    fleets = build.fleets([worker.url], driver="neuron")
    it = next(fleets.workers())
    async with monitored(fleets):
        await until(lambda: it.capabilities.max_model_len and it.capabilities.block_size)
    found = it.capabilities
    for field in ("block_size", "kv_blocks", "max_model_len", "prefill", "prefill_buckets", "decode_batch_buckets"):
        assert getattr(found.profile, field) == getattr(profile, field), field
    assert found.slots == profile.effective_slots
    assert found.kv_capacity_tokens == profile.kv_blocks * profile.block_size
    for field in ("block_size", "kv_capacity_tokens", "max_model_len", "slots", "prefill_buckets", "prefix_caching"):
        assert found.describe()[field]["origin"] == "discovered"
    assert [found.padded(tokens) for tokens in (1, 600, 9000)] == [512, 1024, 9216]


async def test_a_gpu_worker_tells_its_cache_and_not_its_batch(simulated, build, monitored, until):
    worker = await simulated("h100-8b")
    fleets = build.fleets([worker.url])
    it = next(fleets.workers())
    async with monitored(fleets):
        await until(lambda: it.capabilities.max_model_len and it.capabilities.block_size)
    assert (it.capabilities.block_size, it.capabilities.kv_capacity_tokens) == (16, 400_000)
    assert it.capabilities.slots is None
    assert not it.capabilities.shaped


async def test_a_worker_that_was_started_again_with_other_flags_is_asked_again(told, build, monitored, until):
    worker = await told()
    worker.pages["/metrics"] = METRICS.format(size=32, started=1000.5)
    fleets = build.fleets([worker.url])
    it = next(fleets.workers())
    async with monitored(fleets):
        await until(lambda: it.capabilities.block_size == 32)
        learned = it.calibration
        await worker.stop()
        await until(lambda: not it.routable)
        worker.pages["/metrics"] = METRICS.format(size=128, started=2000.5)
        worker.cards["data"][0]["max_model_len"] = 4096
        await worker.start()
        await until(lambda: it.capabilities.block_size == 128)
        assert it.calibration is not learned
        assert it.capabilities.max_model_len == 4096


async def test_a_worker_without_metrics_keeps_its_assumptions_and_is_not_asked_all_the_time(told, build, monitored):
    worker = await told()
    fleets = build.fleets([worker.url])
    async with monitored(fleets):
        await worker.checks(6)
    assert worker.asked.count("/metrics") == 1
    assert worker.asked.count("/v1/models") == 1
    assert next(fleets.workers()).capabilities.block_size is None


async def test_what_the_event_feed_heard_is_not_asked_again(told, build, monitored):
    worker = await told()
    worker.pages["/metrics"] = METRICS.format(size=32, started=1.5)
    fleets = build.fleets([worker.url], health=msgspec.structs.replace(build.quick, interval=0.3))
    it = next(fleets.workers())
    async with monitored(fleets) as monitor, open_session() as session:
        assert await monitor.wait_ready(5)
        await discover(session, it, WorkerConfig(url=worker.url, driver="vllm"))
        asked = worker.asked.count("/metrics")
        await worker.checks(2)
        assert it.capabilities.block_size == 32
        assert worker.asked.count("/metrics") == asked


async def test_a_contradiction_is_said_once(told, build, monitored, until):
    worker = await told()
    worker.pages["/metrics"] = METRICS.format(size=128, started=1.5)
    section = WorkerConfig(url=worker.url, driver="neuron", capabilities=Capabilities(segment_size=1000))
    fleets = Fleets.from_config(Config(models=(Model(name="m", workers=(section,)),), health=build.quick), build.policy)
    it = next(fleets.workers())
    with capture_logs() as logs:
        async with monitored(fleets):
            await until(lambda: it.capabilities.block_size == 128)
    assert [line["doubts"] for line in logs if line["log_level"] == "warning"] == [it.capabilities.doubts]
    assert it.capabilities.segment_size == 1024
