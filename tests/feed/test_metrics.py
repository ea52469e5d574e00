"""What `/metrics` shows of the feeds, parsed with Prometheus' own parser."""

from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.collector import Readings
from gateway.telemetry.metrics import Metrics

ORDER = ("worker", "model", "status", "kind", "tier", "block_size")


async def test_metrics_tell_how_each_cache_is_known_and_how_large_the_maps_are(scene, tools, start):
    worker, silent = await start(), await start(kv_events=None, kv_events_replay=None)
    async with scene(tools.section_of(worker.url, id="w"), tools.section_of(silent.url, id="h")) as it:
        await tools.until(lambda: [row.status for row in it.feeds.snapshot()] == ["events", "history"])
        (prompt,) = it.prompts(1)
        await it.complete(worker.url, prompt)
        await tools.until(lambda: it.predicted("w", prompt) == 96)
        worker.publisher._publisher.send_multipart([worker.publisher.topic.encode(), b"?"])
        await tools.until(lambda: it.status("w").problems.get("garbage") == 1)
        metrics = Metrics(paths=["/v1/chat/completions"], version="1")
        metrics.readings = Readings(feeds=it.feeds.snapshot, prefix_maps=lambda: it.index.maps)
        text, _ = metrics.render(None)
        samples = {
            (sample.name, *(label for name in ORDER if (label := sample.labels.get(name)))): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }
        status = {key[1:]: number for key, number in samples.items() if key[0] == "warmroute_feed_status" and number}
        assert set(status) == {("w", "m", "events"), ("h", "m", "history")}
        assert samples["warmroute_feed_batches_total", "w", "m"] == 1
        assert samples["warmroute_feed_events_total", "w", "m"] >= 1
        assert samples["warmroute_feed_troubles_total", "w", "m", "garbage"] == 1
        assert samples["warmroute_feed_blocks", "w", "m", "device"] == 6
        assert samples["warmroute_prefix_map_blocks", "16"] == 6
        assert 0 < samples["warmroute_prefix_map_bytes", "16"] < samples["warmroute_prefix_map_budget_bytes", "16"]
