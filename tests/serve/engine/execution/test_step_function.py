"""The compiled decoder gives the tokens of the eager one, and compiles nothing after loading."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoding.engines import Engines, Models, Passes, paged_attention, passes_of, run
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.config import build_settings
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.graphs import call_again
from mars_serve.engine.execution.linear import PackedLinear, pack_linears
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

MASK = 3
SPECIAL = SpecialTokens(eos=frozenset({1, 9}), never_emitted=frozenset({0, MASK}))
MODES = [(Mode.AR, 0.5), (Mode.THRESHOLD, 0.05), (Mode.EXACT, 0.5), (Mode.THRESHOLD, 0.2)]
FAMILIES = ["qwen2", "qwen3", "llama", "mistral"]
NUM_VARIANTS = 2

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own warnings


@pytest.fixture
def num_compiled() -> Iterator[Callable[[], int]]:
    """Function that counts the graphs compiled in the test; torch forgets them afterwards."""
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    yield lambda: stats["unique_graphs"] - before
    torch._dynamo.reset()


def decode(engine: Engine, *, num_requests: int = 8) -> Passes:
    """Run steps of one position, of many, and of prompts that take several steps."""
    source = random.Random(0)
    requests = []
    for index in range(num_requests):
        length = source.randint(70, 150) if index % 4 == 2 else source.randint(1, 40)
        mode, threshold = MODES[index % len(MODES)]
        options = DecodingOptions(source.randint(2, 20), mode, threshold)
        prompt = [source.randrange(4, 60) for _ in range(length)]
        requests.append(Request(str(index), prompt, options))
    outputs = run(engine, requests[:-1]) | run(engine, requests[-1:])
    assert all(output.error is None for each in outputs.values() for output in each)
    return passes_of(outputs)


@needs_compiler
def test_passes_equal_eager_ones_and_nothing_is_compiled_later(
    tiny_model: Models, make_engine: Engines, num_compiled: Callable[[], int]
) -> None:
    expected = {family: decode(make_engine(tiny_model(family), SPECIAL)) for family in FAMILIES}
    assert num_compiled() == 0
    # All are made before the first step: none may use another's decoder.
    engines = {f: make_engine(tiny_model(f), SPECIAL, compile=True) for f in FAMILIES}
    assert num_compiled() == NUM_VARIANTS * len(FAMILIES)
    with torch.compiler.set_stance("fail_on_recompile"), ThreadPoolExecutor(1) as thread:
        for family, engine in engines.items():
            # The engine runs in a thread of its own, as in a server.
            assert thread.submit(decode, engine).result() == expected[family], family
    passes = [tokens for each in expected.values() for part in each.values() for tokens in part]
    assert sum(len(tokens) > 1 for tokens in passes) > 5


@needs_compiler
def test_packed_weights_and_paged_attention_are_compiled(
    tiny_model: Models,
    make_engine: Engines,
    num_compiled: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pack(model: PreTrainedModel, *, timed: bool) -> None:
        pack_linears(model.base_model, timed=False)
        assert any(isinstance(module, PackedLinear) for module in model.modules())

    monkeypatch.setattr("mars_serve.engine.execution.forward.pack_linears", pack)
    engine_class = partial(Engine, attention_of=paged_attention)
    engines = [
        make_engine(tiny_model("qwen2"), SPECIAL, engine_class=engine_class, compile=compiled)
        for compiled in (False, True)
    ]
    for engine in engines:
        engine.capture_graphs(call_again)
    expected = decode(engines[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        assert decode(engines[1]) == expected
    assert num_compiled() == NUM_VARIANTS


# Models that cannot be compiled


def small_llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def test_a_missing_compiler_is_named(make_engine: Engines) -> None:
    missing = {"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}
    with (
        config.patch(missing),
        pytest.raises(UserError, match=r"^engine\.compile: .*compiler.*leave it out"),
    ):
        make_engine(small_llama(), SPECIAL, compile=True)


class Branch(nn.Module):
    """A module that looks at numbers to choose what to compute."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.sum() > 0 else -hidden


def test_a_model_that_branches_on_its_numbers_is_refused(make_engine: Engines) -> None:
    model = small_llama()
    model.model.norm = Branch()
    make_engine(model, SPECIAL)
    with pytest.raises(UserError, match=r"^engine\.compile: .*leave it out"):
        make_engine(model, SPECIAL, compile=True)


def test_compile_and_batch_invariant_exclude_each_other() -> None:
    both = {"compile": True, "batch_invariant": True}
    with pytest.raises(UserError, match=r"compile: .*batch_invariant; leave one"):
        build_settings(both, EngineSettings, source="engine")
