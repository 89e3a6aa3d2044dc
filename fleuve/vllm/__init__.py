"""vLLM as a rollout engine: how its servers are started, and what of Fleuve runs inside them.

`options.py` makes the command line and `__main__.py` becomes the server; both need nothing of vLLM. The package in
`inside/` is imported by vLLM's own Python, from its own environment, and by nobody else: it adds reading published
weights, the socket and the lifeline of Fleuve's processes, and the token. `rollout/vllm.py` is the client.
"""

from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
"""What a vLLM server must have in its PYTHONPATH."""
