"""The worker's /metrics: vLLM's names and labels, and vLLM-Neuron's bucket metrics for Neuron profiles."""

import bisect
import resource
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from simulator.engine import BucketStats, EngineStats, FirstToken, Profile
from simulator.server.pump import Choice

if TYPE_CHECKING:
    from simulator.server.worker import SimulatedWorker

# Bucket bounds as vLLM 0.32 has them for a model of 2,048 tokens; counts of tokens go on to the model's limit.
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
N_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
DURATION_BOUNDS = (0.1, 0.5, 1.0)
PADDING_BOUNDS = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Histogram:
    """Counts of observations up to each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Note `count` observations of `value`."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self.total += value * count

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """The samples in Prometheus' text format; `labels` is ``a="b",...`` or empty."""
        separator = "," if labels else ""
        cumulated = 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            cumulated += count
            yield f'{name}_bucket{{{labels}{separator}le="{bound}"}} {float(cumulated)}'
        suffix = f"{{{labels}}}" if labels else ""
        yield f"{name}_count{suffix} {float(cumulated)}"
        yield f"{name}_sum{suffix} {self.total}"


class Metrics:
    """What the worker has counted since it started; times are in the worker's seconds."""

    def __init__(self) -> None:
        self.started = time.time()
        self.finished = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.request_prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.request_generation_tokens = Histogram(TOKEN_BOUNDS)
        self.request_max_tokens = Histogram(TOKEN_BOUNDS)
        self.request_computed_tokens = Histogram(TOKEN_BOUNDS)
        self.request_n = Histogram(N_BOUNDS)
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.tpot = Histogram(ITL_BOUNDS)
        self.e2e = Histogram(LATENCY_BOUNDS)
        self.queue = Histogram(LATENCY_BOUNDS)
        self.inference = Histogram(LATENCY_BOUNDS)
        self.prefill = Histogram(LATENCY_BOUNDS)
        self.decode = Histogram(LATENCY_BOUNDS)
        self.http_requests: dict[tuple[str, str, str], int] = {}
        self.http_durations: dict[tuple[str, str], Histogram] = {}
        self.padding: dict[int, Histogram] = {}

    def first_token(self, choice: Choice, output: FirstToken) -> None:
        """Count a prefill that has ended."""
        self.request_prompt_tokens.observe(len(choice.prompt_ids))
        self.request_computed_tokens.observe(output.computed_tokens)
        self.ttft.observe(output.time - choice.submitted)
        self.queue.observe(output.queue_time)
        self.prefill.observe(output.prefill_time)

    def tokens(self, choice: Choice, now: float, count: int) -> None:
        """Count tokens that came out."""
        if choice.produced:
            self.itl.observe((now - choice.last) / count, count)

    def end(self, choice: Choice, now: float) -> None:
        """Count a choice that has ended by itself."""
        reason = choice.finished or "error"
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.request_generation_tokens.observe(choice.produced)
        self.e2e.observe(now - choice.submitted)
        if choice.first is not None:
            decode = now - choice.first.time
            self.decode.observe(decode)
            self.inference.observe(choice.first.prefill_time + decode)
            if choice.produced > 1:
                self.tpot.observe(decode / (choice.produced - 1))

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP exchange; `seconds` are real ones."""
        key = (handler, method, f"{status // 100}xx")
        self.http_requests[key] = self.http_requests.get(key, 0) + 1
        durations = self.http_durations.get(key[:2])
        if durations is None:
            durations = self.http_durations[key[:2]] = Histogram(DURATION_BOUNDS)
        durations.observe(seconds)

    def padded(self, bucket: int, padding: int) -> None:
        """Count the tokens of padding in a prefill whose last run had the size `bucket`."""
        if bucket not in self.padding:
            self.padding[bucket] = Histogram(PADDING_BOUNDS)
        self.padding[bucket].observe(padding)


class _Text:
    """Builds Prometheus' text format."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def family(self, name: str, kind: str, help_text: str, samples: Iterable[str]) -> None:
        """One metric with all its samples."""
        self.lines += (f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *samples)

    def gauge(self, name: str, help_text: str, values: Mapping[str, float]) -> None:
        """A gauge; `values` by labels in text form."""
        self.family(
            name, "gauge", help_text, [f"{name}{{{labels}}} {float(value)}" for labels, value in values.items()]
        )

    def counter(self, name: str, help_text: str, values: Mapping[str, float]) -> None:
        """A counter; `name` without the ``_total`` that it gets."""
        samples = [f"{name}_total{{{labels}}} {float(value)}" for labels, value in values.items()]
        self.family(f"{name}_total", "counter", help_text, samples)

    def histogram(self, name: str, help_text: str, values: Mapping[str, Histogram]) -> None:
        """A histogram, by labels."""
        self.family(
            name, "histogram", help_text, [line for key, item in values.items() for line in item.lines(name, key)]
        )


