"""Reloading with real files: what comes into effect, what stays, and what is said about it."""

import asyncio
import contextlib
import os
import shutil
import signal

import pytest
import structlog

from gateway.config.load import load
from gateway.config.reload import ConfigWatcher

GOOD = 'models: [{{name: {name}, workers: [{{url: "http://127.0.0.1:9001"}}]}}]\n'


def text(name="one", more=""):
    return GOOD.format(name=name) + more


class Applied:
    """What `apply` was called with, to be waited for."""

    def __init__(self):
        self.configs = []
        self.event = asyncio.Event()
        self.error = None

    async def __call__(self, config):
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.configs.append(config)
        self.event.set()

    @property
    def names(self):
        return [config.models[0].name for config in self.configs]

    async def wait(self):
        await asyncio.wait_for(self.event.wait(), 10)
        self.event.clear()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text())
    return path


@pytest.fixture
def applied():
    return Applied()


@pytest.fixture
def logged():
    with structlog.testing.capture_logs() as entries:
        yield entries


@pytest.fixture
def watch(applied):
    """Starts watchers and stops them at the end."""
    watchers = []

    def start(path, **options):
        options = {"debounce": 0.02, "poll": 60.0, "notify": False} | options
        watcher = ConfigWatcher(path, load(path), applied, **options)
        watcher.start()
        watchers.append(watcher)
        return watcher

    yield start
    for watcher in watchers:
        assert len(watcher._tasks) == 0, "every test stops its watcher"


async def failures(watcher, count):
    async with asyncio.timeout(10):
        while watcher.reloads_failed < count:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0.005)


async def armed(watcher, folder):
    """Returns when the watcher is sure to look: it has looked at the file because of a change beside it, or by polling."""
    looked = asyncio.Event()
    signature = watcher._signature

    def look():
        looked.set()
        return signature()

    watcher._signature = look
    async with asyncio.timeout(10):
        while not looked.is_set():
            (folder / "beside").touch()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(looked.wait(), 0.1)
    watcher._signature = signature


async def test_another_configuration_is_applied_on_request(path, applied, watch):
    watcher = watch(path)
    path.write_text(text("two"))
    watcher.request_reload()
    await applied.wait()
    await watcher.stop()
    assert applied.names == ["two"]
    assert watcher.current.models[0].name == "two"
    assert (watcher.reloads_ok, watcher.reloads_failed, watcher.last_error) == (1, 0, None)
    assert watcher.last_reload_time is not None


async def test_a_signal_reloads(path, applied, watch):
    watcher = watch(path)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, watcher.request_reload)
    try:
        path.write_text(text("two"))
        os.kill(os.getpid(), signal.SIGHUP)
        await applied.wait()
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
    await watcher.stop()
    assert applied.names == ["two"]


async def test_a_synchronous_apply_will_do(path):
    seen = []
    watcher = ConfigWatcher(path, load(path), seen.append)
    path.write_text(text("two"))
    assert await watcher.reload()
    assert seen == [watcher.current]


@pytest.mark.parametrize("same", [text(), "# a comment\n" + text(), text(more="grace: 30s\n")])
async def test_what_means_the_same_changes_nothing(same, path, applied, watch):
    watcher = watch(path)
    path.write_text(same)
    assert await watcher.reload()
    await watcher.stop()
    assert applied.configs == []
    assert (watcher.reloads_ok, watcher.reloads_failed, watcher.last_reload_time) == (0, 0, None)


async def test_a_file_with_a_mistake_leaves_the_old_one_working_and_says_so(path, applied, watch, logged):
    watcher = watch(path)
    old = watcher.current
    path.write_text(text(more="poool: {}\n"))
    assert not await watcher.reload()
    await watcher.stop()
    assert (watcher.current, applied.configs) == (old, [])
    assert (watcher.reloads_ok, watcher.reloads_failed) == (0, 1)
    assert f"{path}:2:1: poool: unknown key" in watcher.last_error
    assert [(entry["log_level"], entry["problems"]) for entry in logged] == [("error", watcher.last_error)]


async def test_the_error_is_over_when_the_file_is_right_again(path, applied, watch):
    watcher = watch(path)
    path.write_text("nonsense")
    assert not await watcher.reload()
    path.write_text(text())
    assert await watcher.reload()
    await watcher.stop()
    assert watcher.last_error is None
    assert applied.configs == []


async def test_a_deleted_file_leaves_the_old_one_working(path, applied, watch):
    watcher = watch(path, poll=0.02)
    path.unlink()
    await failures(watcher, 1)
    assert "cannot be read" in watcher.last_error
    path.write_text(text("two"))
    await applied.wait()
    await watcher.stop()
    assert applied.names == ["two"]
    assert watcher.last_error is None


async def test_what_cannot_be_applied_leaves_the_old_one_working(path, applied, watch, logged):
    watcher = watch(path)
    old = watcher.current
    applied.error = RuntimeError("no such tokenizer")
    path.write_text(text("two"))
    assert not await watcher.reload()
    assert (watcher.current, watcher.reloads_failed) == (old, 1)
    assert "no such tokenizer" in watcher.last_error
    applied.error = None
    assert await watcher.reload()
    await watcher.stop()
    assert (applied.names, watcher.last_error) == (["two"], None)
    assert [entry["log_level"] for entry in logged] == ["error", "info"]


