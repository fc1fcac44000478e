"""The engine in a process of its own; all but one are forks of one template process."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest

from decoding.local_engine_client import linked
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.weights import load_model
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_platform.method.mode import LiveDecoding, Mode
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    FinishReason,
    GrammarKind,
    GrammarSpec,
)
from mars_serve.engine.ipc.channel import ChannelClosed
from mars_serve.engine.ipc.client import EngineDied
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.replica import engine_template
from mars_serve.replica.engine_process import load_engine_ahead, start_engine
from mars_serve.replica.engine_template import fork_engine, place_on, template_name
from waiting import soon

PROMPT = list(range(10, 22))
NODE = f"node of {os.getpid()}"


def settings_of(path):
    engine = EngineSettings(
        page_size=8, num_pages=64, max_num_seqs=2, max_requests=8, step_timeout_s=7.0
    )
    return ModelSettings(name="mars", path=str(path), engine=engine)


def forked(path):
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # engines of different environments are not equal
    return start_engine(settings_of(path), 1, node=NODE)


def process_of(loop):
    """Return the process of an engine that was forked."""
    lines = Path(f"/proc/self/fdinfo/{loop._worker._process}").read_text("utf-8").splitlines()
    (number,) = [line.split()[1] for line in lines if line.startswith("Pid:")]
    return psutil.Process(int(number))


@pytest.fixture(scope="module")
def loop(mars_dir):
    """Return the first engine; its template is loaded ahead, and ends in the last test."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    load_engine_ahead(settings_of(mars_dir), 1, place_on(NODE))
    loop = forked(mars_dir)
    yield loop
    loop.stop()


async def all_of(stream):
    return [output async for output in stream]


async def collect(loop, request):
    return await all_of(loop.stream(request))


def request(name, max_tokens=12, **options):
    options = {"mode": Mode.THRESHOLD, "threshold": 0.3, **options}
    return Request(name, list(PROMPT), DecodingOptions(max_tokens, **options))


async def test_outputs_are_those_of_the_reference(loop, mars_dir):
    checkpoint = read_checkpoint(mars_dir)
    expected = reference.decode(
        load_model(mars_dir),
        PROMPT,
        checkpoint.special,
        max_tokens=12,
        threshold=0.3,
        num_masks=4,
        mask_token_id=checkpoint.metadata.mask_token_id,
    )
    second = forked(mars_dir)
    for engine in (loop, second):
        wanted = [request(f"r{i}", window=4) for i in range(4)]
        for outputs in await asyncio.gather(*(collect(engine, each) for each in wanted)):
            assert [output.tokens for output in outputs] == expected.passes
        assert engine.status().num_generated_tokens == 4 * sum(map(len, expected.passes))
    second.stop()


def test_engines_of_a_node_share_their_memory_and_what_was_measured(loop, mars_dir):
    before, second = process_of(loop), forked(mars_dir)
    after = process_of(second)
    assert before.parent() == after.parent() != psutil.Process()
    assert before.parent().environ()["OMP_NUM_THREADS"] == "1"
    files = Path(f"/proc/{before.ppid()}/fdinfo").iterdir()
    assert any(f"Pid:\t{os.getpid()}\n" in file.read_text("utf-8") for file in files)  # its keeper
    assert second.step_times == loop.step_times  # to the last bit: nothing is timed again
    memory = after.memory_full_info()
    assert memory.uss < memory.rss / 4
    second.stop()
    assert not after.is_running() or after.status() == psutil.STATUS_ZOMBIE


def test_engines_have_a_template_only_if_nothing_differs(mars_dir, tmp_path, monkeypatch):
    path = shutil.copytree(mars_dir, tmp_path / "mars")
    settings = settings_of(path)
    first = template_name(settings, 1, place_on(NODE))
    monkeypatch.setenv("RAY_JOB_ID", "another")
    assert template_name(settings, 1, place_on(NODE)) == first
    others = {
        template_name(settings, 2, place_on(NODE)),
        template_name(settings, 1, place_on("another node")),
        template_name(settings.model_copy(update={"dtype": "bfloat16"}), 1, place_on(NODE)),
    }
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").write_bytes(weights)
    others.add(template_name(settings, 1, place_on(NODE)))
    monkeypatch.setenv("OMP_SCHEDULE", "static")
    others.add(template_name(settings, 1, place_on(NODE)))
    assert len(others - {first}) == 5
    monkeypatch.setenv(engine_template.PLACE_VARIABLE, "a server")
    assert place_on(NODE) == "a server"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Return the directory of the templates that are used in a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = tmp_path / f"marsray-{os.getuid()}"
    directory.mkdir(mode=0o700)
    return directory


def test_a_directory_that_others_may_use_is_refused(directory):
    directory.chmod(0o750)
    with pytest.raises(PermissionError, match="is no directory that this user alone can use"):
        fork_engine("name", [])


def test_sockets_of_the_dead_are_removed(directory, monkeypatch):
    """Only a start of a template looks for them; here it fails after that."""
    monkeypatch.setattr(sys, "executable", "/bin/true")
    (directory / "download").touch()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "dead"))
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(directory / "live"))
        live.listen()
        live.setblocking(False)
        for name in ("one", "other"):
            with pytest.raises(ConnectionRefusedError):
                fork_engine(name, [])
            assert {each.name for each in directory.iterdir()} == {"download", "live", name}
        with pytest.raises(BlockingIOError):  # nobody has connected
            live.accept()


