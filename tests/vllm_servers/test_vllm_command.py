"""The settings of a run as vLLM's command line and environment."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from fleuve.config.settings import RolloutSettings
from fleuve.launch.elsewhere import Elsewhere
from fleuve.launch.kinds import KINDS
from fleuve.vllm import INSIDE
from fleuve.vllm.options import VllmOptions, command, context_of, environment, kv_bytes


def options_of(model: Path | str = "builtin:small", threads: int = 1, weights: Path | None = None, **rollout: object):
    settings = RolloutSettings.model_validate({"engine": "vllm", **rollout})
    made = KINDS["vllm"].options("worker-0", str(model), settings, threads, weights)
    return msgspec.json.decode(json.dumps(dict(made)), type=VllmOptions)


def flags(line: list[str]) -> dict[str, str]:
    """Each `--flag` with what follows it."""
    pairs = zip(line, [*line[1:], ""], strict=True)
    return {flag: "" if value.startswith("--") else value for flag, value in pairs if flag.startswith("--")}


def test_the_options_that_make_answers_true_are_always_there() -> None:
    found = flags(command(options_of(device="cpu"), "127.0.0.1", 8000))
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert found["--worker-extension-cls"] == "fleuve_vllm.worker.FleuveWorker"
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "fleuve"}
    assert found["--middleware"] == "fleuve_vllm.guard.Guard"
    assert {"--enable-scale-out", "--enforce-eager"} <= found.keys()


def test_the_kv_cache_of_a_cpu_holds_what_the_settings_say() -> None:
    found = flags(command(options_of(device="cpu", kv_cache_tokens=16384), "127.0.0.1", 8000))
    per_token = 2 * 4 * 2 * 64 * 4  # keys and values, layers, heads, width, bytes: of builtin:small
    assert int(found["--kv-cache-memory-bytes"]) == (16384 + 128) * per_token
    assert found["--max-model-len"] == "1024"


def test_a_sequence_is_no_longer_than_a_cpu_s_cache() -> None:
    options = options_of(device="cpu", kv_cache_tokens=600)
    assert context_of(options) == 600
    assert int(flags(command(options, "", 0))["--kv-cache-memory-bytes"]) >= 600 * 4096
    assert context_of(options_of(device="cpu", vllm={"context": 200})) == 200


def test_a_gpu_compiles_and_shares_out_its_memory_itself() -> None:
    vllm = {"gpu_memory_utilization": 0.7, "tensor_parallel": 2, "arguments": ["--quantization", "fp8"]}
    line = command(options_of(device="cuda", vllm=vllm), "127.0.0.1", 8000)
    found = flags(line)
    assert (found["--gpu-memory-utilization"], found["--tensor-parallel-size"]) == ("0.7", "2")
    assert "--enforce-eager" not in found
    assert "--kv-cache-memory-bytes" not in found
    assert line[-2:] == ["--quantization", "fp8"]


def test_compiling_is_the_user_s_to_choose() -> None:
    assert "--enforce-eager" not in command(options_of(device="cpu", vllm={"eager": "off"}), "", 0)
    assert "--enforce-eager" in command(options_of(device="cuda", vllm={"eager": "on"}), "", 0)


def test_nothing_of_fleuve_s_own_python_is_in_the_server_s_path(tmp_path) -> None:
    inherited = {"PYTHONPATH": "/elsewhere", "VIRTUAL_ENV": "/venv", "HOME": "/home", "FLEUVE_CPUS": "2,3"}
    found = environment(options_of(device="cpu", weights=tmp_path), inherited)
    assert found["PYTHONPATH"] == str(INSIDE)
    assert "VIRTUAL_ENV" not in found
    assert (found["HOME"], found["FLEUVE_VLLM_WEIGHTS"]) == ("/home", str(tmp_path))
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "2"
    assert environment(options_of(device="cpu"), {})["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(options_of(device="cuda"), inherited)


def test_the_only_package_in_the_server_s_path_is_fleuve_s_extension() -> None:
    assert [entry.name for entry in INSIDE.iterdir() if entry.name != "__pycache__"] == ["fleuve_vllm"]


def test_bytes_of_a_token_are_known_without_the_newer_fields_of_a_config() -> None:
    assert kv_bytes({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}, "bfloat16") == 2 * 3 * 64 * 2


@pytest.mark.parametrize(
    ("rollout", "why"),
    [
        ({"urls": ["http://a:1"]}, 'rollout.engine = "vllm"'),
        ({"engine": "vllm", "urls": ["http://a:1", "http://b:2"]}, "rollout.workers = 2"),
        ({"engine": "vllm", "interrupt": "keep", "vllm": {"versions": "pieces"}}, "recompute"),
        ({"engine": "vllm", "urls": ["a:1"]}, "pattern"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused(rollout: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RolloutSettings.model_validate(rollout)


async def test_a_server_of_the_user_s_is_neither_started_nor_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLEUVE_ROLLOUT_TOKEN", "secret")
    process = Elsewhere("worker-0", "http://a:1", tmp_path)
    process.kill()
    assert (await process.stop(), process.alive, process.token) == (0, True, "secret")
