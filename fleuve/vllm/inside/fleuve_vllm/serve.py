"""vLLM's server as one of Fleuve's processes: `python -m fleuve_vllm.serve ARGUMENTS`, those of `vllm serve`.

Like `vllm.entrypoints.openai.api_server`, and it ends with its parent, listens on the socket that it was given, has its
token guarded, and has the options on that a rollout worker needs, unless they are given. Started by hand, without a
parent, it binds `--host` and `--port` itself.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from fleuve.launch import child
from fleuve.wire.guard import is_loopback
from fleuve_vllm import guard


def _end_with_parent() -> None:
    """vLLM's engine and its workers are processes of their own, whose loops would go on if the server were killed."""
    child.end_with_parent(signal.SIGKILL)


if __name__ == "__mp_main__":  # in a process that `multiprocessing` has spawned: it imports this first
    _end_with_parent()
os.register_at_fork(after_in_child=_end_with_parent)


GUARD = "fleuve_vllm.guard.Guard"


def _refuse_strangers(args: Any) -> None:
    """Whoever reaches a server without a token can have its workers called; vLLM's own default is every address."""
    if args.host is None:
        args.host = "127.0.0.1"
    if not guard.has_token() and not is_loopback(args.host):
        sys.exit(
            f"error: listening on {args.host} lets other machines in, which needs a token: set {guard.TOKEN_VARIABLE}; "
            "or listen on 127.0.0.1"
        )


def main() -> None:
    child.adopt(on_orphaned=lambda: None)  # its children do not adopt: its group ends with it
    guard.take_token()
    os.environ.setdefault("VLLM_SERVER_DEV_MODE", "1")  # pausing, and changing weights
    import uvloop  # after adopt: importing vLLM takes long
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.entrypoints.launchers.api_server.entry import run_server, run_server_worker
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(description="vLLM, as a process of Fleuve's"))
    parser.set_defaults(
        enable_scale_out=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="fleuve_vllm.worker.FleuveWorker",
        weight_transfer_config=WeightTransferConfig(backend="fleuve"),
    )
    args = parser.parse_args()
    if GUARD not in args.middleware:
        args.middleware = [*args.middleware, GUARD]
    validate_parsed_serve_args(args)
    _refuse_strangers(args)
    if not child.has_listening_socket():
        uvloop.run(run_server(args))
        return
    sock = child.listening_socket()
    args.host, args.port = sock.getsockname()[:2]
    uvloop.run(run_server_worker(f"http://{args.host}:{args.port}", sock, args))


if __name__ == "__main__":
    main()