async def test_listeners_stay_with_one_warning_while_the_rest_is_reloaded(path, applied, watch, logged):
    watcher = watch(path)
    for name in ("two", "three"):
        path.write_text(text(name, "listen: {port: 9999}\nadmin: {host: 10.0.0.1}\n"))
        assert await watcher.reload()
        assert len(watcher.warnings) == 2
    assert "listen stays at 127.0.0.1:8080; restart to move it to 127.0.0.1:9999" in watcher.warnings
    assert applied.names == ["two", "three"]
    assert {config.listen.port for config in applied.configs} == {8080}
    assert [entry["log_level"] for entry in logged].count("warning") == 2
    path.write_text(text("three"))
    assert await watcher.reload()
    await watcher.stop()
    assert watcher.warnings == ()


async def test_the_memory_of_the_prefix_maps_stays_with_a_warning(path, applied, watch):
    watcher = watch(path)
    path.write_text(text("two", "prefix: {budget: 1GiB}\n"))
    assert await watcher.reload()
    await watcher.stop()
    assert watcher.warnings == ("prefix.budget stays at 256MiB; restart to make it 1GiB",)
    assert applied.configs[-1].prefix.budget == 256 * 1024 * 1024


async def test_moving_only_a_listener_applies_nothing(path, applied, watch):
    watcher = watch(path)
    path.write_text(text(more="listen: {port: 9999}\n"))
    assert await watcher.reload()
    await watcher.stop()
    assert (applied.configs, watcher.reloads_ok, len(watcher.warnings)) == ([], 0, 1)


@pytest.mark.parametrize("options", [{"notify": True}, {"poll": 0.02}], ids=["events", "polling"])
class TestFileChanges:
    async def test_a_file_that_is_written_in_place(self, options, tmp_path, path, applied, watch):
        watcher = watch(path, **options)
        await armed(watcher, tmp_path)
        path.write_text(text("two"))
        await applied.wait()
        await watcher.stop()
        assert applied.names == ["two"]

    async def test_a_file_that_an_editor_replaces(self, options, tmp_path, path, applied, watch):
        watcher = watch(path, **options)
        await armed(watcher, tmp_path)
        for name in ("two", "three"):
            new = tmp_path / "config.yaml.tmp"
            new.write_text(text(name))
            new.rename(path)
            await applied.wait()
        await watcher.stop()
        assert applied.names == ["two", "three"]

    async def test_a_config_map_whose_folder_link_is_swapped(self, options, tmp_path, applied, watch):
        mount = tmp_path / "mount"
        mount.mkdir()

        def publish(version):
            folder = mount / f"..{version}"
            folder.mkdir()
            (folder / "config.yaml").write_text(text(version))
            (mount / "..tmp").symlink_to(folder.name)
            (mount / "..tmp").rename(mount / "..data")

        publish("v1")
        (mount / "config.yaml").symlink_to("..data/config.yaml")
        watcher = watch(mount / "config.yaml", **options)
        await armed(watcher, mount)
        for version, before in (("v2", "v1"), ("v3", "v2")):
            publish(version)
            shutil.rmtree(mount / f"..{before}")
            await applied.wait()
        await watcher.stop()
        assert applied.names == ["v2", "v3"]
        assert watcher.reloads_failed == 0

    async def test_a_linked_file_that_is_changed_elsewhere(self, options, tmp_path, path, applied, watch):
        (tmp_path / "etc").mkdir()
        link = tmp_path / "etc" / "config.yaml"
        link.symlink_to(path)
        watcher = watch(link, **options)
        await armed(watcher, tmp_path)
        path.write_text(text("two"))
        await applied.wait()
        await watcher.stop()
        assert applied.names == ["two"]

    async def test_a_file_that_comes_in_pieces_is_read_when_it_is_complete(
        self, options, tmp_path, path, applied, watch
    ):
        watcher = watch(path, **options | {"debounce": 0.3})
        await armed(watcher, tmp_path)
        whole = text("two", "grace: 3s\n")
        with path.open("w") as file:
            for start in range(0, len(whole), 20):
                file.write(whole[start : start + 20])
                file.flush()
                await asyncio.sleep(0.01)
        await applied.wait()
        await watcher.stop()
        assert (applied.names, watcher.reloads_failed) == (["two"], 0)


async def test_a_wrong_file_is_complained_about_once_until_it_changes_or_somebody_asks(path, applied, watch, logged):
    watcher = watch(path, poll=0.02)
    path.write_text("nonsense")
    await failures(watcher, 1)
    os.utime(path, (1, 1))
    await asyncio.sleep(0.2)  # several polls: nothing to wait for, since nothing must happen
    assert watcher.reloads_failed == 1
    watcher.request_reload()
    await failures(watcher, 2)
    path.write_text("nonsense of another kind")
    await failures(watcher, 3)
    await watcher.stop()
    assert len(logged) == 3


async def test_without_file_events_polling_goes_on(path, applied, watch, logged, monkeypatch):
    def awatch(*folders, **options):
        raise OSError("no inotify watches left")

    monkeypatch.setattr("watchfiles.awatch", awatch)
    watcher = watch(path, notify=True, poll=0.02)
    path.write_text(text("two"))
    await applied.wait()
    await watcher.stop()
    assert applied.names == ["two"]
    assert [entry["detail"] for entry in logged if entry["log_level"] == "warning"] == ["no inotify watches left"]


async def test_two_reloads_at_once_are_done_one_after_the_other(path, applied, watch):
    watcher = watch(path)
    path.write_text(text("two"))
    assert await asyncio.gather(watcher.reload(), watcher.reload(), watcher.reload()) == [True, True, True]
    await watcher.stop()
    assert applied.names == ["two"]


async def test_stop_ends_everything_within_a_second(path, watch):
    watcher = watch(path, notify=True)
    await asyncio.sleep(0.1)
    async with asyncio.timeout(1):
        await watcher.stop()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("config/")]