async def test_a_request_that_can_never_run_is_refused_with_its_reason(loop):
    with pytest.raises(UserError, match=r"^max_tokens: 12 prompt tokens and 5000 output tokens"):
        await collect(loop, request("long", 5000))
    broken = GrammarSpec(GrammarKind.REGEX, "(")
    with pytest.raises(UserError, match=r"^grammar: "):
        await collect(loop, request("broken", grammar=broken))
    found = psutil.process_iter(["ppid", "cmdline"])  # which passes over those that are ending
    commands = [each.info["cmdline"] or [] for each in found]
    assert any("mars_serve.engine.sampling.grammar_trial" in command for command in commands)
    assert loop.is_alive


@pytest.mark.parametrize(("given", "found"), [(None, "passive"), ("active", "active")])
def test_idle_threads_of_engines_sleep_unless_told_otherwise(monkeypatch, given, found):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    assert engine_template.python_environment()["OMP_WAIT_POLICY"] == found


def test_an_engine_serves_one_event_loop_after_another(loop):
    first, second = (asyncio.run(collect(loop, request(name, window=4))) for name in ("a", "b"))
    assert [output.tokens for output in first] == [output.tokens for output in second]


def test_a_model_that_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        start_engine(settings_of(tmp_path), 1)


async def test_a_killed_engine_ends_the_requests_of_all_connections(mars_dir):
    """Each connection tells which of its requests a step may have held."""
    starter = forked(mars_dir)
    starter.read_in_thread()
    links = [await linked(starter.address) for _ in range(2)]
    named = list(enumerate(links))
    running = [link.stream(request(f"running {i}", 240, mode=Mode.AR)) for i, link in named]
    begun = [await anext(stream) for stream in running]
    assert [output.request_id for output in begun] == ["running 0", "running 1"]
    waiting = [asyncio.create_task(collect(link, request(f"waiting {i}"))) for i, link in named]
    await asyncio.sleep(0)  # the requests are sent
    process_of(starter).kill()
    ends = await asyncio.wait_for(
        asyncio.gather(*map(all_of, running), *waiting, return_exceptions=True), 10
    )
    assert [type(end) for end in ends] == [EngineDied] * 4
    assert [end.had_begun for end in ends] == [True, True, False, False]
    await soon(lambda: not starter.is_alive)
    for link in links:
        assert not link.is_alive
        for call in (link.status, lambda link=link: link.set_live(LiveDecoding(0.5))):
            with pytest.raises(EngineDied):
                call()
        with pytest.raises(EngineDied):
            await collect(link, request("later"))
        link.stop()
    with pytest.raises((ChannelClosed, EngineDied)):  # the system may still take the connection
        await linked(starter.address)
    starter.stop()


async def test_a_stopped_engine_gives_back_what_waits_and_is_ended(mars_dir):
    """It is stopped in its first step: what was in it may be to blame, what waited is not."""
    loop = forked(mars_dir)
    running = loop.stream(request("running", 200, mode=Mode.AR))
    await anext(running)
    other = loop.stream(request("other", 200, mode=Mode.AR))
    await anext(other)
    waiting = loop.stream(request("waiting"))
    process_of(loop).suspend()
    with pytest.raises(EngineDied, match="does not answer") as gave_back:
        await asyncio.wait_for(all_of(waiting), 30)
    assert not gave_back.value.had_begun
    assert loop.is_overdue
    with pytest.raises(EngineDied, match="does not answer"):
        await anext(loop.stream(request("new")))
    with pytest.raises(EngineDied, match="has stopped") as died:
        await asyncio.wait_for(all_of(running), 30)
    assert died.value.had_begun
    assert not loop.is_alive
    loop.stop()


def test_an_engine_without_a_template_ends_with_its_parent(mars_dir, directory):
    """The engine is loaded by itself, because templates cannot be found safely."""
    directory.chmod(0o750)
    script = """
        import sys, time
        from mars_serve.replica.engine_process import start_engine
        from mars_serve.config.settings import ModelSettings
        loop = start_engine(ModelSettings(name="mars", path=sys.argv[1]), 1, node="node")
        print("ready", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(mars_dir)]
    environment = {**os.environ, "TMPDIR": str(directory.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not alive


async def test_a_template_outlives_who_started_it_and_engines_outlive_their_template(
    loop, mars_dir, monkeypatch
):
    """This test is the last one, and ends the template of the others: it is stopped."""
    template = process_of(loop).parent()
    assert template not in psutil.Process().children()  # which Ray would end with its worker
    template.suspend()
    monkeypatch.setattr(engine_template, "_SILENT_S", 0.2)
    os.environ.pop("PYTEST_CURRENT_TEST")
    with pytest.raises(TimeoutError, match="did nothing, and is ended"):
        fork_engine(template_name(settings_of(mars_dir), 1, place_on(NODE)), [])
    psutil.wait_procs([template], timeout=60)
    outputs = await collect(loop, request("after", window=4))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
