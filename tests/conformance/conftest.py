"""Which engine is under test: the embedded one as a process of its own, vLLM, or any server of the user's.

    pytest tests/conformance --engine-url http://127.0.0.1:8000 --engine-model DIR --engine-weights DIR

The server serves `DIR`, a Hugging Face directory, with the version 0, and can read `--engine-weights`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from scorer import Scorer
from starting import KINDS, Start
from subject import FEATURES, Promise, Subject

from fleuve.config.models import resolve_model
from fleuve.engine.service import end_tokens
from fleuve.modeling.tokenizer import load_tokenizer
from fleuve.weights.directory import make_directory
from fleuve.weights.store import WeightStore


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "the engine that tests/conformance tests")
    group.addoption("--engine-url", help="of a server that is running; its token in FLEUVE_TOKEN")
    group.addoption("--engine-kind", choices=sorted(KINDS), help="how it is spoken to, or what is started")
    group.addoption("--engine-model", default="builtin:small", help="the Hugging Face directory that it serves")
    group.addoption("--engine-weights", help="the directory from which it may read new weights")
    group.addoption("--engine-dtype", default="float32", choices=["float32", "bfloat16"])
    group.addoption("--engine-device", default="cpu", choices=["cpu", "cuda"], help="of an engine that is started here")
    group.addoption("--engine-tolerance", help="MEAN[,WORST] difference of log-probabilities")
    group.addoption("--engine-lacks", default="", help=f"comma-separated, of: {', '.join(FEATURES)}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "served" not in metafunc.fixturenames:
        return
    kind = metafunc.config.getoption("engine_kind", None)
    chosen = metafunc.config.getoption("engine_url", None) is not None or kind is not None
    if chosen:
        metafunc.parametrize("served", [kind or "embedded"], indirect=True, scope="session")
    else:
        kinds = ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)]
        metafunc.parametrize("served", kinds, indirect=True, scope="session")


def _promise(config: pytest.Config, usual: Promise) -> Promise:
    if given := config.getoption("engine_tolerance", None):
        mean, _, worst = given.partition(",")
        usual = replace(usual, mean=float(mean), worst=float(worst) if worst else 10 * float(mean))
    lacks = {name.strip() for name in (config.getoption("engine_lacks", None) or "").split(",") if name.strip()}
    if unknown := lacks - FEATURES.keys():
        raise pytest.UsageError(f"--engine-lacks {', '.join(sorted(unknown))}: there are {', '.join(FEATURES)}")
    return replace(usual, lacks=usual.lacks | lacks)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    """One engine for all tests."""
    torch.set_num_threads(1)
    config = request.config
    option = lambda name, default=None: config.getoption(name, default) or default  # noqa: E731
    model = resolve_model(option("engine_model", "builtin:small"))
    given = option("engine_weights")
    directory = Path(given) if given else make_directory()
    store = WeightStore(directory / "conformance", keep=6)
    start = Start(
        url=option("engine_url"),
        token=os.environ.get("FLEUVE_TOKEN"),
        model=model,
        dtype=option("engine_dtype", "float32"),
        device=option("engine_device", "cpu"),
        weights=directory,
        logs=tmp_path_factory.mktemp("engine"),
    )
    kind = KINDS[request.param]
    scorer = Scorer(model, start.dtype)
    eos = frozenset(end_tokens(scorer.model, load_tokenizer(model)))
    async with AsyncExitStack() as stack:
        if not given:
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.callback(store.close)
        engine = await kind.open(start, stack)
        yield Subject(engine, scorer, store, _promise(config, kind.promise(start)), eos)


@pytest_asyncio.fixture(loop_scope="session")
async def subject(served: Subject) -> AsyncIterator[Subject]:
    """The engine, idle and not paused, before each test and after it."""
    yield served
    await served.engine.resume()
    metrics = await served.engine.metrics()
    assert (metrics["running"], metrics["waiting"]) == (0, 0), "the test has left answers in flight"
    assert await served.engine.health() == served.version