def escape(value: object) -> str:
    """A label's value as the text format wants it."""
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def exposition(worker: "SimulatedWorker") -> str:
    """The whole text of /metrics."""
    metrics, stats, text = worker.metrics, worker.stats(), _Text()
    model = f'model_name="{escape(worker.options.served_names[0])}"'
    base = f'engine="0",{model}'
    _process(text, metrics)
    text.gauge("vllm:num_requests_running", "Requests in the running batch.", {base: stats.running})
    text.gauge("vllm:num_requests_waiting", "Requests that wait for the batch.", {base: stats.waiting})
    text.gauge(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait, by what they wait for.",
        {f'{base},reason="capacity"': stats.waiting, f'{base},reason="deferred"': 0},
    )
    text.gauge(
        "vllm:engine_sleep_state",
        "1 for the state that the engine is in.",
        {f'{base},sleep_state="{state}"': state == "awake" for state in ("awake", "weights_offloaded", "discard_all")},
    )
    text.gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", {base: stats.kv_usage})
    text.counter(
        "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", {base: stats.prefix_queries}
    )
    text.counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", {base: stats.prefix_hits})
    external = stats.cached_l1 + stats.cached_l2
    text.counter(
        "vllm:external_prefix_cache_queries", "Tokens looked up in outer tiers.", {base: stats.external_queries}
    )
    text.counter("vllm:external_prefix_cache_hits", "Tokens loaded from outer tiers.", {base: stats.external_hits})
    text.counter("vllm:num_preemptions", "Requests put back from running to waiting.", {base: stats.preemptions})
    text.counter(
        "vllm:prompt_tokens", "Prompt tokens of requests whose prefill has ended.", {base: stats.prompt_tokens}
    )
    text.counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their KV came from.",
        {
            f'{base},source="local_compute"': stats.computed_tokens,
            f'{base},source="local_cache_hit"': stats.cached_device,
            f'{base},source="external_kv_transfer"': external,
        },
    )
    text.counter("vllm:prompt_tokens_cached", "Prompt tokens not computed.", {base: stats.cached_device + external})
    sources = {
        "device": stats.cached_device,
        "host": stats.cached_l1,
        "p2p": 0,
        "disk": stats.cached_l2,
        "external_unspecified": 0,
    }
    text.counter(
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens that were not computed, by tier.",
        {f'{base},source="{source}"': count for source, count in sources.items()},
    )
    text.counter("vllm:generation_tokens", "Tokens generated.", {base: stats.generation_tokens})
    text.counter(
        "vllm:request_success",
        "Requests by how they ended.",
        {f'engine="0",finished_reason="{reason}",{model}': count for reason, count in metrics.finished.items()},
    )
    for name, help_text, histogram in (
        ("request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt_tokens),
        ("request_generation_tokens", "Tokens generated for a request.", metrics.request_generation_tokens),
        ("request_params_n", "The request's n.", metrics.request_n),
        ("request_params_max_tokens", "The request's max_tokens.", metrics.request_max_tokens),
        ("time_to_first_token_seconds", "From arrival to the first token.", metrics.ttft),
        ("inter_token_latency_seconds", "Between two tokens of a request.", metrics.itl),
        ("request_time_per_output_token_seconds", "Mean time between a request's tokens.", metrics.tpot),
        ("e2e_request_latency_seconds", "From arrival to the last token.", metrics.e2e),
        ("request_queue_time_seconds", "Spent waiting for the batch.", metrics.queue),
        ("request_inference_time_seconds", "Spent in the batch.", metrics.inference),
        ("request_prefill_time_seconds", "Spent in prefill.", metrics.prefill),
        ("request_decode_time_seconds", "From the first to the last token.", metrics.decode),
        (
            "request_prefill_kv_computed_tokens",
            "Prompt tokens computed for a request.",
            metrics.request_computed_tokens,
        ),
    ):
        text.histogram(f"vllm:{name}", help_text, {base: histogram})
    config = ",".join(f'{key}="{escape(value)}"' for key, value in sorted(cache_config(worker).items()))
    text.gauge("vllm:cache_config_info", "The cache's configuration, in labels.", {config: 1})
    _http(text, metrics)
    if worker.profile.prefill_buckets:
        _neuron(text, worker.profile, stats, metrics, model)
    return "\n".join(text.lines) + "\n"


def cache_config(worker: "SimulatedWorker") -> dict[str, object]:
    """What vLLM calls CacheConfig, as far as a simulated cache has it; the values print as vLLM's do."""
    profile = worker.profile
    tokens = profile.kv_blocks * profile.block_size
    return {
        "_block_size_resolved": True,
        "block_size": profile.block_size,
        "cache_dtype": "auto",
        "effective_attention_block_size": profile.block_size,
        "enable_prefix_caching": profile.prefix_caching,
        "engine": 0,
        "gpu_memory_utilization": 0.92,
        "hash_block_size": None,
        "is_attention_free": False,
        "kv_cache_max_concurrency": tokens / profile.max_model_len,
        "kv_cache_size_tokens": tokens,
        "num_cpu_blocks": profile.l1_blocks or None,
        "num_gpu_blocks": profile.kv_blocks,
        "num_gpu_blocks_override": profile.kv_blocks,
        "prefix_caching_hash_algo": "sha256_cbor",
        "prefix_match_unit": None,
        "sliding_window": None,
        "user_specified_block_size": True,
    }


def _process(text: _Text, metrics: Metrics) -> None:
    """What Python's client library tells about the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    for name, kind, help_text, value in (
        ("process_resident_memory_bytes", "gauge", "Largest resident memory so far, in bytes.", usage.ru_maxrss * 1024),
        ("process_start_time_seconds", "gauge", "When the worker started, in Unix time.", metrics.started),
        ("process_cpu_seconds_total", "counter", "CPU time of the process.", usage.ru_utime + usage.ru_stime),
    ):
        text.family(name, kind, help_text, [f"{name} {float(value)}"])


def _http(text: _Text, metrics: Metrics) -> None:
    """Requests and durations by handler, as vLLM's instrumentator counts them."""
    text.counter(
        "http_requests",
        "HTTP requests by handler, method and status.",
        {
            f'handler="{handler}",method="{method}",status="{status}"': count
            for (handler, method, status), count in metrics.http_requests.items()
        },
    )
    text.histogram(
        "http_request_duration_seconds",
        "Real seconds from a request's head to the end of its answer.",
        {
            f'handler="{handler}",method="{method}"': histogram
            for (handler, method), histogram in metrics.http_durations.items()
        },
    )


def _neuron(text: _Text, profile: Profile, stats: EngineStats, metrics: Metrics, model: str) -> None:
    """vLLM-Neuron's metrics: every compiled bucket has its labels from the start, used or not."""
    empty = Histogram(PADDING_BOUNDS)
    unused = BucketStats(0, 0)
    text.histogram(
        "vllm_neuron:num_batched_tokens_padding",
        "Tokens of padding in a prefill, by the bucket of its last run.",
        {
            f'bucket_name="prefill_s{size}",{model}': metrics.padding.get(size, empty)
            for size in profile.prefill_buckets
        },
    )
    decodes = {
        f'bucket_name="decode_b{size}",{model}': stats.decode_buckets.get(size, unused)
        for size in profile.decode_batch_buckets
    }
    text.histogram(
        "vllm_neuron:num_seqs_padding",
        "Streams of padding in decode steps; only their number and sum are known.",
        {labels: _sum_only(bucket) for labels, bucket in decodes.items()},
    )
    prefills = {
        f'bucket_name="prefill_s{size}",{model}': stats.prefill_buckets.get(size, unused)
        for size in profile.prefill_buckets
    }
    text.counter(
        "vllm_neuron:neff_execution_count",
        "Executions of each compiled graph.",
        {labels: bucket.executions for labels, bucket in (prefills | decodes).items()},
    )
    text.gauge(
        "vllm_neuron:startup_time_seconds", "From start to ready, as the profile has it.", {model: profile.warm_up}
    )


def _sum_only(bucket: BucketStats) -> Histogram:
    """A histogram without bounds: the count and the sum are all that it tells."""
    histogram = Histogram(())
    if bucket.executions:
        histogram.observe(bucket.padding / bucket.executions, bucket.executions)
    return histogram
