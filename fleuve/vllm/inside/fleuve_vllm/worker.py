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

    def fleuve_prepare(self, weights: str) -> dict[str, Any]:
        """Read and verify the weights that the JSON of a `WeightFile` names, and hold them for the update that follows.
        The model is not touched."""
        return {"bytes": self.weight_transfer_engine.prepare(json.loads(weights))}

    def fleuve_state(self) -> dict[str, Any]:
        """The version that was loaded last (None: what the server was started with), and whether the model is whole:
        it is not after an update that failed half-way."""
        engine = self.weight_transfer_engine
        return {"version": engine.version, "whole": engine.whole}
