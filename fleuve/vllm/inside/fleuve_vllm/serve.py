"""vLLM's server as one of Fleuve's processes: `python -m fleuve_vllm.serve ARGUMENTS`, those of `vllm serve`.

Like `vllm.entrypoints.openai.api_server`, and it ends with its parent, listens on the socket that it was given, and
has its token guarded. Started by hand, without a parent, it binds `--host` and `--port` itself.
"""

from __future__ import annotations

import os
import signal

from fleuve.launch import child
from fleuve_vllm import guard


def _end_with_parent() -> None:
    """vLLM's engine and its workers are processes of their own, whose loops would go on if the server were killed."""
    child.end_with_parent(signal.SIGKILL)


if __name__ == "__mp_main__":  # in a process that `multiprocessing` has spawned: it imports this first
    _end_with_parent()
os.register_at_fork(after_in_child=_end_with_parent)


def main() -> None:
    child.adopt(on_orphaned=lambda: None)  # its children do not adopt: its group ends with it
    guard.take_token()
    import uvloop  # after adopt: importing vLLM takes long
    from vllm.entrypoints.launchers.api_server.entry import run_server, run_server_worker
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser(description="vLLM, as a process of Fleuve's")).parse_args()
    validate_parsed_serve_args(args)
    if not child.has_listening_socket():
        uvloop.run(run_server(args))
        return
    sock = child.listening_socket()
    args.host, args.port = sock.getsockname()[:2]
    uvloop.run(run_server_worker(f"http://{args.host}:{args.port}", sock, args))


if __name__ == "__main__":
    main()
