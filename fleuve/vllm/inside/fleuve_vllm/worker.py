"""What a vLLM worker can do more: take up weights that Fleuve's trainer has published.

For `--worker-extension-cls fleuve_vllm.worker.FleuveWorker`; importing it registers the weight transfer "fleuve" for
`--weight-transfer-config '{"backend": "fleuve"}'`.
"""

from __future__ import annotations

import json
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from fleuve_vllm.transfer import FileTransfer

BACKEND = "fleuve"

if BACKEND not in WeightTransferEngineFactory._registry:  # a process may import this under two names
    WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)


class FleuveWorker:
    """Mixed into vLLM's worker class. The methods are called by `POST /collective_rpc`, with strings."""

    weight_transfer_engine: Any
    rank: int

    def fleuve_prepare(self, weights: str) -> dict[str, Any]:
        """Read and verify the weights that the JSON of a `WeightFile` names, and hold them for the update that follows.
        The model is not touched."""
        return {"bytes": self.weight_transfer_engine.prepare(json.loads(weights))}

    def fleuve_receive(self, weights: str, invitation: str) -> None:
        """Begin to do the same with weights that come by broadcast, from where the JSON of an `Invitation` says; the
        engine goes on meanwhile."""
        self.weight_transfer_engine.receive(json.loads(weights), json.loads(invitation), self.rank)

    def fleuve_received(self) -> dict[str, Any] | None:
        """What `fleuve_prepare` says, once they are there; None before."""
        size = self.weight_transfer_engine.received()
        return None if size is None else {"bytes": size}

    def fleuve_state(self) -> dict[str, Any]:
        """The version that was loaded last (None: what the server was started with), and whether the model is whole:
        it is not after an update that failed half-way."""
        engine = self.weight_transfer_engine
        return {"version": engine.version, "whole": engine.whole, "broadcasts": True}
