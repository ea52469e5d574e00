"""Every view in a real browser, with live traffic. Screenshots are left in `tests/artefacts/inspector`, to be looked at.

Needs playwright (it is in the development requirements) and Chromium at `/usr/bin/chromium` (Debian's package `chromium`).
"""

import asyncio
import random
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ARTEFACTS = Path(__file__).parents[1] / "artefacts" / "inspector"
SIZES = {"wide": (1280, 800), "phone": (390, 844)}
HOSTILE = '<script>document.title="owned"</script><img src=x onerror=alert(1)>'
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WORDS = ("river", "stone", "letter", "engine", "garden", "window", "bridge", "market", "signal", "island")

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}: apt-get install chromium"),
]


@asynccontextmanager
async def opened(size="wide", **options):
    """A page in a browser of its own; at the end nothing may have been complained about in its console."""
    width, height = SIZES[size]
    complaints = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        context = await browser.new_context(viewport={"width": width, "height": height}, **options)
        page = await context.new_page()
        page.set_default_timeout(15_000)
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in {"error", "warning"} else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.complaints = complaints
        try:
            yield page
        finally:
            await browser.close()
    assert complaints == []


async def shot(page, name):
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=ARTEFACTS / f"{name}.png")
    assert not await page.evaluate("document.documentElement.scrollWidth > innerWidth"), (
        "the page is wider than its window"
    )


@asynccontextmanager
async def traffic(found):
    """Conversations that share their beginnings go on in the background."""
    rng = random.Random(5)

    def text(words):
        return " ".join(f"{rng.choice(WORDS)}{rng.randrange(1000)}" for _ in range(words))

    beginnings = [text(200) for _ in range(3)]

    async def converse():
        while True:
            texts = [f"{rng.choice(beginnings)} {text(20)}"]
            for _ in range(rng.randrange(1, 4)):
                await found.chat(*texts, max_tokens=rng.randrange(4, 20))
                texts += [text(5), text(20)]
                await asyncio.sleep(0.15)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(converse()) for _ in range(3)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@pytest.fixture
def busy(scene):
    """A scene with traffic, whose model has a name that is a script."""

    @asynccontextmanager
    async def busy(**options):
        options = {"model": HOSTILE, "policy": "ttft", "speed": 20.0, **options}
        async with scene(3, **options) as found, traffic(found):
            yield found

    return busy


@pytest.mark.parametrize("size", SIZES)
async def test_every_view_shows_live_traffic_without_a_complaint(busy, size):
    links = ', links: {Jaeger: "https://jaeger.example/trace/{trace_id}"}'
    more = "telemetry: {traces: {exporter: file, file: /dev/null}}\nresidency: {rules: {retain: {min_tokens: 16}}}\n"
    async with busy(admin=links, settings=more) as found, opened(size) as page:
        await page.goto(found.admin)
        await page.wait_for_selector("tr[data-open]")
        await page.locator(".tile b", has_text="/s").first.wait_for()
        assert await page.locator("section h2").first.inner_text() != ""
        assert HOSTILE in await page.locator("section h2").first.inner_text()
        await shot(page, f"fleet-{size}")

        await page.goto(f"{found.admin}/#/requests")
        await page.wait_for_selector(".requests tbody tr .chip.good")
        assert HOSTILE in await page.locator(".requests tbody tr").nth(3).inner_text()
        await shot(page, f"requests-{size}")

        await page.locator(".requests tbody tr:has(.chip.good) td.id a").first.click()
        await page.wait_for_selector(".waterfall")
        assert await page.locator("tr.chosen").count() == 1
        assert await page.locator(".phase").count() >= 5
        assert (await page.locator("a.button", has_text="Jaeger").get_attribute("href")).startswith(
            "https://jaeger.example/trace/"
        )
        await shot(page, f"request-{size}")

        await page.goto(f"{found.admin}/#/prefixes")
        await page.wait_for_selector("tbody tr .chip.held")
        await shot(page, f"prefixes-{size}")

        await page.goto(f"{found.admin}/#/workers/{found.ids[0]}")
        await page.wait_for_selector(".card")
        assert "events tell what it holds" in await page.locator("main").inner_text()
        await shot(page, f"worker-{size}")

        await page.goto(f"{found.admin}/#/residency")
        await page.locator("main", has_text="None of its workers understands hints").wait_for()
        assert "retain" in await page.locator("main").inner_text()
        await shot(page, f"residency-{size}")

        await page.goto(f"{found.admin}/#/policy")
        await page.click("button.strong")
        await page.wait_for_selector(".policies .card.active tr.chosen")
        assert await page.locator(".policies .card").count() >= 3
        await shot(page, f"policy-{size}")
        assert await page.title() == "Policy · warmroute"


