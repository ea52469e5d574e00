from contextlib import AsyncExitStack

from prometheus_client.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"


async def scrape(http, worker):
    """{(sample name, labels without model and engine): value}."""
    async with http.get(worker.url + "/metrics") as response:
        text = await response.text()
    return {
        (
            sample.name,
            *sorted(value for name, value in sample.labels.items() if name not in ("model_name", "engine")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_counters_tell_what_requests_did(start, http, chat):
    worker = await start(profile="h100-8b", block_size=16)
    usages = []
    for _ in range(2):
        async with http.post(worker.url + CHAT, json=chat("word " * 100, max_tokens=5)) as response:
            usages.append((await response.json())["usage"])
    values = await scrape(http, worker)
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert values[("vllm:prompt_tokens_total",)] == prompt
    assert values[("vllm:prefix_cache_queries_total",)] == prompt
    assert values[("vllm:prefix_cache_hits_total",)] == cached
    assert values[("vllm:prompt_tokens_by_source_total", "local_compute")] == prompt - cached
    assert values[("vllm:generation_tokens_total",)] == 10
    assert values[("vllm:request_success_total", "length")] == 2
    assert values[("vllm:time_to_first_token_seconds_count",)] == 2
    assert values[("vllm:inter_token_latency_seconds_count",)] == 8
    assert values[("vllm:e2e_request_latency_seconds_count",)] == 2
    assert values[("vllm:request_params_max_tokens_sum",)] == 10
    assert values[("http_requests_total", "/v1/chat/completions", "2xx", "POST")] == 2
    ttft, e2e = values[("vllm:time_to_first_token_seconds_sum",)], values[("vllm:e2e_request_latency_seconds_sum",)]
    decode = values[("vllm:request_decode_time_seconds_sum",)]
    assert abs(e2e - ttft - decode) < 1e-6
    assert values[("vllm:num_requests_running",)] == values[("vllm:num_requests_waiting",)] == 0


async def test_the_queue_and_the_batch_show_while_they_last(start, http, chat, eventually):
    worker = await start(speed=1.0, slots=2)
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(http.post(worker.url + CHAT, json=chat(max_tokens=4000, stream=True)))
        await eventually(lambda: worker.stats().running == 2)
        values = await scrape(http, worker)
    assert values[("vllm:num_requests_running",)] == 2
    assert values[("vllm:num_requests_waiting",)] == 1
    assert 0 < values[("vllm:kv_cache_usage_perc",)] < 1


async def test_the_cache_is_described_in_labels(start, http):
    worker = await start(kv_blocks=4096, block_size=64)
    async with http.get(worker.url + "/metrics") as response:
        line = next(line for line in (await response.text()).split("\n") if line.startswith("vllm:cache_config_info{"))
    for label in (
        'block_size="64"',
        'num_gpu_blocks="4096"',
        'enable_prefix_caching="True"',
        f'kv_cache_size_tokens="{4096 * 64}"',
    ):
        assert label in line


async def test_a_neuron_workers_buckets_can_be_read_before_any_traffic(start, http, chat):
    worker = await start(profile="trn1-8b")
    values = await scrape(http, worker)
    buckets = {key[1] for key in values if key[0] == "vllm_neuron:neff_execution_count_total"}
    assert buckets == {f"prefill_s{size}" for size in (512, 1024, 2048, 4096, 8192)} | {
        f"decode_b{size}" for size in (1, 2, 4, 8)
    }
    async with http.post(worker.url + CHAT, json=chat(max_tokens=4)) as response:
        prompt = (await response.json())["usage"]["prompt_tokens"]
    values = await scrape(http, worker)
    assert values[("vllm_neuron:num_batched_tokens_padding_sum", "prefill_s512")] == 512 - prompt
    assert values[("vllm_neuron:neff_execution_count_total", "prefill_s512")] == 1
    assert values[("vllm_neuron:neff_execution_count_total", "decode_b1")] == 3


async def test_a_gpu_worker_has_no_buckets(start, http):
    worker = await start(profile="h100-8b")
    assert not [key for key in await scrape(http, worker) if key[0].startswith("vllm_neuron")]
