from gateway.prompt.parity_status import ParityStatus, Standing
from gateway.telemetry.collector import Readings
from gateway.telemetry.metrics import Metrics


async def test_a_scrape_shows_how_every_workers_tokens_agree():
    status = ParityStatus(
        worker="w",
        standing=Standing.MISMATCH,
        detail="x",
        since=1.0,
        compared=(),
        skipped=(),
        generated=False,
        proven=False,
        observed=7,
        wrong=2,
    )
    metrics = Metrics()
    metrics.readings = Readings(parity=lambda: [("m", status)])
    text = (await metrics.scrape(None))[0].decode()
    labels = 'model="m",'
    assert f'warmroute_parity{{{labels}standing="mismatch",worker="w"}} 1.0' in text
    assert f'warmroute_parity{{{labels}standing="exact",worker="w"}} 0.0' in text
    assert 'warmroute_parity_proven{model="m",worker="w"} 0.0' in text
    assert 'warmroute_parity_answers_total{model="m",worker="w"} 7.0' in text
    assert 'warmroute_parity_wrong_answers_total{model="m",worker="w"} 2.0' in text