async def test_colours_follow_the_system_and_can_be_chosen(busy):
    async with busy() as found, opened(color_scheme="dark") as page:
        await page.goto(found.admin)
        await page.wait_for_selector("tr[data-open]")
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await shot(page, "fleet-dark")
        await page.keyboard.press("t")
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark != light
        await page.reload()
        await page.wait_for_selector("tr[data-open]")
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == light


async def test_the_keyboard_is_enough(busy):
    async with busy() as found, opened() as page:
        await page.goto(found.admin)
        await page.wait_for_selector("tr[data-open]")
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/#/workers/**")
        await page.keyboard.press("Escape")
        await page.wait_for_selector(".tiles")
        await page.keyboard.press("2")
        await page.wait_for_selector(".requests tbody tr .chip.good")
        await page.keyboard.press("p")
        assert await page.locator("form.filters button").inner_text() == "go on"
        for _ in range(4):
            await page.keyboard.press("j")
        opened_row = await page.locator("tr[aria-selected]").get_attribute("data-open")
        await page.keyboard.press("Enter")
        await page.wait_for_url(f"**/{opened_row}")
        await page.wait_for_selector(".waterfall")
        await page.keyboard.press("Escape")
        await page.wait_for_selector("form.filters")
        await page.keyboard.press("/")
        assert await page.evaluate("document.activeElement.tagName") in {"INPUT", "SELECT"}
        await page.keyboard.press("Escape")
        await page.keyboard.press("?")
        assert await page.locator("dialog[open]").count() == 1
        await shot(page, "keys")


async def test_filters_are_in_the_address_and_hold_for_what_comes_live(busy):
    async with busy() as found, opened() as page:
        await page.goto(f"{found.admin}/#/requests?worker={found.ids[1]}")
        await page.wait_for_selector(".requests tbody tr")
        await asyncio.sleep(1.0)
        workers = set(await page.locator(".requests tbody tr td:nth-child(5)").all_inner_texts())
        assert workers == {found.ids[1]}
        await page.select_option("select[name=error]", "true")
        await page.wait_for_selector(".empty")
        assert "error=true" in page.url


async def test_a_request_is_copied_as_curl_without_secrets(busy):
    async with busy() as found, opened(permissions=["clipboard-read", "clipboard-write"]) as page:
        request_id, _ = await found.chat("hello")
        await page.goto(f"{found.admin}/#/requests/{request_id}")
        await page.wait_for_selector(".waterfall")
        await page.get_by_role("button", name="curl").click()
        await page.get_by_role("button", name="copied").wait_for()
        text = await page.evaluate("navigator.clipboard.readText()")
        assert text.startswith("curl -N 'http://127.0.0.1")
        assert "hello" not in text
        assert "authorization" not in text.lower()


async def test_a_token_is_asked_for_and_taken(scene):
    async with scene(1, policy="leastload", admin=", token: 0123456789abcdef") as found, opened() as page:
        await page.goto(found.admin)
        await page.fill("input[type=password]", "a wrong one")
        await page.click("form.login button")
        await page.wait_for_selector(".login .bad:not(:empty)")
        await shot(page, "login")
        await page.fill("input[type=password]", "0123456789abcdef")
        await page.click("form.login button")
        await page.wait_for_selector("tr[data-open]")
        # The browser itself tells of a 401 and a 403, which are as they should be.
        assert all("status of 40" in complaint for complaint in page.complaints)
        page.complaints.clear()


async def test_the_page_says_when_the_gateway_is_gone(scene):
    async with scene(1, policy="leastload") as found, opened() as page:
        await page.goto(found.admin)
        await page.wait_for_selector(".live.live")
        await found.gateway.stop(0)
        await page.wait_for_selector(".live.lost")
        assert all("ERR_" in complaint for complaint in page.complaints)
        page.complaints.clear()
