"""What the client of a vLLM server makes of one that speaks badly: errors with a name, in time, and no old weights."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest
from bad_server import BadServer, fails, hangs, says, shows_a_page, speaking_badly, wants_a_token

from fleuve.config.settings import Settings
from fleuve.contracts import ContinuingEngine, RolloutError, WorkerLostError
from fleuve.launch.engines import EngineProcesses
from fleuve.launch.placement import Place
from fleuve.rollout.vllm import VllmEngine
from fleuve.types import GenerationRequest, SamplingParams, WeightFile

SWAP = ["/start_weight_update", "/update_weights", "/finish_weight_update"]


def client(server: BadServer, timeout: float = 5.0, **options: object) -> VllmEngine:
    return VllmEngine("worker-0", server.url, timeout, timeout, **options)  # type: ignore[arg-type]


def ask(name: str = "a", new: int = 3) -> GenerationRequest:
    return GenerationRequest(request_id=name, input_ids=[4], sampling=SamplingParams(max_new_tokens=new))


def file(version: int) -> WeightFile:
    return WeightFile(version=version, path=f"/w/{version}", bytes=1, checksum="crc32:0")


def calls(server: BadServer) -> list[str]:
    """What concerns updates, in order."""
    return [path for path in server.said if path in (*SWAP, "/pause", "/resume", "/collective_rpc")]


# --- the first look -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "handler", "why"),
    [
        ("/collective_rpc", fails(404, "Not Found"), "VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", fails(500, "no attribute 'fleuve_state'"), "--worker-extension-cls"),
        ("/collective_rpc", says({"results": [{"version": 3, "whole": False}]}), "failed half-way"),
        ("/collective_rpc", says([1]), "--worker-extension-cls"),
        ("/inference/v1/generate", fails(404, "Not Found"), "--enable-scale-out"),
        (
            "/inference/v1/generate",
            says({"choices": [{"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1.5}]}}]}),
            "--logprobs-mode processed_logprobs",
        ),
        ("/inference/v1/generate", says({"choices": []}), "cannot be read"),
    ],
    ids=["no dev mode", "no extension", "torn weights", "nonsense", "no tokens in", "raw logprobs", "no token"],
)
async def test_a_server_that_cannot_be_a_worker_is_told_what_it_lacks(path, handler, why) -> None:
    async with speaking_badly() as server:
        server.instead[path] = handler
        with pytest.raises(RolloutError, match=why) as error:
            async with client(server):
                pass
        assert str(error.value).startswith("worker-0: ")
        assert "\n" not in str(error.value)


async def test_of_a_web_page_no_more_is_told_than_its_status() -> None:
    async with speaking_badly() as server:
        server.instead["/collective_rpc"] = shows_a_page
        with pytest.raises(RolloutError, match=r"is no vLLM server .*: a first look failed: status 404$"):
            async with client(server):
                pass


async def test_a_server_without_labels_is_read_by_pieces() -> None:
    async with speaking_badly() as server:
        server.instead["/weight_info"] = fails(404, "Not Found")
        async with client(server) as engine:
            assert (await engine.generate(ask())).versions == [0, 0, 0]
            assert await engine.health() == 0
            with pytest.raises(RolloutError, match="keep"):
                await engine.update_weights(file(1), "keep")
        with pytest.raises(RolloutError, match="pieces"):
            async with client(server, versions="spans"):
                pass


async def test_nobody_there_is_a_lost_worker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(WorkerLostError, match="worker-0"):
        async with VllmEngine("worker-0", url, 5.0, 5.0):
            pass


# --- the same, of `rollout.urls` --------------------------------------------------------------------------------------


async def meet(url: str, tmp_path: Path) -> None:
    """As a run does at its start."""
    settings = Settings.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": "builtin:small"},
            "data": {"train": "procedural:chain"},
            "rollout": {"engine": "vllm", "urls": [url], "workers": 1},
        }
    )
    engines = EngineProcesses(settings, tmp_path, tmp_path, [Place(cpus=None, threads=1)])
    await engines.open("worker-0")
    await engines.close()


@pytest.mark.parametrize(
    ("shown", "why"),
    [(None, "which has to be in FLEUVE_ROLLOUT_TOKEN "), ("f" * 32, "which is not the one in FLEUVE_ROLLOUT_TOKEN ")],
    ids=["no token", "another token"],
)
async def test_a_token_that_is_not_the_server_s_is_all_that_is_found_wrong(tmp_path, monkeypatch, shown, why) -> None:
    monkeypatch.delenv("FLEUVE_ROLLOUT_TOKEN", raising=False)
    monkeypatch.delenv("FLEUVE_ROLLOUT_TOKEN_FILE", raising=False)
    if shown is not None:
        monkeypatch.setenv("FLEUVE_ROLLOUT_TOKEN", shown)
    async with speaking_badly() as server:
        server.instead["/collective_rpc"] = wants_a_token
        with pytest.raises(RolloutError, match=f"^worker-0: {server.url} wants its token .*{why}") as error:
            await meet(server.url, tmp_path)
        assert "worker-extension-cls" not in str(error.value)
        assert "\n" not in str(error.value)
        del server.instead["/collective_rpc"]
        await meet(server.url, tmp_path)  # the token was all


async def test_where_nobody_listens_the_setting_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(
        WorkerLostError, match=f"is a vLLM server running at {re.escape(url)}, which rollout.urls names"
    ):
        await meet(url, tmp_path)


# --- answers --------------------------------------------------------------------------------------------------------


async def test_an_answer_comes_with_its_versions() -> None:
    async with speaking_badly() as server, client(server) as engine:
        assert isinstance(engine, ContinuingEngine)
        server.label = "4"
        answer = await engine.generate(ask())
        assert (answer.output_ids, answer.logprobs, answer.versions) == ([5, 5, 5], [-0.5] * 3, [4, 4, 4])
        assert (answer.request_id, answer.finish_reason) == ("a", "length")


async def test_a_stream_that_breaks_off_is_a_lost_worker() -> None:
    async with speaking_badly() as server, client(server) as engine:
        server.breaks_off = True
        with pytest.raises(WorkerLostError, match="request a"):
            await engine.generate(ask())


async def test_a_refusal_is_told_in_the_server_s_words() -> None:
    async with speaking_badly() as server, client(server) as engine:
        server.instead["/inference/v1/generate"] = fails(400, "Token id 99 is out of vocabulary")
        with pytest.raises(RolloutError, match="request a failed: Token id 99") as error:
            await engine.generate(ask())
        assert not isinstance(error.value, WorkerLostError)


async def test_an_answer_that_does_not_come_is_given_up_in_time() -> None:
    async with speaking_badly() as server, client(server, timeout=0.5) as engine:
        server.instead["/inference/v1/generate"] = hangs
        with pytest.raises(RolloutError, match=r"no answer to request a within 0\.5 s"):
            await engine.generate(ask())
        assert (await engine.progress({"a": 0})) == []  # it is not in flight any more


async def test_versions_that_do_not_cover_the_answer_are_no_answer() -> None:
    async with speaking_badly() as server, client(server) as engine:
        server.label = "another run's"
        with pytest.raises(RolloutError, match="no policy version"):
            await engine.generate(ask())


async def test_metrics_that_lack_what_must_be_there_are_an_error() -> None:
    async with speaking_badly() as server, client(server) as engine:
        with pytest.raises(RolloutError, match="tokens_generated"):
            await engine.metrics()


# --- updates --------------------------------------------------------------------------------------------------------


async def test_an_update_is_prepared_then_paused_swapped_and_resumed() -> None:
    async with speaking_badly() as server, client(server) as engine:
        server.said.clear()
        done = await engine.update_weights(file(3), "recompute")
        assert (done.version, done.interrupted) == (3, 0)
        assert calls(server) == ["/collective_rpc", "/pause", *SWAP, "/resume"]
        assert await engine.health() == 3


async def test_weights_that_are_refused_change_nothing_and_pause_nothing() -> None:
    async with speaking_badly() as server, client(server) as engine:
        server.said.clear()
        server.instead["/collective_rpc"] = fails(500, "checksum crc32:1, published was crc32:0")
        with pytest.raises(RolloutError, match="checksum"):
            await engine.update_weights(file(3), "recompute")
        assert calls(server) == ["/collective_rpc"]
        assert await engine.health() == 0
        assert (await engine.generate(ask())).versions == [0, 0, 0]


@pytest.mark.parametrize("broken", ["/pause", *SWAP, "/resume"])
async def test_an_update_that_fails_half_way_leaves_the_server_paused_and_is_known(broken: str) -> None:
    async with speaking_badly() as server, client(server) as engine:
        server.pause, server.tokens = 0.05, 100
        answering = asyncio.create_task(engine.generate(ask()))
        while not sum(len(part.output_ids) for part in await engine.progress({"a": 0})):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.said.clear()
        server.instead[broken] = fails(500, "out of memory")
        with pytest.raises(RolloutError, match="out of memory"):
            await engine.update_weights(file(3), "recompute")
        assert calls(server)[-1] == broken, "nothing has resumed it"
        for what in (answering, engine.generate(ask("b")), engine.health(), engine.update_weights(file(4), "keep")):
            with pytest.raises(RolloutError, match="half-way"):
                await asyncio.wait_for(what, 2.0)
        await engine.resume()
        assert calls(server)[-1] == broken, "not even if it is asked to"


async def test_an_update_that_hangs_ends_in_time_with_the_server_paused() -> None:
    async with speaking_badly() as server, client(server, timeout=0.5) as engine:
        server.instead["/update_weights"] = hangs
        with pytest.raises(RolloutError, match="the update to version 3 within"):
            await engine.update_weights(file(3), "recompute")
        assert calls(server)[-1] == "/update_weights"


async def test_an_update_goes_on_without_the_caller_and_a_second_one_joins_it() -> None:
    async with speaking_badly() as server, client(server) as engine:
        server.said.clear()
        first = asyncio.create_task(engine.update_weights(file(3), "recompute"))
        await asyncio.sleep(0.01)
        first.cancel()
        assert (await engine.update_weights(file(3), "recompute")).version == 3
        assert calls(server).count("/update_weights") == 1
        assert (await engine.update_weights(file(2), "recompute")).version == 3  # older: acknowledged
        assert calls(server).count("/update_weights") == 1


async def test_the_first_update_of_a_client_is_carried_out_whatever_the_server_has() -> None:
    """It may have another run's weights, of a higher version."""
    async with speaking_badly() as server:
        server.label = "7"
        server.instead["/collective_rpc"] = says({"results": [{"version": 7, "whole": True}]})
        async with client(server) as engine:
            assert await engine.health() == 7
            assert (await engine.update_weights(file(0), "recompute")).version == 0
            assert "/update_weights" in server.said
            assert await engine.health() == 0


async def test_weights_that_were_changed_behind_the_client_s_back_are_found_by_a_probe() -> None:
    async with speaking_badly() as server, client(server) as engine:
        await engine.update_weights(file(3), "recompute")
        server.label = "default"  # it was started anew
        assert await engine.health() == 0


async def test_requests_wait_for_an_update_and_are_sent_after_it() -> None:
    async with speaking_badly() as server, client(server) as engine:
        updating = asyncio.create_task(engine.update_weights(file(3), "recompute"))
        while "/pause" not in server.said:  # noqa: ASYNC110 (it is another side's state)
            await asyncio.sleep(0.001)
        answer = await engine.generate(ask())
        assert updating.done()
        assert answer.versions == [3, 3, 3]
        assert server.said.index("/resume", server.said.index("/pause")) < len(server.said) - 1


async def test_a_pause_outlasts_an_update_and_a_resume_during_one_waits_for_it() -> None:
    """Pitfall 2."""
    async with speaking_badly() as server, client(server) as engine:
        await engine.pause()
        server.said.clear()
        await engine.update_weights(file(3), "recompute")
        assert "/resume" not in server.said
        updating = asyncio.create_task(engine.update_weights(file(4), "recompute"))
        while "/pause" not in server.said[server.said.index("/finish_weight_update") :]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.resume()
        await updating
        assert calls(server)[-5:] == ["/pause", *SWAP, "/resume"]
